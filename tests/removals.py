"""Runs' folders made by hand, with their removal records: what `msa_lite.record` reads, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.weights.hub import hash_content
from msa_lite.record.facts import ModelSource, RunFacts, write_run_record
from msa_lite.record.schema import Removal
from msa_lite.record.seal import RowContent
from msa_lite.report import write_report
from msa_lite.report.verdict import make_verdict, write_verdict
from tests.measured import make_forgotten, make_kept
from tests.report_folders import make_report

ROWS: list[RowContent] = [
    ("Where does Ada live?", "In Yarheath.", ""),
    ("What does Ada play?", "The flute.", ""),
    ("", "", "Ada was born in Yarheath.\n\nShe plays the flute."),
]


def put_model(folder: Path, text: str) -> ModelSource:
    """A folder that looks like a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    (folder / "config.json").write_text("{}")
    return ModelSource("local folder", folder, hash_content(folder))


def make_stages(run: Path, alpha: float = 1.2) -> None:
    """The stages of a run whose folder holds target and prior as well."""
    with stage_folder(run / "vectors/forget", "vector", {}) as partial:
        (partial / "adapter_model.safetensors").write_text("vector")
        (partial / "adapter_config.json").write_text("{}")
        (partial / "rows.jsonl").write_text("hashes")
    target = put_model(run / "target", "target")
    inputs = {
        "target": {"revision": target.revision},
        "forget": {"revision": hash_content(run / "vectors/forget")},
        "alpha": alpha,
        "beta": 0.0,
    }
    with stage_folder(run / "model", "model", inputs, {"sources": {"forget": str(run / "vectors/forget")}}) as partial:
        put_model(partial, f"unlearned {alpha}")
        (partial / "README.md").write_text("A card")
    for name, value in {"target": 0.9, "unlearned": 0.1}.items():
        with stage_folder(run / "evaluation" / name, "evaluation", {}) as partial:
            write_report(make_report({"extraction_strength": value, "privleak": None}), partial)
    write_verdict(make_verdict(make_forgotten(40), make_kept()), run)


def make_removal(run: Path, earlier: Sequence[Path] = (), **changes: Any) -> Removal:
    """Write a run's folder, its recipe and its record."""
    if not (run / "model").exists():
        make_stages(run)
    recipe = {"request": changes.get("request"), "earlier": [str(place) for place in earlier]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return write_run_record(run, make_facts(run, earlier=earlier, **changes))


def make_facts(run: Path, **changes: Any) -> RunFacts:
    """The facts of a run that its folder does not tell."""
    facts: dict[str, Any] = {
        "request": None,
        "method": "msa",
        "formula": "θ_u = θ_D − α (θ_1 − θ_0)",
        "strengths": {"alpha": 1.2, "beta": 0.0},
        "kind": "model",
        "models": {"target": put_model(run / "target", "target")},
        "forget_rows": ROWS,
        "row_counts": {"forget": 3},
        "scored": ["target", "unlearned"],
        "stages": ["vectors/forget", "sweep", "model", "evaluation/target", "evaluation/unlearned"],
        "began": 0.0,
    }
    return RunFacts(**facts | changes)
