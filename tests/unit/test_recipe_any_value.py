"""Whatever stands at a recipe's keys: it is loaded, or refused with one error, never a traceback."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.errors import RecipeError, UsageError
from msa_lite.io.files.schema import schema_fields
from msa_lite.recipe import Recipe, TrainingRecipe, dump_recipe, load_any
from msa_lite.recipe.load import type_members

RUN: dict[str, Any] = {
    "target": "t",
    "prior": "p",
    "forget": {"data": {"path": "f.jsonl"}},
    "retain": {"data": {"path": "r.jsonl"}},
    "demo": {},
    "output": "out",
}
TRAINING: dict[str, Any] = {"model": "m", "stages": [{"data": {"path": "f.jsonl"}}], "output": "out"}
HISTORY = {"checkpoints": [{"checkpoint": "c", "step": 1}], "exposure": 2}


def keys_of(kind: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys of a schema; 0 stands for a list's item."""
    for _, member in type_members(kind):
        if fields := schema_fields(member):
            for name, annotation in fields.items():
                key = (*path, name)
                yield key
                yield from keys_of(annotation, key)
        elif getattr(member, "__origin__", None) is list:
            yield (*path, 0)
            yield from keys_of(member.__args__[0], (*path, 0))


KEYS = [(RUN, key) for key in dict.fromkeys(keys_of(Recipe))]
KEYS += [(TRAINING, key) for key in dict.fromkeys(keys_of(TrainingRecipe))]
NUMBERS: list[Any] = [
    -1, 0, 1, 2**31, 2**32, 2**63, 2**70, 10**30, 10**310, 0.5, 1e30, 1e308, -1e308, float("inf"),
    float("nan"), True, False, None,
]  # fmt: skip
TEXTS = [
    "", "~nobody/x", "a" * 300, "a\0b", "\ud800", "../..", "auto", "1e30", "9" * 5000, "1e999", "²",
    "{}", "{question:>999999999}", "{question.__class__}", "{question!r}", "{question}{", "(a+)+$", "2026-01-01",
    "1" + " " * 100_000 + "k", ">= " + "1" * 100_000 + "x", "$output/x", "repo@tokens=9T",
]  # fmt: skip
ODD = [*NUMBERS, 10**5000, *TEXTS, [], {}, [None], {"a": 1}]
PLAIN = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(), st.floats(), st.text(max_size=20))
VALUES = st.recursive(
    PLAIN, lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(st.text(max_size=8), part, max_size=3))
)


def put(recipe: Any, key: tuple[Any, ...], value: Any) -> Any:
    """A copy of a recipe in which `value` stands at a key."""
    if not key:
        return value
    first, *rest = key
    if first == 0:
        return [put(recipe[0] if isinstance(recipe, list) and recipe else {}, tuple(rest), value)]
    filled = dict(recipe) if isinstance(recipe, dict) else {}
    if first == "history":
        filled = {**filled, "prior": None, "history": HISTORY}
    return {**filled, first: put(filled.get(first), tuple(rest), value)}


def assert_taken_or_refused(recipe: Any) -> None:
    with contextlib.suppress(UsageError):
        assert dump_recipe(load_any(copy.deepcopy(recipe)))


def test_the_keys_are_those_of_the_schema() -> None:
    assert {("vector", "lora", "rank"), ("forget", "alpha", 0), ("merge", "as")} <= {key for _, key in KEYS}
    assert {("stages", 0, "data", "path"), ("model", "config")} <= {key for _, key in KEYS}


@pytest.mark.parametrize("number", range(len(ODD)))
def test_a_fifth_of_the_keys_takes_or_refuses_each_odd_value(number: int) -> None:
    for recipe, key in KEYS[number % 5 :: 5]:
        assert_taken_or_refused(put(recipe, key, ODD[number]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_at_any_key(place: tuple[dict[str, Any], tuple[Any, ...]], value: Any) -> None:
    recipe, key = place
    assert_taken_or_refused(put(recipe, key, value))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: *a",
        "target: !!python/object/apply:os.system [true]",
        "target: " + "[" * 1000,
        "? [a]\n: b",
        "a: &a [*a]",
        'target: "\\ud800"',
        "target: !!timestamp 2026-13-45",
        "\0",
        "1: 2\nnull: 3\n2026-01-01: x",
        "# " + "x" * (300 << 10),
    ],
)
def test_yaml_that_is_no_recipe_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text, "utf-8")
    with pytest.raises(UsageError):
        load_any(tmp_path / "recipe.yaml")
    with pytest.raises(UsageError):
        load_any(RUN, [f"forget={text}"])
    assert issubclass(RecipeError, UsageError)


@pytest.mark.parametrize("name", ["~nobody/x", "a" * 300, "a\0b", "\ud800", "", "/dev/zero", "."])
def test_a_recipe_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        load_any(name)


def test_a_recipe_of_an_earlier_run_is_read_back(tmp_path: Path) -> None:
    text = dump_recipe(load_any(RUN)).replace("output: out", "output: 2026-01-01")
    (tmp_path / "recipe.yaml").write_text(text, "utf-8")
    assert load_any(tmp_path / "recipe.yaml").output == "2026-01-01"

    shared = {"path": "f.jsonl"}
    recipe = load_any({**RUN, "forget": {"data": shared}, "evaluate": {"forget": shared, "retain": shared}})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), "utf-8")
    assert load_any(tmp_path / "recipe.yaml") == recipe
