"""A prior that is extended in memory by the rows of tokens that only the target has, and saved without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from msa_lite.data import Example
from msa_lite.errors import UsageError
from msa_lite.evals.engine.models import load_model
from msa_lite.io.weights.adapter import ADAPTER_FILE, base_name
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import copy_tokenizer, fetch, fetch_tokenizer, has_tokenizer
from msa_lite.io.weights.vocabulary import AddedRows, cut_adapter, find_added_rows, has_token_role, without_added_rows
from msa_lite.train import FitSettings, fit_vector
from msa_lite.train.memory.model import load_trainable
from tests.support.merges import read_checkpoint
from tests.support.models import tiny_tokenizer

Make = Callable[..., Path]
MORE = 310


def rows_of(target: Path, prior: Path, known: int | None = None) -> AddedRows:
    added = find_added_rows(load_checkpoint(target), load_checkpoint(prior), known)
    assert added is not None
    return added


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_added_rows_are_the_targets_and_all_else_is_the_priors(make_checkpoint: Make, kind: str, stored: str) -> None:
    target, prior = make_checkpoint(kind, 3, stored, vocab_size=MORE), make_checkpoint(kind, 1)
    added = rows_of(target, prior)
    before, theirs = load_model(prior), load_model(target)
    for model in (load_model(prior, added=added), load_trainable(prior, FitSettings(mode="full"), added)):
        assert model.config.vocab_size == MORE
        for part in ("get_input_embeddings", "get_output_embeddings"):
            weight = getattr(model, part)().weight
            assert weight.shape[0] == MORE
            assert torch.equal(weight[:300], getattr(before, part)().weight)
            assert torch.equal(weight[300:], getattr(theirs, part)().weight[300:])
        ids = torch.arange(20)[None]
        assert torch.equal(model(ids).logits[..., :300], before(ids).logits)
        model(torch.tensor([[305]]))  # which the prior alone cannot read


def test_rows_of_padding_are_taken_over_and_given_back(make_checkpoint: Make, tmp_path: Path) -> None:
    target, prior = make_checkpoint("llama", 3, vocab_size=MORE), make_checkpoint("llama", 1, vocab_size=320)
    added = rows_of(target, prior, known=304)
    assert (added.start, added.stop, added.own_rows, added.rows) == (304, MORE, 320, 320)
    model = load_trainable(prior, FitSettings(mode="full"), added)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    with without_added_rows(model, added) as how:
        model.save_pretrained(tmp_path / "tuned", **how)
    name = "model.embed_tokens.weight"
    tuned, own = read_checkpoint(tmp_path / "tuned")[name], read_checkpoint(prior)[name]
    np.testing.assert_allclose(tuned[:304], own[:304] + 1, rtol=1e-6)
    assert (tuned[304:] == own[304:]).all()
    assert "lm_head.weight" not in read_checkpoint(tmp_path / "tuned")  # tied still


def test_an_adapters_factors_are_cut_to_the_priors_rows(make_checkpoint: Make, tmp_path: Path) -> None:
    target, prior = make_checkpoint("qwen2", 3, vocab_size=MORE), make_checkpoint("qwen2", 1, vocab_size=308)
    added = rows_of(target, prior, known=304)
    prefix = "base_model.model."
    factors: dict[str, Any] = {
        f"{prefix}model.embed_tokens.lora_embedding_A": np.ones((2, MORE), np.float32),
        f"{prefix}model.embed_tokens.lora_embedding_B": np.ones((32, 2), np.float32),
        f"{prefix}lm_head.lora_A.weight": np.ones((2, 32), np.float32),
        f"{prefix}lm_head.lora_B.weight": np.ones((MORE, 2), np.float32),
        f"{prefix}model.layers.0.mlp.up_proj.lora_B.weight": np.ones((48, 2), np.float32),
    }
    save_file(factors, tmp_path / ADAPTER_FILE)
    cut_adapter(tmp_path, added)
    found = load_file(tmp_path / ADAPTER_FILE)
    for name, rows in ((f"{prefix}model.embed_tokens.lora_embedding_A", 0), (f"{prefix}lm_head.lora_B.weight", 1)):
        factor = found.pop(name).T if rows == 0 else found.pop(name)
        assert factor.shape == (308, 2)
        assert (factor[:304] == 1).all()
        assert (factor[304:] == 0).all()
    assert all((found[name] == factors[name]).all() for name in found)


def test_the_tokenizer_of_another_folder_takes_the_place_of_ones_own(tmp_path: Path) -> None:
    own, other, template = (tmp_path / name for name in ("own", "other", "template"))
    for folder in (own, other, template):
        folder.mkdir()
    for name in ("tokenizer.json", "vocab.json", "chat_template.jinja", "config.json"):
        (own / name).write_text("own")
    (other / "tokenizer.json").write_text("other")
    (other / "config.json").write_text("other")
    (template / "chat_template.jinja").write_text("template")
    copy_tokenizer(template, own)
    assert {p.name: p.read_text() for p in own.iterdir()} == {
        "tokenizer.json": "own", "vocab.json": "own", "chat_template.jinja": "template", "config.json": "own",
    }  # fmt: skip
    copy_tokenizer(other, own)
    assert {p.name: p.read_text() for p in own.iterdir()} == {"tokenizer.json": "other", "config.json": "own"}
    assert not has_tokenizer(template)
    with pytest.raises(UsageError, match="holds no tokenizer"):
        fetch_tokenizer(str(template))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"base_model_name_or_path": "org/model", "revision": None}, "org/model"),
        ({"base_model_name_or_path": "org/model", "revision": "v2"}, "org/model@v2"),
        ({"base_model_name_or_path": "base", "revision": "v2"}, "base"),
    ],
)
def test_an_adapters_base_is_a_folder_or_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    assert base_name(Path("lora")) == name
    (tmp_path / "lora/base").mkdir()  # beside the adapter comes first
    assert base_name(Path("lora")) == name.replace("base", "lora/base")


@pytest.mark.parametrize(("kind", "mode"), [("llama", "lora"), ("llama", "full"), ("qwen2", "full")])
def test_a_stopped_fit_of_an_extended_prior_ends_as_one_that_was_not(
    make_checkpoint: Make, tmp_path: Path, kind: str, mode: Any
) -> None:
    target, prior = make_checkpoint(kind, 3, vocab_size=MORE), make_checkpoint(kind, 1)
    source = replace(fetch(str(prior)), added=rows_of(target, prior))
    examples = [Example(i, [305, 10 + i, 20, 30 + i], [-100, 10 + i, 20, 30 + i]) for i in range(4)]
    settings = FitSettings(mode, lora_rank=2, epochs=3, learning_rate=1e-3, batch_size=2, warmup_epochs=0)
    common: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "settings": settings}

    def stop(label: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    fit_vector(source, examples, tmp_path / "calm", **common)
    with pytest.raises(KeyboardInterrupt):
        fit_vector(source, examples, tmp_path / "stopped", **common, progress=stop)
    fit_vector(source, examples, tmp_path / "stopped", **common)
    calm, stopped = (read_checkpoint(tmp_path / name) for name in ("calm", "stopped"))
    assert all((calm[name] == stopped[name]).all() for name in calm)
    if mode == "lora":
        assert all("lora_" in name for name in calm)  # no copy of the extended embedding
    else:
        own = read_checkpoint(prior)
        assert {name: array.shape for name, array in calm.items()} == {name: array.shape for name, array in own.items()}
        assert json.loads((tmp_path / "calm/config.json").read_text())["vocab_size"] == 300


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, True) for name in (
            "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias", "wte.weight", "gpt_neox.embed_in.weight",
            "embed_out.weight", "transformer.word_embeddings.weight", "shared.weight", "output.weight", "head.weight",
            "model.tok_embeddings.weight", "rwkv.embeddings.weight", "embed.weight", "model.embedding.weight",
        )),
        *((name, False) for name in (
            "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "transformer.wpe.weight",
            "embeddings.position_embeddings.weight", "vision.patch_embedding.weight",
            "model.layers.0.attention.output.weight", "encoder.layer.0.head.weight", "embed_tokens", "",
        )),
    ],
)  # fmt: skip
def test_embedding_and_head_are_known_by_their_modules(name: str, role: bool) -> None:
    assert has_token_role(name) is role
