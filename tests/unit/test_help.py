"""The help of all commands has one form: a line of purpose, two examples, options in groups, defaults, one word for one
thing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from msa_lite import cli
from msa_lite.cli.help import Command

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


def sections(name: str) -> dict[str, list[str]]:
    """The lines of a command's help by the title above them; "" has those before the first title."""
    command, context = COMMANDS[name]
    parts: dict[str, list[str]] = {"": []}
    for line in command.get_help(context).splitlines():
        if title := re.fullmatch(r"(\w[\w -]*):", line):
            parts[title[1]] = []
        else:
            list(parts.values())[-1].append(line)
    return parts


def options(name: str) -> list[click.Option]:
    command, context = COMMANDS[name]
    return [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_has_a_line_of_purpose_two_examples_and_groups(name: str) -> None:
    command = COMMANDS[name][0]
    assert isinstance(command, Command)
    parts = sections(name)
    _, blank, purpose, after, *_ = [*parts[""], ""]
    assert (blank, after) == ("", ""), "the purpose is one line"
    assert re.match(r"  [A-Z][a-z-]+ .*\.$", purpose)
    examples = [line for line in parts["Examples"] if re.match(r"  (msa-lite|accelerate|torchrun) ", line)]
    assert len(examples) >= 2
    assert list(parts)[-1] == "Printing and help"
    for title in ("Options", *command.groups):
        assert len(parts.get(title, ())) <= 40, "a long list is divided into groups"
    own = [one for one in options(name) if not {*one.opts} & {"--json", "--help"}]
    assert len(own) <= 6 or command.groups, "more than six options stand in groups"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_shows_its_default(name: str) -> None:
    command, context = COMMANDS[name]
    names = {opt for one in options(name) for opt in one.opts}
    assert {opt for group in command.groups.values() for opt in group} <= names  # type: ignore[attr-defined]
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
