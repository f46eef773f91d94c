"""Show people how work goes: bars on a terminal, elsewhere a plain line now and then, with warnings in between.

Everything goes to stderr. The console of the live bars prints warnings, so that none is overwritten or cut. All of them
are repeated in one block at the end.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msa_lite.io.console.progress import Step, Watcher, duration
from msa_lite.io.console.progress import notices as NOTICES
from msa_lite.io.console.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import Progress, TaskID
    from rich.text import Text

_EVERY = 30.0  # seconds between two lines about the same work, off a terminal
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


@dataclass
class Work:
    """The work under one label."""

    label: str
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
    ended: bool = False
    bar: TaskID | None = None

    @property
    def there(self) -> float:
        """The part of it that an earlier run had done."""
        return self.first / self.total if 0 < self.first < self.total else 0.0

    @property
    def share(self) -> float:
        """The part of it that this run has done."""
        return (self.done - self.first) / self.total

    def left(self, now: float) -> float | None:
        """Return the seconds that it will still take, or None where nothing tells."""
        units = self.done - self.first
        return (now - self.started) / units * (self.total - self.done) if units > 0 else None


class Display(Watcher):
    """Progress on stderr, with the log in between. clock: gives seconds.

    On a terminal, rich shows a bar for running work, a line above it for each that has ended, and the state of all
    steps below. Elsewhere there is a line when work begins, every half minute, and when it ends; each is flushed.
    Nothing is shown before the first call. Close it at the end (`contextlib.closing`).
    """

    def __init__(self, notices: Notices, clock: Callable[[], float] = time.monotonic) -> None:
        self._notices, self._clock = notices, clock
        self._steps = _Steps(())
        self._works: dict[str, Work] = {}
        self._bars: Progress | None = None
        self._live: Live | None = None

    def announce(self, steps: Sequence[Step]) -> None:
        """Number the steps to come, after those of the same count that have ended."""
        self._steps = self._steps.followed_by(steps)

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
        elif now - work.told >= _EVERY:
            work.told, left = now, work.left(now)
            facts = [f"{work.title}: {done} of {total}", work.note, f"about {duration(left)} left" if left else ""]
            state = self._state()
            self._say(", ".join(filter(None, facts)) + (f" ({state})" if state else ""))

    def close(self) -> None:
        """Stop showing. Work that has not ended leaves its last line."""
        self._end_all(self._clock())
        if self._live is not None:
            self._live.stop()
        self._notices.console = self._live = self._bars = None

    def _begin(self, label: str, done: int, total: int, now: float) -> Work:
        if not self._works:
            self._open()
        if label in self._steps:
            self._end_all(now)
        self._works[label] = work = Work(label, self._steps.title(label), now, done, done, total, told=now)
        self._steps.begin(label)
        if done < total and self._bars:
            work.bar = self._bars.add_task(work.title, total=total, note="")
        elif done < total:
            self._say(f"{work.title}: started" + (f" ({purpose})" if (purpose := self._steps.purpose(label)) else ""))
        return work

    def _open(self) -> None:
        """Start the bars where there is a terminal."""
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._notices.among_others = True
        console = make_console(to_stderr=True)
        if not console.is_interactive or console.is_jupyter:  # bars in notebooks need ipywidgets
            return
        self._notices.console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(max(8, min(_WIDEST, console.width - _AROUND))),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._live = Live(Group(self._bars, self), console=console, refresh_per_second=10)
        self._live.start()

    def __rich__(self) -> Text | Group:
        """Return the lines below the bars, for rich: what the running steps are for, and the state of all."""
        from rich.console import Group
        from rich.text import Text

        running = [work.label for work in list(self._works.values()) if not work.ended]
        lines = [*filter(None, map(self._steps.purpose, running)), self._state()]
        return Text("\n".join(filter(None, lines)), style="dim") if any(lines) else Group()

    def _end_all(self, now: float) -> None:
        for work in self._works.values():
            if not work.ended:
                self._end(work, now)

    def _end(self, work: Work, now: float) -> None:
        work.ended = True
        self._steps.end(work, now)
        if self._bars and work.bar is not None:
            self._bars.remove_task(work.bar)
        how = "done" if work.done >= work.total else f"ended at {work.done} of {work.total}"
        text = f"{work.title}: {how} in {duration(now - work.started)}"
        self._say(", ".join(filter(None, [text, work.note])))

    def _say(self, text: str) -> None:
        _print(self._notices.console, text if self._bars else f"{time.strftime('%H:%M:%S')} {text}")

    def _state(self) -> str:
        works = list(self._works.values())  # the bars ask from a thread of their own
        return self._steps.state([work for work in works if not work.ended], self._clock())


class _Steps:
    """The announced steps: which one is running, and how long the others may take."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = {step.label: step for step in steps}
        self._numbers = {label: number for number, label in enumerate(self._steps, 1)}
        self._at = 0
        self._rates: dict[str, float] = {}  # seconds for each unit of weight, by the kind of step

    def __contains__(self, label: str) -> bool:
        return label in self._steps

    def title(self, label: str) -> str:
        """Return the label, with its number if it was announced."""
        return f"[{self._numbers[label]}/{len(self._steps)}] {label}" if label in self._steps else label

    def purpose(self, label: str) -> str:
        """Return what a step is for; an empty text for a label that was not announced."""
        return self._steps[label].purpose if label in self._steps else ""

    def begin(self, label: str) -> None:
        """Move on to a step. Steps before it that never began were done by an earlier run."""
        self._at = max(self._at, self._numbers.get(label, 0))

    def end(self, work: Work, now: float) -> None:
        """Learn from a step how long others of its kind take."""
        step, taken = self._steps.get(work.label), now - work.started
        if step and work.done > work.first and work.total:
            self._rates[step.kind] = taken / (work.share * (step.amount or 1.0))

    def followed_by(self, steps: Sequence[Step]) -> _Steps:
        """Return the steps that come next, in the same count if they are among those announced before."""
        pending, known = list(self._steps)[self._at :], {step.label: step for step in steps}
        if not known.keys() & {*pending}:
            return _Steps(steps)
        listed = [known.pop(label, step) for label, step in self._steps.items()]
        new = _Steps([*listed, *known.values()])
        new._at, new._rates = self._at, self._rates
        return new

    def state(self, running: Sequence[Work], now: float) -> str:
        """Say which step of how many is running, and about how long all will still take; nothing without steps."""
        if not self._at:
            return ""
        seconds, is_bound, rates = 0.0, False, dict(self._rates)
        for work in running:
            if step := self._steps.get(work.label):
                left = work.left(now)
                seconds, is_bound = seconds + (left or 0.0), is_bound or left is None
                if left is not None:
                    rates.setdefault(step.kind, (now - work.started + left) / ((1 - work.there) * (step.amount or 1.0)))
        for step in list(self._steps.values())[self._at :]:
            seconds += rates.get(step.kind, 0.0) * step.amount
            is_bound |= step.kind not in rates
        text = f"step {self._at} of {len(self._steps)}"
        if not seconds:
            return text
        return f"{text}, {'more than' if is_bound else 'about'} {duration(seconds)} left"
