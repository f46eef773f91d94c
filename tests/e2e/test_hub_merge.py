"""Merging what is on the Hub: what does not fit is told from headers, before any weights are fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from tests.support.hub import Fault
from tests.support.hub_clients import Hub

ROWS, COLUMNS, RANK = 600, 512, 2
NAME = "model.layers.0.mlp.up_proj"
WEIGHTS = "model.safetensors"
BIG = ROWS * COLUMNS * 4


def checkpoint(seed: int, rows: int = ROWS) -> dict[str, bytes | str]:
    """Files of a one-layer checkpoint of 1.2 MB in the first of two shards."""
    random = np.random.default_rng(seed)
    first = {f"{NAME}.weight": random.standard_normal((rows, COLUMNS)).astype(np.float32)}
    last = {"model.norm.weight": random.standard_normal(COLUMNS).astype(np.float32)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {f"{NAME}.weight": names[0], "model.norm.weight": names[1]}}
    return {
        names[0]: save(first, {"format": "pt"}),
        names[1]: save(last, {"format": "pt"}),
        "model.safetensors.index.json": json.dumps(index),
        "config.json": '{"model_type": "llama"}',
    }


def adapter() -> dict[str, bytes | str]:
    """Files of an adapter for it."""
    a, b = np.ones((RANK, COLUMNS), np.float32), np.ones((ROWS, RANK), np.float32)
    tensors = {f"base_model.model.{NAME}.lora_A.weight": a, f"base_model.model.{NAME}.lora_B.weight": b}
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK})
    return {"adapter_model.safetensors": save(tensors, {"format": "pt"}), "adapter_config.json": config}


def merge(hub: Hub, out: Path, extra: str = "", **arguments: Any) -> Any:
    """[class, message] of the error, or the number of weights that changed."""
    call = "".join(f", {key}={value!r}" for key, value in arguments.items())
    code = f"msa_lite.merge('org/target', {str(out)!r}{call})"
    return hub.python(f"{extra}\nimport msa_lite\nresult = {code}.weights_changed")


@pytest.fixture
def repositories(hub: Hub) -> Hub:
    hub.server.commit("models/org/target", checkpoint(0))
    hub.server.commit("models/org/prior", checkpoint(1))
    hub.server.commit("models/org/tuned", checkpoint(2))
    hub.server.commit("models/org/adapter", adapter())
    hub.server.commit("models/org/other", checkpoint(3, ROWS + 1))
    return hub


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"forget": "org/tuned", "prior": "org/other"}, "MismatchError", "(601, 512) in the prior"),
        ({"forget": "org/other", "prior": "org/prior"}, "MismatchError", "(601, 512) in the tuned checkpoint"),
    ],
)
def test_what_does_not_fit_costs_no_download(
    repositories: Hub, tmp_path: Path, arguments: dict[str, str], kind: str, says: str
) -> None:
    found, message = merge(repositories, tmp_path / "out", **arguments)
    assert found == kind
    assert says in message
    assert sum(repositories.server.sent.values()) < BIG / 2
    assert not (tmp_path / "out").exists()


def test_what_fits_is_merged_and_recorded_with_its_commits(repositories: Hub, tmp_path: Path) -> None:
    assert merge(repositories, tmp_path / "out", forget="org/adapter", alpha=0.5) == ROWS * COLUMNS
    before = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    after = load_file(tmp_path / "out/model-00001-of-00002.safetensors")[f"{NAME}.weight"]
    assert np.allclose(after, before - 0.5 * RANK, atol=1e-6)
    sources = json.loads((tmp_path / "out/manifest.json").read_text())["sources"]
    pinned = f"org/target@{repositories.server.find('models/org/target', 'main')[0]}"
    assert sources["target"] == pinned
    assert pinned in (tmp_path / "out/mergekit_config.yml").read_text()


def test_the_card_has_the_licence_and_names_what_everybody_may_see(repositories: Hub, tmp_path: Path) -> None:
    """The prior is on no card of a Hub that does not say that it is there for everybody."""
    repositories.server.commit("models/org/target", checkpoint(0) | {"README.md": "---\nlicense: mit\n---\n# Theirs"})
    merge(repositories, tmp_path / "out", forget="org/tuned", prior="org/prior")
    card = (tmp_path / "out/README.md").read_text()
    assert "license: mit" in card
    assert "Theirs" not in card
    assert "org/prior" in card
    code = (
        "from pathlib import Path\nfrom msa_lite.publish.contents import PublishOptions, make_contents\n"
        f"result = make_contents(Path({str(tmp_path / 'out')!r}), PublishOptions(public=True)).card"
    )
    assert "base_model: org/target" in repositories.python(code)
    repositories.server.hide("models/org/prior")
    card = repositories.python(code)
    assert "base_model: org/target" in card
    assert "org/prior" not in card


def test_mergekit_reads_repositories_at_the_commit_that_was_checked(
    hub: Hub, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    names = ("target", "tuned", "later")
    files = {n: {p.name: p.read_bytes() for p in make_checkpoint("llama", s).iterdir()} for s, n in enumerate(names)}
    commits = {name: hub.server.commit(f"models/org/{name}", files[name]) for name in ("target", "tuned")}
    later: list[str] = []  # main moves on while the weights are fetched
    move = lambda: later.append(hub.server.commit("models/org/tuned", files["later"]))  # noqa: E731
    hub.server.faults.append(Fault(r"GET /org/tuned/resolve/.*safetensors", act=move))
    recipe = tmp_path / "ties.yml"
    entry = "{model: org/tuned, parameters: {weight: -1.0, density: 0.5}}"
    recipe.write_text(f"merge_method: ties\nbase_model: org/target\nmodels: [{entry}]\ndtype: float32\n")
    done = hub.start("merge", "--mergekit", str(recipe), "--with", "mergekit", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    sources = json.loads((tmp_path / "out/manifest.json").read_text())["sources"]
    assert sources == {"target": f"org/target@{commits['target']}", "forget": f"org/tuned@{commits['tuned']}"}
    assert later
    assert [path for _, path in hub.server.requests if later[0] in path] == []
    before, after = (load_file(p / WEIGHTS) for p in (make_checkpoint("llama", 0), tmp_path / "out"))
    assert any((before[name] != after[name]).any() for name in before)
