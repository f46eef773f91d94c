"""Cases of `msa-lite evaluate` and `vector`: models, tokenizers, adapters and rows with hostile edits."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from tests.tools.fuzz import oracle
from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.merges import folder_edits
from tests.tools.fuzz.models import Folder, shard
from tests.tools.fuzz.tree import PLACES, Node, Special, Tree
from tests.tools.fuzz.values import damaged, edited

Draw = Callable[..., Any]
ROWS = [{"question": f"Where is {n}?", "answer": f"It is over there, {n}."} for n in ("Ann", "Bob", "Eve", "Tim")]
_SLOW = 30.0  # seconds; models are loaded, and other processes may have the cores
NO_ROWS = (b"null\n", b"PAR1" + b"\x00" * 20 + b"PAR1", b"question,answer\n\x00,\x00\n", b"\xff\xfe\x00")
ENDINGS = ("forget.jsonl", "forget.json", "forget.csv", "forget.parquet", "forget.txt", "forget")


@functools.cache
def model(adapted: bool = False, seed: int = 0) -> Folder:
    """Return a checkpoint with a tokenizer that transformers loads, or an adapter on one in ../target."""
    from tests.support.models import save_adapter, save_checkpoint, tiny_model

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "made"
        if adapted:
            save_adapter(folder, tiny_model("llama", tie_word_embeddings=False))
        else:
            save_checkpoint(folder, tiny_model("llama", seed, tie_word_embeddings=False))
        shards = {
            path.name: shard(oracle.arrays(folder) if not adapted else _factors(path))
            for path in folder.glob("*.safetensors")
        }
        documents = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    if adapted:
        documents["adapter_config.json"]["base_model_name_or_path"] = "../target"
    return Folder(shards, documents)


def _factors(path: Path) -> oracle.Arrays:
    from safetensors.numpy import load_file

    return {name: ("F32", values) for name, values in load_file(path).items()}


@st.composite
def rows(draw: Draw) -> tuple[str, Node, list[str]]:
    """Return a file of rows: (name, content, edits)."""
    name = draw(st.sampled_from(ENDINGS))
    what = draw(st.sampled_from(["lines", "lines", "document", "raw", "special", "texts"]))
    if what == "special":
        node = draw(st.sampled_from([*PLACES, Special("link", name)]))
        return name, node, [f"{name}: {node}"]
    if what == "raw":
        raw = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        damage = draw(damaged(raw) | st.sampled_from(NO_ROWS))
        return name, damage, [f"{name}: {damage[:60]!r}"]
    if what == "texts":
        return name, b"question,answer\nWhere?,Here.\nWho?,Me.\n", [f"{name}: csv"]
    edit = draw(edited(ROWS))
    text = (
        "\n".join(json.dumps(row) for row in edit) if what == "lines" and isinstance(edit, list) else json.dumps(edit)
    )
    return name, text.encode(), [f"{name}: {text[:2000]}"]


@st.composite
def score_cases(draw: Draw) -> Case:
    """An evaluation of a model, or of an adapter, on rows of one's own."""
    folder = model()
    sound = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    edits: list[str] = []
    tree: Tree = {b"retain.jsonl": sound}
    data: tuple[str, Node, list[str]] = ("forget.jsonl", sound, [])
    name = draw(st.sampled_from(["target", "target", "adapter"]))
    below = folder
    what = draw(st.sampled_from(["sound", "model", "model", "model", "adapter", "rows", "rows"]))
    above = model(adapted=True)
    if what == "model":
        below, note = draw(folder_edits(folder))
        edits.append(note)
    elif what == "adapter":
        name = "adapter"
        above, note = draw(folder_edits(above))
        edits.append(note)
    elif what == "rows":
        data = draw(rows())
        edits += data[2]
    tree |= below.tree("target") | above.tree("adapter") | {data[0].encode(): data[1]}
    arguments = [
        "evaluate",
        name,
        "--forget",
        data[0],
        "--retain",
        "retain.jsonl",
        "--max-new-tokens",
        "3",
        "--out",
        "out",
    ]
    # Numbers that overflow are only seen when they are computed, which is a stage that fails.
    return Case(
        "evaluate",
        tree,
        arguments,
        _check_scores,
        edits,
        memory=1200 << 20,
        seconds=_SLOW,
        excused="are no numbers (NaN)",
    )


def _check_scores(root: Path, outcome: Outcome) -> Sequence[str]:
    """Look whether an accepted model holds every weight of the sound one, and the report numbers."""
    stored, sound = oracle.arrays(root / "target"), oracle.arrays_of(model())
    found = [
        f"{name}: missing, or of another shape"
        for name in sound
        if name not in stored or stored[name][1].shape != sound[name][1].shape
    ]
    found += [
        f"{name}: not finite"
        for name, (kind, values) in stored.items()
        if kind == "F32" and not np.isfinite(values).all()
    ]
    report = json.loads((root / "out" / "report.json").read_text())
    for name, metric in report["metrics"].items():
        if metric["value"] is not None and not np.isfinite(metric["value"]):
            found.append(f"{name}: {metric['value']}")
    return found


@st.composite
def vector_cases(draw: Draw) -> Case:
    """A short fit on rows and with settings that may be hostile."""
    from tests.tools.fuzz.texts import KEYS, RECIPE

    recipe = {key: RECIPE[key] for key in ("target", "prior", "forget", "vector", "output", "seed")}
    recipe |= {"evaluate": None, "forget": {"data": {"path": "forget.jsonl"}, "alpha": 1.0}, "verdict": False}
    recipe["vector"] = {
        "lora": {"rank": 2, "alpha": 4},
        "epochs": 2,
        "warmup_epochs": 0,
        "learning_rate": 1e-3,
        "batch_size": 4,
        "max_length": 64,
    }
    sound = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    tree: Tree = {b"forget.jsonl": sound}
    prior, edits = model(seed=1), []
    what = draw(st.sampled_from(["sound", "recipe", "recipe", "rows", "model"]))
    if what == "recipe":
        recipe["vector"] = draw(edited(recipe["vector"], (*KEYS, "mode", "optimizer", "micro_batch_size")))
        edits.append(f"vector: {json.dumps(recipe['vector'])[:2000]}")
    elif what == "rows":
        name, node, edits = draw(rows())
        recipe["forget"]["data"] = {"path": name}
        tree |= {name.encode(): node}
    elif what == "model":
        prior, note = draw(folder_edits(prior))
        edits.append(f"prior: {note}")
    tree |= model().tree("target") | prior.tree("prior")
    try:
        text = yaml.safe_dump(recipe).encode()
    except (RecursionError, yaml.YAMLError):
        text = b"x: 1"
    arguments = ["run", "r.yaml", "--until", "vectors"]
    return Case("vector", tree | {b"r.yaml": text}, arguments, None, edits, memory=1200 << 20, seconds=60.0)


SCORED = {"evaluate": score_cases(), "vector": vector_cases()}
