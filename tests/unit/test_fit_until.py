"""Open-ended fits: they end when the rows are known, try other rates, say how it went, and go on after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from msa_lite.errors import NotFiniteError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, Until
from msa_lite.train.fit import loop
from msa_lite.train.fit.until import measure_loss
from tests.support.fits import PAD, ROWS, Killed, fit, kill_at, steps_of

pytestmark = pytest.mark.usefixtures("quick_fits")
# 8 rows in batches of 4: two steps an epoch.
SETTINGS = FitSettings(
    lora_rank=4, lora_alpha=8, epochs=40, learning_rate=2e-2, batch_size=4, schedule="constant", warmup_steps=2
)


AGAIN = replace(SETTINGS, learning_rate=1e-3, epochs=12)  # too slow at first


@pytest.fixture(scope="module")
def target(prior: Path, quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = FitSettings("full", epochs=4, learning_rate=3e-3, batch_size=4)
    return fit(prior, tmp_path_factory.mktemp("target") / "target", settings)


def loads(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def until(target: Path, **changes: Any) -> Until:
    return Until(fetch(str(target)), load=lambda: loads(target), **changes)


def facts(folder: Path) -> dict[str, Any]:
    return (load_manifest(folder) or {})["fit"]


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_fit_ends_when_the_prior_knows_the_rows_as_well_as_the_target(
    mode: Any, prior: Path, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, mode=mode, learning_rate=2e-2 if mode == "lora" else 3e-3)
    calls: list[tuple[int, int]] = []
    folder = fit(
        prior,
        tmp_path / "v",
        settings,
        until=until(target),
        progress=lambda label, done, total: calls.append((done, total)),
    )
    said = facts(folder)
    loss = said["loss"]
    assert loss["target"] == pytest.approx(measure_loss(loads(target), ROWS, PAD))
    assert loss["prior"] == pytest.approx(measure_loss(loads(prior), ROWS, PAD))
    assert loss["target"] < loss["prior"] - 0.3
    losses = json.loads((folder / "course.json").read_text())["tries"][0]["losses"]
    enough = loss["prior"] - 0.95 * (loss["prior"] - loss["target"])
    assert said["ended"] == "known"
    assert loss["tuned"] == losses[-1] <= enough
    assert all(one > enough for one in losses[4:-1])  # ten steps it takes in any case
    assert (said["epochs"], said["steps"]) == (len(losses), 2 * len(losses))
    assert steps_of(folder) == list(range(1, said["steps"] + 1))
    assert (said["rates"], said["rows_measured"]) == ([settings.learning_rate], len(ROWS))
    assert verify_folder(folder) == []
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
    if mode == "full":
        assert measure_loss(loads(folder), ROWS, PAD) == pytest.approx(loss["tuned"], rel=1e-4)
    assert caplog.messages == []
    assert (calls[0], calls[-1]) == ((1, 80), (said["steps"], said["steps"]))
    assert all(done < total or (done, total) == calls[-1] for done, total in calls)
    assert sorted({done for done, _ in calls}) == list(range(1, said["steps"] + 1))


def test_the_rate_stays_after_a_warm_up_in_steps(prior: Path, target: Path, tmp_path: Path) -> None:
    folder = fit(prior, tmp_path / "v", replace(SETTINGS, epochs=3), until=until(target))
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] / SETTINGS.learning_rate for line in log]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 1])
    recorded = (load_manifest(folder) or {})["inputs"]["settings"]
    assert recorded["warmup_steps"] == 2
    assert "warmup_epochs" not in recorded


def test_a_fit_that_cannot_reach_the_targets_loss_says_so(
    prior: Path, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = facts(fit(prior, tmp_path / "same", SETTINGS, until=until(prior)))
    assert (said["ended"], said["steps"]) == ("known", 10)
    assert "is no lower than the prior's" in caplog.text
    settings = replace(SETTINGS, learning_rate=1e-4, epochs=6)
    said = facts(fit(prior, tmp_path / "slow", settings, until=until(target)))
    assert (said["ended"], said["epochs"], said["rates"]) == ("cap", 6, [1e-4])
    assert "the prior has not learnt the rows as well as the target knows them" in caplog.text


def test_a_fit_that_learns_too_little_is_made_again_at_a_higher_rate(
    prior: Path, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels: list[str] = []
    folder = fit(
        prior,
        tmp_path / "v",
        replace(SETTINGS, learning_rate=1e-3, epochs=20),
        until=until(target, tries=3),
        progress=lambda label, done, total: labels.append(label),
    )
    said = facts(folder)
    assert said["rates"][:2] == [1e-3, 3e-3]
    assert said["learning_rate"] == said["rates"][-1] > 1e-3
    assert said["loss"]["tuned"] < said["loss"]["prior"] - 0.5 * (said["loss"]["prior"] - said["loss"]["target"])
    assert list(dict.fromkeys(labels))[:2] == ["vector", "vector, try 2"]
    assert "vector: at a learning rate of 0.001 the loss hardly fell; trying 0.003" in caplog.text
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    assert log[-1]["learning_rate"] == pytest.approx(said["learning_rate"])
    assert len(log) == said["steps"]
    assert list(folder.glob("try-*")) == []


def test_a_fit_that_breaks_is_made_again_at_a_lower_rate(prior: Path, target: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode="full", learning_rate=1e30, warmup_steps=0, epochs=3)
    with pytest.raises(NotFiniteError, match=r"learning rate of 1e\+30 and 3.3e\+29 and .*nothing was kept"):
        fit(prior, tmp_path / "v", settings, until=until(target, tries=3))
    assert list(tmp_path.iterdir()) == []
    settings = replace(settings, learning_rate=1.0, epochs=40)  # which sends the loss up
    said = facts(fit(prior, tmp_path / "v", settings, until=until(target, tries=3)))
    assert len(said["rates"]) > 1
    assert said["learning_rate"] < 1.0


@pytest.fixture(scope="module")
def twice(prior: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fit makes that learns too little at first and is made again."""
    folder = fit(prior, tmp_path_factory.mktemp("twice") / "v", AGAIN, until=until(target, tries=2))
    assert len(facts(folder)["rates"]) == 2
    return folder


@pytest.mark.parametrize(
    ("label", "step", "seconds", "first"),
    [
        ("vector", 1, -1.0, 1),
        ("vector", 7, -1.0, 7),
        ("vector", 5, 1e9, 1),
        ("vector, try 2", 5, -1.0, 5),
        ("moved", 0, -1.0, None),
    ],
)
def test_a_fit_that_was_stopped_goes_on_to_the_same_bytes(
    label: str,
    step: int,
    seconds: float,
    first: int | None,
    twice: Path,
    prior: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """seconds: between saves; there is one after every epoch, or none. first: the step that a rerun goes on with."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", seconds)
    loaded: list[Path] = []

    def load() -> Any:
        loaded.append(target)
        return loads(target)

    rule = Until(fetch(str(target)), load, tries=2)
    with monkeypatch.context() as patch:
        if label == "moved":
            patch.setattr("msa_lite.train.fit.until.os.replace", _move_one())
        with pytest.raises(Killed):
            fit(prior, tmp_path / "cut", AGAIN, until=rule, progress=kill_at(step, label))
    steps: list[tuple[str, int]] = []
    resumed = fit(
        prior, tmp_path / "cut", AGAIN, until=rule, progress=lambda label, done, total: steps.append((label, done))
    )
    assert first is None or steps[0] == (label, first)
    assert len(loaded) == 1  # a rerun does not measure the target again
    for name in ("adapter_model.safetensors", "train_log.jsonl", "course.json", "manifest.json"):
        assert hash_file(twice / name) == hash_file(resumed / name)


def _move_one() -> Callable[..., None]:
    """Stands for os.replace, and is killed after the first of a try's files has been moved."""
    import os

    own, moved = os.replace, []

    def replace_one(source: Any, goal: Any) -> None:
        if Path(source).parent.name.startswith("try-") and Path(goal).parent != Path(source).parent:
            if moved:
                raise Killed
            moved.append(source)
        own(source, goal)

    return replace_one
