"""What a merge leaves alone, what it never opens, and what it refuses without a trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, MismatchError, MsaError, OutputError, UsageError
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, MERGEKIT_FILE, load_manifest, verify_folder
from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.io.weights.checkpoint import SINGLE_FILE, load_checkpoint
from msa_lite.merger import merge
from tests.support.merges import Adapter, make_merge, write_checkpoint, write_parts

Make = Callable[..., Path]
Q = "model.layers.0.self_attn.q_proj.weight"


def read_files(folder: Path) -> dict[str, bytes]:
    """Content of every file by name, without what a merge adds: manifest, card and the recipe for mergekit."""
    added = (MANIFEST, MERGEKIT_FILE, CARD_FILE)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in added}


def edit_weights(folder: Path, out: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A copy of a single-file folder (checkpoint or adapter) with its tensors changed in place by a function."""
    shutil.copytree(folder, out)
    path = out / (ADAPTER_FILE if (out / ADAPTER_FILE).exists() else SINGLE_FILE)
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, {"format": "pt"})
    return out


def scale(factor: float) -> Callable[[dict[str, np.ndarray]], None]:
    """Multiply the B factors of an adapter."""
    return lambda tensors: tensors.update({n: t * np.float32(factor) for n, t in tensors.items() if "lora_B" in n})


def assert_refused(out: Path, error: type[MsaError], says: str, *args: Any, **options: Any) -> None:
    """Assert that a merge raises and leaves neither `out` nor anything else beside it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(error, match=says):
        merge(*args, out, **options)
    assert sorted(out.parent.iterdir()) == before


@pytest.fixture
def full_target(make_checkpoint: Make, tmp_path: Path) -> Path:
    """A sharded bfloat16 chat model with every kind of file that a Hub repository has beside its weights."""
    folder = tmp_path / "target"
    shutil.copytree(make_checkpoint("llama", dtype="bfloat16", shard="40KB", chat=True), folder)
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 5e5, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, separators=(" ,", " :")))
    for name in ("generation_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "LICENSE", "NOTICE"):
        (folder / name).write_bytes(b'{"odd":\r\n  1}\x00' + name.encode())
    return folder


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_strengths_of_zero_return_the_target_byte_for_byte(
    make_checkpoint: Make, tmp_path: Path, shard: str, stored: str
) -> None:
    target = make_checkpoint("llama", dtype=stored, shard=shard)
    merged = merge(str(target), tmp_path / "out", forget="not/there", alpha=0, retain="nor/this", beta=0, prior="nor")
    assert (len(load_checkpoint(target).shards) > 1) == (shard == "40KB")
    assert read_files(tmp_path / "out") == read_files(target)
    assert "alpha 0.0, beta 0.0" in (tmp_path / "out" / MERGEKIT_FILE).read_text()
    assert (merged.tensors_touched, merged.weights_changed) == (0, 0)


def test_only_the_touched_byte_ranges_differ_from_the_target_and_no_other_file_does(
    full_target: Path, make_adapter: Make, tmp_path: Path
) -> None:
    merged = merge(str(full_target), tmp_path / "out", forget=str(make_adapter("llama", target_modules=["q_proj"])))
    old, new = load_checkpoint(full_target), load_checkpoint(tmp_path / "out")
    assert len(old.shards) > 1
    assert [(s.path.name, s.header) for s in new.shards] == [(s.path.name, s.header) for s in old.shards]
    changed = set()
    for name, entry in old.tensors.items():
        inside = slice(entry.start, entry.start + entry.nbytes)
        if entry.file.read_bytes()[inside] != new.tensors[name].file.read_bytes()[inside]:
            changed.add(name)
    assert changed == {name for name in old.tensors if "q_proj" in name}
    assert (merged.tensors_touched, merged.weights_touched) == (2, 2 * 32 * 32)
    assert 0.9 * 2048 < merged.weights_changed <= 2048
    assert 0 < merged.rounding_loss < 0.2
    before, after = read_files(full_target), read_files(tmp_path / "out")
    assert after.keys() == before.keys()
    assert len(before) >= 12
    assert [name for name in before if before[name] != after[name] and not name.endswith(".safetensors")] == []
    assert verify_folder(tmp_path / "out") == []


def test_a_second_call_returns_the_finished_folder_and_other_inputs_need_replace(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, out, options = str(make_checkpoint("llama")), tmp_path / "out", {"forget": str(make_adapter("llama"))}
    first = merge(target, out, **options)
    content, made = read_files(out), (out / SINGLE_FILE).stat().st_mtime_ns
    assert merge(target, out, **options) == first
    with pytest.raises(OutputError, match="holds a model made from other inputs"):
        merge(target, out, **options, alpha=2.0)
    assert (read_files(out), (out / SINGLE_FILE).stat().st_mtime_ns) == (content, made)
    merge(target, out, **options, alpha=2.0, replace=True)
    assert (load_manifest(out) or {})["inputs"]["alpha"] == 2.0
    assert read_files(out) != content


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=20, free=10))
    assert_refused(
        tmp_path / "out", OutputError, "are needed, 10 bytes are free", str(make_checkpoint("llama")), alpha=0
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": -1}, "alpha is -1; it must be a number ≥ 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"beta": 0.5}, "beta is 0.5, but there is no retain vector"),
        ({"forget": None}, "alpha is 1, but there is no forget vector"),
        ({"retain": "not/opened"}, "there is a retain vector, but no beta; say how strongly it counts"),
        ({"alpha": None}, "there is a forget vector, but no alpha"),
        ({"rounding": "nerest"}, "did you mean 'nearest'"),
        ({"rounding": "stochastic", "seed": -1}, "seed is -1; it must be ≥ 0"),
        ({"threads": 0}, "threads is 0; at least 1 is needed"),
        ({"max_memory": "plenty"}, "'plenty' is no size; write it as 512MB"),
        ({"max_memory": "1MB"}, r"1MB of memory is too little: this merge needs at least \d+MB"),
        ({"alpha": -1, "beta": 2.0, "dtype": "x"}, r"(?s)wrong arguments:.*alpha is -1.*beta is 2.*dtype 'x'"),
        ({"forget": "not/there/at/all"}, "no such folder"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    call = {"forget": str(make_adapter("llama")), **options}
    assert_refused(tmp_path / "out", UsageError, says, str(make_checkpoint("llama")), **call)


def test_integers_are_refused_where_touched_and_copied_elsewhere_as_are_empty_tensors(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    empty = np.zeros((3, 0), np.float32)
    target = edit_weights(
        make_checkpoint("llama"), tmp_path / "t", lambda t: t.update({Q: t[Q].astype(np.int8), "empty": empty})
    )
    assert_refused(tmp_path / "out", FormatError, f"{Q}: stored as I8", str(target), forget=str(make_adapter("llama")))
    merge(str(target), tmp_path / "out", forget=str(make_adapter("llama", target_modules=["v_proj"])), dtype="float16")
    out = load_file(tmp_path / "out" / SINGLE_FILE)
    assert np.array_equal(out[Q], load_file(target / SINGLE_FILE)[Q])
    assert out["empty"].shape == (3, 0)
    assert {array.dtype.str for name, array in out.items() if name != Q} == {"<f2"}


@pytest.mark.parametrize(("size", "stored"), [(0.0, "float32"), (1e-9, "bfloat16")])
def test_vectors_that_change_nothing_are_an_error(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, size: float, stored: str
) -> None:
    adapter = edit_weights(make_adapter("llama"), tmp_path / "a", scale(size))
    target = str(make_checkpoint("llama", dtype=stored))
    words = "change none of the 15360 weights" if size else "the vector is all zeros and changes nothing; fit it again"
    assert_refused(tmp_path / "out", MismatchError, words, target, forget=str(adapter))
    if not size:  # each vector has to contribute
        beside = {"forget": str(adapter), "retain": str(make_adapter("llama")), "beta": 1.0}
        assert_refused(tmp_path / "out", MismatchError, words, target, **beside)
    if size:
        assert merge(target, tmp_path / "out", forget=str(adapter), dtype="float32").weights_changed > 0


def test_a_full_checkpoint_needs_its_prior(make_checkpoint: Make, tmp_path: Path) -> None:
    target, options = str(make_checkpoint("llama")), {"forget": str(make_checkpoint("llama", 2))}
    assert_refused(tmp_path / "out", UsageError, r"the model that it was tuned from \(--prior\)", target, **options)
    merge(target, tmp_path / "out", **options, prior=str(make_checkpoint("llama", 1)))
    assert verify_folder(tmp_path / "out") == []


QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


@pytest.mark.parametrize(
    ("which", "changes", "error", "says"),
    [
        ("target", QUANTISED, FormatError, r"target is quantised .*\(quantization_config: gptq\)"),
        (
            "prior",
            {"intermediate_size": 56},
            MismatchError,
            r"mlp\.down_proj\.weight: \(32, 48\) in the target, \(32, 56\)",
        ),
        ("prior", {"num_hidden_layers": 1}, MismatchError, r"model\.layers\.1\.\S+: in the target, not in the prior"),
        ("prior", {"num_hidden_layers": 3}, MismatchError, r"model\.layers\.2\.\S+: in the prior, not in the target"),
        ("forget", {"integers": True}, MismatchError, f"{Q}: stored as I8 in {SINGLE_FILE}"),
        ("prior", {"integers": True}, MismatchError, f"{Q}: stored as I8 in {SINGLE_FILE}"),
    ],
)
def test_checkpoints_that_do_not_fit_are_told_by_tensor(
    make_checkpoint: Make, tmp_path: Path, which: str, changes: dict[str, Any], error: type[MsaError], says: str
) -> None:
    folders = {name: make_checkpoint("llama", seed) for seed, name in enumerate(("target", "prior", "forget"))}
    if "integers" in changes:
        folders[which] = edit_weights(folders[which], tmp_path / "p", lambda t: t.update({Q: t[Q].astype(np.int8)}))
    else:
        folders[which] = make_checkpoint("llama", 1, **changes)
    target, options = str(folders.pop("target")), {name: str(folder) for name, folder in folders.items()}
    assert_refused(tmp_path / "out", error, says, target, **options)


def test_a_cast_is_no_change(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    tiny, target = make_adapter("llama", scale=1e-6), tmp_path / "target"
    shutil.copytree(make_checkpoint("llama"), target)
    arrays = load_file(target / "model.safetensors").items()
    odd = {name: np.full_like(values, 1 + 2**-10) for name, values in arrays}  # which bfloat16 rounds to 1
    save_file(odd, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="too small for this dtype"):
        merge(str(target), tmp_path / "out", forget=str(tiny), alpha=1.0, dtype="bfloat16")


@pytest.fixture
def sharded(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """sharded(name, **config) → arguments of a merge whose target has a shard `extra` that its index does not name."""

    def make(name: str, **config: Any) -> dict[str, Any]:
        weights = {f"layers.{n}.weight": np.ones((4, 4), np.float32) for n in range(2)} | {name: np.ones((4, 4))}
        write_checkpoint(tmp_path / "target", weights, {"layers.0.weight": 0, "layers.1.weight": 1, name: 2})
        index = tmp_path / "target/model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"][name]
        index.write_text(json.dumps(content))
        (tmp_path / "target/config.json").write_text(json.dumps(config))
        adapter = Adapter({"layers.0": (np.ones((1, 4)), np.ones((4, 1)))}).write(tmp_path / "adapter")
        return {"target": tmp_path / "target", "forget": adapter}

    return make


def test_a_shard_that_the_index_does_not_name_is_told(
    sharded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = sharded("other.weight")
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):  # known, and no part of a model
        save_file({"x": np.ones(1)}, tmp_path / "target" / name)
    merge(**arguments, out=tmp_path / "out")
    [warning] = [record.getMessage() for record in caplog.records if "no part of the model" in record.getMessage()]
    assert "target/model-00002.safetensors" in warning
    assert not (tmp_path / "out/model-00002.safetensors").exists()


def test_an_untied_language_model_without_its_head_is_refused(sharded: Any, tmp_path: Path) -> None:
    arguments = sharded("lm_head.weight", tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    said = (
        r"its head is missing.*; model-00002\.safetensors holds it, but model\.safetensors\.index\.json does not name"
    )
    with pytest.raises(FormatError, match=said):
        merge(**arguments, out=tmp_path / "out")
    (tmp_path / "target/model-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"its head is missing.*; save the model again with it"):
        merge(**arguments, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for config in ({"architectures": ["LlamaModel"], "tie_word_embeddings": False}, {"tie_word_embeddings": True}):
        (tmp_path / "target/config.json").write_text(json.dumps(config))
        merge(**arguments, out=tmp_path / "out", replace=True)


def test_what_is_not_copied_and_code_that_is_are_told_in_a_run_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As notices, which every command shows; the log of merges is for `msa-lite merge` alone."""
    write_parts(tmp_path, auto_map={"AutoModel": "modeling_x.Model"})
    left = ["adapter_config.json", "pytorch_model.bin", "trainer_state.json"]
    for name in ("modeling_x.py", *left):
        (tmp_path / "target" / name).write_text("{}")
    with caplog.at_level("INFO", "msa_lite.notices"):
        out = make_merge(tmp_path)
    told = [record.message for record in caplog.records if record.name == "msa_lite.notices"]
    assert [line.rpartition(": ")[2] for line in told] == ["modeling_x.py", ", ".join(left)]
    assert {path.name for path in out.iterdir()}.isdisjoint(left)
    assert (out / "modeling_x.py").is_file()
