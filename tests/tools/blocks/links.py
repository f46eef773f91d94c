"""Find the links of Markdown pages, and those that lead nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown.extensions.toc import slugify

_LINK = re.compile(r"(?<!\\)\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
_OWN_ID = re.compile(r"\s*\{[^}]*#([\w-]+)[^}]*\}\s*$")
_ANCHOR = re.compile(r"<[^>]+\bid=\"([^\"]+)\"")
_MARKUP = re.compile(r"`([^`]*)`|\[([^\]]*)\]\([^)]*\)|\*+([^*]+)\*+")


@dataclass(frozen=True)
class Link:
    """A link on a page."""

    page: Path
    line: int
    to: str

    @property
    def is_external(self) -> bool:
        """Check whether the link leads out of the repository."""
        return bool(urlsplit(self.to).scheme) or self.to.startswith("//")


def links_of(page: Path) -> list[Link]:
    """Return the links of a page, those in its code left out."""
    text = without_code(page.read_text())
    found = [(match.start(1), match[1]) for rule in (_LINK, _HTML, _REFERENCE) for match in rule.finditer(text)]
    return [Link(page, text.count("\n", 0, start) + 1, to) for start, to in sorted(found)]


def without_code(text: str) -> str:
    """Return a page with its blocks, code spans and comments blanked out, line for line."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    return re.sub(r"(`+)(?!`)[^\n]*?(?<!`)\1(?!`)", lambda match: "x" * len(match[0]), text)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def broken(link: Link) -> str | None:
    """Return what is wrong with a link; None if it leads somewhere, or out of the repository in good form."""
    if link.is_external:
        parts = urlsplit(link.to)
        well_formed = parts.scheme == "https" and "." in parts.netloc
        return None if well_formed or parts.scheme == "mailto" else "write an address that begins with https://"
    path, _, anchor = link.to.partition("#")
    if path.startswith("/"):
        return "a path from the root; write it from the page"
    place = (link.page.parent / unquote(path)) if path else link.page
    if not place.exists():
        return "no such file"
    if not anchor:
        return None
    if place.suffix != ".md":
        return "an anchor into something that is no page"
    return None if anchor in anchors(place) else "no such heading"


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page as mkdocs makes them from its headings, and those that it names itself."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", _blank, page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        own = _OWN_ID.search(heading)
        name = own[1] if own else slugify(plain(heading), "-")
        names.add(next(f"{name}{end}" for end in _ends() if f"{name}{end}" not in names))
    return frozenset(names)


def plain(heading: str) -> str:
    """Return a heading without code, links and emphasis."""
    return _MARKUP.sub(lambda match: next(part for part in match.groups() if part is not None), heading)


def _ends() -> Iterator[str]:
    yield ""
    number = 1
    while True:
        yield f"_{number}"
        number += 1
