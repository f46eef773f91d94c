"""The sizes of a model that decide its memory, from its config and the headers of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msa_lite.errors import FormatError
from msa_lite.io.weights.checkpoint import Checkpoint, text_part
from msa_lite.io.weights.quantised_forms import Packed
from msa_lite.io.weights.tied_head import says_tied
from msa_lite.io.weights.vocabulary import has_token_role, is_head

# Families whose activations are counted exactly (`budget.needs`). Others get a rough estimate.
_KNOWN = {
    "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "smollm3", "gemma", "gemma2", "gemma3_text",
    "phi3", "granite",
}  # fmt: skip
_HEAD_NORMS = {"qwen3", "olmo2", "olmo3", "gemma3_text"}  # queries and keys are normalised, too
# Published configs (their config.json on the Hub) of the families that shipped recipes name, with the bytes of a stored
# weight, by a part of the name.
_PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True}, 2),
    "Meta-Llama-3-8B": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}, 2),
    "zephyr-7b-beta": (
        {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False}, 2),
    "OLMo-1B-0724": (
        {"model_type": "olmo", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 8192, "vocab_size": 50304, "tie_word_embeddings": False}, 4),
    "OLMo-7B-0724": (
        {"model_type": "olmo", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 50304, "tie_word_embeddings": False}, 4),
    "Llama-3.1-8B": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}, 2),
    "Llama-2-7b": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
         "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}, 2),
    "OLMo-2-1124-7B": (
        {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352, "tie_word_embeddings": False}, 4),
}  # fmt: skip
_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Linear:
    """A linear layer, or several of equal name and size in different blocks."""

    name: str
    """The last part of the module's name: "q_proj"."""
    outputs: int
    inputs: int
    count: int = 1

    @property
    def weights(self) -> int:
        """Return the weights of all of them."""
        return self.outputs * self.inputs * self.count

    def adapter(self, rank: int) -> int:
        """Return the weights of their adapters of this rank."""
        return rank * (self.outputs + self.inputs) * self.count


@dataclass(frozen=True)
class Shape:
    """The sizes of a causal language model."""

    name: str
    """The model's name in messages."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    linear: tuple[Linear, ...]
    """The linear layers of all blocks."""
    embedding: int
    """Weights of the embedding, and of positions where they are learnt."""
    head: int
    """Weights of the head; 0 where it is tied to the embedding."""
    norms: int
    """Weights of norms and biases, and all others."""
    stored: int
    """Bytes of the weights as they are stored."""
    has_head_norms: bool = False
    """True where queries and keys are normalised, too."""
    rough: str | None = None
    """The reason why estimates of activations are rough; None for a family that is known."""

    @property
    def in_linear(self) -> int:
        """Return the weights of the linear layers."""
        return sum(linear.weights for linear in self.linear)

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return self.in_linear + self.embedding + self.head + self.norms

    @property
    def width(self) -> float:
        """Return the bytes of a weight as it is stored, on average."""
        return self.stored / self.weights

    def trained(self, mode: str, rank: int, targets: str | Iterable[str]) -> int:
        """Return the number of weights that a fit trains: all in full mode, else those of adapters of this rank."""
        return self.weights if mode == "full" else sum(linear.adapter(rank) for linear in self.adapted(targets))

    def adapted(self, targets: str | Iterable[str]) -> list[Linear]:
        """Return the linear layers that get an adapter. targets: "all-linear", a regular expression, or names."""
        if isinstance(targets, str):
            is_all = targets.lower() == "all-linear"
            return [layer for layer in self.linear if is_all or re.search(rf"\b{re.escape(layer.name)}\b", targets)]
        return [layer for layer in self.linear if any(target.rpartition(".")[2] == layer.name for target in targets)]


def read_shape(checkpoint: Checkpoint, name: str) -> Shape:
    """Return the sizes of a checkpoint. name: for messages. Raise FormatError where the config lacks them."""
    tensors = {entry.name: entry.shape for entry in checkpoint.tensors.values() if entry.is_float}
    # A run dequantises such weights to bfloat16, of 2 bytes.
    entries = checkpoint.tensors.values()
    stored = sum(2 * math.prod(entry.shape) if isinstance(entry, Packed) else entry.nbytes for entry in entries)
    quantised = "its weights are stored quantised" if checkpoint.config.get("quantization_config") else None
    return _make_shape(name, checkpoint.config, tensors, stored, quantised)


def published_shape(name: str) -> tuple[Shape, str] | None:
    """Return the published sizes of a model by its name, and the family that it belongs to; None for any other."""
    for family, (config, width) in _PUBLISHED.items():
        if family.lower() in name.lower():
            return shape_of_config({"model_type": "llama", **config}, name, width), family
    return None


def shape_of_config(config: Mapping[str, Any], name: str, width: int = 4) -> Shape:
    """Return the sizes of a model from a config with Llama's key names. width: bytes a weight; the default is fp32."""
    sizes = _sizes(config, name)
    hidden, inner, vocabulary = sizes["hidden"], sizes["intermediate"], sizes["vocabulary"]
    queries, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    block = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(sizes["layers"]):
        tensors |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in block.items()}
    tensors["model.norm.weight"] = (hidden,)
    if says_tied(config) is False:
        tensors["lm_head.weight"] = (vocabulary, hidden)
    return _make_shape(name, config, tensors, width * sum(math.prod(shape) for shape in tensors.values()), None)


def _make_shape(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], stored: int, fault: str | None
) -> Shape:
    config = {**config, **text_part(config)}
    family = str(config.get("model_type"))
    linear: dict[tuple[str, int, int], int] = {}
    embedding = head = norms = 0
    for tensor, shape in tensors.items():
        count, module = math.prod(shape), tensor.removesuffix(".weight").rpartition(".")[2]
        if is_head(tensor) and len(shape) == 2:
            head += count
        elif has_token_role(tensor) or (len(shape) == 2 and not _LAYER.search(tensor)):
            embedding += count
        elif len(shape) == 2 and tensor.endswith(".weight"):
            key = (module, shape[1], shape[0]) if family == "gpt2" else (module, shape[0], shape[1])
            linear[key] = linear.get(key, 0) + 1
        else:
            norms += count
    return Shape(
        name=name,
        linear=tuple(Linear(*key, count) for key, count in linear.items()),
        embedding=embedding,
        head=0 if says_tied(config) and embedding else head,
        norms=norms,
        stored=stored,
        has_head_norms=family in _HEAD_NORMS,
        rough=fault or _doubt(family, config, tensors),
        **_sizes(config, name),
    )


def _doubt(family: str, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why the activations of a model are not known well, or None."""
    if any("expert" in key and config[key] for key in config) or any(".experts." in name for name in tensors):
        return "a mixture of experts"
    return None if family in _KNOWN else f"a family that is not known well ({family[:40]})"


def _sizes(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """Return layers, widths and heads of a config of any family. Raise FormatError where one is missing."""

    def read(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), default)
        if value is None:
            raise FormatError(f"{name}: config.json: no {keys[0]}, so its memory cannot be predicted")
        return int(value)

    hidden = read("hidden_size", "n_embd", "d_model", "emb_dim")
    heads = read("num_attention_heads", "n_head", "n_heads", "num_heads", default=1)
    return {
        "layers": read("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": read("num_key_value_heads", default=heads),
        "head_dim": read("head_dim", default=max(1, hidden // heads)),
        "intermediate": read("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        "vocabulary": read("vocab_size"),
    }
