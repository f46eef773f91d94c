"""Another world of the tests has the same tests and files in another order, each time the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import vary


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vary, "WORLD", 3)


def test_modules_stay_together_and_the_order_of_them_and_of_their_tests_is_another() -> None:
    items: list[Any] = [SimpleNamespace(path=f"test_{module}.py", name=n) for module in "abcde" for n in range(9)]
    order = vary.in_other_order(items)
    assert order != items
    assert sorted(order, key=items.index) == items
    modules = [item.path for item in order]
    assert modules == sorted(modules, key=modules.index)
    assert list(dict.fromkeys(modules)) != list(dict.fromkeys(item.path for item in items))
    assert [item.name for item in order if item.path == "test_a.py"] != list(range(9))
    assert vary.in_other_order(items) == order


def test_every_way_to_list_a_folder_gives_the_same_files_in_another_order(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}").touch()
    usual = sorted(os.listdir(tmp_path))
    with vary.other_listings():
        with os.scandir(tmp_path) as entries:
            scanned = [entry.name for entry in entries]
        walked = next(iter(os.walk(tmp_path)))[2]
        ways = [os.listdir(tmp_path), scanned, walked, [path.name for path in tmp_path.glob("*")]]
        assert [next(os.scandir(tmp_path)).name in usual, len(list(tmp_path.rglob("*")))] == [True, 20]
    for way in ways:
        assert way != usual
        assert sorted(way) == usual
