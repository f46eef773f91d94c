"""Recipes of mergekit that are not MSA, or no recipes at all: refused, each fault by its key."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.errors import UsageError
from msa_lite.io.console.libraries import has
from msa_lite.merger.mergekit.reader import read_recipe
from tests.unit.test_mergekit import ON_TARGET, read, recipe_of


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"merge_method": "ties"}, ["merge_method: must be 'task_arithmetic' or 'linear'; got 'ties'"]),
        ({"slices": [{"sources": [{"model": "org/target", "layer_range": [0, 2]}]}]}, ["slices: not handled"]),
        ({"chat_template": "chatml", "tokenizer": {}}, ["chat_template: not handled", "tokenizer: not handled"]),
        (
            {"tokenizer_source": "org/forget"},
            ["tokenizer of the target org/target"],
        ),
        ({"out_dtyp": "float32"}, ["out_dtyp: not handled (did you mean 'out_dtype'?)"]),
        ({"base_model": None}, ["base_model: missing"]),
        ({"base_model": "a+b"}, ["base_model: must have no adapter"]),
        ({"base_model": "a@b@c"}, ["base_model: not `path`"]),
        (
            {"base_model": {"model": "x", "override_architecture": "y"}},
            ["base_model: not handled: override_architecture"],
        ),
        ({"parameters": {"normalize": True}}, ["parameters.normalize: must be false", "sign of a forget vector"]),
        ({"parameters": {"lambda": [0, 1]}}, ["parameters.lambda: must be a valid number"]),
        ({"parameters": {"density": 0.5, "rescale": True}}, ["parameters.density: ", "parameters.rescale: "]),
        (
            {"parameters": {"int8_mask": True, "weight": 1}},
            ["parameters.weight: not handled"],
        ),
        ({"models": ["org/target"]}, ["models.0: must be a valid dictionary", "got 'org/target'"]),
    ],
)
def test_what_only_mergekit_can_do_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, recipe_of("org/target", ON_TARGET) | change)
    assert [part for part in [*says, "--with mergekit"] if part not in str(caught.value)] == []
    assert ("pip install" in str(caught.value)) != has("mergekit")
    monkeypatch.setitem(sys.modules, "mergekit", None)
    with pytest.raises(UsageError, match=r"add --with mergekit, which is not installed: pip install .*\[mergekit\]"):
        read(tmp_path, recipe_of("org/target", ON_TARGET) | change)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, r"parameters\.weight: missing"),
        ({"parameters": {"weight": [{"filter": "mlp", "value": 1}]}}, ".*weight: must be a valid number"),
        ({"parameters": {"weight": float("inf")}}, r"parameters\.weight: must be a finite number"),
        ({"parameters": {"weight": 1, "density": 0.5}}, r"parameters\.density: "),
        ({"parameters": {"weigth": 1}}, r"parameters\.weigth: not handled \(did you mean"),
        ({"parameters": {"weight": 1}, "layers": 3}, "layers: not handled"),
        ({"parameters": {"weight": 1}, "model": "org/target+org/forget"}, "model: .* is listed twice"),
    ],
)
def test_entries_are_refused_by_their_place(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    recipe = recipe_of("org/target", {"org/target+org/forget": -1.0})
    recipe["models"].append({"model": "org/target+x"} | keys)
    with pytest.raises(UsageError, match=rf"models\.1\.{says}"):
        read(tmp_path, recipe)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            recipe_of("org/prior", {"org/target": 0.5, "org/forget": -1, "org/x": 0.2}, "linear"),
            "base_model: .*listed under models",
        ),
        (
            recipe_of(None, {"org/target": 0.5, "org/forget": -1, "org/x": 0.2}, "linear"),
            "0.5 × org/target − 1 × org/forget",
        ),
        (recipe_of("org/target", {"org/target+org/forget": -1, "org/prior+x": -1}), "vectors subtracted and added"),
        (recipe_of(None, {"org/target": 1, "org/x": 1}, "linear"), "add up to 1"),
        (recipe_of("org/x", {"org/target": 1, "org/prior+org/forget": -1}), "models: computes"),
        (
            recipe_of(None, {"org/target": 1, "org/x": -1}, "linear", parameters=None),
            "normalize: the weights add up to 0",
        ),
    ],
)
def test_sums_that_are_not_msa_are_refused_with_the_sum(tmp_path: Path, recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, recipe)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not YAML"), ("\x00", "not YAML"), ("- a", "a mapping of keys; got list"), ("", "got NoneType")],
)
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xd8")
    for name, says in (("missing.yml", "No such file"), (".", "not a file"), ("binary", "not UTF-8 text")):
        with pytest.raises(UsageError, match=says):
            read_recipe(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "models: &a [1]\nbase_model: *a",
        "base_model: 2024-01-01",
        "base_model: !!python/object/apply:os.system [exit]",
        "a: " + "[" * 1000,
        'base_model: "\\ud800"',
        "base_model: a\nbase_model: b",
        "models: [" + "{model: a, parameters: {weight: 1}}, " * 500 + "]",
        "\n".join(f"key{number}: 1" for number in range(10_000)),
    ],
)
def test_yaml_that_nobody_writes_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        read(tmp_path, text)


scalars = st.sampled_from(
    [
        *(None, True, 0, -1, 1, 0.5, -0.5, 1e308, -1e308, 10**310, float("nan"), float("inf")),
        *("", "org/x", "a@b", "a+b", "@", "1e3"),
    ]
)
keys = st.sampled_from(
    ["merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source", "msa", "model",
     "lora", "path", "revision", "weight", "normalize", "lambda", "density", 1, None, True, 0.5]
)  # fmt: skip
anything = st.recursive(
    scalars, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(keys, parts, max_size=3), max_leaves=8
)


@settings(max_examples=150)
@given(st.data())
def test_any_value_in_any_place_is_a_merge_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    recipe: Any = recipe_of("org/target", dict(ON_TARGET))
    for _ in range(data.draw(st.integers(1, 3))):
        place = recipe
        while True:  # walk to some place, and put something else there
            steps = (
                list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
            )
            key = data.draw(st.sampled_from(steps)) if steps else None
            if key is None or not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
                break
            place = place[key]
        if key is not None:
            place[key] = data.draw(anything)
    with contextlib.suppress(UsageError):
        request = read(tmp_path_factory.getbasetemp(), recipe)
        assert all(term.weight < 0 if term.side == "forget" else term.weight > 0 for term in request.terms)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    recipe = recipe_of("org/target", {"org/target+org/forget": "x"}, dtype="int8", sclies=[])
    with pytest.raises(UsageError) as caught:
        read(tmp_path, recipe)
    faults = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(faults) == ["dtype", "models.0.parameters.weight", "sclies"]
