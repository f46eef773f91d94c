"""Folders with reports, as runs and evaluations leave them, of values that a test names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msa_lite.report import Metric, Report, write_report

LOWER = {"extraction_strength", "rouge_l_f", "truth_ratio_f", "min_k"}
WITHOUT = {"privleak", "rouge_l_h"}
JUDGE = {"kind": "openai", "model": "gpt-4o", "base_url": None, "separate": False, "prompts": "0123"}


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
