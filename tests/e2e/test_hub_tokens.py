"""Checkpoints by their number of tokens, from a Hub on loopback; and runs that choose their prior from a history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save

from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli
from tests.support.hub_clients import Hub

REPO = "models/org/olmo"
EARLY, LATE = "stage1-step920000-tokens3859B", "stage1-step928646-tokens3896B"
FIRST, SECOND = "stage2-ingredient1-step1000-tokens5B", "stage2-ingredient2-step1000-tokens5B"


def checkpoint(number: int) -> dict[str, bytes | str]:
    """Files of a checkpoint that differs from others by its weights alone."""
    weights = {"model.embed_tokens.weight": np.full((4, 3), number, np.float32)}
    return {"model.safetensors": save(weights, {"format": "pt"}), "config.json": '{"model_type": "llama"}'}


@pytest.fixture
def commits(hub: Hub) -> dict[str, str]:
    """Commits by branch of a repository with branches as OLMo 2 has them."""
    branches = ["main", EARLY, LATE, FIRST, SECOND]
    return {branch: hub.server.commit(REPO, checkpoint(i), branch) for i, branch in enumerate(branches)}


def test_a_merge_takes_numbers_for_every_model_and_records_commits(
    hub: Hub, commits: dict[str, str], tmp_path: Path
) -> None:
    models = ["--target", "org/olmo", "--forget", "org/olmo@tokens=3896B", "--prior", "org/olmo@tokens=3859B"]
    done = hub.start("merge", *models, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/manifest.json").read_text())["sources"] == {
        "target": f"org/olmo@{commits['main']}",
        "forget": f"org/olmo@{commits[LATE]}",
        "prior": f"org/olmo@{commits[EARLY]}",
    }
    # θ_D − α (θ_1 − θ_0) = 0 − 1 · (2 − 1)
    assert (tmp_path / "out/model.safetensors").read_bytes() == checkpoint(-1)["model.safetensors"]
    printed = hub.start("mergekit", *models)
    assert f"org/olmo@{commits[EARLY]}" in printed.stdout, printed.stderr
    assert "tokens=" not in printed.stdout


def test_a_run_takes_the_prior_from_its_history_says_why_and_resumes(
    recipe: dict[str, Any], history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    prior = recipe.pop("prior")  # the target, saved after the exposure, stands for another one
    recipe["history"] = {
        "checkpoints": [
            {"checkpoint": str(history / "target"), "seen_tokens": "30k"},
            {"checkpoint": prior, "seen_tokens": "20k"},
            {"checkpoint": str(history / "start"), "seen_tokens": 0},
        ],
        "exposure": ["40k", "25k"],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    why = (
        f"prior: {history / 'prior'}, seen 20k tokens: the latest of 2 checkpoints from before the forget data first "
        "came in at 25k tokens (5k tokens before; 1 later checkpoint has seen it)"
    )
    code, out, err = call_cli("run", path, "--json")
    assert code == 0, err
    assert err.splitlines()[1] == why  # below the line that says what is run
    assert set(json.loads(out)["metrics"]) == {"target", "ideal", "unlearned"}
    resolved = tmp_path / "run/recipe.yaml"
    assert f"# {why}\n" in resolved.read_text()
    pinned = load_recipe(resolved)
    assert (pinned.prior, pinned.history) == (str(history / "prior"), None)

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("manifest.json")}
    code, _, err = call_cli(resolved)
    assert (code, why in err) == (0, False)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("manifest.json")} == before
    code, _, err = call_cli("mergekit", path)
    assert (code, err.strip()) == (0, why)
