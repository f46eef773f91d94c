"""Which questions are shown side by side, and what the models of a run say to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msa_lite.data import sample_rows
from msa_lite.evals.benchmark import Record, Records
from msa_lite.report.examples import SideBySide

COUNT = 10
_SHOWN = ("target", "unlearned", "ideal")
_SETS = {"forget": ("forget", "knowmem_forget"), "retain": ("retain", "knowmem_retain")}  # of qa and tofu, of muse


def pick_examples(models: Mapping[str, Records], seed: int, count: int = COUNT) -> list[SideBySide]:
    """A seeded sample of the questions that target, unlearned model and ideal were asked, half of them to be forgotten.

    models: records by set, by the name of the model. Where a set has too few, the other makes up for it. Texts, from
    which nothing is generated, are none.
    """
    models = {name: models[name] for name in _SHOWN if name in models}
    chosen = {name: _places(models["target"], name) for name in _SETS}
    half = count // 2
    room = {"forget": max(half, count - len(chosen["retain"])), "retain": max(half, count - len(chosen["forget"]))}
    return [
        _example(models, name, where, at)
        for name, places in chosen.items()
        for where, at in sample_rows(places, room[name], seed)
    ]


def _places(records: Records, name: str) -> list[tuple[str, int]]:
    """(set, position) of the questions about the forget, or the retain set, that were answered."""
    found = [(where, at, record) for where in _SETS[name] for at, record in enumerate(records.get(where, []))]
    for at, record in enumerate(records.get("questions", [])):  # restor's, in one set
        if record["corrupted"] == (name == "forget"):
            found.append(("questions", at, record))
    return [(where, at) for where, at, record in found if record.get("generated") is not None]


def _example(models: Mapping[str, Records], name: str, where: str, at: int) -> SideBySide:
    record = models["target"][where][at]
    expected = record["answer"] if "answer" in record else " / ".join(record["answers"])
    said = {model: _answer(records[where][at]) for model, records in models.items()}
    return SideBySide(name, record["question"], expected, said)


def _answer(record: Record) -> str:
    generated: str | Sequence[str] | None = record.get("generated")
    return generated if isinstance(generated, str) else (generated or [""])[0]
