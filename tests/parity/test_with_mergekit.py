"""`merge --with mergekit`: mergekit's own results, with our checks before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.errors import FormatError, MismatchError, StageError, UsageError
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.merger import mergekit_recipe
from msa_lite.merger.with_mergekit import merge_with_mergekit

pytest.importorskip("mergekit", reason="mergekit is not installed")
Make = Callable[..., Path]


@pytest.fixture
def models(make_checkpoint: Make) -> dict[str, str]:
    return {name: str(make_checkpoint("llama", seed)) for seed, name in enumerate(("target", "forget", "retain"))}


def write(folder: Path, method: str, models: dict[str, str], **changes: Any) -> Path:
    weights = {"forget": -1.0, "retain": 0.5}
    listed = [{"model": models[n], "parameters": {"weight": w, "density": 0.5}} for n, w in weights.items()]
    document = {"merge_method": method, "base_model": models["target"], "models": listed, "dtype": "float32"}
    if method == "slerp":
        document |= {"models": [{"model": models["forget"]}, {"model": models["target"]}], "parameters": {"t": 0.3}}
    path = folder / f"{method}.yml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear", "slerp"])
def test_methods_of_mergekit_give_its_own_bits_and_a_manifest_as_all_merges(
    method: str, models: dict[str, str], tmp_path: Path
) -> None:
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    recipe = write(tmp_path, method, models)
    result = merge_with_mergekit(recipe, tmp_path / "out", seed=7)
    done = CliRunner().invoke(
        main, [str(recipe), str(tmp_path / "theirs"), "--quiet", "--random-seed", "7"], catch_exceptions=False
    )
    assert done.exit_code == 0
    ours, theirs, before = (
        weights(Path(folder)) for folder in (tmp_path / "out", tmp_path / "theirs", models["target"])
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    changed = sum(int((ours[name] != before[name]).sum()) for name in before)
    assert result.weights_changed == changed > 1000
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None
    assert verify_folder(tmp_path / "out") == []
    assert (manifest["kind"], manifest["inputs"]["with"], manifest["inputs"]["seed"]) == ("model", "mergekit", 7)
    assert manifest["change"]["method"] == method
    made = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    assert merge_with_mergekit(recipe, tmp_path / "out", seed=7) == result
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == made


def test_a_merge_that_is_ours_is_compared_with_our_own(models: dict[str, str], tmp_path: Path) -> None:
    given = {name: models[name] for name in ("target", "forget", "retain")} | {"alpha": 0.5, "beta": 0.25}
    recipe = tmp_path / "ours.yml"
    recipe.write_text(mergekit_recipe(**given, prior=models["target"]))
    result = merge_with_mergekit(recipe, tmp_path / "theirs")
    msa_lite.merge(**given, prior=models["target"], out=tmp_path / "ours", dtype="float32", exact=True)
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "theirs")
    worst = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
    assert result.difference is not None
    assert worst < 1e-7
    assert 0 < result.difference < worst + 2**-24  # and the rounding to fp32, of weights of about 1


def narrow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})


def drop(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [(narrow, MismatchError, "up_proj"), (drop, MismatchError, "up_proj"), (quantise, FormatError, "codes")],
)
def test_what_mergekit_would_pass_over_is_refused_before_it_runs(
    spoil: Callable[[Path], None], error: type[Exception], says: str, models: dict[str, str], tmp_path: Path
) -> None:
    import shutil

    spoiled = shutil.copytree(models["forget"], tmp_path / "spoiled")
    spoil(spoiled)
    recipe = write(tmp_path, "ties", models | {"forget": str(spoiled)})
    with pytest.raises(error, match=says):
        merge_with_mergekit(recipe, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"spoiled", "ties.yml"}


def test_nothing_stays_of_a_merge_that_fails_or_is_not_finite(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mergekit.merge

    recipe = write(tmp_path, "ties", models)

    def fail(config: Any, out: str, options: Any) -> None:
        (Path(out) / "model.safetensors").write_bytes(b"half of it")
        raise RuntimeError("out of patience")

    with monkeypatch.context() as patch:
        patch.setattr(mergekit.merge, "run_merge", fail)
        with pytest.raises(StageError, match="out of patience"):
            merge_with_mergekit(recipe, tmp_path / "out")
    large = write(tmp_path, "task_arithmetic", models, out_dtype="float16", parameters={"lambda": 1e9})
    with pytest.raises(MismatchError, match="NaN or infinities"):
        merge_with_mergekit(large, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"ties.yml", "task_arithmetic.yml"}


def test_a_recipe_that_mergekit_refuses_and_a_missing_mergekit_are_told(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    (tmp_path / "odd.yml").write_text("merge_method: ties\nmodels: 7\n")
    with pytest.raises(UsageError, match="mergekit refuses this recipe"):
        merge_with_mergekit(tmp_path / "odd.yml", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "mergekit", None)
    with pytest.raises(UsageError, match=r"msa-lite\[mergekit\]"):
        merge_with_mergekit(write(tmp_path, "ties", models), tmp_path / "out")
