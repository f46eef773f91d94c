"""The help of all commands has one form: a line of purpose, two examples, defaults, one word for one thing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from msa_lite import cli

OTHER_WORDS = ("directory", "directories", "base model", "oracle", "fuse", "config file", "retrain model", "delete set")


def walk() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield every command with its name and context, commands of commands too."""
    root = click.Context(cli.cli, info_name="msa-lite", **cli._SETTINGS)
    for name in cli.cli.list_commands(root):
        command = cli.cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        if isinstance(command, click.Group):
            for child, below in command.commands.items():
                yield f"{name} {child}", below, click.Context(below, info_name=child, parent=context)
        else:
            yield name, command, context


COMMANDS = {name: (command, context) for name, command, context in walk()}


def options(name: str) -> list[click.Option]:
    command, context = COMMANDS[name]
    return [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_has_a_line_of_purpose_and_two_examples(name: str) -> None:
    command, context = COMMANDS[name]
    text, _, _ = command.get_help(context).partition("\nOptions:")
    usage, *paragraphs = re.split(r"\n\n+", text.rstrip())
    assert usage.startswith("Usage: ")
    assert re.fullmatch(r"  [A-Z][a-z-]+ .*\.", paragraphs[0]), "the purpose is one line"
    examples = paragraphs[-1].splitlines()
    assert len(examples) >= 2
    assert [line for line in examples if not re.match(r"  (msa-lite|accelerate|torchrun) ", line)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_shows_its_default(name: str) -> None:
    _, context = COMMANDS[name]
    for one in options(name):
        record = one.get_help_record(context)
        assert record is not None
        assert re.match(r"[A-Za-z0-9]", record[1]), f"{one.opts} is not explained"
        default = one.get_default(context)
        has_default = default not in (None, False, ()) and "UNSET" not in repr(default) and not one.is_flag
        assert not has_default or f"[default: {default}" in record[1], one.opts


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "recipes schema"])  # which prints JSON alone
def test_every_command_prints_json(name: str) -> None:
    assert "--json" in {opt for one in options(name) for opt in one.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_one_word_stands_for_one_thing(name: str) -> None:
    command, context = COMMANDS[name]
    text = command.get_help(context).lower()
    assert [word for word in OTHER_WORDS if re.search(rf"\b{word}\b", text)] == []
    assert "DIR" not in command.get_usage(context)


def test_every_command_stands_in_one_section_of_the_first_help() -> None:
    names = [name for section in cli._SECTIONS.values() for name in section]
    assert sorted(names) == sorted(cli._COMMANDS)
    assert names[0] == "quickstart"
