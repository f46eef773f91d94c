"""What commands share: the form of their help, common options and arguments."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msa_lite.errors import UsageError, nearest
from msa_lite.io.files.reading import local_path

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_GENERAL = ("--json", "--help")  # options that many commands have, at the end
_GENERAL_TITLE = "Printing and help"
_EXAMPLE_MARK = "\b\n"


class Command(click.Command):
    """A command whose options stand in groups."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        """groups: the options by the title of their group, as "--target". Others stand after them, under "Options"."""
        super().__init__(*args, **kwargs)
        self.groups = groups or {}

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_help(self.help or "", formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {name: title for title, names in self.groups.items() for name in names}
        titles |= dict.fromkeys(_GENERAL, _GENERAL_TITLE)
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.groups, "Options", _GENERAL_TITLE)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and not isinstance(option, click.Argument):
                title = next((titles[name] for name in option.opts if name in titles), "Options")
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """A command with commands of its own, each with its help in the same form."""

    command_class = Command

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_help(self.help or "", formatter)


def _write_help(text: str, formatter: click.HelpFormatter) -> None:
    """Write a docstring: its paragraphs, then the lines of the block that \\b marks, as examples."""
    paragraphs, _, examples = inspect.cleandoc(text).partition(_EXAMPLE_MARK)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(paragraphs.strip())
    if examples:
        with formatter.section("Examples"):
            for line in examples.strip().splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


class Folder(click.Path):
    """A folder that is there."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder. Raise UsageError for any other path, with the nearest name beside it."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            path = local_path(value)
            if path.exists():
                raise UsageError(f"{value}: is no folder that can be read; name a folder") from error
            place = Path(os.path.abspath(path.parent))
            beside = [item.name for item in place.iterdir() if item.is_dir()] if place.is_dir() else []
            raise UsageError(f"no such folder: {value} (looked in {place}){nearest(path.name, beside)}") from error


class RecipeName(click.ParamType):
    """A recipe: a file, or the name of a shipped one."""

    name = "recipe"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the shipped recipes, and files."""
        from click.shell_completion import CompletionItem

        from msa_lite.recipe import shipped_recipes

        names = [name for name in shipped_recipes() if name.startswith(incomplete)]
        return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


takes_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
takes_dry_run = click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be done, and why. Write nothing.",
)
takes_overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE ...]")
takes_run = click.argument("run", type=Folder())


def read_names(text: str | None) -> list[str]:
    """Return the names in a text, with commas between them."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def given_options(options: Mapping[str, Any], *names: str) -> str:
    """Return those of the named options that are given, for a message. names: none for all options."""
    given = [name for name in names or options if options[name] not in (None, (), False)]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def read_columns(text: str | None, keys: Sequence[str]) -> dict[str, str]:
    """Read question=Q,answer=A. Raise UsageError for keys that are not among these, or do not go together."""
    columns: dict[str, str] = {}
    for pair in text.split(",") if text is not None else ():
        key, equals, name = (piece.strip() for piece in pair.partition("="))
        if key not in keys or not equals or not name:
            raise UsageError(
                f"--columns: '{pair}' is not KEY=COLUMN with a key of {', '.join(keys)}{nearest(key, keys)}"
            )
        columns[key] = name
    for alone in ("messages", "text"):
        if alone in columns and len(columns) > 1:
            raise UsageError(f"--columns: {alone} stands in the place of question and answer; name one or the other")
    return columns
