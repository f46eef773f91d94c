"""Words for the shell to complete: recipes, their keys and values, methods, and names with commas between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class

if TYPE_CHECKING:
    from pydantic import BaseModel

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@add_completion_class
class _Bash(BashComplete):
    """Click's completion for bash, which sets no blank after `vector.` and `vector.mode=`."""

    _PLAIN = "COMPREPLY+=($value)"
    source_template = BashComplete.source_template.replace(
        _PLAIN, f"{_PLAIN}\n            [[ $value == *[.=] ]] && compopt -o nospace"
    )


@add_completion_class
class _Zsh(ZshComplete):
    """Click's completion for zsh, which sets no blank there either."""

    _PLAIN = "compadd -U -V unsorted -a completions"
    source_template = ZshComplete.source_template.replace(
        _PLAIN,
        "compadd -U -V unsorted -S '' -- ${(M)completions:#*[.=]}\n"
        "        compadd -U -V unsorted -- ${completions:#*[.=]}",
    )


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer files, and the shipped recipes that the command takes: trainings for `train`, all for `recipes`."""
    home, training = ctx.parent and ctx.parent.info_name, ctx.info_name == "train"
    shipped = complete_shipped(ctx, param, incomplete)
    kinds = [item.value.partition("/")[0] if "/" in item.value else "" for item in shipped]
    mine = [kind == "train" if training else kind not in ("train", "table") for kind in kinds]
    items = [item for item, is_mine in zip(shipped, mine, strict=True) if home == "recipes" or is_mine]
    return [*items, CompletionItem(incomplete, type="file")]


def complete_shipped(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the shipped recipes."""
    from msa_lite.recipe import shipped_recipes, title_of

    shipped = ((name, path) for name, path in shipped_recipes().items() if name.startswith(incomplete))
    return [CompletionItem(name, help=title_of(path)) for name, path in shipped]


def complete_table(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the shipped tables, and files."""
    from msa_lite.recipe import shipped_tables

    names = [name for name in shipped_tables() if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the methods of `msa-lite baseline`."""
    from msa_lite.baselines.methods import METHODS, TASK_VECTOR

    names = dict.fromkeys([*METHODS, TASK_VECTOR])
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the keys of the command's kind of recipe, part by part, and after `=` the values of a closed set.

    Bash cuts words at "=": the key then stands among the words before, and only the value is replaced.
    """
    key, equals, value = incomplete.partition("=")
    former = [*(ctx.params.get(str(param.name)) or ())]
    if not equals and former[1:] and former[-1] == "=":
        key, equals, value = former[-2], "", incomplete
    elif not incomplete and former and "=" not in former[-1]:
        key = former[-1]
    elif not equals:
        return [CompletionItem(name) for name in _next_parts(_keys(ctx), incomplete)]
    words = _keys(ctx).get(key, [])
    return [CompletionItem(f"{key}={word}" if equals else word) for word in words if word.startswith(value)]


def _keys(ctx: click.Context) -> dict[str, list[str]]:
    from msa_lite.recipe import Recipe, TableRecipe, TrainingRecipe
    from msa_lite.recipe.keys import recipe_keys

    kinds: dict[str, type[BaseModel]] = {"train": TrainingRecipe, "table": TableRecipe}
    keys = dict(recipe_keys(kinds.get(ctx.info_name or "", Recipe)))
    if ctx.info_name == "attack":
        return {key: words for key, words in keys.items() if key.startswith("attack.")}
    return keys


def _next_parts(keys: Iterable[str], start: str) -> list[str]:
    """Return the keys up to the dot after `start`: "vector.", then "vector.mode="."""
    parts = {}
    for key in keys:
        if key.startswith(start):
            head, dot, _ = key[len(start) :].partition(".")
            parts[f"{start}{head}{dot or '='}"] = True
    return [*parts]


def complete_names(names: Callable[[], Iterable[str]]) -> Complete:
    """Return a function that completes the last of several names with commas between them. names: all of them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        former, comma, last = incomplete.rpartition(",")
        taken = former.split(",")
        return [
            CompletionItem(f"{former}{comma}{name}") for name in names() if name.startswith(last) and name not in taken
        ]

    return complete


def attack_names() -> Iterable[str]:
    """Return the names of all attacks."""
    from msa_lite.attack_names import ATTACKS

    return ATTACKS


def metric_names() -> Iterable[str]:
    """Return the names of all metrics."""
    from msa_lite.report.metrics import METRICS

    return METRICS


def published_names() -> Iterable[str]:
    """Return the names of the paper's tables."""
    from msa_lite.comparison.published import published_tables

    return published_tables()


def switch_names() -> Iterable[str]:
    """Return the deviations of published code that an evaluation repeats."""
    from msa_lite.evals.aggregates import known_presets, known_switches

    return [*known_presets(), *known_switches()]
