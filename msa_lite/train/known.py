"""A training that changes known weights alone; all others keep their values bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msa_lite.errors import UsageError
from msa_lite.io.weights.known import KnownWeights

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


def check_known(settings: FitSettings) -> None:
    """Raise UsageError for settings under which more than the known weights would change, or other ones."""
    if settings.known is None:
        return
    if settings.mode != "full":
        raise UsageError(f"into: mode {settings.mode} trains an adapter, not the model's weights; only full mode can")
    if settings.optimizer == "adamw_8bit":
        raise UsageError("into: states of 8 bits are rounded together, known weights with others; use adamw")


def train_known(model: Any, known: KnownWeights, weight_decay: float, decaying: Sequence[str]) -> Any:
    """Let a training change the known weights of a model alone; return the Trainer callback that it needs.

    Tensors without known entries are frozen. Elsewhere the gradient of all other entries is set to 0 before anything
    reads it: clipping counts the known ones alone, and AdamW's moments of the others stay 0, so its step leaves them
    as they are. Weight decay is not part of the gradient. The optimiser must have none for these tensors; the callback
    lets the known entries of those in `decaying` decay by `weight_decay`, as AdamW would.
    """
    import torch
    from transformers import TrainerCallback

    names = {*known.among([name for name, _ in model.named_parameters()])}
    masks: list[tuple[Any, Any]] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
        if name in names:
            mask = torch.from_numpy(known.entries(name, 0, parameter.numel())).view(parameter.shape)
            mask = mask.to(parameter.device)
            parameter.register_post_accumulate_grad_hook(partial(_clear_others, mask))
            masks += [(parameter, mask)] if name in decaying else []

    class Decay(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rate = kwargs["optimizer"].param_groups[0]["lr"]
            with torch.no_grad():
                for parameter, mask in masks if weight_decay else ():
                    parameter.mul_(torch.where(mask, 1 - rate * weight_decay, 1.0))

    return Decay()


def _clear_others(mask: Any, parameter: Any) -> None:
    """Set the gradient outside a mask to 0, NaN included."""
    parameter.grad.masked_fill_(~mask, 0.0)
