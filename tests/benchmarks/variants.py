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
  forget rows, the retain rows that vectors learn, and holdout rows.
- Scores of a row, teacher-forced: the probability of its answer (per token), all tokens right (as greedy decoding gets
  it), the share of tokens that are right, and the share of the answer's end that is right from some token on.
- Choice by parity: the point with the least mean of |forget - the target's on holdout rows| and |retain - the
  target's|, over the four scores. At most 12 points: of a vector a climb over α in the middle column (of λ or β), all
  columns at its best (λ = 64 where 16 is the best of these), and closer and closer in the best of these; of a
  baseline each of four epochs at two weights of its retain term, at the tool's own rate, then α in the best of these.
  Rivals (`rivals/`): three or four changes, each so long at α = 1 that forget rows lose what holdout rows do.
- Distance: the mean of |score - the ideal's|, over the four scores, on forget rows and on the retain rows that test.
  Kept: the target's scores on these that are left, above the level of holdout rows.
- AUC: that a forget row has a lower loss than a holdout row; .5 is a coin. Relearnt: rows of one half of the forget
  rows that are recited after five steps on the other half (AdamW, all weights, 2e-4). Text: the mean loss on short
  texts that have nothing to do with any row. Growth: the norm of the update over that of the vector as it was fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from msa_lite.baselines.methods import settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.io.console.libraries import silence_libraries
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import Precision, Term, merge_terms
from msa_lite.train import FitSettings, KeptEpochs, epoch_folder
from msa_lite.train.settings import auto_rate
from tests.benchmarks.candidates import FlatHeld, tokenwise, undone
from tests.benchmarks.lab import HELD_BY, PARTS, Lab, Terms, lists_of
from tests.benchmarks.rivals import kfade, sage, win_u
from tests.benchmarks.variants_table import results, show, summary

STRENGTHS = (1.0, 4.0, 16.0, 64.0)  # λ; the last is tried where the one before is the best
EPOCHS, MOST = 4, 12  # of a baseline; points


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
        is_searched = columns[0].searched
        at_first = len(columns[:3] if is_searched else columns)
        number, alpha = at_first // 2, 1.0
        if is_searched:
            alpha = self._climb(columns, number, alpha, 1.5)
        number = min(range(at_first), key=lambda n: self.at(columns, n, alpha))
        if number == at_first - 1:
            number = min(range(number, len(columns)), key=lambda n: self.at(columns, n, alpha))
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

    known = [*lab.rows["learnt"], *lab.rows["holdout"]]
    spare = lambda: lab.moments("known", known)  # noqa: E731
    seen = lambda: lab.moments("spare", [*lab.rows["learnt"], *lab.rows["choose"], *lab.rows["holdout"]])  # noqa: E731

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
        "held, filter of choosing rows, too": lambda: filtered(held, seen),
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
    pairs = [(s, lab.filtered(again, s, lab.moments())) for s in STRENGTHS[:3]]
    return [
        Column(f"λ = {s:g}, second / first {ratio:g}", lambda v=v, ratio=ratio: [(base, -alpha), (v, -ratio * alpha)],
               searched=False)
        for s, v in pairs for ratio in (0.25, 0.5, 1.0, 1.5)
    ]  # fmt: skip


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
