"""Recipes: a closed schema, all faults at once, overrides, and what is shipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.cli import main
from msa_lite.errors import RecipeError, UsageError
from msa_lite.pipeline.run.folder import warn_of_changes
from msa_lite.recipe import (
    Recipe,
    TrainingRecipe,
    dump_recipe,
    load_recipe,
    load_training,
    shipped_recipes,
)
from msa_lite.recipe.gone import GONE
from msa_lite.recipe.remarks import filter_notice
from msa_lite.strengths import Strengths

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


def test_training_in_stages_has_the_papers_numbers_and_no_auto(tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": "m", "stages": [{"data": {"path": "d.jsonl"}}], "output": str(tmp_path)}
    stage = load_training(values).stages[0]
    assert (stage.epochs, stage.learning_rate, stage.batch_size, stage.warmup_epochs) == (5, 1e-5, 32, 1.0)
    with pytest.raises(RecipeError, match=r"training.epochs: .*got 'auto'"):
        load_training(values | {"training": {"epochs": "auto"}})


def test_how_vectors_are_fitted_is_a_number_or_auto() -> None:
    given = {"epochs": "auto", "learning_rate": "1e-4", "batch_size": 8, "warmup_epochs": 0}
    vector = load_recipe(SMALLEST | {"vector": given}).vector
    assert (vector.epochs, vector.learning_rate, vector.batch_size, vector.warmup_epochs) == ("auto", 1e-4, 8, 0)
    wrong = {"epochs": True, "learning_rate": "automatic", "batch_size": 0, "warmup_epochs": True}
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALLEST | {"vector": wrong})
    text = str(caught.value)
    assert "4 faults" in text
    for key, value in wrong.items():
        assert f"vector.{key}: " in text
        assert f"'auto', got {value!r}" in text
    assert "vector.epochs: a number is wanted" in text


def test_the_retain_vector_may_be_fitted_otherwise_than_the_forget_vector() -> None:
    given = {**SMALLEST, "retain": {"data": {"path": "r"}}, "vector": {"epochs": 5, "learning_rate": 1e-5}}
    plain = load_recipe(given)
    assert plain.vector_of("retain") == plain.vector_of("forget") == plain.vector
    recipe = load_recipe(given, ["retain.vector={epochs: 3, batch_size: auto}"])
    assert recipe.vector_of("forget") == plain.vector
    assert recipe.vector_of("retain") == plain.vector.model_copy(update={"epochs": 3, "batch_size": "auto"})
    assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_what_both_vectors_share_is_refused_beside_the_retain_set() -> None:
    given = {**SMALLEST, "retain": {"data": {"path": "r"}}}
    shared = ("mode=full", "lora={rank: 3}", "max_length=9", "optimizer=adamw", "compute=fp32", "micro_batch_size=1")
    for override in shared:
        key = override.partition("=")[0]
        with pytest.raises(RecipeError, match=f"retain.vector: {key}: both vectors share this; set vector.{key} for"):
            load_recipe(given, [f"retain.vector.{override}"])
    with pytest.raises(RecipeError, match=r"retain.vector.epoch: unknown key \(did you mean 'epochs'\?\)"):
        load_recipe(given, ["retain.vector.epoch=3"])
    with pytest.raises(RecipeError, match=r"retain.vector.epochs: .*greater than or equal to 1, got 0"):
        load_recipe(given, ["retain.vector.epochs=0"])


def test_papers_recipes_state_how_vectors_are_fitted() -> None:
    recipes = [load_recipe(name) for name in shipped_recipes() if name.startswith("paper/")]
    assert recipes
    for recipe in [*recipes, load_recipe("quickstart"), load_recipe("quickstart-smollm2")]:
        vector = recipe.vector
        assert "auto" not in (vector.epochs, vector.learning_rate, vector.batch_size)
    for recipe in recipes:
        assert (recipe.filters, recipe.hold) == ([0.0], 0.0)  # neither is of the paper


TRIED = ([1.0, 4.0], 1.0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], TRIED),
        (["vector.mode=qlora"], TRIED),
        (["vector.mode=full"], ([1.0, 4.0], 0.0)),  # a second copy of all weights would hold it
        (["vector.mode=full", "vector.hold=0.5"], ([1.0, 4.0], 0.5)),
        (["retain.beta=0"], TRIED),
        (["retain.beta=[0,0.5]"], TRIED),
        (["forget.alpha=[1,2]"], ([0.0], 0.0)),  # the user's own points
        (["forget.alpha=1"], ([0.0], 0.0)),
        (["forget.alpha=1", "retain.beta=0.5", "merge.filter=2"], ([2.0], 1.0)),
        (["forget.alpha=0"], ([0.0], 0.0)),
        (["merge.filter=off"], ([0.0], 0.0)),
        (["merge.filter=2", "vector.hold=0"], ([2.0], 0.0)),
        (["merge.filter=2", "vector.hold=off"], ([2.0], 0.0)),
        (["merge.filter=off", "vector.hold=0.5"], ([0.0], 0.5)),
        (["retain=null"], ([0.0], 0.0)),
        (["retain=null", "evaluate.holdout.path=h"], ([1.0, 4.0], 0.0)),  # holdout rows in their place
        (["prior=null", "evaluate.holdout.path=h"], ([1.0, 4.0], 0.0)),
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
        (["forget.alpha=1", "vector.hold=off"], "merge.filter=1 turns it on"),
        (["forget.alpha=1", "vector.hold=0.5"], "hold h = 0.5 (merge.filter, vector.hold); no filter, because"),
        (["forget.alpha=0"], None),
        (["forget.alpha=1", "merge.filter=off"], None),
        (["forget.alpha=1", "retain=null"], None),
    ],
    ids=str,
)
def test_a_run_tells_of_filter_and_hold_and_why_a_given_alpha_has_neither(
    overrides: list[str], told: str | None
) -> None:
    recipe = load_recipe({**SMALLEST, "retain": {"data": {"path": "r"}}}, overrides)
    notice = filter_notice(recipe)
    assert notice is None if told is None else told in (notice or "")
    if told and "turns it on" in told:
        filtered = load_recipe({**SMALLEST, "retain": {"data": {"path": "r"}}}, [*overrides, "merge.filter=1"])
        assert ("and the hold" in (notice or "")) == (filtered.hold > recipe.hold)


def test_a_key_of_a_thousand_parts_is_no_key() -> None:
    with pytest.raises(UsageError, match="1000 parts"):
        load_recipe(SMALLEST, [".".join(["a"] * 1000) + "=1"])


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
        ("auto", 0.5, None, [0.5], True, True),
        ("auto", [0.0, 0.5], None, [0.0, 0.5], True, True),
        ([1.0, 2.0], "auto", [1.0, 2.0], None, True, True),
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


def test_what_is_searched_needs_scores() -> None:
    with pytest.raises(RecipeError, match=r"auto, and that needs scores to choose by: give forget\.alpha \(and retain"):
        load_recipe(SMALLEST, ["evaluate=null"])
    assert load_recipe(SMALLEST, ["evaluate=null", "forget.alpha=1"]).points == [Strengths(1.0)]


def test_the_share_of_a_benchmark_is_the_papers_unless_it_is_given() -> None:
    for benchmark, share in (("tofu", 0.15), ("muse", 0.15), ("restor", 0.1)):
        given = [f"evaluate.benchmark={benchmark}"]
        assert load_recipe(SMALLEST, given).validation == share
        assert load_recipe(SMALLEST, [*given, "select.validation=0.3"]).validation == 0.3
    stated = {name: load_recipe(name).select.validation for name in shipped_recipes() if name.startswith("paper/")}
    assert set(stated.values()) == {0.15, 0.1}


def test_every_fault_is_reported_at_once_with_the_nearest_name() -> None:
    broken = {
        "target": 3,
        "forget": {"data": {"path": "f.jsonl", "formt": "qa"}, "alpha": [-1.0, 1.0]},
        "vectr": {},
        "vector": {"mode": "lorra", "lora": {"rank": 0}},
        "output": "runs/x",
    }
    with pytest.raises(RecipeError) as caught:
        load_recipe(broken)
    text = str(caught.value)
    for line in (
        "target: input should be a valid string, got 3",
        "retain: is missing, and so is a prior",
        "forget.data.formt: unknown key (did you mean 'format'?)",
        "forget.alpha.0: input should be greater than or equal to 0, got -1.0",
        "vectr: unknown key (did you mean 'vector'?)",
        "vector.mode: input should be 'lora', 'qlora' or 'full', got 'lorra'",
        "vector.lora.rank: input should be greater than or equal to 1, got 0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vector": {"batch_size": 32, "micro_batch_size": 5}}, "does not divide"),
        ({"forget": {"data": {"path": "f"}, "alpha": [1, 1]}}, "stands twice"),
        ({"evaluate": {"benchmark": "muse", "judge": {"kind": "openai"}}}, "nothing in muse is judged"),
        (
            {"evaluate": {"benchmark": "tofu", "retain": {"path": "r", "format": "text"}}},
            r"retain\.format: with tofu it",
        ),
        ({"merge": {"as": "adapter"}, "vector": {"mode": "full"}}, "vector.mode full makes no adapter"),
        ({"earlier": ["runs/a", "runs/b", "runs/b/../a"]}, "earlier: runs/b/../a: stands there twice"),
        ({"prompt": {"prompt": "Q: {q}"}}, "unknown or broken"),
        ({"prompt": {"answer": "no field"}}, "lacks {answer}"),
    ],
)
def test_values_that_contradict_each_other_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(SMALLEST | change)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("forget.alpha=true", "forget.alpha: a number is wanted, got True"),
        ("forget.alpha=[1, false]", "forget.alpha.1: a number is wanted, got False"),
        ("forget.alpha=[]", "forget.alpha: list should have at least 1 item after validation, not 0, got []"),
        (
            "forget.alpha=two",
            "forget.alpha: input should be a valid number, unable to parse string as a number, got 'two'",
        ),
        ("forget.alpha=[1, .inf]", "forget.alpha.1: input should be a finite number, got inf"),
        ("retain.beta=[1, -1]", "retain.beta.1: input should be greater than or equal to 0, got -1"),
        ("baseline.scale=[0, 1]", "baseline.scale.0: input should be greater than 0, got 0"),
        ("baseline.methods.npo.beta=[1, true]", "baseline.methods.npo.beta.1: a number or a word is wanted, got True"),
    ],
)
def test_a_value_or_a_list_has_one_plain_fault(override: str, fault: str) -> None:
    recipe = SMALLEST | {"retain": {"data": {"path": "r.jsonl"}}, "baseline": {"start": "prior"}}
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override])
    assert str(caught.value).startswith(f"recipe: 1 fault:\n  {fault}"), caught.value


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


def test_settings_of_publish_need_a_repository() -> None:
    publish = load_recipe(SMALLEST, ["publish.repo=me/mine", "publish.license=mit"]).publish
    assert (publish.repo, publish.private, publish.license) == ("me/mine", True, "mit")
    with pytest.raises(RecipeError, match="publish: settings without a repo to send to"):
        load_recipe(SMALLEST, ["publish.private=false"])


def test_overrides_reach_into_the_recipe_and_are_checked_like_it() -> None:
    recipe = load_recipe(
        SMALLEST, ["forget.alpha=[0.5, 1]", "vector.lora.rank=4", "vector.learning_rate=1e-4", "seed=7"]
    )
    assert recipe.points == [Strengths(0.5), Strengths(1.0)]
    assert (recipe.vector.lora.rank, recipe.vector.learning_rate, recipe.seed) == (4, 1e-4, 7)
    with pytest.raises(RecipeError, match=r"vector.rnk: unknown key"):
        load_recipe(SMALLEST, ["vector.rnk=4"])
    with pytest.raises(UsageError, match=r"an override is key.sub=value"):
        load_recipe(SMALLEST, ["seed"])
    with pytest.raises(UsageError, match="'models/target' stands there, which has no key name"):
        load_recipe(SMALLEST, ["target.name=x"])


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_is_gone_is_refused_with_its_new_form(key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("quickstart", [f"{key}=x"])
    assert f"{key}: is gone: {GONE[key]}" in str(caught.value)


@pytest.mark.parametrize("value", ["GDPR 2026-017", "Antrag Müller №3", "x" * 200, 2026017, None])
def test_a_request_has_an_id_of_one_line(value: str | int | None) -> None:
    recipe = load_recipe(SMALLEST | {"request": value})
    assert recipe.request == (value if value is None else str(value))
    assert load_recipe(SMALLEST, [f"request={2026017}"]).request == "2026017"
    assert load_recipe(SMALLEST).request is None


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "\x1b[31mred", "x" * 201, 1.5, True, ["a"]])
def test_what_is_no_id_of_a_request_is_refused(value: object) -> None:
    with pytest.raises(RecipeError, match="request: "):
        load_recipe(SMALLEST | {"request": value})


@pytest.mark.parametrize(("value", "read"), [("off", False), ("on", True), (False, False), (True, True)])
def test_the_verdict_is_switched_by_words_too(value: object, read: bool) -> None:
    assert load_recipe(SMALLEST | {"verdict": value}).verdict == read
    assert load_recipe(SMALLEST, [f"verdict={value}"]).verdict == read
    assert load_recipe(SMALLEST).verdict


def test_the_margins_of_a_pass_are_the_recipes_and_else_those_that_are_fixed() -> None:
    fixed = {"recited": 0.10, "left": 0.20, "kept": 0.85}
    for switch in (True, False):
        assert load_recipe(SMALLEST | {"verdict": switch}).margins.model_dump() == fixed
    assert load_recipe(SMALLEST | {"verdict": {"left": 0.3}}).margins.model_dump() == fixed | {"left": 0.3}
    assert load_recipe(SMALLEST, ["verdict.kept=0.7"]).margins.model_dump() == fixed | {"kept": 0.7}


@pytest.mark.parametrize(("margins", "fault"), [({"kept": 1.2}, r"verdict.*kept"), ({"recieted": 0.1}, "recieted")])
def test_a_wrong_margin_is_named(margins: dict[str, float], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        load_recipe(SMALLEST | {"verdict": margins})


def test_points_are_the_grid_and_beta_is_zero_without_a_retain_set() -> None:
    retain = {"data": {"path": "r.jsonl"}, "beta": [0, 1]}
    forget = {"data": {"path": "f.jsonl"}, "alpha": [0.5, 1]}
    recipe = load_recipe(SMALLEST | {"forget": forget, "retain": retain})
    assert recipe.points == [Strengths(*point) for point in [(0.5, 0.0), (0.5, 1.0), (1.0, 0.0), (1.0, 1.0)]]


def test_overrides_reach_into_lists_by_number() -> None:
    stages = [{"data": {"path": "a"}}, {"data": {"path": "b", "format": "text"}, "tokens": "20M"}]
    training = {"model": "m", "stages": stages, "output": "runs/x"}
    recipe = load_training(training, ["stages.1.tokens=1.5M", "stages.0.data.name=full", "training.epochs=2"])
    assert [(stage.tokens, stage.sets[0].name, stage.epochs) for stage in recipe.stages] == [
        (None, "full", 2),
        (1_500_000, None, 2),
    ]
    assert load_training(yaml.safe_load(dump_recipe(recipe))) == recipe
    with pytest.raises(UsageError, match="no 2 in a list of 2, which counts from 0"):
        load_training(training, ["stages.2.tokens=1M"])


def test_output_stands_for_the_run_folder_wherever_a_path_begins_with_it() -> None:
    recipe = load_recipe(SMALLEST | {"target": "$output/history/target"}, ["output=runs/other"])
    assert recipe.target == "runs/other/history/target"


@pytest.mark.parametrize(("text", "words"), [("a: [", "not YAML"), ("- 1", "is a mapping"), ("", "is a mapping")])
def test_a_file_that_is_no_recipe_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_recipe(path)


@pytest.mark.parametrize("kind", [Recipe, TrainingRecipe])
def test_every_field_has_a_line_of_documentation_in_the_schema(kind: type[Recipe] | type[TrainingRecipe]) -> None:
    schema = kind.model_json_schema()
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
        ("sub/nothing-like-it.yml", ["no such file", "{place}/sub", "no recipe there"]),
        ("nowhere/my.yaml", ["no such file", "no folder {place}/nowhere"]),
        ("sub", ["is a folder", "sub/recipe.yaml"]),
        ("tofu/forget11", ["did you mean 'tofu/forget10'", "msa-lite recipes list"]),
        ("quickstrat", ["did you mean 'quickstart'"]),
    ],
)
def test_a_recipe_that_is_not_there_is_told_with_the_folder_and_near_names(
    name: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my-requst.yaml", "sub/recipe.yaml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("target: t\n")
    with pytest.raises(UsageError) as raised:
        load_recipe(name)
    message = str(raised.value)
    assert [part for part in parts if part.format(place=tmp_path) not in message] == []
    assert message.count("/forget") <= 3, "a few names, not all of them"
