"""Complete words for the shell after <TAB>: recipes (shipped ones and files) and methods of baselines."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer files, and the shipped recipes that the command takes: trainings for `train`, all for `recipes`."""
    home, training = ctx.parent and ctx.parent.info_name, ctx.info_name == "train"
    shipped = complete_shipped(ctx, param, incomplete)
    items = [item for item in shipped if home == "recipes" or item.value.startswith("train/") == training]
    return [*items, CompletionItem(incomplete, type="file")]


def complete_shipped(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the shipped recipes."""
    from msa_lite.recipe import shipped_recipes, title_of

    shipped = ((name, path) for name, path in shipped_recipes().items() if name.startswith(incomplete))
    return [CompletionItem(name, help=title_of(path)) for name, path in shipped]


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the methods of `msa-lite baseline`."""
    from msa_lite.baselines.methods import METHODS, TASK_VECTOR

    names = dict.fromkeys([*METHODS, TASK_VECTOR])
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
