"""The built site in a real browser: its search finds the page that explains a word, and it loads nothing of others."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.support.browser import browser, has_browser
from tests.support.loopback import Loopback
from tests.tools.arrows import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs chromium, chromedriver and selenium"),
]
FIRST = {
    "prior": "how-to/choose-prior/",
    "holdout": "how-to/data-and-prompts/",
    "margin": "how-to/read-the-report/",
    "delete one person": "tutorials/deletion-request/",
    **dict.fromkeys(("gemma", "mac", "windows", "colab", "moe", "kaggle"), "reference/platforms/"),
    "remove one person": "tutorials/deletion-request/",
    "how do I delete one person from my model": "tutorials/deletion-request/",
    "what is a holdout set": "how-to/data-and-prompts/",
    "alpha": "how-to/choose-alpha-beta/",
    "filter": "explanation/how-msa-works/",
    "record": "reference/removal-record/",
    "how long": "reference/files/",
    "memory": "how-to/memory/",
}
"""Words to search for, and the page of the first result."""


def test_the_search_finds_the_page_that_explains_a_word_and_nothing_of_others_is_loaded(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)], cwd=ROOT, check=True)
    with (
        Loopback(partial(SimpleHTTPRequestHandler, directory=str(site))) as server,
        browser(tmp_path / "profile") as window,
    ):
        first = {}
        for words in FIRST:
            window.open_address(f"{server.address}/?q={quote(words)}")
            window.wait("document.querySelector('.md-search-result__link')")
            first[words] = window.run("return document.querySelector('.md-search-result__link').pathname").lstrip("/")
            assert {urlsplit(address).netloc for address in window.requests()} == {urlsplit(server.address).netloc}
    assert first == FIRST
