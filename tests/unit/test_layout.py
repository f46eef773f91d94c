"""One model in several layouts: what transformers renames or ignores on loading is no difference; a weight is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import MismatchError
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.matching import find_names
from msa_lite.merger import merge
from msa_lite.merger.vectors.vector import compare_checkpoints
from msa_lite.pipeline.prepare.models import same_weights

Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)
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
