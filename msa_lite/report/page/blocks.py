"""The parts that the sections of a report are made of; `templates/report.html.jinja` writes them for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msa_lite.report.page.charts import Chart
from msa_lite.report.tables.formats import TextTable


class Block:
    """One part of a section."""

    @property
    def kind(self) -> str:
        """Return the name of the part in the page's template."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class ReportSection:
    """One section of a report, on the page and in report.json."""

    name: str
    """The anchor on the page."""
    title: str
    blocks: Sequence[Block] = ()
    """What it shows; without any, the page leaves it out."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Its keys in report.json."""


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph."""

    text: str
    small: bool = False
    """True for the small print of the page."""


@dataclass(frozen=True)
class Items(Block):
    """A list."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Entries(Block):
    """Names with what they stand for."""

    entries: Mapping[str, str]
    style: Literal["facts", "facts brief", "words"] = "facts"
    """The look on the page; "words" is for the legend of a picture."""
    hashes: bool = False
    """True for hashes, which the page sets in a narrow font."""


@dataclass(frozen=True)
class Grid(Block):
    """A table."""

    table: TextTable
    label: str
    """What the table holds, for those who hear the page."""
    style: Literal["stack wide", "stack one wide", "wide", "many"] = "stack wide"
    """The look on the page: "stack" becomes cards on a narrow screen, "many" scrolls below a fixed first column."""


@dataclass(frozen=True)
class Pictures(Block):
    """Pictures beside each other, by heading, drawn when they are shown."""

    charts: Mapping[str, Callable[[], Chart | None]]

    def drawn(self) -> dict[str, Chart]:
        """Draw the pictures; those with nothing to show are left out."""
        return {heading: chart for heading, draw in self.charts.items() if (chart := draw())}


@dataclass(frozen=True)
class Heading(Block):
    """A heading below the section's title."""

    text: str


@dataclass(frozen=True)
class Listing(Block):
    """A file's text."""

    text: str
    language: str


@dataclass(frozen=True)
class Article(Block):
    """A row of the data with the models' answers."""

    title: str
    entries: Sequence[tuple[str, str]]
    """(name, text)."""


@dataclass(frozen=True)
class Fold(Block):
    """Parts that the page shows on request."""

    summary: str
    blocks: Sequence[Block]
    on_paper: bool = False
    """True for what a print of the page shows, too; of the rest it has the summary alone."""
