"""Adapters that other tools left in an odd state: what is read, and what is refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, MismatchError
from msa_lite.io.weights.adapter import load_adapter
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.matching import match_names
from msa_lite.merger import merge
from tests.support.merges import Adapter, edit_adapter, write_checkpoint

RNG = np.random.default_rng(0)
LAYERS = [f"model.layers.{number}.self_attn.q_proj" for number in range(3)]


def factors(*modules: str) -> Adapter:
    return Adapter({m: (RNG.normal(size=(2, 4)), RNG.normal(size=(4, 2))) for m in modules}, lora_alpha=4)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "target", {f"{n}.weight": RNG.normal(size=(4, 4)) for n in LAYERS})


@pytest.mark.parametrize("start", ["pissa_niter_4", "OLoRA", "corda", "loftq"])
def test_an_adapter_that_changes_its_base_is_refused_with_the_way_to_convert_it(tmp_path: Path, start: str) -> None:
    folder = edit_adapter(factors(*LAYERS).write(tmp_path / "a"), tmp_path / "b", init_lora_weights=start)
    with pytest.raises(FormatError, match=rf"init_lora_weights: '{start}'.*path_initial_model_for_weight_conversion="):
        load_adapter(folder)


def test_an_adapter_by_mica_is_a_plain_one(tmp_path: Path, target: Path) -> None:
    adapter = factors(*LAYERS)
    folder = edit_adapter(adapter.write(tmp_path / "a"), tmp_path / "b", init_lora_weights="mica")
    merge(target, tmp_path / "out", forget=folder, exact=True)
    before, after = (load_file(path / "model.safetensors") for path in (target, tmp_path / "out"))
    for name in LAYERS:
        assert np.allclose(after[f"{name}.weight"], before[f"{name}.weight"] - adapter.delta(name), atol=1e-14)


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


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"target_modules": ["q_proj"]}, ["no factors of model.layers.#.self_attn.q_proj in 2 of 3 layers: 0, 2"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, []),
        ({"target_modules": [LAYERS[1]]}, []),
        ({"target_modules": r".*\.1\.self_attn\.q_proj"}, []),
    ],
)
def test_half_an_adapter_is_told_by_layer(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture, config: Any, says: list[str]
) -> None:
    folder = edit_adapter(factors(LAYERS[1]).write(tmp_path / "a"), tmp_path / "b", **config)
    match_names(load_adapter(folder), load_checkpoint(target).tensors)
    assert [record.getMessage().partition("The file holds ")[2] for record in caplog.records] == says


def test_a_layer_of_multi_token_prediction_is_not_missed(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(target / "model.safetensors") | {"model.layers.2.enorm.weight": np.ones(4)}
    save_file(weights, target / "model.safetensors")
    folder = edit_adapter(factors(*LAYERS[:2]).write(tmp_path / "a"), tmp_path / "b", target_modules=["q_proj"])
    match_names(load_adapter(folder), load_checkpoint(target).tensors)
    assert not caplog.records


def test_a_file_of_nothing_names_zero_3(tmp_path: Path, target: Path) -> None:
    folder = edit_adapter(factors(LAYERS[0]).write(tmp_path / "a"), tmp_path / "b", lambda tensors: tensors.clear())
    with pytest.raises(MismatchError, match=r"no LoRA factors at all.*ZeRO-3"):
        merge(target, tmp_path / "out", forget=folder)
