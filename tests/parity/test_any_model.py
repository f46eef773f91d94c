"""Models as people have them, drawn at random: family, layout, adapter. Merged, opened and scored as by PEFT alone.

The draws are fixed. `MSA_DRAWS=500 pytest tests/parity/test_any_model.py -m "slow or not slow"` makes that many."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from msa_lite.data import Row
from msa_lite.evals.engine.forward import WORTH_SHARING, common_start, score_bundles
from msa_lite.evals.engine.generate import Decoding, generate, sample_answers
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.io.weights.matching import BASE_PREFIXES
from msa_lite.merger import merge, merge_adapters
from tests.support import codes
from tests.support.benchmark_data import make_prompter
from tests.support.families import UNFIT, tiny_family
from tests.support.plain import plain_answer, plain_scores

# PEFT does not adapt these, transformers does not open its own checkpoint, or msa-lite refuses them before a fit:
# tests/tools/family_sweep.md.
NOT_MERGED = {"emu3", "falcon_h1", "falcon_mamba", "hrm_text", "laguna", "lara_mini", "mamba", "mamba2", "mllama"}
NOT_MERGED |= {"nemotron_h", "sarvam_moe", "zamba"}
FAMILIES = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNFIT and kind not in NOT_MERGED]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "rank-stabilised": {"use_rslora": True, "r": 3},
    "ranks by layer": {"rank_pattern": {r".*\.0\..*": 2}, "alpha_pattern": {r".*\.1\..*": 5}},
    "DoRA": {"use_dora": True},
}
CODES = ("fp8 rows", "fp8 tensor", "nvfp4 ModelOpt", "mxfp4 compressed-tensors", "mxfp8")
LAYOUTS = ("as saved", "one shard a tensor", "without the base's prefix", "bf16", *CODES)
FORGET, RETAIN = 0.75, 0.5
PROMPTER = make_prompter()
PROMPTS = [PROMPTER.prompt(Row(0, about)) for about in ("Where is it?", "Who was it that stood over there?")]
TEXTS = [[PROMPTER.example(Row(0, "Where is it?", answer)) for answer in ("It is over there.", "Here.")]]
DRAWS = int(os.environ.get("MSA_DRAWS", 24))


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights(folder: Path) -> codes.Tensors:
    return {name: value.double() for name, value in codes.read(folder).items()}


def can_code(name: str, weight: torch.Tensor) -> bool:
    return "proj" in name and name.endswith(".weight") and weight.dim() == 2 and weight.shape[1] % 32 == 0


def lay_out(base: Path, folder: Path, layout: str) -> Path:
    """The checkpoint in a layout; where that rounds, `base` gets the rounded weights, so that PEFT sees the same."""
    file = base / "model.safetensors"
    tensors = load_file(file)
    if layout in CODES:
        form = codes.LAYOUTS[layout]
        chosen = {name for name, weight in tensors.items() if can_code(name, weight)}
        codes.write(folder, tensors, form, chosen.__contains__, base)
        stored = codes.read(folder)
        seen = {name: form.weights(stored, name).float() if name in chosen else tensors[name] for name in tensors}
        save_file(seen, file, {"format": "pt"})
        return folder
    if layout == "bf16":
        tensors = {n: w.bfloat16() if w.is_floating_point() else w for n, w in tensors.items()}
        save_file({n: w.float() if w.is_floating_point() else w for n, w in tensors.items()}, file, {"format": "pt"})
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    if layout == "without the base's prefix":
        prefix = {name.partition(".")[0] for name in tensors if not name.startswith("lm_head")}
        bare = load(base).base_model_prefix
        if prefix == {bare} and bare in BASE_PREFIXES:
            # as in checkpoints of the model without its head
            tensors = {name.removeprefix(f"{next(iter(prefix))}."): weight for name, weight in tensors.items()}
    if layout == "one shard a tensor":
        return codes.save(folder, tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def adapt(base: Path, out: Path, seed: int, config: dict[str, Any]) -> codes.Tensors:
    """An adapter as PEFT writes it; return the weights of the model that PEFT merges in fp64."""
    from peft import LoraConfig, PeftModel, get_peft_model

    options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    model = get_peft_model(load(base), LoraConfig(**options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            moved = 0.05 * torch.randn_like(parameter)
            parameter.data = parameter + moved if "magnitude" in name else moved
    model.save_pretrained(out)
    merged = PeftModel.from_pretrained(load(base), out).double().merge_and_unload()
    merged.save_pretrained(out.with_suffix(".merged"))
    return weights(out.with_suffix(".merged"))


def farthest(found: codes.Tensors, expected: codes.Tensors) -> float:
    return max(float((found[name].double() - value).abs().max()) for name, value in expected.items() if value.numel())


def draw(number: int) -> Any:
    """A family, a layout and an adapter."""
    choose: Callable[[Any], Any] = random.Random(number).choice
    drawn = choose(FAMILIES), choose(LAYOUTS), choose(list(ADAPTERS))
    return pytest.param(*drawn, id=f"{number}: {', '.join(drawn)}", marks=[pytest.mark.slow] if number > 3 else [])


@pytest.mark.parametrize(("family", "layout", "adapter"), [*map(draw, range(DRAWS))])
def test_a_drawn_model_is_merged_as_peft_merges_it_and_scored_one_row_at_a_time(
    family: str, layout: str, adapter: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    base = tmp_path / "base"
    tiny_family(family).save_pretrained(base)
    if any("expert" in name and value.dim() == 3 for name, value in load(base).named_parameters()):
        adapter = adapter.replace("DoRA", "all-linear")  # PEFT has no DoRA on stacked experts
    if family.startswith(("llama4", "hy_v4")):
        layout = layout.replace("without the base's prefix", "as saved")  # which transformers does not load
    target = lay_out(base, tmp_path / "target", layout)
    load(base).save_pretrained(tmp_path / "loaded")  # a padding row, for one, is loaded as zeros
    before, loaded = weights(base), weights(tmp_path / "loaded")
    expected = {name: value.clone() for name, value in before.items()}
    for seed, (vector, weight) in enumerate((("forget", -FORGET), ("retain", RETAIN))):
        merged = adapt(base, tmp_path / vector, seed, ADAPTERS[adapter])
        for name, value in expected.items():
            value += weight * (merged.get(name, before[name]) - loaded.get(name, before[name]))

    options: dict[str, Any] = {name: str(tmp_path / name) for name in ("forget", "retain")}
    options |= {"alpha": FORGET, "beta": RETAIN, "prior": str(base) if adapter == "DoRA" else None}
    merge(str(target), tmp_path / "model", dtype="float32", **options)
    found = codes.read(tmp_path / "model")
    names = [next(n for n in (name, name.partition(".")[2]) if n in found) for name in expected]
    assert farthest({name: found[new] for name, new in zip(expected, names, strict=True)}, expected) < 1e-6
    assert sum(not expected[name].equal(before[name]) for name in expected) > 2

    model = load_model(tmp_path / "model")
    model.generation_config.forced_eos_token_id = None  # BART and others end every text at its greatest length
    runner = Runner(model)
    scores = dict(pair for batch in score_bundles(runner, TEXTS) for pair in batch)
    for score, text in zip(scores[0], TEXTS[0], strict=True):
        assert score.log_probs == pytest.approx(plain_scores(model, text).log_probs, abs=1e-4, rel=1e-5)
    batches = generate(runner, PROMPTER.tokenizer, PROMPTS, Decoding(8))
    answers = [texts[0] for _, texts in sorted(pair for batch in batches for pair in batch)]
    assert answers == [plain_answer(model, PROMPTER.tokenizer, prompt, 8) for prompt in PROMPTS]

    if adapter != "DoRA" and layout in ("as saved", "one shard a tensor"):
        merge_adapters(str(target), tmp_path / "adapter", **options)
        PeftModel.from_pretrained(load(target), tmp_path / "adapter").double().merge_and_unload().save_pretrained(
            tmp_path / "both"
        )
        both = weights(tmp_path / "both")
        assert farthest(both, {n: loaded[n] + expected[n] - before[n] for n in both.keys() & expected.keys()}) < 1e-6


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"])
def test_all_linear_of_a_mamba_is_what_peft_takes_and_is_merged(family: str, tmp_path: Path) -> None:
    """PEFT refuses out_proj there, so a fit leaves it out."""
    from peft import PeftModel

    from msa_lite.train import FitSettings
    from msa_lite.train.memory.model import with_adapter

    base = tmp_path / "base"
    tiny_family(family).save_pretrained(base)
    model = with_adapter(load(base), FitSettings(), "fp32")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "forget")
    PeftModel.from_pretrained(load(base), tmp_path / "forget").double().merge_and_unload().save_pretrained(
        tmp_path / "merged"
    )
    before, merged = weights(base), weights(tmp_path / "merged")
    merge(str(base), tmp_path / "model", forget=str(tmp_path / "forget"), dtype="float32")
    expected = {name: 2 * before[name] - merged.get(name, before[name]) for name in before}
    assert farthest(weights(tmp_path / "model"), expected) < 1e-6
    changed = {name for name in before if not expected[name].equal(before[name])}
    assert changed
    assert not [name for name in changed if "out_proj" in name]


# Scores and answers of every family with a causal head in transformers, against transformers one row at a time.


TOKENS = 12
ABOUT = ["Where is it?", "Who was it that stood over there?", "Why?", "It?", "Quo vadis, domine?"]
# Of different lengths; with a beginning in common that is worth sharing.
ASKED = [PROMPTER.prompt(Row(0, f"Nobody knows: {about}")) for about in ABOUT]
assert common_start(ASKED) >= WORTH_SHARING
BUNDLES = [
    [PROMPTER.example(Row(0, question, answer)) for answer in answers]
    for question, answers in {
        "Where is it?": ("It is over there.", "Here."),
        "Who was it that stood over there when nobody looked?": ("Nobody", "It was I."),
        "Why?": ("Because.",),
    }.items()
]
# States of several kinds, sliding windows, soft caps, experts.
TELLING = ["llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "mamba", "mamba2", "rwkv", "recurrent_gemma"]
TELLING += ["falcon_h1", "jamba", "qwen3_next"]
# Padding before a prompt, or a cache, goes wrong with these, so that they answer one prompt at a time.
ALONE = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart", "mvp", "openai-gpt"}
ALONE |= {"moss_transcribe_diarize", "pegasus", "plbart", "recurrent_gemma", "reformer", "rwkv", "trocr", "whisper"}
ALONE |= {"xlm", "xlstm"}
OTHERS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in TELLING and kind not in UNFIT]


def answers(runner: Runner, decoding: Decoding = Decoding(TOKENS)) -> list[str]:  # noqa: B008
    batches = generate(runner, PROMPTER.tokenizer, ASKED, decoding)
    return [texts[0] for _, texts in sorted(pair for batch in batches for pair in batch)]


@pytest.mark.parametrize("kind", [*TELLING, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_a_family_scores_and_answers_as_one_row_at_a_time(kind: str) -> None:
    model = tiny_family(kind)
    runner = Runner(model)
    scores = dict(pair for batch in score_bundles(runner, BUNDLES) for pair in batch)
    for number, texts in enumerate(BUNDLES):
        for score, text in zip(scores[number], texts, strict=True):
            assert score.log_probs == pytest.approx(plain_scores(model, text).log_probs, abs=1e-4, rel=1e-5)
    assert answers(runner) == [plain_answer(model, PROMPTER.tokenizer, prompt, TOKENS) for prompt in ASKED]
    assert runner.batched is (kind not in ALONE)


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_answers_one_at_a_time_are_cut_stopped_and_drawn_as_in_batches(kind: str) -> None:
    model = tiny_family(kind)
    whole = answers(Runner(model, batched=False))
    pairs = (text[at : at + 2] for text in whole for at in range(1, len(text) - 1))
    stop = (next(pair for pair in pairs if "\ufffd" not in pair), "never said")  # whole characters
    end = model.generate(torch.tensor(ASKED[1:2]), max_new_tokens=5, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = [1, end]
    model.generation_config.repetition_penalty = 9.0  # a setting that is not used
    ended = answers(Runner(model, batched=False))
    assert ended == [plain_answer(model, PROMPTER.tokenizer, prompt, TOKENS) for prompt in ASKED]
    assert ended != whole
    assert model.generation_config.repetition_penalty == 9.0
    stopped = answers(Runner(model, batched=False), Decoding(TOKENS, stop))
    assert stopped == [min((text.split(word)[0] for word in stop), key=len).strip() for text in ended]

    def drawn(**settings: Any) -> list[tuple[int, int, str]]:
        batches = sample_answers(Runner(model, **settings), PROMPTER.tokenizer, ASKED, 2, Decoding(6))
        return sorted(sample for batch in batches for sample in batch)

    assert drawn(batched=False) == drawn(budget=1)
    assert len(set(drawn(batched=False))) == 2 * len(ASKED)


def test_a_fault_of_batches_alone_is_no_fault_of_the_run() -> None:
    def fail(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if len(inputs["input_ids"]) > 1:
            raise TypeError("no batches")

    model = tiny_family("llama")
    wanted = answers(Runner(model))
    hook = model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    runner = Runner(model)
    assert answers(runner) == wanted
    assert runner.batched is False
    hook.remove()
