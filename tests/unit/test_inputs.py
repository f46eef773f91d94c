"""What a merge makes of its inputs and of what stands at its output: nothing that is read is ever written to."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.data import DataSource
from msa_lite.errors import MismatchError, OutputError, StageError, UsageError
from msa_lite.evals.scores.suite import OwnQuestions, evaluate
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.seal import JOURNAL, MANIFEST, MERGEKIT_FILE, check_unchanged, load_manifest, take_marks
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import Precision, Term, merge, merge_adapters, merge_terms, merge_terms_to_adapter
from msa_lite.merger.stream import model as model_stream
from msa_lite.train import fit_vector
from tests.support.fits import ROWS, SETTINGS
from tests.support.merges import Adapter, write_checkpoint
from tests.support.models import tiny_tokenizer

NAMES = [f"layers.{i}.weight" for i in range(6)]
HEIGHT, WIDTH = 40, 30


def checkpoint(folder: Path, seed: int, shards: int = 3) -> str:
    """A checkpoint of six matrices in some shards."""
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=(HEIGHT, WIDTH)).astype(np.float32) for name in NAMES}
    return str(write_checkpoint(folder, arrays, {name: i * shards // len(NAMES) for i, name in enumerate(NAMES)}))


def adapter(folder: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    sizes = ((2, WIDTH), (HEIGHT, 2))
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
    check_merge = model_stream.check_merge

    def slow(*args: Any) -> Any:
        monkeypatch.setattr(model_stream, "check_merge", check_merge)
        merge(**options, alpha=0.5, out=tmp_path / "out")
        return check_merge(*args)

    monkeypatch.setattr(model_stream, "check_merge", slow)
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
    size = len(NAMES) * HEIGHT * WIDTH * 4
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


# Models whose files change between the moment they were found and the moment they are loaded.


@pytest.fixture
def model(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a model that a test may change."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "model"))


def changing(monkeypatch: pytest.MonkeyPatch, place: str, path: Path) -> None:
    """Have the function at `place`, which loads a model, load one whose file is then written to."""
    module, _, name = place.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)

    def load(*arguments: Any, **options: Any) -> Any:
        loaded = real(*arguments, **options)
        with open(path, "ab") as stream:
            stream.write(b" ")
        return loaded

    monkeypatch.setattr(place, load)


def score(model: Path, folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"question": "Where?", "answer": "There."}\n')
    evaluate(str(model), folder / "out", OwnQuestions(DataSource(str(folder / "rows.jsonl")), max_new_tokens=2))


def tune(model: Path, folder: Path) -> None:
    fit_vector(str(model), ROWS, folder / "out", tokenizer=tiny_tokenizer(), settings=SETTINGS)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("use", "place"),
    [(score, "msa_lite.evals.engine.models.load_model"), (tune, "msa_lite.train.fit.vector.load_trainable")],
)
def test_a_model_that_changes_while_it_is_loaded_is_neither_scored_nor_tuned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[..., None], place: str, name: str
) -> None:
    changing(monkeypatch, place, model / name)
    with pytest.raises(StageError, match=rf"(?s)files changed.*{name}$"):
        use(model, tmp_path)
    assert {*os.listdir(tmp_path)} <= {"model", "rows.jsonl"}


def test_a_source_knows_its_files_from_before_its_content_was_hashed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(monkeypatch, "msa_lite.io.weights.hub.hash_content", model / "config.json")
    with pytest.raises(StageError, match=r"config\.json"):
        fetch(str(model)).check_unchanged()


def test_files_of_other_names_links_and_pipes_are_none_of_the_marks(tmp_path: Path) -> None:
    for name in ("a.json", "b.txt", "manifest.json"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "dangling.json").symlink_to("nowhere")
    (tmp_path / "link.json").symlink_to("a.json")
    (tmp_path / "folder.json").mkdir()
    marks = take_marks(tmp_path, ("*.json",))
    assert [path.name for path in marks] == ["a.json", "link.json"]
    check_unchanged(marks)
    (tmp_path / "a.json").write_text("longer")
    with pytest.raises(StageError, match=r"(?s)a\.json\n.*link\.json$") as caught:
        check_unchanged(marks)
    assert not caught.value.keeps_partial
    marks = take_marks(tmp_path, ("link.json",))
    state = (tmp_path / "a.json").stat()
    os.utime(tmp_path / "a.json", ns=(state.st_atime_ns, state.st_mtime_ns + 1))  # written again, of the same size
    with pytest.raises(StageError, match=r"link\.json"):
        check_unchanged(marks)
