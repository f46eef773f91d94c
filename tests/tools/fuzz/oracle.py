"""The right result of a merge, by float64 arithmetic over what the safetensors library reads; no code of msa-lite."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors import deserialize

from tests.tools.fuzz.models import KINDS, PREFIX

Arrays = dict[str, tuple[str, np.ndarray]]
_HARMLESS = re.compile(r"[\w.\\*-]*")  # patterns that the oracle matches with re
_BITS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
_LEAST = {"F64": 2.0**-1074, "F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}


class Unknown(Exception):
    """The oracle cannot tell what the result should be."""


def arrays(folder: Path) -> Arrays:
    """Return the stored (dtype, values) of each tensor. Raises SafetensorError as the library does."""
    names = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if (folder / "adapter_config.json").is_file():
        names = [folder / "adapter_model.safetensors"]
    elif index.is_file():
        names = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    elif (folder / "model.safetensors").is_file():
        names = [folder / "model.safetensors"]
    found: Arrays = {}
    for path in names:
        for name, item in deserialize(path.read_bytes()):
            kind = item["dtype"]
            if kind in KINDS:
                found[name] = (kind, np.frombuffer(bytes(item["data"]), KINDS[kind]).reshape(item["shape"]))
            else:
                found[name] = (kind, np.frombuffer(bytes(item["data"]), np.uint8))
    return found


def _setting(patterns: object, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items() if isinstance(patterns, dict | None) else ():
        if not _HARMLESS.fullmatch(pattern):
            raise Unknown(f"pattern {pattern!r}")
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return default


def deltas(folder: Path, base: Path | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (name, delta, size) of each tensor that a vector changes; size: the same from absolute values.

    base: folder of the prior, which is only opened where the vector is nothing without it.
    """
    tuned = arrays(folder)
    plain = all("lora_A." in name or "lora_B." in name or "lora_embedding" in name for name in tuned)
    prior = arrays(base) if base and not plain else None
    if not (folder / "adapter_config.json").is_file():
        if prior is None:
            raise Unknown("no prior")
        for name, (kind, values) in tuned.items():
            if kind in _BITS and name in prior:
                new, old = values.astype(np.float64), prior[name][1].astype(np.float64)
                if new.shape != old.shape:
                    raise Unknown("other tokens")
                yield name, new - old, np.abs(new) + np.abs(old)
        return
    config = json.loads((folder / "adapter_config.json").read_text())
    for key, (_, left) in tuned.items():
        name = key.removeprefix(PREFIX)
        if ".lora_A." in name or name.endswith("lora_embedding_A"):
            module = re.split(r"\.lora_", name)[0]
            a = left.astype(np.float64)
            b = tuned[key.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")][1].astype(np.float64)
            rank = a.shape[0]
            scale = _setting(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
            scale /= np.sqrt(rank) if config.get("use_rslora") else rank
            delta, size = (b @ a) * scale, (np.abs(b) @ np.abs(a)) * abs(scale)
            if "embedding" in name:
                delta, size = delta.T, size.T
            magnitude = tuned.get(f"{PREFIX}{module}.lora_magnitude_vector")
            if magnitude is not None:
                if prior is None:
                    raise Unknown("no prior")
                old = prior[f"{module}.weight"][1].astype(np.float64)
                moved = old + delta
                norm = np.linalg.norm(moved, axis=1, keepdims=True)
                ratio = magnitude[1].astype(np.float64)[:, None] / norm
                delta, size = ratio * moved - old, np.abs(ratio) * (np.abs(old) + size) + np.abs(old)
            yield f"{module}.weight", delta, size
        elif "lora_" not in name:
            if prior is None or name not in prior:
                raise Unknown("no prior")
            old = prior[name][1].astype(np.float64)
            yield name, left.astype(np.float64) - old, np.abs(left.astype(np.float64)) + np.abs(old)


def faults(
    root: Path, out: str, parts: dict[str, str], alpha: float, beta: float, dtype: str, slack: float = 0.5
) -> list[str]:
    """Return what is wrong with a merged model. parts: folders of target, forget, retain and prior by name.

    slack: units in the last place that a result may be off by rounding: a half to nearest, one stochastically.
    """
    before, after = arrays(root / parts["target"]), arrays(root / out)
    prior = root / parts["prior"] if "prior" in parts else None
    wanted = {name: values.astype(np.float64) for name, (kind, values) in before.items() if kind in _BITS}
    sizes = {name: np.abs(values) for name, values in wanted.items()}
    for role, strength in (("forget", -alpha), ("retain", beta)):
        if role in parts and strength:
            for name, delta, size in deltas(root / parts[role], prior):
                if name not in wanted or delta.shape != wanted[name].shape:
                    raise Unknown(f"{name} goes by another name or shape")
                with np.errstate(all="ignore"):
                    wanted[name] = wanted[name] + strength * delta
                    sizes[name] = sizes[name] + abs(strength) * size
    found = []
    if before.keys() != after.keys():
        found.append(f"other tensors: {sorted(before.keys() ^ after.keys())[:5]}")
    for name in before.keys() & after.keys():
        kind, values = after[name]
        if name not in wanted:
            if kind != before[name][0] or values.tobytes() != before[name][1].tobytes():
                found.append(f"{name}: was no float and changed")
        elif kind != {"same": before[name][0]}.get(dtype, dtype):
            found.append(f"{name}: stored as {kind}")
        else:
            found += _compare(name, values.astype(np.float64), wanted[name], sizes[name], kind, slack)
    return found


def _compare(
    name: str, values: np.ndarray, wanted: np.ndarray, size: np.ndarray, kind: str, slack: float
) -> Sequence[str]:
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(wanted), 1e-300)))
        unit = np.maximum(np.exp2(exponent - _BITS[kind] + 1), _LEAST[kind])
        near = slack * 1.02 * unit + (1e-13 if kind == "F64" else 4e-6) * size + 1e-300
        wrong = ~((np.abs(values - wanted) <= near) | (values == wanted) | (np.isnan(values) & np.isnan(wanted)))
    if values.shape != wanted.shape:
        return [f"{name}: of shape {values.shape}"]
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        return [
            f"{name}[{at}]: {values.reshape(-1)[at]!r}, expected {wanted.reshape(-1)[at]!r} ({int(wrong.sum())} wrong)"
        ]
    return []
