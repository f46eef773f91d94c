"""What a sweep refuses, by the command line: each with a message of its own, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import CallCli


@pytest.mark.parametrize(
    ("overrides", "code", "told"),
    [
        (["forget.alpha=[]"], 2, "forget.alpha"),
        (["retain.beta=[]"], 2, "retain.beta"),
        (["forget.alpha=[0.5,-1]"], 2, "forget.alpha"),
        (["retain.beta=[0.5,-1]"], 2, "retain.beta"),
        (["forget.alpha=[0.5,0.5]"], 2, "a value stands twice"),
        (["forget.alpha=[1,1.0]"], 2, "a value stands twice"),
        (["forget.alpha=[1,.inf]"], 2, "forget.alpha"),
        (["forget.alpha=[1,.nan]"], 2, "forget.alpha"),
        (["forget.alpha=[1,two]"], 2, "forget.alpha"),
        (["forget.alpha=1", "retain.beta=0.5"], 2, "forget.alpha, retain.beta: one point"),
        (["forget.alpha=[1]", "retain.beta=[0.5]"], 2, "forget.alpha, retain.beta: one point"),
        (["evaluate=null"], 2, "do not set evaluate to null"),
        (["select.score=tofu"], 2, "benchmark qa: does not measure what the choice needs (tofu)"),
        (["select.score=tufo"], 2, "select.score"),
        (["select.maximise=rouge_l_rr"], 2, "did you mean 'rouge_l_r'"),
        (["select.maximise=rouge_l_r", "select.score=extraction"], 2, "cannot all decide"),
        (["select.maximise=rouge_l_r", "select.minimise=rouge_l_f"], 2, "cannot all decide"),
        (["select.subject_to={rouge_l_r: '>= 0.5'}"], 2, "subject_to needs a metric to maximise or minimise"),
        (["select.minimise=rouge_l_f", "select.subject_to={rouge_l_r: '> 0.5'}"], 2, "r: is no condition"),
        (["select.minimise=rouge_l_f", "select.subject_to={rouge_l_r: '>= 0.5 * prior'}"], 2, "r: is no condition"),
        (["select.minimise=rouge_l_f", "select.subject_to={rouge_l_r: '>= 0.95 target'}"], 2, "r: is no condition"),
        (["select.minimise=rouge_l_f", "select.subject_to={rouge_l_x: '>= 0.5'}"], 2, "did you mean 'rouge_l_"),
        (
            ["evaluate.ideal=null", "select.minimise=rouge_l_f", "select.subject_to={rouge_l_r: '>= 0.9 * ideal'}"],
            2,
            "compares with the ideal model; give evaluate.ideal",
        ),
        (["evaluate.ideal=null", "select.score=muse-gap"], 2, "compares with the ideal model; give evaluate.ideal"),
        (["select.maximise=acc_forget"], 2, "acc_forget"),
        (["select.by=author"], 2, "select.by author: your own rows have no authors"),
        (["select.by=autor"], 2, "select.by"),
        (["evaluate.limit=1"], 2, "retain: 1 rows"),
        (["select.validation=1"], 2, "select.validation"),
        (["select.validation=0"], 2, "select.validation"),
        (["select.refine=-1"], 2, "select.refine"),
        (["select.refine=100"], 2, "select.refine"),
        (["select.refin=1"], 2, "did you mean 'refine'"),
        (["select.four_bit=true", "vector.mode=full"], 2, "select.four_bit: only adapters"),
        (["forget.data.columns.question=none"], 3, "no column 'none'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    overrides: list[str], code: int, told: str, grid: dict[str, Any], call_cli: CallCli, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(grid))
    found, said, err = call_cli("sweep", str(tmp_path / "recipe.yaml"), *overrides)
    assert (found, said) == (code, "")
    assert told in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
