"""Split a language model into a body that makes hidden states and a head that makes logits.

With a vocabulary of 128k, logits are far larger than everything else. So they are made block by block, and only from
the hidden states of the positions that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msa_lite.io.precision import autocast

_BLOCK_BYTES = 64 << 20  # of fp32 logits in memory at a time


@dataclass(frozen=True)
class Halves:
    """A causal language model in two halves; `states` of the first half become logits in the second."""

    model: Any
    """The whole model, perhaps under PEFT."""
    body: Any | None
    """None for a model that does not come apart. Its states are logits."""
    head: Any | None

    @property
    def vocabulary(self) -> int:
        """Return the number of logits of one position."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def block_rows(self) -> int:
        """Return the number of positions whose fp32 logits are in memory at a time."""
        return max(1, _BLOCK_BYTES // (4 * self.vocabulary))

    def run(self, **inputs: Any) -> tuple[Any, Any]:
        """Run a forward pass; return (states, key-value cache). states: (rows, positions, ·), for `logits`."""
        if self.body is None:
            output = self.model(**inputs)
            return output.logits, output.get("past_key_values")
        output = self.body(**inputs)
        return output.last_hidden_state, output.get("past_key_values")

    def logits(self, states: Any) -> Any:
        """Return (…, vocabulary) logits of states in fp32. A model's own are in bf16, too coarse for a softmax."""
        return states.float() if self.head is None else self.head(states).float()

    def blocks(self, count: int) -> Iterator[slice]:
        """Yield slices of `count` positions, small enough for their logits to be in memory."""
        return (slice(start, start + self.block_rows) for start in range(0, count, self.block_rows))

    def map_logits(self, function: Callable[..., Any], states: Any, *others: Any) -> Any:
        """Return function(logits, *others) of (n, ·) states, block by block: (n,), ready for a backward pass.

        others: tensors of n rows. The backward pass makes each block's logits again, so no two blocks are in memory.
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        def block(part: Any, *more: Any) -> Any:
            return function(self.logits(part), *more)

        values = [
            checkpoint(block, states[part], *(other[part] for other in others), use_reentrant=False)
            for part in self.blocks(len(states))
        ]
        return torch.cat(values) if values else states.new_zeros(0).float()


def split_model(model: Any) -> Halves:
    """Split a causal language model, perhaps one under PEFT or in training.

    Some families change their logits after the head, by soft caps and scales. For those, the head is the model itself
    with states in the place of its body's output. A run of the whole model over a few tokens shows which head is right.
    """
    import torch

    whole = Halves(model, None, None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return whole
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = inner.base_model
    if body is inner:
        return whole
    choices = [Halves(model, body, head) for head in (inner.get_output_embeddings(), _head_around(inner))]
    ids = torch.arange(8, device=model.device)[None] % whole.vocabulary
    devices = [model.device] if model.device.type == "cuda" else []

    def logits(halves: Halves) -> Any:
        torch.manual_seed(0)  # in training, all have the same dropout
        return halves.logits(halves.run(input_ids=ids, use_cache=False)[0])

    with torch.no_grad(), autocast(model), torch.random.fork_rng(devices=devices):
        wanted = logits(whole)
        for halves in choices:
            try:
                if torch.equal(wanted, logits(halves)):
                    return halves
            except (AttributeError, LookupError, TypeError, ValueError):  # its forward pass wants more than states
                continue
    return whole


def _head_around(inner: Any) -> Callable[[Any], Any]:
    """Return a function that runs all of a model but its body on (n, ·) states."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    def head(states: Any) -> Any:
        body, rows = inner.base_model, states.view(1, -1, states.shape[-1])
        forward = vars(body).get("forward")  # its own, which the Trainer may have wrapped
        body.forward = lambda *args, **keywords: BaseModelOutputWithPast(last_hidden_state=rows)
        try:
            return inner(inputs_embeds=rows, use_cache=False).logits.view(*states.shape[:-1], -1)
        finally:
            del body.forward
            if forward is not None:
                body.forward = forward

    return head
