"""Quantise: round a model's weights to 4 or 8 bits and score it again. An update may be rounded away.

The protocol is that of arXiv 2410.16454 (int8, int4) and arXiv 2605.24614 (NF4, in groups of 64, without a second
quantisation of the scales): scores before and after. Weights are rounded as bitsandbytes rounds them, in the model in
memory, and put back afterwards. So one load serves all forms, on any device.

Deviations: matrix products have the precision that the model is scored in, not bf16 throughout. int8 rounds the weights
alone, where LLM.int8() rounds the inputs of each layer, too. int4 is plain absmax by groups of 128, since the published
int4 is that of a library, and changes with it. An adapter stays beside the rounded weights, as on a 4-bit model; to
attack the merged model, merge it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msa_lite.attacks.attack import Attack, Ground, Means, Measure, Subject, Trial, check_unquantised, recall_measures
from msa_lite.evals.benchmarks.benchmark import Records
from msa_lite.evals.scores.records import run_items
from msa_lite.io.console.progress import Progress, silent

PLAIN = Trial("plain", "as it is", is_control=True)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_CHUNK = 1 << 20  # weights rounded at a time
_LEAST = 1e-38  # in the place of the scale of a group of zeros


@dataclass(frozen=True)
class Quantisation:
    """A form of quantisation: how weights are grouped, and the values that a group's scale multiplies."""

    label: str
    """Its name in tables."""
    width: int
    """Weights of a group; 0: a row is one."""
    top: int = 0
    """The largest code of whole numbers; 0 for NF4, whose codes are places in a table of values."""
    crosses_rows: bool = False
    """True where groups run on from one row to the next."""

    def round(self, weight: Any) -> Any:
        """Return a matrix (outputs, inputs) of fp32 weights on a CPU, rounded."""
        import torch

        lines = weight.reshape(1, -1) if self.crosses_rows else weight.contiguous()
        width = self.width or lines.shape[1]
        padded = torch.nn.functional.pad(lines, (0, -lines.shape[1] % width))  # zeros leave a group's scale as it is
        for groups in padded.view(-1, width).split(max(1, _CHUNK // width)):
            scales = groups.abs().amax(1, keepdim=True)
            torch.mul(self._values(groups * (1 / scales.clamp(min=_LEAST) * (self.top or 1))), scales, out=groups)
        return padded[:, : lines.shape[1]].reshape(weight.shape)

    def _values(self, scaled: Any) -> Any:
        """Return the nearest values of codes to weights that their groups' scales have divided (times `top`)."""
        import torch

        if self.top:  # a group of zeros makes 0 · ∞; codes have no negative zero
            return (scaled.round().nan_to_num(0.0) + 0.0) * torch.tensor(1 / self.top)
        table = torch.tensor(_NF4)
        return table[torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)]


QUANTISATIONS = {
    "nf4": Quantisation("NF4", 64, crosses_rows=True),
    "int4": Quantisation("int4", 128, top=7),
    "int8": Quantisation("int8", 0, top=127),
}


@contextmanager
def rounded_model(model: Any, form: str | None) -> Iterator[None]:
    """Round a model's linear weights in place; put them back bit for bit at the end, also after an error.

    form: of `QUANTISATIONS`; None leaves all as it is. The weights wait in RAM meanwhile. Head, embedding, norms and
    the factors of an adapter keep their values, as bitsandbytes leaves them.
    """
    import torch

    kept: list[tuple[Any, Any]] = []
    try:
        for module in linear_modules(model) if form else ():
            weight = module.weight.data
            kept.append((weight, weight.to("cpu", copy=True)))
            matrix = weight if isinstance(module, torch.nn.Linear) else weight.T  # Conv1D has (inputs, outputs)
            matrix.copy_(QUANTISATIONS[form or ""].round(matrix.float().cpu()))
        yield
    finally:
        for weight, values in kept:
            weight.copy_(values)


def linear_modules(model: Any) -> list[Any]:
    """Return the linear modules of a model that quantisation rounds, each weight once."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    modules = list(model.modules())
    head = model.get_output_embeddings()
    inner = {
        id(module)
        for layer in modules
        if isinstance(layer, BaseTunerLayer)
        for module in layer.modules()
        if module is not layer.get_base_layer()
    }
    linear = [m for m in modules if isinstance(m, torch.nn.Linear | Conv1D) and m is not head and id(m) not in inner]
    return list({id(module.weight): module for module in linear}.values())


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
