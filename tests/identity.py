"""Checks that every option of a stage is in one of two lists: those that decide its result, and those that do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from msa_lite.io.files.writing import canonical_json

Change = Mapping[str, Any]


class Stop(BaseException):
    """Ends a stage once its inputs are known."""


def names_of(one: Any) -> list[str]:
    """The options of a function, or the fields of a dataclass that are given when it is made."""
    if inspect.isfunction(one):
        return list(inspect.signature(one).parameters)
    return [item.name for item in fields(one) if item.init]


def assert_all_named(one: Any, deciding: Collection[str], others: Collection[str]) -> None:
    assert set(names_of(one)) == {*deciding, *others}, "an option is in neither list, or is gone"
    assert not {*deciding} & {*others}


def assert_told_apart(identity: Callable[[Change], Any], changes: Mapping[str, Change]) -> None:
    """Each of the changes gives another identity than no change does, which is always the same."""
    base = canonical_json(identity({}))
    assert canonical_json(identity({})) == base
    assert [name for name, change in changes.items() if canonical_json(identity(change)) == base] == []


def assert_not_told_apart(identity: Callable[[Change], Any], changes: Mapping[str, Change]) -> None:
    base = canonical_json(identity({}))
    assert [name for name, change in changes.items() if canonical_json(identity(change)) != base] == []


def one_each(changes: Change) -> dict[str, Change]:
    return {name: {name: value} for name, value in changes.items()}
