"""Scores on TOFU from the command line and from a recipe: what is printed, written, refused and taken up again."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import DataError, OutputError
from msa_lite.evals.benchmarks import tofu
from msa_lite.evals.scores.records import read_records
from msa_lite.io.finished.seal import verify_folder
from tests.e2e.conftest import CallCli
from tests.support.benchmark_data import MEMBERSHIP, TOFU_METRICS, write_tofu
from tests.support.judge import JudgeServer, Step
from tests.support.models import save_adapter, save_checkpoint
from tests.support.plain import WIDE
from tests.support.processes import TORCHRUN, changed, fork_script, launch

SHORT = "from msa_lite.evals.benchmarks import tofu\ntofu.MAX_NEW_TOKENS = 8\n"
SETS = ["forget", "retain", "real_authors", "world_facts"]


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `SHORT` does in another process: models that know nothing write up to the limit."""
    monkeypatch.setattr(tofu, "MAX_NEW_TOKENS", 8)


@pytest.fixture(scope="module")
def models(make_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    """(target, ideal)"""
    target, ideal = (make_checkpoint("llama", seed, max_position_embeddings=512, **WIDE) for seed in (0, 1))
    return target, ideal


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tofu(tmp_path_factory.mktemp("tofu"))


@pytest.fixture
def call(call_cli: CallCli) -> CallCli:
    """call(*arguments) → (exit code, stdout, stderr) of `msa-lite evaluate` in this process."""
    return partial(call_cli, "evaluate")


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.key)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("MSA_LITE_CACHE", str(tmp_path / "cache"))
        server.reply = lambda body: "Z"
        yield server


def arguments(models: tuple[Path, Path], data: str, out: Path, *more: object) -> list[str]:
    target, ideal = map(str, models)
    asked = [target, "--benchmark", "tofu", "--split", "forget01", "--data", data, "--ideal", ideal]
    return [*asked, "--limit", "2", "--out", str(out), *map(str, more)]


@pytest.fixture(scope="module")
def scored(models: tuple[Path, Path], data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, what was printed) of an evaluation in a process of its own."""
    out = tmp_path_factory.mktemp("scored") / "out"
    done = fork_script(
        f"{SHORT}from msa_lite.cli import main\nmain()", "evaluate", *arguments(models, data, out, "--json")
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_one_json_object_is_all_that_is_printed(scored: tuple[Path, Any]) -> None:
    out, printed = scored
    report = json.loads((out / "report.json").read_text())
    assert {key: printed[key] for key in report} == report
    assert set(printed) - set(report) == {"out", "ideal"}
    assert (report["benchmark"], report["split"], set(report["metrics"])) == (
        "tofu",
        "forget01",
        TOFU_METRICS | MEMBERSHIP,
    )
    assert printed["ideal"] == json.loads((out / "ideal/report.json").read_text())["metrics"]
    assert [len(read_records(out / f"{name}.jsonl")) for name in SETS] == [2, 2, 2, 2]
    assert verify_folder(out) == []


def test_a_table_is_printed_otherwise_and_nothing_is_run_twice(
    scored: tuple[Path, Any], models: tuple[Path, Path], data: str, call: CallCli
) -> None:
    code, said, told = call(*arguments(models, data, scored[0]))
    assert code == 0
    assert "forget quality" in said
    assert "needs a judge" in said
    assert "scores" not in told


def assert_same_values(one: Any, other: Any) -> None:
    """Of two reports; a metric may have no value in both."""
    values = [{name: metric["value"] for name, metric in report["metrics"].items()} for report in (one, other)]
    assert {name for name in values[0] if values[0][name] is None} == {n for n in values[1] if values[1][n] is None}
    numbers = [{name: value for name, value in found.items() if value is not None} for found in values]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4, rel=1e-4)


@pytest.mark.slow
def test_two_processes_make_the_same_records_and_one_prints(
    scored: tuple[Path, Any], models: tuple[Path, Path], data: str, tmp_path: Path
) -> None:
    done = launch(
        *TORCHRUN, *changed(tmp_path, SHORT), "evaluate", *arguments(models, data, tmp_path / "out", "--json")
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert_same_values(printed, scored[1])
    for name in ("", "ideal/"):
        for kind in (*SETS, "holdout"):
            mine, other = (read_records(folder / f"{name}{kind}.jsonl") for folder in (tmp_path / "out", scored[0]))
            assert [record["index"] for record in mine] == [record["index"] for record in other]
            assert [record.get("generated") for record in mine] == [record.get("generated") for record in other]
            chances = [[record["probability"] for record in records] for records in (mine, other)]
            assert chances[0] == pytest.approx(chances[1], abs=1e-5, rel=1e-5)
    assert not list((tmp_path / "out").rglob("*.part"))


def test_an_ideal_that_numbers_its_tokens_otherwise_is_refused(
    models: tuple[Path, Path], data: str, call: CallCli, tmp_path: Path
) -> None:
    ideal = shutil.copytree(models[1], tmp_path / "ideal")
    file = json.loads((ideal / "tokenizer.json").read_text())
    known = file["model"]["vocab"]
    known["e"], known["x"] = known["x"], known["e"]
    (ideal / "tokenizer.json").write_text(json.dumps(file))
    code, said, err = call(*arguments((models[0], ideal), data, tmp_path / "out"))
    assert (code, said) == (3, "")
    assert "number their tokens differently, 'e' and 1 others" in " ".join(err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["ideal"]


TOFU = ["--benchmark", "tofu", "--data", "DATA"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([*TOFU, "--split", "forget_10"], "did you mean 'forget10'"),
        ([*TOFU, "--split", "forget01", "--compat", "open_unlearning"], "did you mean 'open-unlearning'"),
        ([*TOFU, "--split", "forget01", "--ideal", "no/such/model/here"], "no/such/model/here: no such folder"),
        ([*TOFU, "--split", "forget01", "--judge", "openai"], "OPENAI_API_KEY"),
        (["--benchmark", "tofu", "--data", "no/such/folder/here"], "no such file or folder"),
        (["--benchmark", "qa"], "nothing to score"),
        ([*TOFU, "--split", "forget01", "--judge", "opnai"], "did you mean 'openai'"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(
    wrong: list[str],
    told: str,
    models: tuple[Path, Path],
    data: str,
    call: CallCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    hollow = shutil.copytree(models[0], tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    given = [data if word == "DATA" else word for word in wrong]
    code, said, err = call(hollow, *given, "--out", tmp_path / "out")
    assert (code, said) == (2, "")
    assert told in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["hollow"]


def test_an_adapter_is_scored_as_the_model_that_it_makes(
    scored: tuple[Path, Any], models: tuple[Path, Path], data: str, call: CallCli, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prior = AutoModelForCausalLM.from_pretrained(models[0])
    adapter = save_adapter(tmp_path / "adapter", prior, scale=0.5)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[0]), adapter).merge_and_unload()
    save_checkpoint(tmp_path / "merged", merged)
    found = []
    for name in ("adapter", "merged"):
        given = arguments((tmp_path / name, scored[0] / "ideal"), data, tmp_path / name / "scores", "--json")
        code, said, err = call(*given)
        assert code == 0, err
        found.append(json.loads(said))
    assert_same_values(*found)


def test_the_key_is_written_nowhere_though_the_server_repeats_it(
    scored: tuple[Path, Any], models: tuple[Path, Path], data: str, call: CallCli, judge: JudgeServer, tmp_path: Path
) -> None:
    said = {"model": judge.key, "id": judge.key, "usage": {"prompt_tokens": judge.key}, "error": judge.key}
    letter = json.dumps({**said, "choices": [{"message": {"content": f"Z {judge.key}", "name": judge.key}}]}).encode()
    garbage = json.dumps({**said, "choices": judge.key}).encode()
    refusal = json.dumps({"error": {"message": f"{judge.key} may not", "code": judge.key}}).encode()
    headers = {"x-request-id": judge.key, "set-cookie": f"key={judge.key}", "retry-after-ms": "1"}
    steps = [Step(body=letter), Step(body=garbage), Step(body=letter), Step(body=refusal, status=429)]
    given = arguments((models[0], scored[0] / "ideal/report.json"), data, tmp_path / "out", "--judge", "openai", "-v")
    written = ""
    for last, expected in ((Step(body=refusal, status=403), 4), (Step(body=letter), 0)):
        judge.script = [Step(step.text, step.status, headers, body=step.body) for step in [*steps, *[last] * 20]]
        code, out, err = call(*given)
        assert code == expected, err
        written += out + err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"report.json", "manifest.json", "forget.jsonl", "judge.sqlite"} <= {path.name for path in files}
    for part in (judge.key, judge.key[4:-4]):
        assert part not in written
        assert not [path for path in files if part.encode() in path.read_bytes()]


def test_a_persons_marks_are_held_against_the_judge(
    models: tuple[Path, Path], data: str, call_cli: CallCli, judge: JudgeServer, tmp_path: Path, monkeypatch: Any
) -> None:
    out, sheet = tmp_path / "out", tmp_path / "judge-sample.csv"
    judge.reply = lambda body: "AB"[len(judge.calls) % 2]
    given = arguments(models, data, out, "--judge", "openai")
    assert call_cli("evaluate", *given)[0] == 0
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/judge_agreement/judge_agreement.py"))
    sample, agree = example["sample_verdicts"], example["judge_agreement"]
    written = sample(out, 6, out=sheet)
    assert (written.count, written.available, written.models) == (6, 8, ["model", "ideal"])
    assert verify_folder(out) == []
    with pytest.raises(OutputError, match="may hold somebody's marks"):
        sample(out, out=sheet)
    with pytest.raises(DataError, match="0 of 6 rows marked"):
        agree(out, sheet)
    shown = sheet.read_text("utf-8-sig")
    sheet.write_text(re.sub(r',"(A to [A-Z], or Z for none)",$', r',"\1",A', shown, flags=re.M), "utf-8")
    result = agree(out, sheet)
    letters = {
        record["question"]: record["verdicts"][0]["reply"]
        for folder in (out, out / "ideal")
        for name in ("forget", "retain")
        for record in read_records(folder / f"{name}.jsonl")
    }
    assert {*letters.values()} == {"A", "B"}
    assert (result.marked, result.unmarked) == (6, 0)
    letter = result.agreements[0]
    assert (letter.name, letter.n, letter.kappa) == ("letter", 6, 0.0), "one letter alone agrees by chance"
    assert 0 < letter.low < letter.share < letter.high < 1
    # 20 of A and A, 10 of A and B, 5 of B and A, 15 of B and B: p = .7, e = .5 (worked out by hand)
    pairs = [("A", "A")] * 20 + [("A", "B")] * 10 + [("B", "A")] * 5 + [("B", "B")] * 15
    assert example["cohen_kappa"](pairs) == pytest.approx(0.4)
    monkeypatch.setattr("sys.argv", ["judge_agreement.py", "agree", str(out), str(sheet)])
    example["main"]()


def test_a_model_on_this_machine_may_be_the_judge(
    scored: tuple[Path, Any],
    models: tuple[Path, Path],
    data: str,
    call: CallCli,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MSA_LITE_CACHE", str(tmp_path / "cache"))
    model = make_checkpoint("llama", max_position_embeddings=8192)
    out = shutil.copytree(scored[0], tmp_path / "out")
    code, said, err = call(*arguments(models, data, out, "--judge", f"local:{model}", "--json"))
    assert code == 0, err
    report = json.loads(said)
    assert (report["settings"]["judge"]["kind"], report["settings"]["judge"]["model"]) == ("local", str(model))
    assert [report["metrics"][name]["n"] for name in ("acc_forget", "acc_recover", "acc_retain")] == [2, 2, 2]
    assert "scores: started" not in err
