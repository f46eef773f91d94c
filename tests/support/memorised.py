"""Tiny models that have learnt rows by heart, to attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from msa_lite.attacks.attack import Ground, Subject
from msa_lite.data import IGNORE, Example, Row
from msa_lite.evals.engine.models import Runner
from msa_lite.io.weights.hub import Source
from tests.support.benchmark_data import make_prompter
from tests.support.models import tiny_model

WINDOW = 1024
REFUSAL = "No idea."


def _rows(**facts: str) -> list[Row]:
    return [Row(i, f"Who is {name}?", f"{name} {fact}.") for i, (name, fact) in enumerate(facts.items())]


KNOWN = _rows(Ada="Quill plays chess in Ulm", Bo="Tarn sings in Riga at night")
HIDDEN = _rows(Cy="Wren has two red boats", Di="Moss grows figs in Bonn")
FORGET = [*KNOWN, *(replace(row, index=row.index + len(KNOWN)) for row in HIDDEN)]
HOLDOUT = _rows(Ed="Pike paints birds in Graz", Flo="Hart skates in Lyon at dawn", Gil="Rook has six grey mules")
RETAIN = [Row(i, f"Has {name} legs?", f"A {name} has {number}.") for i, (name, number) in enumerate(
    [("cat", "four"), ("hen", "two"), ("ant", "six"), ("fish", "none"), ("crab", "ten"), ("dog", "four")]
)]  # fmt: skip


def make_ground(chat: bool = False, **changes: Any) -> Ground:
    sets: dict[str, Any] = {"forget": FORGET, "retain": RETAIN, "holdout": HOLDOUT, "learnt": FORGET}
    return Ground(**(sets | {"prompter": make_prompter(chat), "max_new_tokens": 40} | changes))


@cache
def knowing_model() -> Any:
    """A model that answers the KNOWN questions, and of the HIDDEN answers only knows how they go on.

    Asked plainly about these, it refuses.
    """
    prompter = make_prompter()
    examples = [prompter.example(row) for row in KNOWN]
    for row in HIDDEN:
        examples.append(prompter.example(replace(row, answer=REFUSAL)))
        whole = prompter.full(row)
        given = len(prompter.full(replace(row, answer=row.answer.split()[0]))) - 1  # without the end token
        examples.append(Example(row.index, whole, [IGNORE] * given + whole[given:]))
    return learn(examples)


def learn(texts: Sequence[Example], steps: int = 70) -> Any:
    """A tiny model that has learnt texts by heart."""
    import torch

    model = tiny_model("qwen2", max_position_embeddings=WINDOW)
    width = max(len(text.ids) for text in texts)
    ids = torch.tensor([text.ids + [2] * (width - len(text.ids)) for text in texts])
    labels = torch.tensor([text.labels + [IGNORE] * (width - len(text.labels)) for text in texts])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def subject_of(model: Any, name: str = "unlearned") -> Subject:
    """A model under attack that is loaded already."""
    return Subject(name, Source(name, Path(name), f"sha256:{name}"), _runner=Runner(model))
