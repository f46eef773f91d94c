"""No text of others steers a terminal: what would is shown, in the form that JSON has for it."""

from __future__ import annotations

import io
import json
import unicodedata

import pytest

from msa_lite.io.console.terminal import SafeText, as_is, make_console, shown

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
