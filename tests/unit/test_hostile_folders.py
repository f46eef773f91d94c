"""Model and adapter folders whose files are pipes, devices, dangling or foreign links, or hold any JSON whatever."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import MsaError
from msa_lite.io.files.reading import read_bytes
from msa_lite.io.weights.checkpoint import INDEX_FILE
from msa_lite.merger import merge
from tests.support.merges import Adapter, write_checkpoint
from tests.support.places import NO_FILES, link

NAMES = ("layers.0", "layers.1")
TARGET_FILES = ("config.json", INDEX_FILE, "model-00000.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def write_inputs(folder: Path) -> dict[str, Path]:
    """A target of two shards with a tokenizer, and an adapter that fits it."""
    random = np.random.default_rng(0)
    arrays = {f"{name}.weight": random.normal(size=(6, 4)).astype(np.float32) for name in NAMES}
    target = write_checkpoint(folder / "target", arrays, {name: number for number, name in enumerate(arrays)})
    (target / "tokenizer.json").write_text('{"a": 1}')
    adapter = Adapter({name: (random.normal(size=(2, 4)), random.normal(size=(6, 2))) for name in NAMES})
    return {"target": target, "forget": adapter.write(folder / "forget")}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    return write_inputs(tmp_path)


def merged(inputs: dict[str, Path], out: Path | None = None, **options: Any) -> Path:
    out = out or inputs["target"].parent / "out"
    merge(str(inputs["target"]), out, forget=str(inputs["forget"]), **options)
    return out


def assert_refused(inputs: dict[str, Path], says: str, codes: tuple[int, ...] = (3,), **options: Any) -> None:
    """Assert that a merge is refused with this message and exit code, and has written nothing."""
    before = sorted(inputs["target"].parent.iterdir())
    with pytest.raises(MsaError, match=says) as caught:
        merged(inputs, **options)
    assert caught.value.exit_code in codes
    assert sorted(inputs["target"].parent.iterdir()) == before


SPECIAL = NO_FILES | {
    "made up": link("/proc/self/status"),
    "unreadable": link("/proc/self/mem"),
    "empty": Path.touch,
    "folder": Path.mkdir,
    "terabytes": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("file", [*TARGET_FILES, *ADAPTER_FILES])
def test_what_is_no_file_of_its_kind_is_named_and_never_waited_for(
    inputs: dict[str, Path], file: str, kind: str
) -> None:
    path = inputs["forget" if "adapter" in file else "target"] / file
    path.unlink()
    SPECIAL[kind](path)
    assert_refused(inputs, file.replace(".", r"\."))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="a system without /proc")
def test_what_the_system_makes_up_is_no_file() -> None:
    with pytest.raises(MsaError, match="status: is no stored file"):
        read_bytes(Path("/proc/self/status"))


@pytest.mark.parametrize("kind", [*NO_FILES, "folder"])
@pytest.mark.parametrize(
    ("where", "name"), [("target", "other.safetensors"), ("target", "vocab.txt"), ("forget", "LICENSE")]
)
def test_what_is_no_file_and_not_needed_is_passed_over(
    inputs: dict[str, Path], where: str, name: str, kind: str
) -> None:
    SPECIAL[kind](inputs[where] / name)
    assert not (merged(inputs) / name).exists()


@pytest.mark.parametrize("name", [b"caf\xe9.json", b"\xff.safetensors", b"LICENSE\xfe"])
@pytest.mark.parametrize("where", ["target", "forget"])
def test_names_that_are_no_text_are_refused(inputs: dict[str, Path], where: str, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(inputs[where]) + b"/" + name)).write_text("{}")
    assert_refused(inputs, r"names that are no UTF-8; rename these files:\n.*udc")


@pytest.mark.parametrize("where", ["target", "forget"])
def test_a_folder_whose_name_is_no_text_is_refused(inputs: dict[str, Path], where: str) -> None:
    inputs[where] = inputs[where].rename(os.fsdecode(os.fsencode(inputs[where]) + b"\xe9"))
    assert_refused(inputs, "the name is no UTF-8", (2,))


# Companion files


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
def test_companions_are_copied_from_where_links_may_lead(inputs: dict[str, Path], dtype: str) -> None:
    """Within the model's folder, and within a snapshot of the Hub's cache; weights may be anywhere."""
    target = inputs["target"]
    (target / "deep").mkdir()
    (target / "tokenizer.json").rename(target / "deep" / "it")
    (target / "tokenizer.json").symlink_to("deep/it")
    (target / "model-00001.safetensors").rename(target.parent / "elsewhere")
    (target / "model-00001.safetensors").symlink_to(target.parent / "elsewhere")
    out = merged(inputs, dtype=dtype)
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (out / "tokenizer.json").is_symlink()
    cache = target.parent / "hub" / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    for number, path in enumerate(path for path in target.iterdir() if path.is_file()):
        shutil.copy(path, cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    shutil.move(out, target.parent / "first")
    again = merged(inputs | {"target": snapshot}, dtype=dtype, out=target.parent / "out")
    first = target.parent / "first"
    for name in (*TARGET_FILES, "tokenizer.json", "model-00001.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "chat_template.jinja"])
@pytest.mark.parametrize("place", ["../secret", "../target-2/secret", "deep/link"])
def test_companions_that_lie_elsewhere_are_refused(inputs: dict[str, Path], name: str, place: str) -> None:
    target = inputs["target"]
    (target / "deep").mkdir()
    (target.parent / "target-2").mkdir()
    for path in (target.parent / "secret", target.parent / "target-2" / "secret"):
        path.write_text('{"model_type": "llama"}')
    (target / "deep" / "link").symlink_to(target.parent / "secret")
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(place)
    assert_refused(inputs, rf"{name}: a link to /.*secret; put a copy of that file there")


def test_a_huge_file_that_only_looks_like_a_companion_is_refused(inputs: dict[str, Path]) -> None:
    (inputs["target"] / "vocab.txt").touch()
    os.truncate(inputs["target"] / "vocab.txt", 1 << 40)
    assert_refused(inputs, "vocab.txt: .* TB; move it elsewhere")


# Names of shards


def rename_shard(target: Path, name: str) -> None:
    index = json.loads((target / INDEX_FILE).read_text())
    index["weight_map"]["layers.1.weight"] = name
    (target / INDEX_FILE).write_text(json.dumps(index))
    if "/" not in name and len(name) < 256:
        (target / "model-00001.safetensors").rename(target / name)


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "Config.json", ".journal.jsonl", ".hidden.safetensors", "LICENSE", "model.bin", "model"),
        *("adapter_model.safetensors", "Adapter_Model.safetensors", "model.safetensors.tmp", "model.SAFETENSORS"),
        *("a\nb.safetensors", "a\x1b[31m.safetensors"),
        *("../x.safetensors", "/x.safetensors", "deep/x.safetensors"),
    ],
)
def test_names_that_are_no_shards_are_refused(inputs: dict[str, Path], name: str) -> None:
    rename_shard(inputs["target"], name)
    assert_refused(
        inputs,
        r"no shards|no config\.json|is no JSON|not a safetensors index|not UTF-8",
        (2, 3),
    )


def test_a_whole_model_beside_an_index_of_others_is_refused(inputs: dict[str, Path]) -> None:
    shutil.copy(inputs["target"] / "model-00000.safetensors", inputs["target"] / "model.safetensors")
    assert_refused(inputs, "holds model.safetensors and an index of other shards")


# Any JSON in the place of any value: the fuzzer's merges, in test_hostile_names.


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE, "adapter_config.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, '{"x": "\\udc00"}']
)
def test_json_that_is_no_object_is_refused_by_its_file(inputs: dict[str, Path], file: str, text: str) -> None:
    (inputs["forget" if "adapter" in file else "target"] / file).write_text(text)
    assert_refused(inputs, file.replace(".", r"\."))
