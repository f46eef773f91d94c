"""The pictures of README and docs: the diagrams are up to date, and answers are marked by what the data says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.site_pictures import PICTURES, draw_diagrams


def test_the_diagrams_are_those_that_the_script_draws(tmp_path: Path) -> None:
    drawn = draw_diagrams(tmp_path)
    assert [file.read_text() == (PICTURES / file.name).read_text() for file in drawn] == [True] * 2


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.name)
def test_every_picture_is_an_svg_without_links(file: Path) -> None:
    ElementTree.parse(file)
    assert file.read_text().count("http") == 1  # the name space
