"""One encoder for what `--json` prints and JSON files hold: dataclasses, their keys, paths and tuples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from msa_lite.io.files.writing import indented_json, json_form
from tests.tools.arrows import module_of, sources


@dataclass(frozen=True)
class Pair:
    """Two values of different kinds."""

    place: Path
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Keyed:
    """A value that chooses its keys."""

    pair: Pair | None
    figures: dict[str, Any]
    notes: tuple[str, ...] = ()
    json_keys: ClassVar = {"out": "pair.place", "**": "figures", "pair": "pair", "size": "size", "notes?": "notes"}

    @property
    def size(self) -> int:
        return len(self.figures)


@dataclass(frozen=True)
class Named:
    """A value that shows some of its attributes, in an order of its own."""

    first: int
    second: int
    hidden: int
    json_keys: ClassVar = ("second", "first")


PAIR = Pair(Path("a/b"), (1.0, 2.0))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (PAIR, {"place": "a/b", "numbers": [1.0, 2.0]}),
        (Keyed(PAIR, {"x": (PAIR,)}), {
            "out": "a/b", "x": [{"place": "a/b", "numbers": [1.0, 2.0]}],
            "pair": {"place": "a/b", "numbers": [1.0, 2.0]}, "size": 1,
        }),
        (Keyed(None, {}, ("seen",)), {"out": None, "pair": None, "size": 0, "notes": ["seen"]}),
        (Named(1, 2, 3), {"second": 2, "first": 1}),
        ({"a": [Path("x"), None, True, "text"]}, {"a": ["x", None, True, "text"]}),
    ],
)  # fmt: skip
def test_values_become_json(value: object, form: object) -> None:
    assert json_form(value) == form
    assert list(json_form(value)) == list(form)  # type: ignore[call-overload]
    assert json.loads(indented_json(value)) == form


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError):
        indented_json({"a": {1, 2}})
    with pytest.raises(TypeError):
        indented_json(Pair)  # the class, not a value


def keyed_classes() -> Iterator[type]:
    for path in sources():
        if "json_keys" in path.read_text():
            module = import_module(module_of(path))
            for _, kind in getmembers(module, isclass):
                if kind.__module__ == module.__name__ and "json_keys" in vars(kind):
                    yield kind


def test_every_key_shows_an_attribute() -> None:
    kinds = list(keyed_classes())
    assert len(kinds) > 8
    for kind in kinds:
        assert is_dataclass(kind), kind
        keys: Any = vars(kind)["json_keys"]
        attributes = {field.name for field in fields(kind)} | set(dir(kind))
        paths = keys.values() if isinstance(keys, dict) else keys
        assert {path.partition(".")[0] for path in paths} <= attributes, kind
