"""Rows of earlier requests are asked again: whether they stay forgotten stands in report, record and comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.pipeline.prepare.earlier import _draw
from msa_lite.pipeline.prepare.run import Run, msa_scope, prepare
from msa_lite.pipeline.purge.purge import purge
from msa_lite.recipe import load_recipe
from msa_lite.report.run.story import load_story
from msa_lite.report.verdict.figures import EarlierFacts
from tests.e2e.conftest import CallCli, tiny_recipe
from tests.support.pages import page_text


def request(history: Path, folder: Path, part: int, **keys: Any) -> dict[str, Any]:
    """A recipe for half of the rows to forget."""
    rows = (history / "data/forget.jsonl").read_text().splitlines(keepends=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rows-{part}.jsonl").write_text("".join(rows[part::2]))
    recipe = tiny_recipe(history, folder / f"run-{part}")
    recipe["forget"] = {"data": {"path": str(folder / f"rows-{part}.jsonl")}, "alpha": 1.5}
    recipe["retain"]["beta"] = 0.0
    recipe["vector"] = {"lora": {"rank": 8, "alpha": 16}, "epochs": 30, "learning_rate": 2e-2, "batch_size": 8}
    recipe["evaluate"] |= {"limit": None, "max_new_tokens": 40}
    return recipe | keys


@pytest.fixture(scope="module")
def first(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a first request, whose model recites none of its rows."""
    run = msa_lite.run(request(knowing, tmp_path_factory.mktemp("first"), 0)).folder
    assert recited(run, "unlearned") == 0 < recited(run, "target")
    return run


def recited(run: Path, model: str) -> int:
    return int(json.loads((run / "verdict.json").read_text())["forgotten"]["recited"][model])


@pytest.fixture(scope="module")
def second(knowing: Path, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a second request, beside the first."""
    return msa_lite.run(request(knowing, tmp_path_factory.mktemp("second"), 1, earlier=[str(first)])).folder


def facts_of(run: Path) -> EarlierFacts:
    facts = load_story(run).earlier_rows
    assert facts is not None
    return facts


def prepared(recipe: dict[str, Any]) -> Run:
    """The run of a recipe after all checks, before any work."""
    loaded = load_recipe(recipe)
    return prepare(loaded, msa_scope(loaded))


def test_rows_that_stay_forgotten_are_told_in_report_record_and_comparison_without_a_warning(
    first: Path, second: Path, call_cli: CallCli
) -> None:
    facts = facts_of(second)
    assert facts.scored is not None
    assert (facts.requests, facts.total, facts.scored.rows, facts.back, facts.unscored) == (1, 9, 9, {}, {})
    assert facts.scored.recited == {"target": recited(first, "target"), "unlearned": 0, "ideal": 0}
    assert facts.scored.control == "ideal"
    assert facts.warning is None
    text = page_text(second)
    assert facts.headline in text
    assert "No row comes back." in text
    assert not any("earlier requests were not scored" in limit for limit in load_story(second).limits)
    table = msa_lite.compare(str(second))
    values = {row.role: row.cells["accuracy_e"].value for row in table.rows}
    assert values == {"target": recited(first, "target") / 9, "ideal": 0.0, "method": 0.0}
    assert msa_lite.compare(str(first)).columns != table.columns, "a run without earlier requests has no such columns"
    assert call_cli("verify", second)[0] == 0


def back_on(first: Path, target: Path, folder: Path) -> Path:
    """A copy of a run whose model is the target again, so that its rows are back."""
    run = Path(shutil.copytree(first, folder / "run"))
    shutil.rmtree(run / "model")
    shutil.copytree(target, run / "model")
    return run


def test_rows_that_come_back_are_warned_of_with_their_request(
    knowing: Path, first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = back_on(first, knowing / "target", tmp_path / "back")
    tiny = {"vector": {"lora": {"rank": 1, "alpha": 1}, "epochs": 1, "learning_rate": 1e-6}}
    later = msa_lite.run(request(knowing, tmp_path, 1, target=str(run / "model"), **tiny)).folder
    facts, known = facts_of(later), recited(first, "target")
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


def lose(path: Path) -> None:
    path.unlink()


def change(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[1:], lines[0].replace("was born", "was found")]))


@pytest.mark.parametrize(
    ("spoil", "left", "says"),
    [(change, 8, "has changed: 1 of 9 rows are not there any more")],
)
def test_rows_that_are_gone_are_told_before_any_work_and_in_the_report(
    knowing: Path, first: Path, tmp_path: Path, spoil: Any, left: int, says: str
) -> None:
    run = Path(shutil.copytree(first, tmp_path / "copy"))
    rows = Path(shutil.copy(first.parent / "rows-0.jsonl", tmp_path / "theirs.jsonl"))
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(str(first.parent / "rows-0.jsonl"), str(rows)))
    spoil(rows)
    recipe = request(knowing, tmp_path, 1, earlier=[str(run)])
    ready = prepared(recipe)
    (note,) = [note for note in ready.notes if "earlier request" in note]
    assert str(run) in note
    assert says in note
    assert not Path(recipe["output"]).exists()
    later = msa_lite.run(recipe).folder
    facts = facts_of(later)
    assert (facts.scored.rows if facts.scored else 0) == left
    (line,) = facts.notes
    assert line in page_text(later)


def test_a_purge_removes_the_records_of_earlier_rows_and_keeps_their_counts(second: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(second, tmp_path / "copy"))
    records = list((run / "evaluation/earlier").glob("*/*.jsonl"))
    assert len(records) == 3
    facts, listed = facts_of(run), purge(run)
    assert any("the vectors of an earlier request" in place for place in listed.elsewhere)
    purge(run, remove=True)
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
