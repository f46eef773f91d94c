"""A merge written as one adapter: PEFT loads it onto the target, where it does what the merged model does."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

from msa_lite.cli.merge import merge_command
from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.adapters.modules import approximate, truncate
from tests.support.models import load

Make = Callable[..., Path]
UNTIED = {"tie_word_embeddings": False}
PATTERNS = {"rank_pattern": {".*v_proj": 2, "c_attn": 6}, "alpha_pattern": {"(up|down)_proj": 3, "mlp.c_fc": 5}}
EMBEDDINGS = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}

# model, changes of its config, LoraConfig of the forget and of the retain vector
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ranks": ("llama", {}, {"r": 2}, {"r": 7, "lora_alpha": 3}),
    "rslora": ("qwen2", {}, {"use_rslora": True, **PATTERNS}, {"use_rslora": True, "lora_alpha": 5}),
    "one scaled otherwise": ("olmo2", {}, {"use_rslora": True}, PATTERNS),
    "modules of one alone": ("llama", {}, {}, {"target_modules": ["q_proj", "down_proj"], "r": 3}),
    "Conv1D": ("gpt2", {}, {"use_rslora": True, **PATTERNS}, {"r": 3}),
    "square Conv1D": ("gpt2", {}, {}, {"target_modules": r".*attn\.c_proj", "r": 3}),
    "square Conv1D alone": ("gpt2", {}, *[{"target_modules": r".*attn\.c_proj"}] * 2),
    "embeddings": ("llama", UNTIED, EMBEDDINGS, {"r": 3, **EMBEDDINGS}),
    "embeddings of one alone": ("qwen2", {}, {"r": 3}, EMBEDDINGS),
}


def vectors(make_adapter: Make, name: str) -> dict[str, str]:
    kind, changes, forget, retain = CASES[name]
    made = (make_adapter(kind, seed, model=changes, **config) for seed, config in ((1, forget), (2, retain)))
    return dict(zip(("forget", "retain"), map(str, made), strict=True))


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_peft(target: Path, adapter: Path) -> Any:
    """The target with an adapter on it; whatever PEFT does not find, or finds too much, is an error."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter keys.*")
        return PeftModel.from_pretrained(load_model(target), adapter).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(100)[None]).logits


def products(folder: Path) -> dict[str, np.ndarray]:
    """scale · B A by PEFT's module, in fp64."""
    tensors = {name: t.astype(np.float64) for name, t in load_file(folder / ADAPTER_FILE).items()}
    return {
        module: low.scale * tensors[low.b.name] @ tensors[low.a.name]
        for module, low in load_adapter(folder).modules.items()
    }


def update(forget: str, retain: str, alpha: float, beta: float) -> dict[str, np.ndarray]:
    minus, plus = products(Path(forget)), products(Path(retain))
    return {m: beta * plus.get(m, 0) - alpha * minus.get(m, 0) for m in minus.keys() | plus.keys()}  # type: ignore[call-overload]


@pytest.mark.parametrize("name", CASES)
def test_the_target_with_the_adapter_is_the_merged_model(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, name: str
) -> None:
    kind, changes, *_ = CASES[name]
    target = make_checkpoint(kind, **changes)
    options: dict[str, Any] = {**vectors(make_adapter, name), "alpha": 0.7, "beta": 0.4}
    made = merge_adapters(str(target), tmp_path / "adapter", **options)
    merge(str(target), tmp_path / "model", **options, exact=True)
    model, merged = load_peft(target, tmp_path / "adapter"), load_model(tmp_path / "model")
    ours = logits(model)
    assert torch.allclose(ours, logits(merged), rtol=1e-5, atol=1e-5)
    assert (ours - logits(load_model(target))).abs().max() > 1e-2
    weights = model.merge_and_unload().state_dict()
    for key, value in merged.state_dict().items():
        assert torch.allclose(weights[key], value, rtol=2e-7, atol=2e-7), key
    wanted = update(options["forget"], options["retain"], 0.7, 0.4)
    found = products(tmp_path / "adapter")
    assert found.keys() == wanted.keys()
    assert all(np.abs(found[module] - wanted[module]).max() < 1e-7 for module in wanted)
    assert (made.modules, made.truncation_loss) == (len(wanted), 0.0)


def test_ranks_add_up_and_are_written_by_module(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    given = vectors(make_adapter, "modules of one alone")
    made = merge_adapters(str(make_checkpoint("llama")), tmp_path / "out", **given, beta=0.4)
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    both = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")}
    ranks = {module: low.rank for module, low in load_adapter(tmp_path / "out").modules.items()}
    assert ranks == {module: 7 if module in both else 4 for module in products(Path(given["forget"]))}
    assert (made.rank, config["r"], config["lora_alpha"], config["use_rslora"]) == (7, 7, 7, False)
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert {t.dtype.name for t in load_file(tmp_path / "out" / ADAPTER_FILE).values()} == {"float32"}
    assert set(config["rank_pattern"]) == {m.replace(".", r"\.") for m, rank in ranks.items() if rank == 4}
    assert set(config["target_modules"]) == set(ranks)


def test_embedding_factors_of_a_prior_go_onto_its_target(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    prior, target = (make_checkpoint("llama", seed, **UNTIED) for seed in (0, 1))
    options: dict[str, Any] = {**vectors(make_adapter, "embeddings"), "beta": 0.5, "prior": str(prior)}
    merge_adapters(str(target), tmp_path / "adapter", **options)
    merge(str(target), tmp_path / "model", **options)
    assert not any("base_layer" in name for name in load_file(tmp_path / "adapter" / ADAPTER_FILE))
    ours = logits(load_peft(target, tmp_path / "adapter"))
    assert torch.allclose(ours, logits(load_model(tmp_path / "model")), rtol=1e-5, atol=1e-5)


def test_an_adapter_merged_again_is_the_merge_even_of_factors_that_are_turned_differently(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, folders = str(make_checkpoint("llama")), []
    for seed, saved in ((1, True), (2, False)):  # q_proj is square, so that only this says how it is stored
        folders.append(shutil.copytree(make_adapter("llama", seed, target_modules=["q_proj"]), tmp_path / str(seed)))
        config = json.loads((folders[-1] / ADAPTER_CONFIG).read_text()) | {"fan_in_fan_out": saved}
        (folders[-1] / ADAPTER_CONFIG).write_text(json.dumps(config))
    options: dict[str, Any] = {"forget": str(folders[0]), "retain": str(folders[1]), "alpha": 0.7, "beta": 0.4}
    merge_adapters(target, tmp_path / "adapter", **options)
    merge(target, tmp_path / "once", **options, exact=True)
    merge(target, tmp_path / "again", retain=str(tmp_path / "adapter"), alpha=0, beta=1.0, exact=True)
    once, again = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "again"))
    assert all(np.abs(once[name] - again[name]).max() < 1e-7 for name in once)


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The best approximation of a whole matrix by its singular values."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize(("name", "rank"), [("ranks", 1), ("ranks", 3), ("ranks", 6), ("Conv1D", 3), ("embeddings", 3)])
def test_truncation_keeps_the_best_ranks_and_tells_what_it_lost(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, name: str, rank: int
) -> None:
    kind, changes, *_ = CASES[name]
    target, given = make_checkpoint(kind, **changes), vectors(make_adapter, name)
    made = merge_adapters(str(target), tmp_path / "out", **given, beta=0.5, max_rank=rank)
    wanted, found = update(given["forget"], given["retain"], 1.0, 0.5), products(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for module, matrix in wanted.items():
        assert np.abs(found[module] - best(matrix, rank)).max() < 1e-6, module
    lost = sum(np.sum((found[module] - matrix) ** 2) for module, matrix in wanted.items())
    whole = sum(np.sum(matrix**2) for matrix in wanted.values())
    assert made.truncation_loss == pytest.approx(np.sqrt(lost / whole), rel=1e-5)
    assert 0 < made.truncation_loss < 1
    assert made.rank == rank == max(low.rank for low in load_adapter(tmp_path / "out").modules.values())
    assert load_manifest(tmp_path / "out")["change"]["truncation_loss"] == made.truncation_loss  # type: ignore[index]
    assert torch.isfinite(logits(load_peft(target, tmp_path / "out"))).all()


@pytest.mark.parametrize(
    ("out", "into", "rank", "keep"), [(48, 32, 40, 36), (32, 48, 60, 50), (5, 9, 7, 6), (9, 5, 3, 2)]
)
def test_factors_of_more_ranks_than_the_matrix_has_are_truncated_to_what_it_has(
    out: int, into: int, rank: int, keep: int
) -> None:
    rng = np.random.default_rng(0)
    b, a = rng.normal(size=(out, rank)), rng.normal(size=(rank, into))
    left, right, lost = truncate(b, a, keep)
    assert left.shape[1] == right.shape[0] == min(keep, out, into)
    assert np.allclose(left @ right, best(b @ a, keep), atol=1e-10)
    assert lost == pytest.approx(np.sum((b @ a - best(b @ a, keep)) ** 2), abs=1e-9, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("llama", {"use_dora": True}, r"model\.layers\.0\.self_attn\.q_proj\.weight: DoRA in the retain vector"),
        ("llama", {"modules_to_save": ["model.norm"]}, r"model\.norm\.weight: a full new value in the retain vector"),
        ("qwen2", {"bias": "all"}, r"model\.layers\.0\.self_attn\.q_proj\.bias: a full new value"),
        ("gpt2", {"lora_bias": True}, r"transformer\.h\.0\.attn\.c_attn\.bias: a bias of LoRA's own"),
        ("llama", {"trainable_token_indices": [3]}, r"model\.embed_tokens\.weight: new token rows"),
    ],
)
def test_what_is_no_product_of_factors_is_refused_by_name(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, kind: str, config: dict[str, Any], says: str
) -> None:
    target, forget, retain = make_checkpoint(kind), make_adapter(kind), make_adapter(kind, 2, **config)
    options: dict[str, Any] = {"forget": str(forget), "retain": str(retain), "beta": 0.5, "prior": str(target)}
    with pytest.raises(MismatchError, match=says):
        merge_adapters(str(make_checkpoint(kind, 1)), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_changes_of_nothing_and_bad_ranks_are_refused(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, out, adapter = str(make_checkpoint("llama")), tmp_path / "out", str(make_adapter("llama"))
    full = {"forget": str(make_checkpoint("llama", 1)), "prior": str(make_checkpoint("llama", 2))}
    with pytest.raises(MismatchError, match=r"give --max-rank:\n.*the forget vector is a full checkpoint"):
        merge_adapters(target, out, **full)
    with pytest.raises(UsageError, match="this adapter would change nothing"):
        merge_adapters(target, out, forget=adapter, alpha=0.0, retain=adapter, beta=0.0)
    with pytest.raises(MismatchError, match="zero or cancel each other out"):
        merge_adapters(target, out, forget=adapter, alpha=0.5, retain=adapter, beta=0.5)
    with pytest.raises(UsageError, match="max_rank is 0; at least 1"):
        merge_adapters(target, out, forget=adapter, max_rank=0)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_writes_the_same_adapter(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    target, given = str(make_checkpoint("llama")), vectors(make_adapter, "ranks")
    command = ["--target", target, "--forget", given["forget"], "--alpha", "0.7", "--as", "adapter"]
    command += ["--retain", given["retain"], "--beta", "0.5", "--max-rank", "3"]
    done = CliRunner().invoke(merge_command, [*command, "--out", str(tmp_path / "a"), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    made = merge_adapters(target, tmp_path / "b", **given, alpha=0.7, beta=0.5, max_rank=3)
    assert json.loads(done.stdout) == {**json_form(made), "out": str(tmp_path / "a")}
    assert (tmp_path / "a" / ADAPTER_FILE).read_bytes() == (tmp_path / "b" / ADAPTER_FILE).read_bytes()
    assert made.describe().startswith("one adapter on 14 modules, rank 3; truncation lost")


# An adapter from full checkpoints: the best product of a rank for each linear layer, against numpy's SVD and PEFT.


RANK = 6


@pytest.mark.parametrize("shape", [(40, 300), (300, 40), (5, 9)])
@pytest.mark.parametrize("fall", [0.5, 0.95])
def test_the_product_is_nearly_the_best_of_its_rank(shape: tuple[int, int], fall: float) -> None:
    draw, size = np.random.default_rng(1), min(shape)
    u, v = (np.linalg.qr(draw.standard_normal((side, size)))[0] for side in shape)
    values = fall ** np.arange(size)
    matrix = (u * values) @ v.T
    parts = [slice(start, start + 7) for start in range(0, shape[0], 7)]
    (b, a), whole, kept = approximate(lambda: ((part, matrix[part]) for part in parts), shape, min(RANK, size))
    assert whole == pytest.approx(np.sum(values**2))
    assert np.sum((matrix - b @ a) ** 2) == pytest.approx(whole - kept, rel=1e-6, abs=1e-9)
    assert np.sum(values[:RANK] ** 2) * 0.985 <= kept <= np.sum(values[:RANK] ** 2) * (1 + 1e-9)


def test_full_checkpoints_become_an_adapter_that_says_what_it_keeps(
    make_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    target, tuned, prior = (make_checkpoint("qwen2", seed=seed) for seed in (0, 1, 2))
    with caplog.at_level(logging.WARNING, "msa_lite"):
        merged = merge_adapters(
            str(target), tmp_path / "out", forget=str(tuned), alpha=0.5, prior=str(prior), max_rank=RANK
        )
    before, after, start = (load_file(folder / "model.safetensors") for folder in (target, tuned, prior))
    change = {name: -0.5 * (after[name].astype(float) - start[name]) for name in before}
    linear = [name for name in change if name.endswith("proj.weight") or name == "lm_head.weight"]
    assert merged.modules == len(linear) == 15
    model = PeftModel.from_pretrained(load(target)[0], tmp_path / "out").double()
    result = {name: value.numpy() for name, value in model.merge_and_unload().state_dict().items()}
    lost, kept = 0.0, (load_manifest(tmp_path / "out") or {})["kept"]
    for name, delta in change.items():
        found = result[name] - before[name] if name in linear else np.zeros_like(delta)
        lost += np.sum((delta - found) ** 2)
        if name in linear:
            best = np.sum(np.linalg.svd(delta, compute_uv=False)[:RANK] ** 2) / np.sum(delta**2)
            assert 0.9 * best <= kept[name.removesuffix(".weight")] <= best * (1 + 1e-6)
        else:
            torch.testing.assert_close(torch.tensor(result[name]), torch.tensor(before[name]).double())
    total = sum(np.sum(delta**2) for delta in change.values())
    assert merged.truncation_loss == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    assert "tensors are no linear layers and stay the target's, among them model.embed_tokens.weight" in caplog.text
