"""The pictures of README and docs: the diagrams are up to date, and answers are marked by what the data says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.site_pictures import PICTURES, before_after, draw_diagrams


def test_the_diagrams_are_those_that_the_script_draws(tmp_path: Path) -> None:
    drawn = draw_diagrams(tmp_path)
    assert [file.read_text() == (PICTURES / file.name).read_text() for file in drawn] == [True] * 2


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.name)
def test_every_picture_is_an_svg_without_links(file: Path) -> None:
    ElementTree.parse(file)
    assert file.read_text().count("http") == 1  # the name space


def example(set_name: str, question: str, **answers: str) -> dict[str, object]:
    return {"set_name": set_name, "question": question, "expected": "In <Oslo>.", "answers": answers}


def test_answers_stand_side_by_side() -> None:
    right, wrong = "In <Oslo>.", "In Rome."
    lucky = example("forget", "By luck?", target=right, unlearned=wrong, ideal=right)
    gone = example("forget", "Where?", target=right, unlearned=wrong, ideal=wrong)
    stays = example("retain", "And here?", target=right, unlearned=right, ideal=right)
    picture = before_after([lucky, gone, stays]).svg()
    texts = [node.text for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("text")]
    assert "By luck?" not in texts  # the ideal's luck would mislead in a picture of three rows
    assert [texts.count(word) for word in ("as in the data", "something else")] == [4, 2]
    assert texts.count(right) == 4
