"""Models are loaded whole or not at all: what is missing, left over, pickled or in need of code is refused."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.data import PromptSettings, Row, encode_qa, make_prompter, open_tokenizer
from msa_lite.errors import FormatError, MismatchError, MsaError
from msa_lite.evals.engine import models
from msa_lite.evals.engine.models import check_source
from msa_lite.io.models import loading
from msa_lite.io.models.devices import limited
from msa_lite.io.models.loading import check_loads, load_whole, read_tokenizer
from msa_lite.io.models.window import model_window, read_window
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import merge
from msa_lite.pipeline.stages.facts import find_headers
from msa_lite.train import FitSettings
from msa_lite.train.memory.model import load_trainable as load_to_tune
from tests.support.families import small_config
from tests.support.models import VOCABULARY, tiny_model, tiny_tokenizer

Make = Callable[..., Path]
KINDS = ["llama", "qwen2", "olmo2", "gpt2"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the tensors of a file, or the JSON of one, in place."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        edit(value)
        path.write_text(json.dumps(value))
    else:
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, {"format": "pt"})


def lose(part: str) -> Callable[[dict[str, Any]], None]:
    return lambda held: held.pop(next(name for name in sorted(held) if part in name))


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def cut(part: str) -> Callable[[dict[str, Any]], None]:
    def edit(tensors: dict[str, Any]) -> None:
        name = next(name for name in sorted(tensors) if part in name)
        tensors[name] = tensors[name][:-1].contiguous()

    return edit


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda held: held.update(values)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def pickled_adapter(folder: Path) -> None:
    torch.save(load_file(folder / ADAPTER), folder / "adapter_model.bin")
    (folder / ADAPTER).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7])


def edited(name: str, edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: change(folder / name, edit)


def two_sets(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def with_code(folder: Path) -> None:
    (folder / "own.py").write_text("open('/tmp/ran', 'w')")
    change(folder / CONFIG, put(model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}))


BROKEN: dict[str, Callable[[Path], None]] = {
    "a norm is missing": edited(WEIGHTS, lose("norm.weight")),
    "all names are others": edited(WEIGHTS, rename("model.", "modul.")),
    "a tensor more": edited(WEIGHTS, put(**{"v_head.weight": torch.zeros(3)})),
    "a tensor is shorter": edited(WEIGHTS, cut("q_proj")),
    "a million layers": edited(CONFIG, put(num_hidden_layers=1_000_000)),
    "a huge model": edited(CONFIG, put(hidden_size=10**9)),
    "no causal kind": edited(CONFIG, put(model_type="t5")),
    "no kind": edited(CONFIG, lose("model_type")),
    "no tokens": edited(CONFIG, put(vocab_size=-5)),
    "a word for a size": edited(CONFIG, put(hidden_size="wide")),
    "another file": edited(CONFIG, put(transformers_weights="adapter_model.bin")),
    "a program of the Hub": edited(CONFIG, put(attn_implementation="somebody/kernel")),
    "code of its own": with_code,
    "a code that nobody knows": edited(CONFIG, put(quantization_config={"quant_method": "modelopt"})),
    **{
        f"said to be in {bits} bits": edited(CONFIG, put(quantization_config={f"load_in_{bits}bit": True, **method}))
        for bits, method in ((4, {}), (8, {"quant_method": "bitsandbytes"}))
    },
    "pickled": pickled,
    "truncated": truncate(WEIGHTS),
    "two sets of weights": two_sets,
    "an adapter beside it": lambda folder: (folder / ADAPTER_CONFIG).write_text("{}") and None,
    "config is a list": lambda folder: (folder / CONFIG).write_text("[]") and None,
    "an end that is no token": lambda folder: (
        (folder / "generation_config.json").write_text('{"eos_token_id": "*"}') and None
    ),
    "generation config is deep": lambda folder: (folder / "generation_config.json").write_text("[" * 9999) and None,
}
BROKEN_ADAPTERS: dict[str, Callable[[Path], None]] = {
    "all names are others": edited(ADAPTER, rename("layers", "schichten")),
    "a factor is missing": edited(ADAPTER, lose("lora_B")),
    "a factor is shorter": edited(ADAPTER, cut("lora_A")),
    "empty": edited(ADAPTER, lambda tensors: tensors.clear()),
    "pickled": pickled_adapter,
    "truncated": truncate(ADAPTER),
    "a name in its keys": edited(ADAPTER, rename("lora_A.weight", "lora_A.birds.weight")),
    "another rank": edited(ADAPTER_CONFIG, put(r=8)),
    "a huge rank": edited(ADAPTER_CONFIG, put(r=10**9)),
    "a pattern without end": edited(ADAPTER_CONFIG, put(target_modules="(.*.*)*(.*.*)*(.*.*)*x")),
    "no pattern": edited(ADAPTER_CONFIG, put(target_modules="(")),
    "an unknown kind": edited(ADAPTER_CONFIG, put(peft_type="MAGIC")),
    "a head to be saved": edited(ADAPTER_CONFIG, put(modules_to_save=["lm_head"])),
    "a checkpoint beside it": lambda folder: shutil.copy(folder / ADAPTER, folder / WEIGHTS) and None,
}


@pytest.fixture
def llama(make_checkpoint: Make, tmp_path: Path) -> Path:
    return shutil.copytree(make_checkpoint("qwen2"), tmp_path / "model")


@pytest.fixture
def adapter(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> Path:
    folder = shutil.copytree(make_adapter("qwen2"), tmp_path / "adapter")
    change(folder / ADAPTER_CONFIG, put(base_model_name_or_path=str(make_checkpoint("qwen2"))))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_sound_models_and_adapters_load_as_they_are(kind: str, make_checkpoint: Make, make_adapter: Make) -> None:
    folder, lora = make_checkpoint(kind), make_adapter(kind)
    assert check_loads(folder, folder) == check_loads(lora, folder) == VOCABULARY
    weights = tiny_model(kind).state_dict()
    loaded = load_whole(folder, dtype=torch.float32).state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_is_refused_before_a_weight_is_read(
    what: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[what](llama)
    with pytest.raises(MsaError) as caught:
        check_loads(llama, llama)
    assert caught.value.exit_code == 3
    assert str(llama) in str(caught.value)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **b: pytest.fail("was loaded"))
    for load in (load_whole, lambda folder: load_to_tune(folder, FitSettings())):
        with pytest.raises(type(caught.value)):
            load(llama)
    with pytest.raises(MsaError):
        models.load_model(llama)


WRAPPED: dict[str, tuple[str, Callable[[str], str]]] = {
    "compile": ("torch.compile", "_orig_mod.{}".format),
    "ddp": ("DDP", "module.{}".format),
    "compile of ddp": ("torch.compile, DDP", "_orig_mod.module.{}".format),
    "ddp of compile": ("torch.compile, DDP", "module._orig_mod.{}".format),
    "fsdp": ("FSDP", lambda name: "_fsdp_wrapped_module." + name.replace("mlp.", "_fsdp_wrapped_module.mlp.")),
    "blocks": ("checkpointed activations", lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp.")),
}


@pytest.mark.parametrize("what", WRAPPED)
def test_a_model_saved_in_its_wrapper_is_refused_with_a_line_that_mends_it(
    what: str, llama: Path, tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, index = load_file(llama / WEIGHTS), llama / "model.safetensors.index.json"
    cause, wrapped = WRAPPED[what]
    change(llama / WEIGHTS, lambda held: held.update({wrapped(name): held.pop(name) for name in list(held)}))
    if what == "fsdp":
        (llama / WEIGHTS).rename(llama / "model-1.safetensors")
        names = dict.fromkeys(map(wrapped, before), "model-1.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    loads = (
        lambda: check_loads(llama, llama),
        lambda: merge(str(llama), forget=str(adapter), out=tmp_path / "out"),
        lambda: find_headers(str(llama)),
    )
    for load in loads:
        with pytest.raises(FormatError, match=f"named as {cause} leaves them") as caught:
            load()
    _, _, code, folder, _ = shlex.split(str(caught.value).partition("rename them: ")[2])
    monkeypatch.setattr(sys, "argv", ["-c", folder, str(tmp_path / "new")])
    exec(code, {})
    assert load_file(next(llama.glob("*.safetensors"))).keys() != before.keys(), "the model itself stays"
    assert check_loads(tmp_path / "new", tmp_path / "new") == VOCABULARY
    after = {n: tensor for path in (tmp_path / "new").glob("*.safetensors") for n, tensor in load_file(path).items()}
    index = tmp_path / "new" / index.name
    assert (
        after.keys()
        == before.keys()
        == ({*json.loads(index.read_text())["weight_map"]} if index.exists() else {*after})
    )
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("what", BROKEN_ADAPTERS)
def test_a_broken_adapter_is_refused(what: str, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect.unwrap(limited), "__defaults__", (0.2,))  # s, after which a pattern has no end
    BROKEN_ADAPTERS[what](adapter)
    with pytest.raises(MsaError) as caught:
        models.load_model(adapter)
    assert caught.value.exit_code == 3
    with pytest.raises(type(caught.value)):
        check_source(fetch(str(adapter)))


@pytest.mark.parametrize("what", ["a norm is missing", "a tensor more"])
def test_what_the_library_reports_is_an_error_too(what: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[what](llama)
    monkeypatch.setattr(loading, "check_loads", lambda folder, base: VOCABULARY)
    with pytest.raises(MismatchError, match=r"model\.norm\.weight: missing|v_head\.weight: not a tensor|layernorm"):
        load_whole(llama, dtype=torch.float32)


def test_what_a_family_leaves_out_is_no_fault(make_checkpoint: Make, tmp_path: Path) -> None:
    llama = shutil.copytree(make_checkpoint("llama"), tmp_path / "llama")
    assert not any("lm_head" in name for name in load_file(llama / WEIGHTS))  # it is tied
    change(llama / WEIGHTS, put(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    gpt = shutil.copytree(make_checkpoint("gpt2"), tmp_path / "gpt2")
    masks = {"bias": torch.zeros(1, 1, 256, 256), "masked_bias": torch.tensor(-1e4)}
    change(gpt / WEIGHTS, put(**{f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}))
    assert check_loads(llama, llama) == check_loads(gpt, gpt) == VOCABULARY
    assert load_whole(llama, dtype=torch.float32).lm_head.weight.shape[0] == VOCABULARY


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_weights(dtype: torch.dtype, llama: Path) -> None:
    name = "model.norm.weight"
    weight = load_file(llama / WEIGHTS)[name]
    change(llama / WEIGHTS, put(**{name: torch.ones(weight.shape).to(dtype)}))
    with pytest.raises(FormatError, match=r"weights that are no floats:\n  model\.norm\.weight: stored as"):
        check_loads(llama, llama)


def test_a_change_of_the_files_is_seen(llama: Path) -> None:
    assert check_loads(llama, llama) == VOCABULARY
    change(llama / WEIGHTS, lose("norm.weight"))
    with pytest.raises(MismatchError):
        check_loads(llama, llama)


def test_tokens_beyond_the_embedding_are_refused(llama: Path) -> None:
    source = fetch(str(llama))
    check_source(source, range(VOCABULARY))
    with pytest.raises(MismatchError, match=f"token {VOCABULARY}, but the model's embedding has {VOCABULARY} rows"):
        check_source(source, [VOCABULARY])


ODD: list[Any] = [
    None, True, -1, 0, 3, 2**31, 10**18, 10**30, 1e308, float("nan"), "", "x", "a/b", [], [1], {}, {"a": 1}, [["a"]],
]  # fmt: skip
MORE = ["quantization_config", "rope_scaling", "rope_parameters", "text_config", "layer_types", "num_labels", "dtype"]


@pytest.mark.parametrize("seed", range(4))
def test_any_value_in_a_config_loads_or_is_refused(seed: int, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_checkpoint(KINDS[seed]), tmp_path / "model")
    config = json.loads((folder / CONFIG).read_text())
    drawn = random.Random(seed)
    for _ in range(20):
        key, value = drawn.choice(sorted({*config, *MORE})), drawn.choice(ODD)
        (folder / CONFIG).write_text(json.dumps(config | {key: value}))
        with contextlib.suppress(FormatError, MismatchError):
            assert check_loads(folder, folder) in (VOCABULARY, None)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "[" * 9999, '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused(name: str, text: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    if name == "tokenizer_config.json" and text.endswith("}"):  # a tokenizer can do without
        assert open_tokenizer(tmp_path, "m")("a word")["input_ids"]
        return
    with pytest.raises(FormatError):
        open_tokenizer(tmp_path, "m")


@pytest.mark.parametrize("family", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_a_tokenizer_that_only_counts_makes_the_tokens_of_its_familys_class(family: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = tiny_tokenizer(chat=True)
    template = tokenizer.chat_template
    if family != "PreTrainedTokenizerFast":
        tokenizer.save_pretrained(tmp_path / "bytes")
        model = json.loads((tmp_path / "bytes/tokenizer.json").read_text())["model"]
        parts = {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}
        tokenizer = getattr(transformers, family)(**parts, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "saved")
    whole, counter = (open_tokenizer(tmp_path / "saved", "m", to_count=to_count) for to_count in (False, True))
    assert (type(whole) is type(counter)) is (family == "PreTrainedTokenizerFast")
    rows = [Row(i, text, f" {text}\n\n12") for i, text in enumerate(("Where is it?", "über  there", "1234"))]
    examples = [encode_qa(rows, make_prompter(t, PromptSettings(), False), 64) for t in (whole, counter)]
    assert examples[0] == examples[1]


def test_a_tokenizer_with_code_of_its_own_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("was asked"))
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "own.py").write_text("raise SystemExit(9)")
    config = {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="its tokenizer cannot be loaded"):
        open_tokenizer(tmp_path, "m")


def test_models_tokenizers_and_data_are_loaded_in_one_place_each() -> None:
    """No other call of what may load pickles, run code or fill weights at random."""
    package = Path(msa_lite.__file__).parent
    wanted = {"from_pretrained", "load_dataset", "load_dataset_builder", "load_adapter", "from_config"}
    found = set()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in wanted:
                found.add((str(path.relative_to(package)), node.func.attr))
                if node.func.attr == "from_pretrained" and ast.unparse(node.func.value).startswith("Auto"):
                    given = {keyword.arg for keyword in node.keywords} | (
                        set(loading._SAFE) if any(ast.unparse(k.value) == "_SAFE" for k in node.keywords) else set()
                    )
                    assert "trust_remote_code" in given, f"{path}:{node.lineno}"
    assert loading._SAFE == {"use_safetensors": True, "trust_remote_code": False}
    assert found == {
        ("io/models/loading.py", "from_pretrained"),
        ("io/models/loading.py", "load_adapter"),
        ("data/sources.py", "load_dataset_builder"),
        ("train/scratch.py", "from_config"),
        ("demo/smollm2.py", "from_pretrained"),  # of a GGUF file, which only names its file, and whose hash is known
    }


def test_a_file_that_is_far_too_large_is_no_tokenizer(llama: Path) -> None:
    with open(llama / "tokenizer.json", "wb") as stream:
        stream.truncate(5 << 30)  # of nothing but holes
    with pytest.raises(FormatError, match="which is no tokenizer"):
        read_tokenizer(llama, "model")


# The window: (family, changes of its config, window, whether a longer row is an error). The small configs say 16.

ROPE = {"rope_theta": 1e4, "factor": 4.0}
WINDOWS: dict[str, tuple[str, dict[str, Any], int | None, bool]] = {
    **{name: (name, {}, 16, True) for name in ("gpt2", "opt", "biogpt", "gpt_neo", "gptj", "codegen", "ctrl", "bert")},
    "mpt": ("mpt", {"max_seq_len": 16}, 16, True),
    "roberta": ("roberta", {}, 13, True),  # its table begins behind the padding token, 2
    **{name: (name, {}, 16, False) for name in ("llama", "mistral", "gpt_neox", "falcon", "gemma3", "jamba")},
    "falcon alibi": ("falcon", {"alibi": True}, None, False),
    **{name: (name, {}, None, False) for name in ("bloom", "mamba", "recurrent_gemma", "rwkv")},
    "linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}, 64, False),
    "dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, 16, False),
    "yarn before": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}, 64, False),
    "yarn behind": (
        "llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 4}}, 16, False,
    ),
    "yarn between": (
        "llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 12}}, 48, False,
    ),
    "llama3": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "llama3", "original_max_position_embeddings": 8,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        16, False,
    ),
    "longrope": (
        "phi3",
        {"original_max_position_embeddings": 8,
         "rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 4,
                             "long_factor": [2.0] * 4}},
        16, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_is_what_transformers_runs_or_the_model_was_made_for(name: str, make_checkpoint: Make) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, changes, window, is_hard = WINDOWS[name]
    known = CONFIG_MAPPING[family]()
    table = (
        {}
        if family in ("bloom", "mamba", "mpt", "recurrent_gemma", "rwkv", "gemma3")
        else {"max_position_embeddings": 16}
    )
    config = small_config(known, **table, **changes)
    if family == "gemma3":
        config.text_config.max_position_embeddings = 16
    written = json.loads(config.to_json_string())
    assert model_window(config) == window
    assert read_window([replace(load_checkpoint(make_checkpoint("llama")), config=written)]) == window
    model = AutoModelForCausalLM.from_config(config).eval()

    def runs(length: int) -> bool:
        with torch.no_grad(), contextlib.suppress(IndexError, RuntimeError):
            return bool(model(input_ids=torch.arange(length)[None] + 3).logits.isfinite().all())
        return False

    assert [runs(window or 64), runs(1 + (window or 64))] == [True, not is_hard]
