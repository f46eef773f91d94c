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
from msa_lite.errors import MismatchError, UsageError
from msa_lite.evals.engine.models import load_model
from msa_lite.io.finished.seal import MERGEKIT_FILE, load_manifest
from msa_lite.io.weights.adapter import ADAPTER_FILE, base_name
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import copy_tokenizer, fetch, fetch_tokenizer, has_tokenizer
from msa_lite.io.weights.vocabulary import (
    AddedRows,
    cut_adapter,
    find_added_rows,
    has_token_role,
    token_tensors,
    without_added_rows,
)
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.checks import memory
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


# Merges of checkpoints and adapters with more or fewer tokens than the target: the common rows, and no others.


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven rows of an embedding, so that common rows end within one."""
    monkeypatch.setattr(memory, "BLOCK", 7 * 32)


def expected(target: Path, tuned: Path, prior: Path, alpha: float) -> dict[str, np.ndarray]:
    """θ_D − α (θ_1 − θ_0) in fp64 on the rows that all three have; the target's others as they are."""
    theirs, one, zero = (read_checkpoint(folder) for folder in (target, tuned, prior))
    result = {}
    for name, weight in theirs.items():
        values = weight.astype(np.float64)
        rows = min(len(weight), len(one[name]), len(zero[name]))
        values[:rows] -= alpha * (one[name][:rows].astype(np.float64) - zero[name][:rows].astype(np.float64))
        result[name] = values
    return result


# Models in which other weights have as many rows as there are tokens.
SAME = [
    ("gpt2", {"n_embd": 75, "n_head": 5}),  # 4 × 75 rows in c_proj of each MLP, and its embedding is its head
    ("llama", {"hidden_size": 300, "num_attention_heads": 6, "num_hidden_layers": 1}),
    ("qwen2", {"intermediate_size": 300}),
]


@pytest.mark.parametrize(
    ("kind", "sizes", "theirs", "tuned", "prior"),
    [
        ("qwen2", {}, MORE, MORE, 300),
        ("qwen2", {}, 300, MORE, MORE),
        ("llama", {}, MORE, MORE, 300),
        *((kind, sizes, MORE, 300, 300) for kind, sizes in SAME),
    ],
)
def test_full_checkpoints_are_merged_on_the_common_rows(
    make_checkpoint: Make, tmp_path: Path, kind: str, sizes: dict[str, int], theirs: int, tuned: int, prior: int
) -> None:
    target = make_checkpoint(kind, 0, vocab_size=theirs, **sizes)
    one = make_checkpoint(kind, 2, vocab_size=tuned, **sizes)
    zero = make_checkpoint(kind, 1, vocab_size=prior, **sizes)
    merged = merge(str(target), tmp_path / "out", forget=str(one), alpha=0.7, prior=str(zero), exact=True)
    oracle, found, before = expected(target, one, zero, 0.7), read_checkpoint(merged.folder), read_checkpoint(target)
    for name, values in oracle.items():
        np.testing.assert_array_equal(found[name], values.astype(np.float32), name)
    wider = [name for name, values in before.items() if len(values) == MORE]
    assert bool(wider) == (theirs == MORE)
    for name in wider:  # bit for bit, and said
        assert found[name][300:].tobytes() == before[name][300:].tobytes()
        assert any(name in note and "310 tokens" in note and "300" in note for note in merged.notes)
    assert bool(merged.notes) == bool(wider)
    manifest = load_manifest(merged.folder) or {}
    assert manifest["change"]["notes"] == list(merged.notes)
    assert "mergekit cannot do this merge" in (merged.folder / MERGEKIT_FILE).read_text()


@pytest.mark.parametrize(("theirs", "own"), [(MORE, 300), (300, MORE)])
@pytest.mark.parametrize("dora", [False, True])
def test_lora_on_embedding_and_head_changes_the_common_rows(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, theirs: int, own: int, dora: bool
) -> None:
    target = make_checkpoint("qwen2", 3, vocab_size=theirs)
    prior = make_checkpoint("qwen2", 0, vocab_size=own)
    modules = ["lm_head", "q_proj"] + ([] if dora else ["embed_tokens"])
    forget = make_adapter("qwen2", model={"vocab_size": own}, target_modules=modules, use_dora=dora)
    # What the adapter changes of its own prior, by a merge without any difference in tokens.
    alone = merge(str(prior), tmp_path / "alone", forget=str(forget), prior=str(prior), exact=True, dtype="float32")
    merged = merge(str(target), tmp_path / "out", forget=str(forget), prior=str(prior), exact=True)
    before, found = read_checkpoint(target), read_checkpoint(merged.folder)
    zero, one = read_checkpoint(prior), read_checkpoint(alone.folder)
    common = min(theirs, own)
    for name in modules:
        tensor = {"lm_head": HEAD, "embed_tokens": EMBED}.get(name, "model.layers.0.self_attn.q_proj.weight")
        rows = common if name != "q_proj" else len(before[tensor])
        wanted = before[tensor].astype(np.float64)
        wanted[:rows] += one[tensor][:rows].astype(np.float64) - zero[tensor][:rows].astype(np.float64)
        np.testing.assert_allclose(found[tensor], wanted, atol=1e-7)
        assert np.abs(found[tensor][:rows] - before[tensor][:rows]).max() > 1e-4
        assert found[tensor][rows:].tobytes() == before[tensor][rows:].tobytes()
    assert bool(merged.notes) == (theirs == MORE)
    again = merge(str(target), tmp_path / "fast", forget=str(forget), prior=str(prior))  # by one product of factors
    np.testing.assert_allclose(read_checkpoint(again.folder)[HEAD], found[HEAD], atol=1e-6)


def test_whole_new_embeddings_are_seen_from_the_prior_on_the_common_rows(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, prior = make_checkpoint("qwen2", 3, vocab_size=MORE), make_checkpoint("qwen2", 0)
    forget = make_adapter("qwen2", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    merged = merge(str(target), tmp_path / "out", forget=str(forget), prior=str(prior), exact=True)
    before, found = read_checkpoint(target)[EMBED], read_checkpoint(merged.folder)[EMBED]
    assert (found[:300] != before[:300]).mean() > 0.9
    assert found[300:].tobytes() == before[300:].tobytes()


def test_vectors_that_touch_no_embedding_need_no_equal_vocabulary(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, prior = make_checkpoint("llama", 0, vocab_size=MORE), make_checkpoint("llama", 1)
    merged = merge(str(target), tmp_path / "out", forget=str(make_adapter("llama")), prior=str(prior))
    assert merged.notes == ()
    assert "cannot" not in (merged.folder / MERGEKIT_FILE).read_text()


def test_what_differs_in_more_than_tokens_is_refused_with_all_of_it(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("qwen2", 1, vocab_size=MORE, intermediate_size=56)
    with pytest.raises(MismatchError) as raised:
        merge(str(make_checkpoint("qwen2")), tmp_path / "out", forget=str(prior), prior=str(prior))
    lines = str(raised.value).splitlines()
    assert len(lines) > 10
    assert all("embed_tokens" not in line for line in lines)


def test_an_adapter_on_other_tokens_makes_no_adapter_on_the_target(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target = make_checkpoint("qwen2", 3, vocab_size=MORE)
    forget = make_adapter("qwen2", target_modules=["lm_head"])
    with pytest.raises(MismatchError, match=r"lm_head\.weight: of more or fewer tokens than the target"):
        merge_adapters(str(target), tmp_path / "out", forget=str(forget), prior=str(make_checkpoint("qwen2")))


def test_rows_of_tokens_are_known_by_the_config_and_else_by_name(make_checkpoint: Make) -> None:
    checkpoint = load_checkpoint(make_checkpoint("qwen2"))
    assert set(token_tensors(checkpoint)) == {EMBED, HEAD}
    checkpoint.config.pop("vocab_size")
    assert set(token_tensors(checkpoint)) == {EMBED, HEAD}


@pytest.mark.parametrize(
    ("theirs", "own", "known", "rows"),
    [(MORE, 300, None, (300, MORE)), (MORE, MORE, 305, (305, MORE)), (MORE, MORE, None, None), (300, MORE, None, None)],
)
def test_added_rows_are_those_that_the_prior_has_no_token_for(
    make_checkpoint: Make, theirs: int, own: int, known: int | None, rows: tuple[int, int] | None
) -> None:
    target, prior = (load_checkpoint(make_checkpoint("qwen2", 0, vocab_size=size)) for size in (theirs, own))
    added = find_added_rows(target, prior, known)
    assert (added and (added.start, added.stop)) == rows
    if added:
        assert (added.own_rows, added.rows) == (own, MORE)
        other = load_checkpoint(make_checkpoint("qwen2", 5, vocab_size=theirs))
        found = find_added_rows(other, prior, known)
        assert found is not None
        assert json.dumps(found.describe()) != json.dumps(added.describe())


@pytest.mark.parametrize(("kind", "sizes"), SAME)
def test_weights_with_as_many_rows_as_tokens_are_merged_like_others(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    target, adapter = make_checkpoint(kind, 0, **sizes), make_adapter(kind, 1, model=sizes)
    merged = merge(str(target), tmp_path / "out", forget=str(adapter), alpha=0.7)
    before, after, factors = (read_checkpoint(folder) for folder in (target, merged.folder, adapter))
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in factors}
    assert {name.removesuffix(".weight") for name in before if (before[name] != after[name]).any()} == modules
    tokens = token_tensors(load_checkpoint(target))
    assert tokens.keys() <= {EMBED, HEAD, "transformer.wte.weight"}
    assert len(tokens) == (2 if kind == "qwen2" else 1)
