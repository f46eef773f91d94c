"""Send the losses of fits and the scores of candidates to trackers: TensorBoard, Weights & Biases, Trackio, MLflow.

They get losses, rates and scores, and never a row. What a tracker would collect by itself (console, code) is switched
off. The Trainer reports to none of them: to MLflow it would send all its arguments, with paths and config.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msa_lite.errors import StageError, UsageError

logger = logging.getLogger(__name__)

PROJECT = "msa-lite"
MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"
"""The variable with the address of MLflow's server. Without it, its runs stand in a file beside the others."""

Line = Mapping[str, float]
"""Values by name."""
Reporter = Callable[[Line, int], None]
"""Sends the values of one step to a tracker, with the step's number."""


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run. They decide no result."""

    trackers: tuple[str, ...] = ()
    """Keys of `_OPENERS`."""
    folder: Path = Path()
    """The folder for the files of trackers on this machine."""
    name: str = ""
    """The run's name. A tracker's run is called by it and its own label."""

    @contextmanager
    def lines(self, label: str, at_once: bool = False) -> Iterator[Reporter]:
        """Yield a function that reports a line of values. A tracker that fails is warned of, and gets no more lines.

        at_once: begin the trackers' runs now, so that one that cannot begin costs no step; else with the first line.
        """
        with ExitStack() as stack:
            waiting, reporters = list(self.trackers), dict[str, Reporter]()

            def begin() -> None:
                if waiting:
                    stack.enter_context(redirect_stdout(sys.stderr))  # standard output is for results
                while waiting:
                    reporters[waiting[0]], end = self._open(waiting[0], label)
                    stack.push(partial(spare, waiting.pop(0), end))

            def spare(tracker: str, call: Callable[..., object], *arguments: object) -> None:
                try:
                    call(*arguments)
                except Exception as error:
                    if reporters.pop(tracker, None):
                        logger.warning("track: %s: %s; it goes on without it", tracker, _reason(error))

            def report(line: Line, number: int) -> None:
                begin()
                for tracker, reporter in list(reporters.items()):
                    spare(tracker, reporter, line, number)

            if at_once:
                begin()
            yield report

    def _open(self, tracker: str, label: str) -> tuple[Reporter, Callable[..., object]]:
        """Begin a tracker's run; return its reporter, and what ends it. Raise StageError where it cannot."""
        place = self.folder / re.sub(r"[^\w.-]+", "-", label)
        try:
            run = _OPENERS[tracker](f"{self.name} {label}", place)
            return run.__enter__(), run.__exit__
        except Exception as error:  # each has errors of its own: no login, no network, no space
            why = f"{tracker} cannot begin a run ({_reason(error)})"
            raise StageError(f"track: {why}; set it up, or leave it out") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


UNTRACKED = Tracking()


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise UsageError, with the command to install them, for trackers that are not installed."""
    if missing := [name for name in trackers if find_spec(name) is None]:
        raise UsageError(f"track: {' and '.join(missing)}: not installed: pip install {' '.join(missing)}")


@contextmanager
def _tensorboard(title: str, place: Path) -> Iterator[Reporter]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(place)) as writer:

        def report(line: Line, number: int) -> None:
            for name, value in line.items():
                writer.add_scalar(name, value, number)
            writer.flush()

        yield report


@contextmanager
def _wandb(title: str, place: Path) -> Iterator[Reporter]:
    import wandb

    place.mkdir(parents=True, exist_ok=True)
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    private = {"console": "off", "disable_code": True, "disable_git": True}
    with wandb.init(project=project, name=title, dir=str(place), settings=private) as run:
        yield lambda line, number: run.log(dict(line), step=number)


@contextmanager
def _trackio(title: str, place: Path) -> Iterator[Reporter]:
    import trackio

    trackio.init(project=PROJECT, name=title, resume="allow", embed=False)
    try:
        yield lambda line, number: trackio.log(dict(line), step=number)
    finally:
        trackio.finish()


@contextmanager
def _mlflow(title: str, place: Path) -> Iterator[Reporter]:
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"} | os.environ
    from mlflow import MlflowClient  # whose runs have no user, script and commit, as those of start_run do
    from mlflow.entities import Metric

    place.parent.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(os.environ.get(MLFLOW_ADDRESS) or f"sqlite:///{place.parent.absolute()}/mlflow.db")
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    run, status = client.create_run(number, run_name=title).info.run_id, "FAILED"

    def report(line: Line, step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, [Metric(name, value, now, step) for name, value in line.items()])

    try:
        yield report
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


_OPENERS: dict[str, Callable[[str, Path], AbstractContextManager[Reporter]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
