"""Tables: faults are told before any work, all in one message; rows, their states and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import MsaError, UsageError
from msa_lite.pipeline.table.rows import check_table, choose_rows, moved, table_rows
from msa_lite.recipe import load_table_recipe, overrides_of

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
