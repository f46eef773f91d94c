"""Small checkpoints and adapters in memory, with headers that can be edited: what most cases start from."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.tools.fuzz.tree import Tree

KINDS: dict[str, Any] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
}  # fmt: skip
WIDTH, INNER, TOKENS = 8, 12, 20
LINEAR = {
    **{f"model.layers.{n}.self_attn.{p}_proj": (WIDTH, WIDTH) for n in (0, 1) for p in "qkvo"},
    **{f"model.layers.{n}.mlp.{p}_proj": (INNER, WIDTH) for n in (0, 1) for p in ("up", "gate")},
    **{f"model.layers.{n}.mlp.down_proj": (WIDTH, INNER) for n in (0, 1)},
}
NORMS = [f"model.layers.{n}.{name}_layernorm" for n in (0, 1) for name in ("input", "post_attention")] + ["model.norm"]
SHAPES = {
    "model.embed_tokens.weight": (TOKENS, WIDTH),
    **{f"{name}.weight": shape for name, shape in LINEAR.items()},
    **{f"{name}.weight": (WIDTH,) for name in NORMS},
    "lm_head.weight": (TOKENS, WIDTH),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": TOKENS,
    "dtype": "float32", "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "prior", "r": 2, "lora_alpha": 4,
    "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "up_proj", "down_proj"], "fan_in_fan_out": False,
    "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "inference_mode": True, "init_lora_weights": True, "peft_version": "0.21.2", "layers_to_transform": None,
}  # fmt: skip
ADAPTER_KINDS = ("plain", "rslora", "pattern", "dora", "embedding", "saved")
PREFIX = "base_model.model."
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True)
class Shard:
    """A safetensors file in parts. header: (name, item) pairs, so that a name may stand twice."""

    header: tuple[tuple[str, Any], ...]
    data: bytes
    length: int | None = None
    """The length of the header that the file states; None for the right one."""

    def encode(self) -> bytes:
        """Return the file's bytes."""
        text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(item)}" for name, item in self.header) + "}"
        raw = text.encode()
        raw += b" " * (-len(raw) % 8)
        return struct.pack("<Q", len(raw) if self.length is None else self.length % 2**64) + raw + self.data


@dataclass
class Folder:
    """A checkpoint or adapter: shards, JSON documents and other files by name."""

    shards: dict[str, Shard]
    documents: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)

    def tree(self, name: str) -> Tree:
        """Return its files below a folder of that name."""
        found: Tree = {f"{name}/{file}".encode(): one.encode() for file, one in self.shards.items()}
        for file, document in self.documents.items():
            found[f"{name}/{file}".encode()] = (
                document if isinstance(document, bytes) else json.dumps(document).encode()
            )
        for file, node in self.others.items():
            escaped = all("\udc80" <= sign <= "\udcff" for sign in file if "\ud800" <= sign <= "\udfff")
            found[name.encode() + b"/" + file.encode("utf-8", "surrogateescape" if escaped else "surrogatepass")] = node
        return found


def shard(tensors: Mapping[str, tuple[str, np.ndarray]]) -> Shard:
    """Return a file of tensors by name: (dtype, values)."""
    header: list[tuple[str, Any]] = [("__metadata__", {"format": "pt"})]
    parts, at = [], 0
    for name, (kind, values) in tensors.items():
        raw = values.astype(KINDS[kind]).tobytes()
        header.append((name, {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}))
        parts.append(raw)
        at += len(raw)
    return Shard(tuple(header), b"".join(parts))


@functools.cache
def checkpoint(seed: int, kind: str = "F32", files: int = 2) -> Folder:
    """Return a checkpoint of random weights in one or two files."""
    random = np.random.default_rng(seed)
    weights = {name: (kind, random.normal(0, 0.5, shape)) for name, shape in SHAPES.items()}
    names = list(weights)
    documents: dict[str, Any] = {"config.json": dict(CONFIG), "generation_config.json": {"eos_token_id": 1}}
    if files == 1:
        shards = {"model.safetensors": shard(weights)}
    else:
        parts = {FIRST: names[:9], SECOND: names[9:]}
        shards = {file: shard({n: weights[n] for n in part}) for file, part in parts.items()}
        size = sum(len(one.data) for one in shards.values())
        documents["model.safetensors.index.json"] = {
            "metadata": {"total_size": size},
            "weight_map": {n: file for file, part in parts.items() for n in part},
        }
    return Folder(shards, documents, {"tokenizer_config.json": b"{}", "LICENSE": b"do as you like"})


@functools.cache
def adapter(seed: int, what: str = "plain", kind: str = "F32") -> Folder:
    """Return an adapter of one of ADAPTER_KINDS, of random factors."""
    random = np.random.default_rng(seed + 100)
    config: dict[str, Any] = dict(ADAPTER)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for module, (out, into) in LINEAR.items():
        if module.rsplit(".", 1)[1] not in ADAPTER["target_modules"]:  # type: ignore[operator]
            continue
        rank = 3 if what == "pattern" and module.endswith("q_proj") else 2
        tensors[f"{PREFIX}{module}.lora_A.weight"] = (kind, random.normal(0, 0.3, (rank, into)))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (kind, random.normal(0, 0.3, (out, rank)))
        if what == "dora":
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = (kind, random.uniform(0.5, 2, (out,)))
    if what == "rslora":
        config["use_rslora"] = True
    elif what == "dora":
        config["use_dora"] = True
    elif what == "pattern":
        config |= {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 7}}
    elif what == "embedding":
        config["target_modules"] = [*config["target_modules"], "embed_tokens"]
        tensors[f"{PREFIX}model.embed_tokens.lora_embedding_A"] = (kind, random.normal(0, 0.3, (2, TOKENS)))
        tensors[f"{PREFIX}model.embed_tokens.lora_embedding_B"] = (kind, random.normal(0, 0.3, (WIDTH, 2)))
    elif what == "saved":
        config["modules_to_save"] = ["norm"]
        tensors[f"{PREFIX}model.norm.weight"] = (kind, random.normal(0, 0.5, (WIDTH,)))
    return Folder({"adapter_model.safetensors": shard(tensors)}, {"adapter_config.json": config})


def copied(folder: Folder) -> Folder:
    """Return a folder that can be changed without changing the cached one."""
    return replace(folder, shards=dict(folder.shards), documents=dict(folder.documents), others=dict(folder.others))
