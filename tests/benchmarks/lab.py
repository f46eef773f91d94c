"""The laboratory of `variants.py`: a history with its target in memory, the scores of its rows, vectors and their sums.

What scores, rows and fits are is written at the top of `variants.py`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from msa_lite.attacks.relearn import UNRELATED
from msa_lite.data import IGNORE, Example, Prompter, Row, Template, encode_qa, encode_text, open_tokenizer, to_batch
from msa_lite.evals.engine.models import load_model
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger.filtering import filter_vector
from msa_lite.merger.vectors.vector import load_vector
from msa_lite.train import FitSettings, VectorFit, run_fit
from msa_lite.train.moments import write_moments
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.rows import common_beginning

SCORES = ("probability", "exact", "right", "end")
PARTS = ("forget", "test", "choose", "holdout", "text")
HELD_BY = 1.0  # h
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


def lists_of(parts: Mapping[str, Scores]) -> dict[str, Any]:
    """Return scores as JSON holds them."""
    return {part: {key: values.tolist() for key, values in of.items()} for part, of in parts.items()}


def arrays_of(parts: Mapping[str, Any]) -> dict[str, Scores]:
    """Return scores as they were before `lists_of`."""
    return {part: {key: np.array(values) for key, values in of.items()} for part, of in parts.items()}
