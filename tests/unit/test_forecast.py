"""The forecast of a merge: what is counted, that it depends on the weights alone, and that it costs no second merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from msa_lite.errors import UsageError
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.blocks import QUANTISATIONS
from msa_lite.merger import bounds, merge
from msa_lite.recipe.merging import Merge
from msa_lite.report.card import model_card
from tests.support.merges import KINDS, Adapter, Arrays, read_checkpoint, write_checkpoint
from tests.support.processes import fork_cli

ALL = ("nf4", "int4", "int8")
LEVELS = [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302,
          0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]  # fmt: skip
LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")
OTHERS = ("model.embed_tokens", "lm_head", "model.layers.0.norm")


def write_inputs(folder: Path, shape: tuple[int, int] = (48, 64), size: float = 0.02, kind: str = "float32") -> Any:
    """A target of two linear weights, an embedding, a head and a norm, and an adapter on all but the norm."""
    random = np.random.default_rng(0)
    arrays = {f"{name}.weight": random.normal(0, 0.02, shape).astype(KINDS[kind]) for name in (*LAYERS, *OTHERS[:2])}
    arrays["model.layers.0.norm.weight"] = np.ones(shape[1], KINDS[kind])
    write_checkpoint(folder / "target", arrays, {name: int("1." in name) for name in arrays})
    factors = {
        name: (random.normal(0, 1, (2, shape[1])), random.normal(0, size / 4, (shape[0], 2)))
        for name in (*LAYERS, *OTHERS[:2])
    }
    Adapter({name: (a.astype(np.float32), b.astype(np.float32)) for name, (a, b) in factors.items()}).write(
        folder / "forget"
    )
    return {"target": str(folder / "target"), "forget": str(folder / "forget")}


def nf4_codes(weights: np.ndarray) -> np.ndarray:
    """The nearest value of NF4 to each weight of groups of 64, in fp64."""
    flat = weights.astype(np.float64).reshape(-1)
    flat = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    scaled = flat / np.abs(flat).max(1, keepdims=True)
    codes: np.ndarray = np.abs(scaled[..., None] - np.array(LEVELS)).argmin(-1).reshape(-1)[: weights.size]
    return codes


def changed(before: Arrays, after: Arrays, name: str) -> int:
    """The weights of a tensor whose nearest value is another one."""
    return int((nf4_codes(before[f"{name}.weight"]) != nf4_codes(after[f"{name}.weight"])).sum())


def kept(before: Arrays, after: Arrays) -> float:
    """What NF4 leaves of the update, in fp64, by the nearest values."""
    along = square = 0.0
    for name in LAYERS:
        old, new = (nf4_values(arrays[f"{name}.weight"]) for arrays in (before, after))
        update = after[f"{name}.weight"].astype(np.float64) - before[f"{name}.weight"].astype(np.float64)
        along, square = along + float(((new - old) * update).sum()), square + float((update**2).sum())
    return along / square


def nf4_values(weights: np.ndarray) -> np.ndarray:
    """The weights that the codes stand for."""
    flat = weights.astype(np.float64).reshape(-1)
    scales = np.abs(np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)).max(1).repeat(64)[: len(flat)]
    values: np.ndarray = (np.array(LEVELS)[nf4_codes(weights)] * scales).reshape(weights.shape)
    return values


def test_an_update_of_weights_that_lie_on_the_values_is_rounded_away_and_told(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, size=2e-4)
    usual = merge(**inputs, out=tmp_path / "usual", forecast=["nf4"]).forecast["nf4"]
    arrays = read_checkpoint(tmp_path / "target")
    arrays |= {f"{name}.weight": QUANTISATIONS["nf4"].round(arrays[f"{name}.weight"]) for name in LAYERS}
    write_checkpoint(tmp_path / "dequantised", arrays)
    merged = merge(str(tmp_path / "dequantised"), tmp_path / "out", forget=inputs["forget"], forecast=["nf4"])
    assert merged.forecast["nf4"]["changed"] == 0
    assert abs(merged.forecast["nf4"]["kept"]) < 0.1 < 0.5 < usual["kept"]
    assert "; what was removed may come back" in merged.describe()


@pytest.mark.parametrize(("shape", "kind"), [((48, 64), "float32"), ((30, 100), "bfloat16")])
def test_the_count_is_that_of_the_nearest_values_in_both_models(
    tmp_path: Path, shape: tuple[int, int], kind: str
) -> None:
    inputs = write_inputs(tmp_path, shape, kind=kind)
    merged = merge(**inputs, out=tmp_path / "out", forecast=["nf4"])
    before, after = read_checkpoint(tmp_path / "target"), read_checkpoint(tmp_path / "out")
    counts = [changed(before, after, name) for name in LAYERS]  # neither embedding nor head
    size = shape[0] * shape[1]
    assert merged.forecast["nf4"]["weights"] == 2 * size
    assert abs(merged.forecast["nf4"]["changed"] - sum(counts)) <= 2  # midpoints are rounded to fp32
    assert merged.forecast["nf4"]["layers"] == pytest.approx(
        {str(i): counts[i] / size for i in (0, 1)}, abs=2 / size, rel=1e-2
    )
    manifest = load_manifest(tmp_path / "out") or {}
    assert manifest["forecast"] == json_form(merged)["forecast"] == merged.forecast
    figures = merged.forecast["nf4"]
    assert figures["kept"] == pytest.approx(kept(before, after), rel=1e-4)
    line = f"quantised to NF4, {figures['kept']:.0%} of the update is left on average, and {figures['share']:.2%} of"
    assert line in merged.describe()
    assert "## Does it outlive quantisation?" in model_card(manifest)


def test_without_a_forecast_nothing_is_counted_nor_told(tmp_path: Path) -> None:
    merged = merge(**write_inputs(tmp_path), out=tmp_path / "out")
    assert "forecast" not in (load_manifest(tmp_path / "out") or {}) | json_form(merged)
    assert "quantised" not in merged.describe()
    untouched = merge(tmp_path.joinpath("target").as_posix(), tmp_path / "copy", alpha=0.0, forecast=ALL)
    assert untouched.forecast == {}


@pytest.mark.parametrize("shape", [(700, 512), (2500, 192)])
def test_the_sample_depends_on_the_tensor_alone_and_comes_close_to_the_whole(
    tmp_path: Path, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_inputs(tmp_path, shape, size=1e-3)
    forecasts = [merge(**inputs, out=tmp_path / "one", forecast=ALL, threads=1).forecast]
    forecasts.append(merge(**inputs, out=tmp_path / "three", forecast=ALL, threads=3, max_memory="1GB").forecast)
    monkeypatch.setattr(bounds, "BLOCK", 64 * shape[1])
    forecasts.append(merge(**inputs, out=tmp_path / "blocks", forecast=ALL).forecast)
    assert forecasts[0] == forecasts[1]
    for form, figures in forecasts[2].items():
        assert figures == forecasts[0][form] | {"kept": pytest.approx(forecasts[0][form]["kept"], rel=1e-5)}
    assert 10_000 < forecasts[0]["nf4"]["weights"] / 2 < shape[0] * shape[1] / 5
    before, after = (read_checkpoint(tmp_path / name) for name in ("target", "one"))
    for form, figures in forecasts[0].items():
        counts = [
            QUANTISATIONS[form].compare(
                *(QUANTISATIONS[form].groups(arrays[f"{name}.weight"])[0] for arrays in (before, after))
            )
            for name in LAYERS
        ]
        whole = sum(count.changed for count in counts) / sum(count.weights for count in counts)
        assert figures["kept"] == pytest.approx(1, rel=0.1)
        assert figures["share"] == pytest.approx(whole, rel=0.25)  # updates of rank 2 differ much between rows


def test_a_finished_merge_is_not_made_again_for_a_forecast(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, (700, 512))
    wanted = merge(**inputs, out=tmp_path / "direct", dtype="bfloat16", forecast=ALL).forecast
    out = tmp_path / "out"
    assert merge(**inputs, out=out, dtype="bfloat16", forecast=["int8"]).forecast == {"int8": wanted["int8"]}
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = merge(**inputs, out=out, dtype="bfloat16", forecast=["nf4", "int4"])
    assert again.forecast == wanted == (load_manifest(out) or {})["forecast"]
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"manifest.json"}
    assert verify_folder(out) == []
    text = (out / "manifest.json").read_text()
    assert merge(**inputs, out=out, dtype="bfloat16").forecast == wanted  # what is there stays, and is told
    assert (out / "manifest.json").read_text() == text


@pytest.mark.parametrize("first", [(), ("nf4",)])
def test_shards_that_an_interrupted_merge_has_counted_are_kept(tmp_path: Path, first: tuple[str, ...]) -> None:
    inputs, out = write_inputs(tmp_path), tmp_path / "out"
    wanted = merge(**inputs, out=tmp_path / "direct", forecast=["nf4"]).forecast

    def stop(label: str, done: int, total: int) -> None:
        if done > total * 0.8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(**inputs, out=out, forecast=first, progress=stop)
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("*00000.safetensors")}
    assert len(stamps) == 1
    assert merge(**inputs, out=out, forecast=["nf4"]).forecast == wanted
    kept = {name for name, stamp in stamps.items() if (out / name).stat().st_mtime_ns == stamp}
    assert len(kept) == len(first)


def test_unknown_forms_and_adapters_are_refused(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    with pytest.raises(UsageError, match=r"forecast 'nf3' \(did you mean 'nf4'\?\): choose from nf4, int4, int8"):
        merge(**inputs, out=tmp_path / "out", forecast=["nf3"])
    command = ["merge", "--target", inputs["target"], "--forget", inputs["forget"], "--out", str(tmp_path / "out")]
    command += ["--forecast", "nf4, int8"]
    done = fork_cli(*command, "--as", "adapter")
    assert (done.returncode, "leave out --forecast" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
    done = fork_cli(*command, "--json")
    assert list(json.loads(done.stdout)["forecast"]) == ["nf4", "int8"]


def test_a_recipe_forecasts_nf4_unless_it_says_otherwise() -> None:
    assert Merge().forms == ("nf4",)
    assert Merge.model_validate({"forecast": []}).forms == ()
    assert Merge.model_validate({"forecast": ["int8"]}).forms == ("int8",)
    assert Merge.model_validate({"as": "adapter"}).forms == ()
    with pytest.raises(ValidationError, match="leave out forecast"):
        Merge.model_validate({"as": "adapter", "forecast": ["nf4"]})
