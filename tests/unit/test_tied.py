"""Embedding and head that are one matrix: one change where both change alike, and two matrices on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.finished.seal import MERGEKIT_FILE
from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.io.weights.matching import find_names
from msa_lite.io.weights.writer import write_companions
from msa_lite.merger import Precision, Term, merge, merge_adapters
from msa_lite.merger.checks.interference import measure_model
from msa_lite.merger.vectors.vector import compare_checkpoints
from msa_lite.pipeline.prepare.models import same_weights
from msa_lite.pipeline.run.merge import LoadedTarget
from tests.support.merges import make_adapter, read_checkpoint
from tests.support.models import tiny_config

Arrays = dict[str, np.ndarray]
E, H, Q = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"
ROWS, SIZE = 10, 4
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, SIZE)), RNG.normal(size=(ROWS, 2))
"""Factors of the head; the embedding's are Bᵀ and Aᵀ."""
FACTORS = {f"{Q}.lora_A.weight": RNG.normal(size=(2, SIZE)), f"{Q}.lora_B.weight": RNG.normal(size=(SIZE, 2))}
ON_HEAD = {f"{H}.lora_A.weight": A, f"{H}.lora_B.weight": B}
ON_EMBEDDING = {f"{E}.lora_embedding_A": B.T.copy(), f"{E}.lora_embedding_B": A.T.copy()}
WEIGHTS = {f"{E}.weight": RNG.normal(size=(ROWS, SIZE)), f"{Q}.weight": RNG.normal(size=(SIZE, SIZE))}
NEW = WEIGHTS[f"{E}.weight"] + RNG.normal(size=(ROWS, SIZE))
TIED = {"model_type": "llama", "vocab_size": ROWS, "tie_word_embeddings": True, "dtype": "float64"}


def make_model(folder: Path, step: float = 0.0, shards: bool = False) -> Path:
    folder.mkdir()
    arrays = {name: array + step for name, array in WEIGHTS.items()}
    files = {f"model-{number}.safetensors": {name: array} for number, (name, array) in enumerate(arrays.items())}
    for file, tensors in (files if shards else {"model.safetensors": arrays}).items():
        save_file(tensors, folder / file, {"format": "pt"})
    if shards:
        index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, part in files.items() for n in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(TIED))
    return folder


def change(tensors: Arrays, name: str) -> np.ndarray:
    """The change of a module by these parts of an adapter on the prior WEIGHTS, in fp64."""
    if f"{name}.weight" in tensors:
        return tensors[f"{name}.weight"] - WEIGHTS[f"{E}.weight"]
    if f"{name}.lora_embedding_A" in tensors:
        return 2 * (tensors[f"{name}.lora_embedding_B"] @ tensors[f"{name}.lora_embedding_A"]).T
    if f"{name}.lora_A.weight" in tensors:
        return 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    return np.zeros(1)


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        (ON_HEAD | ON_EMBEDDING, 2 * B @ A),
        ({f"{E}.weight": NEW, f"{H}.weight": NEW}, NEW - WEIGHTS[f"{E}.weight"]),
        ({f"{E}.weight": WEIGHTS[f"{E}.weight"], f"{H}.weight": WEIGHTS[f"{E}.weight"]}, 0),
        ({f"{H}.weight": WEIGHTS[f"{E}.weight"]}, 0),
        ({f"{E}.weight": WEIGHTS[f"{E}.weight"].astype(np.float32)}, 0),
    ],
)
def test_what_changes_both_uses_alike_is_one_change(tmp_path: Path, parts: Arrays, changed: Any) -> None:
    prior, target = make_model(tmp_path / "prior"), make_model(tmp_path / "target", 1.0)
    adapter = make_adapter(tmp_path / "a", FACTORS | parts, ensure_weight_tying=True)
    merge(target, tmp_path / "out", forget=adapter, prior=prior, exact=True)
    out = read_checkpoint(tmp_path / "out")
    assert out.keys() == WEIGHTS.keys()
    assert np.allclose(out[f"{E}.weight"], WEIGHTS[f"{E}.weight"] + 1 - changed, atol=1e-13)
    assert np.allclose(out[f"{Q}.weight"], WEIGHTS[f"{Q}.weight"] + 1 - change(FACTORS, Q), atol=1e-13)
    merge(target, tmp_path / "single", forget=adapter, prior=prior, dtype="float32")
    recipe = (tmp_path / "single" / MERGEKIT_FILE).read_text()  # PEFT adds factors twice, and mergekit merges by PEFT
    assert ("would add that change twice" in recipe) is bool(np.any(changed))


APART = [
    ON_HEAD,
    ON_EMBEDDING,
    ON_HEAD | {f"{E}.lora_embedding_A": RNG.normal(size=(2, ROWS)), f"{E}.lora_embedding_B": A.T.copy()},
    {f"{H}.weight": NEW},
    {f"{E}.weight": NEW, f"{H}.weight": NEW + 1},
    {f"{E}.weight": NEW} | ON_HEAD,  # as mergekit-extract-lora writes them
]


@pytest.mark.parametrize("parts", APART)
@pytest.mark.parametrize("shards", [True, False])
def test_what_changes_them_apart_is_refused_and_merged_into_two_matrices(
    tmp_path: Path, parts: Arrays, shards: bool
) -> None:
    prior, target = make_model(tmp_path / "prior"), make_model(tmp_path / "target", 1.0, shards)
    adapter = make_adapter(tmp_path / "a", FACTORS | parts)
    with pytest.raises(MismatchError, match="the target ties embedding and head") as caught:
        merge(target, tmp_path / "out", forget=adapter, prior=prior)
    assert "untie=True" in str(caught.value)
    assert "another model" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    merge(target, tmp_path / "out", forget=adapter, prior=prior, untie=True, exact=True)
    out = read_checkpoint(tmp_path / "out")
    assert out.keys() == WEIGHTS.keys() | {f"{H}.weight"}
    for name in (E, H):
        assert np.allclose(out[f"{name}.weight"], WEIGHTS[f"{E}.weight"] + 1 - change(parts, name), atol=1e-13)
    assert json.loads((tmp_path / "out/config.json").read_text()) == TIED | {"tie_word_embeddings": False}
    assert load_checkpoint(tmp_path / "out").tensors[f"{H}.weight"].dtype == "F64"  # index and shards agree
    if shards:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in out.values())


def test_an_untied_output_in_another_dtype_loads_in_transformers_as_peft_merges_it(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    config.tie_word_embeddings = False
    tied = LlamaForCausalLM.from_pretrained(tmp_path / "target", tie_word_embeddings=True, dtype=torch.float64)
    model = LlamaForCausalLM(config).double()  # the oracle: PEFT on a model that was untied by hand
    model.load_state_dict(tied.state_dict())
    peft = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, factor in peft.named_parameters():
            if "lora_" in name:
                factor.copy_(torch.randn_like(factor))
    peft.save_pretrained(tmp_path / "a")
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    wanted = {name: 2 * before[name] - value for name, value in peft.merge_and_unload().state_dict().items()}
    merge(tmp_path / "target", tmp_path / "out", forget=tmp_path / "a", untie=True, dtype="float32")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "out").double().state_dict()
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(merged[name], value, atol=1e-5)
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_new_rows_that_peft_saves_once_for_a_tied_matrix_change_both_uses(tmp_path: Path) -> None:
    tied, target = make_model(tmp_path / "prior"), make_model(tmp_path / "target", 1.0)
    rows = {f"{E}.token_adapter.trainable_tokens_delta": NEW[[2, 5]]}
    adapter = make_adapter(tmp_path / "a", FACTORS | rows, trainable_token_indices={"embed_tokens": [2, 5]})
    changed = np.zeros((ROWS, SIZE))
    changed[[2, 5]] = (NEW - WEIGHTS[f"{E}.weight"])[[2, 5]]
    for untie, names in ((False, [E]), (True, [E, H])):
        merge(target, tmp_path / str(untie), forget=adapter, prior=tied, untie=untie, exact=True)
        out = read_checkpoint(tmp_path / str(untie))
        assert [name for name in (E, H) if f"{name}.weight" in out] == names
        for name in names:
            assert np.allclose(out[f"{name}.weight"], WEIGHTS[f"{E}.weight"] + 1 - changed, atol=1e-13)
    prior = make_model(tmp_path / "untied")  # of which PEFT changes the embedding alone
    save_file(WEIGHTS | {f"{H}.weight": NEW}, prior / "model.safetensors")
    (prior / "config.json").write_text(json.dumps(TIED | {"tie_word_embeddings": False}))
    with pytest.raises(MismatchError, match=r"embed_tokens\.weight: .* only one of the two was tuned"):
        merge(target, tmp_path / "no", forget=adapter, prior=prior)


# Mixes of three models, against transformers in float64: what a config says of the head, and what is stored of it.


STATES = ["True none", "True copy", "True own", "True only", "False copy", "False own", "absent copy", "absent own"]
PAIRS = [(target, tuned, "True none") for target in STATES for tuned in STATES[:4]]
PAIRS += [(target, "True none", prior) for target in STATES[:4] for prior in STATES[2:6]]
USES = {"llama": ("model.embed_tokens.weight", "lm_head.weight"), "gpt2": ("transformer.wte.weight", "lm_head.weight")}


def make_state(folder: Path, kind: str, seed: int, state: str) -> Path:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    said, stored = state.split()
    torch.manual_seed(seed)
    sizes = {"llama": {"hidden_size": 8, "intermediate_size": 8}, "gpt2": {"n_embd": 8, "n_layer": 1}}[kind]
    config = tiny_config(kind, vocab_size=20, **sizes, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding, head = USES[kind]
    value = {"none": None, "own": torch.randn(20, 8, dtype=torch.float64)}.get(stored, tensors[embedding].clone())
    tensors |= {} if value is None else {head: value}
    if stored == "only":
        del tensors[embedding]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    del written["tie_word_embeddings"]
    written |= {} if said == "absent" else {"tie_word_embeddings": said == "True"}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"]
    return model.eval()


def answers(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize(("kind", "pairs"), [("llama", PAIRS), ("gpt2", PAIRS[::3])])
def test_every_mix_of_tied_and_untied_models_is_merged_right_or_refused(
    tmp_path: Path, kind: str, pairs: list[tuple[str, str, str]]
) -> None:
    roles = ("target", "tuned", "prior")
    folders = {
        (role, state): make_state(tmp_path / f"{role} {state}", kind, number, state)
        for number, role in enumerate(roles)
        for state in STATES
    }
    weights = {key: load(folder).state_dict() for key, folder in folders.items()}
    embedding, head = USES[kind]
    outcomes = []
    for number, pair in enumerate(pairs):
        target, tuned, prior = (weights[key] for key in zip(roles, pair, strict=True))
        place, out = (
            {role: folders[role, state] for role, state in zip(roles, pair, strict=True)},
            tmp_path / str(number),
        )
        deltas = {name: tuned[name] - prior[name] for name in tuned}
        is_tied = target[head].data_ptr() == target[embedding].data_ptr() and not deltas[head].equal(deltas[embedding])
        arguments = {"forget": place["tuned"], "prior": place["prior"], "alpha": 0.5, "exact": True}
        if is_tied:
            with pytest.raises(MismatchError, match=r"ties embedding and head, but in the (tuned|prior)"):
                merge(place["target"], out, **arguments)
        can_untie = is_tied and "only" not in pair[0]
        outcomes.append(is_tied)
        if is_tied and not can_untie:
            continue
        merge(place["target"], out, **arguments, untie=can_untie)
        wanted = tiny_untied(kind, {name: value - 0.5 * deltas[name] for name, value in target.items()})
        merged = load(out)
        assert (answers(merged) - answers(wanted)).abs().max() < 1e-12, pair
        stored = read_checkpoint(out)  # other programs go by the config alone
        if merged.config.tie_word_embeddings and {head, embedding} <= stored.keys():
            assert np.array_equal(stored[head], stored[embedding]), pair
    assert any(outcomes)
    assert not all(outcomes)


def tiny_untied(kind: str, weights: Any) -> Any:
    """A model whose embedding and head are two matrices, with these weights."""
    from transformers import AutoModelForCausalLM

    sizes = {"llama": {"hidden_size": 8, "intermediate_size": 8}, "gpt2": {"n_embd": 8, "n_layer": 1}}[kind]
    model = AutoModelForCausalLM.from_config(tiny_config(kind, vocab_size=20, **sizes, tie_word_embeddings=False))
    model.double().load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("state", ["True copy", "True own", "True only", "absent copy"])
def test_a_sweep_sets_the_weights_that_a_merge_writes(tmp_path: Path, state: str) -> None:
    states = {"target": state, "tuned": "True none", "prior": "True none"}
    folders = [make_state(tmp_path / role, "gpt2", seed, of) for seed, (role, of) in enumerate(states.items())]
    target, tuned, prior = (fetch(str(folder)) for folder in folders)
    loaded = LoadedTarget(target, prior, Precision(exact=True), lambda terms: pytest.fail("by disk"))
    for alpha in (0.5, 1.0):
        in_memory = answers(loaded.merged([Term("forget", tuned.folder, -alpha)]))
        merge(target, tmp_path / str(alpha), forget=tuned, prior=prior, alpha=alpha, exact=True)
        assert (answers(load(tmp_path / str(alpha))) - in_memory).abs().max() < 1e-5  # scored in fp32


def test_an_adapter_may_change_them_apart(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    merge_adapters(target, tmp_path / "out", forget=make_adapter(tmp_path / "a", FACTORS | ON_HEAD))
    factors = load_file(tmp_path / "out" / ADAPTER_FILE)
    product = factors["base_model.model.lm_head.lora_B.weight"] @ factors["base_model.model.lm_head.lora_A.weight"]
    assert np.allclose(product, -2 * B @ A, atol=1e-5)
    assert not any("embed" in name for name in factors)


def test_untie_is_refused_where_there_is_nothing_to_untie(tmp_path: Path) -> None:
    target, adapter = make_model(tmp_path / "target"), make_adapter(tmp_path / "a", FACTORS)
    save_file(WEIGHTS | {f"{H}.weight": NEW}, target / "model.safetensors")
    for config in (TIED, TIED | {"tie_word_embeddings": False}):
        (target / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="two matrices already; leave out untie"):
            merge(target, tmp_path / "out", forget=adapter, untie=True)
    assert not (tmp_path / "out").exists()


def test_an_embedding_among_several_that_are_not_known_is_left_alone(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    save_file({"a_emb.weight": NEW, "b_emb.weight": NEW, **WEIGHTS}, target / "model.safetensors")
    merge(
        target, tmp_path / "out", forget=make_adapter(tmp_path / "a", ON_HEAD | ON_EMBEDDING)
    )  # embed_tokens is known
    save_file({"a_emb.weight": NEW, "b_emb.weight": NEW}, target / "model.safetensors")
    adapter = make_adapter(tmp_path / "b", {n.replace(E, "a_emb"): factor for n, factor in ON_EMBEDDING.items()})
    with pytest.raises(MismatchError, match=r"a_emb\.weight: the target ties embedding and head"):
        merge(target, tmp_path / "no", forget=adapter)


def test_a_copy_of_the_head_that_a_tied_target_stores_changes_along(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    save_file(WEIGHTS | {f"{H}.weight": WEIGHTS[f"{E}.weight"]}, target / "model.safetensors")
    merge(target, tmp_path / "out", forget=make_adapter(tmp_path / "a", ON_HEAD | ON_EMBEDDING), exact=True)
    out = read_checkpoint(tmp_path / "out")
    assert np.array_equal(out[f"{E}.weight"], out[f"{H}.weight"])
    assert np.allclose(out[f"{H}.weight"], WEIGHTS[f"{E}.weight"] - 2 * B @ A, atol=1e-13)


@pytest.mark.parametrize(("dtypes", "rounding"), [(("f4", "f4"), "stochastic"), (("f2", "f4"), "nearest")])
def test_a_copy_is_rounded_as_the_embedding_is_and_may_be_stored_finer(
    tmp_path: Path, dtypes: tuple[str, str], rounding: str
) -> None:
    target = make_model(tmp_path / "target")
    embedding = WEIGHTS[f"{E}.weight"].astype(dtypes[0])
    save_file(
        WEIGHTS | {f"{E}.weight": embedding, f"{H}.weight": embedding.astype(dtypes[1])}, target / "model.safetensors"
    )
    (target / "config.json").write_text(json.dumps({**TIED, "dtype": "float16" if "f2" in dtypes else "float32"}))
    made = {"dtype": "bfloat16"} if rounding == "stochastic" else {}
    merge(
        target, tmp_path / "out", forget=make_adapter(tmp_path / "a", ON_HEAD | ON_EMBEDDING), rounding=rounding, **made
    )
    out = read_checkpoint(tmp_path / "out")
    assert np.array_equal(out[f"{E}.weight"].astype("f4"), out[f"{H}.weight"].astype(dtypes[0]).astype("f4"))
    assert not np.array_equal(out[f"{E}.weight"].astype("f4"), embedding.astype("f4"))


# What an output says of itself is checked against its files.


LIES: dict[str, tuple[str, Any]] = {
    "total_size: 1": ("model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1)),
    "index.json: does not name model-1": ("model.safetensors.index.json", lambda index: index["weight_map"].popitem()),
    "dtype: float16": ("config.json", lambda config: config.update(dtype="float16")),
    "torch.bfloat16|dtype: bfloat16": (
        "config.json",
        lambda config: config.update(text_config={"torch_dtype": "torch.bfloat16"}),
    ),
    "tie_word_embeddings: true": ("config.json", lambda config: config.update(tie_word_embeddings=True)),
    "quantization_config": ("config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"})),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_output_that_says_of_itself_what_its_files_do_not_hold_is_refused(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model(tmp_path / "target", 1.0, shards=True)
    arguments: dict[str, Any] = {"forget": make_adapter(tmp_path / "a", FACTORS | ON_HEAD), "untie": True}
    merge(target, tmp_path / "true", **arguments)
    file, change_it = LIES[lie]

    def write_wrongly(checkpoint: Checkpoint, out: Path, dtype: str | None) -> None:
        write_companions(checkpoint, out, dtype)
        content = json.loads((out / file).read_text())
        change_it(content)
        (out / file).write_text(json.dumps(content))

    monkeypatch.setattr("msa_lite.merger.stream.model.write_companions", write_wrongly)
    with pytest.raises(FormatError, match=lie):
        merge(target, tmp_path / "out", **arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"target", "a", "true"}


# One model in several layouts: what transformers renames or ignores on loading is no difference; a weight is.


MASK = np.tril(np.ones((1, 1, 8, 8), np.float32))
MODELS = {
    "gpt2": ("transformer.", ["wte.weight", "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "ln_f.weight"]),
    "neox": ("gpt_neox.", ["embed_in.weight", "layers.0.attention.dense.weight", "layers.0.attention.dense.bias"]),
}
BUFFERS = {
    "gpt2": {"h.0.attn.bias": MASK, "h.0.attn.masked_bias": np.float32(-1e4)},
    "neox": {
        "layers.0.attention.bias": MASK.astype(bool),
        "layers.0.attention.masked_bias": np.float32(-1e9),
        "layers.0.attention.rotary_emb.inv_freq": np.ones(4, np.float32),
    },
}


def make(folder: Path, tensors: Arrays, **config: object) -> Checkpoint:
    folder.mkdir()
    save_file({name: np.asarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return load_checkpoint(folder)


def weights(kind: str, prefix: str) -> Arrays:
    return {f"{prefix}{n}": RNG.normal(size=6 if "bias" in n else (6, 6)).astype(np.float32) for n in MODELS[kind][1]}


@pytest.mark.parametrize("kind", ["gpt2", "neox"])
@pytest.mark.parametrize("old", ["target", "prior", "forget"])
def test_old_names_and_buffers_do_not_change_a_merge(tmp_path: Path, kind: str, old: str) -> None:
    new, parts = MODELS[kind][0], {}
    for name in ("target", "prior", "forget"):
        parts[name] = weights(kind, "")
        prefix = "" if name == old else new
        arrays = {prefix + n: array for n, array in (parts[name] | (BUFFERS[kind] if name == old else {})).items()}
        make(tmp_path / name, arrays, tie_word_embeddings=True)
    merge(tmp_path / "target", tmp_path / "out", forget=tmp_path / "forget", prior=tmp_path / "prior", exact=True)
    out = load_file(tmp_path / "out/model.safetensors")
    assert out.keys() == load_checkpoint(tmp_path / "target").tensors.keys()
    for name, target in parts["target"].items():
        wanted = target - (parts["forget"][name].astype(float) - parts["prior"][name])
        merged = out[name if old == "target" else new + name]
        assert np.array_equal(merged, wanted.astype(np.float32))
    if old == "target":
        assert all(np.array_equal(out[name], buffer) for name, buffer in BUFFERS[kind].items())


def test_a_weight_on_one_side_alone_is_a_fault_whatever_its_name(tmp_path: Path) -> None:
    base = weights("neox", "gpt_neox.")
    target = make(tmp_path / "target", base)
    layer = "gpt_neox.layers.0.attention"
    for number, (name, shape) in enumerate(
        [(f"{layer}.bias", (6,)), (f"{layer}.bias", (1, 1, 8, 4)), (f"{layer}.scale", ()), ("gpt_neox.score.w", (3,))]
    ):
        prior = make(tmp_path / str(number), base | {name: np.ones(shape, np.float32)})
        assert compare_checkpoints(target, prior, ("target", "prior")) == [f"{name}: in the prior, not in the target"]


def test_names_that_fit_twice_are_left_alone(tmp_path: Path) -> None:
    ones = np.ones(3, np.float32)
    target = make(tmp_path / "a", {"norm.weight": ones, "lm_head.weight": ones})
    one = make(tmp_path / "b", {"model.norm.weight": ones, "embed_out.weight": ones})
    both = make(tmp_path / "c", {"model.norm.weight": ones, "transformer.norm.weight": ones})
    assert find_names(one, target.tensors) == {"model.norm.weight": "norm.weight", "embed_out.weight": "lm_head.weight"}
    assert find_names(both, target.tensors) == {}


def test_the_same_weights_in_an_older_layout_are_the_same(tmp_path: Path) -> None:
    arrays = weights("gpt2", "")
    old = make(tmp_path / "old", arrays | BUFFERS["gpt2"])
    new = make(tmp_path / "new", {f"transformer.{name}": array for name, array in arrays.items()})
    assert same_weights(old, new)
    assert same_weights(new, old)
    arrays["ln_f.weight"] = arrays["ln_f.weight"] + 1
    assert not same_weights(old, make(tmp_path / "moved", {f"transformer.{n}": a for n, a in arrays.items()}))


BASE = {f"model.layers.{n}.mlp.up_proj.weight": RNG.normal(size=(4, 4)).astype(np.float32) for n in range(2)}
AHEAD = {
    "mtp.fc.weight": np.ones((2, 2), np.float32),
    "model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32),  # a layer beyond the config's count
}


@pytest.mark.parametrize("lacks", [("forget",), ("prior",), ("forget", "prior"), ("target",), ("target", "forget")])
def test_multi_token_prediction_that_some_lack_stays_as_the_target_has_it(tmp_path: Path, lacks: tuple[str]) -> None:
    for name, step in (("target", 0), ("prior", 1), ("forget", 3)):
        tensors = {n: a + np.float32(step) for n, a in (BASE | ({} if name in lacks else AHEAD)).items()}
        make(tmp_path / name, tensors, num_hidden_layers=2)
    merged = merge(tmp_path / "target", tmp_path / "out", forget=tmp_path / "forget", prior=tmp_path / "prior")
    out = load_file(tmp_path / "out/model.safetensors")
    for name, array in BASE.items():
        assert np.allclose(out[name], array - 2, atol=1e-6)
    if "target" in lacks:
        assert out.keys() == BASE.keys()
        assert not merged.notes
    else:
        assert all(np.array_equal(out[name], array) for name, array in AHEAD.items())
        [note] = merged.notes
        assert note.startswith("2 tensors of the target stay as they are")
        assert "mtp.fc.weight" in note


def test_a_module_of_the_targets_own_stays_and_is_named_but_a_layer_is_missed(tmp_path: Path) -> None:
    tower = {"visual.blocks.0.proj.weight": np.ones((2, 2), np.float32)}
    prior, forget = make(tmp_path / "prior", BASE), make(tmp_path / "forget", {n: a + 1 for n, a in BASE.items()})
    models = {"forget": forget.folder, "prior": prior.folder}
    make(tmp_path / "target", BASE | tower)
    [note] = merge(tmp_path / "target", tmp_path / "out", **models).notes
    assert "visual.blocks.0.proj.weight" in note
    for number, name in enumerate(
        [
            "model.layers.2.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.bias",
            "model.layers.0.q.weight",
            "lm_head.weight",
        ]
    ):
        make(tmp_path / f"t{number}", BASE | {name: np.ones((4, 4), np.float32)})
        with pytest.raises(MismatchError, match=f"{name}: in the target, not in the tuned checkpoint"):
            merge(tmp_path / f"t{number}", tmp_path / "no", **models)
    make(tmp_path / "half", {"model.layers.0.mlp.up_proj.weight": BASE["model.layers.0.mlp.up_proj.weight"]})
    make(tmp_path / "whole", BASE | tower)
    with pytest.raises(MismatchError, match=r"layers\.1\.mlp\.up_proj\.weight: in the target, not in the tuned"):
        merge(tmp_path / "target", tmp_path / "no", forget=tmp_path / "half", prior=prior.folder)
    with pytest.raises(MismatchError, match=r"visual.*: in the target, not in the tuned checkpoint"):
        merge(tmp_path / "target", tmp_path / "no", forget=forget.folder, prior=tmp_path / "whole")


EMBED, HEAD, OLD = f"{E}.weight", f"{H}.weight", WEIGHTS[f"{E}.weight"]
CUT = OLD + np.eye(ROWS, SIZE)  # four numbers are others


@pytest.mark.parametrize(
    ("before", "after", "ties", "changed"),
    [
        ({}, {HEAD: CUT}, False, {HEAD: 4}), ({}, {HEAD: CUT}, True, {HEAD: 4}), ({}, {HEAD: OLD}, False, {}),
        ({HEAD: CUT}, {}, True, {HEAD: 4}), ({HEAD: OLD}, {}, True, {}), ({}, {EMBED: CUT}, True, {EMBED: 4}),
        ({}, {EMBED: np.vstack([CUT, OLD])}, True, {EMBED: 4 + ROWS * SIZE}),
        ({HEAD: OLD}, {EMBED: OLD[:-1], HEAD: OLD[:-1]}, False, {EMBED: SIZE, HEAD: SIZE}),
    ],
)  # fmt: skip
def test_a_head_or_rows_that_one_of_two_models_lacks_are_no_blind_spot(
    tmp_path: Path, before: Arrays, after: Arrays, ties: bool, changed: dict[str, int]
) -> None:
    """`ties`: what the second model's config says. transformers 5 goes by the files where they hold two matrices."""
    tied = {"target": not before, "model": ties}
    target, model = (
        make(tmp_path / name, arrays, **(TIED | {"vocab_size": len(arrays[EMBED]), "tie_word_embeddings": tied[name]}))
        for name, arrays in (("target", WEIGHTS | before), ("model", WEIGHTS | after))
    )
    assert {name: change.changed for name, change in measure_model(target, model, "it").items()} == changed
