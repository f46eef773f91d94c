"""What a sweep refuses, by the command line: each with a message of its own, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import CallCli


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["retain.beta=[0.5,-1]"], "retain.beta"),
        (["forget.alpha=[1,1.0]"], "a value stands twice"),
        (["forget.alpha=[1,.nan]"], "forget.alpha"),
        (["forget.alpha=1", "retain.beta=0.5"], "forget.alpha, retain.beta: one point"),
        (["retain={beta: [0, 1]}"], "retain.data"),
        (["evaluate=null"], "do not set evaluate to null"),
        (["select.score=tofu"], "benchmark qa: does not measure what the choice needs (tofu)"),
        (["select.minimise=rouge_l_f"], "select.minimise: is gone: the rules are extraction and the paper's scores"),
        (["evaluate.ideal=null", "select.score=muse-gap"], "compares with the ideal model; give evaluate.ideal"),
        (["select.kep=1"], "did you mean 'keep'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    overrides: list[str], told: str, grid: dict[str, Any], call_cli: CallCli, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(grid))
    found, said, err = call_cli("run", str(tmp_path / "recipe.yaml"), "--until", "sweep", *overrides)
    assert (found, said) == (2, "")
    assert told in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
