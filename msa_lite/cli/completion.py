"""Complete words for the shell after <TAB>: recipes (shipped ones and files) and methods of baselines."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer files, and the shipped recipes that the command takes: trainings for `train`, all for `recipes`."""
    from msa_lite.recipe import shipped_recipes, title_of

    home, training = ctx.parent and ctx.parent.info_name, ctx.info_name == "train"
    shipped = {
        name: title_of(path)
        for name, path in shipped_recipes().items()
        if name.startswith(incomplete) and (home == "recipes" or name.startswith("train/") == training)
    }
    items = [CompletionItem(name, help=title) for name, title in shipped.items()]
    return [*items, CompletionItem(incomplete, type="file")]


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the methods of `msa-lite baseline`."""
    from msa_lite.baselines.methods import METHODS, TASK_VECTOR

    names = dict.fromkeys([*METHODS, TASK_VECTOR])
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
