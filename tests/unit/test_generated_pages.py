"""The pages that are made from the code are up to date, and what they say stands in the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from msa_lite import errors
from msa_lite.recipe import Recipe, TrainingRecipe
from tests.tools.arrows import ROOT, sources
from tests.tools.pages import PAGES
from tests.tools.pages.recipe import recipe_page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_that_is_made_from_the_code_is_up_to_date(path: Path) -> None:
    assert PAGES[path]() == path.read_text(), "python -m tests.tools.pages writes it anew"


def test_the_page_of_recipes_has_every_key_with_its_text() -> None:
    page = recipe_page()
    keys = {*Recipe.model_fields, *TrainingRecipe.model_fields} - {"form"}
    assert [key for key in keys if f"| `{key}` |" not in page] == []
    assert "| `rank` | whole number from 1 to 65 536 | `32` | The rank r of the factors. |" in page
    assert " |  |\n" not in page, "a key without a text"


def source_texts() -> Iterator[str]:
    """Yield every string of the package's source, joined as Python joins it, with … for what is filled in."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_page_of_errors_has_every_class_and_no_message_of_former_days() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    classes = dict(re.findall(r"^\| `(\w+)` \| (\d) \|", page, re.MULTILINE))
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.MsaError)]
    assert classes == {kind.__name__: str(kind.exit_code) for kind in kinds}
    messages = re.findall(r"^\| `(.*?)` \| ", page.partition("## Wrong usage")[2], re.MULTILINE)
    texts = "\n".join(source_texts())
    assert len(messages) >= 25
    assert [message for message in messages if message not in texts] == []
