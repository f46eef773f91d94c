"""Two requests against one target, one run each: the second model is one merge of both, and mistakes are refused."""

from __future__ import annotations

import io
import json
import logging
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.io.files.writing import hash_file, write_json
from msa_lite.io.finished.seal import load_manifest
from msa_lite.merger import merge
from msa_lite.pipeline.prepare.earlier import _draw, open_earlier
from msa_lite.recipe import load_recipe
from msa_lite.record.seal import RECORD_FILE, load_record, record_hash
from msa_lite.report.run.story import load_story
from msa_lite.report.verdict.figures import EarlierFacts
from msa_lite.strengths import Strengths
from tests.e2e.conftest import CallCli, prepared, tiny_recipe
from tests.support.merges import read_checkpoint
from tests.support.pages import page_text


def request(history: Path, folder: Path, part: int, **keys: Any) -> dict[str, Any]:
    """A recipe for half of the rows to forget, which nothing scores."""
    rows = (history / "data/forget.jsonl").read_text().splitlines(keepends=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rows-{part}.jsonl").write_text("".join(rows[part::2]))
    recipe = tiny_recipe(history, folder / f"run-{part}")
    recipe["forget"] = {"data": {"path": str(folder / f"rows-{part}.jsonl")}, "alpha": 1.0 - 0.3 * part}
    return recipe | {"evaluate": None, **keys}


@pytest.fixture(scope="module")
def first(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a first request, with a retain vector."""
    return msa_lite.run(request(history, tmp_path_factory.mktemp("first"), 0, request="first")).folder


@pytest.fixture(scope="module")
def both(history: Path, first: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """The recipe of a second request, its run, and what that logged."""
    recipe = request(history, tmp_path_factory.mktemp("both"), 1, earlier=[str(first)])
    log, logger = io.StringIO(), logging.getLogger("msa_lite")
    handler, level = logging.StreamHandler(log), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    run = msa_lite.run(recipe).folder
    logger.removeHandler(handler)
    logger.setLevel(level)
    return recipe, run, log.getvalue()


@pytest.fixture
def second(history: Path, tmp_path: Path, first: Path) -> dict[str, Any]:
    """The recipe of a second request, against the same target."""
    return request(history, tmp_path, 1, earlier=[str(first)])


def weight_files(folder: Path) -> dict[str, str]:
    """Hashes of the files that make the model, all but what tells of the run."""
    names = ("*.safetensors", "*config.json", "tokenizer*", "mergekit_config.yml")
    return {path.name: hash_file(path) for name in names for path in folder.glob(name)}


def merged_from_nothing(history: Path, out: Path, *runs: tuple[Path, float, float]) -> Path:
    """The merge of the vectors of these runs, each with alpha and beta."""
    return merge(
        str(history / "target"),
        out,
        forget=[str(run / "vectors/forget") for run, _, _ in runs],
        alpha=[alpha for _, alpha, _ in runs],
        retain=[str(run / "vectors/retain") for run, _, beta in runs if beta],
        beta=[beta for _, _, beta in runs if beta],
    ).folder


def test_the_second_model_is_the_merge_of_both_from_nothing(
    both: tuple[dict[str, Any], Path, str], first: Path, history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    _, run, log = both
    rebuilt = merged_from_nothing(history, tmp_path / "rebuilt", (first, 1.0, 0.5), (run, 0.7, 0.5))
    assert weight_files(run / "model") == weight_files(rebuilt)
    assert "mergekit_config.yml" in weight_files(rebuilt)
    # What is told: both vectors by folder, their interference, and the command that makes the same.
    assert str(first / "vectors/forget") in log
    assert "forget 1 and forget 2: cosine" in log
    command = shlex.split(log.partition("(leave a request out to drop it): ")[2].splitlines()[0])
    assert call_cli(*command[1:-1], tmp_path / "by-command")[0] == 0
    assert weight_files(tmp_path / "by-command") == weight_files(run / "model")
    text = page_text(run)
    assert "(θ_2 − θ_0)" in text
    assert "strengths | α = 0.7, β = 0.5\n" in text
    assert f"{first} | α = 1, β = 0.5\n" in text
    code, printed, _ = call_cli("mergekit", run / "recipe.yaml")
    assert code == 0
    listed = [entry["model"] for entry in yaml.safe_load(printed)["models"]]
    assert sum(name.endswith("vectors/forget") for name in listed) == 2
    # The records of both chain.
    record, former = load_record(run / RECORD_FILE), load_record(first / RECORD_FILE)
    assert [(item.request, item.record_sha256) for item in record.earlier] == [("first", record_hash(first))]
    assert record.previous_sha256 == hash_file(first / RECORD_FILE)
    assert {vector.revision for vector in former.vectors} < {vector.revision for vector in record.vectors}
    assert sorted(vector.weight for vector in record.vectors) == [-1.0, -0.7, 1.0]  # one retain vector for both
    assert "Σ" in record.formula
    code, told, _ = call_cli("verify", run)
    assert (code, f"the earlier request first, as {run / RECORD_FILE} names it" in told) == (0, True)


def test_a_rerun_does_nothing_and_one_without_the_earlier_request_only_merges(
    both: tuple[dict[str, Any], Path, str], history: Path, tmp_path: Path
) -> None:
    recipe, run, _ = both
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    labels: list[str] = []
    msa_lite.run(recipe | {"output": str(copy)}, progress=lambda label, done, total: labels.append(label))
    assert labels == []
    msa_lite.run(
        recipe | {"output": str(copy), "earlier": []}, progress=lambda label, done, total: labels.append(label)
    )
    assert set(labels) == {"merge"}
    assert weight_files(copy / "model") == weight_files(
        merged_from_nothing(history, tmp_path / "alone", (copy, 0.7, 0.5))
    )


@pytest.mark.slow
def test_runs_that_are_earlier_for_an_earlier_one_come_along_once(
    both: tuple[dict[str, Any], Path, str], first: Path, history: Path, tmp_path: Path
) -> None:
    middle = both[1]
    third = tiny_recipe(history, tmp_path / "third") | {"evaluate": None, "merge": {"as": "adapter"}}
    third["forget"] = {"data": {"path": str(history / "data/holdout.jsonl")}, "alpha": 0.4}
    third["earlier"] = [str(first), str(middle)]
    result = msa_lite.run(third)
    opened = open_earlier(load_recipe(result.folder / "recipe.yaml"))
    assert [(run.folder.name, run.strengths) for run in opened] == [
        ("run-0", Strengths(1.0, 0.5)),
        ("run-1", Strengths(0.7, 0.5)),
    ]
    assert open_earlier(load_recipe(third, [f"earlier=[{middle}]"])) == opened
    inputs = (load_manifest(result.folder / "adapter") or {})["inputs"]
    assert [name for name in inputs["strengths"] if "forget" in name] == ["forget 1", "forget 2", "forget 3"]
    # The adapter on the target is the merged model.
    parts = ((first, 1.0, 0.5), (middle, 0.7, 0.5), (result.folder, 0.4, 0.5))
    whole = read_checkpoint(merged_from_nothing(history, tmp_path / "whole", *parts))
    options: dict[str, Any] = {"retain": str(result.folder / "adapter"), "beta": 1.0, "alpha": 0.0}
    applied = read_checkpoint(merge(str(history / "target"), tmp_path / "applied", **options).folder)
    assert max(abs(applied[name] - whole[name]).max() / abs(whole[name]).max() for name in whole) < 1e-5


def copy_of(first: Path, folder: Path) -> Path:
    """A copy of the first run that may be spoilt."""
    return Path(shutil.copytree(first, folder / "copy"))


def purge(run: Path) -> None:
    shutil.rmtree(run / "vectors")


def purge_by_command(run: Path) -> None:
    purge(run)
    write_json(run / "purged.json", {"began": "2026-11-22T12:00:00Z"})


def damage(run: Path) -> None:
    path = run / "vectors/forget/adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def damage_record(run: Path) -> None:
    (run / "record.json").write_text("7")


def leave_unfinished(run: Path) -> None:
    shutil.rmtree(run / "model")
    (run / "report.json").unlink()


def refit(run: Path) -> None:
    for path in (run / "vectors/forget").iterdir():
        shutil.copy(run / "vectors/retain" / path.name, path)


def edit_recipe(run: Path, old: str, new: str) -> None:
    text = (run / "recipe.yaml").read_text()
    assert text.count(old) == 1
    (run / "recipe.yaml").write_text(text.replace(old, new))


def change_alpha(run: Path) -> None:
    edit_recipe(run, "  alpha: 1.0", "  alpha: 1.5")


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (purge, MismatchError, "its vectors are gone .*Fit them anew"),
        (purge_by_command, MismatchError, "its vectors were purged.* name its unlearned model as the target"),
        (damage, MismatchError, "not as it was written: adapter_model.safetensors: content changed"),
        (damage_record, MismatchError, "record.json: damaged"),
        (leave_unfinished, UsageError, "the run is not finished"),
        (lambda run: (run / "recipe.yaml").unlink(), UsageError, "is no run of msa-lite"),
        (refit, UsageError, "its vectors or strengths are newer than its model"),
        (change_alpha, UsageError, "its vectors or strengths are newer than its model"),
    ],
)
def test_an_earlier_run_that_cannot_be_used_is_refused_before_any_work(
    second: dict[str, Any], first: Path, tmp_path: Path, spoil: Any, error: type[MsaError], says: str
) -> None:
    run = copy_of(first, tmp_path)
    spoil(run)
    for verb in (msa_lite.dry_run, msa_lite.plan, msa_lite.run):
        with pytest.raises(error, match=f"earlier: {run}: {says}|{run}.*{says}"):
            verb(second | {"earlier": [str(run)]})
    assert not Path(second["output"]).exists()


def test_lists_that_make_no_sense_are_refused(second: dict[str, Any], first: Path, tmp_path: Path) -> None:
    copy = copy_of(first, tmp_path)
    inside = {"output": str(first / "inside")}
    for change, says in (
        ({"earlier": [str(first), str(first / "../run-0")]}, "stands there twice"),
        ({"earlier": [str(first), str(copy)]}, "remove the same rows"),
        ({"earlier": [second["output"]]}, "is this run itself"),
        ({"forget": load_recipe(first / "recipe.yaml").model_dump()["forget"]}, r"removes all these \d+ rows already"),
        (inside, "lies in this run's output, or around it"),
    ):
        with pytest.raises(UsageError, match=says):
            msa_lite.run(second | change)
    assert not Path(second["output"]).exists()


def test_a_run_on_another_target_is_refused_with_both_named(
    second: dict[str, Any], first: Path, history: Path, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=f"earlier: {first}: is a run on another target, .*target .*ideal"):
        msa_lite.run(second | {"target": str(history / "ideal")})
    # The same weights under another name, with other files beside them, are the same target.
    moved = Path(shutil.copytree(history / "target", tmp_path / "moved"))
    (moved / "generation_config.json").write_text('{"_from_model_config": true, "max_length": 7}')
    (moved / "manifest.json").unlink()  # which would not fit it
    assert prepared(second | {"target": str(moved)}).earlier


def test_rows_of_an_earlier_request_are_told(second: dict[str, Any], first: Path, tmp_path: Path) -> None:
    rows = [(tmp_path / "rows-1.jsonl").read_text(), (first.parent / "rows-0.jsonl").read_text().splitlines(True)[0]]
    (tmp_path / "rows-1.jsonl").write_text("".join(rows))
    assert f"1 of the 10 rows to forget are among those of the earlier request {first}" in str(prepared(second).notes)


def test_rows_of_an_earlier_request_are_not_kept(
    second: dict[str, Any], first: Path, history: Path, tmp_path: Path
) -> None:
    removed = (first.parent / "rows-0.jsonl").read_text().splitlines(True)
    kept = (history / "data/retain.jsonl").read_text().splitlines(True)
    (tmp_path / "all.jsonl").write_text("".join([*removed, *kept]))
    second["retain"]["data"] = {"path": str(tmp_path / "all.jsonl")}
    run, planned = prepared(second), msa_lite.plan(second)
    assert {row.question for row in run.rows["retain"]} == {json.loads(line)["question"] for line in kept}
    assert len(run.spared) == len(kept)
    note = f"retain: {len(removed)} of {len(removed) + len(kept)} rows"
    assert all(any(text.startswith(note) for text in notes) for notes in (run.notes, planned.notes))
    assert len(prepared(second | {"earlier": []}).spared) == len(removed) + len(kept), "without it, they may be kept"


# Rows of earlier requests are asked again: whether they stay forgotten stands in report, record and comparison.


def scored_request(history: Path, folder: Path, part: int, **keys: Any) -> dict[str, Any]:
    """A recipe for half of the rows to forget, which are all scored."""
    recipe = request(history, folder, part)
    recipe["forget"]["alpha"], recipe["retain"]["beta"] = 1.5, 0.0
    recipe["vector"] = {"lora": {"rank": 8, "alpha": 16}, "epochs": 30, "learning_rate": 2e-2, "batch_size": 8}
    recipe["evaluate"] = tiny_recipe(history, folder)["evaluate"] | {"limit": None, "max_new_tokens": 40}
    return recipe | keys


@pytest.fixture(scope="module")
def forgot(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a first request, whose model recites none of its rows."""
    run = msa_lite.run(scored_request(knowing, tmp_path_factory.mktemp("first"), 0)).folder
    assert recited(run, "unlearned") == 0 < recited(run, "target")
    return run


def recited(run: Path, model: str) -> int:
    return int(json.loads((run / "verdict.json").read_text())["forgotten"]["recited"][model])


@pytest.fixture(scope="module")
def forgot_both(knowing: Path, forgot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a second request, beside the first."""
    return msa_lite.run(scored_request(knowing, tmp_path_factory.mktemp("second"), 1, earlier=[str(forgot)])).folder


def facts_of(run: Path) -> EarlierFacts:
    facts = load_story(run).earlier_rows
    assert facts is not None
    return facts


def test_rows_that_stay_forgotten_are_told_in_report_record_and_comparison_without_a_warning(
    forgot: Path, forgot_both: Path, call_cli: CallCli
) -> None:
    facts = facts_of(forgot_both)
    assert facts.scored is not None
    assert (facts.requests, facts.total, facts.scored.rows, facts.back, facts.unscored) == (1, 9, 9, {}, {})
    assert facts.scored.recited == {"target": recited(forgot, "target"), "unlearned": 0, "ideal": 0}
    assert facts.scored.control == "ideal"
    assert facts.warning is None
    text = page_text(forgot_both)
    assert facts.headline in text
    assert "No row comes back." in text
    assert not any("earlier requests were not scored" in limit for limit in load_story(forgot_both).limits)
    table = msa_lite.compare(str(forgot_both))
    values = {row.role: row.cells["accuracy_e"].value for row in table.rows}
    assert values == {"target": recited(forgot, "target") / 9, "ideal": 0.0, "method": 0.0}
    assert msa_lite.compare(str(forgot)).columns != table.columns, "a run without earlier requests has no such columns"
    assert call_cli("verify", forgot_both)[0] == 0


def back_on(forgot: Path, target: Path, folder: Path) -> Path:
    """A copy of a run whose model is the target again, so that its rows are back."""
    run = Path(shutil.copytree(forgot, folder / "run"))
    shutil.rmtree(run / "model")
    shutil.copytree(target, run / "model")
    return run


def test_rows_that_come_back_are_warned_of_with_their_request(
    knowing: Path, forgot: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = back_on(forgot, knowing / "target", tmp_path / "back")
    tiny = {"vector": {"lora": {"rank": 1, "alpha": 1}, "epochs": 1, "learning_rate": 1e-6}}
    later = msa_lite.run(scored_request(knowing, tmp_path, 1, target=str(run / "model"), **tiny)).folder
    facts, known = facts_of(later), recited(forgot, "target")
    assert facts.scored is not None
    assert facts.scored.recited["unlearned"] == known
    assert facts.back == {str(run): known}
    assert str(facts.warning) in caplog.text
    assert f"{facts.warning}." in page_text(later)
    assert facts.warning in load_story(later).warnings, "at the top of the report"
    verdict = json.loads((later / "verdict.json").read_text())
    assert verdict["outcome"] == "FAIL"
    assert facts.reason in verdict["reasons"]
    assert str(run) not in (later / "record.json").read_text()


def test_rows_that_are_gone_are_told_before_any_work_and_in_the_report(
    knowing: Path, forgot: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(forgot, tmp_path / "copy"))
    lines, rows = (forgot.parent / "rows-0.jsonl").read_text().splitlines(keepends=True), tmp_path / "theirs.jsonl"
    rows.write_text("".join([*lines[1:], lines[0].replace("was born", "was found")]))
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(str(forgot.parent / "rows-0.jsonl"), str(rows)))
    recipe = scored_request(knowing, tmp_path, 1, earlier=[str(run)])
    ready = prepared(recipe)
    (note,) = [note for note in ready.notes if "earlier request" in note]
    assert str(run) in note
    assert "has changed: 1 of 9 rows are not there any more" in note
    assert not Path(recipe["output"]).exists()
    later = msa_lite.run(recipe).folder
    facts = facts_of(later)
    assert (facts.scored.rows if facts.scored else 0) == 8
    (line,) = facts.notes
    assert line in page_text(later)


def test_a_purge_removes_the_records_of_earlier_rows_and_keeps_their_counts(forgot_both: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(forgot_both, tmp_path / "copy"))
    records = list((run / "evaluation/earlier").glob("*/*.jsonl"))
    assert len(records) == 3
    facts, listed = facts_of(run), msa_lite.purge(run)
    assert any("the vectors of an earlier request" in place for place in listed.elsewhere)
    msa_lite.purge(run, remove=True)
    assert [path for path in records if path.exists()] == []
    assert facts_of(run) == facts


def test_a_sample_is_spread_over_requests_and_grows_by_the_new_ones(tmp_path: Path) -> None:
    requests = [(tmp_path / f"{n}", [f"{n}-{row}" for row in range(n + 1)]) for n in range(6)]

    def drawn(of: Sequence[tuple[Path, list[str]]], most: int) -> dict[str, list[str]]:
        return {folder.name: rows for folder, rows in _draw(dict(of), most, seed=0).items()}

    assert sum(map(len, drawn(requests, 100).values())) == 21, "all, if they are fewer"
    assert {name: len(rows) for name, rows in drawn(requests, 11).items()} == dict.fromkeys("012345", 2) | {"0": 1}
    assert len(drawn(requests, 4)) == 4
    former, later = ({row for rows in drawn(of, 9).values() for row in rows} for of in (requests[:5], requests))
    assert {row[0] for row in later - former} == {"5"}, "only rows of the new request are new"
    assert len(former - later) == len(later - former) <= 2
    assert {row for rows in drawn(requests[::-1], 9).values() for row in rows} == later
