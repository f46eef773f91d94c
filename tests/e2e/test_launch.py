"""Commands under torchrun and `accelerate launch`: all processes work, the result is that of one, faults end all."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import msa_lite
from msa_lite.pipeline.verbs.run import run_vectors
from tests.e2e.conftest import read_lines, sweep_recipe, write_recipe
from tests.support.processes import TORCHRUN, assert_same_scores, changed, launch

pytestmark = pytest.mark.slow

VECTORS = ["run", "--until=vectors"]
FULL = ["vector.mode=full", "vector.batch_size=6", "vector.learning_rate=1e-3"]
# Without biases: that of keys has a gradient of 0, up to noise, which AdamW scales up.
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
ALIKE = (
    "sweep/choice.json",
    "vectors/forget/adapter_model.safetensors",
    "vectors/retain/adapter_model.safetensors",
    "vectors/retain/manifest.json",
    "model/model.safetensors",
)

# Each process notes the items that it runs.
SHARES = """
from msa_lite.evals.scores import records
own = records._share
def share(part, name, *arguments):
    texts, prompts = own(part, name, *arguments)
    with open(os.environ["SHARES"] + str(rank), "a") as file:
        file.writelines(f"{name}\\n" for item in texts)
    return texts, prompts
records._share = share
"""
# A process fails, or dies, in a fit by all. The other one goes on until it is stopped.
FAULTS = """
import atexit, importlib, pathlib, signal, time
from msa_lite.errors import StageError
vectors = importlib.import_module("msa_lite.pipeline.run.vectors")
fault = os.environ["FAULT"]
def fit_with_all(fit, out, crew, progress):
    if fault == f"rank {rank} fails":
        raise StageError("the loss is lost")
    if fault == f"rank {rank} breaks":
        raise ValueError("unforeseen")
    if fault == f"rank {rank} dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(500)
vectors.fit_with_all = fit_with_all
atexit.register(lambda: pathlib.Path(os.environ["LEFT"] + str(rank)).touch())
"""
# A tracker that writes what it gets, and which process reports.
TRACKED = """
from contextlib import contextmanager
from msa_lite.train.fit import tracking
@contextmanager
def opener(title, place):
    place.mkdir(parents=True, exist_ok=True)
    with open(place / f"rank{rank}", "w") as file:
        yield lambda line, step: print(step, line["train/loss"], file=file)
tracking.find_spec = lambda name: name
tracking._OPENERS["tensorboard"] = opener
"""


@pytest.fixture
def path(history: Path, tmp_path: Path) -> str:
    """A recipe's file; its output is tmp_path/run."""
    return write_recipe(sweep_recipe(history, tmp_path / "run"), tmp_path)


@pytest.fixture(scope="module")
def alone(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run by one process."""
    result = msa_lite.run(sweep_recipe(history, tmp_path_factory.mktemp("alone") / "run"))
    assert result is not None
    return result.folder


def assert_like(run: Path, alone: Path) -> None:
    """The same vectors, choice and weights, and the same scores of what the run has scored."""
    for name in ALIKE:
        assert (run / name).read_bytes() == (alone / name).read_bytes(), name
    assert_same_scores(run, alone)
    for report in run.glob("evaluation/*/report.json"):
        mine, other = (json.loads((one / report.relative_to(run)).read_text())["metrics"] for one in (run, alone))
        values = [{name: metric["value"] for name, metric in metrics.items()} for metrics in (mine, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), report
    assert not list(run.rglob("*.part*"))


def assert_same_weights(folder: Path, other: Path, rate: float) -> None:
    """Weights that differ by rounding alone: by a thousandth of a step of AdamW, which is `rate`, in the mean square.

    AdamW scales up the noise of gradients that are nearly 0, so that single weights may differ by more.
    """
    weights, others = (load_file(one / "model.safetensors") for one in (folder, other))
    assert weights.keys() == others.keys()
    for name, values in others.items():
        assert np.sqrt(np.square(weights[name] - values).mean()) <= 1e-3 * rate, name


def test_two_processes_do_a_run_as_one_does(path: str, alone: Path, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, *changed(tmp_path, SHARES), path, "--json", SHARES=f"{tmp_path}/shares")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "run")  # one process printed
    assert_like(tmp_path / "run", alone)
    reports = [
        {path.parent.name for path in folder.glob("evaluation/*/report.json")} for folder in (tmp_path / "run", alone)
    ]
    assert reports[0] == reports[1]
    assert done.stderr.count("forget vector: done") == done.stderr.count("retain vector: done") == 1
    first, second = ((tmp_path / f"shares{rank}").read_text().split() for rank in (0, 1))
    for name in ("forget", "retain"):
        assert 0 < second.count(name) <= first.count(name), name


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("rank 1 fails", 4, "error: process 1: the loss is lost"),
        ("rank 1 dies", -9, "error: this process was told to end"),
    ],
)
def test_a_process_that_fails_or_dies_ends_the_others(
    fault: str, code: int, message: str, path: str, alone: Path, tmp_path: Path
) -> None:
    done = launch(*TORCHRUN, *changed(tmp_path, FAULTS), *VECTORS, path, *FULL, FAULT=fault, LEFT=f"{tmp_path}/left")
    assert done.returncode == 1  # torchrun's own
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1, done.stderr
    assert message in done.stderr
    assert f"exitcode  : {code}" in done.stderr
    assert (tmp_path / "left0").exists()
    assert (tmp_path / "left1").exists() == (code == 4)
    folders = run_vectors(path)  # a rerun finishes it
    assert folders is not None
    for folder in folders:
        name = "adapter_model.safetensors"
        assert (folder / name).read_bytes() == (alone / "vectors" / folder.name / name).read_bytes()


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("sys.argv += [f'seed={rank}']", "process 1: recipe"),
        (
            "import msa_lite.pipeline.prepare.run as p; own = p.encode; p.encode = lambda *a: own(*a)[rank:]",
            "process 1: rows",
        ),
    ],
)
def test_processes_with_other_inputs_end_at_once(difference: str, message: str, path: str, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, *changed(tmp_path, difference), path)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "exitcode  : 3" in done.stderr
    assert not (tmp_path / "run/vectors").exists()


def test_full_vectors_are_fitted_by_all_processes(path: str, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, "-m", "msa_lite", *VECTORS, path, *FULL)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "run/vectors" / name for name in ("forget", "retain")]
    assert done.stdout == "".join(f"{folder.name} vector: {folder}\n" for folder in folders)
    made = [(folder / "manifest.json").stat().st_mtime_ns for folder in folders]
    assert run_vectors(path, overrides=FULL) == folders  # one process takes them for its own
    assert [(folder / "manifest.json").stat().st_mtime_ns for folder in folders] == made
    run_vectors(path, overrides=[*FULL, f"output={tmp_path}/alone"])
    for name in ("forget", "retain"):
        assert_same_weights(*(tmp_path / one / "vectors" / name for one in ("run", "alone")), rate=1e-3)
    refused = launch(*TORCHRUN, "-m", "msa_lite", *VECTORS, path, *FULL, "vector.batch_size=7")
    assert "error: batch_size 7 cannot be divided" in refused.stderr
    assert "exitcode  : 2" in refused.stderr


def test_stages_are_trained_by_all_processes(history: Path, tmp_path: Path) -> None:
    data = {name: {"path": str(history / f"data/{name}.jsonl")} for name in ("retain", "forget")}
    recipe: dict[str, Any] = {
        "model": {"config": LLAMA, "tokenizer": {"vocabulary": 300}},
        "stages": [{"name": "first", "data": data["retain"]}, {"name": "second", "data": data["forget"]}],
        "training": {"epochs": 2, "learning_rate": 5e-3, "warmup_epochs": 0.5, "batch_size": 8},
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe))
    trained = {}
    together = [*TORCHRUN, *changed(tmp_path, TRACKED), "train"]
    for name, command in (("together", together), ("alone", ["-m", "msa_lite", "train"])):
        done = launch(
            *command,
            str(tmp_path / "train.yaml"),
            f"output={tmp_path / name}",
            "--json",
            *(["track=tensorboard"] if name == "together" else []),
        )
        assert done.returncode == 0, done.stderr
        trained[name] = [Path(one["folder"]) for one in json.loads(done.stdout)["stages"]]
        assert [folder.name for folder in trained[name]] == ["0-start", "1-first", "2-second"]
    for mine, other in zip(trained["together"], trained["alone"], strict=True):
        assert_same_weights(mine, other, rate=5e-3)
    for folder in trained["together"][1:]:
        log = read_lines(folder / "train_log.jsonl")
        (tracked,) = (tmp_path / "together/tracking" / folder.name).iterdir()
        assert tracked.name == "rank0"
        assert tracked.read_text().splitlines() == [f"{line['step']} {line['loss']}" for line in log]


def test_a_full_baseline_is_trained_by_all_processes(path: str, tmp_path: Path) -> None:
    """Its epochs are scored after each of them; a setting whose loss is no number is left out of the choice."""
    method = ["baseline", "undial", path, "--json", *FULL, "baseline.epochs=2"]
    method += ["baseline.methods={undial: {learning_rate: [1.0e-3, 1.0e+12], retain_weight: 0.5}}"]
    outcomes = {}
    for name, command in (("together", TORCHRUN), ("alone", [])):
        done = launch(*command, "-m", "msa_lite", *method, f"output={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        assert "it is left out of the choice" in done.stderr
        assert "one process trains" not in done.stderr
        outcomes[name] = json.loads(done.stdout)
    assert outcomes["together"]["chosen"] == outcomes["alone"]["chosen"]
    trained = [sorted((tmp_path / name).glob("baselines/undial/vectors/*/epoch-*")) for name in outcomes]
    assert trained[0]
    for mine, other in zip(*trained, strict=True):
        assert mine.name == other.name
        assert_same_weights(mine, other, rate=1e-3)


def test_a_baseline_and_a_probe_work_and_other_commands_are_run_once(path: str, tmp_path: Path) -> None:
    done = launch(*TORCHRUN, "-m", "msa_lite", "baseline", "grad_diff", path, "--json", "baseline.epochs=2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "grad_diff"
    assert "grad_diff: one process trains; the others help with the scores" in done.stderr
    done = launch(*TORCHRUN, "-m", "msa_lite", "probe", path, "--json")
    assert done.returncode == 0, done.stderr
    assert "prior" in json.loads(done.stdout)["models"]
    done = launch(*TORCHRUN, "-m", "msa_lite", "verify", str(tmp_path / "run/baselines/grad_diff/model"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


# Sweeps by several processes, of one machine or of several: the points are shared, the result is that of one alone.


# The command line, but nobody is done with a first point before two processes have begun one. The process whose rank
# is in KILLED dies over its first point, once another process has scored one.
MEET = """
import os, signal, sys, time
from pathlib import Path
from msa_lite.cli import main
from msa_lite.choose.validation import Validation

meet, own, rank = Path(sys.argv.pop(1)), Validation.score_into, os.environ.get("RANK", "none")

def score_into(self, *arguments, **more):
    (meet / str(os.getpid())).touch()
    while len(list(meet.iterdir())) < 2:
        time.sleep(0.05)
    if rank == os.environ.get("KILLED"):
        while not list(arguments[0].parent.glob("alpha-*/report.json")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, *arguments, **more)

Validation.score_into = score_into
main()
"""


@pytest.fixture
def meeting(tmp_path: Path) -> list[str]:
    """What to launch in the place of `-m msa_lite`, so that two processes meet."""
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "meet").mkdir()
    return [str(tmp_path / "meet.py"), str(tmp_path / "meet")]


def scorers(stderr: str) -> dict[str, set[str]]:
    """Which points each process has scored, from what it says with -v."""
    found: dict[str, list[str]] = {}
    for name, process in re.findall(r"scoring (\S+) in process (\d+)", stderr):
        found.setdefault(process, []).append(name)
    assert len({name for names in found.values() for name in names}) == sum(map(len, found.values())), "scored twice"
    return {process: set(names) for process, names in found.items()}


def test_a_process_that_is_killed_ends_the_others_and_scores_stay(
    path: str, meeting: list[str], alone: Path, tmp_path: Path
) -> None:
    done = launch(*TORCHRUN, *meeting, "run", path, "--until", "sweep", KILLED="1")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr  # torchrun names the process and its signal
    partial = tmp_path / "run/sweep.partial"
    before = {report: report.stat().st_mtime_ns for report in partial.glob("*/report.json")}
    assert {report.parent.name for report in before} > {"target", "ideal"}
    assert msa_lite.sweep(path) is not None
    assert_like(tmp_path / "run", alone)
    assert all((tmp_path / "run/sweep" / p.relative_to(partial)).stat().st_mtime_ns == t for p, t in before.items())


def test_machines_with_a_shared_disk_share_a_sweep(path: str, meeting: list[str], alone: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines: each starts one process, and they find each other by an address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    sweep = ["-v", "run", path, "--until", "sweep"]
    with ThreadPoolExecutor(2) as threads:
        machines = [
            threads.submit(launch, *node, "--master_port", port, "--node_rank", rank, *meeting, *sweep)
            for rank in ("0", "1")
        ]
        done = [machine.result() for machine in machines]
    assert [one.returncode for one in done] == [0, 0], done
    assert [bool(one.stdout) for one in done] == [True, False]
    assert len(scorers("".join(one.stderr for one in done))) == 2
    assert_like(tmp_path / "run", alone)
