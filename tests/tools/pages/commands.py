"""The page of all commands, made from what click knows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import click
from markdown.extensions.toc import slugify

from msa_lite.cli import cli
from tests.tools.pages.tables import code, table

_HEADER = """# Commands

Written by `python -m tests.tools.pages` from the commands themselves; `msa-lite COMMAND --help` prints the same.

RECIPE is a YAML file, or the name of a shipped recipe; KEY.SUB=VALUE changes one of its keys. Results go to stdout,
progress and warnings to stderr. With `--json`, all but `recipes schema` print one JSON object. `-v`, before or after a
command, prints more. [Errors](errors.md) has the commonest messages, with causes and fixes.

"""
_CODES = {
    0: "Done",
    1: "The run has finished and its files are there, but the verdict is FAIL. `--accept`, or `verdict: off` in the "
    "recipe, makes it 0",
    2: "Wrong usage, or a wrong recipe",
    3: "The inputs do not fit each other, or something is broken or missing. `plan`: the run does not fit. `verify`: "
    "something differs",
    4: "A stage failed. Finished stages stay, and the same command resumes",
    130: "Interrupted. The same command resumes",
}
_SAID = (  # what the head of the page says for all commands
    "RECIPE is a YAML file, or the name of a shipped recipe.",
    "KEY.SUB=VALUE changes one of its keys.",
)
Row = tuple[str, str, str]
"""An option, its meaning and its default."""
_DEFAULT = re.compile(r"  \[((?:default: |required|x[<>]|[^\]]*<x)[^\]]*)\]$")


class _Rows(click.HelpFormatter):
    """A formatter that keeps the rows of options as they are, without wrapping."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str]] = []

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        self.rows += rows


def commands_page() -> str:
    """Return the page: for each command its purpose, usage, examples and options."""
    codes = table(("exit code", "meaning"), [(str(number), text) for number, text in _CODES.items()])
    homes: dict[Row, str] = {}
    return _HEADER + codes + "\n" + "\n".join(_describe(context, homes) for context in contexts())


def contexts() -> Iterator[click.Context]:
    """Yield the context of each command that does something, in the order of `msa-lite --help`."""
    with click.Context(cli, info_name="msa-lite") as top:
        for name in cli.list_commands(top):
            command = cli.get_command(top, name)
            assert command is not None
            with click.Context(command, info_name=name, parent=top) as context:
                if not isinstance(command, click.Group):
                    yield context
                    continue
                for inner, one in command.commands.items():
                    yield click.Context(one, info_name=inner, parent=context)


def examples_of(command: click.Command) -> list[str]:
    """Return the lines of a command's examples, which its help marks with \\b."""
    return [line for part in _paragraphs(command) if part[0] == "\b" for line in part[1:]]


def _paragraphs(command: click.Command) -> list[list[str]]:
    text = command.callback.__doc__ if command.callback and command.callback.__doc__ else command.help or ""
    parts = re.split(r"\n\s*\n", text.strip())
    return [[line.strip() if line.strip() else line for line in part.splitlines()] for part in parts]


def _describe(context: click.Context, homes: dict[Row, str]) -> str:
    command = context.command
    purpose, *prose = (" ".join(part) for part in _paragraphs(command) if part[0] != "\b")
    usage = command.get_usage(_wide(context)).removeprefix("Usage: ")
    blocks = [
        f"## {context.command_path}\n",
        purpose + "\n",
        f"```text\n{usage}\n```\n",
        *(part + "\n" for part in map(_without_what_is_said, prose) if part),
    ]
    if examples := examples_of(command):
        reason = "<!-- not run: examples -->"
        blocks.append(f"{reason}\n```bash\n" + "\n".join(examples) + "\n```\n")
    blocks += _options(context, homes)
    return "\n".join(blocks)


def _without_what_is_said(part: str) -> str:
    for sentence in _SAID:
        part = part.replace(sentence, "")
    return " ".join(part.split())


def _wide(context: click.Context) -> click.Context:
    context.terminal_width = 10_000
    return context


def _options(context: click.Context, homes: dict[Row, str]) -> Iterator[str]:
    """Yield a command's options, without those that all commands have; nothing where that is all.

    homes: the commands on the page so far by their options. What stands there in the same words is only named.
    """
    formatter = _Rows()
    context.command.format_options(context, formatter)
    lines, same = list[Row](), dict[str, list[str]]()
    for option, text in formatter.rows:
        if not option.endswith(("--help", "--verbose")) and (option, text) != ("--json", "Print one JSON object."):
            default = _DEFAULT.search(text)
            shown = default[1].removeprefix("default: ") if default else ""
            line = (code(option), _DEFAULT.sub("", text), shown)
            if line in homes:
                same.setdefault(homes[line], []).append(line[0])
            else:
                lines.append(line)
    homes.update(dict.fromkeys(lines, context.command_path))
    if lines:
        yield table(("option", "meaning", "default"), lines)
    for path, options in same.items():
        yield f"{', '.join(options)}: as of [{path}](#{slugify(path, '-')}).\n"
