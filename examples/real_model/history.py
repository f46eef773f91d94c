"""Make the models of a seed: data, the pretrained model, and the histories of target and ideal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from experiments import Checkpoint, Size

import msa_lite
from msa_lite.data import DataSource, Row, load_rows, stream_texts
from msa_lite.errors import DataError, MsaError
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.reading import PlainDumper
from msa_lite.io.files.writing import write_text

ROWS_OF_AUTHOR = 20  # TOFU's
POOL = 20  # authors of retain90 that TOFU has paraphrases and false answers for
CHARACTERS = 5  # of a token, more than enough
STAGES: tuple[Checkpoint, ...] = ("text-a", "text-b", "tofu", "text-c", "tofu-again")
FIRST_OF_IDEAL = 2  # the ideal goes on from the last stage of text before TOFU


@dataclass(frozen=True)
class Models:
    """The models of one seed."""

    folder: Path
    """The folder of the seed."""
    base: str
    """The pretrained model."""

    def target(self, checkpoint: Checkpoint) -> str:
        """Return the model of the target's history at a checkpoint."""
        if checkpoint == "base":
            return self.base
        return str(self.folder / "target" / f"{STAGES.index(checkpoint) + 1}-{checkpoint}")

    def ideal(self, checkpoint: Checkpoint) -> str:
        """Return the model with the same history, but without the forget rows."""
        return str(self.folder / "ideal" / f"{STAGES.index(checkpoint) - FIRST_OF_IDEAL + 1}-{checkpoint}")

    def data(self, name: str) -> str:
        """Return the file of a group of rows, or of a stage's text."""
        return str(self.folder / "data" / f"{name}.jsonl")


def write_data(models: Models, size: Size, tofu: str, text: DataSource, seed: int) -> None:
    """Write the rows of a seed: forget, learnt, retain and holdout questions, and three texts.

    Raise DataError for a text that is too short, and UsageError for data that cannot be loaded, both before anything
    is written. The message names the option to change.
    """
    folder = models.folder / "data"
    if (folder / "text-c.jsonl").is_file():
        return
    forget, draw = _load(tofu, size.forget), random.Random(seed)
    learnt, unseen = _draw_authors(size, tofu, forget, draw)
    groups = {
        "forget": forget,
        "learnt": learnt,
        "retain": draw.sample(learnt, size.scored),
        "holdout": draw.sample(unseen, size.scored // 3) if unseen else [],
    }
    parts = [*_parts(text, size.text_tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, group in groups.items():
        if group:
            write_text(folder / f"{name}.jsonl", "".join(row_line(row) for row in group))
    for name, part in zip(("text-a", "text-b", "text-c"), parts, strict=True):
        write_text(folder / f"{name}.jsonl", json.dumps({"text": part}) + "\n")


def _draw_authors(size: Size, tofu: str, forget: Sequence[Row], draw: random.Random) -> tuple[list[Row], list[Row]]:
    """Return the rows of the authors that target and ideal learn, and those of authors that nobody learns."""
    rows = _load(tofu, "retain90")
    if size.authors is None:
        # Nobody learns the rest of forget10: 10 authors where forget05 is forgotten, none where all of it is.
        known = {row.sha256 for row in forget}
        return rows, [row for row in _load(tofu, "forget10") if row.sha256 not in known]
    authors = [rows[start : start + ROWS_OF_AUTHOR] for start in range(0, len(rows), ROWS_OF_AUTHOR)]
    pool = draw.sample(authors[:POOL], POOL)
    learnt, unseen = pool[: size.authors], pool[size.authors :]
    return [row for author in learnt for row in author], [row for author in unseen for row in author]


def _load(tofu: str, name: str) -> list[Row]:
    """Return the rows of one of TOFU's configurations."""
    with _naming("--data", "a folder with a copy of TOFU"):
        return load_rows(DataSource(tofu, name=name))


@contextmanager
def _naming(option: str, example: str) -> Iterator[None]:
    """Add to the error of data that cannot be loaded which option of `run.py` names other data."""
    try:
        yield
    except MsaError as error:
        raise type(error)(f"{error}; try another {option}, such as {example}") from error


def row_line(row: Row) -> str:
    """Return a row of questions as a line of its file."""
    return json.dumps({"question": row.question, "answer": row.answer}) + "\n"


def _parts(source: DataSource, tokens: int) -> Iterator[str]:
    """Yield three pieces of a text, one after the other, each long enough for so many tokens."""
    size, text = CHARACTERS * tokens, ""
    with _naming("--text", "a file on this machine"):
        for part in stream_texts(source):
            text += part + "\n\n"
            if len(text) >= 3 * size:
                break
    if len(text) < 3 * size:
        raise DataError(f"{source.path}: {len(text)} characters, {3 * size} are needed; name a longer text with --text")
    yield from (text[start : start + size] for start in range(0, 3 * size, size))


def training_recipes(
    models: Models, size: Size, compute: str, seed: int, last: Checkpoint = STAGES[-1]
) -> Mapping[str, dict[str, object]]:
    """Return the recipes of `msa-lite train` for target and ideal. last: the stage after which both histories end."""
    text = {"format": "text"}
    wanted = STAGES[: STAGES.index(last) + 1]

    def stages(names: Sequence[str], rows: Sequence[str]) -> list[dict[str, object]]:
        learnt = [{"path": models.data(name)} for name in rows]
        return [
            {"name": name, "data": {"path": models.data(name), **text}, "tokens": size.text_tokens, "epochs": 1,
             "max_length": 256, "batch_size": 4}
            if name.startswith("text")
            else {"name": name, "data": learnt, "epochs": size.epochs if name == "tofu" else size.epochs // 2}
            for name in names
        ]  # fmt: skip

    training = {
        "learning_rate": size.learning_rate,
        "batch_size": size.batch_size,
        "warmup_epochs": 0.2,
        "compute": compute,
    }
    common = {"training": training, "seed": seed}
    return {
        "target": {"model": models.base, "stages": stages(wanted, ["learnt", "forget"]), **common,
                   "output": str(models.folder / "target")},
        "ideal": {"model": models.target("text-b"), "stages": stages(wanted[FIRST_OF_IDEAL:], ["learnt"]), **common,
                  "output": str(models.folder / "ideal")},
    }  # fmt: skip


def train(models: Models, size: Size, compute: str, seed: int, last: Checkpoint, progress: Progress) -> None:
    """Train target and ideal up to a stage, with the checkpoints before it, unless they are there."""
    for name, recipe in training_recipes(models, size, compute, seed, last).items():
        file = write_recipe(models.folder / "recipes" / f"{name}.yaml", recipe)
        msa_lite.train_stages(str(file), progress=progress)


def write_recipe(file: Path, recipe: Mapping[str, Any]) -> Path:
    """Write a recipe into its file, and return that."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.dump(dict(recipe), Dumper=PlainDumper, sort_keys=False))
    return file
