"""Trackers get the losses of fits and the scores of candidates, and no row; they decide no result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import msa_lite
from msa_lite.errors import StageError
from msa_lite.train import Tracking
from msa_lite.train.fit import tracking
from tests.e2e.conftest import sweep_recipe

FACTS = ("Jormi", "born")  # of questions and answers in the demo's data


class Writer:
    """In the place of TensorBoard's, which need not be installed."""

    lines: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, log_dir: str) -> None:
        self.place = self.lines.setdefault(Path(log_dir).name, [])

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.place.append((name, float(value), step))

    def add_text(self, name: str, text: str, *_: Any) -> None:
        self.place.append((name, text, 0))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What TensorBoard gets, by folder."""
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name == "tensorboard")
    Writer.lines = {}
    return Writer.lines


def test_losses_and_points_are_tracked_and_no_row(learnt: Path, tmp_path: Path, written: dict[str, list[Any]]) -> None:
    recipe = sweep_recipe(learnt, tmp_path / "run")
    result = msa_lite.sweep(recipe, ["track=tensorboard", "vector.epochs=1"])
    assert result is not None
    assert written.keys() == {"forget-vector", "retain-vector", "sweep"}
    log = [json.loads(line) for line in (result.folder / "vectors/forget/train_log.jsonl").read_text().splitlines()]
    losses = [value for name, value, _ in written["forget-vector"] if name == "train/loss"]
    assert losses == [line["loss"] for line in log]
    points: dict[int, dict[str, float]] = {}
    for name, value, number in written["sweep"]:
        points.setdefault(number, {})[name] = value
    scored = {(point["alpha"], point["beta"]): point.get("score") for point in points.values()}
    assert scored == {(line["alpha"], line["beta"]): line["score"] for line in result.choice.scores}
    assert all("extraction_strength" in point for point in points.values())
    assert not [fact for fact in FACTS if fact in str(written)]
    # Nothing is made again with other trackers, or without.
    written.clear()
    again = msa_lite.sweep(recipe, ["track=[]", "vector.epochs=1"])
    assert again is not None
    assert again.choice == result.choice
    assert msa_lite.sweep(recipe, ["track=[tensorboard]", "vector.epochs=1"]) is not None
    assert written == {}


def test_the_two_services_get_runs_of_their_own_that_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Run:
        def __enter__(self) -> Run:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("wandb ended")

        def log(self, line: dict[str, float], step: int) -> None:
            calls.append(("wandb", line, step))

    def begin(**how: Any) -> Run:
        assert how["settings"] == {"console": "off", "disable_code": True, "disable_git": True}
        calls.append(("wandb", how["project"], how["name"]))
        return Run()

    trackio: Any = ModuleType("trackio")
    trackio.init = lambda **how: calls.append(("trackio", how["project"], how["name"]))
    trackio.log = lambda line, step: calls.append(("trackio", line, step))
    trackio.finish = lambda: calls.append("trackio ended")
    wandb: Any = ModuleType("wandb")
    wandb.init = begin
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    trackers = Tracking(("wandb", "trackio"), tmp_path / "tracking", "tofu")
    with trackers.lines("forget vector") as report:
        assert calls == []
        report({"loss": 1.0}, 7)
        report({"loss": 2.0}, 8)
    begun = [(name, "msa-lite", "tofu forget vector") for name in ("wandb", "trackio")]
    lines = [(name, {"loss": float(step - 6)}, step) for step in (7, 8) for name in ("wandb", "trackio")]
    assert calls == [*begun, *lines, "trackio ended", "wandb ended"]

    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    wandb.init = refuse
    refused = pytest.raises(StageError, match=r"wandb cannot begin a run \(no API key\)")
    with refused, trackers.lines("forget vector") as report:
        report({"loss": 1.0}, 1)
