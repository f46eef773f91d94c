"""The rules of open-ended fits: batch, epochs and rate by default; when a fit ends, and at which rate the next is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM

from msa_lite.errors import NotFiniteError
from msa_lite.io.files.writing import hash_file, json_form
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.train import FitSettings, Until
from msa_lite.train.fit import loop
from msa_lite.train.fit.until import SAMPLE, Attempt, Course, measure_loss, next_rate, sample_examples, why_stop
from msa_lite.train.settings import auto_batch, auto_rate, most_epochs
from tests.support.fits import PAD, ROWS, Killed, fit, kill_at, ragged_rows, read_log, steps_of

TARGET = Source("target", Path("target"), "sha256:1")


def rule(**changes: Any) -> Until:
    return Until(TARGET, load=lambda: None, **changes)


def course(*attempts: Attempt, goal: float = 1.0, start: float = 3.0) -> Course:
    return Course(goal, start, list(attempts))


# Defaults


@pytest.mark.parametrize(
    ("rows", "batch"),
    [(1, 4), (8, 4), (24, 4), (32, 4), (33, 8), (40, 8), (64, 8), (65, 16), (128, 16), (129, 32), (4000, 32)],
)
def test_a_batch_leaves_five_steps_an_epoch_where_it_can(rows: int, batch: int) -> None:
    assert auto_batch(rows) == batch


@pytest.mark.parametrize(
    ("rows", "batch", "forget", "retain"), [(1, 4, 60, 60), (24, 4, 60, 33), (400, 32, 46, 15), (40000, 32, 5, 1)]
)
def test_there_are_at_most_so_many_epochs(rows: int, batch: int, forget: int, retain: int) -> None:
    assert most_epochs(rows, batch) == forget
    assert most_epochs(rows, batch, retain=True) == retain


def test_rates_fall_with_size_and_are_higher_for_adapters() -> None:
    sizes = [1_600_000, 30_000_000, 135_000_000, 1_200_000_000, 8_000_000_000]
    full, lora = ([auto_rate(mode, size) for size in sizes] for mode in ("full", "lora"))
    assert full == sorted(full, reverse=True)
    assert lora == sorted(lora, reverse=True)
    assert all(one < two for one, two in zip(full, lora, strict=True))
    assert auto_rate("qlora", sizes[0]) == lora[0]
    assert auto_rate("lora", sizes[2], lora_alpha=16) == pytest.approx(4 * lora[2], rel=0.05)
    assert auto_rate("full", sizes[2], lora_alpha=16) == full[2]
    assert (full[2], lora[3], full[4]) == (3.4e-5, 2.0e-4, 1.2e-5)


def test_a_large_set_is_measured_by_a_seeded_sample() -> None:
    rows = ragged_rows(SAMPLE + 10, seed=0)
    assert sample_examples(rows[:SAMPLE], 0) == rows[:SAMPLE]
    one, again, other = (sample_examples(rows, seed) for seed in (0, 0, 1))
    assert len(one) == SAMPLE
    assert one == again != other


# The end


@pytest.mark.parametrize(
    ("losses", "steps", "wanted"),
    [
        ([2.0], 20, ""),
        ([2.0, 1.11], 20, ""),
        ([2.0, 1.09], 20, "known"),  # 95 % of the way from 3 to 1
        ([0.5], 9, ""),  # too few steps
        ([0.5], 10, "known"),
        ([6.1], 10, "diverged"),
        ([6.1], 9, ""),
        ([2.9] * 3, 30, ""),
        ([2.9] * 4, 40, "slow"),  # a third of the epochs, and less than a sixth of the way
        ([2.5] * 4, 40, ""),
        ([2.5] * 12, 90, "cap"),
        ([1.0] * 12, 90, "known"),
    ],
)
def test_a_fit_ends_when_enough_is_learnt_or_enough_was_tried(losses: list[float], steps: int, wanted: str) -> None:
    assert why_stop(rule(tries=3), course(Attempt(1e-3, losses, steps)), most=12) == wanted
    if wanted == "slow":  # without another try, it goes on
        assert why_stop(rule(tries=1), course(Attempt(1e-3, losses, steps)), most=12) == ""


def test_a_target_that_knows_no_more_than_the_prior_ends_the_fit_early() -> None:
    assert why_stop(rule(), course(Attempt(1e-3, [2.9], 10), goal=3.1), most=12) == "known"


# Another try


def ended(rate: float, loss: float, why: str = "cap") -> Attempt:
    return Attempt(rate, [loss], 100, why)


@pytest.mark.parametrize(
    ("tries", "wanted"),
    [
        ([], 1e-3),
        ([ended(1e-3, 1.9)], None),  # more than half of the way
        ([ended(1e-3, 2.5)], 3e-3),
        ([ended(1e-3, 9.0, "diverged")], 3.3e-4),
        ([ended(1e-3, 2.5), ended(3e-3, 2.2)], 9e-3),
        ([ended(1e-3, 2.5), ended(3e-3, 2.7)], 1.7e-3),  # between the two
        ([ended(1e-3, 2.5), ended(3e-3, 9.0, "diverged")], 1.7e-3),
        ([ended(1e-3, 9.0, "diverged"), ended(3.3e-4, 2.5)], 5.7e-4),
        ([ended(1e-3, 9.0, "diverged"), ended(3.3e-4, 9.0, "diverged")], 1.1e-4),
        ([ended(1e-3, 2.5), ended(3e-3, 2.4), ended(9e-3, 2.3)], None),  # no more than three
    ],
)
def test_the_next_rate_follows_from_those_tried(tries: list[Attempt], wanted: float | None) -> None:
    assert next_rate(rule(tries=3), course(*tries), 1e-3) == pytest.approx(wanted)
    assert not tries or next_rate(rule(tries=1), course(*tries), 1e-3) is None  # a rate that was given is the only one


def test_the_best_try_is_the_one_nearest_to_the_target() -> None:
    assert course(ended(1e-3, 2.5), ended(3e-3, 1.2), ended(9e-3, 0.1, "diverged")).best.rate == 3e-3
    assert course(ended(1e-3, 0.9), ended(3e-3, 0.1)).best.rate == 1e-3  # both know the rows


def test_a_course_is_read_as_it_was_written() -> None:
    found = course(ended(1e-3, 2.5), Attempt(3e-3, [2.9], 5))
    assert json_form(Course.from_json(json_form(found))) == json_form(found)


# Open-ended fits: they end when the rows are known, try other rates, say how it went, and go on after a kill.


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
    log = read_log(folder)
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
    log = read_log(folder)
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
        ("worse", 0, -1.0, None),
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
        if label == "worse":
            patch.setattr("msa_lite.train.fit.until.shutil", Mock(rmtree=Mock(side_effect=Killed)))
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
