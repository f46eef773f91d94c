"""The parts that the sections of a report are made of, and how each is written as Markdown.

`templates/report.html.jinja` writes the same parts for the page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msa_lite.report.charts import Chart
from msa_lite.report.formats import TextTable, escape_markdown, markdown


class Block(ABC):
    """One part of a section."""

    @property
    def kind(self) -> str:
        """Return the name of the part in the page's template."""
        return type(self).__name__.lower()

    @abstractmethod
    def markdown(self) -> str:
        """Return the part as Markdown, which ends with a line break; "" for what only the page shows."""


@dataclass(frozen=True)
class ReportSection:
    """One section of a report, in all three forms."""

    name: str
    """The anchor on the page."""
    title: str
    blocks: Sequence[Block] = ()
    """What it shows; without any, the page and report.md leave it out."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its keys in report.json."""

    def markdown(self) -> str:
        """Return the section as Markdown."""
        return joined([f"## {self.title}\n", *(block.markdown() for block in self.blocks)])


def joined(texts: Sequence[str]) -> str:
    """Return paragraphs with an empty line between them."""
    return "\n".join(filter(None, texts))


def fenced(text: str, language: str) -> str:
    """Return text as it is, which cannot end its block."""
    return f"```{language}\n{text.replace('```', chr(39) * 3)}\n```\n"


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph."""

    text: str
    small: bool = False
    """True for the small print of the page."""

    def markdown(self) -> str:
        return f"{self.text}\n"


@dataclass(frozen=True)
class Items(Block):
    """A list."""

    lines: Sequence[str]

    def markdown(self) -> str:
        return "".join(f"- {line}\n" for line in self.lines)


@dataclass(frozen=True)
class Entries(Block):
    """Names with what they stand for."""

    entries: Mapping[str, str]
    style: Literal["facts", "facts brief", "words"] = "facts"
    """The look on the page; "words" is for the legend of a picture."""
    hashes: bool = False
    """True for hashes, which the page sets in a narrow font."""

    def markdown(self) -> str:
        return "".join(f"- {name}: {escape_markdown(text)}\n" for name, text in self.entries.items())


@dataclass(frozen=True)
class Grid(Block):
    """A table."""

    table: TextTable
    label: str
    """What the table holds, for those who hear the page."""
    style: Literal["stack wide", "stack one wide", "wide", "many"] = "stack wide"
    """The look on the page: "stack" becomes cards on a narrow screen, "many" scrolls below a fixed first column."""

    def markdown(self) -> str:
        """Return the table, and below it what its rows mean."""
        rows = [row for section in self.table.sections for row in section.rows]
        meanings: dict[str, dict[str, None]] = {}
        for row in rows:
            if row[0].meaning:
                meanings.setdefault(row[0].meaning, {})[row[0].text.rstrip(" ↑↓")] = None
        notes = [f"{', '.join(labels)}: {meaning.rstrip('.')}" for meaning, labels in meanings.items()]
        return markdown(replace(self.table, notes=[*self.table.notes, *notes]))


@dataclass(frozen=True)
class Pictures(Block):
    """Pictures beside each other, by heading; only the page has them. Drawn when they are shown."""

    charts: Mapping[str, Callable[[], Chart | None]]

    def drawn(self) -> dict[str, Chart]:
        """Draw the pictures; those with nothing to show are left out."""
        return {heading: chart for heading, draw in self.charts.items() if (chart := draw())}

    def markdown(self) -> str:
        return ""


@dataclass(frozen=True)
class Heading(Block):
    """A heading below the section's title."""

    text: str

    def markdown(self) -> str:
        return f"### {self.text}\n"


@dataclass(frozen=True)
class Listing(Block):
    """A file's text."""

    text: str
    language: str

    def markdown(self) -> str:
        return fenced(self.text.rstrip("\n"), self.language)


@dataclass(frozen=True)
class Article(Block):
    """A row of the data with the models' answers."""

    title: str
    entries: Sequence[tuple[str, str]]
    """(name, text), for the page."""
    block: str
    """The same in lines of 78 columns, for Markdown."""

    def markdown(self) -> str:
        return fenced(self.block, "text")


@dataclass(frozen=True)
class Fold(Block):
    """Parts that the page shows on request."""

    summary: str
    blocks: Sequence[Block]
    on_paper: bool = False
    """True for what a print of the page shows, too; of the rest it has the summary alone."""

    def markdown(self) -> str:
        return joined([f"{self.summary}:\n", *(block.markdown() for block in self.blocks)])


@dataclass(frozen=True)
class Only(Block):
    """Parts that one of the two writers shows."""

    writer: Literal["page", "markdown"]
    blocks: Sequence[Block]

    def markdown(self) -> str:
        return joined([block.markdown() for block in self.blocks]) if self.writer == "markdown" else ""
