"""`msa-lite attack`: the models of a run are attacked alike, and what comes back stands wherever a user looks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.attacks import attack as attack_module
from msa_lite.errors import OutputError
from msa_lite.io.finished.seal import verify_stages
from msa_lite.pipeline.run.report import write_run_report
from msa_lite.record.check import check_record
from msa_lite.record.seal import load_record
from msa_lite.report import load_report
from msa_lite.report.run.attacks import AttackFacts, facts_of
from tests.e2e.conftest import FEW, QUICK, CallCli
from tests.support.pages import page_text


@pytest.fixture
def copy(attacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(attacked, tmp_path / "run"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the models that are loaded to be attacked."""
    folders: list[str] = []
    load = attack_module.load_model

    def counted(folder: Path, *rest: Any, **options: Any) -> Any:
        folders.append(folder.name)
        return load(folder, *rest, **options)

    monkeypatch.setattr(attack_module, "load_model", counted)
    return folders


def test_each_model_is_attacked_alike_and_every_record_is_sealed(attacked: Path) -> None:
    for name in QUICK:
        report = json.loads((attacked / "attacks" / name / "report.json").read_text())
        assert (report["benchmark"], report["split"]) == ("attack", name)
        assert {key.rpartition(".")[2] for key in report["metrics"]} == {"ideal", "target", "unlearned"}
        for model in ("ideal", "target", "unlearned"):
            files = sorted(path.name for path in (attacked / "attacks" / name / model).glob("*.forget.jsonl"))
            assert files == sorted(path.name for path in (attacked / "attacks" / name / "ideal").glob("*.forget.jsonl"))
            rows = (attacked / "attacks" / name / model).glob("*.forget.jsonl")
            assert {len(path.read_text().splitlines()) for path in rows} == {4}
    assert not any(verify_stages(attacked).values())


def test_what_comes_back_stands_in_every_report(attacked: Path, call_cli: CallCli) -> None:
    whole = json.loads((attacked / "attacks/report.json").read_text())
    assert set(whole["metrics"]) == {f"{name}.unlearned" for name in QUICK}
    assert "Does it stay forgotten?" in page_text(attacked)
    page = (attacked / "report.html").read_text()
    assert 'id="attacks"' in page
    line = AttackFacts.headline(facts_of(load_report(attacked / "attacks")))
    assert line in page.partition("</header>")[0].replace("\u00a0", " ")
    story = json.loads((attacked / "report.json").read_text())
    assert [one["name"] for one in story["attacks"]["attacks"]] == QUICK
    assert "attacks/report.json" in load_record(attacked / "record.json").files
    assert check_record(attacked).faults == []
    code, table, _ = call_cli("compare", attacked, "--json")
    assert code == 0
    assert "attack_membership" in table


def test_a_rerun_prints_all_and_loads_nothing_and_a_removed_part_is_made_again(
    copy: Path, loads: list[str], call_cli: CallCli
) -> None:
    before = (copy / "attacks/report.json").read_bytes()
    code, out, _ = call_cli("attack", copy, *FEW, "--attacks", "prompt, membership")
    assert (code, loads) == (0, [])
    assert "comes back" in out
    assert out.count("\nAttacks: ") == 1
    assert "gain: what comes back, minus what is left" in out
    assert f"results: {copy}/attacks" in out
    shutil.rmtree(copy / "attacks/prompt/unlearned")
    msa_lite.attack(copy, QUICK, overrides=FEW)
    assert set(loads) == {"model"}, "of the unlearned model alone"
    assert (copy / "attacks/report.json").read_bytes() == before


def test_a_dry_run_tells_what_is_done_and_what_is_to_do(copy: Path, call_cli: CallCli) -> None:
    _, out, _ = call_cli("attack", copy, *FEW, "--attacks", "membership,prompt", "--dry-run")
    assert "All stages are done" in out
    shutil.rmtree(copy / "attacks/membership/unlearned")
    other = copy / "baselines/task_vector"
    before = sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*"))
    code, out, _ = call_cli("attack", copy, *FEW, "--attacks", "membership,prompt", "--dry-run", "--json")
    own = json.loads(out)
    assert code == 0
    (few,) = own["notes"]
    assert few.startswith("prompt: with 4 rows")
    states = {one["stage"]: one["state"] for one in own["stages"]}
    assert states.pop("membership: unlearned") == "to do"
    assert set(states.values()) == {"done"}
    assert str(copy / "attacks/membership/unlearned") in own["writes"]
    _, out, _ = call_cli("attack", other, *FEW, "--attacks", "membership", "--dry-run", "--json")
    assert [one["stage"] for one in json.loads(out)["stages"]] == ["membership: unlearned"], "the run has the others"
    assert sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*")) == before, "it wrote something"


def test_a_baseline_reads_the_records_of_target_and_ideal(copy: Path, loads: list[str]) -> None:
    folder = copy / "baselines/task_vector"
    result = msa_lite.attack(folder, ["membership"], overrides=FEW)
    assert set(loads) == {"model", "prior"}, "neither target nor ideal"
    assert result.folder == folder / "attacks"
    assert [path.name for path in (folder / "attacks/membership").iterdir() if path.is_dir()] == ["unlearned"]


def test_purge_removes_the_rows_and_keeps_the_results(copy: Path) -> None:
    (copy / "attacks/prompt/unlearned/plain.forget.jsonl").read_text()
    msa_lite.purge(copy, remove=True)
    assert not list(copy.glob("attacks/**/*.jsonl"))
    assert (copy / "attacks/report.json").is_file()
    write_run_report(copy)
    assert "Not tested here" in page_text(copy)
    assert "`msa-lite attack` does" not in page_text(copy), "it needs the rows"
    with pytest.raises(OutputError, match="purged"):
        msa_lite.attack(copy, QUICK)


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown": (["--attacks", "quantize"], "no attack 'quantize' (did you mean 'quantise'?)"),
    "other key": (["forget.alpha=2"], "of a finished run, only attack, evaluate.ideal"),
    "a set that is missing": (
        ["evaluate.holdout=null", "--attacks", "membership"],
        "error: membership: needs rows of the same kind that no model saw (evaluate.holdout)",
    ),
    "no control": (["evaluate.ideal=null", "evaluate.holdout=null"], "there is no control"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_work(case: str, copy: Path, loads: list[str], call_cli: CallCli) -> None:
    arguments, message = REFUSED[case]
    before = (copy / "attacks/report.json").read_bytes()
    code, _, err = call_cli("attack", copy, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert loads == []
    assert (copy / "attacks/report.json").read_bytes() == before
