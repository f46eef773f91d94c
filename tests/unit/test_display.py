"""What is shown while something works, without signs that steer a terminal; and how a missing package is installed."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import unicodedata
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import UsageError
from msa_lite.io.console import libraries
from msa_lite.io.console.display import Display, Notices, for_notebooks, show_progress
from msa_lite.io.console.progress import Step, about, announce, duration, silent, tell
from msa_lite.io.console.terminal import SafeText, as_is, make_console, shown

logger = logging.getLogger("msa_lite.tests")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def display(clock: Clock) -> Iterator[Display]:
    display = Display(Notices(), clock)
    yield display
    display.close()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, on stderr alone, without the time of day."""
    printed = capsys.readouterr()
    assert printed.out == ""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in printed.err.splitlines()]


def test_off_a_terminal_there_is_a_line_at_the_start_every_half_minute_and_at_the_end(
    display: Display, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for done in range(7):
        clock.now = 10.0 * done
        display("forget vector", done, 6, f"loss {3 - done / 2:g}")
    assert lines(capsys) == [
        "forget vector: started",
        "forget vector: 3 of 6, loss 1.5, about 30 s left",
        "forget vector: done in 1 min, loss 0",
    ]


def test_the_step_of_how_many_is_told_and_a_list_that_goes_on_keeps_the_count(
    display: Display, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    later = [Step("vector"), Step("merge"), Step("scores")]
    announce(display, [Step("history"), *later])
    display("history", 0, 4)
    clock.now = 40
    display("history", 2, 4)
    clock.now = 80
    display("history", 4, 4)
    announce(display, later)
    display("vector", 5, 10)  # half of it was done by an earlier run
    clock.now = 120
    display("vector", 8, 10)
    display("vector", 10, 10)
    display("scores", 3, 3)  # the merge was made before
    announce(display, [Step("vector"), Step("merge")])  # of the next run
    display("merge", 1, 1)
    assert lines(capsys) == [
        "[1/4] history: started",
        "[1/4] history: 2 of 4, about 40 s left",
        "[1/4] history: done in 1 min",
        "[2/4] vector: started",
        "[2/4] vector: 8 of 10, about 27 s left",
        "[2/4] vector: done in 40 s",
        "[4/4] scores: done in 0 s",
        "[2/2] merge: done in 0 s",
    ]


def test_a_callback_of_three_arguments_gets_no_note_and_no_steps() -> None:
    calls: list[tuple[str, int, int]] = []
    tell(lambda *call: calls.append(call), "fit", 1, 2, "loss 3")
    announce(silent, [Step("fit")])
    assert calls == [("fit", 1, 2)]


def test_from_python_the_log_is_shown_and_the_logger_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("msa_lite")
    before = list(package.handlers), package.level, package.propagate
    assert msa_lite.show_progress is show_progress
    with show_progress(verbose=True) as progress:
        logger.warning("the target is unknown")
        logger.info("more")
        progress("merge", 1, 1)
    assert (list(package.handlers), package.level, package.propagate) == before
    assert lines(capsys) == [
        "warning: the target is unknown",
        "info: more",
        "merge: done in 0 s",
        "1 warning:",
        "- the target is unknown",
    ]


def make_notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the pictures of the bars that this notebook's one output shows, as text."""
    pictures = list[str]()

    def draw(bars: Any, display_id: bool | None = None) -> Any:
        assert (display_id is None) == bool(pictures), "an output, which is replaced"
        pictures.append(re.sub(r"\x1b\[[0-9;]*m", "", bars._repr_mimebundle_([], [])["text/plain"]))
        return SimpleNamespace(update=draw)

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", draw)
    return pictures


def test_in_a_notebook_one_output_holds_a_bar_for_each_step(
    clock: Clock, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_notebook(monkeypatch)
    announce(display, [Step("vector"), Step("merge")])
    for done in range(9):
        clock.now = done / 4
        display("vector", done, 10, f"loss {9 - done}")
    display("merge", 1, 1)
    display.close()
    assert len(pictures) == 5, "each half a second after the one before, and the last"
    assert "merge" not in pictures[-2]
    assert re.match(r"\[1/2\] vector +━+.* 80% .*loss 1 *\n\[2/2\] merge +━+ +100% ", pictures[-1])


def test_in_a_notebook_a_call_shows_bars_and_no_warning_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(x: int, progress: Any = silent) -> Any:
        warnings.warn("old", FutureWarning, stacklevel=1)
        warnings.warn("IProgress not found. Please update", Warning, stacklevel=1)
        return x, progress, logging.getLogger("peft").level

    assert for_notebooks(work) is work, "a script gets the function as it is"
    assert not hasattr(msa_lite.run, "__wrapped__")
    make_notebook(monkeypatch)
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    before, call = logging.getLogger("peft").level, for_notebooks(work)
    assert isinstance(call(1)[1], Display)
    assert call(x=2, progress=silent) == call(2, silent) == (2, silent, logging.ERROR)
    assert (logging.getLogger("peft").level, os.environ.get("HF_HUB_VERBOSITY")) == (before, None)
    assert (hasattr(msa_lite.run, "__wrapped__"), type(msa_lite.OwnQuestions)) == (True, type)
    with pytest.raises(TypeError, match=r"work\(\) got an unexpected"):
        call(1, progres=silent)
    with pytest.raises(FutureWarning):
        work(1)


SCRIPT = """
import logging, time
import msa_lite
from msa_lite.io.console.terminal import SafeText, as_is, make_console, shown
from msa_lite.io.console.progress import Step

logger = logging.getLogger("msa_lite.x")
with msa_lite.show_progress() as progress:
    progress.announce([Step("forget vector"), Step("merge")])
    for done in range(21):
        progress("forget vector", done, 20, f"loss {2 - done / 20:.3g}")
        if done in (5, 6):
            logger.warning("%s", f"<{done} " + "word " * 40 + f"/some/long/path/{'x' * 90} {done}>")
        time.sleep(0.03)
    progress("merge", 0, 2)
    logger.warning("[red]the last one[/red]")
    time.sleep(0.15)
    progress("merge", 2, 2)
"""


def screen(columns: int) -> str:
    """What a script prints on a terminal of so many columns, with all its control sequences."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(Path(msa_lite.__file__).parents[1])}
    options: dict[str, Any] = {"stderr": follower, "stdin": follower, "stdout": subprocess.PIPE, "env": environment}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], **options) as process:
        os.close(follower)
        output = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not part:
                break
            output += part
        assert process.stdout is not None
        assert process.stdout.read() == b""
    os.close(leader)
    assert process.returncode == 0, output.decode()
    return output.decode()


def test_on_a_terminal_of_80_columns_no_warning_is_cut_or_lost() -> None:
    raw = screen(80)
    # What is erased is part of the bars; what is left of control sequences are line breaks.
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    text = " ".join(plain.split())
    joined = re.sub(r"\s", "", plain)
    for number in (5, 6):
        warning = f"<{number}" + "word" * 40 + f"/some/long/path/{'x' * 90}{number}>"
        assert joined.count(f"warning:{warning}") == 1
        assert joined.count(f"-{warning}") == 1  # and once more at the end
    assert "warning: [red]the last one[/red]" in text
    assert "3 warnings: - <5 word" in text
    assert "- [red]the last one[/red]" in text
    assert re.search(r"\[1/2\] forget vector .* \d+% .* loss 1\.\d", plain)
    assert "[1/2] forget vector: done in 1 s, loss 1" in text or "[1/2] forget vector: done in 0 s, loss 1" in text
    assert text.rindex("[2/2] merge: done in 0 s") < text.rindex("3 warnings:")
    assert max(len(line) for line in plain.split("3 warnings:")[0].splitlines()) <= 80


@pytest.mark.parametrize(
    ("seconds", "took", "left"),
    [
        (0.0, "0 s", "about 1 s"),
        (59.4, "59 s", None),
        (59.6, "1 min", None),
        (3569.0, "59 min", None),
        (3600.0, "1 h 0 min", None),
        (129.37 * 3600, "129 h 22 min", "about 129 h 22 min"),
    ],
)
def test_times_are_rounded_to_what_people_want_to_know(seconds: float, took: str, left: str | None) -> None:
    assert duration(seconds) == took
    assert left is None or about(seconds) == left
    assert about(None) == "?"


NAMES = {
    "colour": "\x1b[31mred", "title": "\x1b]0;owned\x07", "link": "\x1b]8;;http://x\x07y", "C1": "\x9b31m",
    "delete": "a\x7f\x08b", "back": "good\rbad", "bidi": "a\u202egpj.exe", "isolate": "\u2066x\u2069",
    "line": "a\u2028b",
}  # fmt: skip


def stream() -> tuple[SafeText, io.BytesIO]:
    out = io.BytesIO()
    return SafeText(out, "utf-8", newline="", write_through=True), out


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_signs_that_steer_are_shown(name: str) -> None:
    assert all(unicodedata.category(sign) not in ("Cc", "Cf", "Zl", "Zp") for sign in shown(name))
    assert json.loads(f'"{shown(name)}"') == name, "within JSON the value is the same"
    text, out = stream()
    print(f"file {name}", file=text)
    assert out.getvalue().decode() == f"file {shown(name)}\n"


def test_plain_text_bars_and_tables_are_as_they_were() -> None:
    text, out = stream()
    lines = ["Ä\tö\n", "a,b\r\n", "\r 50%|###\x1b[31m", "\x1b[A\x1b[A", "\x1b[Ax"]
    for line in lines:
        assert text.write(line) == len(line)
    assert out.getvalue().decode() == "".join(
        ["Ä\tö\n", "a,b\r\n", "\r 50%|###\\u001b[31m", "\x1b[A\x1b[A", "\\u001b[Ax"]
    )
    text, out = stream()
    as_is(text).write("\u200f\x1b")
    assert out.getvalue().decode() == "\u200f\x1b"


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_console_colours_itself_and_lets_nobody_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    text, out = stream()
    monkeypatch.setattr("sys.stdout", text)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = make_console()
    table = Table("a")
    table.add_row(Text(name, "bold"))
    console.print(table)
    console.print(Text(name))
    plain = out.getvalue().decode().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b[1m" in out.getvalue().decode()
    assert all(unicodedata.category(sign) not in ("Cc", "Cf", "Zl", "Zp") for sign in plain if sign != "\n")


# The command that a message gives for a missing package installs it from where msa-lite came.


COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = "msa_lite-0.1.0-py3-none-any.whl"
GIT = {"vcs": "git", "commit_id": COMMIT}


@pytest.mark.parametrize(
    ("origin", "word"),
    [
        (None, "msa-lite[train]"),
        ({"url": "file:///home/me/msa-lite", "dir_info": {"editable": True}}, "-e /home/me/msa-lite[train]"),
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, "/home/me/my clone[train]"),
        ({"url": f"file:///tmp/it's/{WHEEL}", "archive_info": {}}, f"/tmp/it's/{WHEEL}[train]"),
        ({"url": f"https://host/{WHEEL}", "archive_info": {}}, f"msa-lite[train] @ https://host/{WHEEL}"),
        ({"url": "https://host/a/b.git", "vcs_info": GIT}, f"msa-lite[train] @ git+https://host/a/b.git@{COMMIT}"),
        ({"url": "file:///home/me/b", "vcs_info": GIT}, f"msa-lite[train] @ git+file:///home/me/b@{COMMIT}"),
    ],
)
def test_an_extra_is_installed_from_where_msa_lite_came(
    origin: dict[str, Any] | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.dumps(origin) if origin else None
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        libraries.require("train")
    _, _, command = str(caught.value).partition(": pip install ")
    assert shlex.split(command) == (["-e", word[3:]] if word.startswith("-e") else [word])
