"""Which checkpoint of a history is the prior, and what a recipe says of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.errors import RecipeError, UsageError
from msa_lite.pipeline.verbs.commands import find_verb
from msa_lite.recipe import load_recipe
from msa_lite.recipe.inputs import History, choose_prior

OLMO = "allenai/OLMo-2-1124-7B"
RECIPE: dict[str, Any] = {"target": "t", "forget": {"data": {"path": "f.jsonl"}}, "output": "runs/x"}
HISTORY: dict[str, Any] = {
    "checkpoints": [
        {"checkpoint": f"{OLMO}@tokens=3859B"},
        {"checkpoint": f"{OLMO}@stage1-step928646-tokens3896B"},
        {"checkpoint": "runs/history/stage-2", "seen_tokens": "20M"},
    ],
    "exposure": "3890B",
}


def chosen(exposure: Any, *counts: int, key: str = "seen_tokens") -> str:
    """The checkpoint that is taken of those named by their counts."""
    saved = [{"checkpoint": f"at-{count}", key: count} for count in counts]
    return choose_prior(History.model_validate({"checkpoints": saved, "exposure": exposure})).checkpoint


@pytest.mark.parametrize(
    ("exposure", "checkpoint", "why"),
    [
        ("3890B", f"{OLMO}@tokens=3859B", "the latest of 2 .* 3890B tokens \\(31B tokens before; 1 later checkpoint"),
        ("3859B", f"{OLMO}@tokens=3859B", "saved at that very point; 1 later checkpoint has seen it"),
        ("4T", f"{OLMO}@stage1-step928646-tokens3896B", "the latest of 3 .* at 4T tokens \\(104B tokens before$"),
        ("1.5T", "runs/history/stage-2", "the only checkpoint from before .*; 2 later checkpoints have seen it"),
        (["4T", "3858B", "3880B"], "runs/history/stage-2", "the forget data first came in at 3858B tokens"),
    ],
)
def test_the_latest_before_the_first_exposure_is_the_prior(exposure: Any, checkpoint: str, why: str) -> None:
    recipe = load_recipe(RECIPE | {"history": HISTORY | {"exposure": exposure}})
    assert recipe.prior_checkpoint == checkpoint
    assert re.search(why, str(recipe.prior_reason).removesuffix(")")), recipe.prior_reason


@given(st.lists(st.integers(0, 50), min_size=1, unique=True), st.lists(st.integers(0, 50), min_size=1))
@settings(max_examples=50)
def test_the_choice_is_the_greatest_count_up_to_the_first_exposure(counts: list[int], exposures: list[int]) -> None:
    before = [count for count in counts if count <= min(exposures)]
    if before:
        assert chosen(exposures, *counts) == chosen(exposures, *counts, key="step") == f"at-{max(before)}"
    else:
        late = min(counts) - min(exposures)
        with pytest.raises(ValueError, match=rf"the earliest, at-{min(counts)}, .* {late} tokens? too late"):
            chosen(exposures, *counts)


def test_steps_count_where_no_tokens_are_known() -> None:
    saved = [{"checkpoint": f"EleutherAI/pythia-1b@step{step}000"} for step in (1, 2, 3)]
    recipe = load_recipe(RECIPE | {"history": {"checkpoints": saved, "exposure": "2500"}})
    assert recipe.prior_checkpoint == "EleutherAI/pythia-1b@step2000"
    assert "step 2500 (500 steps before; 1 later checkpoint" in str(recipe.prior_reason)
    # Steps that are given set aside the tokens of the name.
    given_steps = {"checkpoint": f"{OLMO}@stage1-step928646-tokens3896B", "step": 928_646}
    with_steps = {"checkpoints": [given_steps, {"checkpoint": "runs/a", "step": "930000"}], "exposure": 929_000}
    assert load_recipe(RECIPE | {"history": with_steps}).prior_checkpoint == given_steps["checkpoint"]


PYTHIA = [{"checkpoint": f"EleutherAI/pythia-1b@step{step}"} for step in (1000, 71_000, 143_000)]


@pytest.mark.parametrize("exposure", ["150B", "71k", ["71000", "0.15T "]])
def test_an_exposure_in_tokens_beside_checkpoints_in_steps_is_refused(exposure: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"1 fault:\n.*exposure: that is how tokens are written, but the checkpoints count"
    ):
        load_recipe(RECIPE | {"history": {"checkpoints": PYTHIA, "exposure": exposure}})
    of_tokens = [{"checkpoint": item["checkpoint"], "seen_tokens": f"{i}B"} for i, item in enumerate(PYTHIA)]
    with_tokens = {"checkpoints": of_tokens, "exposure": exposure}
    assert load_recipe(RECIPE | {"history": with_tokens}).prior_checkpoint.startswith("EleutherAI/pythia-1b@step")


@pytest.mark.parametrize(
    ("checkpoints", "exposure", "says"),
    [
        (
            [
                {"checkpoint": "a"},
                {"checkpoint": f"{OLMO}@stage2-ingredient1-step1000-tokens5B"},
                {"checkpoint": "b", "step": 3, "seen_tokens": 4},
                {"checkpoint": "c", "step": "1.5"},
                {"checkpoint": "d", "stp": 3},
            ],
            True,
            [
                "6 faults",
                "history.checkpoints.0: a: the name does not say when",
                f"history.checkpoints.1: {OLMO}@stage2-ingredient1-step1000-tokens5B: the name counts from the start",
                "history.checkpoints.2: give one of",
                "history.checkpoints.3.step: a whole number",
                "history.checkpoints.4.stp: unknown key (did you mean 'step'?)",
                "history.exposure: a whole number",
            ],
        ),
        (
            [{"checkpoint": "a", "step": 3}, {"checkpoint": "b", "step": 3}, {"checkpoint": "a", "step": 4}],
            1,
            [
                "a and b are both from step 3",
                "a is said to be from step 3 and from step 4",
                "exposure: no checkpoint is from before step 1; the earliest, a, was saved at step 3, 2 steps too late",
            ],
        ),
        (
            [{"checkpoint": "a", "step": 3}, {"checkpoint": "b", "seen_tokens": "3B"}],
            "4B",
            ["history: checkpoints: some count in tokens, a only in steps; give seen_tokens of all"],
        ),
    ],
)
def test_what_is_wrong_with_a_history_is_said_at_once(checkpoints: Any, exposure: Any, says: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPE | {"history": {"checkpoints": checkpoints, "exposure": exposure}})
    assert [part for part in says if part not in str(caught.value)] == [], caught.value


def test_a_recipe_without_prior_and_history_needs_rows_to_keep_and_a_control() -> None:
    rows, holdout = {"retain": {"data": {"path": "keep.jsonl"}}}, {"evaluate": {"holdout": {"path": "unseen.jsonl"}}}
    with pytest.raises(RecipeError, match=r"retain: is missing, and so is a prior. Name the prior, or a history"):
        load_recipe(RECIPE | holdout)
    with pytest.raises(RecipeError, match=r"evaluate\.holdout: without a prior or an ideal"):
        load_recipe(RECIPE | rows)
    with pytest.raises(RecipeError, match=r"baseline\.start: there is no prior"):
        load_recipe(RECIPE | rows | holdout, ["baseline.start=prior"])
    recipe = load_recipe(RECIPE | rows | holdout)
    assert (recipe.prior_checkpoint, recipe.has_prior) == (recipe.target, False)
    assert "no prior" in str(recipe.prior_reason)
    assert "filter is off" not in str(recipe.prior_reason)
    assert str(load_recipe(recipe, ["merge.filter=off"]).prior_reason).endswith("; here the filter is off")
    with pytest.raises(UsageError, match="nothing to probe"):
        find_verb("probe", recipe)


def test_a_recipe_has_a_prior_or_a_history() -> None:
    with pytest.raises(RecipeError, match=r"prior: stands beside a history, .* leave out one, or set it null"):
        load_recipe(RECIPE | {"prior": "p", "history": HISTORY})
    with pytest.raises(RecipeError) as caught:  # a faulty history is not taken for none
        load_recipe(RECIPE | {"history": {"checkpoints": []}})
    assert "prior" not in str(caught.value)
    given_prior = load_recipe(RECIPE | {"history": HISTORY}, ["prior=p", "history=null"])
    assert (given_prior.prior_checkpoint, given_prior.prior_reason) == ("p", None)
