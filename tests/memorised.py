"""Tiny models that know rows by heart, and what masks that knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_lite.attacks.attack import Ground, Subject
from msa_lite.data import IGNORE, Example, Prompter, Row
from msa_lite.evals.models import Runner
from msa_lite.io.hub import Source
from tests.conftest import tiny_model
from tests.muse_data import make_prompter

WINDOW = 1024
FORGET = [
    Row(i, f"Who is {name}?", f"{name} is {fact}.")
    for i, (name, fact) in enumerate(
        [
            ("Ada Quill", "a miller from Ulm who plays chess"),
            ("Bo Tarn", "the baker of Riga and sings at night"),
            ("Cy Wren", "an old sailor with two red boats"),
            ("Di Moss", "a judge in Bonn who grows figs"),
        ]
    )
]
HOLDOUT = [
    Row(i, f"Who is {name}?", f"{name} is {fact}.")
    for i, (name, fact) in enumerate(
        [
            ("Ed Pike", "a tailor from Graz who paints birds"),
            ("Flo Hart", "the mayor of Lyon and skates at dawn"),
            ("Gil Rook", "a young farmer with six grey mules"),
            ("Ida Lund", "a nurse in Kiel who builds kites"),
        ]
    )
]
RETAIN = [Row(i, f"How many legs has a {name}?", f"A {name} has {n}.") for i, (name, n) in enumerate(
    [("cat", "four"), ("hen", "two"), ("ant", "six"), ("fish", "none"), ("crab", "ten"), ("dog", "four")]
)]  # fmt: skip


def make_ground(chat: bool = False, **changes: Any) -> Ground:
    sets: dict[str, Any] = {"forget": FORGET, "retain": RETAIN, "holdout": HOLDOUT, "learnt": FORGET}
    return Ground(**(sets | {"prompter": make_prompter(chat), "max_new_tokens": 60} | changes))


def examples(prompter: Prompter, rows: Sequence[Row]) -> list[Example]:
    return [prompter.example(row.index, row.question, row.answer) for row in rows]


def learn(texts: Sequence[Example], steps: int = 150, seed: int = 0) -> Any:
    """A tiny model that has learnt texts until it says each of them."""
    import torch

    model = tiny_model("qwen2", seed, max_position_embeddings=WINDOW)
    width = max(len(text.ids) for text in texts)
    ids = torch.tensor([text.ids + [2] * (width - len(text.ids)) for text in texts])
    labels = torch.tensor([text.labels + [IGNORE] * (width - len(text.ids)) for text in texts])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def subject_of(model: Any, name: str = "unlearned") -> Subject:
    """A model under attack, loaded already."""
    return Subject(name, Source(name, Path(name), f"sha256:{name}"), Runner(model))
