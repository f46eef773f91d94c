"""Open runs and answer the questions of all open pages, one after the other, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError
from msa_lite.io.console.progress import notices
from msa_lite.io.finished.seal import in_use
from msa_lite.pipeline.verbs.ask import Panel, Question, open_panel

Emit = Callable[[Mapping[str, Any] | None], None]
_SOON = 2.0  # seconds in which most answers stop; the loading of a large model does not


class Desk:
    """Answers questions in the order in which they come: the models of all runs share memory and cores."""

    def __init__(self) -> None:
        self.panels: dict[Path, Panel] = {}
        """The runs that are open, by folder. They are held until the end: a purge and a new run refuse."""
        self._held = ExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._stops: list[threading.Event] = []
        self._lock = threading.Lock()

    def open(self, folder: Path) -> Panel:
        """Open a run, unless it is open. Raise as `open_panel`. Free the models of the others: memory is measured."""
        if folder not in self.panels:
            self._free()
            with ExitStack() as held:
                held.enter_context(in_use(folder))
                self.panels[folder] = open_panel(folder, several=True)
                self._held.enter_context(held.pop_all())
        return self.panels[folder]

    def panel(self, folder: Path) -> Panel:
        """Return an open run; one that is not is opened after the answers that were asked for before."""
        return self.panels.get(folder) or self._thread.submit(self.open, folder).result()

    def take(self, panel: Panel, model: str, question: Question, emit: Emit) -> tuple[int, threading.Event]:
        """Take a question to one model of a run. emit: takes the answer's events, in any thread; None is the end.

        Return the number of those that are answered before it, and the event to set once nobody waits any more.
        """
        stop = threading.Event()
        with self._lock:
            self._stops.append(stop)
            self._thread.submit(self._answer, panel, model, question, emit, stop)
            return len(self._stops) - 1, stop

    def close(self) -> None:
        """Stop all answers, free the models, and let go of the runs."""
        timer = threading.Timer(_SOON, notices.info, ["msa-lite web ends after the step under way, such as a load"])
        timer.start()
        with self._lock:
            for stop in self._stops:
                stop.set()
        self._thread.shutdown(cancel_futures=True)
        timer.cancel()
        self._free()
        self._held.close()

    def _free(self, other: Panel | None = None) -> None:
        """Free the models of all runs but one."""
        for panel in self.panels.values():
            if panel is not other:
                panel.close()

    def _answer(self, panel: Panel, model: str, question: Question, emit: Emit, stop: threading.Event) -> None:
        def tell(event: Mapping[str, Any]) -> None:
            if stop.is_set():
                raise CancelledError
            emit(event)

        def progress(label: str, done: float, total: float) -> None:
            tell({"state": "answering" if done >= total else label})

        try:
            tell({"state": "answering"})
            self._free(panel)
            start = time.monotonic()
            text = panel.answer(model, question, progress, lambda text: tell({"text": text}))
            emit({"answer": text, "seconds": time.monotonic() - start})
        except Exception as error:  # the page shows it, unless it is gone; the next question may do better
            if not isinstance(error, CancelledError):
                emit({"error": str(error) if isinstance(error, MsaError) else f"{type(error).__name__}: {error}"})
        finally:
            with self._lock:
                self._stops.remove(stop)
            emit(None)
