"""`msa-lite init` and `msa-lite recipes copy`: a first recipe that the loader takes, or one error with every fault."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite import Wishes, init_recipe
from msa_lite.errors import ColumnsError, MismatchError, OutputError, UsageError
from msa_lite.pipeline.verbs.init import guess_prior, inspect_set
from msa_lite.recipe import load_recipe, shipped_recipes
from tests.e2e.conftest import CallCli
from tests.support.models import make_lora


@pytest.fixture
def place(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a target, a prior and rows, as the README names them."""
    monkeypatch.chdir(tmp_path)
    for name, source in {"my-finetuned-model": "target", "prior": "prior"}.items():
        (tmp_path / name).symlink_to(history / source)
    for name, source in {"delete": "forget", "keep": "retain", "never-seen": "holdout"}.items():
        shutil.copy(history / f"data/{source}.jsonl", tmp_path / f"{name}.jsonl")
    return tmp_path


WISHES = Wishes("./my-finetuned-model", "delete.jsonl", "./prior", "keep.jsonl", "never-seen.jsonl")
FLAGS = ("--target", "./my-finetuned-model", "--prior", "./prior", "--forget", "delete.jsonl")


def test_a_recipe_is_written_that_the_loader_takes_with_a_reason_beside_each_line(
    place: Path, call_cli: CallCli
) -> None:
    status, out, err = call_cli("init", *FLAGS, "--retain", "keep.jsonl", "--holdout", "never-seen.jsonl")
    assert status == 0, err
    assert out.splitlines()[-2:] == ["written: my-request.yaml", "next:    msa-lite my-request.yaml --dry-run"]
    recipe = load_recipe("my-request.yaml")
    assert (recipe.target, recipe.prior, recipe.output) == ("./my-finetuned-model", "./prior", "runs/my-request")
    assert recipe.forget.data.path == "delete.jsonl"
    assert recipe.retain is not None
    assert (recipe.retain.data.path, recipe.retain.data.sample) == ("keep.jsonl", "match_forget")
    assert recipe.evaluate is not None
    assert recipe.evaluate.holdout is not None
    assert recipe.vector.mode == "lora"
    assert (recipe.betas, "beta" in (place / "my-request.yaml").read_text()) == ([0.0], False)
    lines = (place / "my-request.yaml").read_text().splitlines()
    for key, reason in {
        "target:": "llama, ",
        "data: {path: delete": "18 rows",
        "prior:": "not have",
    }.items():
        line = next(line for line in lines if key in line)
        assert reason in line.partition("#")[2]


def test_the_prior_is_taken_from_the_targets_own_files(place: Path) -> None:
    make_lora(place / "prior", place / "adapter")
    config = json.loads((place / "adapter/adapter_config.json").read_text())
    (place / "adapter/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "prior"}))
    assert guess_prior("./adapter") == ("prior", "adapter_config.json")
    text = init_recipe("a.yaml", replace(WISHES, target="./adapter", prior=None)).text
    assert "a LoRA adapter on prior" in text
    assert load_recipe("a.yaml").prior == "prior"
    shutil.copytree(place / "my-finetuned-model", place / "published")
    assert guess_prior("./published") is None
    (place / "published/README.md").write_text("---\nbase_model: ./prior\n---\n# A model\n")
    text = init_recipe("b.yaml", replace(WISHES, target="./published", prior=None)).text
    assert "named by the card, README.md of the target" in text
    (place / "published/README.md").write_text("---\nbase_model: [./prior, ./other]\n---\n")
    with pytest.raises(UsageError, match="--prior is needed"):
        init_recipe("c.yaml", replace(WISHES, target="./published", prior=None))


def test_no_file_is_replaced(place: Path, call_cli: CallCli) -> None:
    (place / "my-request.yaml").write_text("mine")
    status, _, err = call_cli("init", *FLAGS)
    assert (status, (place / "my-request.yaml").read_text()) == (3, "mine")
    assert "already exists" in err
    for file, kind in {"my-request": UsageError, "nowhere/x.yaml": UsageError, "prior": UsageError}.items():
        with pytest.raises(kind):
            init_recipe(file, WISHES)
    (place / "folder.yaml").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        init_recipe("folder.yaml", WISHES)


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def test_columns_that_are_not_known_are_listed_and_written_when_named(place: Path) -> None:
    mine = write_rows(
        place / "mine.jsonl", *({"id": i, "ask": f"Who is {i}?", "say": f"Nobody {i}."} for i in range(4))
    )
    with pytest.raises(ColumnsError, match=r"There are id, ask, say\. Name them, as --columns question="):
        init_recipe("x.yaml", replace(WISHES, forget=mine))
    with pytest.raises(ColumnsError) as caught:
        inspect_set(mine, {})
    assert caught.value.columns == ["id", "ask", "say"]
    named = {"question": "ask", "answer": "say"}
    init_recipe("mixed.yaml", replace(WISHES, forget=mine, columns=named))
    mixed = load_recipe("mixed.yaml")
    assert mixed.forget.data.columns is not None
    assert mixed.forget.data.columns.question == "ask"
    assert mixed.retain is not None
    assert mixed.retain.data.columns is None
    init_recipe("same.yaml", replace(WISHES, forget=mine, retain=None, holdout=None, columns=named))
    columns = load_recipe("same.yaml").forget.data.columns
    assert columns is not None
    assert columns.answer == "say"
    texts = write_rows(place / "texts.jsonl", *({"body": f"Chapter {i}."} for i in range(4)))
    init_recipe("texts.yaml", replace(WISHES, forget=texts, retain=None, holdout=None, columns={"text": "body"}))
    assert load_recipe("texts.yaml").forget.data.format == "text"
    assert inspect_set(write_rows(place / "plain.jsonl", {"text": "A book."}), {}).source.format == "text"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"target": "./nowhere", "forget": "gone.jsonl"},
            UsageError,
            "(?s)2 faults.*--target ./nowhere: no such folder.*--forget gone.jsonl: no such file",
        ),
        ({"target": "alice/absent-model"}, UsageError, "alice/absent-model: no such folder, and the Hub does not"),
        ({"prior": "my-finetuned-model"}, MismatchError, "same model"),
        ({"retain": "delete.jsonl"}, UsageError, "--retain: the same rows as --forget"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    changes: dict[str, Any], kind: type[Exception], message: str, place: Path
) -> None:
    with pytest.raises(kind, match=message):
        init_recipe("x.yaml", replace(WISHES, **changes))
    assert not (place / "x.yaml").exists()


def written(path: Path, values: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
    return str(path)


AXOLOTL = {
    "base_model": "./prior", "output_dir": "./my-finetuned-model", "adapter": "lora", "lora_r": 8, "lora_alpha": 16,
    "lora_target_modules": ["q_proj"], "sequence_len": 64, "learning_rate": "2e-4", "bf16": "auto", "wandb_run": None,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "prior", "output_dir": "my-finetuned-model", "dataset": "mine, chats", "template": "llama3",
    "lora_rank": 4, "lora_target": "q_proj, v_proj", "cutoff_len": 32, "learning_rate": 1e-4, "report_to": "none",
    "eval_dataset": "docs", "default_system": "Be short.",
}  # fmt: skip
INFO = {
    "mine": {"file_name": "mine.json", "num_samples": 9, "columns": {"prompt": "ask", "response": "say"}},
    "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    "docs": {"file_name": "docs.json", "columns": {"prompt": "body"}},
    "pairs": {"file_name": "mine.json", "ranking": True},
    "odd": {"file_name": "mine.json", "columns": ["ask"]},
}
ROWS = {
    "mine": [{"ask": f"Who is {i}?", "say": f"Nobody {i}."} for i in range(4)],
    "chats": [{"talk": [{"from": "human", "value": f"Who {i}?"}, {"from": "gpt", "value": "I"}]} for i in range(4)],
    "docs": [{"body": f"Chapter {i}."} for i in range(4)],
}
MINE = {"path": "data/mine.json", "columns": {"question": "ask", "answer": "say"}}
DOCS = {"path": "data/docs.json", "format": "text", "columns": {"text": "body"}}
USER = {"field_instruction": "ask", "field_output": "say", "no_input_format": "[INST] {instruction} [/INST]"}
# A training's configuration, changed → what the recipe has of it, and words of its comments.
TRAININGS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (AXOLOTL | {"datasets": [{"path": "data/mine.json", "type": USER, "roles_to_train": ["x"]}]},
     {"retain.data": MINE, "vector.lora": {"rank": 8, "alpha": 16, "targets": ["q_proj"]}, "vector.max_length": 64,
      "vector.learning_rate": "2e-4",
      "prompt": {"kind": "plain", "prompt": "[INST] {question} [/INST]", "answer": "{answer}"}},
     ["Not taken over: bf16.", "roles_to_train"]),
    (AXOLOTL | {"adapter": None, "datasets": [
        {"path": "json", "data_files": ["data/chats.json"], "type": "chat_template", "field_messages": "talk"},
        {"path": "keep.jsonl"}]},
     {"retain.data": {"path": "data/chats.json", "columns": {"messages": "talk"}},
      "vector": {"mode": "lora", "max_length": 64}},
     ["datasets.1 (keep.jsonl)", "vector.mode: full", "lora_r, lora_alpha"]),
    (AXOLOTL | {"datasets": [{"path": "data/docs.json", "type": "completion", "field": "body"}], "lora_alpha": None},
     {"retain.data": DOCS}, ["lora_r"]),
    (FACTORY,
     {"retain.data": MINE, "evaluate.holdout": DOCS, "prompt.system": "Be short.", "vector.learning_rate": 1e-4,
      "vector.lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, "vector.max_length": 32},
     ["dataset.1 (data/chats.json)", "template: llama3", "Not taken over: report_to.",
      "Not taken over of data/mine.json: num_samples."]),
    (FACTORY | {"export_dir": "my-finetuned-model", "adapter_name_or_path": "a", "output_dir": None}, {}, []),
    (FACTORY | {"adapter_name_or_path": "my-finetuned-model", "output_dir": None}, {}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected", "notes"), TRAININGS, ids=["own", "chat", "texts", "factory", "merge", "use"]
)
def test_a_recipe_takes_what_another_tools_configuration_says_and_names_the_rest(
    config: dict[str, Any], expected: dict[str, Any], notes: list[str], place: Path, call_cli: CallCli
) -> None:
    written(place / "data/dataset_info.json", INFO)
    for name, rows in ROWS.items():
        written(place / f"data/{name}.json", rows)
    source = written(place / "config.yml", config)
    status, _, err = call_cli("init", "x.yaml", "--from", source, "--forget", "delete.jsonl")
    assert status == 0, err
    values = yaml.safe_load(text := (place / "x.yaml").read_text())
    assert [model.removeprefix("./") for model in (values["target"], values["prior"])] == [
        "my-finetuned-model",
        "prior",
    ]
    for key, value in expected.items():
        assert functools.reduce(lambda inner, part: inner[part], key.split("."), values) == value
    comments = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    assert [note for note in notes if note not in comments] == []
    load_recipe("x.yaml")
    status, _, err = call_cli(source)
    assert (status, "`msa-lite init --from`" in err) == (2, True)


def test_a_trainers_folder_is_a_target_with_a_prior_and_no_pickle_of_it_is_read(place: Path) -> None:
    make_lora(place / "prior", place / "adapter", r=2, lora_alpha=6, target_modules=["q_proj"])
    (place / "adapter/training_args.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    text = init_recipe("a.yaml", Wishes("", "delete.jsonl", "prior", config="adapter")).text
    values = yaml.safe_load(text)
    assert (values["target"], values["vector"]["lora"]) == ("adapter", {"rank": 2, "alpha": 6, "targets": ["q_proj"]})
    assert "training_args.bin was not read" in text
    shutil.copytree(place / "my-finetuned-model", place / "full")
    config = json.loads((place / "full/config.json").read_text())
    written(place / "full/config.json", config | {"_name_or_path": "prior"})
    assert (
        load_recipe(yaml.safe_load(init_recipe("b.yaml", Wishes("", "delete.jsonl", config="full")).text)).prior
        == "prior"
    )
    shown = (
        "# Model\n<summary>See axolotl config</summary>\n\nversion\n```yaml\nbase_model: prior\nsequence_len: 99\n```\n"
    )
    (place / "full/README.md").write_text(shown)
    assert (
        yaml.safe_load(init_recipe("c.yaml", Wishes("", "delete.jsonl", config="full")).text)["vector"]["max_length"]
        == 99
    )


FOREIGN = [
    ({"hello": 1}, ["is no configuration of axolotl (base_model) or LLaMA-Factory"]),
    (AXOLOTL | {"base_model": ["prior", "b"], "output_dir": "out", "datasets": [{"path": "no.jsonl"}, {"type": "x"}]},
     ["4 faults", "base_model: one model is wanted", "output_dir out: no such", "datasets.0 no.jsonl: no such file",
      "datasets.1: one path is wanted"]),
    (AXOLOTL | {"output_dir": None, "rl": "dpo"}, ["2 faults", "it learnt preferences", "--target is needed"]),
    (FACTORY | {"dataset": "min, pairs, odd"},
     ["3 faults", "min is not in data/dataset_info.json (did you mean 'mine'?)", "dataset.1: pairs: holds more than",
      "odd: columns are a mapping"]),
    (AXOLOTL | {"datasets": [{"path": "delete.jsonl", "split": 3}]}, ["no split '3'"]),
    (AXOLOTL | {"datasets": [{"path": "delete.jsonl", "type": USER}]}, ["datasets.0 delete.jsonl: no column 'ask'"]),
    (AXOLOTL | {"datasets": [{"path": "keep.jsonl"}], "lora_model_dir": "a"}, ["lora_model_dir a", "--prior"]),
    (FACTORY | {"dataset": "mine", "adapter_name_or_path": "a"}, ["adapter_name_or_path a", "--prior"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "told"), FOREIGN, ids=["none", "axolotl", "dpo", "factory", "split", "columns", "on", "from"]
)
def test_a_configuration_that_cannot_be_taken_over_is_refused_with_every_fault(
    config: dict[str, Any], told: list[str], place: Path, call_cli: CallCli
) -> None:
    written(place / "data/dataset_info.json", INFO)
    source = written(place / "config.json", config | {"eval_dataset": None})
    status, _, err = call_cli("init", "x.yaml", "--from", source, "--forget", "delete.jsonl")
    assert status in (2, 3)
    assert [part for part in told if part not in err] == []
    assert not (place / "x.yaml").exists()


def test_a_configuration_is_read_before_any_question(
    place: Path, call_cli: CallCli, answering: Callable[..., None]
) -> None:
    _, _, err = call_cli("init", "x.yaml", "--from", "no.yml")
    assert ("no.yml: cannot be opened" in err, "--forget: needed" in err) == (True, True)
    answering()  # to ask would end in an abort
    status, _, err = call_cli("init", "x.yaml", "--from", "no.yml")
    assert (status, "no.yml: cannot be opened" in err) == (2, True)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """answering(*lines): have a user at a terminal answer with these lines."""

    def put(*lines: str) -> None:
        monkeypatch.setattr("msa_lite.cli.recipes.in_terminal", lambda: True)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return put


def test_on_a_terminal_it_asks_only_what_it_cannot_see(
    place: Path, call_cli: CallCli, answering: Callable[..., None]
) -> None:
    answering("./my-finetuned-model", "./prior", "delete.jsonl", "keep.jsonl", "")
    status, out, err = call_cli("init", "asked.yaml")
    assert status == 0, err
    assert "next:    msa-lite asked.yaml --dry-run" in out
    recipe = load_recipe("asked.yaml")
    assert (recipe.prior, recipe.retain is not None) == ("./prior", True)
    mine = write_rows(place / "mine.jsonl", *({"ask": f"Who is {i}?", "say": f"Nobody {i}."} for i in range(4)))
    answering("nonsense", "ask", "say")
    status, _, err = call_cli("init", "columns.yaml", *FLAGS[:4], "--forget", mine)
    assert status == 0, err
    assert "mine.jsonl has the columns ask, say" in err
    columns = load_recipe("columns.yaml").forget.data.columns
    assert columns is not None
    assert columns.question == "ask"
    answering()
    assert call_cli("init", "flags.yaml", *FLAGS)[0] == 0


def test_a_shipped_recipe_is_copied_with_a_line_that_leads_editors_to_its_schema(
    place: Path, call_cli: CallCli
) -> None:
    status, out, err = call_cli("recipes", "copy", "tofu/forget10", "my.yaml")
    assert status == 0, err
    assert out.splitlines() == ["written: my.yaml", "next:    msa-lite my.yaml --dry-run"]
    original = shipped_recipes()["tofu/forget10"].read_text().splitlines()
    (line,) = {*(place / "my.yaml").read_text().splitlines()} - {*original}
    schema = place / line.removeprefix("# yaml-language-server: $schema=")
    assert schema.read_text() == call_cli("recipes", "schema")[1]
    assert load_recipe("my.yaml") == load_recipe("tofu/forget10")
    assert call_cli("recipes", "copy", "tofu/forget10", "my.yaml")[0] == 3
    assert "did you mean 'tofu/forget10'" in call_cli("recipes", "copy", "tofu/forget1", "x.yaml")[2]
    assert "`cp` copies it" in call_cli("recipes", "copy", "my.yaml", "x.yaml")[2]
    status, out, err = call_cli("recipes", "copy", "train/small", "t.yaml")
    assert "next:    msa-lite train" in out
    schema = Path(err.removeprefix("schema:  ").partition(", by which")[0])
    assert schema.read_text() == call_cli("recipes", "schema", "--kind", "training")[1]
