"""Fits with an objective of one's own and a say after each epoch: what is trained, kept, resumed and cleared away."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from msa_lite.baselines import losses
from msa_lite.baselines.methods import settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.baselines.passes import in_chunks, make_batch
from msa_lite.baselines.reference import ReferenceCache
from msa_lite.data import IGNORE, Example
from msa_lite.errors import StageError
from msa_lite.io.hub import fetch
from msa_lite.io.manifest import load_manifest, verify_folder
from msa_lite.train import FitSettings, Kept, epoch_folder, fit_vector
from msa_lite.train.model import load_model
from tests.conftest import tiny_tokenizer
from tests.ragged import PAD, ragged_rows

Make = Callable[..., Path]
ROWS, RETAIN = ragged_rows(8, seed=1), ragged_rows(5, seed=2)
# 8 rows in batches of 4: two steps an epoch, six in all, the first two of them warm-up.
SETTINGS = FitSettings(lora_rank=4, lora_alpha=8, epochs=3, learning_rate=5e-3, batch_size=4, seed=0)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def never(*args: Any) -> None:
    """Does nothing at any point of a fit."""


@dataclass
class CrossEntropy:
    """The plain loss as an objective. before: called with what a step is about to run; steps: (rows, epoch, micro)."""

    before: Callable[[Sequence[int], int, int], None] = never
    broken_from: tuple[int, int] | None = None
    title: str = "cross-entropy"
    longest: int = 16
    steps: list[tuple[list[int], int, int]] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {"title": self.title}

    def prepare(self, model: Any) -> None:
        self.models = [model]

    def release(self) -> None:
        self.models = []

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Callable[[Any], None]) -> Any:
        assert model.training
        assert model is self.models[0]
        self.before(rows, epoch, micro)
        self.steps.append((list(rows), epoch, micro))
        known = sum(label != IGNORE for i in rows for label in ROWS[i].labels[1:])
        total: Any = 0.0
        for chunk in in_chunks(rows, micro):
            batch = make_batch([ROWS[i] for i in chunk], PAD, model.device)
            logits = model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1]
            loss = losses.token_losses(logits, batch.labels[:, 1:]).sum() / known
            if (epoch, len(self.steps) % 2) == self.broken_from:
                loss = loss * float("nan")
            backward(loss)
            total = total + loss.detach()
        return total


@dataclass
class Watch:
    """Keeps epochs by a plan, epoch → Kept, and notes what it is called with. before: called first with the epoch."""

    plan: dict[int, Kept]
    before: Callable[[int], None] = never
    title: str = "by plan"
    calls: list[int] = field(default_factory=list)
    known: list[list[str]] = field(default_factory=list)
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)

    def describe(self) -> str:
        return self.title

    def __call__(self, model: Any, epoch: int, scores: Path) -> Kept:
        assert not model.training
        assert model.config.use_cache is False
        self.calls.append(epoch)
        self.known.append(sorted(path.name for path in scores.glob("*")))
        self.weights[epoch] = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.before(epoch)
        scores.mkdir(exist_ok=True)
        (scores / f"epoch-{epoch}.json").write_text(f"{epoch}")
        return self.plan[epoch]


def keeping(*epochs: Sequence[int], stop: int = 0) -> dict[int, Kept]:
    """The plan that keeps these after epoch 1, 2, …, and stops after one of them."""
    return {i: Kept(frozenset(kept), i != stop) for i, kept in enumerate(epochs, 1)}


def fit(prior: Path, out: Path, settings: FitSettings = SETTINGS, **changes: Any) -> Path:
    return fit_vector(str(prior), ROWS, out, tokenizer=tiny_tokenizer(), settings=settings, **changes)


def weights(folder: Path) -> dict[str, Any]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], atol: float = 0.0) -> None:
    assert found
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.allclose(value, wanted[name], rtol=0, atol=atol), name


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def epochs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("epoch-*"))


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Leave out of garbage collections, of which each fit has several, what the imports have made."""
    import peft
    import transformers

    assert transformers.Trainer
    assert peft.LoraConfig
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def prior(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama")


# What is trained


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_plain_loss_as_an_objective_gives_the_plain_vector(mode: Any, prior: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode=mode, micro_batch_size=4)
    wanted = weights(fit(prior, tmp_path / "plain", settings))
    for micro in (4, 1):
        objective = CrossEntropy()
        folder = fit(prior, tmp_path / str(micro), replace(settings, micro_batch_size=micro), objective=objective)
        assert_close(weights(folder), wanted, atol=1e-5)
        assert [epoch for _, epoch, _ in objective.steps] == [0, 0, 1, 1, 2, 2]
        assert {size for _, _, size in objective.steps} == {micro}
        for epoch in range(3):
            assert sorted(i for rows, when, _ in objective.steps if when == epoch for i in rows) == list(range(8))
        log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
        plain = [json.loads(line) for line in (tmp_path / "plain" / "train_log.jsonl").read_text().splitlines()]
        for key in ("loss", "grad_norm", "learning_rate"):
            assert [line[key] for line in log] == pytest.approx([line[key] for line in plain], rel=1e-3)


def test_a_last_short_batch_is_a_step(prior: Path, tmp_path: Path) -> None:
    objective = CrossEntropy()
    fit(prior, tmp_path / "v", replace(SETTINGS, batch_size=3, epochs=2), objective=objective)
    assert [(len(rows), epoch) for rows, epoch, _ in objective.steps] == [
        (3, 0),
        (3, 0),
        (2, 0),
        (3, 1),
        (3, 1),
        (2, 1),
    ]


def test_a_baseline_is_trained_by_plain_steps_of_adamw(prior: Path, tmp_path: Path) -> None:
    """NPO against a loop that has a second model as its reference and every row in one batch."""
    cache = ReferenceCache(tmp_path / "reference", fetch(str(prior)), False, {"forget": ROWS})
    made = BaselineObjective("npo", settings_grid("npo", {"retain_weight": 2.0})[0], ROWS, RETAIN, PAD, 5, cache=cache)
    batches: list[tuple[list[int], int]] = []
    step = made.step

    def noted(model: Any, rows: Any, epoch: int, *rest: Any) -> Any:
        batches.append((list(rows), epoch))
        return step(model, rows, epoch, *rest)

    made.step = noted  # type: ignore[method-assign, assignment]
    folder = fit(prior, tmp_path / "v", objective=made)

    def answers(model: Any, rows: list[Example]) -> tuple[Any, Any]:
        batch = make_batch(rows, PAD, "cpu")
        return model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1], batch.labels[:, 1:]

    model, other = load_model(prior, SETTINGS), load_model(prior, SETTINGS).eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.01)
    for (rows, epoch), rate in zip(batches, [0, 0.5, 1, 0.75, 0.5, 0.25], strict=True):
        forget, retain = [ROWS[i] for i in rows], [RETAIN[made.draw(epoch)[i]] for i in rows]
        before = losses.sequence_log_probs(*answers(other, forget)).detach()
        loss = losses.npo(*answers(model, forget), before) + 2 * losses.cross_entropy(*answers(model, retain))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * SETTINGS.learning_rate
        optimizer.step()
    trained = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert_close(weights(folder), trained, atol=1e-4)
    assert max(float(p.abs().max()) for n, p in trained.items() if "lora_B" in n) > 5e-3


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("name", ["undial", "rmu", "dpo"])
def test_in_half_precision_too_a_fit_starts_at_its_reference(
    name: str, mode: Any, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device computes in bf16, the reference does as the model does: no difference but by training."""
    for place in ("msa_lite.train.loop.has_bf16", "msa_lite.train.model.has_bf16"):
        monkeypatch.setattr(place, lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    prior = make_checkpoint("llama", initializer_range=0.3)  # sure of itself, so that rounding shows
    given: dict[str, Any] = {"forget_weight": 0.0, "retain_weight": 1.0}
    given |= {"layer": 1} if name == "rmu" else {"retain_loss": "kl"}
    sets = {"forget": ROWS, "alternatives": ROWS[::-1]}
    made = BaselineObjective(
        name,
        settings_grid(name, given if name != "dpo" else {"retain_weight": 0.0})[0],
        ROWS,
        RETAIN,
        PAD,
        0,
        alternatives=ROWS[::-1] if name == "dpo" else (),
        cache=ReferenceCache(tmp_path / "reference", fetch(str(prior)), False, sets) if name == "dpo" else None,
        full=mode == "full",
    )
    first = json.loads(
        (fit(prior, tmp_path / "v", replace(SETTINGS, mode=mode, epochs=1), objective=made) / "train_log.jsonl")
        .read_text()
        .splitlines()[0]
    )
    # KL and RMU's retain term are 0 at the reference; dpo is (2/β) ln 2, with a gradient, as every gain is 0.
    assert first["loss"] == pytest.approx(13.862944 if name == "dpo" else 0.0, abs=1e-6)


def test_an_objective_gets_the_model_where_it_is_trained(
    prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes of the model, a copy for instance, would otherwise stay behind on the CPU."""
    from transformers import Trainer

    told: list[str] = []
    move = Trainer._move_model_to_device

    def moved(self: Any, model: Any, device: Any) -> None:
        told.append("placed")
        move(self, model, device)

    monkeypatch.setattr(Trainer, "_move_model_to_device", moved)
    objective = CrossEntropy()
    prepare = objective.prepare

    def prepared(model: Any) -> None:
        told.append("prepared")
        prepare(model)

    monkeypatch.setattr(objective, "prepare", prepared)
    fit(prior, tmp_path / "v", replace(SETTINGS, epochs=1), objective=objective)
    assert told[:2] == ["placed", "prepared"]


# What is kept


def test_epochs_weights_come_and_go_as_is_said(prior: Path, tmp_path: Path) -> None:
    final = weights(fit(prior, tmp_path / "plain", objective=CrossEntropy()))
    there: list[list[str]] = []
    partial = tmp_path / "v.partial"
    watch = Watch(keeping([1], [1, 2], [2, 3]), before=lambda epoch: there.append(epochs_in(partial)))
    folder = fit(prior, tmp_path / "v", objective=CrossEntropy(), after_epoch=watch)
    assert watch.calls == [1, 2, 3]
    assert there == [[], ["epoch-1"], ["epoch-1", "epoch-2"]]
    assert epochs_in(folder) == ["epoch-2", "epoch-3"]
    assert weights(folder) == {}  # no weights but those of epochs
    assert_close(weights(epoch_folder(folder, 3)), final)
    assert_close(weights(epoch_folder(folder, 2)), {n.replace(".default", ""): p for n, p in watch.weights[2].items()})
    assert sorted(path.name for path in (folder / "scores").iterdir()) == [f"epoch-{i}.json" for i in (1, 2, 3)]
    assert verify_folder(folder) == []
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    again = Watch(watch.plan)
    fit(prior, folder, objective=CrossEntropy(before=lambda *args: pytest.fail("trained again")), after_epoch=again)
    assert again.calls == []


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_an_epochs_folder_is_a_whole_vector(mode: Any, prior: Path, tmp_path: Path) -> None:
    watch = Watch(keeping([1], [1]))
    settings = replace(SETTINGS, mode=mode, epochs=2)
    folder = epoch_folder(fit(prior, tmp_path / "v", settings, objective=CrossEntropy(), after_epoch=watch), 1)
    name = "config.json" if mode == "full" else "adapter_config.json"
    config = json.loads((folder / name).read_text())
    assert config["use_cache"] if mode == "full" else config["r"] == 4
    found = load_model(folder, settings).state_dict() if mode == "full" else weights(folder)
    assert_close(
        {n: found[n.replace(".default", "")] for n in watch.weights[1]},
        watch.weights[1],
    )


def test_after_epoch_goes_with_the_plain_loss_too(prior: Path, tmp_path: Path) -> None:
    final = weights(fit(prior, tmp_path / "plain"))
    folder = fit(prior, tmp_path / "v", after_epoch=Watch(keeping([1], [2], [3])))
    assert epochs_in(folder) == ["epoch-3"]
    assert_close(weights(folder / "epoch-3"), final)


def test_what_is_asked_after_an_epoch_leaves_training_as_it_was(prior: Path, tmp_path: Path) -> None:
    """Dropout is off meanwhile, and on again afterwards."""
    settings = replace(SETTINGS, lora_dropout=0.5)
    final = weights(fit(prior, tmp_path / "plain", settings, objective=CrossEntropy()))
    folder = fit(prior, tmp_path / "v", settings, objective=CrossEntropy(), after_epoch=Watch(keeping([], [], [3])))
    assert_close(weights(folder / "epoch-3"), final)


def test_training_ends_early_when_told(prior: Path, tmp_path: Path) -> None:
    watch, objective = Watch(keeping([1], [1], stop=2)), CrossEntropy()
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert watch.calls == [1, 2]
    assert epochs_in(folder) == ["epoch-1"]
    assert steps_of(folder) == [1, 2, 3, 4]
    assert len(objective.steps) == 4


# What breaks


@pytest.mark.parametrize("step", [1, 0], ids=["first step", "last step"])
def test_a_loss_that_breaks_later_leaves_the_epochs_before(
    step: int, prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_lite.train import loop

    told: list[str] = []
    monkeypatch.setattr(loop.logger, "warning", lambda text, *values: told.append(text % values))
    watch, objective = Watch(keeping([1], [2], [3])), CrossEntropy(broken_from=(1, step))
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch, label="npo")
    assert watch.calls == [1]
    assert epochs_in(folder) == ["epoch-1"]
    assert all(torch.isfinite(value).all() for value in weights(folder / "epoch-1").values())
    assert steps_of(folder) == ([1, 2] if step else [1, 2, 3])
    assert len(told) == 1
    assert told[0].startswith(f"npo: the loss is nan (gradient norm nan) at step {3 if step else 4}; earlier epochs")
    assert verify_folder(folder) == []


@pytest.mark.parametrize("step", [1, 0], ids=["first step", "last step"])
def test_a_loss_that_breaks_in_the_first_epoch_leaves_nothing(step: int, prior: Path, tmp_path: Path) -> None:
    watch = Watch(keeping([1], [2], [3]))
    with pytest.raises(StageError, match=r"at step .*; nothing was kept\. Try a lower learning_rate"):
        fit(prior, tmp_path / "v", objective=CrossEntropy(broken_from=(0, step)), after_epoch=watch)
    assert watch.calls == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_say_after_epochs_a_broken_loss_leaves_nothing(prior: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="nothing was kept"):
        fit(prior, tmp_path / "v", objective=CrossEntropy(broken_from=(2, 1)))
    assert list(tmp_path.iterdir()) == []


# What goes on after a stop


@dataclass
class Kill:
    """Raises at a given call."""

    at: Any

    def __call__(self, *given: Any) -> None:
        if given == self.at:
            raise Killed


@pytest.mark.parametrize(
    ("where", "at", "first", "second"),
    [
        ("epoch", (1,), [1], [1, 2, 3]),  # no whole save yet: from the start
        ("epoch", (2,), [1, 2], [1, 2, 3]),  # epoch 2 is trained again; of epoch 1 it is asked once more
        ("epoch", (3,), [1, 2, 3], [2, 3]),
        ("step", (1, 0), [1], [1, 2, 3]),
        ("step", (1, 1), [1], [1, 2, 3]),
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
    prior: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, plan = replace(SETTINGS, lora_dropout=0.1), keeping([1], [1, 2], [2, 3])
    whole = fit(prior, tmp_path / "whole", settings, objective=CrossEntropy(), after_epoch=Watch(plan))
    kill = Kill(at)
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


def kill_at_disk(patch: pytest.MonkeyPatch, where: str, at: tuple[int, ...]) -> None:
    """Kill before the save of a step, or between the end of the training and the removal of its saves."""
    from transformers import Trainer

    from msa_lite.train import fit as module

    save = Trainer._save_checkpoint

    def saved(self: Any, *args: Any, **kwargs: Any) -> None:
        Kill(at)(self.state.global_step)
        save(self, *args, **kwargs)

    def removed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    if where == "save":
        patch.setattr(Trainer, "_save_checkpoint", saved)
    if where == "end":
        patch.setattr(module, "shutil", type("Shutil", (), {"rmtree": staticmethod(removed)}))


def test_a_stop_that_was_told_survives_a_kill(prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = keeping([1], [1], stop=2)
    with monkeypatch.context() as patch:
        kill_at_disk(patch, "end", ())
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=CrossEntropy(), after_epoch=Watch(plan))
    objective, watch = CrossEntropy(), Watch(plan)
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert objective.steps == []
    assert watch.calls == [2]
    assert epochs_in(folder) == ["epoch-1"]
    assert steps_of(folder) == [1, 2, 3, 4]
    assert verify_folder(folder) == []


def test_what_a_broken_loss_left_is_not_taken_up(prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer saves at the end of a broken epoch as of any other."""
    plan = keeping([1], [2], [3])
    with monkeypatch.context() as patch:
        kill_at_disk(patch, "end", ())
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=CrossEntropy(broken_from=(1, 0)), after_epoch=Watch(plan))
    watch = Watch(plan)
    objective = CrossEntropy(broken_from=(1, 0))
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert [epoch for _, epoch, _ in objective.steps] == [1, 1]
    assert watch.calls == [1]
    assert epochs_in(folder) == ["epoch-1"]
    assert steps_of(folder) == [1, 2, 3]


def test_another_objective_or_say_starts_anew(prior: Path, tmp_path: Path) -> None:
    plan = keeping([1], [1])
    settings = replace(SETTINGS, epochs=2)

    def calls(objective: Any, say: Any) -> int:
        fit(prior, tmp_path / "v", settings, objective=objective, after_epoch=say)
        return len(objective.steps) if objective else -1

    assert calls(CrossEntropy(), Watch(plan)) == 4
    assert calls(CrossEntropy(), Watch(plan)) == 0
    assert calls(CrossEntropy(title="another"), Watch(plan)) == 4
    assert calls(CrossEntropy(title="another"), Watch(plan, title="another")) == 4
    assert calls(CrossEntropy(title="another"), None) == 4
    assert epochs_in(tmp_path / "v") == []
    assert weights(tmp_path / "v")
    calls(None, None)
    manifest = load_manifest(tmp_path / "v")
    assert manifest is not None
    assert manifest["inputs"].keys() == {"prior", "examples", "settings"}
    # What was half done for another objective is not taken up.
    with pytest.raises(Killed):
        calls(CrossEntropy(title="third", before=lambda rows, epoch, micro: Kill((1,))(epoch)), Watch(plan))
    assert calls(CrossEntropy(), Watch(plan)) == 4


# When memory runs out


def out_of_memory(epoch: int, limit: int) -> Callable[[Sequence[int], int, int], None]:
    """Raise as a GPU does from an epoch on, for micro-batches above a limit."""

    def check(rows: Sequence[int], now: int, micro: int) -> None:
        if now >= epoch and micro > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return check


def test_a_smaller_micro_batch_starts_afresh(prior: Path, tmp_path: Path) -> None:
    plan = keeping([1], [1, 2], [1, 2, 3])
    wanted = fit(
        prior,
        tmp_path / "wanted",
        replace(SETTINGS, micro_batch_size=2),
        objective=CrossEntropy(),
        after_epoch=Watch(plan),
    )
    watch, objective = Watch(plan), CrossEntropy(before=out_of_memory(1, 2))
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=watch)
    assert watch.calls == [1, 1, 2, 3]
    assert watch.known == [[], [], ["epoch-1.json"], ["epoch-1.json", "epoch-2.json"]]  # nothing of the larger one
    assert [micro for _, _, micro in objective.steps] == [4] * 2 + [2] * 6
    manifest = load_manifest(folder)
    assert manifest is not None
    assert manifest["micro_batch_size"] == 2
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    for name in epochs_in(wanted):
        assert_close(weights(folder / name), weights(wanted / name))


def test_a_run_that_was_stopped_keeps_the_micro_batch_that_fitted(prior: Path, tmp_path: Path) -> None:
    plan = keeping([1], [2], [3])

    def stop(rows: Sequence[int], epoch: int, micro: int) -> None:
        out_of_memory(0, 1)(rows, epoch, micro)
        Kill((2,))(epoch)

    with pytest.raises(Killed):
        fit(prior, tmp_path / "v", objective=CrossEntropy(before=stop), after_epoch=Watch(plan))
    objective = CrossEntropy(before=out_of_memory(0, 1))
    folder = fit(prior, tmp_path / "v", objective=objective, after_epoch=Watch(plan))
    assert [(epoch, micro) for _, epoch, micro in objective.steps] == [(2, 1), (2, 1)]
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]


def test_a_kill_while_a_larger_micro_batch_is_cleared_away_leaves_nothing_of_it(
    prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_lite.train import fit as module

    plan, rmtree = keeping([1], [1, 2], [2, 3]), module.shutil.rmtree
    removed: list[Path] = []

    def dies_after_one(path: Path, **options: Any) -> None:
        if removed:
            raise Killed
        removed.append(path)
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "shutil", type("Shutil", (), {"rmtree": staticmethod(dies_after_one)}))
        with pytest.raises(Killed):
            fit(prior, tmp_path / "v", objective=CrossEntropy(before=out_of_memory(1, 2)), after_epoch=Watch(plan))
    assert removed
    watch = Watch(plan)
    folder = fit(prior, tmp_path / "v", objective=CrossEntropy(), after_epoch=watch)
    assert watch.calls == [1, 2, 3]
    assert watch.known[0] == []
    assert epochs_in(folder) == ["epoch-2", "epoch-3"]


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_model_that_did_not_fit_is_let_go(full: bool, prior: Path, tmp_path: Path) -> None:
    """Two of them would need twice the memory, where there is not enough for one."""
    made = BaselineObjective(
        "undial", settings_grid("undial", {"retain_weight": 1.0})[0], ROWS, RETAIN, PAD, 0, full=full
    )
    old: list[Any] = []
    alive: list[int] = []
    step, prepare = made.step, made.prepare

    def short(model: Any, rows: Any, epoch: int, micro: int, backward: Any) -> Any:
        if not old:
            old.extend(weakref.ref(m) for m in (made._model, made._frozen) if m is not None)
        out_of_memory(0, 2)(rows, epoch, micro)
        return step(model, rows, epoch, micro, backward)

    def watched(model: Any) -> None:
        alive.append(sum(ref() is not None for ref in old))
        prepare(model)

    made.step, made.prepare = short, watched  # type: ignore[method-assign]
    gc.disable()  # it would come by chance
    try:
        fit(prior, tmp_path / "v", replace(SETTINGS, mode="full" if full else "lora", epochs=1), objective=made)
    finally:
        gc.enable()
    assert len(old) == 1 + full
    assert alive == [0, 0]
    del made.step, made.prepare
    gc.collect()
    assert made._model is None
    assert made._frozen is None
