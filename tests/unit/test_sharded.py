"""Full fits over two processes: the vector of one process, kills and resumes, and what stops them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Example
from msa_lite.errors import StageError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.models.heads import _cpu_has_bf16
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.io.weights.vocabulary import find_added_rows
from msa_lite.train import FitSettings, Until, VectorFit, fit_vector, run_fit
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.processes.peers import told_of_losses
from tests.support.fits import assert_close, assert_same_course, die_before, ragged_rows, read_log, steps_of, weights
from tests.support.models import tiny_tokenizer
from tests.support.processes import Ended, run_together

Make = Callable[..., Path]
ROWS = ragged_rows(9, seed=1)
# Batches of 4, 4 and 1: in the last one, the second process has no row.
ADDED_ROWS = [Example(i, [305, 10 + i, 20, 30 + i], [-100, 10 + i, 20, 30 + i]) for i in range(9)]
SETTINGS = FitSettings("full", epochs=3, learning_rate=5e-3, batch_size=4)
CLOSE = 1e-5
pytestmark = pytest.mark.slow
DONE = [Ended("", None)] * 2


def one(prior: Path, out: Path, settings: FitSettings = SETTINGS, **more: Any) -> Path:
    return run_fit(VectorFit(fetch(str(prior)), ROWS, tiny_tokenizer(), settings, **more), out)


def sharded(rank: int, prior: Any, out: Path, settings: FitSettings = SETTINGS, **more: Any) -> None:
    from msa_lite.train.processes.fit import fit_sharded

    source = prior if isinstance(prior, Source) else fetch(str(prior))
    rows = more.pop("rows", ROWS)
    fit_sharded(VectorFit(source, rows, tiny_tokenizer(), settings, extra_files={"x": "y"}, **more), out)


def dies(rank: int, who: int, step: int, prior: Path, out: Path) -> None:
    """Fit, but one process is killed before a step."""
    if rank == who:
        die_before(step)
    sharded(rank, prior, out)


def checkpointed(rank: int, prior: Path, out: Path) -> None:
    """Fit as on GPUs, where activations are made again in the backward pass, a model that makes its own loss."""
    from msa_lite.io.models import heads
    from msa_lite.train.objectives import plain
    from msa_lite.train.processes import shards

    own = shards._bare_model

    def bare(source: Source) -> Any:
        model = own(source)
        shards.checkpoint_layers(model)
        return model

    shards._bare_model, plain.split_model = bare, lambda model: heads.Halves(model, None, None)
    sharded(rank, prior, out)


def tracked(rank: int, prior: Path, out: Path) -> None:
    """Fit with a tracker that writes its lines into a file for each process."""
    from msa_lite.train.fit import tracking

    @contextmanager
    def opened(title: str, place: Path) -> Iterator[Any]:
        place.mkdir(parents=True)
        yield lambda line, step: (place / f"{rank}-{step}").write_text(json.dumps(dict(line)))

    tracking._OPENERS["tensorboard"] = opened
    sharded(rank, prior, out, tracking=tracking.Tracking(("tensorboard",), out.parent / "trackers", "tiny"))


def assert_same_fit(found: Path, wanted: Path) -> None:
    assert_close(weights(found), weights(wanted), CLOSE)
    assert {path.name for path in found.iterdir()} - {"x"} == {path.name for path in wanted.iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes()
    assert_same_course(found, wanted, rel=1e-5)


def test_two_processes_take_the_steps_of_one(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    assert run_together(tracked, prior, tmp_path / "two") == DONE
    lines = [path.name for path in (tmp_path / "trackers" / "vector").glob("*")]
    assert sorted(lines) == [f"0-{step}" for step in range(1, 10)]  # of the first process alone
    assert_same_fit(tmp_path / "two", one(prior, tmp_path / "one"))
    assert max((t - weights(prior)[n]).abs().max() for n, t in weights(tmp_path / "two").items()) > 100 * CLOSE
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    written = (tmp_path / "two" / "manifest.json").stat().st_mtime_ns
    one(prior, tmp_path / "two")  # is taken for the same by one process
    assert (tmp_path / "two" / "manifest.json").stat().st_mtime_ns == written


def test_another_architecture_whose_head_is_its_own_with_checkpointing(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("qwen2")
    assert run_together(checkpointed, prior, tmp_path / "two") == DONE
    assert_same_fit(tmp_path / "two", one(prior, tmp_path / "one"))


@pytest.mark.parametrize("who", [0, 1])
def test_a_dead_process_stops_the_other_and_a_rerun_gives_the_same_bits(
    who: int, make_checkpoint: Make, tmp_path: Path
) -> None:
    prior = make_checkpoint("llama")
    ended = run_together(dies, who, 7, prior, tmp_path / "killed")  # in the third epoch
    assert ended[who].error == "killed"
    assert ended[1 - who].error == "StageError"
    assert "another process" in ended[1 - who].value
    assert not (tmp_path / "killed").exists()
    saves = sorted(path.name for path in (tmp_path / "killed.partial" / "checkpoints").iterdir())
    assert saves == ["step-3", "step-6"]
    sizes = [path.stat().st_size for path in (tmp_path / "killed.partial/checkpoints/step-6").iterdir()]
    assert max(sizes) < sum(sizes) / 4  # a file is in the host's memory twice while it is written
    if who == 0:
        assert run_together(sharded, prior, tmp_path / "killed") == DONE
        assert run_together(sharded, prior, tmp_path / "whole") == DONE
        assert_close(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
        assert read_log(tmp_path / "killed") == read_log(tmp_path / "whole")
    else:  # one process goes on with what two have done, or begins anew in its own way
        shutil.copytree(tmp_path / "killed.partial", tmp_path / "alone.partial")
        one(prior, tmp_path / "alone", extra_files={"x": "y"})
        assert_same_fit(tmp_path / "alone", one(prior, tmp_path / "one"))
        assert run_together(sharded, prior, tmp_path / "killed", count=1) == DONE[:1]
        assert_same_fit(tmp_path / "killed", one(prior, tmp_path / "one"))
    assert steps_of(tmp_path / "killed") == list(range(1, 10))


def different(rank: int, prior: Path, out: Path) -> None:
    sharded(rank, prior, out, rows=ROWS[rank:])


def wrong(rank: int, prior: Path, out: Path) -> None:
    sharded(rank, prior, out, replace(SETTINGS, mode="lora", batch_size=5, optimizer="adamw_8bit"))


def too_fast(rank: int, prior: Path, out: Path) -> None:
    sharded(rank, prior, out, replace(SETTINGS, learning_rate=1e30, warmup_epochs=0))


def test_what_cannot_be_done_together_fails_at_once_in_both(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    for outcome in run_together(different, prior, tmp_path / "v"):
        assert outcome.error == "MismatchError"
        assert "examples: not the same in process 1 as in process 0" in outcome.value
    for outcome in run_together(wrong, prior, tmp_path / "v"):
        assert outcome.error == "UsageError"
        for part in ("use 4 or 6", "vector.mode lora", "adamw_8bit"):
            assert part in outcome.value
    for outcome in run_together(too_fast, prior, tmp_path / "v"):
        assert outcome.error == "NotFiniteError"
        assert "nothing was kept" in outcome.value
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "v").write_text("a user's file")
    for outcome in run_together(sharded, prior, tmp_path / "v"):  # the first one sees it, both tell
        assert outcome.error == "OutputError"
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer", StageError),
        ("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'", RuntimeError),
        ("mat1 and mat2 have other dtypes", RuntimeError),
    ],
)
def test_of_a_fit_with_others_only_lost_connections_are_told_as_such(message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, told_of_losses("forget vector"):
        raise RuntimeError(message)
    assert type(caught.value) is kind


def open_ended(prior: Path, target: Path) -> tuple[FitSettings, Until]:
    settings = replace(SETTINGS, epochs=12, learning_rate=1e-4, schedule="constant", warmup_steps=2)
    return settings, Until(fetch(str(target)), load=Loads(target), tries=2)


class Loads:
    """Loads a target; a function would not reach another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder).eval()


def until_known(rank: int, prior: Path, target: Path, out: Path) -> None:
    settings, until = open_ended(prior, target)
    sharded(rank, prior, out, settings, until=until)


def until_killed(rank: int, prior: Path, target: Path, out: Path) -> None:
    """Die within the second try, where every epoch is saved."""
    from msa_lite.train.processes import fit as module

    write, module.SAVE_SECONDS = module.write_save, -1.0

    def saved(saves: Path, model: Any, optimizer: Any, epoch: int, *rest: Any) -> None:
        write(saves, model, optimizer, epoch, *rest)
        if rank == 1 and saves.parent.name == "try-2" and epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    module.write_save = saved
    until_known(rank, prior, target, out)


def test_an_open_ended_fit_goes_as_in_one_process(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    target = one(prior, tmp_path / "target", replace(SETTINGS, epochs=6))
    assert run_together(until_known, prior, target, tmp_path / "two") == DONE
    settings, until = open_ended(prior, target)
    assert_same_fit(tmp_path / "two", one(prior, tmp_path / "one", settings, until=until))
    two, alone = ((load_manifest(tmp_path / name) or {})["fit"] for name in ("two", "one"))
    assert len(two["rates"]) == 2
    assert {k: v for k, v in two.items() if k != "loss"} == {k: v for k, v in alone.items() if k != "loss"}
    assert two["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    ended = run_together(until_killed, prior, target, tmp_path / "killed")
    assert [outcome.error for outcome in ended] == ["StageError", "killed"]
    assert [
        path.name for path in (tmp_path / "killed.partial/try-2/checkpoints").iterdir() if (path / "complete").exists()
    ]
    assert run_together(until_known, prior, target, tmp_path / "killed") == DONE
    assert_close(weights(tmp_path / "killed"), weights(tmp_path / "two"))
    assert (tmp_path / "killed" / "course.json").read_bytes() == (tmp_path / "two" / "course.json").read_bytes()


def with_added_rows(rank: int, source: Source, out: Path) -> None:
    sharded(rank, source, out, rows=ADDED_ROWS)


def test_a_prior_with_rows_of_the_target_and_stored_in_bf16(make_checkpoint: Make, tmp_path: Path) -> None:
    target, prior = make_checkpoint("llama", 3, vocab_size=310), make_checkpoint("llama", 1, "bfloat16")
    added = find_added_rows(load_checkpoint(target), load_checkpoint(prior))
    for name, source in (("more", replace(fetch(str(prior)), added=added)), ("bf16", fetch(str(prior)))):
        rows = ADDED_ROWS if added is source.added else ROWS
        assert run_together(with_added_rows if source.added else sharded, source, tmp_path / name) == DONE
        wanted = fit_vector(source, rows, tmp_path / "one" / name, tokenizer=tiny_tokenizer(), settings=SETTINGS)
        assert_same_fit(tmp_path / name, wanted)


def in_bf16(rank: int, prior: Path, out: Path) -> None:
    sharded(rank, prior, out, replace(SETTINGS, compute="bf16"))


@pytest.mark.skipif(not _cpu_has_bf16(), reason="this CPU has no bf16")
def test_arithmetic_in_bf16_leaves_weights_in_fp32(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    assert run_together(in_bf16, prior, tmp_path / "two") == DONE
    exact = one(prior, tmp_path / "one")
    for line, other in zip(read_log(tmp_path / "two"), read_log(exact), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=0.01)
        assert line["loss"] != other["loss"]
    found, start, wanted = weights(tmp_path / "two"), weights(prior), weights(exact)
    moved, gap = (sum(float((found[n] - other[n]).square().sum()) for n in found) for other in (start, wanted))
    assert gap < 0.1 * moved
    assert any((t != t.bfloat16().float()).any() for t in found.values())


class Cramped(PlainLoss):
    """The plain loss on a GPU where a pass of more rows than the limit runs out of memory."""

    limit, full, sizes = 0, True, list[int]()

    def step(self, model: Any, rows: Any, epoch: int, micro: int, backward: Any) -> Any:
        def noted(loss: Any) -> None:
            if micro > self.limit and self.full:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            backward(loss)

        self.sizes = [*self.sizes, micro]
        return super().step(model, rows, epoch, micro, noted)


def chosen_micro(rank: int, prior: Path, limit: int) -> list[int]:
    """Choose a micro-batch where passes of more rows than the limit run out of memory, as on a GPU."""
    from msa_lite.data import pad_id
    from msa_lite.io.console.progress import silent
    from msa_lite.train.fit.loop import Loop
    from msa_lite.train.processes.fit import choose_micro
    from msa_lite.train.processes.peers import Peers
    from msa_lite.train.processes.shards import ShardedDivision, load_shards

    peers, source, loss = Peers.join(), fetch(str(prior)), Cramped(ROWS, pad_id(tiny_tokenizer()))
    model = load_shards(source, SETTINGS, peers)
    loss.prepare(model, ShardedDivision(source=source, peers=peers))
    loss.limit = limit
    settings = replace(SETTINGS, batch_size=8)
    loop = Loop(VectorFit(source, ROWS, tiny_tokenizer(), settings, loss), prior, silent)
    on_gpu = replace(peers, device=type("Device", (), {"type": "cuda"}))
    micro = choose_micro(loop, model, on_gpu)
    loss.full = False
    loss.step(model, range(4), 0, 1, lambda value: value.backward())  # the model works after passes that failed
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [micro, *loss.sizes[:-1]]


class FullInOne(PlainLoss):
    """A loss for which the second process alone has no memory."""

    rank = 0

    def step(self, model: Any, rows: Any, epoch: int, micro: int, backward: Any) -> Any:
        if self.rank == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


def only_one_is_full(rank: int, prior: Path) -> None:
    """Try passes for which the second process alone has no memory."""
    import torch

    from msa_lite.io.console.progress import silent
    from msa_lite.train.fit.loop import Loop
    from msa_lite.train.processes.fit import choose_micro
    from msa_lite.train.processes.peers import Peers

    loss = FullInOne(ROWS, 0)
    loss.rank = rank
    loop = Loop(VectorFit(fetch(str(prior)), ROWS, None, SETTINGS, loss), prior, silent)
    on_gpu = replace(Peers.join(), device=type("Device", (), {"type": "cuda"}))
    choose_micro(loop, torch.nn.Linear(1, 1), on_gpu)


def test_a_process_that_alone_runs_out_of_memory_ends_all(make_checkpoint: Make) -> None:
    for outcome in run_together(only_one_is_full, make_checkpoint("llama")):
        assert outcome.error == "StageError"
        assert "process 1 ran out of memory with" in outcome.value


def test_the_micro_batch_falls_until_it_fits_in_all(make_checkpoint: Make) -> None:
    prior = make_checkpoint("llama")
    assert run_together(chosen_micro, prior, 2) == [Ended("", [2, 4, 2])] * 2
    assert [outcome.error for outcome in run_together(chosen_micro, prior, 0)] == ["StageError"] * 2
