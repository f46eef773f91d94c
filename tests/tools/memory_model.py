"""A model of GPU memory that needs no GPU: run a real training step on fake tensors and count the bytes that live.

Weights and activations are fake tensors (`FakeTensorMode`): they have shapes and storages, but no values, so a 70B
model takes no memory. Token ids, masks and positions are real, because code branches on them. `Ledger` sees every
operation, counts each new storage when it appears and when it is freed, and keeps the parts of the highest total.

The tensors claim to be on the CPU, since autograd has no threads for a GPU that is absent. Differences to CUDA:

- bf16 autocast is the CPU's. It casts the same operations of a Llama: the linear layers and the attention.
- Attention takes the CPU's flash kernel, which saves its output and one fp32 number a query, as CUDA's does.
- 4-bit products: bitsandbytes' CUDA code unpacks the weight for more than a few rows; `Ledger` adds that in.
- Blocks that a kernel takes for itself while it runs are not counted; on the CPU they are below 0.1 % of a step.
- The context of CUDA and its libraries (about 0.45 GB), fragmentation and rounding up to 512 bytes are not counted.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.io.console.progress import silent
from msa_lite.io.models import heads as precision
from msa_lite.io.models import streaming, transit
from msa_lite.train import FitSettings
from msa_lite.train.fit.loop import Loop, VectorFit
from msa_lite.train.memory import model as train_model
from msa_lite.train.memory.rungs import Rung, set_up
from msa_lite.train.objectives import plain

GB = 1e9
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # of safetensors' headers
CONTEXT = 0.45 * GB
"""Bytes that CUDA and cuBLAS take for themselves."""

LLAMA = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70B": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""The sizes of SmolLM2-135M, Llama 3.2 1B, Llama 3.1 8B and 70B."""


@dataclass(frozen=True)
class Memory:
    """The peak of a step."""

    total: int
    """Bytes of tensors, without CUDA's context."""
    parts: dict[str, int]
    """Bytes at the moment of the peak by what they hold; they add up to the total."""
    phase: str
    """The phase of the peak: forward, backward or optimizer."""


_HOST = "host"
# What a fake tensor answers where code asks for its values: two ways to compute the same agree.
_ANSWERS = {torch.ops.aten._local_scalar_dense.default: 1.0, torch.ops.aten.equal.default: True}


class Ledger(TorchDispatchMode):
    """Count the bytes of all storages that operations create, until they are freed.

    Tensors of integers, and what is computed of them alone, are real; all others are fake.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.phase = "weights"
        self.live: Counter[str] = Counter()
        self.peak = Memory(0, {}, self.phase)
        self._entries: Any = torch.utils.weak.WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fake = any(isinstance(t, FakeTensor) for t in tensors)
        if not tensors and func is not torch.ops.aten.arange.default:
            fake = (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
        if not fake:
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        elif func in _ANSWERS:
            return _ANSWERS[func]
        else:
            result = func(*_without_masks(func, args), **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(func, tensor)
        unpacked = math.prod(args[2]) * args[0].element_size() if func is _product_4bit() else 0
        self._look(unpacked)
        return result

    def _count(self, func: Any, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage in self._entries:
            return
        entry = [self._part(func, tensor), storage.nbytes()]
        self._entries[storage] = entry
        self.live[entry[0]] += entry[1]
        weakref.finalize(storage, self._free, entry)

    def _free(self, entry: list[Any]) -> None:
        self.live[entry[0]] -= entry[1]

    def _part(self, func: Any, tensor: Any) -> str:
        if self.phase != "step":
            return self.phase
        if tensor.shape[-1:] == (self.vocabulary,):
            return "logits"
        backward = torch._C._current_graph_task_id() != -1
        recomputed = torch.is_grad_enabled() or func is _product_4bit()  # by checkpointing
        return "temporaries" if backward and not recomputed else "activations"

    def move(self, tensor: Any, part: str) -> None:
        """Count a tensor as another part from now on."""
        entry = self._entries[tensor.untyped_storage()]
        self.live[entry[0]] -= entry[1]
        self.live[part] += entry[1]
        entry[0] = part

    def _look(self, transient: int) -> None:
        total = sum(self.live.values()) - self.live[_HOST] + transient
        if total <= self.peak.total:
            return
        parts = {part: size for part, size in self.live.items() if size and part != _HOST}
        if transient:
            parts["temporaries"] = parts.get("temporaries", 0) + transient
        backward = torch._C._current_graph_task_id() != -1
        phase = self.phase if self.phase != "step" else "backward" if backward else "forward"
        self.peak = Memory(total, parts, phase)


def _product_4bit() -> Any:
    return getattr(torch.ops.bitsandbytes.gemm_4bit, "default", None) if _has_bitsandbytes() else None


def _has_bitsandbytes() -> bool:
    return hasattr(torch.ops.bitsandbytes, "gemm_4bit")


def _without_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace real masks among indices by the positions that they choose, which a fake operation cannot count."""
    if func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return args[0], indices, *args[2:]


def make_model(shape: str | dict[str, Any], dtype: Any, quantization_config: Any = None, **changes: Any) -> Any:
    """Make a Llama, on fake tensors where a `FakeTensorMode` is on."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, **sizes, **changes), dtype=dtype)
    if quantization_config is not None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                _quantise(module, quantization_config)
        model.is_loaded_in_4bit = True
    return model


def _quantise(module: Any, config: Any) -> None:
    """Turn a linear layer into bitsandbytes' Linear4bit with double quantisation: 4.127 bits a weight."""
    import bitsandbytes as bnb

    def bytes_(count: int) -> Any:
        return torch.empty(count).to(torch.uint8)  # tensors of integers would be real from the start

    weights = module.weight.numel()
    blocks = math.ceil(weights / 64)
    double = bnb.functional.QuantState(
        torch.empty(math.ceil(blocks / 256)), code=torch.empty(256), blocksize=256, dtype=torch.float32
    )
    weight: Any = torch.nn.Parameter(bytes_(weights // 2).view(-1, 1), requires_grad=False)
    weight.quant_state = bnb.functional.QuantState(
        bytes_(blocks),
        shape=module.weight.shape,
        code=torch.empty(16),
        blocksize=64,
        quant_type="nf4",
        dtype=config.bnb_4bit_compute_dtype,
        offset=torch.empty(()),
        state2=double,
    )
    weight.compress_statistics, weight.quant_type = True, "nf4"
    module.__class__ = bnb.nn.Linear4bit  # its __init__ makes a weight that cannot be fake
    module.weight, module.quant_state = weight, weight.quant_state
    module.compute_dtype, module.compute_type_is_set = config.bnb_4bit_compute_dtype, True
    module.support_avx512bf16_for_cpu = False


def make_rows(lengths: Sequence[int], labelled: float = 1.0) -> list[Example]:
    """Make rows that begin differently and whose last part is labelled."""
    rows = []
    for index, length in enumerate(lengths):
        ids = [3 + (7 * index + t) % 90 for t in range(length)]
        start = length - round(length * labelled)
        rows.append(Example(index, ids, [IGNORE] * start + ids[start:]))
    return rows


def _apply(module: Any, change: Any, recurse: bool = True) -> Any:
    """Do what `Module._apply` does; PyTorch's own swaps tensors, which fails for fake ones."""
    for child in module.children() if recurse else ():
        child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is not None and (changed := change(parameter.detach())).dtype != parameter.dtype:
            module._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


@contextmanager
def without_memory(vocabulary: int, fake: bool = True) -> Iterator[Ledger]:
    """Make tensors without memory, as on a GPU that computes in bf16; provide the ledger of their bytes.

    fake: False to make real tensors, to check the ledger.
    """
    ledger = Ledger(vocabulary)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(precision, "has_bf16", return_value=True))
        if torch.cuda.is_available():  # nothing goes there; afterwards, accelerate looks for it anew
            stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
            stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=False))
        stack.enter_context(mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True))
        if fake:
            stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(ledger)


@contextmanager
def _states_on_host(ledger: Ledger) -> Iterator[None]:
    """Count what `save_on_cpu` saves as the host's: here both are CPU tensors."""

    class Saved(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **options: Any) -> None:
            super().__init__(self._pack, torch.clone)

        def _pack(self, tensor: Any) -> Any:
            copy = torch.clone(tensor.detach())
            ledger.move(copy, _HOST)
            return copy

    with mock.patch("transformers.modeling_utils.save_on_cpu", Saved):
        yield


@contextmanager
def _layers_on_host(ledger: Ledger) -> Iterator[None]:
    """Count what layers hold while they wait as the host's: here both are CPU tensors."""

    def empty_bytes(nbytes: int, device: Any = None) -> Any:
        tensor = torch.empty(nbytes).to(torch.uint8)  # of integers from the start, it would be real
        ledger.move(tensor, _HOST if device is None else "weights")
        return tensor

    with (
        mock.patch.object(transit, "empty_bytes", empty_bytes),
        mock.patch.object(streaming, "free_ram", return_value=1 << 50),
    ):
        yield


def peak(
    shape: str | dict[str, Any],
    mode: Any,
    rows: Sequence[Example],
    rung: Rung | None = None,
    *,
    rank: int = 32,
    optimizer: Literal["auto", "adamw", "adamw_8bit"] = "auto",
    stored: Any = torch.bfloat16,
    peer: bool = False,
    fake: bool = True,
) -> Memory:
    """Return the peak of one training step of a fit, optimiser states included.

    shape: a name of `SHAPES`, or the sizes. rows: those of the step. rung: all rows at once if None. optimizer: auto as
    on a GPU. stored: the dtype of the prior's files. peer: True for the Trainer with PEFT and no code of ours, which
    runs all rows at once, with checkpointing if the rung says so.
    """
    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    if optimizer == "auto" and mode == "qlora" and not peer:
        optimizer = "adamw_8bit"
    settings = FitSettings(mode, lora_rank=rank, lora_alpha=2 * rank, batch_size=len(rows), optimizer=optimizer)
    rung = rung or Rung(len(rows))

    def load(folder: Any, dtype: Any, device_map: Any = None, **kwargs: Any) -> Any:
        return make_model(sizes, stored if dtype == "auto" else dtype, **kwargs)

    headers = SimpleNamespace(tensors={"weight": SimpleNamespace(is_float=True, shape=(1, 1), dtype=_CODES[stored])})
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train_model, "load_whole", load),
        mock.patch.object(train_model, "load_checkpoint", return_value=headers),
        mock.patch.object(plain, "can_share", return_value=False),  # no two rows begin alike
        mock.patch.object(plain, "can_pack", return_value=False),  # as on a GPU
        without_memory(sizes["vocab_size"], fake) as ledger,
        _states_on_host(ledger),
        _layers_on_host(ledger),
    ):
        if peer:
            trainer, inputs = _peer_trainer(settings, Path(folder), rung), to_batch(rows, 2)
        else:
            trainer, inputs = _our_trainer(rows, settings, Path(folder), rung), {"rows": list(range(len(rows)))}
        for end in (trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()):
            if "weight" not in end._parameters:  # left in the host's memory by the rung
                ledger.move(end.weight, _HOST)
        return _one_step(trainer, inputs, ledger)


def _our_trainer(rows: Sequence[Example], settings: FitSettings, folder: Path, rung: Rung) -> Any:
    """Make the trainer of a fit."""
    model = train_model.load_trainable(folder, settings)
    set_up(model, rung)
    objective, tokenizer = plain.PlainLoss(rows, 2), SimpleNamespace(pad_token_id=2)
    objective.prepare(model)
    nowhere: Any = None
    run = Loop(VectorFit(nowhere, rows, tokenizer, settings, objective), folder, silent, rung=rung)
    return run.make_trainer(model, lambda line, number: None)


def _peer_trainer(settings: FitSettings, folder: Path, rung: Rung) -> Any:
    """Make the Trainer that PEFT's documentation shows: 4-bit models go through `prepare_model_for_kbit_training`."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import Trainer, TrainingArguments

    dtypes = {"full": torch.float32, "lora": "auto", "qlora": torch.bfloat16}
    quantised = {"quantization_config": precision.nf4()} if settings.mode == "qlora" else {}
    model = train_model.load_whole(folder, dtype=dtypes[settings.mode], **quantised)
    model.config.use_cache = False
    if settings.mode == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if settings.mode != "full":
        rank, alpha = settings.lora_rank, settings.lora_alpha
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=settings.lora_targets)
        model = get_peft_model(model, config)
    if rung.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return Trainer(model, TrainingArguments(str(folder), bf16=True, report_to="none"))


def _one_step(trainer: Any, inputs: dict[str, Any], ledger: Ledger) -> Memory:
    """Run forward, backward, clipping and the optimiser's step, as the Trainer does from its second step on."""
    optimizer = trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if len(trained) < len(list(model.parameters())):
            ledger.move(parameter, "adapters")
        parameter.register_post_accumulate_grad_hook(lambda p: ledger.move(p.grad, "gradients"))
        parameter.grad = torch.zeros_like(parameter)
    ledger.phase = "optimizer"
    optimizer.step()  # makes its states
    model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    ledger.phase, ledger.peak = "step", Memory(0, {}, "")
    trainer.training_step(model, inputs)
    ledger.phase = "optimizer"
    trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return ledger.peak
