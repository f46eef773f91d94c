"""Fitting vectors: what is learnt, what is written, and what happens when it is cut short or goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.errors import NotFiniteError, StageError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.adapter import load_adapter
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.train import FitSettings, KeptEpochs, epoch_folder
from msa_lite.train.fit.loop import SAVES
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
    kill_at,
    kill_at_disk,
    never,
    read_log,
    steps_of,
    weights,
)

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")


@pytest.fixture(scope="module")
def whole(prior: Path, quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit that nothing disturbed. No test changes its files."""
    return fit(prior, tmp_path_factory.mktemp("whole") / "v")


@pytest.mark.parametrize(
    ("kind", "mode"),
    # not GPT-2's Conv1D layers in 4 bits: bitsandbytes does not replace them
    [("llama", "lora"), ("llama", "qlora"), ("llama", "full"), ("gpt2", "lora"), ("gpt2", "full")],
)
def test_each_mode_learns_and_writes_a_complete_folder(
    mode: Any, kind: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, mode=mode)
    folder = fit(make_checkpoint(kind), tmp_path / "v", settings)
    log = read_log(folder)
    assert [line["step"] for line in log] == list(range(1, 7))
    assert log[-1]["loss"] < log[0]["loss"]
    assert verify_folder(folder) == []
    assert not (tmp_path / "v.partial").exists()
    if mode == "full":
        tensors = load_checkpoint(folder).tensors
        assert {entry.dtype for entry in tensors.values()} == {"F32"}
        assert tensors.keys() == load_checkpoint(make_checkpoint(kind)).tensors.keys()
    else:
        adapter = load_adapter(folder)
        assert {(m.a.dtype, m.b.dtype) for m in adapter.modules.values()} == {("F32", "F32")}
        assert len(adapter.modules) == {"llama": 14, "gpt2": 8}[kind]


def test_after_a_warm_up_counted_in_epochs_the_rate_falls_to_zero_or_is_constant(
    prior: Path, whole: Path, tmp_path: Path
) -> None:
    # 8 rows in batches of 4: 2 steps an epoch, 1 warm-up epoch, 3 epochs. The rate of a step is logged after it.
    constant = fit(prior, tmp_path / "v", replace(SETTINGS, schedule="constant"))
    rates = [[line["learning_rate"] / SETTINGS.learning_rate for line in read_log(f)] for f in (whole, constant)]
    assert rates == [pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25]), pytest.approx([0, 0.5, 1, 1, 1, 1])]
    recorded = [(load_manifest(folder) or {})["inputs"]["settings"] for folder in (whole, constant)]
    assert recorded[0] | {"schedule": "constant"} == recorded[1]


def test_the_same_inputs_give_the_same_bytes_and_are_not_trained_twice(
    prior: Path, whole: Path, tmp_path: Path
) -> None:
    calls: list[int] = []

    def again(settings: FitSettings = SETTINGS) -> None:
        calls.clear()
        fit(prior, tmp_path / "v", settings, lambda label, done, total: calls.append(done))

    again()
    assert calls[-1] == 6
    for name in ("adapter_model.safetensors", "adapter_config.json", "train_log.jsonl", "manifest.json"):
        assert hash_file(tmp_path / "v" / name) == hash_file(whole / name)
    again()
    assert calls == []
    again(replace(SETTINGS, seed=1))
    assert calls[-1] == 6
    assert hash_file(tmp_path / "v/adapter_model.safetensors") != hash_file(whole / "adapter_model.safetensors")


@pytest.mark.parametrize("step", [1, 3, 6, None])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    step: int | None, prior: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """step: None for a kill once all steps are done, in the midst of the removal of the saves."""
    out = tmp_path / "cut"
    with monkeypatch.context() as patch:
        if step is None:
            patch.setattr("msa_lite.train.fit.loop.shutil.rmtree", _remove_one)
        with pytest.raises(Killed):
            fit(prior, out, progress=kill_at(step or 0))
    assert not out.exists()
    resumed = fit(prior, out)
    for name in ("adapter_model.safetensors", "train_log.jsonl"):
        assert hash_file(whole / name) == hash_file(resumed / name)


def _remove_one(folder: Path, **options: Any) -> None:
    """Stands for shutil.rmtree, and is killed after a file of each save, when all of them are to go."""
    for path in Path(folder).rglob("trainer_state.json"):
        path.unlink()
    if Path(folder).name == SAVES:
        raise Killed


def test_unknown_target_modules_are_refused(prior: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vector.lora.targets: .*no_such_layer"):
        fit(prior, tmp_path / "v", replace(SETTINGS, lora_targets=("no_such_layer",)))


def test_a_single_row_that_does_not_fit_says_so(prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import LlamaForCausalLM

    def no_memory(self: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(LlamaForCausalLM, "forward", no_memory)
    with pytest.raises(StageError, match="even with one row at a time"):
        fit(prior, tmp_path / "v")


# Fits with a say after each epoch: whose weights are kept, what breaks, and what goes on after a stop.


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
def unstopped(prior: Path, quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    unstopped: Path,
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
    assert epochs_in(cut) == epochs_in(unstopped) == ["epoch-2", "epoch-3"]
    for name in epochs_in(unstopped):
        assert_close(weights(cut / name), weights(unstopped / name))
    assert (cut / "train_log.jsonl").read_text() == (unstopped / "train_log.jsonl").read_text()
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
