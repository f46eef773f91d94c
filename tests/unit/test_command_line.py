"""The command line as such: options in any place, errors in one form, what the shell completes, exit statuses."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
import torch

from msa_lite import cli
from msa_lite.cli import output, runs
from msa_lite.cli.faults import GONE_OPTIONS, report_error
from msa_lite.cli.output import print_start
from msa_lite.errors import Faults, MismatchError, MsaError, StageError, UsageError, allowed_by, with_retries
from msa_lite.io.console.display import Notices
from msa_lite.recipe import load_recipe
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


@pytest.mark.parametrize("option", GONE_OPTIONS)
def test_an_option_that_is_gone_is_refused_with_its_new_form(option: str, call: Call) -> None:
    status, _, err = call(*option.split())
    assert status == 2
    assert err.endswith(f"error: {option.split()[-1]} is gone: {GONE_OPTIONS[option]}\n")


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


@pytest.mark.parametrize("command", cli._GONE)
def test_a_command_of_before_is_refused_with_its_new_form(command: str, call: Call) -> None:
    status, out, err = call(command, "quickstart")
    assert (status, out) == (2, "")
    assert cli._GONE[command] in err


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


def test_a_full_gpu_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GB")
    assert report_error(error, verbose=False) == 4
    line = capsys.readouterr().err
    assert line.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB; close other programs")
    assert line.count("\n") == 1
    assert report_error(error, verbose=True) == 4
    assert "OutOfMemoryError" in capsys.readouterr().err


def test_every_kind_of_error_has_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ValueError("odd"), verbose=False) == 4
    assert "ValueError: odd" in capsys.readouterr().err  # with its traceback
    assert report_error(StageError("it broke"), verbose=False) == 4
    assert report_error(UsageError("no"), verbose=False) == 2
    assert report_error(KeyboardInterrupt(), verbose=False) == 130


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


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR])
def test_a_place_without_rights_is_named_without_a_traceback(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(number, os.strerror(number), "run/report.html.tmp")
    assert report_error(error, verbose=False) == 4
    text = capsys.readouterr().err
    advice = "choose another place" if number == errno.ENOTDIR else "you need the right"
    assert text.startswith(f"error: run/report.html.tmp: {os.strerror(number)}; {advice}")
    assert "Traceback" not in text
    assert "bug" not in text


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
