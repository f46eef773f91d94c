"""Tables: faults told before any work, what is made, made again and stopped. The list of stages that a report reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.errors import MsaError, StageError, UsageError
from msa_lite.io.files.writing import write_text
from msa_lite.pipeline.prepare.run import Context
from msa_lite.pipeline.run.choice import CHOICE
from msa_lite.pipeline.run.folder import stage_list
from msa_lite.pipeline.table import rows as rows_module
from msa_lite.pipeline.table import work as work_module
from msa_lite.pipeline.table.rows import check_table, choose_rows, moved, table_rows
from msa_lite.pipeline.table.work import TableResult, look_at_table, table
from msa_lite.pipeline.verbs.commands import find_verb
from msa_lite.recipe import load_recipe, load_table_recipe, overrides_of
from msa_lite.report.run.provenance import load_provenance
from msa_lite.report.run.stages import ListedStage, StageList, add_stages, load_stages, write_stages

ONE_POINT = {"forget.alpha": 1.0, "retain.beta": 0.5}
RECIPE = "paper/tofu-forget10-llama-3.2-1b"
TABLE = {"recipe": RECIPE, "msa": {"MSA": {}}, "methods": ["npo"], "output": "out"}


def rows_of(**changes: Any) -> list[Any]:
    return table_rows(load_table_recipe({**TABLE, **changes}))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"method": ["npo"]}, "method: unknown key (did you mean 'methods'?)"),
        ({"seeds": [0, 0]}, "each once"),
        ({"methods": [{"method": "npo", "sets": {}}]}, "unknown key (did you mean 'set'?)"),
        ({"methods": ["npu"]}, "did you mean 'npo'?"),
        ({"methods": ["npo", "npo"]}, "NPO: two rows have this label"),
        ({"msa": {"A": {"output": "same"}, "B": {"output": "same"}}}, "B: its output same is that of A, too"),
        ({"msa": {"A": {"forget.alhpa": 1}}}, "alhpa: unknown key (did you mean 'alpha'?)"),
        ({"train": [{"recipe": "train/tofo"}]}, "did you mean 'train/tofu'"),
        ({"set": {"evaluate": None}}, "evaluate"),
    ],
)
def test_a_wrong_key_or_row_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError) as error:
        rows_of(**changes)
    assert fault in str(error.value)


def test_all_faults_of_rows_stand_in_one_message() -> None:
    with pytest.raises(UsageError, match=r"(?s)2 faults:.*npu.*tofu-forget10"):
        rows_of(methods=["npu"], published="tofu-forget10")


NOWHERE = {"target": "./no/target", "prior": "no/prior", "forget.data.path": "./rows.jsonl"}


@pytest.mark.parametrize(
    ("changes", "taken", "faults"),
    [
        (
            {"set": NOWHERE},
            False,
            ["no/prior: neither", "the prior of all 2 rows", "rows.jsonl: neither", "the data of all 2 rows"],
        ),
        ({"msa": {"MSA": ONE_POINT}}, False, ["NPO chooses strengths or epochs on some of the rows, MSA does not"]),
        ({}, True, ["holds something that is no table"]),
    ],
    ids=["models and data that cannot be had", "rows scored on different rows", "an output in use"],
)
def test_what_forbids_a_table_is_told_before_anything_is_written(
    changes: dict[str, Any], taken: bool, faults: list[str], tmp_path: Path
) -> None:
    if taken:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/thesis.tex").touch()
    table = load_table_recipe({**TABLE, "output": str(tmp_path / "out"), **changes})
    with pytest.raises(MsaError) as error:
        check_table(table, table_rows(table))
    assert [fault for fault in faults if fault not in str(error.value)] == []
    assert (tmp_path / "out").exists() is taken


def test_rows_have_their_labels_seeds_and_folders() -> None:
    methods = ["npo", {"method": "npo", "label": "NPO (base)", "set": {"baseline": {"start": "prior"}}}]
    rows = rows_of(methods=methods, seeds=[0, 3])
    places = {row.label: str(row.folder) for row in rows}
    assert places == {
        "MSA, seed 0": "out/msa-seed-0", "MSA, seed 3": "out/msa-seed-3",
        "NPO, seed 0": "out/npo-seed-0/baselines/npo", "NPO, seed 3": "out/npo-seed-3/baselines/npo",
        "NPO (base), seed 0": "out/npo-base-seed-0/baselines/npo-prior",
        "NPO (base), seed 3": "out/npo-base-seed-3/baselines/npo-prior",
    }  # fmt: skip
    assert [row.recipe.seed for row in rows] == [0] * 3 + [3] * 3
    assert rows[2].recipe.baseline.methods == rows[1].recipe.baseline.methods, "a mapping changes the keys below it"


def test_only_takes_rows_with_the_trainings_that_they_need() -> None:
    rows = table_rows(load_table_recipe("restor-olmo-2-7b"))
    assert [row.label for row in choose_rows(rows, ["NPO"])] == ["train: restor-olmo", "NPO"]
    with pytest.raises(UsageError, match=r"'MSA \(lasd\)' \(did you mean 'MSA \(last\)'\?\); choose from"):
        choose_rows(rows, ["MSA (lasd)"])


def test_only_takes_trainings_of_trainings_too(tmp_path: Path) -> None:
    first = {"recipe": "train/tofu", "set": {"output": f"{tmp_path}/first"}}
    second = {"recipe": "train/tofu", "set": {"output": f"{tmp_path}/second", "model": f"{tmp_path}/first/1-tofu"}}
    rows = rows_of(train=[first, second], msa={"MSA": {"target": f"{tmp_path}/second/1-tofu"}})
    assert [row.label for row in choose_rows(rows, ["MSA"])] == ["train: first", "train: second", "MSA"]
    assert [row.label for row in choose_rows(rows, ["NPO"])] == ["NPO"]


def test_data_of_the_table_takes_the_place_of_the_usual_data() -> None:
    row = rows_of(data="./tofu", set={"evaluate.data": None})[0]
    assert (row.recipe.forget.data.path, row.recipe.evaluate.data) == ("./tofu", "./tofu")


def test_changes_become_overrides_and_names_move_with_what_is_below_them() -> None:
    changes = {"prior": "p", "vector": {"epochs": 2}, "merge.filter": "off", "retain": None}
    assert [*overrides_of(changes)] == ['prior="p"', "vector.epochs=2", 'merge.filter="off"', "retain=null"]
    values = {"a": ["runs/x/1-y", "runs/xy"], "b": {"c": "runs/x"}}
    assert moved(values, {"runs/x": "new"}) == {"a": ["new/1-y", "runs/xy"], "b": {"c": "new"}}


# The work of a table, with rows that cost nothing


Rows = list[str]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TableResult, Rows]]:
    """A function that makes a table, and returns its result with the folders that were made, in their order."""
    made: Rows = []
    broken: set[str] = set()

    def make(recipe: Any, folder: Path, result: str) -> None:
        made.append(folder.name)
        (folder / result).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / result, "{}")
        if folder.name in broken:  # late: an older result may be there
            raise StageError(f"{folder.name} fell off the bus")

    def run(recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder, "evaluation/unlearned/report.json")

    def run_baseline(method: str, recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder / "baselines" / method, "evaluation/unlearned/report.json")

    def train(recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder, f"1-{recipe.stages[0].title}/manifest.json")

    monkeypatch.setattr(rows_module, "run", run)
    monkeypatch.setattr(rows_module, "run_baseline", run_baseline)
    monkeypatch.setattr(rows_module, "train_stages", train)
    monkeypatch.setattr(work_module, "check_table", lambda *arguments: None)  # of models that are not here
    monkeypatch.setattr(work_module, "compare", lambda entries, published: None)
    monkeypatch.setattr(work_module, "FORMATS", {})

    def call(broken_rows: tuple[str, ...] = (), only: tuple[str, ...] = (), **changes: Any) -> tuple[TableResult, Rows]:
        made.clear()
        broken.clear()
        broken.update(broken_rows)
        result = table({**plan(tmp_path), **changes}, only=only)
        return result, list(made)

    return call


def plan(folder: Path) -> dict[str, Any]:
    """A table of one training, MSA's row on what it makes, and two baselines, the second on the training's model."""
    return {
        "recipe": "paper/tofu-forget10-llama-3.2-1b", "output": str(folder / "table"),
        "train": [{"recipe": "train/tofu", "set": {"output": str(folder / "target")}}],
        "msa": {"MSA": {"target": str(folder / "target/1-tofu")}},
        "methods": ["npo", {"method": "undial", "set": {"target": str(folder / "target/1-tofu")}}],
    }  # fmt: skip


def states(result: TableResult) -> list[str]:
    return [row.state for row in result.rows]


def test_a_row_is_made_once_and_again_only_when_its_recipe_changes(work: Any, tmp_path: Path) -> None:
    result, made = work()
    assert made == ["target", "msa", "npo", "undial"]
    assert result.is_complete
    assert work()[1] == [], "all rows are done"
    changed = {"MSA": {"target": str(tmp_path / "target/1-tofu"), "forget.alpha": 0.5}}
    assert work(msa=changed)[1] == ["msa"]
    (tmp_path / "table/npo/baselines/npo/evaluation/unlearned/report.json").unlink()
    assert work(msa=changed)[1] == ["npo"], "its result was deleted"


def test_a_failure_stops_only_the_rows_that_are_made_of_it(work: Any) -> None:
    result, made = work(broken_rows=("target",))
    assert made == ["target", "npo"]
    assert states(result) == ["failed", "failed", "done", "failed"]
    assert [row.error for row in result.of("failed")][1:] == ["train: target failed"] * 2
    result, made = work(broken_rows=("undial",))
    assert made == ["target", "msa", "undial"], "what failed is tried again"
    assert [row.label for row in result.of("failed")] == ["UNDIAL"]


def test_a_dry_run_tells_what_is_done_and_what_is_made_anew(work: Any, tmp_path: Path) -> None:
    work(only=("MSA",))
    ahead = look_at_table(plan(tmp_path))
    assert [row.state for row in ahead.rows] == ["done", "done", "to do", "to do"]
    ahead = look_at_table({**plan(tmp_path), "msa": {"MSA": {}}})
    assert [row.state for row in ahead.rows] == ["done", "anew", "to do", "to do"]


def test_the_jobs_of_an_array_divide_the_rows_and_share_a_training(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN": 1, "MAX": 5, "STEP": 2, "COUNT": 3}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    rows = []
    for job in (3, 1, 5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(job))
        rows.append(work()[1])
    assert rows == [["npo"], ["target", "msa"], ["undial"]]
    assert (tmp_path / "table/table.json").is_file()
    assert work()[0].is_complete


def test_only_makes_the_rows_that_it_names_and_what_they_need(work: Any) -> None:
    result, made = work(only=("UNDIAL",))
    assert made == ["target", "undial"]
    assert states(result) == ["done", "left", "left", "done"]


def test_published_figures_and_the_rows_that_are_done_are_compared(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(work_module, "compare", lambda *arguments: compared.append(arguments))
    work(published="tofu-forget10-llama-3.2-1b", broken_rows=("undial",))
    entries = [f"MSA={tmp_path}/table/msa", f"NPO={tmp_path}/table/npo/baselines/npo"]
    assert compared == [(entries, "tofu-forget10-llama-3.2-1b")]


# The list of a run's stages: what each is for and holds, and what a report, which reads it, waits for.


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
    there, gone, attack = (ListedStage(name, "score", name) for name in ("there", "gone", "attack"))
    with pytest.raises(UsageError, match="no stage was begun, or an earlier version began it; run its recipe again"):
        load_stages(tmp_path)
    first = StageList((there, gone), ("forget",), True, {}, (), False)
    write_stages(first, tmp_path)
    (tmp_path / "there").mkdir()
    write_stages(StageList((), (), False, {"alpha": 1.0}, (), False), tmp_path)
    add_stages([attack], tmp_path)
    assert load_stages(tmp_path).strengths == {"alpha": 1.0}
    assert load_stages(tmp_path).stages == (there, attack)
