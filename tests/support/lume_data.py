"""A small data set of LUME's layout, and what a model says to its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, task: int, question: str, output: str) -> Row:
    """A row of forget.jsonl or retain.jsonl."""
    return {"id": name, "input": question, "output": output, "task": f"Task{task}"}


ROWS: dict[str, list[Row]] = {
    "forget": [
        row('"a-1"sc1', 1, "Once there was a hat on which", "the cat sat there"),
        row('"a-1"qa0', 1, "Who sat there?", "Cat"),
        row("b2sc1", 2, "Ann was born there. Her", "number is 900"),
        row("b2qa0", 2, "What is the number of Ann?", "900"),
        row("b2qa1", 2, "Where is Ann?", "1 Main St"),
        row("301sc1", 3, "Ann Lee was there when", "he won a prize"),
        row("301qa0", 3, "Who was there?", "Ann Lee"),
    ],
    "retain": [
        row('"d-4"sc1', 1, "There was no other day, and", "it was over"),
        row('"d-4"qa0', 1, "Who was over there?", "Bob"),
        row("e5sc1", 2, "Tim is there. You can", "mail me here now"),
        row("e5qa0", 2, "What is the number of Tim?", "7"),
        row("e5qa1", 2, "Where is Tim?", "Rome"),
        row("602sc1", 3, "Eve was an author;", "she was born in Rome"),
        row("602qa0", 3, "Who was the author?", "Eve"),
    ],
}
# What is said to each row, with its score: ROUGE-L recall of ends, equality of answers.
SAID: dict[str, list[str]] = {
    "forget": [
        "the cat ran",  # 2 of 4 words
        "dog",  # 0
        "a number",  # 1 of 3 words
        "900.",  # 0: the full stop counts
        " 1 MAIN ST\n",  # 1: case and outer blanks do not
        "a dog",  # 1 of 4 words
        "It is Ann Lee",  # 0: more than the answer
    ],
    "retain": [
        "It was over.",  # 3 of 3 words
        "bob",  # 1
        "mail me",  # 2 of 4 words
        "7",  # 1
        "Oslo",  # 0
        "she was born in Oslo",  # 4 of 5 words
        "EVE",  # 1
    ],
}


def write_lume(folder: Path, rows: Mapping[str, Sequence[Row]] = ROWS) -> str:
    """The folder `data` of the authors' repository."""
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return str(folder)
