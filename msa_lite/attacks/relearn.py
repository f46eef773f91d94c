"""Tune a model a little, and see how much of the forget rows comes back: relearning attacks.

Four branches, each on other rows, and each from the model as it was loaded:

- forget: on all rows that the forget vector learnt. Any model learns them; the ideal, tuned alike, shows how fast one
  does that never knew them. Published settings: 1 epoch at 2e-5 in steps of 32 rows, no warm-up, no weight decay, all
  weights (Unlearning Depth Score, arXiv 2605.24614, after OpenUnlearning).
- part: on a seeded half of the forget rows; the other half is scored. Published: 6 epochs in steps of 4 rows, warm-up
  over 24 steps, the best of several rates from 1e-7 to 5e-6 (arXiv 2410.08827). Here 5e-6 alone.
- retain: on rows to keep alone, none of them to forget. It brought nearly everything back in vision models (arXiv
  2505.22310). The settings of that paper are for images; those of `forget` stand in their place.
- unrelated: on text that has nothing to do with any of it. Published: LoRA of rank 128 and alpha 16, 3 epochs at 2e-4,
  one row a step, warm-up over 5 % of the steps, weight decay 0.01, 10 to 1000 rows (arXiv 2409.18025,
  ethz-spylab/unlearning-vs-safety). Here two dozen short texts of our own, so that it works offline.

Deviations: all weights are tuned as fp32 copies. The first and the last of these publications tune in bf16, which
rounds small steps away. If a device has no room for all weights, an adapter is tuned, and a line says so.

Published settings are for models of 1B and more with hundreds of rows. On a small model or a few rows they change next
to nothing, and "nothing came back" would mean nothing. So each branch also runs at a strength that is matched to the
model: as many steps for each branch, at a rate that grows as the model shrinks. These trials speak for the attack.

Evidence, from the quickstart (a Llama of 2.2M weights, 40 forget rows, extraction strength): the ideal learns the
forget rows from .28 to .69, .95 and 1.00 in 6, 12 and 24 matched steps; the published epoch, 2 steps, takes it to .30.
On rows to keep, 48 matched steps took the unlearned model from .34 to .59, and the ideal to .31; 9 published ones to
.36 and .28. On SmolLM2-135M with 8 rows of TOFU, 12 matched steps on rows to keep took an unlearned model (α .6, β .3)
from .15 to .39, and the ideal from .058 to .063.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from msa_lite.attacks.attack import Attack, Ground, Means, Measure, Subject, Trial, recall_measures
from msa_lite.data import Example, Row, encode_qa, encode_text, pad_id, rows_identity, split_rows
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import Record, Records
from msa_lite.evals.engine.models import Runner, count_weights, streams
from msa_lite.evals.scores.records import run_items
from msa_lite.io.console.progress import Progress, notices, part_of, silent
from msa_lite.io.models.heads import Compute, choose_precision
from msa_lite.io.weights.hub import Source
from msa_lite.train import FitSettings, TuningMode, auto_rate, check_tunable, roomy_mode, tune

_ROWS_TAUGHT = {
    "forget": "all forget rows", "part": "half of the forget rows", "retain": "rows to keep",
    "unrelated": "unrelated text",
}  # fmt: skip
_LEAST_PART = 2  # rows on either side of a division
_FASTER = 3.0  # times the rate of a vector: whoever attacks need not spare the rest of the model
_OF_ADAPTER = 10 * 64  # over lora_alpha: the rate of an adapter as a multiple of that of all weights
_PLAIN = Trial("plain", "no tuning", is_control=True)
_ALL_WEIGHTS = FitSettings("full", weight_decay=0.0, warmup_steps=0)
_ON_ROWS = replace(_ALL_WEIGHTS, learning_rate=2e-5, epochs=1)
_PUBLISHED = {
    "forget": _ON_ROWS,
    "part": replace(_ALL_WEIGHTS, learning_rate=5e-6, epochs=6, batch_size=4, warmup_steps=24),
    "retain": _ON_ROWS,
    "unrelated": FitSettings("lora", 128, 16, epochs=3, learning_rate=2e-4, batch_size=1, warmup_steps=4),
}
_TEXTS = Path(__file__).with_name("unrelated.txt").read_text("utf-8").splitlines()
UNRELATED = tuple(Row(index, text=text) for index, text in enumerate(_TEXTS))
"""Short texts that have nothing to do with any forget set."""


class _Branch(NamedTuple):
    """One tuning, from the model as it was loaded."""

    name: str
    is_published: bool
    tuning: FitSettings
    rows: Sequence[Row]
    """The rows to tune on."""
    examples: int
    """The examples that these make."""
    scored: Sequence[Row]
    """The forget rows to score."""
    steps: Sequence[int]
    """The steps after which it is scored."""

    @property
    def title(self) -> str:
        """Return its name with its strength, with which the names of its trials begin."""
        return f"{self.name} published" if self.is_published else self.name

    def trials(self) -> list[Trial]:
        """Return the points of its curve, one of which speaks for the attack if the strength is matched to the model.

        Where forget rows are taught, it is the first point at which each of them was taught once: in the end, all
        models know the rows of `forget`, and with `part` even the target loses the other half. Elsewhere it is the
        last one.
        """
        once = [step for step in self.steps if step * self.tuning.batch_size >= self.examples]
        speaking = once[0] if self.name in ("forget", "part") and once else self.steps[-1]
        way = (" an adapter" if self.tuning.mode == "lora" else "") + (" as published" if self.is_published else "")
        return [
            Trial(
                f"{self.title} step {step}",
                f"tuning{way} on {_ROWS_TAUGHT[self.name]}, {step} step{'s' * (step > 1)}",
                teaches_forget_rows=self.name == "forget",
                is_summary=not self.is_published and step == speaking,
            )
            for step in self.steps
        ]


@dataclass(frozen=True)
class Relearn(Attack):
    """Tune on the forget rows, on a half of them, on rows to keep, and on unrelated text."""

    branches: tuple[str, ...] = tuple(_ROWS_TAUGHT)
    steps: int = 48
    """The steps of a matched branch: in half of them the ideal has learnt the forget rows by heart."""
    points: int = 4
    """The most points of a matched curve, each at half of the steps of the next one."""
    batch_size: int = 8
    """The rows of a matched step."""
    rate: float | None = None
    """The matched rate. None: three times the rate at which a vector of all weights is fitted to a model of this size;
    an adapter has ten times that."""
    mode: TuningMode = "full"
    """All weights, or an adapter where the device has no room for their gradients and AdamW's states."""
    compute: Compute = "auto"
    """The precision of matrix products, as of the fit of a vector."""
    texts: Sequence[Row] = UNRELATED
    """The rows of the branch `unrelated`."""

    name = "relearn"
    source = (
        "arXiv 2605.24614 (forget rows), arXiv 2410.08827 (half of them), arXiv 2505.22310 (rows to keep), "
        "arXiv 2409.18025 (unrelated text)"
    )
    reads = ("retain", "learnt")

    def describe(self) -> dict[str, Any]:
        """Return its settings, with the precision on this device; of texts, a hash."""
        published = {name: asdict(_PUBLISHED[name]) for name in self.branches}
        facts = {"texts": rows_identity(self.texts), "compute": choose_precision(self.compute), "published": published}
        return asdict(replace(self, texts=())) | facts

    def fit_to(self, models: Mapping[str, Source]) -> Relearn:
        """Return the attack with one mode for all models, by the largest of them: else one would be tuned otherwise.

        Raise UsageError for models that find no room on the GPU.
        """
        if large := [f"{name} ({source.name})" for name, source in models.items() if streams(source)]:
            raise UsageError(f"{', '.join(large)}: too large for the GPU's memory to be tuned; use a larger GPU")
        mode = roomy_mode(max(map(count_weights, models.values())))
        if mode == "lora":
            notices.info("relearn: there is no room to tune all weights, so that adapters are tuned, of all models")
        return replace(self, mode=mode)

    def left_out(self, ground: Ground) -> dict[str, str]:
        """Return the branches that the rows do not allow, each with the reason."""
        return {name: lack for name in self.branches if (lack := self._lack(name, *self._sides(name, ground), ground))}

    def count_rows(self, ground: Ground) -> dict[str, int]:
        """Return the forget rows that each branch scores: `part` only the half that it does not tune on."""
        return {branch.name: len(branch.scored) for branch in self._branches(ground)}

    def trials(self, ground: Ground) -> Sequence[Trial]:
        """Return the model as it is, then the points of each branch."""
        return [_PLAIN, *(trial for branch in self._branches(ground) for trial in branch.trials())]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        """Return the scores of the rows."""
        return recall_measures(ground)

    def figures(self, means: Means, model: str) -> dict[str, float]:
        """Return R for each measure after the published tuning on the forget rows, where there is an ideal."""
        figures = {}
        published = next((trial for _, trial, _ in means if trial.startswith("forget published step ")), "")
        for measure in dict.fromkeys(measure for *_, measure in means):
            places = [(name, trial, measure) for name in ("ideal", model) for trial in (_PLAIN.name, published)]
            values = [value for place in places if (value := means.get(place)) is not None]
            if len(values) == len(places):
                figures[f"R {measure}"] = relearning_robustness(*values)
        return figures

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        """Score the model, tune it in each branch, score it on the way, and put it back; yield the records.

        Rows that a branch teaches and does not score, and holdout rows of the branch `forget`, have records without
        scores. Raise UsageError for a model that cannot be tuned.
        """
        runner, branches = subject.runner, self._branches(ground)
        check_tunable(runner.model)
        total, done = sum(branch.steps[-1] for branch in branches), 0
        progress(self.name, 0, total)
        yield _PLAIN, _score(runner, ground, ground.forget)
        for branch in branches:
            examples, records = _examples(branch.rows, ground), list[Records]()

            def look(step: int, branch: _Branch = branch, records: list[Records] = records) -> None:
                records.append(_score(runner, ground, branch.scored, branch.name != "forget"))

            settings, label = self._settings(branch, runner.model, ground.seed), f"relearn, {branch.title}"
            part, pad = part_of(progress, self.name, done, total), pad_id(ground.prompter.tokenizer)
            tune(
                runner.model, examples, look, pad=pad, settings=settings, steps=branch.steps, label=label, progress=part
            )  # fmt: skip
            done += branch.steps[-1]
            yield from zip(branch.trials(), records, strict=True)

    def _branches(self, ground: Ground) -> list[_Branch]:
        """Return the branches that the rows allow, in their order: each matched to the model, then as published."""
        branches = []
        for name in self.branches:
            rows, scored = self._sides(name, ground)
            if self._lack(name, rows, scored, ground):
                continue
            texts = [row for row in rows if row.text]
            examples = len(rows) - len(texts) + len(_examples(texts, ground))  # a question is one
            matched = replace(_ALL_WEIGHTS, mode=self.mode, batch_size=self.batch_size, schedule="constant")
            curve = sorted({max(1, self.steps >> at) for at in range(self.points)})
            branches.append(_Branch(name, False, matched, rows, examples, scored, curve))
            published = _PUBLISHED[name]
            if self.mode == "lora" and published.mode == "full":
                rate = published.learning_rate * _OF_ADAPTER / published.lora_alpha
                published = replace(published, mode="lora", learning_rate=rate)
            last = published.epochs * math.ceil(examples / published.batch_size)
            branches.append(_Branch(name, True, published, rows, examples, scored, [last]))
        return branches

    def _settings(self, branch: _Branch, model: Any, seed: int) -> FitSettings:
        """Return the settings of a branch's fit of a loaded model."""
        tuning = replace(branch.tuning, compute=self.compute, seed=seed)
        if branch.is_published:
            return tuning
        rate = self.rate or _FASTER * auto_rate("full", sum(weight.numel() for weight in model.parameters()))
        rate *= _OF_ADAPTER / tuning.lora_alpha if tuning.mode == "lora" else 1
        epochs = math.ceil(branch.steps[-1] / math.ceil(branch.examples / tuning.batch_size))
        return replace(tuning, learning_rate=rate, epochs=epochs)

    def _sides(self, name: str, ground: Ground) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return (the rows that a branch tunes on, the forget rows that it scores)."""
        if name == "part":
            return split_rows(ground.forget, 0.5, ground.seed)
        return {"forget": ground.learnt, "retain": ground.retain, "unrelated": self.texts}[name], ground.forget

    def _lack(self, name: str, rows: Sequence[Row], scored: Sequence[Row], ground: Ground) -> str:
        """Return why a branch is not possible on these rows, with what to try; "" where it is."""
        if name == "part":
            return "" if min(len(rows), len(scored)) >= _LEAST_PART else (
                f"{len(ground.forget)} forget rows are too few to split: at least {_LEAST_PART} to tune on and "
                f"{_LEAST_PART} others to score are needed; attack more rows"
            )  # fmt: skip
        if not rows:
            return "there are no rows to tune on; give some (retain.data)"
        attacked = {_content(row) for row in (*ground.forget, *ground.holdout, *ground.learnt)}
        shared = [row for row in rows if name != "forget" and _content(row) in attacked]
        return "" if not shared else (
            f"{len(shared)} of {len(rows)} rows to tune on are forget or holdout rows, or ask the same (the first is "
            f"row {shared[0].index}), so that tuning would teach what is scored; take them out of these rows"
        )  # fmt: skip


def relearning_robustness(
    ideal_before: float, ideal_after: float, unlearned_before: float, unlearned_after: float
) -> float:
    """Return R = min(Δ_ideal / Δ_unlearned, 1), Δ = a metric of what is known after tuning, minus before.

    1: the model learns the rows no faster than the ideal does. 0: all of its gain is knowledge that was left. From the
    Unlearning Depth Score (arXiv 2605.24614), after OpenUnlearning. The publications leave open what these come to, and
    here it is: 1 where the model gains nothing (Δ_unlearned ≤ 0), 0 where it gains and the ideal loses.
    """
    gain = unlearned_after - unlearned_before
    if gain <= 0:
        return 1.0
    return min(max((ideal_after - ideal_before) / gain, 0.0), 1.0)


def _content(row: Row) -> tuple[Any, ...]:
    """Return what is asked, with all before it: of conversations, the last turn alone may be the same by chance."""
    return (row.earlier, row.system, row.question, row.text)


def _examples(rows: Sequence[Row], ground: Ground) -> list[Example]:
    """Return rows as examples to tune on: answers, or all tokens of texts, each text on its own."""
    prompter = ground.prompter
    texts = [row for row in rows if row.text]
    chunks = [chunk for row in texts for chunk in encode_text([row], prompter, ground.max_length)]
    return [*encode_qa([row for row in rows if not row.text], prompter, ground.max_length), *chunks]


def _score(runner: Runner, ground: Ground, scored: Sequence[Row], with_holdout: bool = True) -> Records:
    """Return the records of all forget and holdout rows, those that are not scored without scores."""
    holdout = ground.holdout if with_holdout else ()
    benchmark, threads = replace(ground, forget=scored, holdout=holdout).benchmark(), {row.thread for row in scored}
    records: dict[str, list[Record]] = {}
    for name, rows in (("forget", ground.forget), ("holdout", ground.holdout)):
        scores = iter(run_items(runner, benchmark, name) if name in benchmark.sets else ())
        for row in rows:
            is_scored = row.thread in threads if name == "forget" else with_holdout
            record = next(scores) if is_scored else {"index": row.index, "skipped": "not scored in this trial"}
            records.setdefault(name, []).append(record)
    return records
