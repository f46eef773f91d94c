"""The processes of a launcher at one run: orders and results, faults of either side, other inputs, silence."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from msa_lite.errors import MismatchError, StageError
from msa_lite.io.launch import gathering
from msa_lite.io.launch.crew import Crew, Ranks
from msa_lite.io.launch.gathering import PREPARE, Heartbeat, Stopped, agree, gathered, stoppable
from msa_lite.train.processes.fit import check_batch, epoch_order
from msa_lite.train.processes.shards import deal, decoder_layers
from tests.support.models import tiny_model


def make_crews(count: int) -> list[Crew]:
    """A crew for each process; here, each is a thread."""
    from torch.distributed import HashStore

    store = HashStore()
    return [Crew(Ranks(rank, count), store) for rank in range(count)]


@contextmanager
def following(crew: Crew, task: Callable[[str, dict[str, Any]], Any]) -> Iterator[None]:
    """A thread that follows, until the block has ended."""
    thread = threading.Thread(target=crew.follow, args=(task,), daemon=True)
    thread.start()
    yield
    crew.put("ended", {"failed": False})
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_followers_do_what_the_first_process_orders() -> None:
    first, *others = make_crews(3)
    done: list[Any] = []

    def task(name: str, arguments: dict[str, Any]) -> Any:
        done.append((name, arguments))
        return len(done)

    with following(others[0], task), following(others[1], task):
        with first.helped("fit", {"name": "retain"}) as results:
            pass
        assert sorted(results) == [1, 2]
        with first.helped("score") as results:
            pass
        assert sorted(results) == [3, 4]
    assert done == [("fit", {"name": "retain"})] * 2 + [("score", {})] * 2


def test_a_crew_of_one_orders_nothing() -> None:
    with Crew().helped("fit") as results:
        pass
    assert results == []
    with gathered("recipe") as crew:
        assert crew.is_alone


def test_an_error_of_a_follower_is_raised_by_the_first_process() -> None:
    first, other = make_crews(2)
    message = gathering._as_message(MismatchError("no such tensor"), 1)
    other.put("failed", message)
    with pytest.raises(MismatchError, match="process 1: no such tensor"), first.helped("fit"):
        pass
    assert gathering._as_message(ValueError("x"), 2)["text"].startswith("process 2: ValueError: x (this was not")


def test_processes_that_prepare_something_else_are_named() -> None:
    first, *others = make_crews(3)
    same, other = {"rows": "a", "models": "b"}, {"rows": "c", "models": "b"}
    with (
        following(others[0], lambda name, arguments: same if name == PREPARE else None),
        following(others[1], lambda name, arguments: other),
    ):
        with pytest.raises(MismatchError, match="process 2: rows\nare the recipe") as caught:
            agree(first, lambda: same)
        assert "process 1" not in str(caught.value)
    first, follower = make_crews(2)
    with following(follower, lambda name, arguments: same):
        agree(first, lambda: same)


@pytest.mark.parametrize(("is_known", "wanted"), [(False, "this process was told to end"), (True, "the store is gone")])
def test_a_process_that_is_stopped_says_why(is_known: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_TELL", 0.1)
    first, other = make_crews(2)
    other.put("bye/1", True)
    error = gathering._end_first(first, Stopped(), "the store is gone" if is_known else None)
    assert isinstance(error, StageError)
    assert wanted in str(error)
    assert first.get("ended") == {"failed": True}


def test_sigterm_is_raised_once_and_only_in_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # while it cleans up

    with pytest.raises(Stopped), stoppable():
        work()
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_in_a_finaliser_comes_again() -> None:
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        Finalised()  # Python drops what is raised as it goes
        time.sleep(60)

    with pytest.raises(Stopped), stoppable():
        work()


LEAVING = """
import atexit, sys
from torch import distributed
from msa_lite.cli import main
atexit.register(print, "left in order")
if sys.argv[1] == "group":
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
sys.argv[1:] = ["no-such-command"]
main()
"""


@pytest.mark.parametrize("place", ["group", "alone"])
def test_a_process_that_fails_within_a_group_does_not_wait_for_it(place: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, place], capture_output=True, text=True)
    assert done.returncode == 2
    assert ("left in order" in done.stdout) == (place == "alone")
    assert "error: " in done.stderr


@pytest.mark.parametrize("dies", [True, False])
def test_a_process_that_gives_no_sign_of_life_stops_the_others(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = make_crews(2)
    monkeypatch.setattr(gathering, "_BEAT", 0.05)
    monkeypatch.setattr(gathering, "_SILENCE", 1.0 if dies else 20.0)
    monkeypatch.setattr(Heartbeat, "_stop_main", lambda self: None)
    watch = Heartbeat(first._store, 0, [1], first.news)
    watched = Heartbeat(other._store, 1, [0], other.news)
    watched.start()
    watch.start()
    if dies:
        watched.end()
        watch.join(timeout=30)
        assert "process 1 has given no sign of life" in str(watch.reason)
    else:
        while first._store.add("beat/1", 0) < 10:
            time.sleep(0.05)
        assert watch.reason is None
    watched.end()
    watch.end()


# The rows of a step and the layers of a model, dealt to several processes.


LENGTHS = [5, 9, 2, 7, 7, 3, 8, 1, 6, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_every_row_of_a_step_is_run_once_in_equally_many_passes(rows: int, count: int) -> None:
    passes = deal(LENGTHS[:rows], count, budget=18)
    assert sorted(row for own in passes for part in own for row in part) == [*range(rows)]
    assert len({len(own) for own in passes}) == 1
    assert all(len(part) * max(LENGTHS[row] for row in part) <= 18 for own in passes for part in own if part)


def test_the_work_is_about_equal() -> None:
    work = [sum(LENGTHS[row] for part in own for row in part) for own in deal(LENGTHS, 2, budget=100)]
    assert sum(work) == sum(LENGTHS)
    assert max(work) - min(work) <= max(LENGTHS)


def test_an_epoch_has_the_order_of_a_single_process() -> None:
    assert sorted(epoch_order(10, 0, 0)) == list(range(10))
    assert epoch_order(10, 0, 0) == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]  # as a Trainer with this seed had it
    assert epoch_order(10, 0, 0) != epoch_order(10, 0, 1) != epoch_order(10, 1, 1)


def test_a_batch_that_cannot_be_divided_is_told_with_the_nearest_ones() -> None:
    assert check_batch(32, 4) is None
    assert "use 30 or 33," in str(check_batch(32, 3))
    assert "use 4," in str(check_batch(2, 4))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "olmo2", "gpt2"])
def test_the_layers_of_a_model_are_known(kind: str) -> None:
    model = tiny_model(kind)
    layers = decoder_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert 0 < inside < sum(parameter.numel() for parameter in model.parameters())
