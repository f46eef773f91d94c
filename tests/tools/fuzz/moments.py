"""Cases of `msa-lite merge --filter`: moments that are damaged, exchanged or odd, under a manifest that fits or not."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors import deserialize

from tests.tools.fuzz import merges, oracle
from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.models import INNER, KINDS, LINEAR, WIDTH, Shard, adapter, checkpoint, shard
from tests.tools.fuzz.tree import PLACES, Special, Tree, lay, read_tree
from tests.tools.fuzz.values import damaged, edited, flipped

Draw = Callable[..., Any]
_MANIFEST, _FILE = b"moments/manifest.json", b"moments/moments-00001.safetensors"
_SIDES, _RIDGES = ("forget", "retain"), (1e-3, 1e-1)  # of the mean eigenvalue
_CHANGES = (
    "none", "flip", "flip", "damage", "sides", "zeros", "transposed", "dtype", "shape", "NaN", "header", "header",
    "manifest", "manifest", "special", "drop", "extra",
)  # fmt: skip
_EXTRA = ("moments-00000.safetensors", "moments-00002.safetensors", "x.safetensors", "x", ".lock", "a/b", "x.bin")


@functools.cache
def measured() -> Tree:
    """Return the files of moments of a checkpoint, as msa-lite lays them down."""
    from safetensors.numpy import save_file

    from msa_lite.io.finished.manifest import stage_folder
    from msa_lite.io.weights.hub import fetch

    draw, roots, layers = np.random.default_rng(7), dict[str, np.ndarray](), dict[str, Any]()
    for module, (_, inputs) in LINEAR.items():
        first = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("gate_proj", "up_proj")
        layers[f"{module}.weight"] = [f"{first}.weight", False]
        for side in _SIDES:
            values = draw.normal(size=(draw.integers(2, inputs + 1), inputs))
            roots.setdefault(f"{side}.{first}.weight", values.astype(np.float32))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        lay(checkpoint(0).tree("target"), root)
        inputs = {"target": fetch(str(root / "target")).identity(), "forget": "0" * 64, "retain": "1" * 64}
        with stage_folder(root / "moments", "moments", inputs, {"layers": layers}) as folder:
            save_file(roots, folder / _FILE.decode().rpartition("/")[2])
        return read_tree(root, "moments")


def _as_shard(raw: bytes) -> Shard:
    """Return a sound safetensors file in parts."""
    size = int.from_bytes(raw[:8], "little")
    return Shard(tuple(json.loads(raw[8 : 8 + size]).items()), raw[8 + size :])


def _arrays(raw: bytes) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(bytes(item["data"]), KINDS[item["dtype"]]).reshape(item["shape"])
        for name, item in deserialize(raw)
        if item["dtype"] in KINDS
    }


@st.composite
def _changed(draw: Draw, what: str, roots: Mapping[str, np.ndarray]) -> bytes:
    """Return the file of roots in which one or more are not as they were measured."""
    kinds, names = dict.fromkeys(roots, "F32"), sorted(roots)
    new, chosen = dict(roots), draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    for name in names if what == "sides" else chosen:
        value = roots[name]
        if what == "sides":
            side, _, root = name.partition(".")
            new[name] = roots[f"{_SIDES[side == 'forget']}.{root}"]
        elif what == "zeros":
            new[name] = np.zeros_like(value)
        elif what == "transposed":
            new[name] = value.T
        elif what == "dtype":
            kinds[name] = draw(st.sampled_from(["F64", "F16", "BF16", "I64"]))
        elif what == "NaN":
            new[name] = value.copy()
            new[name].flat[0] = draw(st.sampled_from([np.nan, np.inf]))
        else:
            count, inputs = value.shape
            shapes = [(0, inputs), (count, 0), (value.size,), (1, *value.shape), (count, inputs + 1), (count, 1), ()]
            shapes += [(count + 1, inputs), (count * inputs, 1), (1, WIDTH + INNER), (1, count * inputs)]
            new[name] = np.ones(draw(st.sampled_from(shapes)))
    return shard({name: (kinds[name], value) for name, value in new.items()}).encode()


def _sealed(tree: Tree, manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest that fits the files."""
    from msa_lite.io.finished.seal import manifest_text

    files = {
        name.decode("utf-8", "replace").removeprefix("moments/"): {
            "sha256": hashlib.sha256(node).hexdigest(), "bytes": len(node)
        }
        for name, node in tree.items()
        if isinstance(node, bytes) and name.startswith(b"moments/") and name != _MANIFEST
    }  # fmt: skip
    return manifest_text({**manifest, "files": files} if isinstance(manifest, dict) else {"x": manifest}).encode()


@st.composite
def moments_cases(draw: Draw) -> Case:
    """A merge with moments that have one change, or none; half of them under a manifest that fits the change."""
    tree, what = dict(measured()), draw(st.sampled_from(_CHANGES))
    raw, whole = tree[_FILE], tree[_MANIFEST]
    assert isinstance(raw, bytes)
    assert isinstance(whole, bytes)
    manifest, fits, note = json.loads(whole), draw(st.booleans()), what
    if what == "flip":
        tree[_FILE] = draw(flipped(raw))
    elif what == "damage":
        tree[_FILE] = draw(damaged(raw))
    elif what == "header":
        one, note = draw(merges.header_edits(_as_shard(raw)))
        tree[_FILE] = one.encode()
    elif what == "manifest":
        if fits:
            manifest = draw(edited(manifest, ("layers", "inputs", "kind", "files")))
            note += f" {json.dumps(manifest)[:3000]}"
        else:
            tree[_MANIFEST] = draw(damaged(whole))
    elif what == "special":
        specials = [*PLACES, Special("sparse", size=1 << 30)]
        tree[draw(st.sampled_from([_FILE, _MANIFEST]))] = draw(st.sampled_from(specials))
        fits = False
    elif what == "drop":
        del tree[draw(st.sampled_from([_FILE, _MANIFEST]))]
        fits = False
    elif what == "extra":
        name = draw(st.sampled_from(_EXTRA))
        tree[f"moments/{name}".encode()] = draw(st.sampled_from([raw, b"", b"x"]))
        note += f" {name}"
    elif what != "none":
        tree[_FILE] = draw(_changed(what, _arrays(raw)))
    if fits and what != "none":
        tree[_MANIFEST], note = _sealed(tree, manifest), f"{note}, sealed"
    is_same = tree == measured()
    strength, kind = draw(st.sampled_from([0.25, 1.0, 4.0])), draw(st.sampled_from(["plain", "rslora", "pattern"]))
    given = {"--target": "target", "--forget": "forget", "--alpha": "0.75", "--out": "out"}
    words = [word for pair in given.items() for word in pair]
    tree |= checkpoint(0).tree("target") | adapter(3, kind).tree("forget")
    return Case(
        "merge --filter",
        tree,
        ["merge", *words, "--filter", "moments", "--filter-strength", str(strength)],
        partial(_check, given=given, strength=strength),
        [] if is_same else [note],
        statuses=(0,) if is_same else (0, 2, 3) if fits else (2, 3),
        outs=("out", "out-filtered-forget"),
    )  # fmt: skip


def _check(root: Path, outcome: Outcome, given: Mapping[str, str], strength: float) -> Sequence[str]:
    """Compare the filtered adapter with its definition over the roots that lie there, then the model with its merge."""
    manifest = json.loads((root / "moments/manifest.json").read_bytes())
    roots: dict[str, np.ndarray] = {}
    for name in manifest["files"]:
        roots |= _arrays((root / "moments" / name).read_bytes())
    before, after = (oracle.arrays(root / folder) for folder in ("forget", "out-filtered-forget"))
    found = []
    scale = json.loads((root / "out-filtered-forget/manifest.json").read_bytes())["filter"]["scale"]
    for name, (_, values) in before.items():
        wanted, layer = values.astype(np.float64), name.removeprefix("base_model.model.").replace("lora_A.", "")
        if layer in manifest["layers"] and ".lora_A." in name:
            first, second = manifest["layers"][layer][0], []
            for side, ridge in zip(_SIDES, _RIDGES, strict=True):
                x = roots[f"{side}.{first if isinstance(first, str) else first[0]}"].astype(np.float64)
                moment = x.T @ x
                second.append(moment / (np.trace(moment) or 1.0) + ridge / len(moment) * np.eye(len(moment)))
            wanted = scale * wanted @ second[0] @ np.linalg.inv(second[0] + strength * second[1])
        if not np.allclose(after[name][1], wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max(initial=1e-30)):
            found.append(f"{name}: not its filtered vector")
    parts = {"target": "target", "forget": "out-filtered-forget"}
    return [*found, *oracle.faults(root, given["--out"], parts, float(given["--alpha"]), 0.0, "same")]


MOMENTS = {"moments": moments_cases()}
