"""Recipes: a closed schema, all faults at once, overrides, and what is shipped."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, is_dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.cli import main
from msa_lite.errors import RecipeError, UsageError
from msa_lite.io.files.schema import json_schema
from msa_lite.pipeline.run.folder import warn_of_changes
from msa_lite.recipe import (
    Recipe,
    TrainingRecipe,
    dump_recipe,
    load_recipe,
    load_training,
    shipped_recipes,
)
from msa_lite.recipe.words import KEYS, NOTHING
from msa_lite.strengths import Strengths
from tests.tools.keys import recipe_keys

SMALLEST: dict[str, Any] = {
    "target": "models/target",
    "prior": "models/prior",
    "forget": {"data": {"path": "forget.jsonl"}},
    "output": "runs/x",
}


def test_the_smallest_recipe_leaves_to_us_how_vectors_are_fitted_and_combined() -> None:
    recipe = load_recipe(SMALLEST)
    assert (recipe.alphas, recipe.betas, recipe.has_choice) == (None, [0.0], True)
    assert recipe.select.validation == "auto"
    vector = recipe.vector
    assert (vector.mode, vector.weight_decay, recipe.merge.dtype, recipe.seed) == ("lora", 0.01, "same", 0)
    assert {vector.epochs, vector.learning_rate, vector.batch_size, vector.warmup_epochs} == {"auto"}


def test_the_retain_vector_may_be_fitted_otherwise_than_the_forget_vector() -> None:
    given = {**SMALLEST, "retain": {"data": {"path": "r"}}, "vector": {"epochs": 5, "learning_rate": 1e-5}}
    plain = load_recipe(given)
    assert plain.vector_of("retain") == plain.vector_of("forget") == plain.vector
    recipe = load_recipe(given, ["retain.vector={epochs: 3, batch_size: auto}"])
    assert recipe.vector_of("forget") == plain.vector
    assert recipe.vector_of("retain") == plain.vector.model_copy(update={"epochs": 3, "batch_size": "auto"})
    assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


TRIED = ([1.0, 4.0, 16.0, 64.0], 1.0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], TRIED),
        (["vector.mode=full"], ([1.0, 4.0, 16.0, 64.0], 0.0)),  # a second copy of all weights would hold it
        (["vector.mode=full", "vector.hold=0.5"], ([1.0, 4.0, 16.0, 64.0], 0.5)),
        (["retain.beta=0"], TRIED),
        (["forget.alpha=[1,2]"], ([0.0], 0.0)),  # the user's own points
        (["forget.alpha=1"], ([0.0], 0.0)),
        (["forget.alpha=1", "retain.beta=0.5", "merge.filter=2"], ([2.0], 1.0)),
        (["merge.filter=off"], ([0.0], 0.0)),
        (["merge.filter=2", "vector.hold=0"], ([2.0], 0.0)),
        (["merge.filter=off", "vector.hold=0.5"], ([0.0], 0.5)),
        (["retain=null"], ([0.0], 0.0)),
        (["retain=null", "evaluate.holdout.path=h"], ([1.0, 4.0, 16.0, 64.0], 0.0)),  # holdout rows in their place
        (["prior=null", "evaluate.holdout.path=h"], ([1.0, 4.0, 16.0, 64.0], 0.0)),
    ],
    ids=str,
)
def test_filter_and_hold_are_on_where_there_are_rows_to_keep_and_a_search(
    overrides: list[str], expected: tuple[list[float], float]
) -> None:
    recipe = load_recipe({**SMALLEST, "retain": {"data": {"path": "r"}}}, overrides)
    assert (recipe.filters, recipe.hold) == expected
    assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "vector.hold"),
        (["forget.alpha=1"], "merge.filter=1 turns it on, and the hold"),  # who gives α alone would lose both unawares
        (
            ["forget.alpha=1", "vector.mode=full"],
            "merge.filter=1 turns it on",
        ),  # and no hold: a search has none, either
        (["forget.alpha=1", "vector.hold=0.5"], "hold h = 0.5 (merge.filter, vector.hold); no filter, because"),
        (["forget.alpha=1", "merge.filter=off"], None),
        (["merge.filter=65"], "beyond the search, which ends at 64"),
        (["retain=null"], "no filter, because there are no rows"),
    ],
    ids=str,
)
def test_a_run_tells_of_filter_and_hold_and_why_a_given_alpha_has_neither(
    overrides: list[str], told: str | None
) -> None:
    recipe = load_recipe({**SMALLEST, "retain": {"data": {"path": "r"}}}, overrides)
    notice = recipe.filter_notice
    assert notice is None if told is None else told in (notice or "")
    assert ("beyond" in (notice or "")) == ("beyond" in (told or ""))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["forget"]),
        (["forget.alpha=1", "merge.filter=2"], ["forget"]),
        (["retain.beta=0.5"], ["forget", "retain"]),
        (["merge.filter=off"], ["forget", "retain"]),
    ],
    ids=str,
)
def test_a_filter_needs_no_retain_vector_unless_beta_is_given(overrides: list[str], names: list[str]) -> None:
    assert load_recipe({**SMALLEST, "retain": {"data": {"path": "r"}}}, overrides).vector_names == names


@pytest.mark.parametrize(
    ("alpha", "beta", "alphas", "betas", "searched", "choice"),
    [
        ("auto", "auto", None, None, True, True),
        ("auto", [0.0, 0.5], None, [0.0, 0.5], True, True),
        (1.0, "auto", [1.0], None, True, True),
        ([1.0, 2.0], 0.5, [1.0, 2.0], [0.5], False, True),
        (1.0, [0.5], [1.0], [0.5], False, False),
    ],
)
def test_strengths_are_given_listed_or_searched(
    alpha: Any, beta: Any, alphas: Any, betas: Any, searched: bool, choice: bool
) -> None:
    given = {**SMALLEST, "forget": {"data": {"path": "f"}, "alpha": alpha}, "merge": {"filter": "off"}}
    recipe = load_recipe({**given, "retain": {"data": {"path": "r"}, "beta": beta}})
    assert (recipe.alphas, recipe.betas, recipe.is_searched, recipe.has_choice) == (alphas, betas, searched, choice)
    assert bool(recipe.points) != searched
    assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_the_share_of_a_benchmark_is_the_papers_unless_it_is_given() -> None:
    for benchmark, share in (("tofu", 0.15), ("muse", 0.15), ("restor", 0.1)):
        given = [f"evaluate.benchmark={benchmark}"]
        assert load_recipe(SMALLEST, given).validation == share
        assert load_recipe(SMALLEST, [*given, "select.validation=0.3"]).validation == 0.3


def test_a_changed_rule_is_told_and_a_repository_to_publish_to_is_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(SMALLEST, ["select.score=extraction"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model/manifest.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    warn_of_changes(tmp_path, dump_recipe(recipe))
    assert caplog.messages == []
    warn_of_changes(tmp_path, dump_recipe(load_recipe(SMALLEST)))
    assert "changed since the last run: select.score: extraction → none" in caplog.text
    caplog.clear()
    warn_of_changes(tmp_path, dump_recipe(load_recipe(SMALLEST, ["select.score=extraction", "publish.repo=me/mine"])))
    assert caplog.messages == [], "a repository to publish to replaces nothing"


@pytest.mark.parametrize(("text", "words"), [("a: [", "not YAML"), ("- 1", "is a mapping"), ("", "is a mapping")])
def test_a_file_that_is_no_recipe_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_recipe(path)


@pytest.mark.parametrize("kind", [Recipe, TrainingRecipe])
def test_every_field_has_a_line_of_documentation_in_the_schema(kind: type[Recipe] | type[TrainingRecipe]) -> None:
    schema = json_schema(kind)
    models = {kind.__name__: schema, **schema["$defs"]}
    bare = [
        f"{m}.{f}" for m, body in models.items() for f, item in body["properties"].items() if "description" not in item
    ]
    assert bare == []
    assert schema["additionalProperties"] is False


def test_the_recipes_command_lists_shows_validates_and_prints_the_schema(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def msa(*args: str, status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["msa-lite", "recipes", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        return capsys.readouterr()

    assert "quickstart" in json.loads(msa("list", "--json")[0])
    assert msa("show", "quickstart")[0] == shipped_recipes()["quickstart"].read_text()
    assert json.loads(msa("validate", "quickstart", "seed=3", "--json")[0])["seed"] == 3
    assert json.loads(msa("schema", "--kind", "training")[0])["required"] == ["model", "stages", "output"]
    assert json.loads(msa("validate", "train/small", "--json")[0])["stages"][2]["learning_rate"] == 5e-4
    assert json.loads(msa("schema")[0])["required"] == ["target", "forget", "output"]
    shown = json.loads(msa("show", "quickstart", "--json")[0])
    assert shown["text"] == shipped_recipes()["quickstart"].read_text()
    assert shown["recipe"]["output"] == "runs/quickstart"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("my-request.yaml", ["no such file: my-request.yaml", "{place}", "'my-requst.yaml'"]),
        ("sub", ["is a folder", "sub/recipe.yaml"]),
        ("link.yaml", ["link.yaml: is no file but"]),
        ("tofu/forget11", ["did you mean 'tofu/forget10'", "msa-lite recipes list"]),
    ],
)
def test_a_recipe_that_is_not_there_is_told_with_the_folder_and_near_names(
    name: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my-requst.yaml", "sub/recipe.yaml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("target: t\n")
    (tmp_path / "link.yaml").symlink_to(os.devnull)
    with pytest.raises(UsageError) as raised:
        load_recipe(name)
    message = str(raised.value)
    assert [part for part in parts if part.format(place=tmp_path) not in message] == []
    assert message.count("/forget") <= 3, "a few names, not all of them"


STAGES: dict[str, Any] = {
    "model": "m",
    "stages": [{"data": {"path": "a"}}, {"data": {"path": "b", "format": "text"}, "tokens": "20M"}],
    "output": "runs/x",
}


def test_training_in_stages_has_the_papers_numbers_and_overrides_by_number() -> None:
    stage = load_training(STAGES).stages[0]
    assert (stage.epochs, stage.learning_rate, stage.batch_size, stage.warmup_epochs) == (5, 1e-5, 32, 1.0)
    recipe = load_training(STAGES, ["stages.1.tokens=1.5M", "stages.0.data.name=full", "training.epochs=2"])
    stages = [(stage.tokens, stage.sets[0].name, stage.epochs) for stage in recipe.stages]
    assert stages == [(None, "full", 2), (1_500_000, None, 2)]
    assert load_training(yaml.safe_load(dump_recipe(recipe))) == recipe


FIXED = {"recited": 0.10, "left": 0.20, "kept": 0.85}
READ: list[tuple[list[str], dict[str, Any]]] = [
    (["vector.learning_rate=1e-4", "vector.lora.rank=4"], {"vector.learning_rate": 1e-4, "vector.lora.rank": 4}),
    (["forget.alpha=[0.5,1]"], {"points": [Strengths(0.5), Strengths(1.0)]}),
    (["forget.alpha=[0.5,1]", "retain={data: {path: r}, beta: [0, 1]}"],
     {"points": [Strengths(*point) for point in [(0.5, 0.0), (0.5, 1.0), (1.0, 0.0), (1.0, 1.0)]]}),
    (["evaluate=null", "forget.alpha=1"], {"points": [Strengths(1.0)]}),
    (["target=$output/history/target", "output=runs/other"], {"target": "runs/other/history/target"}),
    (["publish.repo=me/mine"], {"publish.repo": "me/mine", "publish.private": True}),
    ([], {"request": None, "verdict": True, "margins": FIXED}),
    (["request=Antrag Müller №3"], {"request": "Antrag Müller №3"}),
    (["verdict=off"], {"verdict": False, "margins": FIXED}),
    (["verdict.kept=0.7"], {"margins": FIXED | {"kept": 0.7}}),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), READ, ids=lambda value: str(value)[:60])
def test_overrides_reach_into_the_recipe(overrides: list[str], expected: dict[str, Any]) -> None:
    recipe = load_recipe(SMALLEST, overrides)
    for key, value in expected.items():
        actual = attrgetter(key)(recipe)
        assert (asdict(actual) if is_dataclass(actual) and isinstance(value, dict) else actual) == value


SHARED = ("mode=full", "lora={rank: 3}", "max_length=9", "optimizer=adamw", "compute=fp32", "micro_batch_size=1")
FAULTS: dict[str, str] = {
    **{f"retain.vector.{text}": f"retain.vector: {key}: both vectors share this; set vector.{key} for"
       for text in SHARED for key in [text.partition("=")[0]]},
    **{f"request={text}": "request: " for text in ("''", r'"two\nlines"', r'"\x1b[31mred"', "x" * 201, "1.5", "[a]")},
    "retain.vector.epochss=3": "retain.vector.epochss: unknown key (did you mean 'epochs'?)",
    "lr=1e-4": "lr: unknown key; here: vector.learning_rate",
    "retain.vector.lr=1e-4": "retain.vector.lr: unknown key; here: retain.vector.learning_rate",
    "vector.alpha=16": "vector.alpha: unknown key; here: vector.lora.alpha",
    "forget.beta=1": "forget.beta: unknown key; here: retain.beta",
    "publish.hub_model_id=me/mine": "publish.hub_model_id: unknown key; here: publish.repo",
    "gradient_checkpointing=true": "gradient_checkpointing: unknown key; there is none: a fit does so",
    "vector.epochs=true": "vector.epochs: a number is wanted, got True; or input should be 'auto', got True",
    "prior=null": "retain: is missing, and so is a prior",
    "forget.data.formt=qa": "forget.data.formt: unknown key (did you mean 'format'?)",
    "forget.alpha=true": "forget.alpha: a number is wanted, got True",
    "forget.alpha=[-1, 1]": "forget.alpha.0: input should be greater than or equal to 0, got -1",
    "forget.alpha=[1, false]": "forget.alpha.1: a number is wanted, got False",
    "forget.alpha=[]": "1 fault:\n  forget.alpha: list should have at least 1 item after validation, not 0, got []",
    "forget.alpha=[1, .inf]": "forget.alpha.1: input should be a finite number, got inf",
    "forget.alpha=[1, 1]": "stands twice",
    "retain={data: {path: r}, beta: [1, -1]}": "retain.beta.1: input should be greater than or equal to 0, got -1",
    "baseline={start: prior, scale: [0, 1]}": "baseline.scale.0: input should be greater than 0, got 0",
    "vector={batch_size: 32, micro_batch_size: 5}": "does not divide",
    "evaluate=null": "auto, and that needs scores to choose by: give forget.alpha (and retain",
    "evaluate={benchmark: muse, judge: {kind: openai}}": "nothing in muse is judged",
    "evaluate={benchmark: tofu, retain: {path: r, format: text}}": "retain.format: with tofu it",
    "merge={as: adapter, dtype: float32}": "an adapter is always fp32",
    "earlier=[runs/a, runs/b, runs/b/../a]": "earlier: runs/b/../a: stands there twice",
    "prompt={prompt: 'Q: {q}'}": "unknown or broken",
    "publish.private=false": "publish: settings without a repo to send to",
    "verdict={kept: 1.2}": "kept",
    "seed": "an override is key.sub=value",
    "target.name=x": "'models/target' stands there, which has no key name",
    ".".join(["a"] * 1000) + "=1": "1000 parts",
}  # fmt: skip


@pytest.mark.parametrize("override", FAULTS, ids=lambda text: text[:50])
def test_a_fault_is_told_with_its_key_and_the_nearest_name(override: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(SMALLEST, [override])
    assert FAULTS[override] in str(caught.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.epochs=auto", "training.epochs: input should be a valid integer"),
        ("stages.2.tokens=1M", "no 2 in a list of 2, which counts from 0"),
        ("stages.0.tokens=1M", "tokens: only for one data set of format text"),
        ("prompt=auto", "auto: only in a run"),
        ("lr=1", "lr: unknown key; here: training.learning_rate"),
        ("stages.0.num_train_epochs=1", "stages.0.num_train_epochs: unknown key; here: stages.0.epochs"),
    ],
)
def test_a_fault_of_a_training_is_told(override: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_training(STAGES, [override])
    assert told in str(caught.value)


def test_a_word_of_another_tool_leads_to_a_key_that_there_is() -> None:
    known = {key for full, _ in recipe_keys(Recipe) for key in accumulate(full.split("."), "{}.{}".format)}
    named = {key for hint in KEYS for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+|^\w+", hint)}
    assert named - known == {NOTHING}
    words = [word for others in KEYS.values() for word in others.split()]
    assert sorted(words) == sorted(set(words))
    for word in {*words} - Recipe.model_fields.keys():
        with pytest.raises(RecipeError, match=rf"{re.escape(word)}: unknown key; (here|there is none): [\w`]"):
            load_recipe(SMALLEST, [f"{word}=x"])


def test_every_fault_is_reported_at_once() -> None:
    overrides = [text for text in FAULTS if text.startswith(("prior=", "forget.data", "vector.epochs"))]
    with pytest.raises(RecipeError, match="3 faults") as caught:
        load_recipe(SMALLEST, overrides)
    assert [FAULTS[text] for text in overrides if FAULTS[text] not in str(caught.value)] == []
