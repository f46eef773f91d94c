"""PEFT adapters: scales as PEFT has them, every tensor with one meaning, and what has none refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, base_name, is_bare_adapter, load_adapter
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.matching import match_names
from msa_lite.merger import merge
from msa_lite.merger.vectors.vector import load_vector
from tests.support.merges import Adapter, edit_adapter, write_checkpoint
from tests.support.models import tiny_config

Make = Callable[..., Path]
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lora_alpha": 3, "use_rslora": True},
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 6},
            "alpha_pattern": {"layers.1": 9, "v_proj": 1, "model.layers.0.*_proj": 5},
        },
        {"rank_pattern": {".*0.*k_proj": 3, "[^k]_proj": 7, "k_proj": 5}, "use_rslora": True},
        {"alpha_pattern": {"layers.(0|1).mlp.up_proj": 32, "up_proj": 2}},
    ],
    ids=["plain", "rslora", "patterns", "order", "regex"],
)
def test_ranks_and_scales_are_pefts(make_checkpoint: Make, make_adapter: Make, config: dict[str, Any]) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    folder = make_adapter("llama", **config)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(make_checkpoint("llama")), folder)
    wanted = {
        name.removeprefix("base_model.model."): (module.r["default"], pytest.approx(module.scaling["default"]))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert len(wanted) == 14
    assert {m: (f.a.shape[0], f.scale) for m, f in load_adapter(folder).modules.items()} == wanted


@pytest.mark.parametrize("names", [("embed_tokens", "model.embed_tokens"), ("model.embed_tokens", "embed_tokens")])
def test_of_two_lists_of_tokens_for_one_module_the_first_counts(
    make_adapter: Make, tmp_path: Path, names: tuple[str, str]
) -> None:
    folder = make_adapter("llama", trainable_token_indices=[5, 2])
    indices = dict(zip(names, ([5, 2], [7, 9]), strict=True))
    adapter = load_adapter(edit_adapter(folder, tmp_path / "a", trainable_token_indices=indices))
    assert [numbers for _, numbers in adapter.tokens.values()] == [(5, 2)]


def test_an_adapter_is_not_its_own_base(make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = edit_adapter(make_adapter("llama"), tmp_path / "a", base_model_name_or_path=".")
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="which is not here"):
        base_name(folder)


FLAGS = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "ADALORA"}, "peft_type: 'ADALORA', only 'LORA' is read"),
        *(
            ({"init_lora_weights": v}, f"init_lora_weights: '{v}' changes the model it starts.*path_initial_model_for_")
            for v in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq")
        ),
        ({"layer_replication": [[0, 2]]}, r"layer_replication: \[\[0, 2\]\], replicated layers"),
        *(({"target_parameters": v}, "target_parameters: .*, expected a list of names") for v in ("q", [3], {"q": 1})),
        *(({"use_warp_drive": v}, f"use_warp_drive: {v}, not known to msa-lite") for v in (3, True)),
        ({"r": 5}, rf"{Q}: A is \(4, 32\), B is \(32, 4\), the config says rank 5"),
        *(({"r": r}, rf"r: {r}, expected a positive") for r in (None, 0, 4.0, True)),
        *(({"lora_alpha": a}, rf"lora_alpha: {a}.*, expected a finite") for a in (None, np.nan, 10**309, True)),
        *(({f"{n}_pattern": v}, rf"{n}_pattern: .*, expected an ob") for n in ("rank", "alpha") for v in ([], "q")),
        ({"rank_pattern": {"q_proj": 4.5}}, "rank_pattern: 'q_proj': 4.5, expected a positive whole number"),
        ({"alpha_pattern": {"q_proj": "8"}}, r"alpha_pattern: 'q_proj': '8' \(a string\), expected a finite number"),
        ({"rank_pattern": {"q{99999999999}": 4}}, r"rank_pattern: 'q\{9*\}' is no regular expression"),
        *(({"trainable_token_indices": v}, "trainable_token_ind.*, expected a list") for v in (5, [1.0], {"a": 5})),
        *(({f: v}, rf"{f}: '?{v}'?, expected true or false") for f in FLAGS for v in ("false", 1)),
    ],
)
def test_a_config_field_that_may_change_the_delta_is_refused(
    make_adapter: Make, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", **config))


def test_fields_without_effect_and_unset_new_ones_are_accepted(make_adapter: Make, tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "x/y", "lora_dropout": 0.5, "use_warp_drive": False, "warp_config": None}
    config |= {"init_lora_weights": "mica"}  # which starts from the model as it is
    config |= dict.fromkeys([*FLAGS, "rank_pattern", "alpha_pattern", "trainable_token_indices"])
    assert len(load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", **config)).modules) == 14


def test_all_faults_of_a_config_are_told_at_once(make_adapter: Make, tmp_path: Path) -> None:
    config = {"r": "4", "lora_alpha": None, "rank_pattern": {"(": "x"}, "use_dora": "no", "peft_type": "IA3"}
    with pytest.raises(FormatError) as caught:
        load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", **config))
    starts = ["use_dora", "r", "rank_pattern", "rank_pattern", "lora_alpha", "peft_type"]
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == starts


def test_a_rank_and_a_scale_that_the_config_leaves_out_are_pefts_own(make_adapter: Make, tmp_path: Path) -> None:
    from peft import LoraConfig

    folder = edit_adapter(make_adapter("llama", r=LoraConfig().r, lora_alpha=40), tmp_path / "a")
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert load_adapter(folder).modules[Q].scale == 40 / config.pop("r") != config.pop("lora_alpha")
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    assert load_adapter(folder).modules[Q].scale == LoraConfig().lora_alpha / LoraConfig().r


PREFIX = "base_model.model."
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
VECTOR = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(A), rf"{Q}: only lora_B is there"),
        (lambda t: t.pop(B), rf"{Q}: only lora_A is there"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_magnitude_vector": VECTOR}), rf"{Q}: use_dora is False, but a mag"),
        (lambda t: t.update({f"{PREFIX}norm.lora_magnitude_vector": VECTOR}), "norm: a magnitude without factors"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_B.bias": VECTOR}), rf"{Q}: lora_bias is False, but lora_B.bias is th"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_A.other.weight": t[A]}), "stands for the same as"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_A.default.weight": t[A]}), rf"{Q}\.lora_A.* stands for the same as"),
        (
            lambda t: t.update({f"{PREFIX}a.weight": VECTOR, f"{PREFIX}a.modules_to_save.weight": -VECTOR}),
            r"a\.weight: stands for the same as .*a\.modules_to_save\.weight",
        ),
        (
            lambda t: t.update({f"{PREFIX}wte.token_adapter.trainable_tokens_delta": np.ones((2, 32), np.float32)}),
            r"wte: \(2, 32\) for 0 trainable_token_indices",
        ),
        (lambda t: t.update({A: VECTOR}), rf"{Q}: A is \(3,\), B is \(32, 4\), expected matrices"),
        (lambda t: t.update({A: t[A][:0], B: t[B][:, :0].copy()}), rf"{Q}: A is \(0, 32\), .* of rank ≥ 1"),
        (lambda t: t.update({A: t[A].astype(np.int8)}), rf"{Q}\.lora_A\.weight: I8, expected floats"),
    ],
)
def test_every_tensor_is_accounted_for(make_adapter: Make, tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", change))


def test_values_that_peft_saves_twice_where_the_vocabulary_grew_are_read_once(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM

    def disturb(model: Any) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.rand_like(weight) * weight.requires_grad

    places = {name: tmp_path / name for name in ("prior", "grown", "target", "a", "out")}
    LlamaForCausalLM(tiny_config("llama", vocab_size=20, tie_word_embeddings=False)).save_pretrained(places["prior"])
    model = LlamaForCausalLM.from_pretrained(places["prior"])
    model.resize_token_embeddings(24, mean_resizing=False)
    model.save_pretrained(places["grown"])
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    peft = get_peft_model(model, settings)
    disturb(peft)
    peft.save_pretrained(places["a"])
    held = load_file(places["a"] / ADAPTER_FILE)
    assert {f"{PREFIX}lm_head{part}.weight" for part in ("", ".modules_to_save", ".original_module")} <= held.keys()
    target = LlamaForCausalLM.from_pretrained(places["grown"])
    disturb(target)
    target.save_pretrained(places["target"])
    merge(places["target"], places["out"], forget=places["a"], prior=places["prior"])
    old, grown, merged = (LlamaForCausalLM.from_pretrained(places[n]).state_dict() for n in ("target", "grown", "out"))
    tuned = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(places["grown"]), places["a"])
    new = tuned.merge_and_unload().state_dict()
    assert merged.keys() == new.keys()
    for name, value in merged.items():
        changed = new[name] - grown[name]
        changed[20:] *= changed.shape[0] != 24  # of the tokens that were added, the prior has no rows
        assert torch.allclose(value, old[name] - changed, atol=1e-5), name


def test_older_names_with_the_adapters_name_are_read(make_adapter: Make, tmp_path: Path) -> None:
    def older(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    folder = make_adapter("llama")
    assert (
        load_adapter(edit_adapter(folder, tmp_path / "a", older)).modules.keys() == load_adapter(folder).modules.keys()
    )


def test_a_bias_copied_with_an_embedding_is_new_only_where_biases_are_trained(
    make_adapter: Make, tmp_path: Path
) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{PREFIX}lm_head.base_layer.bias"] = VECTOR

    for bias, where in (("none", "copies"), ("all", "values")):
        adapter = load_adapter(edit_adapter(make_adapter("llama"), tmp_path / bias, add, bias=bias))
        assert list(getattr(adapter, where)) == ["lm_head.bias"]
        assert not {"copies": adapter.values, "values": adapter.copies}[where]


BOTH = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        (("adapter_config.json", "adapters.safetensors"), FormatError, "of MLX.*merge-only.md"),
        (("adapter_config.json", "adapter_model.bin"), FormatError, r"pickled.*weights_only=True.*_model\.bin"),
        (("adapter_config.json", "adapter_0.pt"), FormatError, r"pickled.*adapter_0\.pt"),
        (("adapter_config.json", "lora.gguf"), FormatError, "GGUF"),
        ([f"default/{name}" for name in BOTH], UsageError, "hold one; give .*/default$"),
        ([f"{n}/{name}" for n in ("policy", "ref") for name in BOTH], UsageError, "several; give .*/ref, .*/policy"),
        ([f"checkpoint-{n}/{name}" for n in (500, 1000) for name in BOTH], UsageError, "-500, .*/checkpoint-1000"),
        (["epoch_0/config.json", "epoch_0/model.safetensors"], UsageError, "give .*/epoch_0"),
        (["zero_to_fp32.py", "global_step9/mp_rank_00_model_states.pt"], UsageError, "zero_to_fp32.py"),
        (["model_0/__0_0.distcp", "__0_0.distcp"], UsageError, "FSDP"),
        (["pytorch_model_fsdp_0/__0_0.distcp", "optimizer.pt"], UsageError, "FSDP"),
        (["optimizer.pt", "scheduler.pt", "rng_state.pth"], UsageError, "state of a training"),
        (["pytorch_model.bin"], UsageError, "pickled"),
        (["consolidated.00.pth", "params.json"], UsageError, "Meta"),
        (["model-q4.gguf"], UsageError, "GGUF"),
        (["model_index.json"], UsageError, "diffusers"),
        (["notes.md"], UsageError, r"not a checkpoint folder; it holds notes\.md"),
        ([], UsageError, "is empty"),
    ],
)
def test_a_folder_of_another_form_is_told_what_it_is_and_what_to_do(
    tmp_path: Path, files: Any, error: type, says: str
) -> None:
    (tmp_path / "a").mkdir()
    for name in files:
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("{}")
    with pytest.raises(error, match=says) as caught:
        load_vector(tmp_path / "a", None, None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("beside", "bare"),
    [
        ([], True),
        (["config.json", "checkpoint-500/model.safetensors"], True),  # as axolotl leaves it
        (["config.json", "model.safetensors"], False),
        (["config.json", "model.safetensors.index.json"], False),
    ],
)
def test_an_adapter_with_weights_of_a_model_beside_it_is_that_model(
    tmp_path: Path, beside: list[str], bare: bool
) -> None:
    for name in (*BOTH, *beside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert is_bare_adapter(tmp_path) == bare


def test_a_folder_of_the_hubs_cache_and_an_adapter_as_a_model_are_told(make_adapter: Make, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--tiny"
    edit_adapter(make_adapter("llama"), cache / "snapshots" / "0123")
    for folder, says in ((cache, "give org/tiny"), (cache / "snapshots/0123", "PEFT adapter.*--retain ADAPTER")):
        with pytest.raises(UsageError, match=says):
            load_checkpoint(folder)
    (cache / "snapshots/0123" / ADAPTER_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(FormatError, match="git lfs pull"):
        load_adapter(cache / "snapshots/0123")


def test_keys_with_an_adapters_name_mean_the_same(make_adapter: Make, tmp_path: Path) -> None:
    plain = load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "plain"))

    def name(names: str) -> Callable[[dict[str, Any]], None]:
        def rename(tensors: dict[str, Any]) -> None:
            for place, key in enumerate(sorted(tensors)):
                own = names.split()[place % len(names.split())]
                tensors[key.removesuffix("weight") + f"{own}.weight"] = tensors.pop(key)

        return rename

    for own in ("birds", "default"):
        named = load_adapter(edit_adapter(make_adapter("llama"), tmp_path / own, name(own)))
        shapes = [{n: (low.a.shape, low.b.shape, low.scale) for n, low in a.modules.items()} for a in (named, plain)]
        assert shapes[0] == shapes[1]
    with pytest.raises(FormatError, match=r"several adapters, bees, birds.*selected_adapters=\['bees'\]"):
        load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "two", name("birds bees")))


def test_the_lines_of_the_page_make_the_same_adapter_of_one_of_mlx(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_file(make_checkpoint("llama") / "model.safetensors")
    rng, rank, scale = np.random.default_rng(3), 4, 2.5
    modules = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]
    shapes = {module: before[f"{module}.weight"].shape for module in modules}
    factors = {f"{m}.lora_a": rng.normal(size=(into, rank)).astype("f4") / 9 for m, (_, into) in shapes.items()}
    factors |= {f"{m}.lora_b": rng.normal(size=(rank, out)).astype("f4") / 9 for m, (out, _) in shapes.items()}
    (tmp_path / "mlx-adapter").mkdir()
    save_file(factors, tmp_path / "mlx-adapter/adapters.safetensors")
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": rank, "scale": scale}}
    (tmp_path / "mlx-adapter/adapter_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/how-to/merge-only.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    merge(make_checkpoint("llama"), "out", forget="peft-adapter", alpha=0.5)
    after = load_file(tmp_path / "out/model.safetensors")
    for name, old in before.items():  # mlx: y = x W^T + scale (x a) b
        module, wanted = name.removesuffix(".weight"), old.astype(np.float64)
        if module in modules:
            a, b = (factors[f"{module}.lora_{side}"].astype(np.float64) for side in "ab")
            wanted -= 0.5 * scale * (a @ b).T
        assert np.abs(after[name] - wanted).max() < 1e-6, name


# Adapters that other tools left in an odd state: what is read, and what is refused with the way out.


RNG = np.random.default_rng(0)
LAYERS = [f"model.layers.{number}.self_attn.q_proj" for number in range(3)]


def factors(*modules: str) -> Adapter:
    return Adapter({m: (RNG.normal(size=(2, 4)), RNG.normal(size=(4, 2))) for m in modules}, lora_alpha=4)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", {f"{n}.weight": RNG.normal(size=(4, 4)) for n in LAYERS})


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lm_head"])
def test_empty_tensors_are_told_as_those_of_zero_3(tmp_path: Path, part: str) -> None:
    empty = np.empty(0, np.float32)

    def clear(tensors: dict[str, Any]) -> None:
        tensors.update({f"base_model.model.{part}.weight": empty} if part == "lm_head" else {})
        tensors.update({name: empty for name in tensors if part in name})

    folder = edit_adapter(factors(LAYERS[0]).write(tmp_path / "a"), tmp_path / "b", clear)
    with pytest.raises(FormatError, match=rf"1 of its tensors are empty.*ZeRO-3.*\.py:\n  base_model.*{part}"):
        load_adapter(folder)


def test_empty_tensors_of_a_checkpoint_are_told_so_too(tmp_path: Path, target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    tuned = write_checkpoint(tmp_path / "tuned", weights | {f"{LAYERS[0]}.weight": np.empty(0)})
    with pytest.raises(FormatError, match=rf"1 of its tensors are empty.*ZeRO-3.*\.py:\n  {LAYERS[0]}"):
        merge(target, tmp_path / "out", forget=tuned, prior=target)


def test_a_layer_of_multi_token_prediction_is_not_missed(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(target / "model.safetensors") | {"model.layers.2.enorm.weight": np.ones(4)}
    save_file(weights, target / "model.safetensors")
    folder = edit_adapter(factors(*LAYERS[:2]).write(tmp_path / "a"), tmp_path / "b", target_modules=["q_proj"])
    match_names(load_adapter(folder), load_checkpoint(target).tensors)
    assert not caplog.records
