"""The filter of experts: each one's moments and change against oracles from the stored weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from msa_lite.data import Example
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.blocks import Files
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.merger.filtering import filter_vector
from msa_lite.merger.moments import load_moments
from msa_lite.merger.vectors.vector import load_vector
from msa_lite.train.moments import write_moments
from tests.unit.test_filter import wanted, wanted_scale

EXPERTS, CHOSEN, FEW = 4, 2, 32


@dataclass(frozen=True)
class Family:
    """The names of a family's weights in its files, and the arithmetic of one expert before its down projection."""

    router: str
    first: tuple[str, ...]
    """The matrices that get the expert's inputs; {} is the expert."""
    down: str
    activated: Callable[[dict[str, np.ndarray], int, np.ndarray], np.ndarray]
    """activated(the tensors of an MLP, expert, inputs)."""
    stacked: bool = False


def swiglu(gate: str, up: str) -> Callable[[dict[str, np.ndarray], int, np.ndarray], np.ndarray]:
    def activated(weights: dict[str, np.ndarray], expert: int, inputs: np.ndarray) -> np.ndarray:
        gates, ups = (inputs @ weights[name.format(expert)].T for name in (gate, up))
        product: np.ndarray = gates / (1 + np.exp(-gates)) * ups
        return product

    return activated


def gpt_oss(weights: dict[str, np.ndarray], expert: int, inputs: np.ndarray) -> np.ndarray:
    both = inputs @ weights["experts.gate_up_proj"][expert] + weights["experts.gate_up_proj_bias"][expert]
    gates, ups = both[:, ::2].clip(max=7), both[:, 1::2].clip(-7, 7)
    product: np.ndarray = (ups + 1) * gates / (1 + np.exp(-1.702 * gates))
    return product


W1, W2, W3 = (f"experts.{{}}.{name}.weight" for name in ("w1", "w2", "w3"))
GATE, DOWN, UP = (f"experts.{{}}.{name}_proj.weight" for name in ("gate", "down", "up"))
FAMILIES = {
    "mixtral": Family("gate.weight", (W1, W3), W2, swiglu(W1, W3)),
    "qwen3_moe": Family("gate.weight", (GATE, UP), DOWN, swiglu(GATE, UP)),
    "gpt_oss": Family("router.weight", ("experts.gate_up_proj",), "experts.down_proj", gpt_oss, stacked=True),
}


def draw_rows(seed: int, count: int, first: int) -> list[Example]:
    """Rows of 6 to 9 tokens, of which the first two are no labels."""
    draw = np.random.default_rng(seed)
    ids = [draw.integers(3, 300, draw.integers(6, 10)).tolist() for _ in range(count)]
    return [Example(first + n, row, [-100, -100, *row[2:]]) for n, row in enumerate(ids)]


ROWS = {"forget": draw_rows(0, 12, 0), "retain": draw_rows(1, 40, 12)}


def split_by_expert(model: Any, family: Family, folder: Path, rows: list[Example]) -> dict[str, list[np.ndarray]]:
    """The inputs of each expert's weights by the names of the MLP's tensors, from the inputs of the MLPs alone."""
    states: dict[str, list[np.ndarray]] = {name: [] for name, _ in model.named_modules() if name.endswith(".mlp")}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, given, name=name: states[name].append(given[0][0].double().numpy())
        )
        for name in states
    ]
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([row.ids]))
        places = [at - 1 for at, label in enumerate(row.labels) if at and label >= 0]
        for name in states:
            states[name][-1] = states[name][-1][places]
    for hook in hooks:
        hook.remove()
    inputs: dict[str, list[np.ndarray]] = {}
    for mlp, values in states.items():
        weights = mlp_weights(folder, mlp)
        hidden = np.concatenate(values)
        scores = hidden @ weights[family.router].T + weights.get("router.bias", 0)
        chosen = np.argsort(-scores, axis=1)[:, :CHOSEN]
        of_experts = [hidden[(chosen == expert).any(axis=1)] for expert in range(EXPERTS)]
        inputs[f"{mlp}.first"] = of_experts
        inputs[f"{mlp}.down"] = [family.activated(weights, expert, of_experts[expert]) for expert in range(EXPERTS)]
    return inputs


def mlp_weights(folder: Path, mlp: str) -> dict[str, np.ndarray]:
    """The tensors of an MLP by their names inside it. Mixtral's files call it otherwise."""
    starts = [f"{mlp}.", f"{mlp.removesuffix('mlp')}block_sparse_moe."]
    tensors = {n: t.astype(np.float64) for p in folder.glob("*.safetensors") for n, t in load_file(p).items()}
    return {name[len(start) :]: value for name, value in tensors.items() for start in starts if name.startswith(start)}


@dataclass(frozen=True)
class Measured:
    """A target with experts, its moments, and the oracle's inputs of each expert's matrices."""

    kind: str
    folder: Path
    model: Any
    moments: Path
    matrices: dict[tuple[str, int], list[np.ndarray]]
    """By a stored tensor and an expert: its inputs on forget and on retain rows, or those of all experts where that
    one has few."""
    few: set[tuple[str, int]]

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]


def oracle(kind: str, model: Any, folder: Path) -> tuple[dict[tuple[str, int], list[np.ndarray]], set[tuple[str, int]]]:
    family, names, few = FAMILIES[kind], load_checkpoint(folder).tensors, set()
    sides = [split_by_expert(model, family, folder, rows) for rows in ROWS.values()]
    matrices = {}
    for key in sides[0]:
        mlp, part = key.rsplit(".", 1)
        block = mlp if f"{mlp}.{family.router}" in names else f"{mlp.removesuffix('mlp')}block_sparse_moe"
        for template in family.first if part == "first" else (family.down,):
            for expert in range(EXPERTS):
                place = f"{block}.{template.format(expert)}", expert
                own = [side[key][expert] for side in sides]
                matrices[place] = own
                if min(map(len, own)) < FEW:
                    few.add(place)
                    matrices[place] = [np.concatenate(side[key]) for side in sides]
    return matrices, few


@pytest.fixture(params=[*FAMILIES])
def measured(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path) -> Measured:
    kind = request.param
    for folder in (make_checkpoint(kind, seed=seed) for seed in range(9)):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        matrices, few = oracle(kind, model, folder)
        if 0 < len(few) < len(matrices):  # both kinds are there
            break
    assert 0 < len(few) < len(matrices)
    measure(folder, model, tmp_path / "moments")
    return Measured(kind, folder, model, tmp_path / "moments", matrices, few)


def measure(folder: Path, model: Any, out: Path) -> None:
    inputs = {"target": fetch(str(folder)).identity()}
    write_moments(out, inputs, lambda: model, load_checkpoint(folder).tensors, ROWS, pad=2)


def roots_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_each_expert_has_its_own_moments_or_where_it_gets_few_positions_those_of_all(
    measured: Measured,
) -> None:
    moments, roots = load_moments(measured.moments), roots_of(measured.moments)
    for (name, expert), inputs in measured.matrices.items():
        layer = moments.layers[name]
        assert layer.transposed == measured.family.stacked
        root = layer.roots[expert if measured.family.stacked else 0]
        assert root.endswith(f".{expert}") == ((name, expert) not in measured.few)
        for side, rows in zip(ROWS, inputs, strict=True):
            found = roots[f"{side}.{root}"].astype(np.float64)
            product = rows.T @ rows
            np.testing.assert_allclose(found.T @ found, product, rtol=1e-4, atol=1e-5 * np.abs(product).max())


def test_a_filtered_checkpoint_changes_each_expert_by_its_own_filter(
    measured: Measured, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prior, tuned = (make_checkpoint(measured.kind, seed=seed) for seed in (3, 4))
    sources = [fetch(str(folder)) for folder in (tuned, measured.folder, prior)]
    out = filter_vector(sources[0], measured.moments, 2.0, sources[1], sources[2], tmp_path / "out")
    old, new, result = (load_file(folder / "model.safetensors") for folder in (prior, tuned, out))
    changes = {}
    for name, expert in measured.matrices:
        before, *others = (t[name][expert].T if measured.family.stacked else t[name] for t in (old, new, result))
        changes[name, expert] = [values.astype(np.float64) - before for values in others]
    assert_filtered(measured, changes, out)  # s is that of the attention's layers, too


def assert_filtered(measured: Measured, changes: dict[tuple[str, int], list[np.ndarray]], out: Path) -> None:
    """Compare each matrix's (D, s D′) with the definition: its own filter, and the s that the manifest has."""
    scale = (load_manifest(out) or {})["filter"]["scale"]
    for key, (change, filtered) in changes.items():
        expected = scale * wanted(change, *measured.matrices[key], 2.0)
        np.testing.assert_allclose(filtered, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_an_adapter_on_all_experts_of_a_layer_is_filtered(measured: Measured, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=["gate_up_proj", "down_proj"])
    torch.manual_seed(5)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(measured.folder), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    target = fetch(str(measured.folder))
    out = filter_vector(fetch(str(tmp_path / "adapter")), measured.moments, 2.0, target, None, tmp_path / "out")
    checkpoint = load_checkpoint(measured.folder)
    before, after = (load_vector(folder, checkpoint, None).deltas for folder in (tmp_path / "adapter", out))
    assert before.keys() == {name for name, _ in measured.matrices}
    places = {
        key: [change_of(deltas[key[0]], key[1], measured.family.stacked) for deltas in (before, after)]
        for key in measured.matrices
    }
    assert_filtered(measured, places, out)
    oracle_scale = wanted_scale([(places[key][0], *inputs) for key, inputs in measured.matrices.items()], 2.0)
    assert (load_manifest(out) or {})["filter"]["scale"] == pytest.approx(oracle_scale, rel=1e-4)


def change_of(delta: Any, expert: int, stacked: bool) -> np.ndarray:
    """The change (out, in) of one expert's matrix in float64."""
    loaded = delta.load(Files(), np.float64)
    part = loaded.slices[expert] if stacked else loaded
    change: np.ndarray = part.left @ part.right
    return change.T if stacked else change
