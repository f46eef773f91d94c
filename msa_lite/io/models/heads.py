"""Models in memory: the precision they compute in, their head, their layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.models.devices import is_out_of_memory

Compute = Literal["auto", "bf16", "fp32"]
"""The values of a recipe's key. auto: the best of a GPU, exact fp32 on a CPU."""
NumberFormat = Literal["bf16", "fp16", "fp32"]
"""The format of matrix products. Sums, norms and trained weights are in fp32."""

_NOTE = "msa_precision"  # of a model: the precision of its fit


def has_bf16() -> bool:
    """Check whether there is a GPU that computes in bf16. Older ones only emulate it, slower than fp32."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(compute: Compute = "auto") -> NumberFormat:
    """Return the precision on this device. Raise UsageError for bf16 on a device that has none."""
    import torch

    if compute == "fp32":
        return "fp32"
    if has_bf16():
        return "bf16"
    if torch.cuda.is_available():
        if compute == "bf16":
            name = torch.cuda.get_device_name()
            raise UsageError(f"compute: {name} has no bf16; leave the key out, and fp16 is taken")
        return "fp16"
    if compute == "auto":
        return "fp32"
    if not _cpu_has_bf16():
        raise UsageError("compute: bf16 on a CPU needs AMX or AVX512-BF16, which this one lacks; leave it out")
    return "bf16"


def has_precision(compute: Compute) -> bool:
    """Check whether this device computes in it. Only bf16 is not everywhere."""
    if compute != "bf16":
        return True
    try:
        choose_precision(compute)
    except UsageError:
        return False
    return True


def _cpu_has_bf16() -> bool:
    """Check whether the CPU has instructions for bf16; without them it would be slower than fp32."""
    import torch

    return any(present for name, present in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


def dtype_of(precision: NumberFormat) -> Any:
    """Return torch's dtype."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def note_precision(model: Any, precision: NumberFormat) -> Any:
    """Note on a model the precision that `autocast` takes for it; return the model."""
    setattr(model, _NOTE, precision)
    return model


def noted_precision(model: Any) -> NumberFormat:
    """Return a model's noted precision; without a note, the device's best."""
    return getattr(model, _NOTE, None) or choose_precision()


def autocast(model: Any) -> Any:
    """Return the context of forward passes that the Trainer does not run, in the model's noted precision.

    Without a note that is the device's best.
    """
    import torch

    precision = noted_precision(model)
    enabled = precision != "fp32"
    return torch.autocast(model.device.type, dtype_of(precision) if enabled else torch.bfloat16, enabled=enabled)


def nf4(precision: NumberFormat | None = None) -> Any:
    """Return the settings of 4-bit models: NF4 with double quantisation (Dettmers et al., 2023).

    precision: of matrix products; by default the device's best.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype_of(precision or choose_precision()),
    )


_CACHES = ("cache", "past_key_values", "cache_params")  # the names of a cache in transformers, the newest first
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

    def run(self, cache: Any = None, **inputs: Any) -> tuple[Any, Any]:
        """Run a forward pass, which goes on from a cache if there is one; return (states, cache).

        states: (rows, positions, ·), for `logits`. The cache is None where the model keeps none, or no `Cache` of
        transformers: RWKV returns a list, and RecurrentGemma keeps its states in its layers.
        """
        from transformers import Cache

        if cache is not None:
            assert self.cache_name is not None
            inputs[self.cache_name] = cache
        output = (self.model if self.body is None else self.body)(**inputs)
        states = output.logits if self.body is None else output.last_hidden_state
        kept = output.get(self.cache_name) if self.cache_name else None
        return states, kept if isinstance(kept, Cache) else None

    @cached_property
    def arguments(self) -> frozenset[str]:
        """Return the names of what the forward pass takes. Many models swallow other names without a word."""
        model = self.model if self.body is None else self.body
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        return frozenset(inspect.signature(inner.forward).parameters)

    @property
    def cache_name(self) -> str | None:
        """Return the name that the forward pass takes its cache by; None if it takes none."""
        return next((name for name in _CACHES if name in self.arguments), None)

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

        def block(rows: Any, *values_of_rows: Any) -> Any:
            return function(self.logits(rows), *values_of_rows)

        values = [
            checkpoint(block, states[rows], *(other[rows] for other in others), use_reentrant=False)
            for rows in self.blocks(len(states))
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
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                # Its forward pass wants more than states, or changes their width (ELECTRA) or dtype (Mamba) first.
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


def find_layers(model: Any) -> Any:
    """Return the list of a model's layers. Raise MismatchError for a model without such a list."""
    path = layers_path(model)
    if not path:
        raise MismatchError(f"{type(model).__name__}: has no list of layers that could be read or changed one by one")
    return model.get_submodule(path)


def layers_path(model: Any) -> str:
    """Return the name of the list of modules with the most weights, since experts are within layers; "" without one."""
    import torch

    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    }
    return max(lists, key=lambda name: sum(weight.numel() for weight in lists[name].parameters()), default="")
