"""Report fits and the points of a choice to trackers: TensorBoard, Weights & Biases, Trackio.

They get losses, rates, settings and scores, and never a row. What a tracker would collect by itself (console, code,
models) is switched off.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError, UsageError

PROJECT = "msa-lite"

Line = Mapping[str, float]
"""Values by name."""
Reporter = Callable[[Line, int], None]
"""Reports a line with its number."""


@dataclass(frozen=True)
class Tracking:
    """The trackers of a run. They decide no result."""

    trackers: tuple[str, ...] = ()
    """Keys of `_OPENERS`, which are the Trainer's names."""
    folder: Path = Path()
    """The folder for the files of trackers on this machine."""
    name: str = ""
    """The run's name, with which the names of the trackers' runs begin."""

    def arguments(self, label: str) -> dict[str, Any]:
        """Return the arguments of transformers' Trainer for a fit."""
        if not self.trackers:
            return {"report_to": "none"}
        return {"report_to": list(self.trackers), "run_name": self._title(label), "project": PROJECT}

    @contextmanager
    def fit(self, label: str) -> Iterator[None]:
        """Let the Trainer's reports of a fit go to the right places, and end the trackers' runs afterwards."""
        with ExitStack() as stack:
            if self.trackers:
                self._prepare(stack, label)
            if "wandb" in self.trackers:  # the Trainer takes the run that is open, and never ends it
                self._open(stack, "wandb", label)
            if "trackio" in self.trackers:
                stack.callback(_end_trackio)
            yield

    @contextmanager
    def lines(self, label: str) -> Iterator[Callable[[Line], None]]:
        """Yield a function that reports a line of values. The trackers' runs begin with the first line."""
        with ExitStack() as stack:
            reporters: list[Reporter] = []
            count = 0

            def report(line: Line) -> None:
                nonlocal count
                if not count and self.trackers:
                    self._prepare(stack, label)
                    reporters.extend(self._open(stack, tracker, label) for tracker in self.trackers)
                count += 1
                for reporter in reporters:
                    reporter(line, count)

            yield report

    def _prepare(self, stack: ExitStack, label: str) -> None:
        """Set the trackers up for as long as the stack is open."""
        from accelerate.utils import patch_environment

        stack.enter_context(redirect_stdout(sys.stderr))  # standard output is for results
        stack.enter_context(patch_environment(**self._settings(label)))

    def _open(self, stack: ExitStack, tracker: str, label: str) -> Reporter:
        """Begin a tracker's run, which ends with the stack. Raise StageError with its reason where it cannot."""
        try:
            return stack.enter_context(_OPENERS[tracker](self._title(label), self._place(label)))
        except Exception as error:  # each has errors of its own: no login, no network, no space
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise StageError(f"track: {tracker} cannot begin a run ({reason}); set it up, or leave it out") from error

    def _title(self, label: str) -> str:
        return f"{self.name} {label}"

    def _place(self, label: str) -> Path:
        return self.folder / re.sub(r"[^\w.-]+", "-", label)

    def _settings(self, label: str) -> dict[str, str]:
        """Return variables of the environment that the trackers and the Trainer's callbacks read."""
        private = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_CODE": "true", "WANDB_DISABLE_GIT": "true"}
        models = {"WANDB_LOG_MODEL": "false", "WANDB_WATCH": "false"}
        return {**private, **models, "TENSORBOARD_LOGGING_DIR": str(self._place(label))}


UNTRACKED = Tracking()


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise UsageError, with the command to install them, for trackers that are not installed."""
    if missing := [name for name in trackers if find_spec(name) is None]:
        raise UsageError(f"track: {' and '.join(missing)}: not installed: pip install {' '.join(missing)}")


@contextmanager
def _tensorboard(title: str, place: Path) -> Iterator[Reporter]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(place)) as writer:

        def report(line: Line, step: int) -> None:
            for name, value in line.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield report


@contextmanager
def _wandb(title: str, place: Path) -> Iterator[Reporter]:
    import wandb

    place.mkdir(parents=True, exist_ok=True)
    with wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=title, dir=str(place)) as run:
        yield lambda line, step: run.log(dict(line), step=step)


@contextmanager
def _trackio(title: str, place: Path) -> Iterator[Reporter]:
    import trackio

    trackio.init(project=PROJECT, name=title, resume="allow", embed=False)
    try:
        yield lambda line, step: trackio.log(dict(line), step=step)
    finally:
        _end_trackio()


def _end_trackio() -> None:
    """End Trackio's run if one is open: the Trainer leaves that of a fit that failed."""
    import trackio

    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()


_OPENERS: dict[str, Callable[[str, Path], AbstractContextManager[Reporter]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
