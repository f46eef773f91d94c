"""The Dockerfile's steps, run one after another below a folder, without Docker: what they install starts.

Packages come from this environment and not from an index, and commands that need root are left out."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import tiny_recipe

ROOT = Path(__file__).parents[2]
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
    user: str = "root"
    """The user of the last USER."""
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
            self.start(SHELL + self.place(rest))
        elif name == "USER":
            self.user = rest
        elif name in ("ENTRYPOINT", "CMD"):
            self.command += json.loads(rest)

    def start(self, script: str) -> str:
        """Run a script of bash with the image's variables; return what it prints."""
        return self.run(["bash", "-c", script])

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
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(history, tmp_path / "run")))
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    job |= {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", str(SCRIPT), "run", "--until=vectors", str(tmp_path / "recipe.yaml"), "vector.epochs=1"]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*command, "vector.warmup_epochs=0"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("vector: ") == 2
    assert "forget vector: done" in done.stderr
