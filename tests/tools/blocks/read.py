"""Find the fenced blocks of a Markdown page, and the marks that say why one is not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.tools.arrows import ROOT

RUN = ("bash", "python", "yaml")  # the languages of blocks that are run, or written to a file
SHOWN = ("text", "json", "mermaid")  # output, data and drawings
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^`]*)$")
_LOOSE = re.compile(r"^ {4,}(\$ |msa-lite |pip |python3? |ssh-keygen |git )")
_MARK = re.compile(r"^ *<!-- *(?P<kind>not run|ci)\b:? *(?P<reason>.*?) *-->$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    """The page, from the root of the repository."""
    line: int
    """The line of the fence, from 1."""
    language: str
    """The word behind the fence."""
    text: str
    """The lines between the fences, without their common indent."""
    mark: str | None = None
    """The reason why it is not run; "" for a mark without one, None without a mark."""

    @property
    def place(self) -> str:
        """Return the page and line, as editors open them."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Check whether a test runs the block, or writes it to a file."""
        return self.language in RUN and self.mark is None

    @property
    def file(self) -> str | None:
        """Return the name in a first line `# NAME.yaml`, under which the block is written."""
        match = re.match(r"# ([\w.-]+\.ya?ml)\b", self.text)
        return match[1] if match else None


def pages() -> list[Path]:
    """Return README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(text: str, page: str) -> list[Block]:
    """Return the blocks of a page in their order. An open fence at the end is a block of the language "open"."""
    return list(_blocks(text.splitlines(), page))


def loose_commands(text: str, page: str) -> list[str]:
    """Return the commands that stand in a block by their indent alone, where no test sees them."""
    fenced = {number for block in read_blocks(text, page) for number in _lines_of(block)}
    lines = enumerate(text.splitlines(), 1)
    loose = [number for number, line in lines if number not in fenced and _LOOSE.match(line)]
    return [f"{page}:{number}: a command outside of a ```bash block" for number in loose]


def _lines_of(block: Block) -> range:
    return range(block.line, block.line + block.text.count("\n") + 2)


def _blocks(lines: list[str], page: str) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        match = _FENCE.match(lines[number])
        if match is None:
            number += 1
            continue
        start, fence = number, match["fence"]
        number += 1
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        language = match["language"].strip() if number < len(lines) else "open"
        text = dedent("\n".join(lines[start + 1 : number]) + "\n")
        yield Block(page, start + 1, language, text, _mark(lines[start - 1] if start else ""))
        number += 1


def _mark(line: str) -> str | None:
    match = _MARK.match(line)
    return match["reason"] if match else None


def form_faults(block: Block) -> list[str]:
    """Return what is wrong with a block's form: its language, its mark, a yaml block without a name."""
    known = ", ".join((*RUN, *SHOWN))
    if block.language == "open":
        return [f"{block.place}: the block has no end"]
    if block.language not in RUN + SHOWN:
        return [f"{block.place}: a block of '{block.language}'; choose from {known}"]
    if block.mark == "":
        return [f"{block.place}: the mark gives no reason; write <!-- not run: REASON -->"]
    if block.mark is not None and block.language in SHOWN:
        return [f"{block.place}: a block of '{block.language}' is never run; take the mark away"]
    if block.language == "yaml" and block.mark is None and block.file is None:
        return [f"{block.place}: name the file in a first line # NAME.yaml, or mark the block"]
    return []
