"""Show people how work goes: bars on a terminal or in a notebook, elsewhere a plain line now and then.

Everything goes to stderr, with warnings in between. The console of the live bars prints warnings, so that none is
overwritten or cut. All of them are repeated in one block at the end. In a notebook, the bars are an output of the cell.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from msa_lite.io.console.libraries import quiet_libraries
from msa_lite.io.console.progress import Step, Watcher, duration
from msa_lite.io.console.progress import notices as NOTICES
from msa_lite.io.console.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_EVERY = 30.0  # seconds between two lines about the same work, off a terminal
_REDRAWN = 0.5  # seconds between two pictures of the bars in a notebook
_AROUND = 66  # columns that a line of the bars needs beside its bar
_WIDEST = 40  # columns of a bar


class Notices(logging.Handler):
    """Print the log between the bars, and keep the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.console: Console | None = None
        """The console of the bars, while they are shown."""
        self.among_others = False
        """True once progress was shown, so that a warning may have scrolled away."""
        self._warnings: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; keep it if it is a warning."""
        if record.levelno >= logging.WARNING:
            self._warnings[record.getMessage()] = None
        try:
            text = self.format(record)
            _print(self.console, text if record.name == NOTICES.name else f"{record.levelname.lower()}: {text}")
        except Exception:  # as every handler of `logging` does
            self.handleError(record)

    def repeat(self) -> None:
        """Print all warnings again in one block, unless they are all that was printed; then forget them."""
        warnings, self._warnings = list(self._warnings), {}
        if warnings and self.among_others:
            lines = [f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}:", *(f"- {text}" for text in warnings)]
            _print(None, "\n".join(lines))


def _print(console: Console | None, text: str) -> None:
    """Print on stderr: wrapped and above the bars on a terminal, unchanged elsewhere."""
    if console is not None:
        from rich.text import Text

        console.print(Text(text, overflow="fold"))
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def log_to(notices: Notices, verbose: bool) -> None:
    """Send the log of msa-lite to `notices` alone: warnings and notices, with `verbose` everything."""
    logger = logging.getLogger("msa_lite")
    logger.handlers = [notices]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
    NOTICES.setLevel(logging.INFO)


@contextmanager
def show_progress(verbose: bool = False) -> Iterator[Watcher]:
    """Show on stderr what the command line shows: progress, the log, and the warnings again at the end.

        with msa_lite.show_progress() as progress:
            result = msa_lite.run("my-request.yaml", progress=progress)

    verbose: more than warnings, as `msa-lite -v`.
    """
    notices, logger = Notices(), logging.getLogger("msa_lite")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    log_to(notices, verbose)
    try:
        with closing(Display(notices)) as progress:
            yield progress
    finally:
        notices.repeat()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def for_notebooks(function: Any) -> Any:
    """Return what a public name stands for, in a notebook with bars and without the warnings of other packages.

    Bars are shown unless the caller takes the progress. Elsewhere, return the function as it is.
    """
    if isinstance(function, type) or not make_console().is_jupyter:
        return function
    names = [*signature(function).parameters]
    place = names.index("progress") if "progress" in names else -1

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(quiet_libraries())
            if len(arguments) <= place and "progress" not in options:
                options["progress"] = stack.enter_context(closing(Display(Notices())))
            return function(*arguments, **options)

    return called


@dataclass
class _Work:
    """The work under one label."""

    title: str
    """The label, with the number of its step if it was announced."""
    started: float
    """The time when it began, in seconds of the display's clock."""
    first: int
    """Units that an earlier run had done."""
    done: int
    total: int
    told: float
    """The time of its last line, where there are no bars."""
    note: str = ""
    bar: TaskID | None = None
    ended: bool = False

    def left(self, now: float) -> str:
        """Return the time that it will still take, in words; nothing before the first unit is done."""
        units = self.done - self.first
        return f"about {duration((now - self.started) / units * (self.total - self.done))} left" if units > 0 else ""


class Display(Watcher):
    """Progress on stderr, with the log in between. clock: gives seconds.

    On a terminal, rich shows a bar for running work, and a line above it for each that has ended. A notebook has a bar
    for each. Elsewhere there is a line when work begins, every half minute, and when it ends; each is flushed. Nothing
    is shown before the first call. Close it at the end (`contextlib.closing`).
    """

    def __init__(self, notices: Notices, clock: Callable[[], float] = time.monotonic) -> None:
        self._notices, self._clock = notices, clock
        self._steps: dict[str, Step] = {}
        self._at = 0  # steps up to the one that began last
        self._works: dict[str, _Work] = {}
        self._bars: Progress | None = None
        self._in_notebook, self._drawn = False, 0.0
        self._cell: Any = None  # the output that holds the bars in a notebook

    def announce(self, steps: Sequence[Step]) -> None:
        """Number the steps to come, in the same count if some of them were announced before and have not begun."""
        new = {step.label: step for step in steps}
        if new.keys() & {*list(self._steps)[self._at :]}:
            self._steps |= new
        else:
            self._steps, self._at = new, 0

    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show how far a label has come. A step that begins ends whatever was shown before it."""
        now, work = self._clock(), self._works.get(label)
        if work is not None and work.ended and (done, total) == (work.done, work.total):
            return
        if work is None or work.ended:  # ended work goes on when there is more to do
            work = self._begin(label, done, total, now)
        work.done, work.total, work.note = done, total, note or work.note
        if done >= total:
            self._end(work, now)
        elif self._bars and work.bar is not None:
            self._bars.update(work.bar, completed=done, total=total, note=work.note)
            self._draw(now)
        elif now - work.told >= _EVERY:
            work.told = now
            self._say(", ".join(filter(None, [f"{work.title}: {done} of {total}", work.note, work.left(now)])))

    def close(self) -> None:
        """Stop showing. Work that has not ended leaves its last line."""
        self._end_all(self._clock())
        if self._cell:
            self._cell.update(self._bars)
        elif self._bars and not self._in_notebook:
            self._bars.stop()
        self._notices.console = self._bars = self._cell = None

    def _begin(self, label: str, done: int, total: int, now: float) -> _Work:
        if not self._works:
            self._open()
        title, purpose = label, ""
        if step := self._steps.get(label):
            self._end_all(now)
            number = list(self._steps).index(label) + 1
            self._at = max(self._at, number)
            title, purpose = f"[{number}/{len(self._steps)}] {label}", step.purpose
        self._works[label] = work = _Work(title, now, done, done, total, told=now)
        if self._bars and (done < total or self._in_notebook):
            work.bar = self._bars.add_task(title, completed=done, total=total, note=purpose)
            self._draw(now)
        elif done < total:
            self._say(f"{title}: started" + (f" ({purpose})" if purpose else ""))
        return work

    def _open(self) -> None:
        """Start the bars where there is a terminal."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._notices.among_others = True
        console = make_console(to_stderr=True)
        if not (console.is_interactive or console.is_jupyter):
            return
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(max(8, min(_WIDEST, console.width - _AROUND))),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._in_notebook, self._drawn = console.is_jupyter, self._clock()
        if not self._in_notebook:
            self._notices.console = console
            self._bars.start()

    def _draw(self, now: float) -> None:
        """Draw the bars in a notebook, half a second after they were drawn last, or after the first call.

        They are an output of the cell that is replaced. The live bars of rich would need ipywidgets.
        """
        if not self._in_notebook or now - self._drawn < _REDRAWN:
            return
        from IPython.display import display

        self._drawn = now
        if self._cell:
            self._cell.update(self._bars)
        else:
            self._cell = display(self._bars, display_id=True)

    def _end_all(self, now: float) -> None:
        for work in self._works.values():
            if not work.ended:
                self._end(work, now)

    def _end(self, work: _Work, now: float) -> None:
        work.ended = True
        if self._bars and work.bar is not None and self._in_notebook:
            self._bars.update(work.bar, completed=work.done, total=work.total, note=work.note)
            self._bars.stop_task(work.bar)
            self._draw(now)
            return
        if self._bars and work.bar is not None:
            self._bars.remove_task(work.bar)
        how = "done" if work.done >= work.total else f"ended at {work.done} of {work.total}"
        text = f"{work.title}: {how} in {duration(now - work.started)}"
        self._say(", ".join(filter(None, [text, work.note])))

    def _say(self, text: str) -> None:
        _print(self._notices.console, text if self._bars else f"{time.strftime('%H:%M:%S')} {text}")
