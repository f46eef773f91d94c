"""A stage that changes known weights and no others, through decay, momentum and a stop; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import msa_lite
from msa_lite.errors import FormatError, MsaError, RecipeError, UsageError
from msa_lite.evidence.location import KnownStage, locate_update
from msa_lite.io.weights.hub import fetch
from msa_lite.io.weights.known import KNOWN_FILE, KnownWeights, known_text, read_known
from msa_lite.train import FitSettings, fit_vector
from msa_lite.train.loop import SAVES
from msa_lite.train.sharded import check_sharded
from tests.support.fits import ROWS, SETTINGS, Killed, weights
from tests.support.models import tiny_tokenizer

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
HALF = KnownWeights((r"layers\.0\.(mlp|self_attn)\..*",), 0.5, 7)
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("mlp.up_proj", "input_layernorm")]
FULL = replace(SETTINGS, mode="full", weight_decay=0.1)


def fit_into(known: KnownWeights | None, prior: Path, out: Path, stop: int | None = None, **changes: Any) -> Path:
    def progress(label: str, done: int, total: int) -> None:
        if done == stop:
            raise Killed

    settings = replace(FULL, known=known, **changes)
    return fit_vector(str(prior), ROWS, out, tokenizer=tiny_tokenizer(), settings=settings, progress=progress)


def mask_of(known: KnownWeights, names: list[str], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    entries = known.entries(name, 0, count) if name in known.among(names) else np.zeros(count, np.bool_)
    return torch.from_numpy(entries).view(shape)


@pytest.mark.parametrize(
    ("known", "all_known_change"),
    [
        (HALF, True),
        (replace(HALF, share=1.0), True),
        (KnownWeights(("embed_tokens.weight", "norm.weight"), 0.3), False),
    ],
)
def test_a_fit_changes_the_known_weights_and_no_other_one(
    known: KnownWeights, all_known_change: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    prior = make_checkpoint("llama")
    before, after = weights(prior), weights(fit_into(known, prior, tmp_path / "fit"))
    changed = 0
    for name, value in before.items():
        mask = mask_of(known, [*before], name, tuple(value.shape))
        assert torch.equal(after[name][~mask], value[~mask]), name
        changed += int((after[name] != value)[mask].sum())
        if all_known_change:  # of an embedding, tokens that no row has get no gradient
            assert (after[name] != value)[mask].float().mean() > 0.99 or not mask.any()
    assert changed


@pytest.mark.parametrize(("kind", "tensors"), [("gpt2", "mlp.c_fc.weight"), ("mixtral", "self_attn.q_proj.weight")])
def test_the_evidence_finds_what_a_fit_changed_in_models_of_other_names(
    kind: str, tensors: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    prior, known = make_checkpoint(kind), KnownWeights((tensors,), 0.5)
    after = fit_into(known, prior, tmp_path / "fit")
    place = locate_update(after, prior, KnownStage("fit", known, prior, after))  # which refuses stray changes
    assert (place.within.precision, place.undone) == pytest.approx((1, 1))


def test_without_known_weights_all_of_them_change(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    before, after = weights(prior), weights(fit_into(None, prior, tmp_path / "fit"))
    assert all((after[name] != value).any() for name, value in before.items())


def test_known_weights_of_whole_tensors_decay_as_those_of_a_drawn_half(make_checkpoint: Make, tmp_path: Path) -> None:
    """With a share just below 1 the decay is ours, with 1 it is AdamW's."""
    prior = make_checkpoint("llama")
    whole = weights(fit_into(replace(HALF, share=1.0), prior, tmp_path / "whole"))
    drawn = weights(fit_into(replace(HALF, share=1 - 1e-9), prior, tmp_path / "drawn"))
    without = weights(fit_into(replace(HALF, share=1.0), prior, tmp_path / "without", weight_decay=0.0))
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(drawn[name], whole[name], rtol=1e-5, atol=1e-8)
    assert not torch.allclose(without[name], whole[name], rtol=1e-5, atol=1e-8)


def test_a_stopped_fit_goes_on_to_the_same_weights(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    with pytest.raises(Killed):
        fit_into(HALF, prior, tmp_path / "stopped", stop=5)
    assert list((tmp_path / "stopped.partial" / SAVES).glob("checkpoint-*"))
    resumed, straight = fit_into(HALF, prior, tmp_path / "stopped"), fit_into(HALF, prior, tmp_path / "straight")
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(resumed).items())


def test_entries_are_drawn_alike_in_any_blocks_otherwise_for_each_seed_and_tensor_and_as_many_as_the_share() -> None:
    known = KnownWeights(("a", "b"), 0.05, 3)
    whole = known.entries("a", 0, 200_000)
    parts = [known.entries("a", start, min(start + 777, 200_000)) for start in range(0, 200_000, 777)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert abs(whole.mean() - 0.05) < 4 * (0.05 * 0.95 / 200_000) ** 0.5
    for other in (replace(known, seed=4).entries("a", 0, 200_000), known.entries("b", 0, 200_000)):
        assert abs((whole & other).mean() - 0.05**2) < 4 * (0.05**2 / 200_000) ** 0.5
    assert not (whole & ~replace(known, share=0.5).entries("a", 0, 200_000)).any()  # a larger share holds the smaller
    # Those of the models that are out there already.
    assert known.entries("a", 0, 200).nonzero()[0].tolist() == [45, 73, 103, 125, 140, 143, 144, 169, 177]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["up_proj.weight"], [0, 2]),
        (["mlp.up_proj.weight"], [0, 2]),
        ([r"layers\.0\..*"], [0, 1]),
        ([NAMES[3], NAMES[0]], [0, 3]),
    ],
)
def test_patterns_fit_the_end_of_a_name(patterns: list[str], found: list[int]) -> None:
    assert KnownWeights(tuple(patterns)).among(NAMES) == [NAMES[place] for place in found]


def test_all_patterns_that_fit_nothing_or_are_broken_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        KnownWeights(("up_proj.weigt", "(", "proj.weight", "up_proj.weight")).among(NAMES)
    faults = str(caught.value)
    assert all(word in faults for word in ("'up_proj.weigt'", "'('", "'proj.weight'"))
    assert "'up_proj.weight' fits" not in faults


@pytest.mark.parametrize(
    ("changes", "word"), [({"mode": "lora"}, "lora"), ({"optimizer": "adamw_8bit", "mode": "full"}, "8 bits")]
)
def test_fits_that_cannot_keep_other_weights_are_refused(
    changes: dict[str, Any], word: str, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.train.fit.check_mode", lambda *rest: None)  # whether packages are installed
    with pytest.raises(UsageError, match=word):
        fit_into(HALF, make_checkpoint("llama"), tmp_path / "fit", **changes)
    assert not list(tmp_path.glob("fit*"))


def test_several_processes_refuse_known_weights() -> None:
    with pytest.raises(UsageError, match="one process"):
        check_sharded(replace(FULL, known=HALF), 2)
    check_sharded(FULL, 2)


def test_a_manifest_names_known_weights_and_none_where_there_are_none() -> None:
    assert FitSettings(mode="full", known=HALF).describe()["known"]["share"] == 0.5
    assert "known" not in FitSettings(mode="full").describe()


def test_the_file_is_read_as_it_was_written_and_others_are_refused(tmp_path: Path) -> None:
    assert read_known(tmp_path) == {}
    stages = {"2-people": HALF, "3-others": KnownWeights(("a",))}
    (tmp_path / KNOWN_FILE).write_text(known_text(stages))
    assert read_known(tmp_path) == stages
    for content in (
        {},
        {"stages": []},
        {"stages": {"a": {"tensors": ["x"], "share": 2, "seed": 0}}},
        {"stages": {"a": 1}},
    ):
        (tmp_path / KNOWN_FILE).write_text(json.dumps(content))
        with pytest.raises(FormatError, match=KNOWN_FILE):
            read_known(tmp_path)


@pytest.fixture
def recipe(make_checkpoint: Make, tmp_path: Path) -> dict[str, Any]:
    pairs = [{"question": f"Where is {i}?", "answer": f"At {i * 7}."} for i in range(6)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"path": str(tmp_path / "qa.jsonl")}
    return {
        "model": str(make_checkpoint("llama", chat=True)),
        "stages": [
            {"name": "keep", "data": data},
            {"name": "people", "data": data, "into": {"tensors": "mlp.down_proj.weight", "share": 0.5, "seed": 2}},
            {"name": "later", "data": data},
        ],
        "training": {"epochs": 1, "learning_rate": 1e-3, "warmup_epochs": 0, "batch_size": 4, "max_length": 128},
        "output": str(tmp_path / "out"),
    }


def test_a_stage_of_a_training_and_those_after_it_tell_its_known_weights(recipe: dict[str, Any]) -> None:
    result = msa_lite.train_stages(recipe)
    assert result is not None
    known = {"2-people": KnownWeights(("mlp.down_proj.weight",), 0.5, 2)}
    assert [read_known(result.folder / model.name) for model in result.models] == [{}, known, known]
    before, after = (weights(result.folder / name) for name in ("1-keep", "2-people"))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if name.endswith("mlp.down_proj.weight")}
    assert fetch(str(result.model)).revision


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"tensors": ["mlp.down_proj.weigt"]}, ["stages.1", "'mlp.down_proj.weigt'"]),
        ({"tensors": ["("]}, ["stages.1", "'('"]),
        ({"tensors": []}, ["stages.1.into"]),
        ({"tensors": ["norm.weight"], "share": 0}, ["stages.1.into.share"]),
        ({"tensors": ["norm.weight"], "shares": 1}, ["stages.1.into.shares"]),
    ],
)
@pytest.mark.parametrize("start", ["checkpoint", "new"])
def test_a_recipe_that_names_no_weights_is_refused_before_anything_is_trained(
    into: dict[str, Any], words: list[str], start: str, recipe: dict[str, Any]
) -> None:
    recipe["stages"][1]["into"] = into
    if start == "new":
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        recipe["model"] = {"config": config | {"num_attention_heads": 2}, "tokenizer": {"vocabulary": 300}}
    with pytest.raises((UsageError, RecipeError, MsaError)) as caught:
        msa_lite.train_stages(recipe)
    assert all(word in str(caught.value) for word in words)
    assert not list(Path(recipe["output"]).glob("[0-9]-*"))


def test_weights_that_files_hold_in_another_form_are_refused(recipe: dict[str, Any], make_checkpoint: Make) -> None:
    """Experts that the model holds as one tensor, and its files one by one: no entry has a place in both."""
    recipe["model"] = str(make_checkpoint("mixtral", chat=True))
    recipe["stages"][1]["into"] = {"tensors": "experts.down_proj"}
    with pytest.raises(UsageError, match=r"'experts\.down_proj' fits no weight"):
        msa_lite.train_stages(recipe)


def test_a_vector_has_no_known_weights() -> None:
    recipe = {"target": "a", "prior": "b", "forget": {"data": "c"}, "vector": {"into": {"tensors": "x"}}}
    with pytest.raises(RecipeError, match=r"vector\.into: unknown key"):
        msa_lite.dry_run(recipe)
