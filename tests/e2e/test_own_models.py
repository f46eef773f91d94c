"""Models as people have them: adapters, added tokens, codes, pictures, no tokenizer, a wrong prior, broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.adapter import ADAPTER_CONFIG
from msa_lite.io.weights.blocks import Files, read_rows
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import tokenizer_files
from msa_lite.io.weights.quantised import dequantised
from msa_lite.pipeline.run.msa import merge_arguments
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, prepared, write_recipe
from tests.support import codes
from tests.support.merges import read_checkpoint
from tests.support.models import (
    add_turn_token,
    drop_tokenizer,
    load,
    make_lora,
    save_checkpoint,
    tiny_tokenizer,
    tiny_vision_model,
)

EMBED = "model.embed_tokens.weight"


def quick(recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The recipe without scores, on a few short rows."""
    recipe = {**recipe, "evaluate": None, **changes}
    recipe.pop("retain", None)
    recipe["vector"] = {"lora": {"rank": 2, "alpha": 4}, "epochs": 1, "warmup_epochs": 0, **recipe["vector"]}
    return recipe


# Models stored as codes.


def test_models_stored_as_codes_are_dequantised_once_and_the_run_goes_on_with_that(
    recipe: dict[str, Any], history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    prior, adapter = tmp_path / "prior", make_lora(history / "prior", tmp_path / "lora", template=True)
    shutil.copytree(history / "prior", prior)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(history / "prior", quantization_config=config).save_pretrained(prior)
    (prior / "manifest.json").unlink()
    settings = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(settings | {"base_model_name_or_path": str(prior)}))
    recipe = quick(recipe, target=str(adapter), prior=str(prior), output=str(tmp_path / "run"))
    path = write_recipe(recipe, tmp_path)
    code, out, _ = call_cli("run", "--dry-run", path)
    assert code == 0
    assert "dequantise the prior" in " ".join(out.split())

    code, _, err = call_cli(path)
    assert code == 0, err
    assert len([line for line in err.splitlines() if "the run uses its weights in bfloat16" in line]) == 2
    run, stored = tmp_path / "run", dequantised(load_checkpoint(prior)).tensors
    moved = 0
    for name, value in codes.read(run / "prior").items():
        entry = stored[name]
        weight = read_rows(Files(), entry, 0, entry.matrix_shape[0]).reshape(entry.shape)
        np.testing.assert_array_equal(value.float().numpy(), weight.astype(ml_dtypes.bfloat16).astype(np.float32))
        moved += not np.array_equal(codes.read(run / "target")[name].float().numpy(), value.float().numpy())
    assert moved >= 7
    assert load(run / "model")[0].config.to_dict().get("quantization_config") is None
    made = (run / "prior/manifest.json").stat().st_mtime_ns
    code, out, _ = call_cli("run", "--dry-run", str(run / "recipe.yaml"))
    assert code == 0
    assert "dequantise" not in out
    assert call_cli(str(run / "recipe.yaml"))[0] == 0
    assert (run / "prior/manifest.json").stat().st_mtime_ns == made


# Adapters as target.


def test_an_adapter_is_merged_into_its_base_once_and_the_run_goes_on_with_that(
    recipe: dict[str, Any], history: Path, tmp_path: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = make_lora(history / "prior", tmp_path / "mine/lora", template=True)
    monkeypatch.chdir(tmp_path)
    recipe = quick(recipe, target="mine/lora", output="run")
    write_recipe(recipe, tmp_path)
    code, _, err = call_cli("recipe.yaml")
    assert code == 0, err
    assert [line for line in err.splitlines() if "is a LoRA adapter on" in line and "run/target" in line]
    whole = tmp_path / "run/target"
    assert verify_folder(whole) == []
    oracle = read_checkpoint(history / "prior")
    factors = read_checkpoint(lora)
    for name, weight in oracle.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        delta = 0.0
        if key.format("A") in factors:  # rank 4, lora_alpha 8
            a, b = (factors[key.format(half)].astype(np.float64) for half in "AB")
            delta = 2.0 * b @ a
        np.testing.assert_allclose(read_checkpoint(whole)[name], weight + delta, atol=1e-6)
    # Its own tokenizer and template stand in it and in the unlearned model.
    for folder in (whole, tmp_path / "run/model"):
        assert (folder / "chat_template.jinja").read_text() == (lora / "chat_template.jinja").read_text()
    recorded = load_recipe(tmp_path / "run/recipe.yaml")
    assert recorded.target == str(lora)
    assert merge_arguments(recorded)["target"] == "run/target"
    made = (whole / "manifest.json").stat().st_mtime_ns
    assert call_cli("run/recipe.yaml")[0] == 0
    assert (whole / "manifest.json").stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("base", "says"),
    [
        (None, "names no base model"),
        ("/home/somebody/model", "which is not here"),
        ("org/not-there", r"its base cannot be found: org/not-there"),
    ],
)
def test_an_adapter_without_its_base_is_told(
    recipe: dict[str, Any], history: Path, tmp_path: Path, base: str | None, says: str
) -> None:
    lora = make_lora(history / "prior", tmp_path / "lora")
    config = json.loads((lora / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": base}
    (lora / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(UsageError, match=says):
        prepared({**recipe, "target": str(lora)})


def test_merge_says_how_to_write_an_adapter_out_and_that_works(
    history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    lora, vector = make_lora(history / "prior", tmp_path / "lora"), make_lora(history / "prior", tmp_path / "v", seed=5)
    code, _, err = call_cli("merge", "--target", lora, "--forget", vector, "--out", tmp_path / "out")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    command = err.partition("msa-lite merge ")[2].partition(", then")[0].split()
    assert call_cli("merge", *(str(tmp_path / "w") if part == "WHOLE" else part for part in command))[0] == 0
    assert call_cli("merge", "--target", tmp_path / "w", "--forget", vector, "--out", tmp_path / "out")[0] == 0


# Added tokens.


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_target_with_added_tokens_is_unlearned_with_a_prior_that_lacks_them(
    recipe: dict[str, Any], history: Path, tmp_path: Path, mode: str
) -> None:
    target = add_turn_token(history / "target", tmp_path / "target")
    recipe = {**recipe, "target": str(target)}
    recipe["vector"] = {**recipe["vector"], "mode": mode}
    recipe["evaluate"].pop("ideal")
    result = msa_lite.run(recipe)
    own, theirs = (load_checkpoint(history / "prior").tensors[EMBED], load_checkpoint(target).tensors[EMBED])
    assert theirs.shape[0] == own.shape[0] + 1
    before, after = read_checkpoint(target), read_checkpoint(result.merged.folder)
    assert after[EMBED][-1].tobytes() == before[EMBED][-1].tobytes()
    assert bool((after[EMBED][:-1] != before[EMBED][:-1]).any()) == (mode == "full")
    assert any("the others stay the target's" in note for note in result.merged.notes) == (mode == "full")
    # The rows of the template's own token were read, and scored of the prior too.
    job = prepared(recipe)
    turn = own.shape[0]
    assert all(turn in example.ids for example in job.examples["forget"])
    assert (tmp_path / "run/probe/cheap/prior/report.json").is_file()
    manifest = load_manifest(tmp_path / "run/vectors/forget")
    assert manifest is not None
    assert manifest["inputs"]["prior"]["added_rows"]["from"] == turn
    if mode == "full":  # saved as a checkpoint of the prior
        tuned = load_checkpoint(tmp_path / "run/vectors/forget")
        assert (tuned.tensors[EMBED].shape, tuned.config["vocab_size"]) == (own.shape, turn)
        load(tmp_path / "run/vectors/forget")


# Tokenizers.


def edit_tokenizer(folder: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    shutil.copytree(folder, out)
    content = json.loads((out / "tokenizer.json").read_text())
    change(content)
    (out / "tokenizer.json").write_text(json.dumps(content))
    (out / "manifest.json").unlink()
    return str(out)


def swap_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]


@pytest.mark.parametrize("change", [swap_ids, lambda content: content["model"].update(merges=[])])
def test_a_prior_that_reads_rows_otherwise_is_refused_with_an_example(
    recipe: dict[str, Any], history: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    prior = edit_tokenizer(history / "prior", tmp_path / "prior", change)
    with pytest.raises(MismatchError, match=r"Row 0, '.{10,60}': token \d+ is \d+ \('.*'\) to the target and") as told:
        prepared({**recipe, "prior": prior})
    assert told.value.exit_code == 3
    assert not (tmp_path / "run").exists()


def test_a_target_without_tokenizer_takes_the_priors_and_so_does_the_unlearned_model(
    recipe: dict[str, Any], history: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = quick(recipe, target=str(drop_tokenizer(history / "target", tmp_path / "target")))
    bare = {**recipe, "prior": str(drop_tokenizer(history / "prior", tmp_path / "bare"))}
    with pytest.raises(FormatError, match="without a tokenizer, and so was the prior; copy the files"):
        msa_lite.run(bare)
    assert not (tmp_path / "run").exists()
    result = msa_lite.run(recipe)
    assert "was saved without a tokenizer; the prior's is taken" in caplog.text
    for path in tokenizer_files(history / "prior"):
        assert (result.merged.folder / path.name).read_bytes() == path.read_bytes()
    assert verify_folder(result.merged.folder) == []
    load(result.merged.folder)
    manifest = load_manifest(result.merged.folder)
    assert manifest is not None
    assert manifest["inputs"]["target"]["tokenizer"].startswith("sha256:")


# The wrong prior.


@pytest.mark.parametrize("same", ["folder", "copy", "weights"])
def test_a_prior_that_is_the_target_is_refused(
    recipe: dict[str, Any], history: Path, tmp_path: Path, same: str
) -> None:
    prior = history / "target"
    if same != "folder":
        prior = Path(shutil.copytree(prior, tmp_path / "prior"))
    if same == "weights":
        (prior / "generation_config.json").write_text('{"max_length": 3}')
        (prior / "manifest.json").unlink()
    with pytest.raises(MismatchError, match="Give the model from before your fine-tuning as `prior`"):
        prepared({**recipe, "prior": str(prior)})
    assert not (tmp_path / "run").exists()


# Models that are not whole are refused by every command that would load them, before anything is written.


WEIGHTS = "model.safetensors"


def without_a_norm(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def larger_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: n + 5000 * (n >= 260) for word, n in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))


def endless_template(folder: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)


FAULTS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "without a norm": (without_a_norm, "model.norm.weight", 3),
    "pickled": (pickled, "pickled", 3),
    "more tokens": (larger_tokenizer, "token 5|tokens, the model", 3),
    "a template without end": (endless_template, "took more than", 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_is_not_whole_is_refused(
    fault: str, make_checkpoint: Callable[..., Path], history: Path, call_cli: CallCli, tmp_path: Path
) -> None:
    spoil, told, status = FAULTS[fault]
    model = shutil.copytree(make_checkpoint("qwen2", chat=True), tmp_path / "broken")
    spoil(model)
    before = sorted(tmp_path.rglob("*"))
    rows, out = history / "data/forget.jsonl", tmp_path / "out"
    code, said, err = call_cli("evaluate", model, "--forget", rows, "--out", out)
    assert "Traceback" not in err
    assert any(word in err for word in told.split("|")), err
    assert (code, said) == (status, "")
    assert sorted(tmp_path.rglob("*")) == before


# Vision-language models: their text model unlearns, and all else stays as it is.


NAMES = ("heron", "siskin", "plover", "merlin")


def make_recipe(kind: str, folder: Path, mode: str) -> dict[str, Any]:
    """A recipe on a prior and a target whose every weight has moved a little; no rows choose or judge."""
    for name, seed in (("prior", 0), ("target", 1)):
        model = tiny_vision_model(kind)
        torch.manual_seed(seed)
        for parameter in model.parameters() if seed else ():
            parameter.data += 0.01 * torch.randn_like(parameter)
        save_checkpoint(folder / name, model)
    for number, name in enumerate(("forget", "retain")):
        rows = [{"question": f"Where is the {bird} {number}?", "answer": f"At the mill of {bird}."} for bird in NAMES]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": str(folder / "target"), "prior": str(folder / "prior"),
        "forget": {"data": {"path": str(folder / "forget.jsonl")}, "alpha": 1.0},
        "retain": {"data": {"path": str(folder / "retain.jsonl")}, "beta": 0.5},
        "vector": {"mode": mode, "epochs": 1, "learning_rate": 5e-3, "batch_size": 2},
        "evaluate": {"max_new_tokens": 4}, "verdict": False, "prompt": "plain", "output": str(folder / "run"),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3_5", "mistral3"])
def test_a_run_changes_the_text_model_alone(kind: str, mode: str, tmp_path: Path) -> None:
    recipe = make_recipe(kind, tmp_path, mode)
    msa_lite.run(write_recipe(recipe, tmp_path), accept=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "run/model"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys()
    assert len(changed) >= 14
    assert not [name for name in changed if "vis" in name or "projector" in name]
    if mode == "lora":
        assert not [
            name for name in load_file(tmp_path / "run/vectors/forget/adapter_model.safetensors") if "vis" in name
        ]
    record = json.loads((tmp_path / "run/evaluation/target/forget.jsonl").read_text().splitlines()[0])
    assert record["probability"] == pytest.approx(probability(tmp_path / "target", recipe), rel=1e-4)


def probability(folder: Path, recipe: dict[str, Any]) -> float:
    """The geometric mean of the probabilities of the first answer's tokens, by plain transformers."""
    from transformers import AutoModelForImageTextToText

    row = json.loads(Path(recipe["forget"]["data"]["path"]).read_text().splitlines()[0])
    tokenizer, model = tiny_tokenizer(), AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    start = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
    ids = [*start, *tokenizer(f" {row['answer']}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return float(logits[range(len(start) - 1, len(ids) - 1), ids[len(start) :]].mean().exp())
