"""Answer the questions of all open pages, one after the other, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from msa_lite.errors import MsaError
from msa_lite.io.console.progress import notices
from msa_lite.pipeline.verbs.ask import Panel
from msa_lite.strengths import Strengths

_SOON = 2.0  # seconds in which most answers stop; the loading of a large model does not
Emit = Callable[[Mapping[str, Any] | None], None]
"""Takes the events of an answer, from any thread; None is the end."""


class NobodyWaits(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class OpenQuestion:
    """One question to all models."""

    text: str
    strengths: Strengths | None
    """Those of the unlearned model, which is then merged in memory; None for the stored one."""
    models: Sequence[str]
    """The models to ask, in this order."""
    emit: Emit
    stop: threading.Event = field(default_factory=threading.Event)
    """Set as soon as nobody waits for the answer any more."""


class Desk:
    """Answers questions in the order in which they come: the models of a run share memory and cores."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._open: list[OpenQuestion] = []
        self._taken: list[Future[None]] = []
        self._lock = threading.Lock()

    def take(self, question: OpenQuestion) -> int:
        """Take a question; return the number of those that are answered before it."""
        with self._lock:
            ahead = len(self._open)
            self._open.append(question)
        self._taken = [*(one for one in self._taken if not one.done()), self._thread.submit(self._answer, question)]
        return ahead

    def close(self) -> None:
        """Stop all answers and free the models."""
        with self._lock:
            for question in self._open:
                question.stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if wait([one for one in self._taken if not one.cancelled()], _SOON).not_done:
            notices.info("msa-lite web ends after the step that is under way, such as the loading of a model")
        self._thread.shutdown()
        self._panel.close()

    def _answer(self, question: OpenQuestion) -> None:
        try:
            for name in question.models:
                self._answer_by(name, question)
        except NobodyWaits:
            pass
        except Exception as error:  # the page shows it; the next question may do better
            question.emit({"error": str(error) if isinstance(error, MsaError) else f"{type(error).__name__}: {error}"})
        finally:
            with self._lock:
                self._open.remove(question)
            question.emit(None)

    def _answer_by(self, name: str, question: OpenQuestion) -> None:
        """Hand on the answer of one model: its text after each token, and at the end the seconds that it took."""

        def watch(text: str) -> None:
            if question.stop.is_set():
                raise NobodyWaits
            question.emit({"model": name, "text": text})

        def progress(label: str, done: float, total: float) -> None:
            if question.stop.is_set():
                raise NobodyWaits
            question.emit({"model": name, "state": "answering" if done >= total else label})

        question.emit({"model": name, "state": "answering"})
        start = time.monotonic()
        text = self._panel.answer(name, question.text, progress, watch, question.strengths)
        question.emit({"model": name, "answer": text, "seconds": time.monotonic() - start})
