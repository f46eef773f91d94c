"""Runs' folders made by hand, with their removal records: what `msa_lite.record` reads, without any model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from msa_lite.io.files.writing import digest, hash_file, write_json
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import hash_content
from msa_lite.record.facts import (
    hash_result,
    hash_run_files,
    judgement_of,
    read_earlier,
    read_vectors,
    utc,
    write_run_record,
)
from msa_lite.record.schema import ModelWeights, Removal
from msa_lite.record.seal import KEY_FILE, RowContent, make_key
from msa_lite.report import Metric, Report, write_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.report.run.stages import StageList, write_stages
from msa_lite.report.verdict.verdict import make_verdict, write_verdict
from tests.support.records import make_forgotten, make_kept, make_report

ROWS: list[RowContent] = [
    ("Where does Ada live?", "In Yarheath.", ""),
    ("What does Ada play?", "The flute.", ""),
    ("", "", "Ada was born in Yarheath.\n\nShe plays the flute."),
]


def put_tiny_model(folder: Path, text: str) -> ModelWeights:
    """A folder that looks like a model of two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    (folder / "model-2.safetensors").write_text(text[::-1])
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_text('{"a": 0}')
    return ModelWeights(name="local folder", revision=hash_content(folder))


def make_stages(run: Path, alpha: float = 1.2) -> None:
    """The stages of a run whose folder holds target and prior as well."""
    with stage_folder(run / "vectors/forget", "vector", {}) as partial:
        (partial / "adapter_model.safetensors").write_text("vector")
        (partial / "adapter_config.json").write_text("{}")
        (partial / "rows.jsonl").write_text("hashes")
    target = put_tiny_model(run / "target", "target")
    inputs = {
        "target": {"revision": target.revision},
        "forget": {"revision": hash_content(run / "vectors/forget")},
        "alpha": alpha,
        "beta": 0.0,
    }
    sources, terms = {"forget": str(run / "vectors/forget")}, [{"name": "forget", "weight": -alpha}]
    with stage_folder(run / "model", "model", inputs, {"sources": sources, "terms": terms}) as partial:
        put_tiny_model(partial, f"unlearned {alpha}")
        (partial / "README.md").write_text("A card")
    for name, value in {"target": 0.9, "unlearned": 0.1}.items():
        with stage_folder(run / "evaluation" / name, "evaluation", {}) as partial:
            write_report(make_report({"extraction_strength": value, "privleak": None}), partial)
    write_verdict(make_verdict(make_forgotten(40), make_kept()), run)


def make_removal(
    run: Path, earlier: Sequence[Path] = (), forget_rows: Sequence[RowContent] = ROWS, **changes: Any
) -> Removal:
    """Write a run's folder, its recipe and its record. changes: of what the folder does not tell."""
    if not (run / "model").exists():
        make_stages(run)
    recipe = {"request": changes.get("request"), "earlier": [str(place) for place in earlier]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    former = [read_earlier(place) for place in earlier]
    told = {
        "request": None,
        "method": "msa",
        "formula": "θ_u = θ_D − α (θ_1 − θ_0)",
        "strengths": {"alpha": 1.2, "beta": 0.0},
        "started": utc(0),
        "finished": utc(60),
        "models": {"target": put_tiny_model(run / "target", "target")},
        "row_counts": {"forget": 3},
    }
    record = Removal(
        **told | changes,
        vectors=read_vectors(load_manifest(run / "model") or {}),
        result=hash_result(run, "model"),
        forget_rows=make_key(run / KEY_FILE).hash_rows(forget_rows),
        verdict=judgement_of(make_verdict(make_forgotten(40), make_kept())),
        files=hash_run_files(run, "model"),
        earlier=former,
        previous_sha256=former[-1].record_sha256 if former else None,
    )
    return write_run_record(run, record)


FIRST = "# A run of msa-lite: the recipe as resolved. `{}` on this file repeats the run.\n"
SECRET = "Otan Wenmere was born in Yarheath"
"""A row of the data; no report may hold it unless somebody asks for examples."""
POINTS = [{"alpha": 0.5, "beta": 0.0}, {"alpha": 1.0, "beta": 0.0}, {"alpha": 1.0, "beta": 0.5}]
CHOSEN = POINTS[1]
MODELS = {"target": 0.98, "unlearned": 0.1, "ideal": 0.05}


def recipe(**changes: Any) -> dict[str, Any]:
    """A resolved recipe, as far as a report looks at it."""
    values = {
        "target": "models/target",
        "prior": "models/prior",
        "forget": {"data": {"path": "forget.jsonl"}, "alpha": [0.5, 1.0]},
        "retain": {"data": {"path": "retain.jsonl"}, "beta": [0.0, 0.5]},
        "merge": {"as": "model"},
        "evaluate": {"benchmark": "qa", "ideal": "models/ideal"},
        "baseline": {"start": "target"},
        "seed": 7,
    }
    return values | changes


def make_run_folder(folder: Path, command: str = "msa-lite", **changes: Any) -> Path:
    """A finished run with a sweep, an ideal and a probe. changes: keys of the recipe."""
    folder.mkdir(parents=True)
    notes = "# target: sha256:aa\n# prior: sha256:bb\n# ideal: sha256:cc\n# rows learnt, forget: sha256:dd\n"
    text = FIRST.format(command) + notes + yaml.safe_dump(recipe(**changes))
    (folder / "recipe.yaml").write_text(text)
    method = command.partition(" baseline ")[2] or "msa"
    put_stages(folder, **({} if method in WITH_VECTORS else {"vectors": None}))
    for name in ("forget", "retain"):
        put_vector(folder / "vectors" / name)
    put_sweep(folder / "sweep")
    put_model(folder / "model")
    revision = _revision(folder / "model")
    for name in MODELS:
        method = {"name": "msa", "parameters": dict(CHOSEN), "compat": []} if name == "unlearned" else None
        model = revision if name == "unlearned" else f"sha256:{name}"
        put_scores(folder / "evaluation" / name, name, "test", model, method)
        put_scores(folder / "evaluation" / f"{name}_validation", name, "validation", model)
    put_probe(folder / "probe/cheap/prior")
    write_verdict(make_verdict(make_forgotten(12), make_kept(rows=12), ["a remark"]), folder)
    return folder


def put_stages(folder: Path, **changes: Any) -> None:
    """The list of a run's stages, as far as a report looks at it."""
    wanted = {"vectors": ("forget", "retain"), "chooses": True, "strengths": {}, "models": tuple(MODELS)}
    write_stages(StageList(**{"stages": (), "starts_at_retain": False} | wanted | changes), folder)


def put_vector(folder: Path) -> None:
    facts = {
        "rows": 12,
        "fit": {"loss": {"prior": 3.0, "target": 0.5, "tuned": 0.6}, "reason": "done", "learning_rate": 1e-3},
    }
    settings = {"mode": "lora", "lora_rank": 4, "epochs": 2, "batch_size": 8}
    with stage_folder(folder, "vector", {"settings": settings}, facts) as partial:
        lines = [{"step": at, "epoch": at / 2, "loss": 3.0 / at} for at in range(1, 5)] + [{"step": 4, "eval": 1}]
        (partial / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def put_sweep(folder: Path) -> None:
    with stage_folder(folder, "sweep", {}) as partial:
        for name in ("target", "ideal"):
            _put_report(partial / name, MODELS[name], "validation", {})
        for point in POINTS:
            _put_report(partial / candidate_name(point), 0.5 - point["alpha"] / 4, "validation", {})
        scores = [{**point, "score": point["alpha"] / 2, "met": True} for point in POINTS]
        choice = {**CHOSEN, "score": 0.5, "met": True, "rule": "extraction", "scores": scores, "doubts": ["few rows"]}
        write_json(partial / "choice.json", choice)
        (partial / "table.md").write_text("| model | alpha |\n|---|---|\n| chosen | 1 |\n")


def put_model(folder: Path, **facts: Any) -> None:
    change = {"tensors_touched": 2, "weights_touched": 8, "weights_changed": 8, "rounding_loss": 0.01}
    change |= {"relative_size": 0.5, "update_cosine": 0.99, "vector_cosine": None, "notes": ["a note of the merge"]}
    sizes = {"weights": 4, "relative_size": 0.5, "norm": 3.0, "weight_norm": 6.0}
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight")
    about = {"change": change, "fidelity": {"total": {}, "tensors": dict.fromkeys(names, sizes)}} | facts
    with stage_folder(folder, "model", {"alpha": 1.0, "beta": 0.0}, about) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
        (partial / "config.json").write_text("{}")


def put_scores(folder: Path, name: str, split: str, model: str, method: dict[str, Any] | None = None) -> None:
    """An evaluation with its records, which hold the data."""
    settings = {"sets": {"forget": {"rows": 6}, "retain": {"rows": 6}}, "model": {"revision": model}}
    with stage_folder(folder, "evaluation", {"model": model}) as partial:
        _put_report(partial, MODELS[name], split, settings | ({"method": method} if method else {}))
        first = 0 if split == "test" else 6
        for side in ("forget", "retain"):
            rows = [
                {
                    "index": first + at,
                    "question": f"{SECRET}, {side} {first + at}?",
                    "answer": SECRET,
                    "generated": name,
                }
                for at in range(6)
            ]
            (partial / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_probe(folder: Path) -> None:
    rows = {"rows": {"forget": 12, "holdout": 12}, "intervals": {"loss_auc": [0.4, 0.6]}}
    with stage_folder(folder, "probe", {}) as partial:
        write_report(Report("probe", "all", {"loss_auc": Metric(0.5, 24, 0.05, None)}, rows), partial)


def _put_report(folder: Path, value: float, split: str, settings: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    metrics = {
        "accuracy_f": Metric(value, 6, 0.1, False),
        "extraction_strength": Metric(value, 6, 0.1, False),
        "accuracy_r": Metric(0.9, 6, 0.1, True),
        "accuracy_h": Metric(None, 0, None, None, note="nothing to score"),
    }
    write_report(Report("qa", split, metrics, settings), folder)


def _revision(folder: Path) -> str:
    names = ("model.safetensors", "config.json")
    return f"sha256:{digest({name: hash_file(folder / name) for name in names})}"
