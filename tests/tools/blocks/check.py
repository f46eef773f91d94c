"""Say what is impossible in a block: commands and options that are not there, recipes with faults, broken Python.

No model and no data is needed for that, so blocks that are marked "not run" are checked, too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import yaml

import msa_lite
from msa_lite.cli import cli
from msa_lite.errors import MsaError
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.recipe import Recipe, TrainingRecipe, load_any, load_recipe, load_training, shipped_recipes
from tests.tools.blocks.read import Block, form_faults

_OPERATORS = {";", "&", "|", "&&", "||", "(", ")", "<", ">", ">>", ">&", "&>", "<<", "<<<"}
_RUN = {"target": "T", "prior": "P", "forget": {"data": {"path": "delete.jsonl"}}, "output": "runs/part"}
_TRAINING = {"model": "M", "stages": [{"data": {"path": "delete.jsonl"}}], "output": "runs/part"}
Words = list[str]


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make `folder` the working folder for the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def check_page(blocks: Sequence[Block], folder: Path) -> list[str]:
    """Return all faults of a page's blocks. folder: an empty one, in which its recipes are written down."""
    faults = []
    with working_in(folder):
        for block in blocks:
            faults += form_faults(block) or [f"{block.place}: {fault}" for fault in _faults(block)]
    return faults


def _faults(block: Block) -> list[str]:
    if block.language == "bash":
        return [fault for words in commands(block.text) for fault in command_faults(words)]
    if block.language == "yaml":
        return _yaml_faults(block)
    if block.language == "json":
        return _json_faults(block.text)
    return _python_faults(block.text) if block.language == "python" else []


def logical_lines(text: str) -> list[str]:
    """Return the lines of a script with continued ones joined; without empty lines, comments and here-documents."""
    lines: list[str] = []
    end = None
    for line in text.replace("\\\n", " ").splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        if line.strip() and not line.strip().startswith("#"):
            lines.append(line)
            here = re.search(r"<<-?\s*['\"]?(\w+)", line)
            end = here[1] if here else None
    return lines


def simple_commands(line: str) -> list[Words]:
    """Return the words of each simple command in a line, without redirections and comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    parts: list[Words] = [[]]
    skip = False
    for word in lexer:
        if word.startswith("#"):
            break
        if word in _OPERATORS:
            skip = word[0] in "<>"
            if not skip:
                parts.append([])
        elif skip:
            skip = False
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def commands(text: str) -> list[Words]:
    """Return the arguments of every call of msa-lite in a script, those behind a launcher included."""
    calls = []
    for line in logical_lines(text):
        for words in simple_commands(line):
            if (start := _start(words)) is not None:
                calls.append(words[start:])
    return calls


def _start(words: Words) -> int | None:
    """Return where the arguments of msa-lite begin; None for another program."""
    first = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    if words[first : first + 1] == ["msa-lite"]:
        return first + 1
    for i in range(1, len(words)):
        if words[i - 1 : i + 1] == ["-m", "msa_lite"]:
            return i + 1
        if words[i] == "msa-lite" and words[first] in ("docker", "time", "nohup", "uvx"):
            return i + 1
    return None


def command_faults(words: Words) -> list[str]:
    """Return what is wrong with a call of msa-lite: its command, its options, its recipe, its overrides."""
    words = [word for word in words if word not in ("-v", "--verbose")]
    shown = f"`msa-lite {' '.join(words)}`"
    try:
        with patch.object(click.Path, "convert", lambda self, value, param, ctx: value):
            context = _parse(words)
        _check_recipe(context)
    except click.exceptions.Exit:
        return []
    except click.ClickException as error:
        return [f"{shown}: {error.format_message()}"]
    except MsaError as error:
        return [f"{shown}: {error}"]
    return []


def _parse(words: Words) -> click.Context:
    """Return the context of the command that words call, down to the last subcommand, without calling it."""
    context = cli.make_context("msa-lite", list(words))
    while isinstance(group := context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            raise click.UsageError("no command")
        name, command, rest = group.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


def _check_recipe(context: click.Context) -> None:
    """Load the recipe that a command names, with its overrides, if it is shipped or stands on the page."""
    values = context.params
    name, overrides = values.get("recipe"), values.get("overrides") or ()
    if not isinstance(name, str) or not any(
        p.name == "recipe" and p.opts == ["recipe"] for p in context.command.params
    ):
        return
    if name not in shipped_recipes() and not Path(name).is_file():
        if name.endswith((".yaml", ".yml")):
            return  # a command of the page may write it
        raise click.UsageError(f"{name}: neither a .yaml file nor a shipped recipe")
    load = {"train": load_training, "recipes": load_any, "plan": load_any}
    parent = context.parent.info_name if context.parent else None
    load.get(context.info_name if parent != "recipes" else "recipes", load_recipe)(name, overrides)


def _yaml_faults(block: Block) -> list[str]:
    """Write the recipe of a block down and return its faults; a part of a recipe is checked as one."""
    try:
        values = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    if block.file:
        Path(block.file).write_text(block.text)
    try:
        if isinstance(values, dict) and {"merge_method", "models"} & values.keys():
            _check_mergekit(block)
        elif block.mark is None:
            load_any(str(block.file))
        else:
            _check_part(values)
    except MsaError as error:
        return [str(error)]
    return []


def _check_mergekit(block: Block) -> None:
    values = yaml.safe_load(block.text)
    if values.get("merge_method") not in ("linear", "task_arithmetic"):  # for mergekit itself
        from mergekit.config import MergeConfiguration

        MergeConfiguration.model_validate(values)
        return
    place = Path(block.file or "mergekit.yaml")
    place.write_text(block.text)
    read_recipe(place)


def _check_part(values: Any) -> None:
    """Check keys of a recipe on top of what every recipe has; other YAML passes."""
    if not isinstance(values, dict):
        return
    for kind, base in ((Recipe, _RUN), (TrainingRecipe, _TRAINING)):
        if values.keys() <= {field.alias or name for name, field in kind.model_fields.items()}:
            whole: dict[str, Any] = base | values
            if "history" in values:
                whole.pop("prior", None)
            load_any(whole)
            return


def _json_faults(text: str) -> list[str]:
    """Return the fault of a text that is neither one JSON value nor one a line."""
    for values in ([text], text.splitlines()):
        try:
            for value in values:
                json.loads(value)
        except ValueError as error:
            fault = f"no JSON: {error}"
        else:
            return []
    return [fault]


def _python_faults(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"no Python: {error}"]
    return [f"msa_lite has no {name}" for name in _public_names(tree) if not hasattr(msa_lite, name)]


def _public_names(tree: ast.AST) -> Iterator[str]:
    """Yield NAME of every `msa_lite.NAME`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "msa_lite":
            yield node.attr
