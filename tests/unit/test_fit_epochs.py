"""Fits with a say after each epoch: whose weights are kept, what breaks, and what goes on after a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.errors import NotFiniteError
from msa_lite.io.finished.seal import verify_folder
from msa_lite.train import KeptEpochs, epoch_folder
from msa_lite.train.memory.model import load_trainable
from tests.support.fits import (
    SETTINGS,
    CrossEntropy,
    Kill,
    Killed,
    Watch,
    assert_close,
    epochs_in,
    fit,
    keeping,
    kill_at_disk,
    never,
    steps_of,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_fits")


# What is kept


def test_epochs_weights_come_and_go_as_is_said(prior: Path, tmp_path: Path) -> None:
    """Dropout is off while the say is asked, and on again afterwards."""
    settings = replace(SETTINGS, lora_dropout=0.5)
    final = weights(fit(prior, tmp_path / "plain", settings, objective=CrossEntropy()))
    there: list[list[str]] = []
    partial = tmp_path / "v.partial"
    watch = Watch(keeping([1], [1, 2], [2, 3]), before=lambda epoch: there.append(epochs_in(partial)))
    folder = fit(prior, tmp_path / "v", settings, objective=CrossEntropy(), after_epoch=watch)
    assert watch.calls == [1, 2, 3]
    assert there == [["epoch-1"], ["epoch-1", "epoch-2"], ["epoch-1", "epoch-2", "epoch-3"]]
    assert epochs_in(folder) == ["epoch-2", "epoch-3"]
    assert weights(folder) == {}  # no weights but those of epochs
    assert_close(weights(epoch_folder(folder, 3)), final)
    assert_close(weights(epoch_folder(folder, 2)), {n.replace(".default", ""): p for n, p in watch.weights[2].items()})
    assert sorted(path.name for path in (folder / "scores").iterdir()) == [f"epoch-{i}.json" for i in (1, 2, 3)]
    assert verify_folder(folder) == []
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    again = Watch(watch.plan)
    objective = CrossEntropy(before=lambda *args: pytest.fail("trained again"))
    fit(prior, folder, settings, objective=objective, after_epoch=again)
    assert again.calls == []


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_an_epochs_folder_is_a_whole_vector(mode: Any, prior: Path, tmp_path: Path) -> None:
    watch = Watch(keeping([1], [1]))
    settings = replace(SETTINGS, mode=mode, epochs=2)
    folder = epoch_folder(fit(prior, tmp_path / "v", settings, objective=CrossEntropy(), after_epoch=watch), 1)
    name = "config.json" if mode == "full" else "adapter_config.json"
    config = json.loads((folder / name).read_text())
    assert config["use_cache"] if mode == "full" else config["r"] == 4
    found = load_trainable(folder, settings).state_dict() if mode == "full" else weights(folder)
    assert_close(
        {n: found[n.replace(".default", "")] for n in watch.weights[1]},
        watch.weights[1],
    )


# What breaks


def breaking(what: str, epoch: int, plan: dict[int, KeptEpochs]) -> tuple[CrossEntropy, Watch]:
    """A fit whose weights are NaN after an epoch, or are found to give no numbers then, or whose loss is one in it."""

    def score(now: int) -> None:
        if (what, now) == ("outputs", epoch):
            raise NotFiniteError("no numbers")

    objective = CrossEntropy(spoilt_in=epoch - 1 if what == "weights" else None)
    objective.broken_from = (epoch - 1, 0) if what == "loss" else None
    return objective, Watch(plan, before=score)


@pytest.mark.parametrize(
    ("what", "calls", "words"),
    [
        ("loss", [1], "the loss is nan (gradient norm nan) at step 4; earlier epochs"),
        ("weights", [1], "the model's weights or outputs are no numbers after epoch 2; earlier epochs"),
        ("outputs", [1, 2], "the model's weights or outputs are no numbers after epoch 2; earlier epochs"),
    ],
)
def test_a_model_that_breaks_at_the_end_of_an_epoch_leaves_those_before(
    what: str, calls: list[int], words: str, prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_lite.train.fit import loop

    told: list[str] = []
    monkeypatch.setattr(loop.logger, "warning", lambda text, *values: told.append(text % values))
    plan = keeping([1], [2], [3])
    with monkeypatch.context() as patch:
        kill_at_disk(patch, "end", ())
        objective, watch = breaking(what, 2, plan)
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=objective, after_epoch=watch, label="npo")
    assert watch.calls == calls
    objective, watch = breaking(what, 2, plan)
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch, label="npo")
    assert [epoch for _, epoch, _ in objective.steps] == [1, 1]  # what the first attempt saved then is not taken up
    assert watch.calls == [1, *calls[1:]]  # of epoch 1 it is asked once more
    assert epochs_in(folder) == ["epoch-1"]
    assert [path.name for path in (folder / "scores").iterdir()] == ["epoch-1.json"]
    assert all(torch.isfinite(value).all() for value in weights(folder / "epoch-1").values())
    assert [text.startswith(f"npo: {words}") for text in told] == [True, True]
    assert verify_folder(folder) == []


@pytest.mark.parametrize(
    ("first", "what"), [(1, "loss"), (1, "weights"), (1, "outputs"), (2, "loss"), (3, "loss"), (3, "weights")]
)
def test_a_model_that_breaks_in_the_first_epoch_that_counts_leaves_nothing(
    first: int, what: str, prior: Path, tmp_path: Path
) -> None:
    """Without a say after epochs only the last one counts: first is 3."""
    objective, watch = breaking(what, first, keeping([1], [2]) if first == 1 else keeping([], [2]))
    with pytest.raises(NotFiniteError, match=r"nothing was kept\. Try a lower learning_rate"):
        fit(prior, tmp_path / "v", objective=objective, after_epoch=None if first == 3 else watch)
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_of_before_a_kill_is_not_taken_for_one_of_the_training_that_breaks(
    prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never saved whole, and its weights may be half written."""
    plan = keeping([1], [2], [3])
    with monkeypatch.context() as patch:
        kill_at_disk(patch, "save", (2,))
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=CrossEntropy(), after_epoch=Watch(plan))
    assert epochs_in(tmp_path / "v.partial") == ["epoch-1"]
    with pytest.raises(NotFiniteError):
        fit(prior, tmp_path / "v", objective=CrossEntropy(broken_from=(0, 1)), after_epoch=Watch(plan))
    assert list(tmp_path.iterdir()) == []


# What goes on after a stop

DROPOUT = replace(SETTINGS, lora_dropout=0.1)
PLAN = keeping([1], [1, 2], [2, 3])


@pytest.fixture(scope="module")
def whole(prior: Path, quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fit makes that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "v"
    return fit(prior, out, DROPOUT, objective=CrossEntropy(), after_epoch=Watch(PLAN))


@pytest.mark.parametrize(
    ("where", "at", "first", "second"),
    [
        ("epoch", (1,), [1], [1, 2, 3]),  # no whole save yet: from the start
        ("epoch", (3,), [1, 2, 3], [2, 3]),
        ("step", (1, 1), [1], [1, 2, 3]),  # of epoch 1 it is asked once more
        ("step", (2, 1), [1, 2], [2, 3]),
        ("save", (4,), [1, 2], [1, 2, 3]),  # between the say of epoch 2 and its save
        ("end", (), [1, 2, 3], [3]),
    ],
)
def test_a_fit_that_was_stopped_goes_on_to_the_same_weights(
    where: str,
    at: tuple[int, ...],
    first: list[int],
    second: list[int],
    whole: Path,
    prior: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, plan, kill = DROPOUT, PLAN, Kill(at)
    objective = CrossEntropy()
    if where == "step":
        objective.before = lambda rows, epoch, micro: kill(epoch, len(objective.steps) % 2)
    watch = Watch(plan, before=kill if where == "epoch" else never)
    with monkeypatch.context() as patch:
        kill_at_disk(patch, where, at)
        with pytest.raises(Killed):
            fit(prior, tmp_path / "cut", settings, objective=objective, after_epoch=watch)
    assert watch.calls == first
    assert not (tmp_path / "cut").exists()
    watch = Watch(plan)
    cut = fit(prior, tmp_path / "cut", settings, objective=CrossEntropy(), after_epoch=watch)
    assert watch.calls == second
    assert epochs_in(cut) == epochs_in(whole) == ["epoch-2", "epoch-3"]
    for name in epochs_in(whole):
        assert_close(weights(cut / name), weights(whole / name))
    assert (cut / "train_log.jsonl").read_text() == (whole / "train_log.jsonl").read_text()
    assert [p.name for p in sorted((cut / "scores").iterdir())] == [f"epoch-{i}.json" for i in (1, 2, 3)]
    assert verify_folder(cut) == []


def test_a_stop_that_was_told_survives_a_kill(prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = keeping([1], [1], stop=2)
    objective, watch = CrossEntropy(), Watch(plan)
    with monkeypatch.context() as patch:
        kill_at_disk(patch, "end", ())
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert (len(objective.steps), watch.calls) == (4, [1, 2])
    objective, watch = CrossEntropy(), Watch(plan)
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert objective.steps == []
    assert watch.calls == [2]
    assert epochs_in(folder) == ["epoch-1"]
    assert steps_of(folder) == [1, 2, 3, 4]
    assert verify_folder(folder) == []
