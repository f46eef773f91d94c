"""What a purge must not leave: the rows to forget, in the forms in which they stand in files."""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from msa_lite.io.files.writing import hash_file
from msa_lite.pipeline.run.report import report_run
from msa_lite.record.facts import resealed


def copy_run(finished: Path, folder: Path) -> Path:
    """Copy a finished run, with its baselines' runs; its reports show examples and rows."""
    shutil.copytree(finished, folder)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace(str(finished), str(folder)))
    with resealed(folder, {"recipe.yaml": hash_file(folder / "recipe.yaml")}):
        pass
    report_run(folder, show_examples=True, rows=True)
    return folder


def forms(history: Path) -> list[bytes]:
    """The questions and answers to forget as they may stand in files."""
    rows = [json.loads(line) for line in (history / "data/forget.jsonl").read_text().splitlines()]
    texts = {text for row in rows for text in (row["question"], row["answer"])}
    ways: tuple[Callable[[str], str], ...] = (str, html.escape, lambda text: json.dumps(text)[1:-1])
    return sorted({way(text).encode() for text in texts for way in ways})


def holding(folder: Path, rows: list[bytes]) -> set[str]:
    """The files below a folder in which a row stands."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files if any(row in path.read_bytes() for row in rows)}
