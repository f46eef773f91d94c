"""What a merge makes of its inputs and of what stands at its output: nothing that is read is ever written to."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import MismatchError, OutputError, UsageError
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.seal import JOURNAL, MANIFEST, MERGEKIT_FILE, load_manifest
from msa_lite.merger import Precision, Term, merge, merge_adapters, merge_terms, merge_terms_to_adapter
from msa_lite.merger.stream import model
from tests.support.merges import Adapter, write_checkpoint

NAMES = [f"layers.{i}.weight" for i in range(6)]
ROWS, COLUMNS = 40, 30


def checkpoint(folder: Path, seed: int, shards: int = 3) -> str:
    """A checkpoint of six matrices in some shards."""
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for name in NAMES}
    return str(write_checkpoint(folder, arrays, {name: i * shards // len(NAMES) for i, name in enumerate(NAMES)}))


def adapter(folder: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    sizes = ((2, COLUMNS), (ROWS, 2))
    factors = {name.removesuffix(".weight"): tuple(random.normal(size=s).astype("f4") for s in sizes) for name in NAMES}
    return str(Adapter(factors).write(folder))  # type: ignore[arg-type]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a merge of one adapter, whose output is not said yet."""
    inputs = tmp_path / "inputs"
    return {"target": checkpoint(inputs / "target", 0), "forget": adapter(inputs / "forget", 1)}


@pytest.mark.parametrize("name", ["target", "forget"])
def test_the_partial_folder_is_no_place_for_an_input(options: dict[str, Any], tmp_path: Path, name: str) -> None:
    shutil.copytree(options[name], tmp_path / "out.partial")
    (tmp_path / "out.partial" / ".msa-lite-partial.json").write_text("{}")  # as a kill just before the end leaves it
    before = {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()}
    for function in (merge, merge_adapters):
        with pytest.raises(OutputError, match="is one of the inputs"):
            function(**(options | {name: str(tmp_path / "out.partial")}), out=tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()} == before


@pytest.mark.parametrize("name", ["target", "forget", "retain", "prior", "out"])
def test_an_empty_name_is_not_the_current_folder(options: dict[str, Any], tmp_path: Path, name: str) -> None:
    given = {"retain": options["forget"], "beta": 1.0, "prior": options["target"], "out": tmp_path / "out"}
    with pytest.raises(UsageError, match=f"{name}: an empty name"):
        merge(**(given | options | {name: ""}))


def test_what_another_process_wrote_meanwhile_is_not_replaced(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_merge = model.check_merge

    def slow(*args: Any) -> Any:
        monkeypatch.setattr(model, "check_merge", check_merge)
        merge(**options, alpha=0.5, out=tmp_path / "out")
        return check_merge(*args)

    monkeypatch.setattr(model, "check_merge", slow)
    with pytest.raises(OutputError, match="another msa-lite wrote it meanwhile"):
        merge(**options, alpha=2.0, out=tmp_path / "out", replace=True)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]["alpha"] == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", "out"]


def test_vectors_that_cancel_are_told_as_such(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="cancel each other out"):
        merge(**options, alpha=1.0, retain=options["forget"], beta=1.0, out=tmp_path / "out")


def test_full_checkpoints_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("target", "prior", "forget", "retain")
    folders = {name: checkpoint(tmp_path / "inputs" / name, seed) for seed, name in enumerate(names)}
    size = len(NAMES) * ROWS * COLUMNS * 4
    whole, read = os.preadv, Counter[str]()

    def counting(handle: int, buffers: Any, offset: int) -> int:
        got = whole(handle, buffers, offset)
        read[Path(os.readlink(f"/proc/self/fd/{handle}")).parent.name] += got
        return got

    monkeypatch.setattr(os, "preadv", counting)
    merge(**folders, alpha=0.7, beta=0.3, out=tmp_path / "out")
    assert read == dict.fromkeys(names, size)


def test_a_model_of_more_files_than_descriptors_is_merged(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {f"layers.{i}.weight": random.normal(size=(3, 4)).astype(np.float32) for i in range(90)}
    shards = {name: i for i, name in enumerate(arrays)}
    folders = {name: str(write_checkpoint(tmp_path / name, arrays, shards)) for name in ("target", "prior")}
    tuned = {name: array + 1 for name, array in arrays.items()}
    folders["forget"] = str(write_checkpoint(tmp_path / "forget", tuned, shards))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, limits[1]))
    try:
        assert merge(**folders, out=tmp_path / "out").weights_changed == 90 * 12
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_line_that_a_kill_cut_off_costs_its_shard_alone(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int) -> Any:
        def progress(label: str, count: int, total: int) -> None:
            if count > done * total // 3:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        merge(**options, out=tmp_path / "out", progress=stop(1))
    journal = tmp_path / "out.partial" / JOURNAL
    unknown: dict[str, Any] = {"file": "model-00002.safetensors", "sha256": "", "changes": {"w": {"forget": 1.0}}}
    unknown["line"] = digest(unknown)  # whole, but of another version
    lines = [journal.read_text(), "[]", json.dumps(unknown), '{"file": "model-00001.safet']
    journal.write_text("\n".join(lines))
    with pytest.raises(KeyboardInterrupt):
        merge(**options, out=tmp_path / "out", progress=stop(2))
    whole = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith('"}')]
    assert [line["file"][8:11] for line in whole] == ["000", "002", "001"]  # after the unknown line, only shard 1


@pytest.mark.parametrize("form", ["model", "adapter"])
def test_a_baseline_is_recorded_by_its_name(options: dict[str, Any], tmp_path: Path, form: str) -> None:
    out, written = tmp_path / "out", list[bytes]()
    for scale in (1.5, 1.5, 1.25):
        terms = [Term("npo", options["forget"], scale)]
        if form == "model":
            merge_terms(options["target"], out, terms, None, Precision(), replace=True)
        else:
            merge_terms_to_adapter(options["target"], out, terms, None, replace=True)
        manifest = load_manifest(out) or {}
        assert (manifest["inputs"]["scale"], [*manifest["sources"]]) == (scale, ["target", "npo"])
        assert not manifest["inputs"].keys() & {"alpha", "beta", "retain"}
        written.append((out / MANIFEST).read_bytes())
    assert written[0] == written[1] != written[2]
    if form == "model":
        assert "target + 1.25 (npo-tuned - prior); scale 1.25" in (out / MERGEKIT_FILE).read_text()
