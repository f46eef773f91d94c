"""Cases of YAML: recipes, overrides, and merges in mergekit's form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from tests.tools.fuzz import oracle
from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.models import adapter, checkpoint
from tests.tools.fuzz.tree import PLACES, Node, Special, Tree
from tests.tools.fuzz.values import NAMES, TEXTS, VALUES, damaged, edited

Draw = Callable[..., Any]
RECIPE: dict[str, Any] = {
    "target": "target", "prior": "prior", "output": "out", "seed": 0, "prompt": {"kind": "plain"},
    "forget": {"data": {"path": "forget.jsonl", "format": "qa"}, "alpha": [0.5, 1.0]},
    "retain": {"data": {"path": "retain.jsonl", "sample": "match_forget"}, "beta": "auto"},
    "vector": {
        "mode": "lora", "lora": {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": "all-linear"}, "epochs": 1,
        "learning_rate": "auto", "weight_decay": 0.01, "warmup_epochs": 1, "batch_size": 4, "max_length": 64,
    },
    "merge": {"dtype": "same", "rounding": "nearest", "as": "model"}, "select": {"validation": 0.25},
    "evaluate": {"holdout": {"path": "holdout.jsonl"}, "max_new_tokens": 6, "limit": 8, "judge": {"kind": "none"}},
    "columns": {"question": "question", "answer": "answer"},
}  # fmt: skip
OVERRIDES = (
    "forget.alpha", "vector.lora.rank", "seed", "output", "select", "a..b", "forget.alpha.0", "forget.alpha.9", "x",
    "vector", "evaluate.limit", "prompt", *NAMES,
)  # fmt: skip
KEYS = (
    "history", "tokenizer", "verdict", "baseline", "stages", "model", "forgets", "template", "question", "system",
    "exclude", "points", "score", "compat", "split", "data", "ideal", "0", "",
)  # fmt: skip
FRAGMENTS = (
    "a: &a [1,1]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "a: &a\n  b: *a\n", '!!int ""', "x: !!int ''", "x: !!float ''",
    "x: !!bool maybe", "x: !!timestamp 1", "x: 2020-01-01", "x: !!python/object/apply:os.system ['touch ran']",
    "x: !!python/name:os.system", "[" * 5000, "{a: " * 3000, "- " * 3000, "x: " + "9" * 5000, "x: 0x" + "f" * 5000,
    "x: 1:2:3:4:5", "? [a, b]\n: c", "x: |\n  y\n", "--- 1\n--- 2\n", "%YAML 9.9\n---\nx: 1", "\ufeffx: 1", "x: \x07",
    "", "null", "[]", "target", "x: &x 1", "<<: 1", "x: {<<: [1]}", "!!set {a}", "!!omap [a: 1]", "x: !!binary QQ==",
    "target: target\ntarget: prior", "x: '\\ud800'", 'x: "\\ud800"', "x: " + "a" * 300_000, "\t", "x: @y", "x: `y",
    "@",
)  # fmt: skip


@st.composite
def _yaml(draw: Draw, document: Any) -> tuple[Node, str]:
    """Return a YAML file of a document with hostile edits, or of hostile text, and what it is."""
    what = draw(st.sampled_from(["edit", "edit", "edit", "edit", "fragment", "damage", "special", "prepend"]))
    sound = yaml.safe_dump(document, sort_keys=False).encode()
    if what == "edit":
        changed = draw(edited(document, KEYS))
        try:
            text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=draw(st.booleans()))
            return text.encode("utf-8", "surrogatepass"), repr(changed)[:3000]
        except (RecursionError, yaml.YAMLError):
            return b"x: 1", "too deep to write"
    fragment = draw(st.sampled_from(FRAGMENTS)).encode("utf-8", "surrogatepass")
    if what == "special":
        node = draw(st.sampled_from([*PLACES, Special("sparse", size=5 << 30)]))
        return node, str(node)
    texts = {"fragment": fragment, "damage": draw(damaged(sound)), "prepend": fragment + b"\n" + sound}
    return texts[what], f"{what} {fragment[:40]!r}"


@st.composite
def recipe_cases(draw: Draw) -> Case:
    """A recipe that is checked, with overrides."""
    node, note = draw(_yaml(copy.deepcopy(RECIPE)))
    arguments, edits = ["recipes", "validate", "r.yaml"], [f"recipe: {note}"]
    if draw(st.sampled_from([True, False, False])):
        node, edits = yaml.safe_dump(RECIPE).encode(), []
    for _ in range(draw(st.sampled_from([0, 0, 1, 2])) if edits else draw(st.integers(0, 2))):
        key = draw(st.sampled_from(OVERRIDES))
        value = draw(st.sampled_from([*FRAGMENTS, *TEXTS]) | VALUES.map(lambda value: repr(value)))
        text = f"{key}={value}".replace("\x00", "").encode("utf-8", "ignore").decode()[:100_000]
        arguments.append(text)
        edits.append(f"override {text[:80]!r}")
    arguments += ["--json"] if draw(st.booleans()) else []
    return Case("recipe", {b"r.yaml": node}, arguments, None, edits, outs=())


_SUM = {"base_model": "target", "dtype": "float32", "out_dtype": "float32"}


def _models(weights: dict[str, float]) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]


_PLAIN = _SUM | {
    "merge_method": "task_arithmetic", "models": _models({"target+forget": -0.75, "target+retain": 0.5}),
    "parameters": {"normalize": False, "lambda": 1.0},
}  # fmt: skip
_WHOLE = _SUM | {
    "merge_method": "linear", "models": _models({"target": 1.0, "tuned": -0.75, "prior": 0.75}),
    "parameters": {"normalize": False},
}  # fmt: skip
_WEIGHTS = st.sampled_from([-2.0, -0.75, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0])
_STRENGTHS = st.floats(0.01, 3)


@st.composite
def mergekit_cases(draw: Draw) -> Case:
    """A merge in mergekit's form, sound, with other weights, or with hostile edits."""
    document = copy.deepcopy(draw(st.sampled_from([_PLAIN, _WHOLE])))
    tree: Tree = {}
    parts = {"target": checkpoint(0), "prior": checkpoint(3), "tuned": checkpoint(5)}
    for name, folder in (parts | {"forget": adapter(0), "retain": adapter(1)}).items():
        tree |= folder.tree(name)
    edits = []
    how = draw(st.sampled_from(["sound", "weights", "hostile", "hostile", "hostile"]))
    node: Node = yaml.safe_dump(document, sort_keys=False).encode()
    if how == "weights":
        alpha, beta = draw(_STRENGTHS), draw(_STRENGTHS)
        weights = (-alpha, beta) if document["merge_method"] == "task_arithmetic" else (1.0, -alpha, alpha)
        for model, weight in zip(document["models"], weights, strict=True):  # type: ignore[call-overload]
            model["parameters"]["weight"] = weight if draw(st.integers(0, 9)) else draw(_WEIGHTS)
        node, edits = yaml.safe_dump(document, sort_keys=False).encode(), ["weights"]
    elif how == "hostile":
        node, note = draw(_yaml(document))
        edits = [f"mergekit: {note}"]
    return Case(
        "mergekit", tree | {b"c.yml": node}, ["merge", "--mergekit", "c.yml", "--out", "out"], _check_sum, edits
    )


def _check_sum(root: Path, outcome: Outcome) -> Sequence[str]:
    """Compare with the sum that a mergekit recipe of plain models and weights states."""
    document = yaml.safe_load((root / "c.yml").read_text())
    base = oracle.arrays(root / "target")
    wanted = {name: values.astype(np.float64) for name, (_, values) in base.items()}
    sizes = {name: np.abs(values) for name, values in wanted.items()}
    known = isinstance(document.get("base_model"), str) and document["base_model"] == "target"
    if not known or any(not isinstance(m["model"], str) or "@" in m["model"] for m in document["models"]):
        return []
    if (document.get("parameters") or {}).get("lambda", 1) != 1:
        return []
    whole = document["merge_method"] == "linear"
    if whole:
        wanted = {name: np.zeros_like(values) for name, values in wanted.items()}
    for model in document["models"]:
        place, _, vector = model["model"].partition("+")
        weight = float(model["parameters"]["weight"])
        below = oracle.arrays(root / place)
        parts = {name: values.astype(np.float64) for name, (_, values) in below.items()}
        if vector:
            for name, delta, _size in oracle.deltas(root / vector, root / place):
                parts[name] = parts[name] + delta
        for name in wanted:
            wanted[name] = wanted[name] + weight * (parts[name] - (0 if whole else base[name][1].astype(np.float64)))
            sizes[name] = sizes[name] + abs(weight) * (np.abs(parts[name]) + 1)
    out = oracle.arrays(root / "out")
    return [
        f"{name}: not the recipe's sum"
        for name in wanted
        if not np.all(np.abs(out[name][1].astype(np.float64) - wanted[name]) <= 1e-5 * sizes[name] + 1e-6)
    ]


TEXTUAL = {"recipe": recipe_cases(), "mergekit": mergekit_cases()}
