"""Models whose files change between the moment they were found and the moment they are loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import DataSource
from msa_lite.errors import StageError
from msa_lite.evals.scores.suite import OwnQuestions, evaluate
from msa_lite.io.finished.seal import check_unchanged, take_marks
from msa_lite.io.weights.hub import fetch
from msa_lite.train import fit_vector
from tests.support.fits import ROWS, SETTINGS
from tests.support.models import tiny_tokenizer


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
