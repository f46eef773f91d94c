"""Parts of losses that compare a tuned model with its start: logits at chosen positions, the reference, the
divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.io.models.heads import Halves, autocast, find_layers, split_model


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right, as tensors (b, L) on the model's device."""

    ids: Any
    mask: Any
    """1 where there is a token."""
    labels: Any


def make_batch(examples: Sequence[Example], pad: int, device: Any) -> Batch:
    """Pad examples to a batch."""
    tensors = to_batch(examples, pad, device)
    return Batch(tensors["input_ids"], tensors["attention_mask"], tensors["labels"])


@dataclass(frozen=True)
class ChosenLogits:
    """Logits of chosen positions of rows, made of hidden states a block at a time where a loss needs them."""

    halves: Halves
    states: Any
    """(n, ·) states of the chosen positions."""
    mask: Any
    """(b, t) True at the chosen positions."""
    reference: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context in which the head runs."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (b, t, v)."""
        return (*self.mask.shape, self.halves.vocabulary)

    def map(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return (b, t) function(logits, *inputs), 0 at positions that are not chosen.

        function: of (n, v) fp32 logits and n entries of each of the inputs, which are (b, t, …) tensors or the logits
        of another model at the same positions.
        """
        import torch

        def block(logits: Any, *rows: Any) -> Any:
            of_rows = (x._make(r) if isinstance(x, ChosenLogits) else r for x, r in zip(inputs, rows, strict=True))
            return function(logits, *of_rows)

        flat = [x.states if isinstance(x, ChosenLogits) else x[self.mask] for x in inputs]
        with self.reference(), autocast(self.halves.model):
            values = self.halves.map_logits(block, self.states, *flat)
        return torch.zeros(self.mask.shape, device=values.device).masked_scatter(self.mask, values)

    def _make(self, states: Any) -> Any:
        with self.reference():
            return self.halves.logits(states)


def answer_logits(
    halves: Halves,
    batch: Batch,
    positions: Any = None,
    reference: FitReference | None = None,
) -> tuple[ChosenLogits, Any]:
    """Return the logits at positions with a label, and the (b, L − 1) labels that they predict.

    With a large vocabulary, logits of all positions would take more memory than everything else. positions: (b, L − 1)
    mask of other positions. reference: takes the place of the model.
    """
    labels = batch.labels[:, 1:]
    mask = labels != IGNORE if positions is None else positions
    with reference.running() if reference else nullcontext(), autocast(halves.model):
        states = halves.run(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)[0]
    return ChosenLogits(
        halves, states[:, :-1][mask], mask, reference.running_head if reference else nullcontext
    ), labels


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Take the layers from `count` on out of the model, for a while."""
    layers = find_layers(model)
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is layers
    ]
    for parent, name in places:
        setattr(parent, name, layers[:count])
    try:
        yield
    finally:
        for parent, name in places:
            setattr(parent, name, layers)


@dataclass(frozen=True)
class FitReference:
    """The model where a fit starts, beside the model that is tuned."""

    model: Any
    """The tuned model. It has an adapter, unless all weights are trained and `copy` is the reference."""
    copy: Any | None
    """The reference, where all weights are trained; perhaps its first layers only."""
    halves: Halves | None
    """Of the reference; None where nothing wants its logits."""

    @classmethod
    def of(cls, model: Any, halves: Halves | None, copy: Any | None) -> FitReference:
        """Return the reference of a model. halves: of the model; None where nothing wants logits."""
        return cls(model, copy, split_model(copy) if halves and copy is not None else halves)

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Provide the reference, without gradients: the copy, or else the model with its adapter switched off."""
        import torch

        if self.copy is not None:
            with torch.no_grad(), autocast(self.copy):
                yield self.copy
            return
        training = self.model.training
        with torch.no_grad(), self.model.disable_adapter():
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train(training)

    def running_head(self) -> AbstractContextManager[Any]:
        """Return the context in which its head runs."""
        import torch

        assert self.halves is not None, "the reference was prepared without logits"
        if any(weight.requires_grad for weight in self.halves.model.get_output_embeddings().parameters()):
            return self.running()
        return torch.no_grad()  # it is the same with and without the adapter, which takes time to switch off

    def head(self, states: Any) -> Any:
        """Return the (n, v) fp32 logits of the reference's own (n, ·) states."""
        assert self.halves is not None, "the reference was prepared without logits"
        with self.running_head(), autocast(self.halves.model):
            return self.halves.logits(states)

    def logits(self, batch: Batch, positions: Any = None) -> ChosenLogits:
        """Return the reference's logits at positions with a label, or at those of a (b, L − 1) mask."""
        assert self.halves is not None, "the reference was prepared without logits"
        return answer_logits(self.halves, batch, positions, self)[0]


def freeze_copy(model: Any, layers: int | None = None) -> Any:
    """Copy the model, or only its first `layers`; training does not change the copy."""
    import copy

    with first_layers(model, layers) if layers else nullcontext():
        return copy.deepcopy(model).eval().requires_grad_(False)


if TYPE_CHECKING:
    from torch import Tensor

    Logits: TypeAlias = Tensor | ChosenLogits


def per_position(function: Callable[..., Tensor], logits: Logits, *inputs: Any) -> Tensor:
    """Apply a function to the (n, v) logits and the `inputs` (b, t, …) of each position; return its values as (b,
    t)."""
    if isinstance(logits, ChosenLogits):
        return logits.map(function, *inputs)
    flat = (values.flatten(0, 1) for values in (logits, *inputs))
    return function(*flat).view(logits.shape[:2])


def kl_divergence(logits: Logits, reference: Logits, mask: Tensor) -> Tensor:
    """Return the mean over positions of KL(p_ref ‖ p_θ) in nats, ≥ 0 (Maini et al., 2024, KL minimization).

    reference: logits of the reference, shaped like `logits`. mask: (b, t) positions that count. All positions have
    equal weight; in the paper all rows do. Padding does not count here; in open-unlearning it does.
    """
    from torch.nn.functional import kl_div

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        return kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)

    return per_position(divergence, logits, reference)[mask].mean()
