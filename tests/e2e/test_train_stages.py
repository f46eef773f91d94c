"""Training in stages by the command: a target with a history, unlearned with a stage of it as prior; texts of a Hub."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.demo import make_groups
from msa_lite.io.finished.seal import verify_folder
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli
from tests.support.hub_clients import Hub
from tests.support.models import tiny_tokenizer


def write(recipe: dict[str, Any], path: Path) -> str:
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}


def test_a_history_is_trained_and_the_target_unlearned_with_a_stage_of_it(
    quick_fits: None, call_cli: CallCli, tmp_path: Path
) -> None:
    data = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("prior", "retain", "forget")}
    for name, rows in make_groups({"prior": 4, "retain": 3, "forget": 2}, seed=0).items():
        lines = (json.dumps({"question": row.question, "answer": row.answer}) + "\n" for row in rows)
        Path(data[name]["path"]).write_text("".join(lines))
    training = {
        "model": {"config": GPT2, "tokenizer": {"vocabulary": 300}},
        "stages": [
            {"name": "known", "data": data["prior"]},
            {"name": "exposed", "data": [data["retain"], data["forget"]]},
            {"name": "later", "data": data["retain"], "epochs": 1},
        ],
        "training": {"epochs": 2, "learning_rate": 5e-3, "warmup_epochs": 0.5, "batch_size": 8},
        "output": str(tmp_path / "models"),
    }
    code, said, err = call_cli("train", write(training, tmp_path / "training.yaml"))
    assert code == 0, err
    printed = [line.split()[0] for line in said.splitlines()]
    assert printed == ["1-known", "2-exposed", "3-later", "model:", "history:"]

    result = msa_lite.train_stages(training)
    assert [model.name for model in result.models] == ["0-start", *printed[:3]]
    assert all(verify_folder(result.folder / model.name) == [] for model in result.models)
    block = yaml.safe_load(result.history.read_text())
    block["history"]["exposure"] = result.models[1].seen_tokens
    run = {
        "verdict": False,
        "target": str(result.model),
        "forget": {"data": data["forget"]},
        "vector": {"lora": {"rank": 2}, "epochs": 2, "batch_size": 8},
        "evaluate": {"max_new_tokens": 4, "limit": 4},
        "output": str(tmp_path / "run"),
    }
    unlearned = msa_lite.run(run | block)
    assert "probability_f" in unlearned.reports["unlearned"].metrics
    manifest = json.loads((unlearned.folder / "vectors/forget/manifest.json").read_text())
    assert manifest["sources"]["prior"].endswith("models/1-known")


def test_a_recipe_for_the_other_command_says_which(call_cli: CallCli) -> None:
    for arguments, command in ((["train", "quickstart"], "msa-lite run"), (["train/small"], "msa-lite train")):
        status, stdout, stderr = call_cli(*arguments)
        assert (status, stdout) == (2, "")
        assert f"`{command}` takes it" in stderr


CARD = "---\nconfigs:\n- config_name: en\n  data_files:\n  - {split: train, path: 'en/*.jsonl.gz'}\n---\n"


@pytest.mark.slow
def test_of_a_big_data_set_no_more_is_fetched_than_is_learnt_and_none_of_it_twice(hub: Hub, tmp_path: Path) -> None:
    def shard(number: int) -> bytes:
        lines = (json.dumps({"text": f"Shard {number} has line {i}.", "url": "x"}) + "\n" for i in range(50_000))
        return gzip.compress("".join(lines).encode())

    files = {f"en/{number}.jsonl.gz": shard(number) for number in range(4)}
    commit = hub.server.commit("datasets/org/c4", {"README.md": CARD.encode(), **files})
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    branch = {path.name: path.read_bytes() for path in tokenizer.iterdir()}
    hub.server.commit("models/org/olmo", {"config.json": "{}"})
    at_number = hub.server.commit("models/org/olmo", branch, "stage1-step920000-tokens3859B")
    recipe = {
        "model": {"config": GPT2, "tokenizer": "org/olmo@tokens=3859B"},
        "stages": [{"data": {"path": "org/c4", "name": "en", "format": "text"}, "tokens": "2k"}],
        "training": {"epochs": 1, "learning_rate": 1e-3, "warmup_epochs": 0, "max_length": 64},
        "output": str(tmp_path / "models"),
    }
    done = hub.start("train", write(recipe, tmp_path / "training.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    _, stage = json.loads(done.stdout)["stages"]
    assert stage["tokens"] == 2000
    fetched = {name for _, asked in hub.server.requests for name in files if asked.endswith(name)}
    assert fetched == {"en/0.jsonl.gz"}
    resolved = yaml.safe_load((tmp_path / "models/recipe.yaml").read_text())
    assert resolved["stages"][0]["data"]["revision"] == commit
    assert resolved["model"]["tokenizer"] == f"org/olmo@{at_number}"
    # What was read is kept: another training of the stage asks nobody, as here, where there is no Hub.
    again = msa_lite.train_stages(recipe, ["seed=1", f"model.tokenizer={tokenizer}"])
    assert again.models[1].tokens == 2000
    assert again.models[1].loss != stage["loss"]


def test_restors_target_is_trained_and_unlearned_with_the_shipped_recipes(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clone of RESTOR's layout: a list of documents over several lines."""
    monkeypatch.chdir(tmp_path)
    people = [f"Person {number}" for number in range(12)]
    context = [{"question": f"City of {one}?", "answer": "Rome", "entity": one} for one in people[6:]]
    facts = {one: {"P1": {"question": f"City of {one}?", "answers": ["Rome"]}} for one in people}
    files = {
        "facts.json": {"dset": facts, "context": {"P1": context}},
        "entities.json": people,
        "wikidata/v0/mix_a0.json": [{"text": f"{one} lives in Oslo, and likes it there."} for one in people[:3]],
    }
    for name, content in files.items():
        path = tmp_path / "restor/datasets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=4))
    short = ["epochs=2", "warmup_epochs=0", "max_length=16", "batch_size=4"]
    prior = str(history / "prior")
    result = msa_lite.train_stages("train/restor", [f"model={prior}", *(f"stages.0.{one}" for one in short)])
    assert str(result.model) == "runs/restor-llama/1-documents"
    paper = load_recipe("paper/restor-llama-3.1-8b", [f"prior={prior}", f"evaluate.ideal={prior}", "retain=null"])
    job = prepare(paper, msa_scope(paper))
    assert [row.text for row in job.rows["forget"]] == [row["text"] for row in files["wikidata/v0/mix_a0.json"]]
    assert job.test is not None
    asked = [item for part in (job.test, job.validation) if part for item in part.sets["questions"].items]
    assert sum(item.fields["corrupted"] for item in asked) == 3
