"""What a run has measured, for tests that need a verdict and not its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.scores.records import write_records
from msa_lite.report import Metric, Report, write_report
from msa_lite.report.verdict.figures import Bound, Forgotten, Kept


def around(value: float, half: float = 0.02) -> Bound:
    return Bound(value, value - half, value + half)


def make_forgotten(rows: int = 48, unlearned: int = 1, **changes: Any) -> Forgotten:
    """What passes, of this many rows: the target recites all of them, and the ideal none."""
    facts: dict[str, Any] = {
        "recited": {"target": rows, "unlearned": unlearned, "ideal": 0},
        "control": "ideal",
        "control_rows": rows,
        "excess": Bound(unlearned / rows, -0.05, 0.09),
        "left": {"extraction_strength": around(0.05), "probability": around(0.1)},
        "changed": rows,
    }
    return Forgotten(rows, **facts | changes)


def make_kept(share: float = 0.95, rows: int = 40, **changes: Any) -> Kept:
    """A share that is kept of this many rows, with narrow bounds."""
    return Kept(around(share), rows, {"accuracy": share}, {"target": rows, "unlearned": round(share * rows)}, **changes)


def differences(one: Any, other: Any, tolerance: float = 1e-6, name: str = "") -> set[str]:
    """The names of the values that differ between two records, or mappings and lists of them."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return {key for part in one for key in differences(one[part], other[part], tolerance, part)}
    if isinstance(one, list) and len(one) == len(other):
        return {key for a, b in zip(one, other, strict=True) for key in differences(a, b, tolerance, name)}
    near = pytest.approx(other, abs=tolerance, rel=tolerance) if isinstance(other, float) else other
    return set() if one == near else {name}


def question(answer: str, generated: str, rouge: float, es: float, probability: float = 0.5) -> dict[str, Any]:
    scores = {"rouge_l": rouge, "extraction_strength": es, "probability": probability}
    return {
        "question": "q?",
        "answer": answer,
        "generated": generated,
        "accuracy": float(answer == generated),
        **scores,
    }


def known(count: int, probability: float = 0.9) -> list[dict[str, Any]]:
    return [question("Yes sir", "Yes sir", 1.0, 1.0, probability)] * count


def unknown(count: int, rouge: float = 0.0, es: float = 0.0, probability: float = 0.1) -> list[dict[str, Any]]:
    return [question("Yes sir", "No", rouge, es, probability)] * count


def text(memorised: float, es: float = 0.0, probability: float = 0.5) -> dict[str, Any]:
    scores = {"exact_memorization": memorised, "extraction_strength": es, "probability": probability}
    return {"text": "Once upon a time", **scores}


def write_shares(folder: Path, forget: float, retain: float | None = None, unseen: float = 0.3) -> None:
    """Write forty records of each set, all of whose scores are these. Holdout rows, the control, have `unseen`."""
    for name, share in {"forget": forget, "retain": retain, "holdout": unseen}.items():
        if share is not None:
            records = [question("Yes", "No", share, share, share) | {"index": i, "accuracy": share} for i in range(40)]
            write_records(folder / f"{name}.jsonl", records)


LOWER = {"extraction_strength", "rouge_l_f", "truth_ratio_f", "min_k"}
WITHOUT = {"privleak", "rouge_l_h"}
JUDGE = {"kind": "openai", "model": "gpt-4o", "base_url": None, "prompts": "0123"}


def make_report(
    values: dict[str, float | None], benchmark: str = "tofu", split: str = "forget10", **settings: Any
) -> Report:
    """A report of 40 items a metric with a standard error of 0.01; what is None needs a judge."""
    metrics = {
        name: Metric(
            value,
            0 if value is None else 40,
            None if value is None else 0.01,
            None if name in WITHOUT else name not in LOWER,
            note="needs a judge" if value is None else None,
        )
        for name, value in values.items()
    }
    asked = {"prompt": {"kind": "plain"}, "sets": {"forget": {"rows": 40, "sha256": split}}, "compat": []}
    return Report(benchmark, split, metrics, asked | settings)


def made_by(name: str, mode: str = "lora", start: str = "target", **more: Any) -> dict[str, Any]:
    """The settings of a model that a method made."""
    return {"method": {"name": name, "mode": mode, "start": start, "parameters": {}, "compat": []} | more}


def put(folder: Path, values: dict[str, float | None], **options: Any) -> Path:
    """Write a report into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_report(make_report(values, **options), folder)
    return folder


TARGET = {"acc_forget": 0.03, "extraction_strength": 0.98, "model_utility": 0.57, "forget_quality": 8e-27}
IDEAL = {"acc_forget": 0.98, "extraction_strength": 0.07, "model_utility": 0.60, "forget_quality": 1.0}
GOOD = {"acc_forget": 0.84, "extraction_strength": 0.07, "model_utility": 0.54, "forget_quality": 0.6}
WEAK = {"acc_forget": 0.42, "extraction_strength": 0.28, "model_utility": 0.60, "forget_quality": 1e-5}


def make_run(folder: Path, **values: dict[str, Any]) -> Path:
    """A run: target, ideal, an unlearned model by MSA, and baselines by name (`npo={...}`).

    msa: the unlearned model's values; options: what all its reports are made with.
    """
    options = values.pop("options", {})
    for name, scores in {"target": TARGET, "ideal": IDEAL}.items():
        put(folder / "evaluation" / name, values.pop(name, scores), **options)
    put(folder / "evaluation/unlearned", values.pop("msa"), **(made_by("msa", start="prior") | options))
    for name, scores in values.items():
        put(folder / "baselines" / name / "evaluation/unlearned", scores, **(made_by(name) | options))
    return folder
