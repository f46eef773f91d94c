"""Written recipes run by mergekit itself, with the command that stands in them, against msa-lite's own merge.

Weights are compared, and which configuration and tokenizer the result gets. mergekit's entry point is called in this
process, as its import takes longer than all merges here; one run goes through a shell, for its quoting.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import msa_lite
from msa_lite.merger.formula import named_strengths
from msa_lite.merger.mergekit.recipes import MergeRequest, Reference
from tests.support.models import load_weights
from tests.unit.test_mergekit import merge_of, write

Make = Callable[..., Path]
ALPHA, BETA = 0.75, 0.5
MORE_THAN_LORA = {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "down_proj"]}


def request_of(target: Path, forget: Path, retain: Path | None = None, prior: Path | None = None) -> MergeRequest:
    refs = [Reference(str(path)) if path else None for path in (target, forget, retain, prior)]
    assert refs[0] is not None
    return merge_of(refs[0], refs[1], ALPHA, refs[2], BETA if retain else 0.0, refs[3], "same")


def write_text(request: MergeRequest, stored: str, adapters: tuple[bool, bool], needs_prior: bool = False) -> str:
    return write(request, adapters, needs_prior, stored)


def run_mergekit(text: str, folder: Path) -> Path:
    """Save a recipe and run the command that it gives in its comments, as mergekit's entry point would be called."""
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    (folder / "CONFIG").write_text(text, encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("#   mergekit-yaml ")]
    words = [word.replace("OUT", str(folder / "OUT")) for word in shlex.split(line)[2:]]
    words[0] = str(folder / "CONFIG")
    done = CliRunner().invoke(main, [*words, "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0
    return folder / "OUT"


def arguments_of(request: MergeRequest) -> dict[str, Any]:
    """What `msa_lite.merge` takes, all but the dtype."""
    vectors = {term.name: str(term.vector) for term in request.terms}
    prior = str(request.prior) if request.prior else None
    return {"target": str(request.target), **vectors, "prior": prior, **named_strengths(request.terms)}


def merge_here(request: MergeRequest, out: Path) -> dict[str, torch.Tensor]:
    return load_weights(msa_lite.merge(**arguments_of(request), out=out, dtype=request.dtype).folder)


def merge_exactly(request: MergeRequest, folder: Path) -> dict[str, torch.Tensor]:
    """The merge in fp64, rounded to fp32."""
    merged = msa_lite.merge(**arguments_of(request), out=folder / "exact", dtype="float32", exact=True)
    return load_weights(merged.folder)


def assert_same_companions(out: Path, target: Path) -> None:
    """The result has the target's tokenizer, chat template and configuration, not the prior's."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (target / name).read_bytes(), name
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (target, out))
    assert theirs["max_position_embeddings"] == ours["max_position_embeddings"] == 512


def assert_same_bits(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> int:
    """Equal bfloat16 weights, but for ties: where the result lies within fp32's rounding of the middle between two.

    exact: the result before it is rounded. Returns how many weights are such ties and differ.
    """
    assert ours.keys() == theirs.keys()
    differing = 0
    for name, value in theirs.items():
        middle = (ours[name].double() + value.double()) / 2
        tie = (exact[name].double() - middle).abs() <= 3 * 2.0**-23 * exact[name].abs().clamp(min=0.1).double()
        differs = ours[name].view(torch.int16) != value.view(torch.int16)
        assert not (differs & ~tie).any(), name
        differing += int(differs.sum())
    return differing


def assert_near(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], roundings: float) -> None:
    """Within so many fp32 roundings at the size of the larger of the weight and 0.1."""
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        unit = value.abs().clamp(min=0.1).double() * 2.0**-23
        assert ((ours[name].double() - value.double()).abs() <= roundings * unit).all(), name


@pytest.mark.parametrize("has_retain", [True, False])
def test_adapters_on_the_target_give_the_same_weights(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, has_retain: bool
) -> None:
    target = make_checkpoint("llama", dtype="bfloat16", chat=True, max_position_embeddings=512)
    forget, retain = make_adapter("llama", 1, use_rslora=True), make_adapter("llama", 2, r=3)
    request = request_of(target, forget, retain if has_retain else None)
    out = run_mergekit(write_text(request, "bfloat16", (True, True)), tmp_path)
    theirs, ours, before = load_weights(out), merge_here(request, tmp_path / "ours"), load_weights(target)
    assert {value.dtype for value in theirs.values()} == {torch.bfloat16}
    assert assert_same_bits(ours, theirs, merge_exactly(request, tmp_path)) <= 2  # of 25,120
    assert any(not torch.equal(value, before[name]) for name, value in theirs.items())
    assert_same_companions(out, target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_checkpoints_give_the_same_weights(make_checkpoint: Make, tmp_path: Path, dtype: str) -> None:
    target = make_checkpoint("qwen2", 0, "bfloat16", chat=True, max_position_embeddings=512)
    prior, forget, retain = (make_checkpoint("qwen2", seed, "bfloat16") for seed in (1, 2, 3))
    request = replace(request_of(target, forget, retain, prior), dtype=dtype)
    out = run_mergekit(write_text(request, "bfloat16", (False, False)), tmp_path)
    theirs, ours = load_weights(out), merge_here(request, tmp_path / "ours")
    assert {str(value.dtype) for value in theirs.values()} == {f"torch.{dtype}"}
    if dtype == "bfloat16":
        assert [name for name, value in theirs.items() if not torch.equal(value, ours[name])] == []
    assert_near(theirs, ours, roundings=2)
    assert_same_companions(out, target)


def merge_with_peft(prior: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The prior with an adapter merged by PEFT, in fp64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prior, dtype=torch.float64)
    return dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())


def test_adapters_with_whole_modules_are_applied_to_the_prior(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target = make_checkpoint("qwen2", 0, chat=True, max_position_embeddings=512)
    prior, forget = make_checkpoint("qwen2", 1), make_adapter("qwen2", 1, **MORE_THAN_LORA)
    retain = make_adapter("qwen2", 2, use_dora=True)
    request = request_of(target, forget, retain, prior)
    out = run_mergekit(write_text(request, "float32", (True, True), needs_prior=True), tmp_path)
    tuned, kept, old = merge_with_peft(prior, forget), merge_with_peft(prior, retain), load_weights(prior)
    wanted = {
        name: w.double() - ALPHA * (tuned[name] - old[name].double()) + BETA * (kept[name] - old[name].double())
        for name, w in load_weights(target).items()
    }
    assert_near(load_weights(out), wanted, roundings=3)
    assert_near(merge_here(request, tmp_path / "ours"), wanted, roundings=3)
    before = load_weights(target)
    assert (load_weights(out)["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max() > 1e-3
    assert_same_companions(out, target)


@pytest.mark.parametrize("adapters", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("needs_prior", [True, False])
@pytest.mark.parametrize("strengths", [(0.75, 0.5), (1e-05, 1e-05), (1.0, 0.0), (0.0, 1e16), (0.0, 0.0)])
def test_every_form_is_valid_and_holds_the_numbers(
    adapters: tuple[bool, bool], needs_prior: bool, strengths: tuple[float, float]
) -> None:
    from mergekit.config import MergeConfiguration

    names = [Reference("org/target", "main"), Reference("a@b/forget"), Reference("org/retain"), Reference("org/prior")]
    request = merge_of(names[0], names[1], strengths[0], names[2], strengths[1], names[3], "same")
    config = MergeConfiguration.model_validate(
        yaml.safe_load(write_text(request, "float16", adapters, needs_prior=needs_prior))
    )
    assert config.models
    weights = {(m.model.lora or m.model.model).path: (m.parameters or {})["weight"] for m in config.models}
    assert all(isinstance(weight, float) for weight in weights.values())
    alpha, beta = strengths
    wanted = {"a@b/forget": -alpha} if alpha else {}
    wanted |= {"org/retain": beta} if beta else {}
    if (alpha and not adapters[0]) or (beta and not adapters[1]) or (needs_prior and (alpha or beta)):
        wanted |= {"org/target": 1.0, "org/prior": alpha - beta}
    assert weights == (wanted or {"org/target": 1.0})
    assert (str(config.base_model), config.dtype, config.out_dtype) == ("org/target@main", "float32", "float16")
    options: dict[str, Any] = {"normalize": False, "lambda": 1.0} if alpha or beta else {"normalize": False}
    assert config.parameters == options
    assert len({m.model for m in config.models}) == len(config.models)
