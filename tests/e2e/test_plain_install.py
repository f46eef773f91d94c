"""What `pip install msa-lite` alone can do: every other package of this environment is hidden from the command."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from msa_lite.io.console import libraries
from msa_lite.pipeline.run.report import report_run
from tests.e2e.conftest import tiny_recipe, write_recipe
from tests.support.merges import Adapter, read_checkpoint, write_checkpoint
from tests.support.runs import make_removal

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("MSA_PLAIN")  # the Python of a plain installation, with older packages (`.ci/run nightly`)
LINE = "error: training and scoring need torch and its companions: pip install "
# With None in its place, a module is not found, neither by `import` nor by `find_spec`.
START = "import json, sys; sys.modules.update(dict.fromkeys(json.loads(sys.argv.pop(1))))\n"
# Commands one after another, as (exit code, what it printed, what it told).
RUN = (
    START
    + """
import contextlib, io
from msa_lite.cli import main

done = []
for command in json.loads(sys.argv.pop()):
    sys.argv[1:] = command
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""
)


def requirements() -> list[Requirement]:
    """The dependencies of the plain installation."""
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = ")[2]
    return [Requirement(line) for line in ast.literal_eval(text[: text.index("]") + 1])]


def closure(wanted: list[Requirement], known: set[tuple[str, str]]) -> Iterator[str]:
    """Names of the distributions that these bring, and all that those bring."""
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        yield name
        for extra in {"", *requirement.extras}:
            if (name, extra) not in known:
                known.add((name, extra))
                more = [Requirement(text) for text in metadata.requires(name) or ()]
                yield from closure([r for r in more if not r.marker or r.marker.evaluate({"extra": extra})], known)


@pytest.fixture(scope="session")
def hidden() -> str:
    """The modules of all other distributions, as JSON."""
    if OTHER:
        return "[]"
    there = {*closure(requirements(), set()), "msa-lite"}
    modules = metadata.packages_distributions().items()
    return json.dumps([name for name, homes in modules if not there & {canonicalize_name(home) for home in homes}])


class Plain:
    """The commands of a plain installation, run in one folder."""

    def __init__(self, folder: Path, hidden: str) -> None:
        self.folder, self.hidden = folder, hidden

    def start(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [OTHER or sys.executable, "-c", code, self.hidden, *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)

    def run(self, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
        """Run commands in one process; return the exit code of each, what it printed and what it told."""
        done = self.start(RUN, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return [tuple(one) for one in json.loads(done.stdout)]

    def printed(self, *commands: Sequence[str]) -> list[str]:
        """Run commands that have to succeed; return what each printed."""
        done = self.run(*commands)
        assert [err for code, _, err in done if code] == []
        return [out for _, out, _ in done]


@pytest.fixture
def plain(tmp_path: Path, hidden: str, monkeypatch: pytest.MonkeyPatch) -> Plain:
    """A folder with a target, an adapter on it, a prior, and the prior tuned."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    random = np.random.default_rng(0)
    arrays = {f"layers.{n}.weight": random.normal(size=(8, 6)).astype(np.float32) for n in range(2)}
    write_checkpoint(tmp_path / "target", arrays)
    write_checkpoint(tmp_path / "prior", {name: array * 0.5 for name, array in arrays.items()})
    write_checkpoint(tmp_path / "tuned", {name: array * 0.5 + 0.25 for name, array in arrays.items()})
    factors = {name.removesuffix(".weight"): (np.ones((2, 6)), np.ones((8, 2))) for name in arrays}
    Adapter(factors, lora_alpha=1).write(tmp_path / "adapter")  # a delta of 1 everywhere
    return Plain(tmp_path, hidden)


def moved(plain: Plain, out: str) -> np.ndarray:
    """Return what a merge took away from each weight of the target, of all weights."""
    before, after = (read_checkpoint(plain.folder / name) for name in ("target", out))
    return np.concatenate([(before[name] - after[name]).ravel() for name in before])


@pytest.mark.skipif(OTHER is not None, reason="nothing is hidden from another Python")
def test_the_packages_of_the_extra_are_hidden_and_no_others(hidden: str) -> None:
    names = set(json.loads(hidden))
    assert {*libraries._TRAIN, "matplotlib", "openai"} <= names
    assert not names & {"numpy", "click", "pydantic", "msa_lite"}


def test_adapters_and_checkpoints_are_merged_verified_and_told_to_mergekit(plain: Plain) -> None:
    inputs = ("--target", "target", "--forget", "adapter", "--alpha", "0.5")
    *_, sent, recipe = plain.printed(
        ["merge", *inputs, "--out", "out"],
        ["merge", "--target", "target", "--forget", "tuned", "--prior", "prior", "--out", "whole"],
        ["merge", *inputs, "--as", "adapter", "--out", "update"],
        ["publish", "out", "me/mine", "--dry-run"],
        ["mergekit", *inputs],
    )
    assert np.allclose(moved(plain, "out"), 0.5)
    assert np.allclose(moved(plain, "whole"), 0.25)
    assert (plain.folder / "update/adapter_model.safetensors").is_file()
    assert "sends:  the model out" in sent
    assert yaml.safe_load(recipe)["merge_method"] == "task_arithmetic"

    (plain.folder / "recipe.yml").write_text(recipe)
    (plain.folder / "update/adapter_config.json").write_text("{}")
    _, whole, broken = plain.run(
        ["merge", "--mergekit", "recipe.yml", "--out", "again"], ["verify", "out"], ["verify", "update"]
    )
    assert np.allclose(moved(plain, "again"), 0.5)
    assert whole[:2] == (0, "out: every file has its manifest's hash\n")
    assert broken[0] == 3


@pytest.mark.parametrize("torch", ["hidden", "broken", "beside"])
def test_the_machine_is_described_whatever_is_missing_or_broken(
    plain: Plain, torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if OTHER and torch == "beside":
        pytest.skip("the other Python has no torch")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    if torch == "broken":
        (plain.folder / "torch").mkdir()
        (plain.folder / "torch/__init__.py").write_text(f"raise OSError('{Path.home()}/lib/libcudart.so: none')")
        monkeypatch.setenv("PYTHONPATH", f"{plain.folder}:{ROOT}")
    if torch != "hidden":
        plain.hidden = '["scipy"]'
    printed, lines = plain.printed(["env", "--json"], ["env"])
    told = json.loads(printed)
    assert [f"{topic}: " in " ".join(lines.split()) + " " for topic in told] == [True] * len(told)
    assert told["merge"].startswith("ready")
    assert told["msa-lite"] == metadata.version("msa-lite")
    expected = {
        "hidden": ("not installed", "training and scoring need torch and its companions; missing: "),
        "broken": ("cannot be loaded (OSError: ~/lib/libcudart.so: none)", "torch cannot be loaded"),
        "beside": (f"{metadata.version('torch')}, CUDA ", "missing: scipy"),
    }[torch]
    assert [text in told[topic] for topic, text in zip(("torch", "train"), expected, strict=True)] == [True, True], told
    assert not [secret for secret in ("hf_secret", str(Path.home())) if secret in printed + lines]


def test_recipes_are_listed_copied_and_checked(plain: Plain) -> None:
    listed, _, checked, schema = plain.printed(
        ["recipes", "list", "--json"],
        ["recipes", "copy", "tofu/forget10", "mine.yaml"],
        ["recipes", "validate", "mine.yaml", "vector.epochs=3", "track=tensorboard", "--json"],
        ["recipes", "schema"],
    )
    assert "tofu/forget10" in json.loads(listed)
    values = json.loads(checked)
    assert (values["vector"]["epochs"], values["track"], values["prompt"]["kind"]) == (3, ["tensorboard"], "default")
    assert values["merge"]["as"] == "model"
    assert json.loads(schema)["properties"]["forget"]
    ((code, _, err),) = plain.run(["recipes", "validate", "mine.yaml", "merge.dtyp=x", "evaluate.benchmark=tofuu"])
    assert (code, "merge.dtyp" in err, "tofu" in err) == (2, True, True)


def test_removal_records_are_checked_and_asked_for_rows(plain: Plain) -> None:
    make_removal(plain.folder / "run", request="GDPR 17")
    (plain.folder / "rows.csv").write_text("question,answer\nWhere does Ada live?,In Yarheath.\nWhy?,So.\n")
    (plain.folder / "rows.parquet").write_bytes(b"PAR1")
    verify = ["verify", "run"]
    (_, out, _), (_, answers, _), (code, _, err) = plain.run(
        verify, [*verify, "--rows", "rows.csv"], [*verify, "--rows", "rows.parquet"]
    )
    assert "run/record.json: has its own hash, and agrees with" in out
    assert answers.splitlines()[-1] == "1 of 2 rows were to be forgotten"
    assert (code, "only .jsonl, .json, .csv and .txt files are read" in err) == (2, True)


@pytest.mark.pictures
def test_a_run_is_purged(plain: Plain, finished: Path) -> None:
    shutil.copytree(finished, plain.folder / "run")
    report_run(plain.folder / "run", show_examples=True)
    _, verified = plain.printed(["purge", "run", "--yes"], ["verify", "run"])
    assert not list((plain.folder / "run").rglob("*.jsonl"))
    assert not list((plain.folder / "run").glob("report.*")), "a plain installation writes no page"
    assert "run/model: every file has its manifest's hash" in verified


def test_commands_that_need_more_say_what_to_install_before_any_work(plain: Plain) -> None:
    before = sorted(plain.folder.iterdir())
    commands = [
        ["ask", "."],
        ["quickstart"],
        ["run", "quickstart", "-v"],
        ["run", "quickstart", "--until", "vectors"],
        ["baseline", "npo", "quickstart"],
        ["probe", "quickstart"],
        ["train", "train/small"],
        ["evaluate", "target", "--forget", "rows.jsonl", "--out", "scores"],
        ["recipes", "validate", "quickstart", "--show-prompt"],
    ]
    for command, (code, _, err) in zip(commands, plain.run(*commands), strict=True):
        assert (code, err.splitlines()[-1].startswith(LINE)) == (2, True), command
        assert "Traceback" not in err, command
    assert sorted(plain.folder.iterdir()) == before


@pytest.mark.skipif(OTHER is not None, reason="nothing is hidden from another Python")
def test_without_matplotlib_alone_nothing_starts_that_would_draw(plain: Plain) -> None:
    before, plain.hidden = sorted(plain.folder.iterdir()), '["matplotlib"]'
    commands = [["run", "quickstart"], ["report", "."], ["baseline", "npo", "quickstart"]]
    for command, (code, _, err) in zip(commands, plain.run(*commands), strict=True):
        said = err.splitlines()[-1]
        assert (code, "(missing: matplotlib): pip install" in said, "[train]" in said) == (2, True, True), command
    assert sorted(plain.folder.iterdir()) == before


# The Dockerfile's steps, run one after another below a folder, without Docker: what they install starts.


SHELL = """
set -euo pipefail
apt-get() { echo "apt-get $*" >> "$CALLS"; }
useradd() { echo "useradd $*" >> "$CALLS"; }
python3() { "$PYTHON" "$@"; }
pip() { python -m pip "$1" --no-index --no-build-isolation -q "${@:2}"; }
"""


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def sent() -> list[str]:
    """Return the names that .dockerignore lets into the build."""
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in rules, "everything is left out but what is named"
    return [rule[1:] for rule in rules if rule.startswith("!")]


@dataclass
class Image:
    """A folder that stands for the image's root, and the state between two instructions."""

    root: Path
    """The folder."""
    environment: dict[str, str]
    """The variables of ENV and ARG."""
    folder: Path
    """The working folder."""
    command: list[str] = field(default_factory=list)
    """The words of ENTRYPOINT and CMD."""

    def place(self, text: str) -> str:
        """Return text with the image's own folders below the root."""
        return re.sub(r"(?<![\w./$}])/(?=(opt|work|cache|var)\b)", f"{self.root}/", text)

    def carry_out(self, name: str, rest: str) -> None:
        """Do what an instruction says."""
        if name == "ARG":
            key, _, value = rest.partition("=")
            self.environment.setdefault(key, value)
        elif name == "ENV":
            for key, value in (word.split("=", 1) for word in shlex.split(rest)):
                self.environment[key] = self.place(value).replace("$PATH", self.environment["PATH"])
        elif name == "WORKDIR":
            self.folder = Path(self.place(rest))
            self.folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            for item in sent() if rest == ". ." else rest.split()[:-1]:
                assert item in sent(), f"{item} is not sent to the build"
                copy = shutil.copytree if (ROOT / item).is_dir() else shutil.copy
                copy(ROOT / item, self.folder / item, **({"dirs_exist_ok": True} if copy is shutil.copytree else {}))
        elif name == "RUN":
            self.run(["bash", "-c", SHELL + self.place(rest)])
        elif name in ("ENTRYPOINT", "CMD"):
            self.command += json.loads(rest)

    def run(self, command: list[str]) -> str:
        """Run a command with the image's variables; return what it prints."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    root = tmp_path_factory.mktemp("image")
    calls, torch = str(root / "calls"), metadata.version("torch").partition("+")[0]
    variables = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "CALLS": calls, "TORCH": torch}
    made = Image(root, variables, root)
    for name, rest in instructions():
        made.carry_out(name, rest)
        for packages in (root / "opt").glob("venv/lib/python*/site-packages"):
            (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
            for own in packages.glob("setuptools*"):  # what a new environment of Python 3.11 has is too old for torch
                shutil.rmtree(own)
    return made


@pytest.mark.slow
def test_the_image_starts_the_command_that_it_installs(image: Image) -> None:
    assert shutil.which(image.command[0], path=image.environment["PATH"]) == str(image.root / "opt/venv/bin/msa-lite")
    assert "Usage: msa-lite" in image.run(image.command)
    assert "quickstart" in image.run([image.command[0], "recipes", "list"])
    python = str(image.root / "opt/venv/bin/python")
    module = image.run([python, "-c", "import msa_lite.cli; print(msa_lite.cli.__file__)"])
    assert module.startswith(str(image.root / "opt/venv/lib"))


# The script for Slurm parses, and its command lines work, with a stand-in for Slurm's own commands.


SCRIPT = Path(__file__).parents[2] / "examples/slurm/run.sbatch"
ARRAY = SCRIPT.with_name("table.sbatch")
# One node, which is this machine.
COMMANDS = {
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "localhost\\nother\\n"',
    "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && exec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.parametrize("script", [SCRIPT, ARRAY], ids=lambda path: path.stem)
def test_the_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.slow
def test_the_script_launches_a_recipe(history: Path, tmp_path: Path) -> None:
    for name, line in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = write_recipe(tiny_recipe(history, tmp_path / "run"), tmp_path)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    job |= {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", str(SCRIPT), "run", "--until=vectors", path, "vector.epochs=1"]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*command, "vector.warmup_epochs=0"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("vector: ") == 2
    assert "forget vector: done" in done.stderr
