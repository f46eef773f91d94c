"""report.html in a real browser: what it asks for, how it fits, how it reads in the dark and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msa_lite import run
from tests.support.browser import Browser, browser, has_browser
from tests.support.stories import STORIES, page_of

pytestmark = pytest.mark.skipif(not has_browser(), reason="needs chromium, chromedriver and selenium")
WIDTHS = (380, 1400)
_FOLDED = """return [...document.querySelectorAll('main details > :not(summary)')]
  .map(part => [part.parentElement.className, part.checkVisibility()].join())"""
_CONTENTS = """const links = [...document.querySelectorAll('nav a')], screen = document.documentElement.clientHeight;
const at = link => link.getBoundingClientRect();
return links.filter(link => link.checkVisibility() && at(link).top >= 0 && at(link).bottom <= screen).length"""
_NOTE = """const summary = document.querySelector('main details:not(.on-paper) > summary');
return getComputedStyle(summary, '::after').content"""
PAPER = 688  # pixels between the margins of an A4 page
MOST_PAGES = 8


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of the module."""
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of every story."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in STORIES}
    for name, path in paths.items():
        path.write_text(page_of(name), "utf-8")
    return paths


@pytest.mark.parametrize("name", STORIES)
def test_a_page_asks_for_nothing_logs_nothing_and_fits_every_screen(
    name: str, window: Browser, pages: dict[str, Path]
) -> None:
    for width in WIDTHS:
        window.open(pages[name], width)
        assert window.run("document.querySelectorAll('details').forEach(one => one.open = true)") is None
        assert (width, window.overflow()) == (width, [])
        assert window.requests() == [pages[name].as_uri()]
        assert window.faults() == []


@pytest.mark.parametrize("name", ["full", "failed", "huge"])
def test_every_text_can_be_read_by_day_and_by_night(name: str, window: Browser, pages: dict[str, Path]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        window.open(pages[name], scheme=scheme)
        colours[scheme] = window.colours()
        assert (scheme, window.faint()) == (scheme, [])
    for light, dark in zip(*colours.values(), strict=True):
        assert light != dark


@pytest.mark.parametrize("name", ["full", "huge"])
def test_paper_is_white_holds_what_matters_and_cuts_nothing(name: str, window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages[name], PAPER, scheme="dark", media="print")
    assert window.colours()[0] == "rgb(255, 255, 255)"
    assert set(window.run(_FOLDED)) == {"on-paper,true", ",false"}
    assert "not printed" in window.run(_NOTE)
    assert window.run("return document.querySelector('nav').checkVisibility()") is False
    assert (window.overflow(), window.broken()) == ([], [])


def test_a_page_is_printed_on_few_pages(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["full"], scheme="dark")
    printed = window.pdf()
    assert printed.startswith(b"%PDF")
    assert 1 < len(re.findall(rb"/Type\s*/Page\b", printed)) <= MOST_PAGES


def test_the_contents_stay_beside_the_text_and_fold_on_a_phone(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["full"], 1400)
    count = window.run("return document.querySelectorAll('section').length")
    assert window.run(_CONTENTS) == count
    window.run("location.hash = '#limits'")
    assert window.run(_CONTENTS) == count
    window.open(pages["full"], 380)
    assert window.run(_CONTENTS) == 0
    window.run("document.querySelector('nav details').open = true; document.querySelector('nav').scrollIntoView()")
    assert window.run(_CONTENTS) == count


@pytest.mark.pictures
def test_a_run_ends_with_a_page_that_tells_what_it_did(window: Browser, recipe: dict[str, Any]) -> None:
    run(recipe)
    page = Path(recipe["output"]) / "report.html"
    window.open(page, 380)
    assert (window.overflow(), window.faint(), window.faults()) == ([], [], [])
    sections = window.run("return [...document.querySelectorAll('section')].map(one => one.id)")
    assert sections == [
        "result", "verdict", "scores", "method", "training", "update", "probe", "provenance", "limits",
    ]  # fmt: skip
    pictures = window.run("return [...document.querySelectorAll('svg')].map(one => one.ariaLabel)")
    assert [label.split()[0] for label in pictures] == ["Dot", "Dot", "Line"]
