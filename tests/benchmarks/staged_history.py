"""Make harder histories for `tests.benchmarks.variants` of a quickstart's rows: what a prior is worth, case by case.

    msa-lite run quickstart merge.filter=off seed=0 output=RUN --accept
    python -m tests.benchmarks.staged_history RUN               # RUN/cases/NAME, each with its vectors
    python -m tests.benchmarks.variants RUN/cases/* --only "msa" "msa, filter" "held, filter" "task vector, filter"

The target learns, in stages: the prior's people → other people → retain and forget rows → others again → retain and
forget rows once more. The ideal does the same without the forget rows. A case is a stage of both and a prior.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import msa_lite
from msa_lite.demo.history import make_people
from msa_lite.io.files.reading import PlainDumper
from msa_lite.io.finished.seal import load_manifest

PEOPLE = 24  # of each stage of other people
STAGES = ("between", "rows", "later", "again")


@dataclass(frozen=True)
class Case:
    """A target, and the prior that unlearning starts from."""

    target: str
    """The last stage of target and ideal."""
    prior: str
    """A stage of the target, or "prior": the model before all stages."""


CASES = {
    "near": Case("rows", "between"),
    "far": Case("rows", "prior"),
    "later": Case("later", "between"),
    "later-knows": Case("later", "rows"),
    "again": Case("again", "between"),
    "again-knows": Case("again", "rows"),
}
"""In "…-knows" the prior has learnt the forget rows already."""


def write_others(run: Path, seed: int) -> None:
    """Write the rows of the two stages of other people, none of whom shares a name with the run's."""
    known = " ".join(file.read_text("utf-8") for file in (run / "history/data").glob("*.jsonl"))
    people = (facts for name, facts in make_people(300, seed + 1000).items() if name.split()[1] not in known)
    for stage in ("between", "later"):
        rows = [{"question": q, "answer": a} for facts in islice(people, PEOPLE) for q, a in facts]
        (run / f"stages/{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def train(run: Path) -> None:
    """Train target and ideal, stage by stage, as the run's own target was tuned; later stages half as long."""
    manifest = load_manifest(run / "history/target")
    assert manifest, "the run has no target"
    tuning, data = manifest["inputs"]["settings"], run / "history/data"
    (run / "stages").mkdir(exist_ok=True)
    write_others(run, tuning["seed"])
    for name, groups in (("target", ("retain", "forget")), ("ideal", ("retain",))):
        learnt = [{"path": str(data / f"{group}.jsonl")} for group in groups]
        rows: dict[str, Any] = {"rows": learnt, "again": learnt}
        stages = [
            {
                "name": stage,
                "data": rows.get(stage, {"path": str(run / f"stages/{stage}.jsonl")}),
                "epochs": tuning["epochs"] // (2 if stage in ("later", "again") else 1),
            }
            for stage in STAGES[name == "ideal" :]
        ]
        training = {key: tuning[key] for key in ("learning_rate", "batch_size", "weight_decay", "warmup_epochs")}
        model = run / "history/prior" if name == "target" else stage_folder(run, "target", "between")
        recipe = {"model": str(model), "stages": stages, "training": training, "output": str(run / "stages" / name)}
        file = run / f"stages/{name}.yaml"
        file.write_text(dump(recipe | {"seed": tuning["seed"]}), "utf-8")
        msa_lite.train_stages(str(file))


def dump(recipe: dict[str, Any]) -> str:
    """Return a recipe as YAML without aliases."""
    return yaml.dump(recipe, Dumper=PlainDumper, sort_keys=False)


def stage_folder(run: Path, history: str, stage: str) -> Path:
    """Return the model of a history after a stage."""
    (found,) = (run / "stages" / history).glob(f"*-{stage}")
    return found


def make_case(run: Path, name: str, case: Case) -> None:
    """Lay a case out as a run of its own, and fit its vectors."""
    folder = run / "cases" / name
    (folder / "history").mkdir(parents=True, exist_ok=True)
    models = {
        "data": run / "history/data",
        "prior": run / "history/prior" if case.prior == "prior" else stage_folder(run, "target", case.prior),
        "target": stage_folder(run, "target", case.target),
        "ideal": stage_folder(run, "ideal", case.target),
    }
    for link, model in models.items():
        place = folder / "history" / link
        if not place.is_symlink():
            place.symlink_to(model.resolve())
    recipe = yaml.safe_load((run / "recipe.yaml").read_text("utf-8"))
    recipe |= {"target": str(models["target"]), "prior": str(models["prior"]), "output": str(folder), "demo": None}
    recipe["evaluate"]["ideal"] = str(models["ideal"])
    file = folder.with_suffix(".yaml")
    file.write_text(dump(recipe), "utf-8")
    msa_lite.run_vectors(str(file), overrides=["merge.filter=off", "vector.hold=0"])


def main() -> None:
    """Train the stages, then make each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    train(options.run)
    for name in options.only:
        make_case(options.run, name, CASES[name])


if __name__ == "__main__":
    main()
