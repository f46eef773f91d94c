"""The pages that are made from the code are up to date, and what they say stands in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_lite.recipe import Recipe, TrainingRecipe
from tests.tools.pages import PAGES
from tests.tools.pages.errors import GROUPS, missing_messages
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


def test_every_message_on_the_page_of_errors_stands_in_the_code() -> None:
    messages = [message for group in GROUPS.values() for message, _, _ in group]
    assert len(messages) >= 25
    assert missing_messages(messages) == []


def test_a_message_that_nobody_gives_any_more_is_found() -> None:
    assert missing_messages(["…: an error of former days"]) == ["…: an error of former days"]
