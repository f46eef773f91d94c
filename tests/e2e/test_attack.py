"""`msa-lite attack`: the models of a run are attacked alike, and what comes back stands wherever a user looks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.attacks import attack as attack_module
from msa_lite.attacks.attack import Subject, Trial
from msa_lite.attacks.prompt import Prompting
from msa_lite.errors import MsaError, OutputError, StageError, UsageError
from msa_lite.evals.benchmarks.benchmark import Records
from msa_lite.io.finished.seal import verify_stages
from msa_lite.pipeline.attack.campaign import Campaign, open_attacks
from msa_lite.pipeline.baseline.settings import baseline_scope
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.run.report import write_run_report
from msa_lite.pipeline.verbs.commands import find_verb
from msa_lite.recipe import load_recipe
from msa_lite.record.check import check_record
from msa_lite.record.seal import load_record
from msa_lite.report import load_report
from msa_lite.report.run.attacks import AttackFacts, facts_of
from tests.e2e.conftest import FEW, QUICK, CallCli, read_lines
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


# Which campaign against a run is settled: which rows, which results of before, and what is refused before any work.


def planned(folder: Path, names: Sequence[str], *changes: str, method: str = "msa", **replaced: Any) -> Campaign:
    """The campaign against the run in a folder; without the checks of the command."""
    opened = open_run(folder)
    recipe = load_recipe(opened.recipe, [*FEW, *changes])
    run = prepare(recipe, msa_scope(recipe) if method == "msa" else baseline_scope(method, recipe)[0])
    return open_attacks(replace(run, **replaced), opened.result, names)


def test_results_beside_another_ideal_or_on_other_rows_are_not_kept(copy: Path) -> None:
    prior = yaml.safe_load((copy / "recipe.yaml").read_text())["prior"]
    for change in (f"evaluate.ideal={prior}", "evaluate.ideal=null", "attack.rows=3"):
        campaign = planned(copy, ["membership"], change)
        assert [*campaign.attacks] == ["membership"], change
        others = dict.fromkeys(set(QUICK) - {"membership"}, "was made with other models or rows before; make it again")
        assert campaign.left_out == others
    assert set(planned(copy, ["sample"]).attacks) == {"sample", *QUICK}


def test_all_forget_rows_are_attacked_also_those_that_the_choice_was_made_by(copy: Path) -> None:
    path = Path(yaml.safe_load((copy / "recipe.yaml").read_text())["forget"]["data"]["path"])
    campaign = planned(copy, QUICK, "attack.rows=400", "evaluate.limit=null")
    questions = [row["question"] for row in read_lines(path)]
    assert [row.question for row in campaign.ground.forget] == questions


def test_models_that_an_attack_cannot_be_made_on_are_told_before_any_work(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.attacks.relearn.streams", lambda source: True)
    campaign = planned(copy, [])
    assert "relearn" not in campaign.attacks
    assert "too large for the GPU's memory to be tuned" in campaign.left_out["relearn"]
    with pytest.raises(UsageError, match=r"relearn: .*too large for the GPU's memory"):
        planned(copy, ["relearn"])


LATE: Mapping[str, tuple[list[str], str]] = {
    "no control": (["evaluate.ideal=null", "evaluate.holdout=null"], "there is no control"),
    "a set that is missing": (["evaluate.holdout=null", "attack.attacks=[membership]"], "membership: needs rows of"),
}


@pytest.mark.parametrize("method", ["msa", "grad_diff"])
@pytest.mark.parametrize("case", LATE)
def test_attacks_that_end_a_run_are_checked_before_it(case: str, method: str, finished: Path) -> None:
    changes, message = LATE[case]
    recipe = load_recipe(open_run(finished).recipe, ["attack.attacks=[prompt]", *changes])
    verb = find_verb("run" if method == "msa" else "baseline", recipe, method)
    run = prepare(recipe, verb.scope)
    with pytest.raises(MsaError, match=message):
        verb.check(run)


def fail(self: Prompting, subject: Subject, *_: Any) -> Iterator[tuple[Trial, Records]]:
    raise StageError("out of memory")
    yield


def test_an_attack_that_fails_costs_no_other_one_its_report(
    copy: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "attacks/prompt")
    (copy / "attacks/report.json").unlink()
    monkeypatch.setattr(Prompting, "run", fail)
    code, _, err = call_cli("attack", copy, *FEW, "--attacks", "membership,prompt")
    assert code == 4
    assert "prompt: failed on ideal: out of memory" in err
    settings = json.loads((copy / "attacks/report.json").read_text())["settings"]
    assert [one["name"] for one in settings["attacks"]] == ["membership"]
    assert settings["left_out"] == {"prompt": "failed on ideal: out of memory"}
    assert "Not made: prompt: failed on ideal" in page_text(copy)
