"""Fits in a second: an objective and a say after each epoch that note what they are asked, and what stops them."""

from __future__ import annotations

import json
import os
import random
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from msa_lite.baselines import losses
from msa_lite.data import IGNORE, Example
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, KeptEpochs, VectorFit, run_fit
from msa_lite.train.memory.rungs import Rung, set_up
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.reference import make_batch
from tests.support.models import tiny_tokenizer

VOCABULARY = 150
PAD = 2


def ragged_rows(count: int, seed: int = 0) -> list[Example]:
    """Rows of 3 to 12 tokens behind prompts of 1 to 4; ids from 3 on, so that none is padding."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        prompt, answer = draw.randint(1, 4), draw.randint(3, 12)
        ids = [draw.randrange(3, VOCABULARY) for _ in range(prompt + answer)]
        rows.append(Example(index, ids, [IGNORE] * prompt + ids[prompt:]))
    return rows


def with_adapter(model: Any, moved: bool = False) -> Any:
    """The model under a fresh LoRA adapter; with `moved`, one that changes what it says."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=not moved
    )
    return get_peft_model(model, config)


ROWS = ragged_rows(8, seed=1)
# 8 rows in batches of 4: two steps an epoch, six in all, the first two of them warm-up.
SETTINGS = FitSettings(lora_rank=4, lora_alpha=8, epochs=3, learning_rate=5e-3, batch_size=4, seed=0)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def kill_at(step: int, label: str = "vector") -> Callable[[str, int, int], None]:
    """Return the progress of a fit that is killed at a step."""

    def progress(said: str, done: int, total: int) -> None:
        if (said, done) == (label, step):
            raise Killed

    return progress


def never(*args: Any) -> None:
    """Does nothing at any point of a fit."""


def spoil(model: Any) -> None:
    """Make one weight NaN, as a step does that goes too far, with a loss and gradients that are numbers still."""
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = float("nan")


@dataclass
class CrossEntropy:
    """The plain loss as an objective. before: called with what a step is about to run; steps: (rows, epoch, micro).

    broken_from: (epoch, step) whose loss is NaN; spoilt_in: the epoch whose last step leaves a weight that is.
    """

    before: Callable[[Sequence[int], int, int], None] = never
    broken_from: tuple[int, int] | None = None
    spoilt_in: int | None = None
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
        for start in range(0, len(rows), micro):
            batch = make_batch([ROWS[i] for i in rows[start : start + micro]], PAD, model.device)
            logits = model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1]
            loss = losses.token_losses(logits, batch.labels[:, 1:]).sum() / known
            if (epoch, len(self.steps) % 2) == self.broken_from:
                loss = loss * float("nan")
            backward(loss)
            total = total + loss.detach()
        if epoch == self.spoilt_in and len(self.steps) % 2 == 0:
            spoil(model)
        return total


@dataclass
class Watch:
    """Keeps epochs by a plan, epoch → Kept, and notes what it is called with. before: called first with the epoch."""

    plan: dict[int, KeptEpochs]
    before: Callable[[int], None] = never
    title: str = "by plan"
    calls: list[int] = field(default_factory=list)
    known: list[list[str]] = field(default_factory=list)
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)

    def describe(self) -> str:
        return self.title

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        assert not model.training
        assert model.config.use_cache is False
        self.calls.append(epoch)
        self.known.append(sorted(path.name for path in scores.glob("*")))
        self.weights[epoch] = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.before(epoch)
        scores.mkdir(exist_ok=True)
        (scores / f"epoch-{epoch}.json").write_text(f"{epoch}")
        return self.plan[epoch]


def compute_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """Have fits take a CPU for a device that computes in bf16."""
    patch.setattr("msa_lite.io.models.heads.has_bf16", lambda: True)
    patch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)


@dataclass
class Noted(CrossEntropy):
    """Notes at each start of a fit how many models of earlier starts are alive."""

    seen: list[weakref.ref[Any]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def prepare(self, model: Any) -> None:
        self.alive.append(self.count())
        self.seen.append(weakref.ref(model))
        super().prepare(model)

    def count(self) -> int:
        return len({id(model()) for model in self.seen} - {id(None)})


def keeping(*epochs: Sequence[int], stop: int = 0) -> dict[int, KeptEpochs]:
    """The plan that keeps these after epoch 1, 2, …, and stops after one of them."""
    return {i: KeptEpochs(frozenset(kept), i != stop) for i, kept in enumerate(epochs, 1)}


def fit(prior: Path, out: Path, settings: FitSettings = SETTINGS, progress: Progress = silent, **options: Any) -> Path:
    return run_fit(VectorFit(fetch(str(prior)), ROWS, tiny_tokenizer(), settings, **options), out, progress)


def weights(folder: Path) -> dict[str, Any]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], atol: float = 0.0) -> None:
    assert found
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.allclose(value, wanted[name], rtol=atol, atol=atol), name


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def assert_same_course(folder: Path, wanted: Path, rel: float) -> None:
    """Two fits of the same inputs took the same steps, and the first one's folder is whole."""
    for line, other in zip(read_log(folder), read_log(wanted), strict=True):
        assert line == pytest.approx(other, rel=rel)
    assert verify_folder(folder) == []
    one, other = (load_manifest(place) or {} for place in (folder, wanted))
    assert one["inputs"] == other["inputs"]


def die_before(step: int) -> None:
    """Have this process killed before a step, counted from 0, of a fit over several processes."""
    from msa_lite.train.processes.fit import _Steps

    take = _Steps._step

    def killed(self: Any, rows: Any, epoch: int, number: int) -> Any:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, rows, epoch, number)

    _Steps._step = killed  # type: ignore[method-assign]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_log(folder)]


def epochs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("epoch-*"))


@dataclass
class Kill:
    """Raises at a given call."""

    at: Any

    def __call__(self, *given: Any) -> None:
        if given == self.at:
            raise Killed


def kill_at_disk(patch: pytest.MonkeyPatch, where: str, at: tuple[int, ...]) -> None:
    """Kill before the save of a step, or between the end of the training and the removal of its saves."""
    from transformers import Trainer

    from msa_lite.train.fit import vector as module

    save = Trainer._save_checkpoint

    def saved(self: Any, *args: Any, **kwargs: Any) -> None:
        Kill(at)(self.state.global_step)
        save(self, *args, **kwargs)

    def removed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    if where == "save":
        patch.setattr(Trainer, "_save_checkpoint", saved)
    if where == "end":
        patch.setattr(module, "drop_saves", removed)


def out_of_memory(epoch: int, limit: int) -> Callable[[Sequence[int], int, int], None]:
    """Raise as a GPU does from an epoch on, for micro-batches above a limit."""

    def check(rows: Sequence[int], now: int, micro: int) -> None:
        if now >= epoch and micro > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return check


def steps_at(model: Any, rung: Rung, objective: Any = None) -> tuple[list[float], dict[str, Any]]:
    """The losses of two steps at a rung, and the gradients that they leave together."""
    set_up(model, rung)
    loss = objective or PlainLoss(ROWS, 0)
    loss.prepare(model.train())
    losses = [loss.step(model, range(len(ROWS)), epoch, 2, lambda value: value.backward()).item() for epoch in (0, 1)]
    return losses, {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def assert_same_bits(ours: tuple[list[float], dict[str, Any]], wanted: tuple[list[float], dict[str, Any]]) -> None:
    assert ours[0] == wanted[0]
    assert ours[1].keys() == wanted[1].keys()
    assert any(bool(gradient.any()) for gradient in wanted[1].values())
    different = [name for name, gradient in wanted[1].items() if not torch.equal(ours[1][name], gradient)]
    assert not different
