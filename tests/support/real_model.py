"""Make folders such as examples/real_model/run.py leaves them: tiny reports with the scores that a test wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORGET = ("rouge_l_f", "probability_f", "extraction_strength", "accuracy_f")
RETAIN = ("rouge_l_r", "probability_r", "extraction_strength_r", "accuracy_r")
TARGET, IDEAL = (0.9, 0.9), (0.3, 0.85)
ROWS = 6

GROUPS = {
    "main": ("msa-lora", "msa-full"),
    "baselines": ("task_vector", "npo", "simnpo", "grad_diff", "rmu", "satimp", "undial"),
    "full": ("task_vector-full", "npo-full", "grad_diff-full", "undial-full"),
    "lora": ("lora-r8", "lora-r128", "lora-rate-low", "lora-rate-high", "lora-mlp", "full-rate-high", "qlora"),
    "retain": ("retain-all", "retain-all-full"),
    "storage": ("bf16",),
    "distance": ("prior-text-a", "prior-base"),
    "exposure": ("text-before", "text-after"),
    "repeated": ("again-before", "again-between", "again-late"),
    "later": ("text-before-full", "again-before-full"),
    "checkpoints": ("npo-prior", "grad_diff-prior", "rmu-prior", "satimp-prior", "undial-prior"),
}
# Mean scores on the forget and the retain set with which every claim holds.
GOOD: dict[str, tuple[float, float]] = {
    **dict.fromkeys([name for names in GROUPS.values() for name in names], (0.32, 0.84)),
    **dict.fromkeys((*GROUPS["baselines"], *GROUPS["full"]), (0.5, 0.75)),
    **dict.fromkeys(GROUPS["checkpoints"], (0.6, 0.75)),
    **dict.fromkeys(GROUPS["distance"], (0.4, 0.8)),
    "text-after": (0.8, 0.85),
    "again-between": (0.7, 0.85),
    "again-late": (0.8, 0.85),
}
PROBED = ("msa-lora", *GROUPS["distance"], *GROUPS["exposure"], *GROUPS["repeated"])
SIGNS = ("text-after", "again-between", "again-late")  # experiments whose probe warns
GRID = {(1.0, 0.0): (0.4, 0.7), (0.5, 0.5): (0.45, 0.85), (1.0, 0.5): (0.33, 0.84)}


@dataclass
class Folder:
    """What the experiments are to have left."""

    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    scores: dict[str, tuple[float, float]] = field(default_factory=lambda: dict(GOOD))
    """Mean scores on the forget and the retain set by experiment. Those not listed have not run."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Messages of the experiments that failed."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """The commit of each experiment that ran with another than the plan's."""

    def write(self) -> Path:
        """Write everything; return the folder."""
        experiments = [
            {"name": name, "group": group, "target": _target(group), "prior": "text-b", "what": f"what {name} tries",
             "overrides": []}
            for group, names in GROUPS.items()
            for name in names
        ]  # fmt: skip
        plan = {"size": "small", "seeds": list(self.seeds), "commit": "aaaa1111bbbb", "fixed": "2026-01-01T00:00:00",
                "experiments": experiments, "hardware": {"cores": 2, "folder": str(self.out)}}  # fmt: skip
        _write_json(self.out / "plan.json", plan)
        for seed in self.seeds:
            self._write_seed(seed)
        return self.out

    def _write_seed(self, seed: int) -> None:
        folder = self.out / f"seed-{seed}"
        state: dict[str, Any] = {}
        for name, scores in self.scores.items():
            place = f"runs/{name}"
            state[name] = {
                "folder": place, "command": f"msa-lite run {self.out}/{name}.yaml", "seconds": 60.0 * (seed + 1),
                "commit": self.commits.get(name, "aaaa1111"), "date": f"2026-01-0{seed + 2}T00:00:00",
                "error": self.errors.get(name),
            }  # fmt: skip
            if name not in self.errors:
                self._write_run(folder / place, name, _moved(scores, 0.004 * seed))
        far = {"text-b": 0.4, "text-a": 0.7, "base": 1.0}
        _write_json(folder / "state.json", {"experiments": state, "models": {}, "distances": far})
        for name in ("target", "ideal", "msa-lora"):
            metrics = {key: _metric(0.5) for key in ("model_utility", "truth_ratio_f", "forget_quality")}
            _write_json(folder / f"tofu/{name}/report.json", _report("tofu", metrics))
        self._write_sweep(folder / "hindsight/sweep")

    def _write_run(self, folder: Path, name: str, scores: tuple[float, float]) -> None:
        models = {"target": TARGET, "ideal": IDEAL, "unlearned": scores}
        values = {model: _values(of) for model, of in models.items()}
        metrics = {
            key: {"label": key, "models": {model: _metric(of[key]) for model, of in values.items()}}
            for key in FORGET + RETAIN
        }
        figures = {"relative_size": 0.01, "rounding_loss": 0.2 if name == "bf16" else 1e-6, "update_cosine": 0.98}
        report = {
            "kind": "run", "metrics": metrics, "strengths": {"alpha": 1.0, "beta": 0.5}, "outcome": "PASS",
            "rows": {"forget": ROWS, "retain": ROWS}, "update": {"figures": figures},
            "provenance": {"versions": {"torch": "2.13"}},
        }  # fmt: skip
        _write_json(folder / "report.json", report)
        if name not in PROBED:
            return
        interval = [0.8, 0.95] if name in SIGNS else [0.45, 0.55]
        settings = {"intervals": {"loss_auc": interval}, "rows": {"forget": 40, "holdout": 40}}
        auc = {"loss_auc": _metric(sum(interval) / 2)}
        _write_json(folder / "probe/cheap/prior/report.json", _report("probe", auc) | {"settings": settings})

    def _write_sweep(self, folder: Path) -> None:
        entries = [{"alpha": alpha, "beta": beta, "score": 0.5, "met": True} for alpha, beta in GRID]
        choice = {**entries[-1], "rule": "extraction", "scores": entries, "doubts": []}
        _write_json(folder / "choice.json", choice)
        places = {"target": TARGET, "ideal": IDEAL}
        places |= {f"alpha-{a:g}_beta-{b:g}": scores for (a, b), scores in GRID.items()}
        for name, scores in places.items():
            metrics = {key: _metric(value) for key, value in _values(scores).items()}
            _write_json(folder / name / "report.json", _report("qa", metrics))


def _target(group: str) -> str:
    return {"exposure": "text-c", "repeated": "tofu-again"}.get(group, "tofu")


def _moved(scores: tuple[float, float], by: float) -> tuple[float, float]:
    return scores[0] + by, scores[1]


def _values(scores: tuple[float, float]) -> dict[str, float]:
    return dict.fromkeys(FORGET, scores[0]) | dict.fromkeys(RETAIN, scores[1])


def _metric(value: float) -> dict[str, Any]:
    return {"value": value, "n": ROWS, "stderr": 0.01, "higher_is_better": True, "skipped": 0, "note": None}


def _report(benchmark: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"benchmark": benchmark, "split": "test", "metrics": metrics, "settings": {}}


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
