"""Every option that decides scores, or a choice by them, is part of what they are known by (see test_identity).

The options are read from signatures and fields, so that a new one has to be put here: among those that decide, with
another value, or among those that do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose.choice import Candidates
from msa_lite.choose.rules import LeastExtraction, PaperScore
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.data import DataSource
from msa_lite.evals.judge.base import describe_judge
from msa_lite.evals.scores import evaluation
from msa_lite.evals.scores.suite import OwnQuestions, PublishedBenchmark, evaluate
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.settings import JudgeSettings
from tests.support.benchmark_data import TABLES, make_tofu, write_tofu
from tests.support.identity import (
    Change,
    Stop,
    assert_all_named,
    assert_not_told_apart,
    assert_told_apart,
    names_of,
    one_each,
)

Make = Callable[..., Path]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Change], Any]:
    """What an evaluation's manifest would record, by the options of `evaluate` and of its questions."""
    found: list[dict[str, Any]] = []

    def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
        found.append(inputs)
        raise Stop

    monkeypatch.setattr(evaluation, "is_finished", is_finished)
    monkeypatch.setenv("OPENAI_API_KEY", "any")

    def ask(options: Change) -> Any:
        options = dict(options)
        kind = next(kind for kind in (PublishedBenchmark, OwnQuestions) if names_of(kind)[0] in options)
        questions = kind(**{name: options.pop(name) for name in names_of(kind) if name in options})
        with pytest.raises(Stop):
            evaluate(**{"out": tmp_path / "out", "questions": questions, **options})
        return found.pop()

    return ask


def test_scores_are_known_by_each_option_of_an_evaluation(
    asked: Callable[[Change], Any], make_checkpoint: Make, tmp_path: Path
) -> None:
    one, two = str(make_checkpoint("llama", chat=True)), str(make_checkpoint("llama", seed=1, chat=True))
    plain = str(make_checkpoint("llama"))
    names = ["forget", "retain", "holdout", "more"]
    for name in names:
        lines = (f'{{"question": "Where is {name} {i}?", "answer": "At {i}."}}\n' for i in range(6))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sets = {name: DataSource(str(tmp_path / f"{name}.jsonl")) for name in names}
    more = sets.pop("more")
    qa = {"model": one, "limit": 4, **sets}
    tofu = {"model": one, "benchmark": "tofu", "data": write_tofu(tmp_path / "tofu"), "split": "forget01"}
    other_tofu = write_tofu(tmp_path / "other", {name: rows[1:] for name, rows in TABLES.items()})
    more_splits = {name.replace("01", "05"): rows for name, rows in TABLES.items() if "01" in name}
    changes: dict[str, tuple[Change, Change]] = {
        "model": (qa, {"model": two}),
        "forget": (qa, {"forget": more}),
        "retain": (qa, {"retain": more}),
        "holdout": (qa, {"holdout": more}),
        "ideal": (qa, {"ideal": two}),
        "tokenizer": (qa, {"tokenizer": plain}),
        "limit": (qa, {"limit": 3}),
        "max_new_tokens": (qa, {"max_new_tokens": 7}),
        "prompt": (qa, {"prompt": "plain"}),
        "seed": (qa, {"seed": 1}),
        "data": (tofu, {"data": other_tofu}),
        "judge": (tofu, {"judge": JudgeSettings("openai", base_url="http://localhost:1/v1")}),
        "compat": (tofu, {"compat": ["open-unlearning"]}),
        "split": (tofu | {"data": write_tofu(tmp_path / "splits", TABLES | more_splits)}, {"split": "forget05"}),
    }
    options = {name for kind in (OwnQuestions, PublishedBenchmark) for name in names_of(kind)}
    assert options | {*names_of(evaluate)} == {
        *changes,
        "benchmark",
        "questions",
        "out",
        "progress",
    }
    before: Any = None
    last: Change = {}
    for name, (base, change) in changes.items():  # those of one base stand together
        if base is not last:
            before, last = asked(base), base
            assert asked(base) == before
        assert asked({**base, **change}) != before, name


def test_a_judge_is_known_by_all_that_decides_its_verdicts(make_checkpoint: Make, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("restor: {system: Is it right}")
    base = JudgeSettings("openai", "a", "http://localhost:1/v1")
    changes = {"kind": "none", "model": "b", "base_url": "http://localhost:2/v1"}
    changes["prompts"] = str(prompts)
    assert_all_named(JudgeSettings, changes, {})
    assert_told_apart(lambda change: describe_judge(replace(base, **change)), one_each(changes))
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "judge")
    local = JudgeSettings("local", str(folder))
    before = describe_judge(local)
    assert describe_judge(local) == before
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert describe_judge(local) != before


def finished_evaluation(folder: Path, text: str) -> Path:
    with stage_folder(folder, "evaluation", {"text": text}) as partial:
        (partial / "forget.jsonl").write_text(text)
    assert load_manifest(folder)
    return folder


def test_a_choice_is_known_by_candidates_rows_and_rule(tmp_path: Path) -> None:
    tofu = make_tofu(tmp_path / "tofu")
    ideals = {name: finished_evaluation(tmp_path / name, name) for name in ("one", "two")}
    base = Candidates([{"alpha": 1.0}], load=list, made_of={"seed": 0})
    rows = Validation(tofu, LeastExtraction(0.9), ideals["one"], prior=ideals["one"])
    changes = {
        "values": [{"alpha": 2.0}],
        "made_of": {"seed": 1},
        "search": StrengthSearch(None, None),
    }
    assert_all_named(Candidates, changes, ["load", "known", "release", "remedies", "helped"])
    assert_told_apart(lambda change: replace(base, **change).inputs(rows), one_each(changes))
    validation = {
        "benchmark": tofu.only({"forget"}),
        "rule": PaperScore("tofu"),
        "ideal": ideals["two"],
        "judge": JudgeSettings("openai", "a"),
        "prior": ideals["two"],
    }
    assert_all_named(Validation, validation, ["unjudged"])
    assert_told_apart(lambda change: base.inputs(replace(rows, **change)), one_each(validation))
    kept = {"keep": {"rule": LeastExtraction(0.8)}}
    assert_told_apart(lambda change: base.inputs(replace(rows, **change)), kept)
    # What is scored already holds for other grids and rules, but not for other models or questions.
    grids = {name: {name: changes[name]} for name in ("values", "search")}
    assert_not_told_apart(lambda change: replace(base, **change).scored_by(rows), grids)
    others = {"made_of": {"made_of": changes["made_of"]}}
    assert_told_apart(lambda change: replace(base, **change).scored_by(rows), others)
