"""Cases of `msa-lite merge`: sound checkpoints and adapters with a few hostile edits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tools.fuzz import oracle
from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.models import ADAPTER_KINDS, Folder, Shard, adapter, checkpoint, copied
from tests.tools.fuzz.tree import Special, Tree
from tests.tools.fuzz.values import NAMES, NUMBERS, TEXTS, VALUES, damaged, edited

Draw = Callable[..., Any]
INDEX = "model.safetensors.index.json"
DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U16", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "C64", "X",
)  # fmt: skip
HEADER_EDITS = (
    "item", "item", "dtype", "shape", "offsets", "name", "twice", "drop", "add", "metadata", "length", "tail", "values",
)  # fmt: skip
SPECIALS = (
    Special("pipe"), Special("folder"), Special("link", "nowhere"), Special("link", "config.json"),
    Special("link", "/dev/zero"), Special("link", "/etc/passwd"), Special("sparse", size=5 << 30),
    Special("link", "../secret.json"), b"", b"\x00" * 100,
)  # fmt: skip
SHARD_NAMES = (
    ".lock", ".journal.jsonl", "manifest.json", "mergekit_config.yml", "weights.txt", "tokenizer.model", "LICENSE",
    "README.md", "config.json", "../x.safetensors", ".x.safetensors", "a/b.safetensors", "x.safetensors",
    "MODEL.safetensors", "a.bin", "adapter_model.safetensors", "x" * 250 + ".safetensors", ".safetensors",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
KEYS = (
    "rank_pattern", "alpha_pattern", "quantization_config", "vocab_size", "text_config", "target_parameters", "dtype",
    "torch_dtype", "lora_bias", "trainable_token_indices", "r", "metadata", "weight_map", "tie_word_embeddings",
)  # fmt: skip
ARGUMENTS = {
    "--max-memory": [
        "1", "0", "-5", "200MB", "1TB", "512mb", "1.5GiB", "9" * 310, "1e400GB", "", "MB", "9" * 5000 + "GB", "nan",
    ],
    "--dtype": ["same", "float32", "bfloat16", "float16", "float64", "", "F32", "\u0130"],
    "--rounding": ["nearest", "stochastic", "up", ""],
    "--out": [
        "out", "", ".", "..", "target", "target/out", "file/out", "new/deep/out", "a" * 300, "~nobody/x", "out/",
        "link", "-",
    ],
    "--target": ["target", "", "nowhere", "a" * 300, "~nobody/x", "file", "..", "forget", "a/b@c", "\u00e9", "prior"],
    "--forget": ["forget", "", "target", "prior", "file", "~nobody/x", "retain", "no/such@rev"],
    "--prior": ["prior", "target", "", "file", "forget"],
    "--alpha": ["1", "0", "-0.0", "-1", "1e-300", "1e300", "nan", "inf", "1e400", "x", "", "9" * 400, "1_0", "0x1"],
    "--beta": ["1", "0", "-1", "nan", "inf", "1e300", "0.25"],
}  # fmt: skip


def _is_sound(item: Any) -> bool:
    """Check whether a header's item is as a tensor's should be; an earlier edit may have changed it."""
    try:
        start, stop = item["data_offsets"]
        return 0 <= start <= stop < 1 << 40 and 0 <= int(np.prod(item["shape"])) < 1 << 40 and "dtype" in item
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


@st.composite
def header_edits(draw: Draw, one: Shard) -> tuple[Shard, str]:
    """Return a shard with something in its header, length or data that may not fit."""
    pairs = list(one.header)
    at = draw(st.integers(0, len(pairs) - 1))
    name, item = pairs[at]
    what = draw(st.sampled_from(HEADER_EDITS))
    data, length = one.data, None
    if what == "item" or not _is_sound(item):
        pairs[at] = (name, draw(edited(item)))
    elif what == "dtype":
        pairs[at] = (name, {**item, "dtype": draw(st.sampled_from(DTYPES) | VALUES)})
    elif what == "shape":
        size = int(np.prod(item["shape"]))
        same = st.sampled_from([[size], [size, 1], [1, size], [1, 1, size], item["shape"][::-1], [0], [], [size, 0]])
        pairs[at] = (name, {**item, "shape": draw(same | st.lists(st.sampled_from(NUMBERS), max_size=4))})
    elif what == "offsets":
        start, stop = item["data_offsets"]
        ends = [start - 1, start, start + 1, stop, stop + 4, 0, -1, len(data), len(data) + 1, 2**63, 2**64]
        near = st.sampled_from(ends)
        pairs[at] = (name, {**item, "data_offsets": draw(st.lists(near, min_size=2, max_size=2) | VALUES)})
    elif what == "name":
        pairs[at] = (draw(st.sampled_from([*NAMES, "y" * 100_000]) | st.text(max_size=20)), item)
    elif what == "twice":
        pairs.insert(draw(st.integers(0, len(pairs))), (name, item))
    elif what == "drop":
        del pairs[at]
    elif what == "add":
        kind = draw(st.sampled_from(DTYPES))
        end = len(data)
        new = {"dtype": kind, "shape": [8], "data_offsets": [end, end + 8]}
        pairs.append((draw(st.sampled_from(["extra.weight", *NAMES])), new))
        data += bytes(8)
    elif what == "metadata":
        metadata = draw(VALUES | st.dictionaries(st.text(), st.text()))
        pairs = [*(p for p in pairs if p[0] != "__metadata__"), ("__metadata__", metadata)]
    elif what == "length":
        length = draw(st.sampled_from([0, 1, 7, 8, 99, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1]))
    elif what == "tail":
        data = draw(st.sampled_from([data[:-1], data + b"\x00", b"", data[: len(data) // 2]]))
    else:
        start, stop = item["data_offsets"]
        fill = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f\x80", b"\x00\x00\x80\x7f", b"\x01"]))
        data = data[:start] + (fill * (stop - start))[: stop - start] + data[stop:]
    return Shard(tuple(pairs), data, length), f"header {what} {name[:40]!r}"


@st.composite
def renamed_shard(draw: Draw, folder: Folder) -> tuple[Folder, str]:
    """Return a checkpoint with a shard under another name, in its index as well."""
    old, new = draw(st.sampled_from(sorted(folder.shards))), draw(st.sampled_from(SHARD_NAMES))
    folder.shards[new] = folder.shards.pop(old)
    if isinstance(folder.documents.get(INDEX), dict) and isinstance(folder.documents[INDEX].get("weight_map"), dict):
        index = folder.documents[INDEX]
        places = {n: new if f == old else f for n, f in index["weight_map"].items()}
        folder.documents[INDEX] = {**index, "weight_map": places}
    return folder, f"shard {old} is called {new[:40]}"


@st.composite
def folder_edits(draw: Draw, folder: Folder) -> tuple[Folder, str]:
    """Return a folder with one hostile edit, and what it was."""
    folder = copied(folder)
    kinds = ["header", "header", "header", "document", "document", "damage", "special", "extra", "rename"]
    what = draw(st.sampled_from(kinds))
    documents = sorted(name for name, value in folder.documents.items() if not isinstance(value, bytes))
    if what == "header" and folder.shards:
        name = draw(st.sampled_from(sorted(folder.shards)))
        folder.shards[name], note = draw(header_edits(folder.shards[name]))
        return folder, f"{name}: {note}"
    if what == "rename" and folder.shards:
        return draw(renamed_shard(folder))
    if what == "document" and documents:
        name = draw(st.sampled_from(documents))
        folder.documents[name] = draw(edited(folder.documents[name], KEYS))
        return folder, f"{name}: {json.dumps(folder.documents[name])[:3000]}"
    names = [*sorted(folder.shards), *sorted(folder.documents)]
    if what == "extra" or not names:
        more = ("x.json", "x.txt", "x\udcff.json", "x.bin", "modeling_x.py", "x.jinja")
        name = draw(st.sampled_from([*NAMES, *SHARD_NAMES, *more]))
        folder.others[name] = draw(st.sampled_from(SPECIALS))
        return folder, f"extra {name[:40]!r}: {folder.others[name]!r:.60}"
    name = draw(st.sampled_from(names))
    raw = folder.shards.pop(name).encode() if name in folder.shards else json.dumps(folder.documents.pop(name)).encode()
    folder.others[name] = draw(damaged(raw)) if what == "damage" else draw(st.sampled_from(SPECIALS))
    return folder, f"{name} {what} {str(folder.others[name])[:60] if what == 'special' else ''}"


@st.composite
def merge_cases(draw: Draw, form: str = "model") -> Case:
    """A merge of sound parts with none to three edits of files or arguments."""
    kinds = [*ADAPTER_KINDS, "full"] if form == "model" else ["plain", "rslora", "pattern"]  # products of factors alone
    stored = draw(st.sampled_from(["F32", "BF16", "F16"]))
    seed = draw(st.integers(0, 2))
    parts = {"target": checkpoint(seed, stored, draw(st.sampled_from([1, 2])))}
    kind = {"forget": draw(st.sampled_from(kinds)), "retain": draw(st.sampled_from([None, None, *kinds]))}
    for role, what in kind.items():
        if what:
            number = seed + 5 if role == "forget" else seed + 9
            factors = draw(st.sampled_from(["F32", "BF16"]))
            parts[role] = checkpoint(number, stored) if what == "full" else adapter(number, what, factors)
    parts["prior"] = checkpoint(seed + 3, stored)
    edits = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))):
        role = draw(st.sampled_from([*parts, "target", "forget"]))
        parts[role], note = draw(folder_edits(parts[role]))
        edits.append(f"{role}: {note}")
    alpha = draw(st.sampled_from(["1", "0.75", "2.5", "0.01"]))
    given = {"--target": "target", "--forget": "forget", "--alpha": alpha, "--out": "out"}
    if kind["retain"]:
        given |= {"--retain": "retain", "--beta": draw(st.sampled_from(["0.5", "1"]))}
    if draw(st.booleans()) or {"full", "dora", "saved"} & set(kind.values()):
        given["--prior"] = "prior"
    if form == "model" and draw(st.booleans()):
        given |= {"--dtype": draw(st.sampled_from(["same", "float32", "bfloat16"]))}
        given |= {"--rounding": draw(st.sampled_from(["nearest", "stochastic"]))}
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        option = draw(st.sampled_from(sorted(ARGUMENTS)))
        texts = [text for text in TEXTS if "\x00" not in text and "\ud800" not in text]
        given[option] = draw(st.sampled_from(ARGUMENTS[option]) | st.sampled_from(texts))
        edits.append(f"{option} {given[option][:40]!r}")
    tree: Tree = {b"file": b"a file", b"secret.json": b"{}", b"link": Special("link", "nowhere")}
    for role, folder in parts.items():
        tree |= folder.tree(role)
    arguments = ["merge", *(word for pair in given.items() for word in pair)]
    arguments += ["--as", "adapter"] if form == "adapter" else []
    arguments += ["--json"] if draw(st.booleans()) else []
    check = partial(_check_model if form == "model" else _check_adapter, given=given)
    outs = (given["--out"].rstrip("/") or "out", "nowhere")  # where the link leads
    return Case(f"merge --as {form}", tree, arguments, check, edits, outs=outs)


def _parts(given: dict[str, str]) -> dict[str, str]:
    return {name: given[f"--{name}"] for name in ("target", "forget", "retain", "prior") if f"--{name}" in given}


def _check_model(root: Path, outcome: Outcome, given: dict[str, str]) -> Sequence[str]:
    dtype = {"same": "same", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}[given.get("--dtype", "same")]
    slack = 1.0 if given.get("--rounding") == "stochastic" else 0.5
    try:
        faults = oracle.faults(
            root, given["--out"], _parts(given), float(given["--alpha"]), float(given.get("--beta", 0)), dtype, slack
        )
    except oracle.Unknown:
        faults = []
    return [*faults, *_companions(root, given, dtype)]


def _companions(root: Path, given: dict[str, str], dtype: str) -> list[str]:
    """Return companion files of the target that are not in the output as they were."""
    target, out = root / given["--target"], root / given["--out"]
    names = ["tokenizer_config.json", "LICENSE", "generation_config.json", *(["config.json"] * (dtype == "same"))]
    return [
        f"{name}: not as in the target"
        for name in names
        if (target / name).is_file()
        and (not (out / name).is_file() or (out / name).read_bytes() != (target / name).read_bytes())
    ]


def _check_adapter(root: Path, outcome: Outcome, given: dict[str, str]) -> Sequence[str]:
    """Compare an adapter on the target with the merge that it stands for."""
    parts, alpha, beta = _parts(given), float(given["--alpha"]), float(given.get("--beta", 0))
    prior = root / parts["prior"] if "prior" in parts else None
    wanted: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    found = []
    try:
        for role, strength in (("forget", -alpha), ("retain", beta)):
            if role in parts and strength:
                for name, delta, size in oracle.deltas(root / parts[role], prior):
                    wanted[name] = wanted.get(name, 0) + strength * delta
                    sizes[name] = sizes.get(name, 0) + abs(strength) * size
        got = {
            name: (delta, size) for name, delta, size in oracle.deltas(root / given["--out"], root / parts["target"])
        }
    except oracle.Unknown:
        return []
    for name in wanted.keys() | got.keys():
        delta, size = got.get(name, (np.zeros_like(wanted.get(name)), 0))
        with np.errstate(all="ignore"):
            near = 1e-5 * (size + sizes.get(name, 0)) + 1e-6 * np.abs(delta).max(initial=0) + 1e-30
            if not np.all(np.abs(delta - wanted.get(name, 0)) <= near):
                found.append(f"{name}: the adapter's delta is not that of the vectors")
    return found


MERGES = {"merge": merge_cases("model"), "merge --as adapter": merge_cases("adapter")}
