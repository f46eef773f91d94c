"""`msa-lite init` and `msa-lite recipes copy`: a first recipe that the loader takes, or one error with every fault."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
