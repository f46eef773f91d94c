"""What `pip install msa-lite` alone can do: every other package of this environment is hidden from the command."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from msa_lite.evals.tofu import Tofu
from msa_lite.io.console.libraries import _TRAIN
from msa_lite.pipeline.run.report import report_run
from tests.support.merges import Adapter, read_checkpoint, write_checkpoint
from tests.support.records import make_run
from tests.support.runs import make_removal
from tests.unit.test_common_rows import HIGH, LOW, put, put_run, tofu

ROOT = Path(__file__).parents[2]
LINE = "training and scoring need torch and its companions: pip install 'msa-lite[train]'"
# With None in its place, a module is not found, neither by `import` nor by `find_spec`.
START = "import json, sys; sys.modules.update(dict.fromkeys(json.loads(sys.argv.pop(1))))\n"
RUN = START + "from msa_lite.cli import main; main()"


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
    there = {*closure(requirements(), set()), "msa-lite"}
    modules = metadata.packages_distributions().items()
    return json.dumps([name for name, homes in modules if not there & {canonicalize_name(home) for home in homes}])


class Plain:
    """The commands of a plain installation, run in one folder."""

    def __init__(self, folder: Path, hidden: str) -> None:
        self.folder, self.hidden = folder, hidden

    def start(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, self.hidden, *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)

    def run(self, *arguments: str) -> str:
        """Run a command that has to succeed; return what it printed."""
        done = self.start(RUN, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


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


def test_the_packages_of_the_extra_are_hidden_and_no_others(hidden: str) -> None:
    names = set(json.loads(hidden))
    assert {*_TRAIN, "matplotlib", "openai", "lm_eval"} <= names
    assert not names & {"numpy", "click", "pydantic", "msa_lite"}


def test_adapters_and_checkpoints_are_merged_verified_and_told_to_mergekit(plain: Plain) -> None:
    inputs = ("--target", "target", "--forget", "adapter", "--alpha", "0.5")
    plain.run("merge", *inputs, "--out", "out")
    assert np.allclose(moved(plain, "out"), 0.5)
    plain.run("merge", "--target", "target", "--forget", "tuned", "--prior", "prior", "--out", "whole")
    assert np.allclose(moved(plain, "whole"), 0.25)
    plain.run("merge", *inputs, "--as", "adapter", "--out", "update")
    assert (plain.folder / "update/adapter_model.safetensors").is_file()
    assert "sends:  the model out" in plain.run("publish", "out", "me/mine", "--dry-run")

    recipe = plain.run("mergekit", *inputs)
    assert yaml.safe_load(recipe)["merge_method"] == "task_arithmetic"
    (plain.folder / "recipe.yml").write_text(recipe)
    plain.run("merge", "--mergekit", "recipe.yml", "--out", "again")
    assert np.allclose(moved(plain, "again"), 0.5)

    assert plain.run("verify", "out") == "out: every file is as it was written\n"
    (plain.folder / "out/config.json").write_text("{}")
    assert plain.start(RUN, "verify", "out").returncode == 3


def test_removal_records_are_checked_and_asked_for_rows(plain: Plain) -> None:
    make_removal(plain.folder / "run", request="GDPR 17")
    assert "run/record.json: as it was written" in plain.run("verify", "run")
    (plain.folder / "rows.csv").write_text("question,answer\nWhere does Ada live?,In Yarheath.\nWhy?,So.\n")
    (plain.folder / "rows.parquet").write_bytes(b"PAR1")
    answers = plain.run("verify", "run", "--rows", "rows.csv")
    assert answers.splitlines()[-1] == "1 of 2 rows were to be forgotten"
    done = plain.start(RUN, "verify", "run", "--rows", "rows.parquet")
    assert (done.returncode, "only .jsonl, .json, .csv and .txt files are read" in done.stderr) == (2, True)


def test_reports_are_compared_also_on_the_rows_that_they_share(plain: Plain) -> None:
    make_run(plain.folder / "one", msa={"acc_forget": 0.9})
    make_run(plain.folder / "two", msa={"acc_forget": 0.5})
    paths = ("one/evaluation/unlearned", "two/evaluation/unlearned")
    table = plain.run("compare", *paths, "--published", "tofu-forget10-llama-3.2-1b", "--format", "md")
    assert "0.900" in table
    assert "| NPO | 0.66" in table

    put_run(plain.folder / "run")  # whose models were scored on other rows
    found = json.loads(plain.run("compare", "run", "--json"))
    assert found["split"] == "rows in common: 2 forget"


def test_metrics_on_shared_rows_that_need_scipy_say_so(plain: Plain) -> None:
    for name, rows in {"a": (0, 1, 2), "b": (1, 2)}.items():
        ideal = put(plain.folder / name / "ideal", Tofu, tofu(rows, HIGH), ideal="itself", model="ideal")
        put(plain.folder / name / "unlearned", Tofu, tofu(rows, LOW), ideal=ideal)
    done = plain.start(RUN, "compare", "a/unlearned", "b/unlearned")
    line = "error: computing these metrics on common rows needs scipy: pip install 'msa-lite[train]'"
    assert (done.returncode, done.stderr.splitlines()) == (2, [line])


def test_recipes_and_metrics_are_listed_and_recipes_checked(plain: Plain) -> None:
    assert "--mergekit" in plain.run("merge", "--help")
    assert "quickstart" in plain.run("recipes", "list")
    resolved = plain.run("recipes", "validate", "quickstart")
    (plain.folder / "mine.yaml").write_text(resolved)
    assert plain.run("recipes", "validate", "mine.yaml") == resolved
    assert json.loads(plain.run("recipes", "schema"))["title"] == "Recipe"
    assert "extraction_strength" in plain.run("metrics")


@pytest.mark.pictures
def test_a_run_is_purged(plain: Plain, finished: Path) -> None:
    shutil.copytree(finished, plain.folder / "run")
    report_run(plain.folder / "run", show_examples=True)
    plain.run("purge", "run", "--yes")
    assert not list((plain.folder / "run").rglob("*.jsonl"))
    assert "side by side" not in (plain.folder / "run/report.md").read_text()
    assert not (plain.folder / "run/report.html").exists(), "a plain installation writes no page"
    assert "run/model: every file is as it was written" in plain.run("verify", "run")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "."],
        ["quickstart"],
        ["run", "quickstart", "-v"],
        ["vector", "quickstart"],
        ["sweep", "quickstart"],
        ["baseline", "npo", "quickstart"],
        ["probe", "quickstart"],
        ["train", "train/small"],
        ["evaluate", "target", "--forget", "rows.jsonl", "--out", "scores"],
        ["recipes", "validate", "quickstart", "--show-prompt"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_need_more_say_what_to_install_before_any_work(plain: Plain, arguments: list[str]) -> None:
    before = sorted(plain.folder.iterdir())
    done = plain.start(RUN, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {LINE}"
    assert "Traceback" not in done.stderr
    assert sorted(plain.folder.iterdir()) == before


def test_calls_in_python_that_need_more_raise_the_same_line(plain: Plain) -> None:
    code = START + (
        "import msa_lite\n"
        "assert all(callable(getattr(msa_lite, name)) for name in msa_lite.__all__)\n"
        "calls = [(msa_lite.run, 'quickstart'), (msa_lite.sweep, 'quickstart'), (msa_lite.probe, 'quickstart'),\n"
        "         (msa_lite.run_baseline, 'npo', 'quickstart'), (msa_lite.train_stages, 'train/small'),\n"
        "         (msa_lite.evaluate, 'target', 'scores', msa_lite.PublishedBenchmark('tofu'))]\n"
        "for call, *arguments in calls:\n"
        "    try:\n        call(*arguments)\n"
        "    except Exception as error:\n        print(type(error).__name__, error)\n"
        "try:\n    msa_lite.fit_vector('prior', [], 'vector', tokenizer=None)\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = plain.start(code)
    assert done.stdout.splitlines() == 7 * [f"UsageError {LINE}"], done.stderr
