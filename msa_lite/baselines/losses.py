"""The losses of the baselines, pure functions of logits or activations, and the activations that they need."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from msa_lite.data import IGNORE
from msa_lite.errors import UsageError
from msa_lite.io.models.heads import find_layers
from msa_lite.train.objectives.reference import Batch, first_layers, per_position

if TYPE_CHECKING:
    from torch import Tensor

    from msa_lite.train.objectives.reference import Logits


def layer_activations(model: Any, batch: Batch, layer: int) -> Any:
    """Return (b, L, d) output of a layer, counted from 0; the layers above it do not run."""
    layers, outputs = find_layers(model), []
    handle = layers[layer].register_forward_hook(
        lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        with first_layers(model, layer + 1):
            model(input_ids=batch.ids, attention_mask=batch.mask, logits_to_keep=1, use_cache=False)
    finally:
        handle.remove()
    return outputs[0]


def check_layer(name: str, config: dict[str, Any], layer: int) -> None:
    """Raise UsageError unless a model with this configuration has the layer."""
    config = {**config, **(config.get("text_config") or {})}
    count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None)
    if count is not None and layer >= count:
        raise UsageError(
            f"baseline.methods.rmu.layer: {layer}, but {name} has {count} layers, 0 to {count - 1}; the paper's models "
            "have 16 and 32"
        )


def token_losses(logits: Logits, labels: Tensor) -> Tensor:
    """Return (b, t) −log p_t in nats, 0 where there is no label."""
    from torch.nn.functional import cross_entropy as token_cross_entropy

    return per_position(partial(token_cross_entropy, ignore_index=IGNORE, reduction="none"), logits, labels)


def sequence_log_probs(logits: Logits, labels: Tensor) -> Tensor:
    """Return (b,) S_i, the log-probability of each row's labels."""
    return -token_losses(logits, labels).sum(1)


def cross_entropy(logits: Logits, labels: Tensor) -> Tensor:
    """Return Σ_t −log p_t over all labels, divided by their number: the loss of plain fine-tuning, ≥ 0."""
    return token_losses(logits, labels).sum() / (labels != IGNORE).sum()


def grad_ascent(logits: Logits, labels: Tensor) -> Tensor:
    """Return −`cross_entropy`: gradient ascent on the forget set (Jang et al., 2023). Not bounded below."""
    return -cross_entropy(logits, labels)


def npo(logits: Logits, labels: Tensor, reference: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return −(2/β) mean_i log σ(−β (S_i − S_i^ref)), ≥ 0 (Zhang et al., 2024, eq. 3).

    It is (2/β) ln 2 where model = reference. reference: (b,) S_i under the reference. β is the inverse temperature; as
    β → 0 the gradient becomes that of mean_i S_i, gradient ascent on sums.
    """
    return _preference(reference - sequence_log_probs(logits, labels), beta)


def simnpo(logits: Logits, labels: Tensor, *, beta: float = 4.5, delta: float = 0.0) -> Tensor:
    """Return −(2/β) mean_i log σ(β (−S_i / n_i − δ)), ≥ 0 (Fan et al., 2024): NPO by length, without a reference.

    δ is the margin, γ/β of the paper: the method drives each row's mean loss per token, in nats, above it.
    """
    per_token = -sequence_log_probs(logits, labels) / (labels != IGNORE).sum(1)
    return _preference(per_token - delta, beta)


def dpo(forget_gain: Tensor, alternative_gain: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return −(2/β) mean_i log σ(β (g_i^alt − g_i^forget)), ≥ 0 (Rafailov et al., 2023, eq. 7, with NPO's factor).

    Gains: (b,) S_i − S_i^ref of the answer to forget, and of the alternative to prefer ("I don't know").
    """
    return _preference(alternative_gain - forget_gain, beta)


def _preference(margin: Tensor, beta: float) -> Tensor:
    """Return −(2/β) mean_i log σ(β m_i) of margins (b,)."""
    from torch.nn.functional import logsigmoid

    return -2 / beta * logsigmoid(beta * margin).mean()


def satimp(logits: Logits, labels: Tensor, *, beta1: float = 5.0, beta2: float = 1.0) -> Tensor:
    """Return −mean_t w_t (−log p_t) with w_t = p_t^β1 (1 − p_t)^β2 held fixed, ≤ 0 (Yang et al., 2025, SatImp).

    Saturation (β1) spares tokens already forgotten; importance (β2) spares tokens that the model is sure of.
    """
    loss = token_losses(logits, labels)
    probability = (-loss.detach()).exp()
    return -(probability**beta1 * (1 - probability) ** beta2 * loss).sum() / (labels != IGNORE).sum()


def wga(logits: Logits, labels: Tensor, *, beta: float = 1.0) -> Tensor:
    """Return −mean_t w_t (−log p_t) with w_t = p_t^β held fixed, ≤ 0: weighted gradient ascent (Wang et al., 2025)."""
    return satimp(logits, labels, beta1=beta, beta2=0.0)


def undial(logits: Logits, labels: Tensor, reference: Logits, *, beta: float = 10.0) -> Tensor:
    """Return the mean over labels of the cross-entropy of p_θ against softmax(z_ref − β onehot(label)), ≥ 0.

    From Dong et al., 2024. reference: z_ref (b, t, v), logits of the model before unlearning.
    open-unlearning also counts positions without a label (prompt and padding), with IGNORE as an index: the 100th entry
    from the vocabulary's end.
    """
    import torch
    from torch.nn.functional import cross_entropy as token_cross_entropy

    def loss(student: Tensor, theirs: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            place = label.clamp(min=0).unsqueeze(-1)  # without a label any place will do: it does not count
            teacher = theirs.scatter_add(-1, place, torch.full_like(theirs[..., :1], -beta)).softmax(-1)
        return token_cross_entropy(student, teacher, reduction="none")

    labelled = labels != IGNORE
    return (per_position(loss, logits, reference, labels) * labelled).sum() / labelled.sum()


def rmu(activations: Tensor, aim: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over rows of the mean squared distance of activations (b, t, d) to `aim`, ≥ 0 (Li et al., 2024).

    It is a mean over the width, too, as in the authors' code; the paper has the squared norm, d times as much. Always
    in fp32: half precision neither holds large squares nor counts tokens exactly.

    aim: (d,) the control vector for forget rows (`control_vector`), (b, t, d) the reference's activations for retain
    rows. mask: (b, t) positions that count: those of the labels themselves, not those that predict them.
    open-unlearning mixes sums and counts of all rows: mean_i(sum_i) · mean_i(1/n_i).
    """
    distances = ((activations.float() - aim.float()) ** 2).mean(-1) * mask
    sums, counts = distances.sum(1), mask.sum(1)
    return (sums / counts).mean()


def control_vector(width: int, scale: float, seed: int) -> Tensor:
    """Return (d,) RMU's s u / ‖u‖₂ with u ~ U[0, 1)^d, drawn once from `seed`; its length is `scale`."""
    import torch

    drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return scale * drawn / math.sqrt(float((drawn**2).sum()))
