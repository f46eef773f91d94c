"""Quantise: round a model's weights to 4 or 8 bits and score it again. An update may be rounded away.

The protocol is that of arXiv 2410.16454 (int8, int4) and arXiv 2605.24614 (NF4, in groups of 64, without a second
quantisation of the scales): scores before and after. Weights are rounded as bitsandbytes rounds them (`io.codes`), in
the model in memory, and put back afterwards. So one load serves all forms, on any device.

Deviations: matrix products have the precision that the model is scored in, not bf16 throughout. int8 rounds the weights
alone, where LLM.int8() rounds the inputs of each layer, too. int4 is plain absmax by groups of 128, since the published
int4 is that of a library, and changes with it. An adapter stays beside the rounded weights, as on a 4-bit model; to
attack the merged model, merge it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msa_lite.attacks.attack import Attack, Ground, Means, Measure, Subject, Trial, check_unquantised, recall_measures
from msa_lite.evals.benchmarks.benchmark import Records
from msa_lite.evals.scores.records import run_items
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.blocks import QUANTISATIONS, rounded_model

PLAIN = Trial("plain", "as it is", is_control=True)


@dataclass(frozen=True)
class Quantise(Attack):
    """Score a model with its linear weights rounded."""

    forms: tuple[str, ...] = ("nf4", "int8", "int4")
    """Of `QUANTISATIONS`, in the order of the trials: the form of QLoRA, and the two of arXiv 2410.16454."""

    name = "quantise"
    source = "arXiv 2410.16454, arXiv 2605.24614"
    reads = ()

    def trials(self, ground: Ground) -> Sequence[Trial]:
        return [PLAIN, *(Trial(form, QUANTISATIONS[form].label) for form in self.forms)]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        return recall_measures(ground)

    def figures(self, means: Means, model: str) -> dict[str, float]:
        """Return Q for each form and measure."""
        figures = {}
        for form in self.forms:
            for measure in dict.fromkeys(measure for *_, measure in means):
                before, after = (means.get((model, trial, measure)) for trial in (PLAIN.name, form))
                if before is not None and after is not None:
                    figures[f"Q {form} {measure}"] = score_kept(before, after)
        return figures

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        check_unquantised(subject.name, subject.source)
        benchmark, trials = ground.benchmark(), self.trials(ground)
        for done, trial in enumerate(trials):
            progress(self.name, done, len(trials))
            with rounded_model(subject.runner.model, None if trial.is_control else trial.name):
                records = {name: run_items(subject.runner, benchmark, name) for name in benchmark.sets}
            yield trial, records
        progress(self.name, len(trials), len(trials))


def score_kept(before: float, after: float) -> float:
    """Return Q = min(after / before, 1) of a score for which higher means more knowledge (arXiv 2605.24614).

    1: quantisation takes nothing from what the score sees, or brings some back; how much comes back, `after − before`
    says. Without anything to lose (`before` is 0), it is 1.
    """
    return min(after / before, 1.0) if before > 0 else 1.0
