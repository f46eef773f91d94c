"""Records of questions and texts of one's own, written by hand: known by heart, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msa_lite.evals.records import write_records


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
