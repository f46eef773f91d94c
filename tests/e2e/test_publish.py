"""From a merged folder, or a run, to a Hub on loopback and back into transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msa_lite import run
from msa_lite.errors import StageError, UsageError
from msa_lite.io.files.writing import json_form
from msa_lite.merger import merge, merge_adapters
from tests.e2e.conftest import CallCli
from tests.support.hub import WRITER, Fault, HubServer
from tests.support.hub_clients import REPO, client_of

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
Model = Callable[..., Path]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server, client_of(server):
        yield server


@pytest.fixture(scope="module")
def unlearned(make_checkpoint: Model, make_adapter: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and the same update as a model in shards and as an adapter."""
    folder = tmp_path_factory.mktemp("unlearned")
    target, vector = make_checkpoint("llama", shard="100KB"), make_adapter("llama")
    merge(target=str(target), forget=str(vector), alpha=1.0, out=folder / "model")
    merge_adapters(target=str(target), forget=str(vector), alpha=1.0, out=folder / "adapter")
    return {"target": target, "model": folder / "model", "adapter": folder / "adapter", "vector": vector}


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(12)[None]).logits


def test_a_model_is_sent_and_loads_straight_from_the_hub(
    hub: HubServer, unlearned: dict[str, Path], tmp_path: Path, call_cli: CallCli
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert len(list(unlearned["model"].glob("*.safetensors"))) > 1
    status, out, err = call_cli("publish", unlearned["model"], REPO, "--yes")
    assert status == 0, err
    assert f"{hub.url}/{REPO} (private, commit " in out
    assert f"new_version: {REPO}" in out
    assert f"to:     {REPO} (new, private) as alice, at {hub.url}" in err
    theirs = AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path)
    own = AutoModelForCausalLM.from_pretrained(unlearned["model"])
    assert torch.equal(logits(theirs), logits(own))
    AutoTokenizer.from_pretrained(REPO, cache_dir=tmp_path)
    for name, data in hub.on(REPO).items():
        assert str(unlearned["model"].parent).encode() not in data, name

    status, again, _ = call_cli("publish", unlearned["model"], REPO, "--yes", "--json")
    assert (status, json.loads(again)["changed"]) == (0, False)


def test_an_adapter_is_sent_and_loads_on_its_target(
    hub: HubServer, unlearned: dict[str, Path], tmp_path: Path, call_cli: CallCli
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    status, out, err = call_cli("publish", unlearned["adapter"].parent, REPO, "--as", "adapter", "--yes")
    assert status == 0, err
    assert "new_version" not in out
    assert "adapter_model.safetensors" in hub.on(REPO)
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(unlearned["target"]), place, cache_dir=tmp_path)
        for place in (REPO, str(unlearned["adapter"]))
    ]
    assert torch.equal(logits(models[0]), logits(models[1]))


def test_a_dry_run_asks_nobody_and_without_consent_nothing_is_sent(
    hub: HubServer, unlearned: dict[str, Path], call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = call_cli("publish", unlearned["model"], REPO)
    assert (status, out) == (2, "")
    assert "nobody to ask; give --yes" in err
    status, out, err = call_cli("publish", unlearned["vector"], REPO, "--yes")
    assert (status, "neither model nor adapter of msa-lite" in err) == (2, True)
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    status, out, _ = call_cli("publish", unlearned["model"], REPO, "--dry-run")
    assert (status, hub.requests) == (0, [])
    assert out.startswith("---\n")
    assert "model-00001-of-" in out
    status, out, _ = call_cli("publish", unlearned["model"], REPO, "--dry-run", "--json")
    assert {file["name"] for file in json.loads(out)["files"]} >= {"config.json", "README.md"}
    assert call_cli("publish", unlearned["model"], "alice/no such", "--dry-run")[0] == 2
    assert call_cli("publish", unlearned["model"], REPO, "--yes")[0] == 2
    assert hub.branch_names(REPO) == []


@pytest.mark.parametrize("answer", ["y\n", "n\n"])
def test_in_a_terminal_the_user_is_asked(
    hub: HubServer,
    unlearned: dict[str, Path],
    call_cli: CallCli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: str,
) -> None:
    path = tmp_path / "answer"
    path.write_text(answer)
    monkeypatch.setattr("msa_lite.cli.handing_on.in_terminal", lambda: True)
    with path.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        status, _, err = call_cli("publish", unlearned["model"], REPO)
    assert "Send this? [y/N]" in err
    assert (status, hub.branch_names(REPO)) == ((0, ["main"]) if answer == "y\n" else (130, []))


def test_no_token_stands_in_any_output_or_file(hub: HubServer, unlearned: dict[str, Path], call_cli: CallCli) -> None:
    for fault in (
        Fault("PUT /lfs", 500, times=99, words=WRITER),
        Fault("PUT /lfs", times=99),
        Fault("POST /.*/commit/", 403, words=f"not with {WRITER}"),  # the weights are stored by then
        Fault("whoami", 401, words=WRITER),
    ):
        hub.faults = [fault]
        status, out, err = call_cli("-v", "publish", unlearned["model"], REPO, "--yes")
        assert status in (2, 4)
        assert "error: " in err
        assert WRITER not in out + err
    hub.faults = []
    status, out, err = call_cli("-v", "publish", unlearned["model"], REPO, "--yes")
    assert (status, WRITER in out + err) == (0, False)
    assert [name for name, data in hub.on(REPO).items() if WRITER.encode() in data] == []


def test_a_run_publishes_at_its_end_and_a_rerun_only_publishes(hub: HubServer, recipe: dict[str, Any]) -> None:
    folder = Path(recipe["output"])
    recipe["publish"] = {"repo": "forgotten"}
    hub.faults = [Fault("/commit/", 403)]
    with pytest.raises(StageError, match=r"the run is finished, but not published: .*403"):
        run(recipe)
    assert (folder / "report.json").is_file()
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    result = run(recipe)
    assert result is not None
    assert json_form(result)["published"]["repo"] == REPO
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == times
    assert hub.on(REPO)["model.safetensors"] == (folder / "model/model.safetensors").read_bytes()
    assert hub.private[REPO] is True


def test_a_run_that_could_not_publish_does_not_start(hub: HubServer, recipe: dict[str, Any]) -> None:
    recipe["publish"] = {"repo": "others/x"}
    with pytest.raises(UsageError, match="no member of others"):
        run(recipe)
    recipe["publish"] = {"repo": REPO, "private": False}
    with pytest.raises(UsageError, match=r"publish\.license: the card of the target names no licence"):
        run(recipe)
    assert not Path(recipe["output"]).exists()
