"""What a run hands on: its model on a Hub on loopback and back, its removal record, its card."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import msa_lite
from msa_lite.errors import FormatError, StageError, UsageError
from msa_lite.io.files.writing import hash_file, json_form
from msa_lite.io.finished.seal import CARD_FILE, load_manifest, verify_folder
from msa_lite.io.weights.hub import hash_content
from msa_lite.merger import merge, merge_adapters
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.record.check import check_record
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, load_record
from msa_lite.report.page.card import model_card
from tests.e2e.conftest import CallCli, read_lines, times
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
        msa_lite.run(recipe)
    assert (folder / "report.json").is_file()
    before = times(folder, "*.safetensors")
    result = msa_lite.run(recipe)
    assert result is not None
    assert json_form(result)["published"]["repo"] == REPO
    assert times(folder, "*.safetensors") == before
    assert hub.on(REPO)["model.safetensors"] == (folder / "model/model.safetensors").read_bytes()
    assert hub.private[REPO] is True


def test_a_run_that_could_not_publish_does_not_start(hub: HubServer, recipe: dict[str, Any]) -> None:
    recipe["publish"] = {"repo": "others/x"}
    with pytest.raises(UsageError, match="no member of others"):
        msa_lite.run(recipe)
    recipe["publish"] = {"repo": REPO, "private": False}
    with pytest.raises(UsageError, match=r"publish\.license: the card of the target names no licence"):
        msa_lite.run(recipe)
    assert not Path(recipe["output"]).exists()


# The removal record at the end of a run: what it holds, what it never holds, and how long it stays the same.


@pytest.fixture
def run(chosen: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """A copy of the run, for a test to disturb."""
    return Path(shutil.copytree(chosen[1], tmp_path / "copy"))


def test_the_record_says_what_was_done(chosen: tuple[dict[str, Any], Path], history: Path) -> None:
    run = chosen[1]
    record = load_record(run / RECORD_FILE)
    choice = json.loads((run / "sweep/choice.json").read_text())
    strengths = {name: choice[name] for name in ("alpha", "beta")}
    assert (record.request, record.method, record.strengths) == ("GDPR 2026-017", "msa", strengths)
    for name in ("target", "prior", "ideal"):
        assert record.models[name].revision == hash_content(history / name)
        assert record.models[name].name == "local folder"
    assert record.result.revision == hash_content(run / "model")
    assert [(vector.name, vector.weight) for vector in record.vectors] == [
        ("forget", -choice["alpha"]),
        ("retain", choice["beta"]),
    ]
    hashes = [hash_content(run / "vectors" / name) for name in ("forget", "retain")]
    assert [vector.revision for vector in record.vectors] == hashes
    assert record.row_counts == {"forget": 18, "retain": 18}
    verdict = json.loads((run / "verdict.json").read_text())
    assert (record.verdict.outcome, record.verdict.sentence) == (verdict["outcome"], verdict["sentence"])
    names = ["recipe.yaml", "verdict.json", "model/manifest.json", "report.json", "report.html"]
    assert record.files == {name: hash_file(run / name) for name in names}
    assert record.started <= record.finished


def test_the_record_holds_no_row_no_path_and_no_plain_hash(chosen: tuple[dict[str, Any], Path], history: Path) -> None:
    run = chosen[1]
    text = (run / RECORD_FILE).read_text()
    rows = read_lines(history / "data/forget.jsonl")
    parts = [part for row in rows for part in row.values()]
    words = {word for part in parts for word in part.split() if word.istitle() and len(word) > 5}
    hashes = [row["sha256"] for row in read_lines(run / "vectors/forget/rows.jsonl")]
    paths = [str(run), str(history), str(Path.home()), os.sep + "tmp"]
    manifest = load_manifest(run / "vectors/forget")
    assert manifest is not None
    derived = [manifest["inputs"]["examples"], manifest["files"]["rows.jsonl"]["sha256"]]
    assert len(words) > 3
    assert [item for item in [*parts, *words, *hashes, *paths, *derived] if item in text] == []
    assert (run / KEY_FILE).read_text().strip() not in text
    assert stat.S_IMODE((run / KEY_FILE).stat().st_mode) == 0o600
    assert any(value in (run / "recipe.yaml").read_text() for value in paths)  # where such things do stand


def test_a_rerun_leaves_the_record_and_a_changed_one_writes_it_anew(
    chosen: tuple[dict[str, Any], Path], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = chosen[0] | {"output": str(run)}
    msa_lite.run(recipe)  # of the copy: its recipe.yaml has another output
    before = (run / RECORD_FILE).read_bytes()
    msa_lite.run(recipe)
    assert (run / RECORD_FILE).read_bytes() == before
    made = times(run, "*.safetensors")
    labels: list[str] = []
    msa_lite.run(recipe | {"request": "another"}, progress=lambda label, done, total: labels.append(label))
    assert "changed since the last run: output" in caplog.text  # it is a copy
    assert "request" not in caplog.text
    assert labels == []  # the id of a request decides no result
    assert times(run, "*.safetensors") == made
    assert load_record(run / RECORD_FILE).request == "another"
    key = (run / KEY_FILE).read_bytes()
    msa_lite.run(recipe, ["forget.alpha=0.5"])
    record = load_record(run / RECORD_FILE)
    assert record.strengths["alpha"] == 0.5
    assert record.result.revision == hash_content(run / "model")
    assert (run / KEY_FILE).read_bytes() == key
    assert check_record(run).faults == []


def test_the_recipe_holds_no_plain_hash_of_the_rows_either(
    chosen: tuple[dict[str, Any], Path], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = [line for line in (run / "recipe.yaml").read_text().splitlines() if line.startswith("# rows learnt")]
    keyed = [f"# rows learnt, {name}: hmac-sha256:…" for name in ("forget", "retain")]
    assert [re.sub("[0-9a-f]{64}", "…", line) for line in notes] == keyed
    for text, warned in (("hmac-sha256:0", True), ("sha256:0", False)):  # the latter is an earlier version's
        changed = re.sub("(?<=rows learnt, forget: ).*", text, (run / "recipe.yaml").read_text())
        (run / "recipe.yaml").write_text(changed)
        caplog.clear()
        msa_lite.run(chosen[0] | {"output": str(run)})
        assert ("content of rows learnt, forget" in caplog.text) is warned


def test_verify_checks_run_record_and_rows(run: Path, history: Path, call_cli: CallCli) -> None:
    status, out, _ = call_cli("verify", run)
    assert (status, "not signed" in out) == (0, True)
    assert "agrees with recipe.yaml, verdict.json, report.html, report.json, model/manifest.json" in out
    status, out, _ = call_cli("verify", run, "--rows", history / "data/forget.jsonl")
    assert (status, out.splitlines()[-1]) == (0, "18 of 18 rows were to be forgotten")
    status, out, _ = call_cli("verify", run, "--rows", history / "data/retain.jsonl")
    assert (status, out.splitlines()[-1]) == (0, "0 of 36 rows were to be forgotten")
    (run / RECORD_FILE).write_text((run / RECORD_FILE).read_text().replace("GDPR 2026-017", "GDPR 2026-018"))
    status, _, err = call_cli("verify", run)
    assert (status, "record_sha256 does not fit it" in err) == (3, True)


def test_a_downloaded_model_is_checked_against_the_record(
    hub: HubServer, run: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM

    assert call_cli("publish", run, REPO, "--yes", "--accept")[0] == 0
    place = Path(snapshot_download(REPO, cache_dir=tmp_path / "cache"))
    status, out, err = call_cli("verify", place, "--record", run / RECORD_FILE)
    assert (status, f"{place}: agrees with {run / RECORD_FILE}" in out) == (0, True), err
    AutoModelForCausalLM.from_pretrained(place).save_pretrained(tmp_path / "again")
    status, out, err = call_cli("verify", tmp_path / "again", "--record", run / RECORD_FILE)
    assert (status, "agrees" in out, "tokenizer.json: is missing" in err) == (3, False, True)


def test_a_damaged_key_is_told_before_any_work(chosen: tuple[dict[str, Any], Path], run: Path) -> None:
    (run / KEY_FILE).write_text("broken")
    before = times(run, "*")
    with pytest.raises(FormatError, match="put a copy of the right one there"):
        msa_lite.run(chosen[0] | {"output": str(run)}, ["forget.alpha=0.25"])
    assert times(run, "*") == before


# The card of a run's model: complete when the run ends, the same after a rerun, and without the data.


def test_a_run_completes_the_card_of_its_model(chosen: tuple[dict[str, Any], Path], history: Path) -> None:
    model = chosen[1] / "model"
    manifest, card = load_manifest(model), (model / CARD_FILE).read_text()
    assert manifest is not None
    assert verify_folder(model) == []
    assert card == model_card(manifest)
    outcome = manifest["outcome"]
    report = json.loads((model.parent / "evaluation/unlearned/report.json").read_text())
    figures = {name: {k: v for k, v in m.items() if k in outcome["metrics"][name]["unlearned"]}
               for name, m in report["metrics"].items()}  # fmt: skip
    assert figures == {name: models["unlearned"] for name, models in outcome["metrics"].items()}
    assert set(outcome["metrics"]["extraction_strength"]) == {"target", "unlearned", "ideal"}
    assert outcome["rows"] == {"forget": 18, "retain": 18}
    assert len(outcome["sweep"]["points"]) == 4
    assert "before | unlearned | ideal" in card
    results = {result.metric_type: result.metric_value for result in ModelCard(card).data.eval_results}
    assert f"{results['accuracy_r']:.3f}" == f"{report['metrics']['accuracy_r']['value']:.3f}"
    assert_no_data([card, json.dumps(manifest["outcome"])], history, chosen[1])


def assert_no_data(texts: list[str], history: Path, output: Path) -> None:
    """No row, no name of a person, no path and no file of the data stands in the texts."""
    rows = [json.loads(line) for path in (history / "data").glob("*.jsonl") for line in path.read_text().splitlines()]
    private = {row[key] for row in rows for key in ("question", "answer")}
    private |= {" ".join(row["answer"].split()[:2]) for row in rows}
    private |= {str(history), str(output), "forget.jsonl", "retain.jsonl"}
    assert rows
    assert [part for part in private for text in texts if part in text] == []


def test_what_is_published_of_it_holds_no_data(chosen: tuple[dict[str, Any], Path], history: Path) -> None:
    sent = make_contents(chosen[1], PublishOptions(accept=True), lambda repo: False)
    assert sent.files
    texts = [file.read().decode("latin-1") for file in sent.files]
    assert_no_data(texts, history, chosen[1])
