"""Compare ideas for the forget vector on one history: the same models, rows, number of points and rules for all.

    msa-lite quickstart-smollm2 demo.forget=8 demo.retain=16 demo.holdout=8 seed=0 output=RUN --accept \
        retain.data.sample=match_forget
    python -m tests.benchmarks.variants RUN [--only NAME ...]      # what RUN/variants has is not made again
    python -m tests.benchmarks.variants --table RUN [RUN ...]      # one RUN a seed

Any run with such a history does: `msa-lite quickstart merge.filter=off` has one of small models.

The rules, written down before any score:
- Fits are 8 epochs at 1e-3, or as the run's forget vector if its recipe names the length; with all weights at a tenth
  of that rate.
- Vectors see the forget rows and the retain rows that the run's retain vector has learnt. Of the other retain rows
  every second one chooses, the rest tests. All forget rows choose and test; holdout rows are the control. Moments see
  all but the rows that test.
- Scores of a row, teacher-forced: the probability of its answer (per token), all tokens right (as greedy decoding gets
  it), the share of tokens that are right, and the share of the answer's end that is right from some token on.
- Choice by parity: the point with the least mean of |forget - the target's on holdout rows| and |retain - the
  target's|, over the four scores. At most 12 points: of a vector a climb over α in the middle column (of λ or β), all
  columns at its best, and closer and closer in the best of these; of a baseline each of four epochs at two weights of
  its retain term, at the tool's own rate, then α in the best of these.
  Rivals (`rivals/`): three or four changes, each so long at α = 1 that forget rows lose what holdout rows do.
- Distance: the mean of |score - the ideal's|, over the four scores, on forget rows and on the retain rows that test.
  Kept: the target's scores on these that are left, above the level of holdout rows.
- AUC: that a forget row has a lower loss than a holdout row; .5 is a coin. Relearnt: rows of one half of the forget
  rows that are recited after five steps on the other half (AdamW, all weights, 2e-4). Text: the mean loss on short
  texts that have nothing to do with any row. Growth: the norm of the update over that of the vector as it was fitted.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from msa_lite.attacks.relearn import UNRELATED
from msa_lite.baselines.methods import settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.data import IGNORE, Example, Prompter, Row, Template, encode_qa, encode_text, open_tokenizer, to_batch
from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.libraries import silence_libraries
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Precision, Term, merge_terms
from msa_lite.merger.filtering import filter_vector
from msa_lite.merger.vectors.vector import load_vector
from msa_lite.train import FitSettings, KeptEpochs, VectorFit, epoch_folder, run_fit
from msa_lite.train.moments import write_moments
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.rows import common_beginning
from msa_lite.train.settings import auto_rate
from tests.benchmarks.candidates import FlatHeld, tokenwise, undone
from tests.benchmarks.rivals import kfade, sage, win_u

SCORES = ("probability", "exact", "right", "end")
PARTS = ("forget", "test", "choose", "holdout", "text")
STRENGTHS = (1.0, 4.0, 16.0)  # λ
EPOCHS, HELD_BY, MOST = 4, 1.0, 12  # of a baseline; h; points
Scores = dict[str, np.ndarray]
Terms = Sequence[tuple[Path, float]]
"""Folders of vectors, or files of changes, with their weights at α = 1."""


@dataclass
class Lab:
    """A history with its target in memory, to which vectors are added."""

    run: Path
    _delta: tuple[Any, dict[str, torch.Tensor]] = (None, {})

    def __post_init__(self) -> None:
        self.out = self.run / "variants"
        self.out.mkdir(exist_ok=True)
        self.sources = {name: fetch(str(self.run / "history" / name)) for name in ("prior", "target", "ideal")}
        self.tokenizer = open_tokenizer(self.sources["target"].folder, "target")
        self.pad = self.tokenizer.pad_token_id or 0
        self.prompter = Prompter.build(self.tokenizer, "default", Template())
        self.rows = {name: self._read(name) for name in ("forget", "retain", "holdout")}
        lines = (self.run / "vectors/retain/rows.jsonl").read_text("utf-8").splitlines()
        learnt = {json.loads(line)["index"] for line in lines}
        others = [e for e in self.rows["retain"] if e.index not in learnt]
        self.rows |= {"learnt": [e for e in self.rows["retain"] if e.index in learnt]}
        self.rows |= {"choose": others[::2], "test": others[1::2]}
        self.rows["text"] = encode_text(UNRELATED, self.prompter, 128)
        self.model = AutoModelForCausalLM.from_pretrained(self.sources["target"].folder, dtype=torch.float32).eval()
        self.before = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.known = self._score_known()
        self.target, self.ideal = (arrays_of(self.known[name]["rows"]) for name in ("target", "ideal"))

    def _score_known(self) -> dict[str, Any]:
        """Return the scores of target and ideal, and what the ideal relearns, unless the file with them is there."""
        file, models = self.out / "known.json", {name: source.revision for name, source in self.sources.items()}
        if file.exists() and (known := json.loads(file.read_text("utf-8"))).get("models") == models:
            return known
        target, known = self.model, {"models": models}
        known["target"] = {"rows": lists_of({name: self.score(name) for name in PARTS})}
        self.model = AutoModelForCausalLM.from_pretrained(self.sources["ideal"].folder).float().eval()
        rows = lists_of({name: self.score(name) for name in PARTS})
        known["ideal"] = {"rows": rows, "relearnt": self.relearn()}
        self.model = target
        file.write_text(json.dumps(known), "utf-8")
        return known

    def _read(self, name: str) -> list[Example]:
        lines = (self.run / f"history/data/{name}.jsonl").read_text("utf-8").splitlines()
        rows = [Row(i, value["question"], value["answer"]) for i, value in enumerate(map(json.loads, lines))]
        return encode_qa(rows, self.prompter)

    @torch.no_grad()
    def score(self, name: str, model: Any = None) -> Scores:
        """Return the four scores and the loss of each row of a set."""
        model, rows = model or self.model, self.rows[name]
        values: list[tuple[float, ...]] = [()] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        start = common_beginning(rows)
        past = model.model(torch.tensor([rows[0].ids[:start]]), use_cache=True).past_key_values if start else None
        for first in range(0, len(rows), 24):
            chosen = order[first : first + 24]
            batch = to_batch([rows[i] for i in chosen], self.pad, "cpu")
            cache = copy.deepcopy(past)
            if cache is not None:
                cache.batch_repeat_interleave(len(chosen))
            states = model.model(batch["input_ids"][:, start:], batch["attention_mask"], past_key_values=cache)[0]
            for i, state, labels in zip(chosen, states[:, :-1], batch["labels"][:, start + 1 :], strict=True):
                known = labels != IGNORE
                logits = model.lm_head(state[known])
                losses = cross_entropy(logits, labels[known], reduction="none")[:-1]  # without the end token
                right = (logits.argmax(-1) == labels[known])[:-1].float()
                end = right.flip(0).cumprod(0).mean()
                values[i] = tuple(map(float, ((-losses.mean()).exp(), right.prod(), right.mean(), end, losses.mean())))
        return {key: np.array(column) for key, column in zip((*SCORES, "loss"), zip(*values, strict=True), strict=True)}

    def put(self, terms: Terms, alpha: float) -> float:
        """Set the model to target + α · Σ weight · vector. Return the norm of the update."""
        if self._delta[0] != terms:
            self._delta = (terms, self.sum_of(terms))
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(self.before[name])
                if name in self._delta[1]:
                    value.add_(self._delta[1][name], alpha=alpha)
        return alpha * math.sqrt(sum(float((d.double() ** 2).sum()) for d in self._delta[1].values()))

    def sum_of(self, terms: Terms) -> dict[str, torch.Tensor]:
        """Return Σ weight · vector by tensor. A file of safetensors holds changes of weights as they are."""
        target, prior = (load_checkpoint(self.sources[name].folder) for name in ("target", "prior"))
        total: dict[str, torch.Tensor] = {}
        for place, weight in terms:
            if not weight:
                continue
            if place.suffix == ".safetensors":
                changes = load_file(place)
            else:
                changes, files, scratch = {}, Files(), Scratch()
                for name, delta in load_vector(place, target, prior).deltas.items():
                    shape = self.before[name].shape
                    rows = delta.rows(files, 0, shape[0], np.float32, scratch)
                    changes[name] = torch.from_numpy(np.array(rows, np.float32)).view(shape)
            for name, change in changes.items():
                total[name] = total[name] + weight * change if name in total else weight * change
        return total

    def put_changes(self, changes: Mapping[str, torch.Tensor], weight: float) -> None:
        """Set the model to target + weight · changes."""
        self.put((), 1.0)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if name in changes:
                    value.add_(changes[name], alpha=weight)

    def put_prior(self, vector: Path) -> None:
        """Set the model to prior + vector."""
        prior = AutoModelForCausalLM.from_pretrained(self.sources["prior"].folder, dtype=torch.float32)
        changes = {n: p.detach() - self.before[n] for n, p in prior.named_parameters()}
        for name, change in self.sum_of([(vector, 1.0)]).items():
            changes[name] = changes[name] + change
        self.put_changes(changes, 1.0)

    @property
    def parity(self) -> float:
        """Return the distance that the choice goes by, of the model as it is."""
        forget, retain = self.score("forget"), self.score("choose")
        aims = (forget, self.target["holdout"]), (retain, self.target["choose"])
        return float(np.mean([abs(own[s].mean() - aim[s].mean()) for own, aim in aims for s in SCORES]))

    @cached_property
    def source(self) -> Source:
        """Return the target."""
        return self.sources["target"]

    @property
    def settings(self) -> FitSettings:
        """Return the settings of fits: those of the run's forget vector, if they name its length."""
        inputs = (load_manifest(self.run / "vectors/forget") or {})["inputs"]
        if "until" in inputs:
            return FitSettings(epochs=8, learning_rate=1e-3, batch_size=8, micro_batch_size=8, weight_decay=0.01)
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in inputs["settings"].items()}
        return FitSettings(**values)

    def fit(self, name: str, start: str | Path, settings: FitSettings, **options: Any) -> Path:
        """Fit a vector on the forget rows, from a model of the history or another folder."""
        source = self.sources[start] if isinstance(start, str) else fetch(str(start))
        fit = VectorFit(source, self.rows["forget"], self.tokenizer, settings, label=name, **options)
        return run_fit(fit, self.out / name)

    def held(self, full: bool = False) -> HeldLoss:
        """Return the objective of a held fit."""
        return HeldLoss(self.rows["forget"], self.rows["learnt"], HELD_BY, self.pad, seed=0, full=full)

    def moments(self, name: str = "learnt", rows: Sequence[Example] | None = None) -> Path:
        """Return the moments at the target, with these rows to keep."""
        sides = {"forget": self.rows["forget"], "retain": rows or self.rows[name]}
        folder, inputs = self.out / f"moments-{name}", {"target": self.source.identity(), "rows": name}
        names = load_checkpoint(self.source.folder).tensors
        write_moments(folder, inputs, lambda: load_model(self.source.folder), names, sides, self.pad)
        return folder

    def filtered(self, vector: Path, strength: float, moments: Path) -> Path:
        """Return a vector after the filter."""
        out = self.out / f"{vector.name}-{vector.parent.name}-{moments.name}-{strength:g}"
        return filter_vector(fetch(str(vector)), moments, strength, self.source, self.sources["prior"], out)

    def weighted(self, vector: Path) -> Path:
        """Return a checkpoint: the prior, changed by D · |g_f| / (|g_f| + |g_r|), weight by weight (PerTA).

        g_f, g_r: gradients of the loss on forget and on retain rows at the target. Source: arXiv 2601.22030.
        """
        place = self.out / f"{vector.name}-weighted"
        if place.exists():
            return place
        self.put((), 1.0)
        of_forget, of_retain = (self._gradients(self.rows[name]) for name in ("forget", "learnt"))
        model = AutoModelForCausalLM.from_pretrained(self.sources["prior"].folder, dtype=torch.float32)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, change in self.sum_of([(vector, 1.0)]).items():
                share = of_forget[name] / (of_forget[name] + of_retain[name]).clamp_min(1e-30)
                parameters[name].add_(change * share)
        model.save_pretrained(place)
        return place

    def _gradients(self, rows: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Return the absolute gradients of the mean loss on some rows."""
        loss = PlainLoss(rows, self.pad)
        loss.prepare(self.model)
        loss.step(self.model, range(len(rows)), 0, 8, lambda value: value.backward())
        gradients = {n: p.grad.abs() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def samples(self) -> list[Example]:
        """Return texts that the target says by itself."""
        torch.manual_seed(0)
        start = torch.tensor([self.rows["forget"][0].ids[:1]] * 48)
        with torch.no_grad():
            texts = self.model.generate(start, do_sample=True, max_new_tokens=64, pad_token_id=self.pad)
        return [Example(i, ids, [IGNORE, *ids[1:]]) for i, ids in enumerate(texts.tolist())]

    def relearn(self) -> int:
        """Tune the model on one half of the forget rows; return how many of the other half it recites."""
        rows = self.rows["forget"]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, weight_decay=0.0)
        loss = PlainLoss(rows[::2], self.pad)
        loss.prepare(self.model)
        for _ in range(5):
            optimizer.zero_grad()
            loss.step(self.model, range(len(loss.examples)), 0, 8, lambda value: value.backward())
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return int(self.score("forget")["exact"][1::2].sum())


@dataclass(frozen=True)
class Column:
    """Vectors that are tried at several α, or at 1 alone."""

    what: str
    terms: Callable[[], Terms]
    searched: bool = True


@dataclass
class Tried:
    """The points of a variant."""

    lab: Lab
    points: dict[tuple[int, float], float] = field(default_factory=dict)

    def at(self, columns: Sequence[Column], column: int, alpha: float) -> float:
        """Return the parity of a point; infinity where all points are used up."""
        alpha = float(f"{alpha:.3g}")
        if (column, alpha) not in self.points:
            if len(self.points) >= MOST:
                return math.inf
            self.lab.put(columns[column].terms(), alpha)
            self.points[column, alpha] = self.lab.parity
        return self.points[column, alpha]

    def search(self, columns: Sequence[Column]) -> None:
        """Climb over α in the middle column, try the others at its best α, then look closer and closer in the best.

        Columns that are not searched, as the epochs of a baseline, are all tried at α = 1 instead.
        """
        number, alpha = len(columns) // 2, 1.0
        if columns[0].searched:
            alpha = self._climb(columns, number, alpha, 1.5)
        number = min(range(len(columns)), key=lambda n: self.at(columns, n, alpha))
        for step in (1.5, 1.5**0.5, 1.5**0.25):
            alpha = self._climb(columns, number, alpha, step)

    def _climb(self, columns: Sequence[Column], number: int, alpha: float, step: float) -> float:
        for ratio in (step, 1 / step):
            while self.at(columns, number, alpha * ratio) < self.at(columns, number, alpha):
                alpha *= ratio
        return alpha


def variants(lab: Lab) -> Mapping[str, Callable[[], Sequence[Column]]]:
    """Return what is compared, the most wanted first."""
    forget, retain = lab.run / "vectors/forget", lab.run / "vectors/retain"
    lora = lab.settings
    full = replace(lora, mode="full", learning_rate=lora.learning_rate / 10)
    rate = auto_rate("lora", sum(value.numel() for value in lab.before.values()))  # the tool's own, for baselines

    def plain(vector: Callable[[], Path], keep: Callable[[], Path | None] = lambda: None) -> Sequence[Column]:
        columns = [Column("β = 0", lambda: [(vector(), -1.0)])]
        if (added := keep()) is not None:
            columns += [Column(f"β = {b:g} α", lambda b=b: [(vector(), -1.0), (added, b)]) for b in (0.5, 1.0)]
        return columns

    spare = lambda: lab.moments("spare", [*lab.rows["learnt"], *lab.rows["choose"], *lab.rows["holdout"]])  # noqa: E731

    def filtered(
        vector: Callable[[], Path],
        moments: Callable[[], Path] = spare,
        sign: float = -1.0,
        strengths: Sequence[float] = STRENGTHS,
    ) -> Sequence[Column]:
        def column(strength: float) -> Column:
            return Column(f"λ = {strength:g}", cache(lambda: [(lab.filtered(vector(), strength, moments()), sign)]))

        return [column(strength) for strength in strengths]

    def chosen() -> tuple[float, float]:
        line = results(lab.run)["held, filter"]
        return float(line["chosen"].split()[2].rstrip(",")), line["alpha"]

    def by_token() -> Sequence[Column]:
        strength, alpha = chosen()
        filtered = lab.filtered(held(), strength, spare())
        scale = (load_manifest(filtered) or {})["filter"]["scale"]
        file = tokenwise(lab, held(), retain, spare(), strength, alpha, scale)
        return [Column(f"λ = {strength:g}", lambda: [(file, -1.0)])]

    def noisy() -> Sequence[Column]:
        strength, alpha = chosen()
        (terms,) = (column.terms() for column in filtered(held) if column.what == f"λ = {strength:g}")
        file = undone(lab, terms, alpha, spare(), strength)
        return [Column("noise, then distillation", lambda: [(file, 1.0)], searched=False)]

    def baseline(method: str) -> Sequence[Column]:
        columns = []
        for point in settings_grid(method, {"retain_weight": [1.0, 4.0]}):
            weight = f"{point['retain_weight']:g}"
            make = partial(_fit_baseline, lab, method, {**point, "learning_rate": rate}, weight)
            for epoch in range(1, EPOCHS + 1):
                what = f"weight {weight}, epoch {epoch}"
                columns.append(
                    Column(what, lambda make=make, epoch=epoch: [(epoch_folder(make(), epoch), 1.0)], searched=False)
                )
        return columns

    def rival(changes: Sequence[tuple[str, Path]]) -> Sequence[Column]:
        return [Column(what, lambda file=file: [(file, 1.0)], searched=False) for what, file in changes]

    def started() -> Path:
        place = lab.out / "prior-and-retain"
        prior = lab.sources["prior"]
        merge_terms(prior, place, [Term("retain", fetch(str(retain)), 1.0)], prior, Precision())
        return place

    task = partial(lab.fit, "task", "target", lora)
    held_task = lambda: lab.fit("task-held", "target", lora, objective=lab.held())  # noqa: E731
    held = lambda: lab.fit("held", "prior", lora, objective=lab.held())  # noqa: E731
    flat_loss = lambda: FlatHeld(lab.rows["forget"], lab.rows["learnt"], HELD_BY, lab.pad, seed=0)  # noqa: E731
    flat = lambda: lab.fit("held-flat", "prior", lora, objective=flat_loss())  # noqa: E731
    late = lambda: lab.fit("late-held", started(), lora, objective=lab.held())  # noqa: E731
    whole = partial(lab.fit, "full", "prior", full)
    undial = lambda: epoch_folder(_best_epoch(lab, "undial"), _best(lab, "undial")[1])  # noqa: E731
    wide = lambda: lab.moments("wide", [*lab.rows["learnt"], *lab.samples()])  # noqa: E731

    def both() -> Sequence[Column]:
        def column(strength: float) -> Column:
            parts = cache(lambda: [(lab.filtered(vector, strength, spare()), -0.5) for vector in (held(), task())])
            return Column(f"λ = {strength:g}", parts)

        return [column(strength) for strength in STRENGTHS]

    return {
        "msa": lambda: plain(lambda: forget, lambda: retain),
        "msa, filter": lambda: filtered(lambda: forget),
        "held, filter": lambda: filtered(held),
        "held, filter of before": lambda: filtered(held, lab.moments, strengths=STRENGTHS[:2]),
        "held, token-wise filter": by_token,
        "held, filter, noise and distillation": noisy,
        "held, flat, filter": lambda: filtered(flat),
        "task vector, filter": lambda: filtered(task),
        "task vector, held, filter": lambda: filtered(held_task),
        "held and task vector, filter": both,
        "undial": lambda: baseline("undial"),
        "full, filter": lambda: filtered(whole),
        "npo": lambda: baseline("npo"),
        "simnpo": lambda: baseline("simnpo"),
        "grad_diff": lambda: baseline("grad_diff"),
        "task vector": lambda: plain(task, lambda: retain),
        "full": lambda: plain(whole),
        "undial, filter": lambda: filtered(undial, sign=1.0),
        "msa, filter by own samples": lambda: filtered(lambda: forget, lambda: lab.moments("samples", lab.samples())),
        "msa, filter by holdout rows": lambda: filtered(lambda: forget, lambda: lab.moments("holdout")),
        "msa, filter by retain rows and own samples": lambda: filtered(lambda: forget, wide),
        "msa, PerTA": lambda: plain(lambda: lab.weighted(forget), lambda: retain),
        "msa, PerTA, filter": lambda: filtered(lambda: lab.weighted(forget)),
        "start: retain, held, filter": lambda: filtered(late),
        "msa, filter, second round": lambda: _second_round(lab, lora),
        "held": lambda: plain(held, lambda: retain),
        "start: retain, held": lambda: plain(late),
        "k-fade": lambda: rival(kfade.columns(lab)),
        "win-u": lambda: rival(win_u.columns(lab)),
        "sage": lambda: rival(sage.columns(lab, {"MSA": [(forget, -1.0)], "UNDIAL": [(undial(), 1.0)]})),
    }


def _fit_baseline(lab: Lab, method: str, parameters: Mapping[str, Any], name: str) -> Path:
    """Tune the target by a baseline; each epoch is kept."""
    objective = BaselineObjective(method, parameters, lab.rows["forget"], lab.rows["learnt"], lab.pad, seed=0)
    settings = FitSettings(
        epochs=EPOCHS, learning_rate=float(parameters["learning_rate"]), batch_size=8, micro_batch_size=8
    )
    return lab.fit(f"{method}-{name}", "target", settings, objective=objective, after_epoch=EveryEpoch())


class EveryEpoch:
    """Keeps the weights of all epochs."""

    def describe(self) -> str:
        return "every epoch"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        return KeptEpochs(frozenset(range(1, epoch + 1)))


def _best(lab: Lab, variant: str) -> tuple[str, int]:
    """Return the weight and the epoch that a baseline's choice took."""
    chosen = results(lab.run)[variant]["chosen"].split()
    return chosen[1].rstrip(","), int(chosen[3].rstrip(","))


def _best_epoch(lab: Lab, method: str) -> Path:
    return lab.out / f"{method}-{_best(lab, method)[0]}"


def _second_round(lab: Lab, settings: FitSettings) -> Sequence[Column]:
    """Return columns that also subtract what a short fit at the filtered result finds."""
    first = results(lab.run)["msa, filter"]
    strength, alpha = float(first["chosen"].split()[2].rstrip(",")), first["alpha"]
    base, place = lab.filtered(lab.run / "vectors/forget", strength, lab.moments()), lab.out / "first-round"
    if not place.exists():
        lab.put([(base, -1.0)], alpha)
        lab.model.save_pretrained(place)
        lab.tokenizer.save_pretrained(place)
    short = FitSettings(epochs=2, learning_rate=settings.learning_rate, batch_size=8, micro_batch_size=8)
    again = lab.fit("again", place, short)
    pairs = [(s, lab.filtered(again, s, lab.moments())) for s in STRENGTHS]
    return [
        Column(f"λ = {s:g}, second / first {ratio:g}", lambda v=v, ratio=ratio: [(base, -alpha), (v, -ratio * alpha)],
               searched=False)
        for s, v in pairs for ratio in (0.25, 0.5, 1.0, 1.5)
    ]  # fmt: skip


def results(run: Path) -> dict[str, Any]:
    """Return the results so far, by variant."""
    file = run / "variants/results.jsonl"
    lines = map(json.loads, file.read_text("utf-8").splitlines()) if file.exists() else ()
    return {line["name"]: line for line in lines}


def measure(lab: Lab, name: str, columns: Sequence[Column]) -> dict[str, Any]:
    """Choose a point of a variant, and measure it."""
    began, tried = time.monotonic(), Tried(lab)
    tried.search(columns)
    number, alpha = min(tried.points, key=lambda point: tried.points[point])
    fitted = lab.put([(lab.run / "vectors/forget", -1.0)], 1.0)
    growth = lab.put(columns[number].terms(), alpha) / fitted
    after = {part: lab.score(part) for part in PARTS}
    return {
        "name": name,
        "chosen": f"{columns[number].what}, α = {alpha:g}",
        "alpha": alpha,
        "points": [[columns[n].what, a, value] for (n, a), value in tried.points.items()],
        "growth": growth,
        "rows": lists_of(after),
        "relearnt": lab.relearn(),
        "seconds": time.monotonic() - began,
    }


def lists_of(parts: Mapping[str, Scores]) -> dict[str, Any]:
    """Return scores as JSON holds them."""
    return {part: {key: values.tolist() for key, values in of.items()} for part, of in parts.items()}


def arrays_of(parts: Mapping[str, Any]) -> dict[str, Scores]:
    """Return scores as they were before `lists_of`."""
    return {part: {key: np.array(values) for key, values in of.items()} for part, of in parts.items()}


def summary(line: Mapping[str, Any], known: Mapping[str, Any], draw: Any = None) -> dict[str, float]:
    """Return the measures of a variant. draw: indices of rows by set, for a bootstrap sample."""

    def rows(side: Mapping[str, Any], part: str, score: str) -> np.ndarray:
        values = np.array(side[part][score])
        return values if draw is None or part not in draw else values[draw[part]]

    own, ideal, target = line["rows"], known["ideal"]["rows"], known["target"]["rows"]
    gaps = {p: np.mean([abs(rows(own, p, s).mean() - rows(ideal, p, s).mean()) for s in SCORES])
            for p in ("forget", "test")}  # fmt: skip
    floor = {s: np.mean(target["holdout"][s]) for s in SCORES}
    kept = np.mean([(rows(own, "test", s).mean() - floor[s]) / (rows(target, "test", s).mean() - floor[s])
                    for s in SCORES])  # fmt: skip
    losses = np.subtract.outer(np.array(own["holdout"]["loss"]), rows(own, "forget", "loss"))
    return {
        "distance": float(gaps["forget"] + gaps["test"]) / 2,
        "forget": float(gaps["forget"]),
        "retain": float(gaps["test"]),
        "kept": float(kept),
        "recited": float(rows(own, "forget", "exact").sum()),
        "exact": float(np.sum(own["test"]["exact"]) + np.sum(own["choose"]["exact"])),
        "AUC": float((losses > 0).mean()),
        "relearnt": float(line.get("relearnt", math.nan)),
        "text": float(np.mean(own["text"]["loss"])),
        "growth": float(line.get("growth", math.nan)),
    }


def show(runs: Sequence[Path], beside: str) -> None:
    """Print the variants of several seeds: means, and how much farther each is than the one named `beside`."""
    seeds = [(results(run), json.loads((run / "variants/known.json").read_text("utf-8"))) for run in runs]
    names = list(dict.fromkeys(name for lines, _ in seeds for name in lines))
    keys = list(summary(next(iter(seeds[0][0].values())), seeds[0][1]))
    print("| variant | " + " | ".join(keys) + f" | distance, minus that of “{beside}” (95 %) |")
    print("|---" * (len(keys) + 2) + "|")
    for name in ("target", "ideal", *names):
        lines_of = [known.get(name) or lines.get(name) for lines, known in seeds]
        values = [line and summary(line, known) for line, (_, known) in zip(lines_of, seeds, strict=True)]
        cells = [", ".join(_cell(value, key) for value in values) for key in keys]
        print(f"| {name} | " + " | ".join(cells) + f" | {_differences(name, beside, seeds)} |")


def _cell(value: Mapping[str, float] | None, key: str) -> str:
    return "–" if value is None or math.isnan(value[key]) else f"{value[key]:.3g}"


def _differences(name: str, beside: str, seeds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the difference in each seed, with its bootstrap interval over rows."""
    texts = []
    for lines, known in seeds:
        if name not in lines or name == beside or beside not in lines:
            texts.append("–")
            continue
        generator, pair = np.random.default_rng(0), (lines[name], lines[beside])
        counts = {part: len(pair[0]["rows"][part]["exact"]) for part in ("forget", "test")}
        drawn = []
        for _ in range(1000):
            draw = {part: generator.integers(count, size=count) for part, count in counts.items()}
            drawn.append(np.subtract(*(summary(line, known, draw)["distance"] for line in pair)))
        centre = np.subtract(*(summary(line, known)["distance"] for line in pair))
        half = 1.96 * float(np.std(drawn))
        texts.append(f"{centre:+.3f} ± {half:.3f}")
    return ", ".join(texts)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--beside", default="held, filter", help="the variant that others are compared with")
    options = parser.parse_args()
    if options.table:
        show(options.runs, options.beside)
        return
    silence_libraries()
    for run in options.runs:
        lab = Lab(run)
        for name, columns in variants(lab).items():
            if name in results(run) or (options.only and name not in options.only):
                continue
            print(f"{time.strftime('%H:%M:%S')} {run.name}: {name}", flush=True)
            line = measure(lab, name, columns())
            with (lab.out / "results.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            values = summary(line, lab.known)
            told = ", ".join(f"{key} {value:.3g}" for key, value in values.items())
            print(f"  {line['chosen']}: {told}", flush=True)


if __name__ == "__main__":
    main()
