"""Training in stages, in Python: the same weights as fits by hand, what is trained again, what is kept and refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

import msa_lite
from msa_lite.data import DataSource, Prompter, Template, encode, encode_text, encode_up_to, load_rows
from msa_lite.errors import MsaError, OutputError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.staged.training import TrainingResult
from msa_lite.recipe import load_recipe
from msa_lite.recipe.inputs import choose_prior
from msa_lite.train import FitSettings, fit_vector
from tests.support.fits import Killed
from tests.support.models import tiny_tokenizer

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def new_model(vocabulary: int = 300, **config: Any) -> dict[str, Any]:
    return {"model": {"config": LLAMA | config, "tokenizer": {"vocabulary": vocabulary}}}


def make_recipe(folder: Path) -> dict[str, Any]:
    """Questions, then 100 tokens of texts, then the questions again: TOFU + C4 + TOFU in a second. From nothing."""
    pairs = [{"question": f"Where is {i}?", "answer": f"At {i * 7}."} for i in range(6)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    texts = [{"text": f"Number {i} lies at {i * 7}, far out."} for i in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    questions = {"path": str(folder / "qa.jsonl")}
    return {
        **new_model(),
        "stages": [
            {"name": "tofu", "data": questions},
            {"data": {"path": str(folder / "texts.jsonl"), "format": "text"}, "tokens": 100, "max_length": 16},
            {"name": "tofu-again", "data": questions, "epochs": 1},
        ],
        "training": {"epochs": 2, "learning_rate": 1e-3, "warmup_epochs": 0, "batch_size": 4, "max_length": 128},
        "output": str(folder / "out"),
    }


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """The whole training. No test changes its files."""
    result = msa_lite.train_stages(make_recipe(tmp_path_factory.mktemp("trained")))
    assert result is not None
    return result


NAMES = ["0-start", "1-tofu", "2-texts", "3-tofu-again"]


def train(recipe: dict[str, Any], *overrides: str, stop: tuple[str, int] | None = None) -> list[str]:
    """Train; what was trained. stop: the stage and the step at which a kill comes."""
    trained = {}

    def progress(label: str, done: int, total: int) -> None:
        trained[label] = None
        if (label, done) == stop:
            raise Killed

    msa_lite.train_stages(recipe, overrides, progress)
    return list(trained)


def hashes(folder: Path) -> dict[str, str]:
    return {path.parent.name: hash_file(path) for path in folder.glob("*/model.safetensors")}


def test_stages_give_the_weights_of_fits_by_hand(recipe: dict[str, Any], make_checkpoint: Make, tmp_path: Path) -> None:
    recipe["model"] = str(make_checkpoint("llama", chat=True))
    result = msa_lite.train_stages(recipe)
    tokenizer = tiny_tokenizer(chat=True)
    qa, texts = DataSource(str(tmp_path / "qa.jsonl")), DataSource(str(tmp_path / "texts.jsonl"), "text")
    prompter = Prompter.build(tokenizer, "chat", Template())
    questions, _ = encode(load_rows(qa), qa, prompter, 128)
    chunks = encode_text(load_rows(texts), prompter, 16)[:7]
    chunks[-1] = type(chunks[-1])(6, chunks[-1].ids[:4], chunks[-1].labels[:4])  # 6 × 16 + 4 = 100
    model: Path | str = recipe["model"]
    for seed, (name, examples, epochs) in enumerate((("1", questions, 2), ("2", chunks, 2), ("3", questions, 1))):
        options: dict[str, Any] = {"learning_rate": 1e-3, "warmup_epochs": 0, "batch_size": 4, "seed": seed}
        settings = FitSettings(mode="full", epochs=epochs, **options)
        model = fit_vector(str(model), examples, tmp_path / name, tokenizer=tokenizer, settings=settings)
    assert [m.name for m in result.models] == NAMES[1:]
    for name, by_hand in zip(NAMES[1:], "123", strict=True):
        assert verify_folder(result.folder / name) == []
        assert hash_file(result.folder / name / "model.safetensors") == hash_file(
            tmp_path / by_hand / "model.safetensors"
        )
    assert "assistant" in (result.model / "chat_template.jinja").read_text()
    # 2 epochs of the questions, then 2 of 100 tokens, then 1 of the questions.
    tokens = sum(len(example.ids) for example in questions)
    assert [m.seen_tokens for m in result.models] == [2 * tokens, 2 * tokens + 200, 3 * tokens + 200]


def test_a_model_from_nothing_is_the_same_twice_and_another_with_another_seed(
    recipe: dict[str, Any], trained: TrainingResult, tmp_path: Path
) -> None:
    first, again = trained.folder, msa_lite.train_stages(recipe).folder
    assert sorted(hashes(first)) == NAMES
    other = msa_lite.train_stages(recipe, [f"output={tmp_path / 'other'}", "seed=1"]).folder
    assert hashes(first) == hashes(again)
    assert not set(hashes(first).values()) & set(hashes(other).values())
    config = json.loads((first / "0-start/config.json").read_text())
    words = len(AutoTokenizer.from_pretrained(first / "0-start"))  # there are too few texts for 300
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (words, 0, 1)


def test_a_training_that_was_killed_goes_on_to_the_same_weights(
    recipe: dict[str, Any], trained: TrainingResult, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        train(recipe, stop=("2-texts", 3))
    assert str(tmp_path / "out/1-tofu") in (tmp_path / "out/history.yaml").read_text()
    assert train(recipe) == ["2-texts", "3-tofu-again"]
    assert hashes(tmp_path / "out") == hashes(trained.folder)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/manifest.json")}
    assert train(recipe) == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/manifest.json")} == before


def test_a_changed_stage_is_trained_again_and_so_are_those_after_it(
    recipe: dict[str, Any], trained: TrainingResult
) -> None:
    shutil.copytree(trained.folder, recipe["output"])
    assert train(recipe, "stages.2.epochs=2") == NAMES[3:]
    assert train(recipe, "stages.1.tokens=64", "stages.2.epochs=2") == NAMES[2:]


def test_the_folder_tells_what_was_seen_and_repeats_the_training(trained: TrainingResult) -> None:
    result = trained
    block = yaml.safe_load(result.history.read_text())
    assert [c["seen_tokens"] for c in block["history"]["checkpoints"]] == [m.seen_tokens for m in result.models]
    assert block["history"].pop("exposure", 0) is None  # the user's to name
    block["history"]["exposure"] = result.models[1].seen_tokens - 1
    run = {"target": str(result.model), "forget": {"data": {"path": "f.jsonl"}}, "output": "runs/x"}
    history = load_recipe(run | block).history
    assert history is not None
    assert choose_prior(history).checkpoint == str(result.folder / "0-start")
    resolved = yaml.safe_load((result.folder / "recipe.yaml").read_text())
    assert [stage["learning_rate"] for stage in resolved["stages"]] == [1e-3] * 3
    assert train(resolved) == []
    assert (result.models[-1].loss or 9) < (result.models[1].loss or 0)


def test_a_history_names_its_models_wherever_it_is_read(
    recipe: dict[str, Any], make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").symlink_to(make_checkpoint("llama"))
    monkeypatch.chdir(tmp_path)
    recipe |= {"model": "start", "output": "out", "stages": recipe["stages"][2:]}
    history = msa_lite.train_stages(recipe).history.read_text()
    names = [item["checkpoint"] for item in yaml.safe_load(history)["history"]["checkpoints"]]
    assert names == [str(make_checkpoint("llama")), str(tmp_path / "out/1-tofu-again")]


def test_a_faulty_rerun_leaves_the_recipe_of_what_is_there(recipe: dict[str, Any], trained: TrainingResult) -> None:
    before = (trained.folder / "recipe.yaml").read_text()
    with pytest.raises(MsaError, match=r"none\.jsonl"):
        train(recipe, f"output={trained.folder}", "stages.1.data={path: none.jsonl, format: text}")
    assert (trained.folder / "recipe.yaml").read_text() == before


def test_models_of_stages_that_have_gone_stay_and_are_named(
    recipe: dict[str, Any],
    trained: TrainingResult,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("msa_lite"), "propagate", True)  # a command that ran before keeps the log
    shutil.copytree(trained.folder, tmp_path / "out")
    train(recipe)
    assert "since no stage of this training makes it" not in caplog.text
    assert train(recipe, "stages.1.name=renamed") == ["2-renamed"]  # the last is made of the same weights
    assert f"{tmp_path / 'out'}: left as it is, since no stage of this training makes it: 2-texts\n" in caplog.text
    assert (tmp_path / "out/2-texts/model.safetensors").is_file()


def test_a_model_from_nothing_takes_a_tokenizer_that_there_is(recipe: dict[str, Any], make_checkpoint: Make) -> None:
    folder = make_checkpoint("olmo2", chat=True)
    recipe["model"]["tokenizer"] = str(folder)
    recipe["stages"] = recipe["stages"][2:]
    model = msa_lite.train_stages(recipe).model
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (model / name).read_text() == (folder / name).read_text()


def test_a_tokenizer_by_its_number_of_tokens_is_that_of_the_branchs_commit_without_a_hub_too(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = "stage1-step920000-tokens3859B"
    refs = tmp_path / "cache/models--org--with-tokens/refs"
    refs.mkdir(parents=True)
    (refs / branch).write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer().save_pretrained(refs.parent / "snapshots" / ("0" * 40))
    recipe["model"]["tokenizer"] = "org/with-tokens@tokens=3859B"
    recipe["stages"] = recipe["stages"][2:]
    result = msa_lite.train_stages(recipe)
    resolved = yaml.safe_load((result.folder / "recipe.yaml").read_text())
    assert resolved["model"]["tokenizer"] == f"org/with-tokens@{'0' * 40}"


def test_several_data_sets_are_learnt_together(recipe: dict[str, Any], tmp_path: Path) -> None:
    questions, texts = (stage["data"] for stage in recipe["stages"][:2])
    recipe["stages"] = [{"data": [questions, texts]}]
    result = msa_lite.train_stages(recipe)
    rows = load_rows(DataSource(texts["path"], "text"))
    prompter = Prompter.build(AutoTokenizer.from_pretrained(result.model), "plain", Template())
    chunks = encode_text(rows, prompter, 128)
    assert (load_manifest(result.folder / "1-qa") or {})["rows"] == 6 + len(chunks)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 100])
def test_as_many_tokens_are_read_as_were_asked_for(tokens: int, bos: bool) -> None:
    tokenizer = tiny_tokenizer()
    if not bos:
        tokenizer.backend_tokenizer.post_processor = None
    texts = [f"Number {i} lies at {i * 7}." for i in range(40)]
    prompter = Prompter.build(tokenizer, "plain", Template())
    examples = encode_up_to(iter(texts), prompter, 16, tokens)
    assert examples == encode_up_to(iter(texts), replace(prompter, window=16), 100, tokens)
    # 17 are one row of 16 and one token, which alone has nothing to predict.
    assert sum(len(example.ids) for example in examples) == (16 if tokens == 17 else tokens)
    ids = [i for example in examples for i in example.ids[bos:]]
    whole = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    assert ids == whole[: len(ids)]


def test_a_stream_is_read_no_further_than_needed() -> None:
    taken: list[int] = []
    texts = (taken.append(i) or "word " * 1000 for i in range(100_000))
    examples = encode_up_to(texts, Prompter.build(tiny_tokenizer(), "plain", Template()), 128, 50_000)
    assert sum(len(example.ids) for example in examples) == 50_000
    assert len(taken) < 1000


def test_too_few_tokens_are_warned_of(recipe: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    recipe["stages"] = recipe["stages"][1:2]
    logger = logging.getLogger("msa_lite")
    logger.propagate = True  # a command that ran before keeps the log to itself
    found = msa_lite.train_stages(recipe, ["stages.0.tokens=20M", "stages.0.epochs=1"]).models[-1].tokens
    assert f"the recipe asks for 20000000 tokens, the data has {found}" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": [{"data": {"path": "q"}, "tokens": 100}]}, ["stages.0: tokens: only for one data set"]),
        ({"stages": [{"data": {"path": "t", "format": "text"}, "tokens": 0}]}, ["stages.0.tokens: ", "got 0"]),
        ({"stages": [{"data": {"path": "t", "fromat": "text"}, "epoch": 1}]}, ["'format'?", "here: stages.0.epochs"]),
        ({"stages": [{"data": {"path": "t"}, "micro_batch_size": 3}]}, ["3 does not divide batch_size 4"]),
        ({"stages": [{"data": {"path": "none.jsonl"}}], "model": "none"}, ["2 faults", "none.jsonl", "none: no such"]),
        ({"model": {"config": {"hidden_size": 8}, "tokenizer": "x"}}, ["model.config: model_type is missing"]),
        (new_model(model_type="lama"), ["'llama'?"]),
        (new_model(hiden_size=8), ["'hidden_size'?"]),
        (new_model(hidden_size=33), ["cannot make a llama of it", "33"]),
        (new_model(vocab_size=256), ["tokens, the model's vocabulary 256; the model has no row for '"]),
        (new_model(max_position_embeddings=8), ["stages.0: ", "the prompt alone fills the window of 8 tokens"]),
        ({"training": {"batch_size": 8, "epochs": 1}}, ["stages.0: 1-tofu: its 6 rows are one step", "stages.2: "]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_any_work(
    recipe: dict[str, Any], change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MsaError) as caught:
        train(recipe | change)
    assert [word for word in words if word not in str(caught.value)] == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_something_else_is_refused_and_so_is_a_disk_too_small(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("# A run of msa-lite: the recipe as resolved.\n")
    with pytest.raises(OutputError, match="holds something that is no run"):
        train(recipe, f"output={tmp_path / 'run'}")
    (tmp_path / "run/recipe.yaml").unlink()
    for text in ("# A run of msa-lite", "A note of mine", "", "# A trai", "# A training of msa-lite: the re"):
        (tmp_path / "run/recipe.yaml.tmp").write_text(text)  # the last three as a kill leaves it
        with nullcontext() if "# A training of".startswith(text[:15]) else pytest.raises(OutputError):
            check_run_folder(tmp_path / "run", "training")
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("msa_lite.io.finished.manifest.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="are needed, 100 kB are free"):
        train(recipe)
    assert not (tmp_path / "out").exists()
