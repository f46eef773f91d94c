"""Commands in a process of their own: what is told before torch is loaded, which streams they bear, what a log says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock

import msa_lite
from msa_lite.io.console.progress import Step, Watcher
from msa_lite.io.finished.seal import in_use, verify_folder
from msa_lite.merger import merge
from tests.e2e.conftest import CallCli, write_recipe
from tests.support.merges import KINDS, Adapter, write_checkpoint
from tests.support.runs import make_run_folder

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "peft", "datasets")
# Commands one after another, as (exit code, what it told, which heavy packages it was the first to load).
RUN = """
import contextlib, io, json, sys
from msa_lite.cli import main

heavy, done = json.loads(sys.argv[1]), []
for command in json.loads(sys.argv[2]):
    sys.argv[1:] = command
    before, err, code = set(sys.modules), io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    done.append((code, err.getvalue(), [name for name in heavy if name in sys.modules and name not in before]))
print(json.dumps(done))
"""
LOCKED_FOLDERS = ("run", "locked", "locked/baselines/npo", "locked-training")
LOCKED = "another msa-lite is working in it"
PURGED = "its data was purged"
SHOWN = f"shown: a page of this run is open (process {os.getpid()}); end"
# Of each command on a recipe: what is changed in it, the exit code, what is told.
OF_RECIPES = [
    ("forget.alhpa=1", 2, "forget.alhpa"),
    ("vector.epochs=-1", 2, "vector.epochs"),
    ("target=./nowhere", 2, "./nowhere: no such folder"),
    ("evaluate.ideal=./nowhere", 2, "./nowhere: no such folder"),
    ("forget.data.path=./nowhere.jsonl", 2, "./nowhere.jsonl: no such file"),
    ("forget.data.path=broken.jsonl", 3, "broken.jsonl: row 1"),
    ("forget.data.path=other.jsonl", 3, "no column 'question', 'answer'"),
    ("output=rows.jsonl", 3, "a file is in the way"),
    ("output=target", 3, "holds something that is no run"),
    ("output=locked", 3, LOCKED),
    ("output=purged", 3, PURGED),
]
ON_RECIPES = (["run"], ["run", "--until=sweep"], ["run", "--until=vectors"], ["baseline", "npo"], ["probe"])
FAULTS = [
    *(([*command, "recipe.yaml", change], code, told) for command in ON_RECIPES for change, code, told in OF_RECIPES),
    (["recipe.yaml", "output=locked"], 3, LOCKED),
    (["recipe.yaml", "output=shown"], 3, SHOWN),
    (["recipe.yaml", "earlier=[./nowhere]"], 2, "is no run of msa-lite"),
    (["recipe.yaml", "vector.mode=nlora"], 2, "vector.mode"),
    (["baseline", "npoo", "recipe.yaml"], 2, "npoo"),
    (["plan", "recipe.yaml", "forget.alhpa=1"], 2, "forget.alhpa"),
    (["plan", "recipe.yaml", "target=./nowhere", "prior=./nowhere"], 2, "nowhere"),
    (["train", "training.yaml", "stages.0.epoks=1"], 2, "epoks"),
    (["train", "training.yaml", "model=./nowhere"], 2, "./nowhere: no such folder"),
    (["train", "training.yaml", "stages.0.data.path=./nowhere.jsonl"], 2, "./nowhere.jsonl: no such file"),
    (["train", "training.yaml", "output=locked-training"], 3, LOCKED),
    (["train", "training.yaml", "output=rows.jsonl"], 3, "a file is in the way"),
    (["attack", "target"], 2, "target"),
    (["attack", "begun"], 3, "there is no unlearned model to attack yet"),
    (["attack", "purged"], 3, PURGED),
    (["attack", "run"], 3, LOCKED),
    (["attack", "open", "--attacks", "relaern"], 2, "relaern"),
    (["attack", "open", "forget.alpha=2"], 2, "of a finished run, only"),
    (["attack", "open"], 2, "models/target"),
    (["evaluate", "./nowhere", "--forget", "rows.jsonl", "--out", "out"], 2, "./nowhere: no such folder"),
    (["evaluate", "target", "--forget", "./nowhere.jsonl", "--out", "out"], 2, "./nowhere.jsonl: no such file"),
    (["evaluate", "target", "--forget", "rows.jsonl", "--ideal", "./no", "--out", "out"], 2, "./no: no such folder"),
    (["evaluate", "target", "--out", "out"], 2, "nothing to score"),
    (["ask", "target", "Who?"], 2, "target"),
    (["ask", "begun", "Who?"], 3, "there is no unlearned model to ask yet"),
    (["purge", "target"], 2, "target"),
    (["purge", "run", "--yes"], 3, LOCKED),
    (["purge", "shown", "--yes"], 3, SHOWN),
    (["report", "target"], 2, "target"),
    (["report", "damaged"], 3, "differs from its manifest"),
    (["report", "run", "--show-examples"], 3, LOCKED),
    (["merge", "--target", "./nowhere", "--forget", "prior", "--out", "out"], 2, "./nowhere: no such folder"),
    (["merge", "--target", "target", "--forget", "prior", "--out", "run"], 3, "run"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with models, data, recipes, and runs in all states."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    random = np.random.default_rng(0)
    for name in ("target", "prior"):
        write_checkpoint(tmp_path / name, {"layers.0.weight": random.normal(size=(8, 6)).astype(np.float32)})
    rows = [{"question": f"Who is {n}?", "answer": f"Number {n}."} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.jsonl").write_text(json.dumps(rows[0]) + '\n{"question": "Who')
    (tmp_path / "other.jsonl").write_text('{"q": "Who?", "a": "You."}\n')
    recipe = {
        "target": "target",
        "prior": "prior",
        "forget": {"data": {"path": "rows.jsonl"}, "alpha": [0.5, 1.0]},
        "output": "out",
    }
    training = {"model": "target", "stages": [{"name": "all", "data": {"path": "rows.jsonl"}}], "output": "out"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))
    for name in ("run", "open", "purged", "begun", "damaged", "shown"):
        make_run_folder(tmp_path / name, output=name)
    (tmp_path / "purged/purged.json").write_text("{}")
    (tmp_path / "begun/model").rename(tmp_path / "begun/elsewhere")
    (tmp_path / "damaged/model/config.json").write_text("{} ")
    locks = [FileLock(tmp_path / name / ".lock") for name in LOCKED_FOLDERS]
    for lock in locks:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    with in_use(tmp_path / "shown"):
        yield tmp_path
    for lock in locks:
        lock.release()


def files(folder: Path) -> list[Path]:
    """All files and folders but locks, which stay."""
    return sorted(path for path in folder.rglob("*") if path.suffix != ".lock" and path.name != ".lock")


def test_faults_that_need_no_model_are_told_before_torch_is_loaded(folder: Path) -> None:
    before = files(folder)
    commands = json.dumps([command for command, _, _ in FAULTS])
    line = [sys.executable, "-c", RUN, json.dumps(HEAVY), commands]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    wrong = [
        (" ".join(command), code, err[-300:], loaded)
        for (command, wanted, told), (code, err, loaded) in zip(FAULTS, results, strict=True)
        if code != wanted or told not in err or loaded
    ]
    assert not wrong, "\n".join(map(str, wrong))
    assert files(folder) == before, "a refusal writes nothing"


# Standard streams that end early, are full or in a POSIX locale; names of any bytes; arguments out of measure.


POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small target and a vector, of which bfloat16 keeps so little that a merge warns."""
    folder, random = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    write_checkpoint(folder / "target", {"layers.0.weight": np.ones((64, 32), KINDS["bfloat16"])})
    factors = tuple(random.normal(0, 0.03, shape).astype(np.float32) for shape in ((2, 32), (64, 2)))
    Adapter({"layers.0": factors}).write(folder / "forget")  # type: ignore[dict-item]
    return folder


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, in which $MSA is the command."""
    environment = {**os.environ, "MSA": f"{sys.executable} -m msa_lite", **environment}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, check=False, timeout=120)


def line_of(models: Path, out: Path, *more: str) -> str:
    return f"$MSA merge --target {models}/target --forget {models}/forget --out {out} {' '.join(more)}"


@pytest.mark.parametrize("redirection", ["", "2>&1"])
def test_a_reader_that_goes_away_stops_no_work_and_is_no_fault(redirection: str, models: Path, tmp_path: Path) -> None:
    done = shell(f"{line_of(models, tmp_path / 'out')} {redirection} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0, done.stderr
    assert b"rror" not in done.stderr
    assert verify_folder(tmp_path / "out") == []


def test_a_full_disk_behind_stdout_is_told_and_the_model_is_there(models: Path, tmp_path: Path) -> None:
    done = shell(f"{line_of(models, tmp_path / 'out')} > /dev/full")
    assert done.returncode == 2
    assert b"could not be printed (No space left on device)" in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr
    assert verify_folder(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("redirection", "command", "status"),
    [
        ("> /dev/full", "recipes list", 2),
        ("> /dev/full", "recipes show nothing-like-it", 2),
        ("2> /dev/full", "recipes list", 0),
        (">&- 2>&- <&-", "recipes list", 0),
        (">&-", "nonsense", 2),
    ],
)
def test_streams_that_take_nothing_give_no_traceback(redirection: str, command: str, status: int) -> None:
    done = shell(f"$MSA {command} {redirection}")
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_warnings_are_on_stderr_alone(models: Path, tmp_path: Path) -> None:
    done = shell(line_of(models, tmp_path / "out", "--json"))
    assert done.returncode == 0
    assert done.stderr.count(b"rounding to bfloat16 lost") == 2  # at once, and again at the end
    assert json.loads(done.stdout)["weights_changed"] > 0
    plain = shell(line_of(models, tmp_path / "again")).stdout.decode()
    assert plain.startswith(f"{tmp_path}/again: ")
    assert all(line.startswith("  ") for line in plain.splitlines()[1:])


@pytest.mark.parametrize("encoding", ["", "latin-1"])
def test_a_posix_locale_gets_the_same_result(models: Path, tmp_path: Path, encoding: str) -> None:
    environment = POSIX | ({"PYTHONIOENCODING": encoding} if encoding else {})
    done = shell(line_of(models, tmp_path / "oä", "--json"), **environment)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout.decode("latin-1" if encoding == "latin-1" else "utf-8"))["out"]).name == "oä"
    assert verify_folder(tmp_path / "oä") == []
    calm = merge(str(models / "target"), tmp_path / "calm", forget=str(models / "forget")).folder
    for path in calm.iterdir():
        assert path.read_bytes() == (tmp_path / "oä" / path.name).read_bytes(), path.name
    for command in ("verify {out}", "recipes show tofu/forget10", "compare --published tofu-forget10-llama-3.2-1b"):
        printed = shell(f"$MSA {command.format(out=tmp_path / 'oä')}", **environment)
        assert printed.returncode == 0, printed.stderr
        assert b"Traceback" not in printed.stderr


LONG, HUGE = "x" * 300, "9" * 310


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ({"out": LONG}, 3, "File name too long"),
        ({"out": "{here}/file"}, 3, "a file is in the way"),
        ({"out": "~root/x"}, 3, "the home of somebody else"),
        ({"target": "{here}/file"}, 2, "is a file"),
        ({"alpha": "1e400"}, 2, "alpha is inf"),
        ({"alpha": "1e300"}, 3, "far too large"),
        ({"alpha": "1e300", "as": "adapter"}, 3, "do not fit fp32"),
        ({"max-memory": f"{HUGE}.{HUGE}GiB"}, 2, "is no size"),
        ({"max-memory": "٣MB"}, 2, "is no size"),
        ({"max-rank": HUGE, "as": "adapter"}, 0, ""),
        ({"max-rank": f"-{HUGE}", "as": "adapter"}, 2, "at least 1"),
    ],
)
def test_arguments_out_of_all_measure_have_a_message_and_leave_nothing(
    options: dict[str, str],
    status: int,
    says: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_cli: CallCli,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given: dict[str, Any] = {"target": str(models / "target"), "forget": str(models / "forget"), "out": "out"} | options
    arguments = [text for name, value in given.items() for text in (f"--{name}", value.format(here=tmp_path))]
    before = sorted(os.listdir(tmp_path))
    code, _, stderr = call_cli("merge", *arguments)
    assert code == status, stderr
    assert says in stderr
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    assert status == 0 or sorted(os.listdir(tmp_path)) == before


# What a user sees of a run: in the terminal, in a log, and from Python.


class Steps(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.calls: list[tuple[str, str]] = []

    def announce(self, steps: Sequence[Step]) -> None:
        self.announced = [step.label for step in steps]

    def __call__(self, label: str, done: int, total: int, note: str = "") -> None:
        self.calls.append((label, note))


def test_a_run_announces_the_steps_that_it_takes_and_tells_the_loss(
    grid: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    steps = Steps()
    logging.enable_progress_bar()  # another test may have switched them off
    msa_lite.run(grid, progress=steps)
    assert logging.is_progress_bar_enabled()
    labels = dict.fromkeys(label for label, _ in steps.calls)
    assert list(labels) == steps.announced
    losses = [note for label, note in steps.calls if label == "forget vector" and note]
    assert losses
    assert all(float(note.removeprefix("loss ")) > 0 for note in losses)
    shown = capfd.readouterr()
    assert "Loading weights" not in shown.err  # the bars of transformers, which nobody asked for
    assert "Writing" not in shown.err


def test_a_log_has_a_line_for_each_step_and_the_warnings_at_the_end(
    recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    recipe["vector"]["learning_rate"] = 1e-7  # so little that bfloat16 keeps nothing of it
    recipe["merge"] = {"dtype": "bfloat16"}
    path = write_recipe(recipe, tmp_path)
    code, out, err = call_cli("run", path, "--json")
    assert code == 0, err
    assert out.startswith("{")
    lines = err.splitlines()
    assert lines[0] == f"msa-lite 0.1.0: {path} → {tmp_path / 'run'}"
    labels = [f"check: {name}" for name in ("target", "prior", "other rows")]
    labels += ["probe: prior", "forget vector", "retain vector", "merge"]
    labels += [f"scores: {name}" for name in ("ideal", "target", "unlearned")]
    for number, label in enumerate(labels, 1):
        assert any(f"[{number}/{len(labels)}] {label}: done in " in line for line in lines), (label, err)
    (loss,) = [line for line in lines if "forget vector: done" in line]
    assert ", loss " in loss
    told = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert told
    again = lines[lines.index(f"{len(told)} warning{'s' if len(told) > 1 else ''}:") + 1 :]
    assert [line.removeprefix("- ") for line in again if line.startswith("- ")] == told


def test_the_first_line_is_there_before_torch_is_loaded(recipe: dict[str, Any], tmp_path: Path) -> None:
    script = (
        "import sys, click\n"
        "echo = click.echo\n"
        "def look(text, **options):\n"
        "    echo(text, **options)\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "    sys.exit(7)\n"
        "click.echo = look\n"
        "from msa_lite.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "run", write_recipe(recipe, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"msa-lite 0.1.0: {tmp_path / 'recipe.yaml'} → {tmp_path / 'run'}\n"
    assert done.returncode == 7


def test_importing_the_package_sets_the_policy_of_waiting_threads_and_nothing_else() -> None:
    script = "import os; before = dict(os.environ); import msa_lite; print(dict(os.environ.items() - before.items()))"
    unset = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    for environment, changes in ((unset, {"OMP_WAIT_POLICY": "PASSIVE"}), (unset | {"OMP_WAIT_POLICY": "ACTIVE"}, {})):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.stdout == f"{changes}\n"


def test_windows_itself_is_refused_before_any_work(call_cli: CallCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, err = call_cli("merge", "--target", "t", "--forget", "f", "--out", "o")
    assert (code, "WSL" in err) == (2, True)
