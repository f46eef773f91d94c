"""The command line as such: options in any place, errors in one form, what the shell completes, exit statuses."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
import torch

from msa_lite import cli
from msa_lite.cli import output, runs
from msa_lite.cli.faults import report_error
from msa_lite.cli.output import print_start
from msa_lite.errors import Faults, MismatchError, MsaError, StageError, UsageError, allowed_by, with_retries
from msa_lite.io.console.display import Notices
from msa_lite.recipe import load_recipe, words
from msa_lite.report.tables.formats import Cell, Section, TextTable

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """call(*arguments) → (exit status, stdout, stderr)."""
    logger = logging.getLogger("msa_lite")
    for name in ("propagate", "handlers", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    monkeypatch.setattr(output, "_notices", Notices())  # that of an earlier command may have seen its progress

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli._run(list(arguments))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def as_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """as_run(body): have `msa-lite run` do this."""

    def put(body: Callable[..., Any]) -> None:
        monkeypatch.setattr(runs, "run_command", click.Command("run", callback=body))

    return put


@pytest.mark.parametrize("arguments", [["-v", "run"], ["run", "--verbose"], ["run"]])
def test_only_with_verbose_before_or_after_the_command_is_more_than_warnings_shown(
    arguments: list[str], call: Call, as_run: Callable[[Any], None]
) -> None:
    def body() -> None:
        logging.getLogger("msa_lite.x").info("more of it")
        logging.getLogger("msa_lite.x").warning("mind this")

    as_run(body)
    more = "info: more of it\n" if len(arguments) > 1 else ""
    assert call(*arguments) == (0, "", f"{more}warning: mind this\n")


@pytest.mark.parametrize(("arguments", "recipe"), [((), "quickstart"), (("--model", "smollm2"), "quickstart-smollm2")])
def test_the_quickstart_runs_the_recipe_of_the_model(
    arguments: tuple[str, ...], recipe: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run_whole(invocation: Any, accept: bool) -> int:
        calls.append((invocation.recipe, accept))
        return 1

    monkeypatch.setattr(runs, "run_whole", run_whole)
    status, out, err = call("quickstart", *arguments, "seed=3")
    assert (status, out) == (1, "")
    assert f": {recipe} → runs/{recipe}\n" in err
    assert calls == [(load_recipe(recipe, ["seed=3"]), False)]


PARTS = {"moments": "_measure_moments", "vectors": "_fit_vectors", "sweep": "_choose"}


@pytest.mark.parametrize("part", PARTS)
def test_a_run_stops_after_a_part(part: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(runs, PARTS[part], lambda invocation: calls.append(invocation.recipe))
    assert call("run", "quickstart", "--until", part)[0] == 0
    assert calls == [load_recipe("quickstart")]
    status, _, err = call("run", "quickstart", "--until", part, "--accept")
    assert (status, len(calls)) == (2, 1)
    assert "leave out --accept" in err


def test_a_word_of_another_tool_leads_to_a_command_that_there_is(call: Call) -> None:
    context = click.Context(cli.cli)
    for hint, others in words.COMMANDS.items():
        name, *more = hint.partition(",")[0].split()
        if name != words.NOTHING:
            command: Any = cli.cli.get_command(context, name) or cli.cli
            options = [option for parameter in command.get_params(context) for option in parameter.opts]
            assert name in (*cli._COMMANDS, *options)
            assert [word for word in more if word.startswith("--") and word not in options] == []
            assert not isinstance(command, click.Group) or command is cli.cli or more[0] in command.commands
        for word in others.split():
            status, out, err = call(word, "quickstart")
            assert (status, out) == (2, "")
            assert hint.removeprefix(f"{words.NOTHING}, ") in err
    status, out, err = call("run", "quickstart", "--lr", "1e-4")
    assert (status, out) == (2, "")
    assert "are given as KEY=VALUE; here: vector.learning_rate" in err
    assert "Did you mean '--gpu'" in call("plan", "quickstart", "--gpus", "1")[2], "an option of this command is meant"


def test_no_text_is_folded_where_there_is_no_terminal(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    path = "a folder/of many words/" * 20
    output.print_table(TextTable(["stage", "folder"], [Section([[Cell("merge"), Cell(path)]])], left=2))
    assert path in capsys.readouterr().out
    assert f"output: {path}\n" in call("recipes", "validate", "quickstart", f"output={path}")[1]


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (["run"], "Usage: msa-lite run [OPTIONS] RECIPE", "error: Missing argument 'RECIPE'."),
        (["merge", "--alpha", "much"], "Usage: msa-lite merge", "error: Invalid value for '--alpha': 'much' is not"),
        (["nonsense"], "", "error: 'nonsense' is neither a command nor a recipe"),
        (["compare", "nowhere"], "", "error: nowhere: no such file or folder"),
        (["attack", "test"], "", "error: no such folder: test (looked in "),
        (["verify", __file__], "", f"error: {__file__}: is no folder"),
    ],
)
def test_errors_have_one_form_whoever_finds_them(arguments: list[str], usage: str, message: str, call: Call) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(usage or message)
    assert err.splitlines()[-1].startswith(message)
    assert "Error:" not in err
    assert ("--help' for help." in err) is bool(usage)


@pytest.mark.parametrize(
    ("words", "error", "lines"),
    [
        ("my.yaml 'forget.alpha=[1, 2]' -v", allowed_by(MismatchError("no"), "--accept"), ["{words} --accept"]),
        ("run my.yaml", allowed_by(MismatchError("no"), "--accept"), ["{words} --accept"]),
        ("run my.yaml --accept", allowed_by(MismatchError("no"), "--accept"), []),
        ("run my.yaml -- a=1", allowed_by(MismatchError("no"), "--force"), ["run my.yaml --force -- a=1"]),
        ("run my.yaml --until=sweep", allowed_by(MismatchError("no"), "--accept"), []),  # which are refused together
        ("probe my.yaml", allowed_by(MismatchError("no"), "--accept"), []),  # which has no such option
        ("run my.yaml", with_retries(MismatchError("no"), {"to fit": ["vector.mode=qlora"], "or": ["--force"]}),
         ["{words} vector.mode=qlora", "{words} --force"]),
    ],
)  # fmt: skip
def test_a_refusal_names_the_whole_command_that_goes_on(
    words: str, error: MsaError, lines: list[str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr("msa_lite.recipe.load_recipe", refuse)
    _, _, err = call(*shlex.split(words))
    assert [line.partition(": msa-lite ")[2] for line in err.splitlines()[1:]] == [
        line.format(words=words) for line in lines
    ]


def test_faults_go_on_together_only_if_each_of_them_can() -> None:
    faults = Faults([allowed_by(MismatchError("no"), "--a"), allowed_by(MismatchError("no"), "--b")])
    with pytest.raises(MismatchError) as raised:
        faults.check()
    assert [*raised.value.retries.values()] == [["--a", "--b"]]
    with pytest.raises(MismatchError) as raised:
        Faults([*faults, MismatchError("never")]).check()
    assert raised.value.retries == {}


def test_a_full_disk_is_told_in_its_own_words_whatever_library_met_it(
    call: Call, as_run: Callable[[Any], None]
) -> None:
    def body() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904

    as_run(body)
    status, _, err = call("run")
    assert status == 4
    (line,) = err.splitlines()  # no traceback
    assert line.startswith("error: ")
    assert "the disk is full" in line
    assert "Traceback" in call("run", "-v")[2]


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_process_of_a_launch_prints_the_first_line(
    rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    print_start("my.yaml", "runs/my")
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", lines)
    assert not lines or err.endswith(": my.yaml → runs/my\n")


def complete(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash is offered for the last word of a command line."""
    monkeypatch.setenv("_MSA_LITE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["msa-lite"])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("msa-lite ru", {"plain,run", "file,ru"}),  # which may be a file, runs/…
        ("msa-lite baseline npo tofu/", {"plain,tofu/forget10", "file,tofu/"}),
        ("msa-lite recipes copy tofu/forget10 m", {"file,m"}),
        ("msa-lite run my.yaml --dry", {"plain,--dry-run"}),
        ("msa-lite merge --rounding ", {"plain,stochastic"}),
    ],
)
def test_the_shell_completes_commands_and_recipes(
    line: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = complete(line, monkeypatch, capsys)
    assert offered <= set(words)
    assert len(words) == len(set(words))


def fault_of(number: int) -> OSError:
    """A place that the system refuses with this error."""
    return OSError(number, os.strerror(number), "run/x.tmp")


@pytest.mark.parametrize(
    ("error", "status", "line", "is_short"),
    [
        (ValueError("odd"), 4, "error: odd (this was not expected", False),  # with its traceback
        (StageError("it broke"), 4, "error: it broke", True),
        (UsageError("no"), 2, "error: no", True),
        (KeyboardInterrupt(), 130, "interrupted; ", True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 8 GB"), 4,
         "error: CUDA out of memory. Tried to allocate 2.00 GiB; close other programs", True),
        (fault_of(errno.EACCES), 4, "error: run/x.tmp: Permission denied; you need the right", True),
        (fault_of(errno.EPERM), 4, "error: run/x.tmp: Operation not permitted; you need the right", True),
        (fault_of(errno.EROFS), 4, "error: run/x.tmp: Read-only file system; you need the right", True),
        (fault_of(errno.EIO), 4, "error: run/x.tmp: Input/output error; the disk", True),
        (fault_of(errno.ENOTDIR), 4, "error: run/x.tmp: Not a directory; choose another place", True),
    ],
)  # fmt: skip
def test_every_kind_of_error_has_its_status_and_its_line(
    error: BaseException, status: int, line: str, is_short: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, verbose=False) == status
    text = capsys.readouterr().err
    assert text.splitlines()[-1].startswith(line)
    assert (text.count("\n") == 1) is is_short
    assert report_error(error, verbose=True) == status
    if status == 4 and not isinstance(error, StageError):
        assert type(error).__name__ in capsys.readouterr().err


def test_stdout_holds_results_alone_where_wandb_is_offline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers prints a line as its trackers are imported."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delitem(sys.modules, "transformers.integrations.integration_utils", raising=False)
    with output.progress_bars():
        importlib.import_module("transformers.integrations.integration_utils")
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "WANDB offline" in streams.err


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


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("recipes schema", "recipes copy")])  # JSON; one path
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
