"""Quantise: round a model's weights to 4 or 8 bits and score it again. Small updates are rounded away.

The protocol is that of arXiv 2410.16454 (int8, int4) and arXiv 2605.24614 (NF4, in groups of 64, without a second
quantisation of the scales): scores before and after. Weights are rounded as bitsandbytes rounds them (`io.codes`), in
the model in memory, and put back afterwards. So one load serves all forms, on any device.

Deviations: matrix products have the precision that the model is scored in, not bf16 throughout. int8 rounds the weights
alone, where LLM.int8() rounds the inputs of each layer, too. int4 is plain absmax by groups of 128, since the published
int4 is that of a library, and changes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msa_lite.attacks.attack import Attack, Cost, Ground, Measure, Subject, Trial
from msa_lite.attacks.scores import recall_cost, recall_measures
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmark import Records
from msa_lite.evals.models import checkpoint_folder
from msa_lite.evals.records import run_items
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.io.codes import QUANTISATIONS
from msa_lite.io.progress import Progress, silent

PLAIN = Trial("plain", "as it is", is_control=True)


@dataclass(frozen=True)
class Quantise(Attack):
    """Score a model with its linear weights rounded."""

    forms: tuple[str, ...] = ("nf4", "int8", "int4")
    """Of `QUANTISATIONS`, in the order of the trials."""

    name = "quantise"
    source = "arXiv 2410.16454, arXiv 2605.24614"

    def faults(self, ground: Ground) -> Iterator[str]:
        for form in self.forms:
            if form not in QUANTISATIONS:
                yield f"quantise: '{form}'{nearest(form, QUANTISATIONS)}; choose from {', '.join(QUANTISATIONS)}"
        if not self.forms:
            yield f"quantise: no form; give at least one of {', '.join(QUANTISATIONS)}"

    def trials(self, ground: Ground) -> Sequence[Trial]:
        return [PLAIN, *(Trial(form, QUANTISATIONS[form].label) for form in self.forms)]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        return recall_measures(ground)

    def cost(self, ground: Ground) -> Cost:
        cost = recall_cost(ground)
        return Cost(*(part * (1 + len(self.forms)) for part in cost))

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        check_plain(subject)
        benchmark, trials = ground.benchmark(), self.trials(ground)
        total = len(trials) * len(benchmark.sets)
        done = 0
        progress(self.name, done, total)
        for trial in trials:
            records = {}
            with rounded(subject.runner.model, None if trial.is_control else trial.name):
                for name in benchmark.sets:
                    records[name] = run_items(subject.runner, benchmark, name)
                    done += 1
                    progress(self.name, done, total)
            yield trial, records


def check_plain(subject: Subject) -> None:
    """Raise UsageError for a model that is stored quantised: it has no other weights that could be rounded."""
    folder = checkpoint_folder(subject.source.folder)
    if load_checkpoint(folder).config.get("quantization_config"):
        raise UsageError(
            f"{subject.name} ({subject.source.name}): its weights are stored quantised, so there is nothing to round; "
            "give the model that it was made from, or leave out the attack quantise"
        )


@contextmanager
def rounded(model: Any, form: str | None) -> Iterator[None]:
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
            weight.copy_(round_weight(form or "", weight, is_transposed=not isinstance(module, torch.nn.Linear)))
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
        id(part)
        for layer in modules
        if isinstance(layer, BaseTunerLayer)
        for part in layer.modules()
        if part is not layer.get_base_layer()
    }
    linear = [m for m in modules if isinstance(m, torch.nn.Linear | Conv1D) and m is not head and id(m) not in inner]
    return list({module.weight.data_ptr(): module for module in linear}.values())


def round_weight(form: str, weight: Any, is_transposed: bool = False) -> Any:
    """Return a weight (outputs, inputs), rounded, in its own dtype. is_transposed: it is (inputs, outputs)."""
    import torch

    values = weight.float().cpu()
    values = values.T.contiguous() if is_transposed else values
    result = torch.from_numpy(QUANTISATIONS[form].round(values.numpy()))
    return (result.T if is_transposed else result).to(weight.dtype)


def kept_share(before: float, after: float) -> float:
    """Return Q = min(after / before, 1) of a score for which higher means more knowledge (arXiv 2605.24614).

    1: quantisation takes nothing from what the score sees, or brings some back; how much comes back, `after − before`
    says. Without anything to lose (`before` is 0), it is 1.
    """
    return min(after / before, 1.0) if before > 0 else 1.0
