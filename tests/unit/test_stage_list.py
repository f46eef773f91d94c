"""The list of a run's stages: what each is for and holds, and what a report, which reads it, waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.errors import UsageError
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.choice import CHOICE
from msa_lite.pipeline.run.folder import stage_list
from msa_lite.pipeline.verbs.commands import find_verb
from msa_lite.recipe import load_recipe
from msa_lite.report.run.provenance import load_provenance
from msa_lite.report.run.stages import ROWS, ListedStage, StageList, add_stages, load_stages, write_stages

AUTO, ONE, SEVERAL, NOTHING = "auto", 1.0, [0.5, 1.0], 0.0


@pytest.mark.parametrize("method", ["msa", "task_vector", "no prior"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"forget": {"alpha": ONE}},
        {"forget": {"alpha": SEVERAL}},
        {"forget": {"alpha": [1.0]}},
        {"forget": {"alpha": ONE}, "evaluate": None},
        {"forget": {"alpha": ONE}, "retain": {"beta": ONE}},
        {"forget": {"alpha": ONE}, "retain": {"beta": NOTHING}},
        {"forget": {"alpha": AUTO}, "retain": {"beta": SEVERAL}},
        {"forget": {"alpha": NOTHING}, "retain": {"beta": AUTO}},
        {"forget": {"alpha": ONE}, "retain": {"beta": NOTHING}, "merge": {"filter": 2.0}},
        {"forget": {"alpha": ONE}, "retain": {"beta": NOTHING}, "merge": {"filter": AUTO}},
        {"forget": {"alpha": ONE}, "retain": {"beta": AUTO}, "vector": {"start": "retain"}},
        {"forget": {"alpha": AUTO}, "retain": {"beta": AUTO}, "vector": {"start": "retain", "mode": "full"}},
        {"forget": {"alpha": NOTHING}, "retain": {"beta": AUTO}, "vector": {"start": "retain"}},
        {"evaluate": {"ideal": "an/ideal"}},
        {"evaluate": {"holdout": {"path": "unseen.jsonl"}}},
        {"evaluate": {"benchmark": "tofu", "split": "forget10", "ideal": "an/ideal"}},
    ],
    ids=str,
)
def test_a_report_waits_for_the_stages_of_the_run(changes: dict[str, Any], method: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "target": "a/target",
        "prior": "a/prior",
        "forget": {"data": {"path": "rows.jsonl"}},
        "output": str(tmp_path / "run"),
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    if "retain" in changes:
        values["retain"]["data"] = {"path": "keep.jsonl"}
    if method == "no prior":
        del values["prior"]
        values.setdefault("retain", {"data": {"path": "keep.jsonl"}, "beta": NOTHING})
        if values.setdefault("evaluate", {}) is not None:
            values["evaluate"]["holdout"] = {"path": "unseen.jsonl"}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.dump(values))
    recipe = load_recipe(str(file))
    command = ("baseline", method) if method == "task_vector" else ("run",)
    first = f"# A run of msa-lite: `msa-lite {' '.join(command)}`\n"
    file.write_text(first + yaml.dump(recipe.model_dump(mode="json")))

    provenance = load_provenance(tmp_path)
    verb = find_verb(command[0], recipe, method)  # type: ignore[arg-type]
    assert (provenance.method, provenance.is_baseline) == (verb.scope.method, verb.scope.is_baseline)
    context = Context(recipe, verb.scope)
    listed = stage_list(context, verb.stages(context))
    verb.scope.folder.mkdir(parents=True)
    write_stages(listed, verb.scope.folder)
    assert load_stages(verb.scope.folder) == listed
    stages = {stage.name: stage for stage in listed.stages}
    assert listed.vectors == tuple(s.name.removesuffix(" vector") for s in stages.values() if s.kind == "fit")
    assert listed.chooses == (CHOICE in stages)
    scored = {name.removeprefix("scores: ") for name in stages if name.startswith("scores: ")}
    assert set(listed.models) == scored - {"prior"}

    assert load_recipe(yaml.safe_load(provenance.recipe)) == recipe  # the recipe that the page shows does the same
    assert {line for line in provenance.recipe.splitlines() if line.endswith(": null")} <= {"evaluate: null"}


def test_former_stages_stay_in_the_list_as_long_as_their_folders_are_there(tmp_path: Path) -> None:
    there, gone, attack = (ListedStage(name, "score", name, "", ROWS) for name in ("there", "gone", "attack"))
    with pytest.raises(UsageError, match="no stage was begun, or an earlier version began it; run its recipe again"):
        load_stages(tmp_path)
    first = StageList((there, gone), ("forget",), True, {}, (), False)
    write_stages(first, tmp_path)
    (tmp_path / "there").mkdir()
    write_stages(StageList((), (), False, {"alpha": 1.0}, (), False), tmp_path)
    add_stages([attack], tmp_path)
    assert load_stages(tmp_path).strengths == {"alpha": 1.0}
    assert load_stages(tmp_path).stages == (there, attack)
