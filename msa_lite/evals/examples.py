"""Pick questions to show side by side, with the answers of a run's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msa_lite.data import sample_rows
from msa_lite.evals.benchmark import Benchmark, Record, Records
from msa_lite.report.examples import SideBySide

COUNT = 10
_MODELS = ("target", "unlearned", "ideal")
_SIDES = ("forget", "retain")


def pick_examples(
    benchmark: type[Benchmark], models: Mapping[str, Records], seed: int, count: int = COUNT
) -> list[SideBySide]:
    """Return a seeded sample of questions with the answers of target, unlearned model and ideal.

    Half of them are about the forget set; where one set has too few, the other makes up for it. models: records by set,
    by the name of the model. Texts are left out, since nothing is generated from them.
    """
    models = {name: models[name] for name in _MODELS if name in models}
    places = {side: _answered(benchmark, models["target"], side) for side in _SIDES}
    half = count // 2
    room = {"forget": max(half, count - len(places["retain"])), "retain": max(half, count - len(places["forget"]))}
    return [
        _example(models, side, name, at) for side in _SIDES for name, at in sample_rows(places[side], room[side], seed)
    ]


def _answered(benchmark: type[Benchmark], records: Records, side: str) -> list[tuple[str, int]]:
    """Return (set, position) of the questions about one side that were answered."""
    return [
        (name, at) for name, at in benchmark.places(records, side) if records[name][at].get("generated") is not None
    ]


def _example(models: Mapping[str, Records], side: str, name: str, at: int) -> SideBySide:
    record = models["target"][name][at]
    expected = record["answer"] if "answer" in record else " / ".join(record["answers"])
    answers = {model: _answer(records[name][at]) for model, records in models.items()}
    return SideBySide(side, record["question"], expected, answers)


def _answer(record: Record) -> str:
    generated: str | Sequence[str] | None = record.get("generated")
    return generated if isinstance(generated, str) else (generated or [""])[0]
