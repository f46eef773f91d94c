"""Fits with an objective of one's own: what is trained, in which precision, and what memory it takes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.baselines import losses
from msa_lite.baselines.methods import METHODS, settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.choose.rules import LeastExtraction
from msa_lite.choose.validation import Validation
from msa_lite.data import IGNORE, Example, Prompter, Row, Template
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine import models
from msa_lite.evals.engine.models import Runner
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.models.heads import autocast
from msa_lite.io.weights.hub import fetch
from msa_lite.report import load_report
from msa_lite.train import FitSettings, KeptEpochs, Until, VectorFit, epoch_folder, run_fit
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.objectives import held as held_rows
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.objectives.objective import draw_rows
from msa_lite.train.objectives.reference import FitReference, make_batch
from tests.support.fits import (
    PAD,
    ROWS,
    SETTINGS,
    CrossEntropy,
    Killed,
    Noted,
    assert_close,
    assert_same_course,
    compute_in_bf16,
    die_before,
    fit,
    kill_at,
    out_of_memory,
    ragged_rows,
    read_log,
    weights,
)
from tests.support.models import tiny_tokenizer
from tests.support.processes import Ended, run_together

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
RETAIN = ragged_rows(5, seed=2)


# What is trained


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_plain_loss_as_an_objective_gives_the_plain_vector(mode: Any, prior: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode=mode, micro_batch_size=4)
    wanted = weights(fit(prior, tmp_path / "plain", settings))
    objective = CrossEntropy()
    folder = fit(prior, tmp_path / "own", replace(settings, micro_batch_size=1), objective=objective)
    assert_close(weights(folder), wanted, atol=1e-5)
    assert [(epoch, size) for _, epoch, size in objective.steps] == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]
    for epoch in range(3):
        assert sorted(i for rows, when, _ in objective.steps if when == epoch for i in rows) == list(range(8))
    log, plain = read_log(folder), read_log(tmp_path / "plain")
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in log] == pytest.approx([line[key] for line in plain], rel=1e-3)


def test_a_last_short_batch_is_a_step(prior: Path, tmp_path: Path) -> None:
    objective = CrossEntropy()
    fit(prior, tmp_path / "v", replace(SETTINGS, batch_size=3, epochs=2), objective=objective)
    sizes = [(len(rows), epoch) for rows, epoch, _ in objective.steps]
    assert sizes == [(3, 0), (3, 0), (2, 0), (3, 1), (3, 1), (2, 1)]


def test_a_baseline_is_trained_by_plain_steps_of_adamw(prior: Path, tmp_path: Path) -> None:
    """NPO against a loop that has a second model as its reference and every row in one batch."""
    made = BaselineObjective("npo", settings_grid("npo", {"retain_weight": 2.0})[0], ROWS, RETAIN, PAD, 5)
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

    model, other = load_trainable(prior, SETTINGS), load_trainable(prior, SETTINGS).eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.01)
    for (rows, epoch), rate in zip(batches, [0, 0.5, 1, 0.75, 0.5, 0.25], strict=True):
        drawn = draw_rows(len(ROWS), len(RETAIN), 5, epoch)
        forget, retain = [ROWS[i] for i in rows], [RETAIN[drawn[i]] for i in rows]
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


@pytest.mark.parametrize(("name", "mode"), [("undial", "lora"), ("undial", "full"), ("rmu", "full"), ("dpo", "lora")])
def test_in_half_precision_too_a_fit_starts_at_its_reference(
    name: str, mode: Any, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device computes in bf16, the reference does as the model does: no difference but by training."""
    compute_in_bf16(monkeypatch)
    prior = make_checkpoint("llama", initializer_range=0.3)  # sure of itself, so that rounding shows
    given: dict[str, Any] = {"forget_weight": 0.0, "retain_weight": 1.0}
    given |= {"layer": 1} if name == "rmu" else {"retain_loss": "kl"}
    made = BaselineObjective(
        name,
        settings_grid(name, given if name != "dpo" else {"retain_weight": 0.0})[0],
        ROWS,
        RETAIN,
        PAD,
        0,
        alternatives=ROWS[::-1] if name == "dpo" else (),
        full=mode == "full",
    )
    first = read_log(fit(prior, tmp_path / "v", replace(SETTINGS, mode=mode, epochs=1), objective=made))[0]
    # KL and RMU's retain term are 0 at the reference; dpo is (2/β) ln 2, with a gradient, as every gain is 0.
    assert first["loss"] == pytest.approx(13.862944 if name == "dpo" else 0.0, abs=1e-6, rel=1e-6)


@dataclass
class Scores:
    """Scores the model after each epoch, and notes whether it was taken apart for that."""

    validation: Validation
    apart: list[bool] = field(default_factory=list)

    def describe(self) -> str:
        return "scores"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        self.apart.append(Runner(model).halves.body is not None)
        scores.mkdir(exist_ok=True)
        with autocast(model):
            self.validation.score_into(epoch_folder(scores, epoch), lambda: model)
        return KeptEpochs(frozenset([epoch]))


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_in_half_precision_an_epoch_is_scored_as_its_weights_are_later(
    mode: Any, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole logits, as of a model that cannot be taken apart, would not fit beside one that is being trained."""
    compute_in_bf16(monkeypatch)
    rows = [Row(i, f"Where is {i}?", f"At {i * 7}.") for i in range(4)]
    sets = {"forget": rows, "retain": rows[:2]}
    questions = load_qa(sets, Prompter.build(tiny_tokenizer(), "plain", Template()), max_new_tokens=4)
    validation = Validation(questions, LeastExtraction(0.95))
    say, settings = Scores(validation), replace(SETTINGS, mode=mode, epochs=2)
    prior = make_checkpoint("llama", dtype="bfloat16", initializer_range=0.3)
    folder = fit(prior, tmp_path / "v", settings, objective=CrossEntropy(), after_epoch=say)
    assert say.apart == [True, True]
    inside = load_report(folder / "scores/epoch-2").values()
    outside = validation.score_into(tmp_path / "fp32", lambda: models.load_model(folder / "epoch-2")).values()
    for name in ("probability_f", "probability_r"):
        assert inside[name] == pytest.approx(outside[name], rel=0.05)
        assert inside[name] != pytest.approx(outside[name], rel=1e-6)  # or it was not scored in bf16


# When memory runs out


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_in_half_precision_no_model_outlives_its_fit(
    mode: Any, prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the Trainer ties the model to itself; it would stay beside the next fit, the merge and the scores."""
    compute_in_bf16(monkeypatch)
    objective = Noted(before=out_of_memory(0, 2))
    gc.disable()  # it would come by chance
    try:
        for name in "ab":
            fit(prior, tmp_path / name, replace(SETTINGS, mode=mode, epochs=1), objective=objective)
            assert objective.count() == 0
    finally:
        gc.enable()
    # Three starts a fit: four rows are too many, with checkpointing too. An adapter's model is loaded once.
    assert objective.alive == ([0, 1, 1] if mode == "lora" else [0] * 3) * 2


# A fit that is held: its loss by hand, what it keeps, and that it can be stopped.


H = 0.7


def held(full: bool = False, weight: float = H) -> HeldLoss:
    return HeldLoss(ROWS, RETAIN, weight, PAD, seed=0, full=full)


def log_probs(model: Any, example: Example) -> Any:
    """The log-probabilities (n, v) at the positions that predict labels, of a row alone."""
    logits = model(input_ids=torch.tensor([example.ids])).logits[0].double().log_softmax(-1)
    return logits[[t - 1 for t, label in enumerate(example.labels) if t and label != IGNORE]]


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(("micro", "room"), [(1, 2 << 30), (4, 2 << 30), (4, 0), (1, 1)])
def test_a_step_is_the_plain_loss_and_h_times_the_divergence(
    mode: Any, micro: int, room: int, prior: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the reference's states are remembered, or some find no room and are made in each step."""
    monkeypatch.setattr(held_rows, "REMEMBERED", room)
    model = load_trainable(prior, replace(SETTINGS, mode=mode))
    objective = held(mode == "full")
    objective.prepare(model)
    before = [log_probs(model, example).detach() for example in RETAIN]
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    rows = [1, 3, 4, 6]
    drawn = draw_rows(len(ROWS), len(RETAIN), 0, 2)[rows]
    told = [-log_probs(model, ROWS[i]).gather(1, label[:, None]) for i in rows
            for label in [torch.tensor([x for x in ROWS[i].labels[1:] if x != IGNORE])]]  # fmt: skip
    apart = [(before[i].exp() * (before[i] - log_probs(model, RETAIN[i]))).sum(-1) for i in drawn]
    wanted = torch.cat(told).mean() + H * torch.cat(apart).mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(wanted, trained)

    found = objective.step(model, rows, 2, micro, lambda loss: loss.backward())

    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert float(torch.cat(apart).mean()) > 1e-3  # of a divergence that counts
    drawn_so_far = {*(row for epoch in range(3) for row in draw_rows(len(ROWS), len(RETAIN), 0, epoch).tolist())}
    assert (len(objective._states) == len(drawn_so_far)) == (room > 1)
    assert bool(objective._states) == (room > 0)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient.to(parameter.dtype), rtol=1e-3, atol=1e-5)
    objective.release()


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_reference_of_a_hold_runs_once_for_each_row(
    mode: Any, prior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the same batches after a stop, so that not a bit of it is another."""
    runs: list[int] = []
    logits = FitReference.logits

    def counted(self: FitReference, batch: Any, positions: Any = None) -> Any:
        runs.append(len(batch.ids))
        return logits(self, batch, positions)

    monkeypatch.setattr(FitReference, "logits", counted)
    settings = replace(SETTINGS, mode=mode, epochs=3)
    retain = ragged_rows(12, seed=3)
    objective, late = (HeldLoss(ROWS, retain, H, PAD, 0, mode == "full") for _ in range(2))
    fit(prior, tmp_path / "v", settings, objective=objective)
    drawn = [{*draw_rows(len(ROWS), len(retain), 0, epoch).tolist()} for epoch in range(3)]
    assert drawn[1] & drawn[0]
    assert drawn[1] - drawn[0]
    assert sum(runs) == len({*drawn[0], *drawn[1], *drawn[2]}) == len(objective._states)

    model = load_trainable(prior, settings)
    late.prepare(model)
    late.step(model, [2, 5], 2, 4, lambda loss: loss.backward())
    assert {row: states.tolist() for row, states in late._states.items()} == {
        row: states.tolist() for row, states in objective._states.items()
    }


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_stopped_held_fit_goes_on_with_the_same_result(mode: Any, prior: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode=mode)
    whole = weights(fit(prior, tmp_path / "whole", settings, objective=held(mode == "full")))
    with pytest.raises(Killed):
        fit(prior, tmp_path / "stopped", settings, kill_at(5), objective=held(mode == "full"))
    assert_close(weights(fit(prior, tmp_path / "stopped", settings, objective=held(mode == "full"))), whole, atol=1e-6)


def test_an_open_ended_fit_can_be_held(prior: Path, make_checkpoint: Make, tmp_path: Path) -> None:
    target = make_checkpoint("llama", seed=5)
    until = Until(fetch(str(target)), load=lambda: load_trainable(target, FitSettings(mode="full")), least_steps=1)
    folder = fit(prior, tmp_path / "v", replace(SETTINGS, schedule="constant"), objective=held(), until=until)
    manifest = load_manifest(folder) or {}
    assert manifest["fit"]["ended"]
    assert manifest["inputs"]["objective"] == held().describe()
    assert held(weight=1.0).describe() != held().describe()


# Objectives in full mode over two processes: every baseline and a held fit give the vector of one process.


# Batches of 4, 4 and 1: in the last one, the second process has no row.
FORGET, TO_KEEP = ragged_rows(9, seed=1), ragged_rows(7, seed=2)
ALTERNATIVES = [
    replace(row, ids=[*row.prompt_ids, 7, 8 + i], labels=[IGNORE] * len(row.prompt_ids) + [7, 8 + i])
    for i, row in enumerate(FORGET)
]
SHARDED = FitSettings("full", epochs=2, learning_rate=2e-3, batch_size=4, micro_batch_size=2, warmup_epochs=0.5)
CLOSE = 1e-5
DONE = [Ended("", None)] * 2

HELD = "held"
PARAMETERS: dict[str, dict[str, Any]] = {
    "npo": {"retain_loss": "kl"},
    "rmu": {"layer": 0, "steering": 2.0},
    "undial": {"beta": 3.0, "retain_weight": 0.5},
}
CASES = [*METHODS, HELD]
CHOOSES = ("undial", "grad_diff")  # by its scores, after each epoch; the others train to the end


@dataclass
class Nearest:
    """Keeps the epoch with the least loss on the rows to keep, as the model has it; from the files after a stop."""

    def describe(self) -> str:
        return "nearest"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        from msa_lite.evals.engine.models import Runner
        from msa_lite.train.fit.until import measure_loss

        assert not model.training
        scores.mkdir(exist_ok=True)
        path = scores / f"epoch-{epoch}.json"
        if not path.exists():
            assert Runner(model).halves.body is not None  # as all scores are made
            path.write_text(json.dumps(measure_loss(model, TO_KEEP, PAD, 2)))
        values = {int(file.stem.rpartition("-")[2]): json.loads(file.read_text()) for file in scores.glob("*.json")}
        return KeptEpochs(frozenset([min(values, key=lambda number: values[number])]))


def fit_of(case: str, prior: Path, settings: FitSettings = SHARDED) -> VectorFit:
    """The fit of a case."""
    source, name = fetch(str(prior)), case.partition(" ")[0]
    objective: Any
    if case == HELD:
        objective = HeldLoss(FORGET, TO_KEEP, 0.7, PAD, seed=3, full=True)
    else:
        parameters = settings_grid(name, PARAMETERS.get(case, {}))[0]
        alternatives = ALTERNATIVES if METHODS[name].takes == "pairs" else ()
        objective = BaselineObjective(name, parameters, FORGET, TO_KEEP, PAD, 3, alternatives, full=True)
    after = Nearest() if case in CHOOSES else None
    return VectorFit(source, FORGET, tiny_tokenizer(), settings, objective, after, label=case)


def fit_all(rank: int, cases: list[str], prior: Path, folder: Path) -> None:
    from msa_lite.train.processes.fit import fit_sharded

    for case in cases:
        fit_sharded(fit_of(case, prior), folder / case)


def dies(rank: int, prior: Path, folder: Path) -> None:
    """Fit with a choice of epochs, but the second process is killed in the second epoch."""
    if rank == 1:
        die_before(4)
    fit_all(rank, ["undial"], prior, folder)


def breaks(rank: int, prior: Path, folder: Path, step: int) -> None:
    """Fit with a choice of epochs; the loss of the second process is no number from a step on."""
    from msa_lite.train.processes.fit import _Steps

    own = _Steps._step

    def broken(self: Any, rows: Any, epoch: int, number: int) -> Any:
        values = own(self, rows, epoch, number)
        return {**values, "loss": float("nan")} if number >= step else values

    _Steps._step = broken  # type: ignore[method-assign]
    fit_all(rank, ["grad_diff"], prior, folder)


def trained(folder: Path) -> list[Path]:
    """The folders with weights in a vector's."""
    return sorted(folder.glob("epoch-*")) or [folder]


def assert_same_fit(found: Path, wanted: Path) -> None:
    assert [path.name for path in trained(found)[:-1]] == [path.name for path in trained(wanted)[:-1]]
    for mine, other in zip(trained(found), trained(wanted), strict=True):
        assert_close(weights(mine), weights(other), CLOSE)
    assert_same_course(found, wanted, rel=1e-4)


@pytest.mark.slow
def test_every_objective_gives_the_vector_of_one_process(make_checkpoint: Make, tmp_path: Path) -> None:
    prior, two, one = make_checkpoint("llama"), tmp_path / "two", tmp_path / "one"
    assert run_together(fit_all, CASES, prior, two) == DONE
    for case in CASES:
        assert_same_fit(two / case, run_fit(fit_of(case, prior), one / case))
        last = weights(trained(two / case)[-1])
        moved = max(float((tensor - weights(prior)[name]).abs().max()) for name, tensor in last.items())
        assert moved > 100 * CLOSE, case
    for case in CHOOSES:
        assert [path.name for path in trained(two / case)] == [path.name for path in trained(one / case)]
        mine, other = ((folder / case / "scores/epoch-2.json").read_text() for folder in (two, one))
        assert json.loads(mine) == pytest.approx(json.loads(other), rel=1e-5)


@pytest.mark.slow
def test_a_stopped_fit_goes_on_with_its_reference_and_its_scores(make_checkpoint: Make, tmp_path: Path) -> None:
    prior, killed, whole = make_checkpoint("llama"), tmp_path / "killed", tmp_path / "whole"
    assert [outcome.error for outcome in run_together(dies, prior, killed)] == ["StageError", "killed"]
    assert sorted(path.name for path in (killed / "undial.partial").glob("epoch-*")) == ["epoch-1"]
    for folder in (killed, whole):
        assert run_together(fit_all, ["undial"], prior, folder) == DONE
    assert [path.name for path in trained(killed / "undial")] == [path.name for path in trained(whole / "undial")]
    for mine, other in zip(trained(killed / "undial"), trained(whole / "undial"), strict=True):
        assert_close(weights(mine), weights(other))
    assert read_log(killed / "undial") == read_log(whole / "undial")


@pytest.mark.slow
def test_a_loss_that_is_no_number_leaves_the_epochs_before_it(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    assert run_together(breaks, prior, tmp_path / "late", 4) == DONE
    assert [path.name for path in trained(tmp_path / "late/grad_diff")] == ["epoch-1"]
    for outcome in run_together(breaks, prior, tmp_path / "early", 1):
        assert outcome.error == "NotFiniteError"
        assert outcome.value.count("nothing was kept") == 1
    assert not (tmp_path / "early").exists() or not list((tmp_path / "early").iterdir())
