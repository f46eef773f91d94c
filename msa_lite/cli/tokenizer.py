"""A target without a tokenizer: somebody in a terminal is asked whether to take the prior's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from msa_lite.recipe import Recipe

Result = TypeVar("Result")


def in_terminal() -> bool:
    """Check whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def with_tokenizer(recipe: Recipe, work: Callable[[Recipe], Result]) -> Result:
    """Do `work` on the recipe; where its target has no tokenizer and the answer is yes, again with the prior's."""
    from msa_lite.errors import NoTokenizerError

    try:
        return work(recipe)
    except NoTokenizerError as error:
        if error.offer is None or recipe.tokenizer is not None or not in_terminal():
            raise
        question = f"{recipe.target} was saved without a tokenizer. Take that of the prior, {error.offer}?"
        if not click.confirm(question, err=True):
            raise
        return work(recipe.model_copy(update={"tokenizer": error.offer}))
