"""The pictures of README and docs: the diagrams are up to date, and answers are marked by what the data says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.site_pictures import KNOWN, OTHER, PICTURES, before_after, draw_diagrams


def test_the_diagrams_are_those_that_the_script_draws(tmp_path: Path) -> None:
    drawn = draw_diagrams(tmp_path)
    assert [file.read_text() == (PICTURES / file.name).read_text() for file in drawn] == [True] * 2


def test_answers_are_those_of_the_first_rows_that_the_target_knows(tmp_path: Path) -> None:
    for model, right in {"target": [0, 1, 1, 1], "unlearned": [1, 0, 1, 1]}.items():
        for name in ("forget", "retain"):
            rows = [
                {"question": f"{name} {i}?", "generated": f"{model} {i}", "accuracy": ok} for i, ok in enumerate(right)
            ]
            (tmp_path / "evaluation" / model).mkdir(parents=True, exist_ok=True)
            (tmp_path / "evaluation" / model / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", before_after(tmp_path).svg())
    assert texts[4:] == [
        "to forget", "forget 1?", "target 1", KNOWN, "unlearned 1", OTHER,
        "to forget", "forget 2?", "target 2", KNOWN, "unlearned 2", KNOWN,
        "to keep", "retain 1?", "target 1", KNOWN, "unlearned 1", OTHER,
    ]  # fmt: skip


@pytest.mark.parametrize("file", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.name)
def test_every_picture_is_an_svg_without_links(file: Path) -> None:
    ElementTree.parse(file)
    assert file.read_text().count("http") == 1  # the name space
