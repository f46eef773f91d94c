"""Models side by side: how rows are named, what cannot stand together, the notes, and the figures of the paper."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.comparison.compare import FORMATS, Comparison, compare
from msa_lite.comparison.published import load_published, published_tables
from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.files.writing import json_form
from tests.support.records import GOOD, IDEAL, JUDGE, TARGET, WEAK, made_by, make_run, put
from tests.support.runs import put_stages


def labels(comparison: Comparison) -> list[str]:
    return [row.label for row in comparison.rows]


def shown(comparison: Comparison, metric: str) -> list[str]:
    """A column as tables show it: value, ratio and, of the best, a star."""
    cells = [row.cells[metric] for row in comparison.rows]
    return [cell.text + (f" {cell.ratio}" if cell.ratio else "") + "*" * cell.best for cell in cells]


def test_a_run_with_its_baselines_is_the_papers_table(tmp_path: Path) -> None:
    found = compare([make_run(tmp_path / "run", msa=GOOD, undial=WEAK, npo=GOOD)])
    assert labels(found) == ["Target", "Ideal", "MSA", "NPO", "UNDIAL"]
    assert [row.section for row in found.rows] == ["references", "references", "msa", "baselines", "baselines"]
    assert [column.heading for column in found.columns] == [
        "Acc forget (judge) ↑", "extraction strength ↓", "model utility ↑", "forget quality ↑",
    ]  # fmt: skip
    # Nobody reaches the ideal's 0.98: 0.42 / 0.84. The ideal's 0.07 is reached: 0.07 / 0.28. Utility: 0.54 / 0.60.
    assert shown(found, "acc_forget") == ["0.030", "0.980", "0.840 100.0%*", "0.840 100.0%*", "0.420 50.0%"]
    assert shown(found, "extraction_strength") == ["0.980", "0.070", "0.070 +100%*", "0.070 +100%*", "0.280 25.0%"]
    assert shown(found, "model_utility") == ["0.570", "0.600", "0.540 90.0%", "0.540 90.0%", "0.600 +100%*"]
    assert shown(found, "forget_quality") == ["8.0e-27", "1.000", "0.600*", "0.600*", "1.0e-05"]
    cell = found.rows[2].cells["acc_forget"]
    assert (cell.value, cell.stderr, cell.n) == (0.84, 0.01, 40)
    assert found.title == "tofu, forget10"


def test_an_evaluation_a_report_and_a_run_without_baselines_can_be_given(tmp_path: Path) -> None:
    put(tmp_path / "scores", GOOD)
    put(tmp_path / "scores/ideal", IDEAL)
    put(tmp_path / "target", TARGET)
    run = make_run(tmp_path / "run", msa=WEAK)
    found = compare([tmp_path / "scores", tmp_path / "target/report.json", run / "evaluation/unlearned"])
    assert labels(found) == ["Target", "Ideal", "MSA", "scores"]
    assert found.rows[3].section == "others"
    assert labels(compare(f"{tmp_path}/scores")) == ["Ideal", "scores"]
    assert labels(compare([run, run, run / "evaluation"])) == ["Target", "Ideal", "MSA"]


def test_labels_of_the_user_stand_as_given_and_can_say_what_a_model_is(tmp_path: Path) -> None:
    put(tmp_path / "a", TARGET)
    put(tmp_path / "b", IDEAL)
    put(tmp_path / "x=y", WEAK)
    run = make_run(tmp_path / "run", msa=GOOD, npo=WEAK)
    found = compare([f"Target={tmp_path}/a", f"ideal={tmp_path}/b", f"my  own={run}/evaluation/unlearned"])
    assert labels(found) == ["Target", "Ideal", "my own"]
    assert labels(compare([f"ours={run}"])) == ["Target", "Ideal", "ours", "NPO"]
    assert labels(compare([tmp_path / "x=y"])) == ["x=y"]
    assert labels(compare([run / "evaluation", f"ours={run}"])) == ["Target", "Ideal", "ours", "NPO"]
    with pytest.raises(UsageError, match="has two labels, 'ours' and 'mine'"):
        compare([f"ours={run}", f"mine={run}"])
    with pytest.raises(UsageError, match="the label 'Ideal' is for the ideal, but the report is of an unlearned model"):
        compare([f"Ideal={run}"])


def made_with(strength: float, name: str = "msa", **more: Any) -> dict[str, Any]:
    """The settings of a report whose method has a filter of this strength."""
    method = made_by(name)["method"]
    return {"method": method | {"parameters": {"alpha": 1.0, "filter": strength}, **more}}


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        ([made_by("msa", "lora"), made_by("msa", "full")], ["MSA (run0)", "MSA (run1)"]),
        ([made_by("npo", "lora"), made_by("rmu", "lora"), made_by("mine", "full")], ["NPO", "RMU", "mine"]),
        (
            [made_by("msa", "lora", "prior"), made_by("npo", "lora"), made_by("npo", "lora", "prior"),
             made_by("npo", "full", "prior")],
            ["MSA", "NPO", "NPO (prior) (run2)", "NPO (prior) (run3)"],
        ),
        (
            [made_with(0.0), made_with(4.0, hold=1.0), made_with(0.0, later=True), made_with(1.0, "task_vector")],
            ["MSA", "MSA (held, filtered)", "MSA (from θ_2)", "Task Vector (filtered)"],
        ),
    ],
)  # fmt: skip
def test_labels_that_would_be_alike_are_told_apart_and_tell_what_the_paper_does_not_have(
    made: list[dict[str, Any]], wanted: list[str], tmp_path: Path
) -> None:
    for i, about in enumerate(made):
        put(tmp_path / f"run{i}/evaluation/unlearned", GOOD, **about)
    assert labels(compare(sorted(tmp_path.iterdir()))) == wanted


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for folder in ("a/run", "b/run"):
        put(tmp_path / folder, GOOD)
    found = labels(compare([tmp_path / "a/run", tmp_path / "b/run"]))
    assert found == [f"run ({tmp_path}/{folder}/report.json)" for folder in ("a/run", "b/run")]
    mixed = labels(compare([f"run={tmp_path}/a/run", tmp_path / "b/run"]))
    assert mixed == ["run", f"run ({tmp_path}/b/run/report.json)"]


def test_target_and_ideal_of_several_runs_are_one_row_with_all_their_values(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", msa=GOOD, ideal=IDEAL | {"acc_forget": None})
    second = make_run(tmp_path / "b", msa=WEAK, ideal=IDEAL | {"model_utility": None})
    found = compare([first, second])
    assert labels(found) == ["Target", "Ideal", "MSA (a)", "MSA (b)"]
    assert shown(found, "acc_forget")[1] == "0.980"
    assert shown(found, "model_utility")[1] == "0.600"


def test_a_model_that_was_scored_twice_is_one_row_with_the_first_values(tmp_path: Path) -> None:
    """Another device, or other batches, make other sums; older reports do not say which model they are of."""
    one, other = {"model": {"revision": "sha256:1"}}, {"model": {"revision": "sha256:2"}}
    for name, value, which in (
        ("a", 0.57, one), ("b", 0.571, one), ("c", 0.571, other), ("old", 0.57, {}), ("older", 0.571, {}),
    ):  # fmt: skip
        put(tmp_path / name / "evaluation/target", TARGET | {"model_utility": value}, **which)
        put(tmp_path / name / "evaluation/unlearned", GOOD, **made_by("msa"))
    for names, value in (("ab", "0.570"), ("ba", "0.571"), (("a", "old"), "0.570"), (("c", "older"), "0.571")):
        found = compare([tmp_path / name for name in names])
        assert labels(found) == ["Target", *(f"MSA ({name})" for name in names)]
        assert shown(found, "model_utility")[0] == value
    for names in ("ac", ("a", "older"), ("old", "older")):
        with pytest.raises(MismatchError, match=r"model_utility \(0\.57, 0\.571\)"):
            compare([tmp_path / name for name in names])


def test_what_is_missing_or_broken_is_all_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    metric = '{"a": {"value": "x", "n": 1, "stderr": null, "higher_is_better": true}}'
    contents = ["{", "[]", '{"metrics": []}', f'{{"benchmark": "qa", "split": "all", "metrics": {metric}}}']
    contents += ['{"benchmark": "qa", "split": "all", "metrics": {}, "settings": null}']
    broken = [tmp_path / f"broken{at}" for at in range(len(contents))]
    for folder, content in zip(broken, contents, strict=True):
        folder.mkdir()
        (folder / "report.json").write_text(content)
    put(tmp_path / "only/evaluation/target", TARGET)
    put(tmp_path / "fine", GOOD)
    given = ["nowhere", "empty", *(folder.name for folder in broken), "A=only", "B=fine", "B=fine", "=fine"]
    with pytest.raises(UsageError) as told:
        compare([text.replace("=", f"={tmp_path}/") if "=" in text else tmp_path / text for text in given])
    text = str(told.value)
    assert "nowhere: no such file or folder" in text
    assert "empty: no report in it" in text
    assert all(f"{folder}/report.json: not a report of msa-lite" in text for folder in broken)
    assert "the label 'A' names an unlearned model" in text
    assert "the label 'B' is taken" in text
    assert "the label '' is empty" in text
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([])


def test_what_is_not_a_finite_number_is_missing_for_that_reason(tmp_path: Path) -> None:
    put(tmp_path / "a", GOOD | {"acc_forget": float("nan"), "model_utility": float("inf")})
    put(tmp_path / "b", WEAK | {"acc_forget": float("nan")})
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert shown(found, "model_utility") == ["–", "0.600 100.0%*"]
    assert "Acc forget (judge) left out: not a finite number but nan" in found.notes
    assert "model utility: not a finite number but inf (a)" in found.notes
    assert "NaN" not in json.dumps(json_form(found))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"benchmark": "qa"}, "benchmark qa, not tofu"),
        ({"split": "forget05"}, "split 'forget05', not 'forget10'"),
        ({"prompt": {"kind": "chat"}, "compat": ["es_floor"]}, "other prompt, other compat"),
        (
            {"sets": {"forget": {"rows": 3}, "holdout": {"rows": 9}}},
            "other rows of forget; score both on the same data, with the same limit and seeds",
        ),
    ],
)
def test_reports_of_other_questions_cannot_stand_side_by_side(other: dict[str, Any], told: str, tmp_path: Path) -> None:
    for name, options in {"a": {}, "b": {}, "c": other, "d": other}.items():
        put(tmp_path / name, GOOD, **({"sets": {"forget": {"rows": 4}, "retain": {"rows": 9}}} | options))
    with pytest.raises(MismatchError) as error:
        compare(sorted(tmp_path.iterdir()))
    lines = str(error.value).splitlines()
    assert f"a ({tmp_path}/a/report.json), with which the others are compared" in lines[1]
    assert [line.strip() for line in lines[2:]] == [f"{name} ({tmp_path}/{name}/report.json): {told}" for name in "cd"]


def test_a_whole_split_and_its_test_part_are_told_apart(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", msa=GOOD)
    several = make_run(tmp_path / "several", msa=GOOD, options={"split": "forget10 test"})
    with pytest.raises(MismatchError, match="rows 'forget10 test', not 'forget10': one of the two chose"):
        compare([one, several])
    assert "scores are on the test part of forget10" in " ".join(compare([several]).notes)


def test_other_judges_are_a_note_and_no_fault(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", msa=GOOD, options={"judge": JUDGE})
    second = make_run(
        tmp_path / "b", msa=WEAK, target=TARGET | {"acc_forget": 0.5}, options={"judge": JUDGE | {"model": "other"}}
    )
    (note,) = [note for note in compare([first, second]).notes if "judge" in note and "differ" in note]
    assert "gpt-4o (openai), prompts 0123 (Target, Ideal, MSA (a))" in note
    assert "other (openai), prompts 0123 (MSA (b))" in note
    assert "judge gpt-4o (openai), prompts 0123" in compare([first]).notes


def test_metrics_can_be_chosen_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", GOOD | {"truth_ratio_f": 0.5, "min_k": None})
    found = compare([tmp_path / "a"], metrics=["truth_ratio_f", "model_utility", "truth_ratio_f"])
    assert [column.name for column in found.columns] == ["truth_ratio_f", "model_utility"]
    with pytest.raises(UsageError, match=r"'model_utilty' \(did you mean 'model_utility'\?\), 'x'; choose from acc_f"):
        compare([tmp_path / "a"], metrics=["model_utilty", "x"])
    with pytest.raises(UsageError, match="no report has a value of min_k"):
        compare([tmp_path / "a"], metrics=["min_k"])


def test_a_benchmark_without_a_table_in_the_paper_has_all_its_metrics(tmp_path: Path) -> None:
    put(tmp_path / "a", {"own_score": 0.5, "own_score_r": 0.6}, benchmark="my-own", split="all")
    columns = compare([tmp_path / "a"]).columns
    assert [column.heading for column in columns] == ["own score ↑", "own score, retain set ↑"]
    scores = {"rouge_l_h": 0.5, "rouge_l_r": 0.6, "extraction_strength": 0.7, "rouge_l_f": 0.8, "probability_f": 0.1}
    put(tmp_path / "b", scores, benchmark="qa", split="all")
    found = compare([tmp_path / "b"])
    assert [column.heading for column in found.columns] == [
        "ROUGE-L recall, forget set ↓", "extraction strength ↓", "ROUGE-L recall, retain set ↑",
        "ROUGE-L recall, holdout set",
    ]  # fmt: skip
    assert shown(found, "rouge_l_h") == ["0.500"]  # no direction: neither a ratio nor a best one


def test_privleak_is_best_at_zero_and_has_no_ratio(tmp_path: Path) -> None:
    for name, value in {"ideal": 0.0, "a": -3.0, "b": 20.0, "c": 3.0}.items():
        put(tmp_path / name, {"privleak": value}, benchmark="muse", split="books")
    found = compare(sorted(tmp_path.iterdir()))
    assert found.columns[0].heading == "PrivLeak in % → 0"
    assert shown(found, "privleak") == ["0.000", "-3.000*", "20.000", "3.000*"]


def test_notes_say_the_rule_over_unlearning_and_a_missing_ideal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", msa=GOOD | {"extraction_strength": 0.01}, npo=WEAK)
    assert "over-unlearning" in " ".join(compare([run]).notes)
    assert "over-unlearning" not in " ".join(compare([make_run(tmp_path / "b", msa=GOOD)]).notes)
    put(tmp_path / "c", GOOD, compat=["es_floor"])
    assert "scored with compat es_floor" in compare([tmp_path / "c"]).notes
    assert "no ideal among the reports" in " ".join(compare([run / "evaluation/unlearned"]).notes)


def test_a_single_run_has_no_ratios_and_no_best_method(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", msa=GOOD | {"extraction_strength": 0.01})
    found = compare([run])
    assert [row.role for row in found.rows] == ["target", "ideal", "method"]
    assert not any(cell.ratio or cell.best for row in found.rows for cell in row.cells.values())
    for text in (FORMATS["md"](found), FORMATS["tex"](found), " ".join(found.notes)):
        assert "ratio" not in text


def test_baselines_that_are_not_scored_yet_are_left_out_with_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", msa=GOOD, npo=WEAK)
    for name in ("rmu/adapter", "satimp.partial/evaluation", "undial/evaluation/unlearned.partial"):
        (run / "baselines" / name).mkdir(parents=True)
    found = compare([run])
    assert labels(found) == ["Target", "Ideal", "MSA", "NPO"]
    late = [note.partition(":")[0] for note in found.notes if note.endswith("no unlearned model is scored yet")]
    assert late == [f"{run}/baselines/rmu", f"{run}/baselines/undial"]


def test_published_figures_are_a_part_of_their_own_with_the_papers_ratios(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", msa=GOOD, npo=WEAK, options={"split": "forget10 test"})
    found = compare([run], published="tofu-forget10-llama-3.1-8b")
    assert [row.section for row in found.rows] == [*["references"] * 2, "msa", "baselines", *["published"] * 10]
    assert labels(found)[4:7] == ["Target", "Ideal", "MSA (base)"]
    at = labels(found).index("MSA (base)")
    assert shown(found, "extraction_strength")[2] == "0.070 +100%*"  # ours are held against our ideal
    assert shown(found, "extraction_strength")[at] == "0.07 89.1%"  # of values with more decimals than are printed
    assert shown(found, "model_utility")[at] == "0.78 +100%*"
    assert shown(found, "acc_recover")[:4] == ["–"] * 4
    assert found.rows[at].cells["acc_recover"].n is None


def test_published_figures_can_stand_alone_and_ratios_that_a_paper_leaves_out_are_worked_out() -> None:
    found = compare(published="restor-llama-3.1-8b")
    # None reaches 64.80: to the best, 63.95; 59.40 / 63.95 = 92.9 %.
    assert shown(found, "accuracy")[:4] == ["0.4431", "0.6480", "0.5940 92.9%", "0.6395 100.0%*"]


def test_a_published_table_has_to_be_of_the_same_benchmark_and_split(tmp_path: Path) -> None:
    put(tmp_path / "a", GOOD)
    put(tmp_path / "b", {"accuracy": 0.5}, benchmark="restor", split="a3")
    with pytest.raises(MismatchError, match="its benchmark is muse, that of the reports is tofu"):
        compare([tmp_path / "a"], published="muse-books-olmo-2-7b")
    with pytest.raises(MismatchError, match="its split is forget05, that of the reports is forget10"):
        compare([tmp_path / "a"], published="tofu-forget05-llama-3.2-1b")
    assert len(compare([tmp_path / "b"], published="restor-olmo-2-7b").rows) == 13  # whose documents it does not say


def test_the_whole_comparison_is_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", msa=GOOD, npo=WEAK)
    found = json.loads(json.dumps(json_form(compare([run]))))
    assert (found["benchmark"], found["split"]) == ("tofu", "forget10")
    assert found["columns"][1]["higher_is_better"] is False
    npo = found["rows"][3]
    assert (npo["model"], npo["section"], npo["method"]["name"]) == ("NPO", "baselines", "npo")
    assert npo["metrics"]["extraction_strength"] == {
        "value": 0.28, "stderr": 0.01, "n": 40, "ratio": 0.25, "reaches_ideal": False, "best": False,
    }  # fmt: skip
    assert found["rows"][0]["metrics"]["acc_forget"]["reaches_ideal"] is None


# The figures of the paper's tables: whole, as printed, and named by their source.


TABLES = published_tables()


def test_a_table_names_its_benchmark_its_split_and_its_source() -> None:
    for name in TABLES:
        table = load_published(name)
        assert name.startswith(table.benchmark)
        assert table.split is None or table.split in name
        assert re.search(r"arXiv 2506\.20941\), table tab:\S+$", table.source)
        assert all(figure.metric.value is not None for row in table.rows.values() for figure in row.values())


def test_an_unknown_table_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UsageError, match="did you mean 'restor-olmo-2-7b'") as told:
        load_published("restor-OLMo2-7b")
    assert all(name in str(told.value) for name in TABLES)


def test_every_figure_is_the_one_that_was_compared_with_the_papers_source() -> None:
    """All numbers of each table were compared with the LaTeX of arXiv 2506.20941. Compare them again on a change."""
    figures = [
        f"{name}, {model}, {metric}: {figure.printed} {figure.ratio or ''}"
        for name in TABLES
        for model, row in load_published(name).rows.items()
        for metric, figure in row.items()
    ]
    digest = hashlib.sha256("\n".join(figures).encode()).hexdigest()
    assert digest == "8eed3d0e504f2b7d7dec2e2d09cc9c9b61a30b48083d4e7f34418647e9911c47"


SEEDS = {0: 0.20, 1: 0.26, 2: 0.35}
"""The extraction strength of MSA by seed."""


def seed_run(folder: Path, seed: int, strength: float, data: str = "rows", **changes: Any) -> Path:
    """A run of a recipe with this seed, whose model and target lie in its output.

    changes: keys of the recipe; also "asked" (the rows; default: others with each seed) and the revisions of the
    recipe's target and of all models in reports ("pinned", "model"; default: others with each run).
    """
    asked, pinned, model = (changes.pop(key, folder.name) for key in ("asked", "pinned", "model"))
    run = make_run(folder, msa={**GOOD, "extraction_strength": strength}, npo=WEAK)
    values = {"target": f"{folder}/target", "prior": None, "seed": seed, "output": f"{folder}/"} | changes
    for place in (run, run / "baselines/npo"):
        command = "msa-lite" if place == run else "msa-lite baseline npo"
        first = f"# A run of msa-lite: the recipe as resolved. `{command}` on this file repeats the run.\n"
        (place / "recipe.yaml").write_text(f"{first}# target: sha256:{pinned}\n{json.dumps(values)}")
        put_stages(place, data=data)
        for path in place.glob("evaluation/*/report.json"):
            report = json.loads(path.read_text())
            report["settings"] |= {"sets": {"forget": {"rows": 40, "sha256": asked}}, "model": {"revision": model}}
            path.write_text(json.dumps(report))
    return run


def test_seeds_of_one_recipe_are_one_row_of_mean_and_standard_error(tmp_path: Path) -> None:
    runs = [seed_run(tmp_path / f"s{seed}", seed, value) for seed, value in SEEDS.items()]
    found = compare(runs)
    assert labels(found) == ["Target, 3 seeds", "Ideal, 3 seeds", "MSA, 3 seeds", "NPO, 3 seeds"]
    values = np.array([*SEEDS.values()])
    cell = found.rows[2].cells["extraction_strength"]
    assert (cell.value, cell.stderr, cell.n) == (
        pytest.approx(values.mean()),
        pytest.approx(values.std(ddof=1) / 3**0.5),
        3,
    )
    assert (cell.best, found.rows[3].cells["extraction_strength"].stderr) == (True, 0.0)
    assert any(note.startswith("rows of several seeds (0, 1, 2): mean ± its standard error") for note in found.notes)
    row = json_form(found)["rows"][2]
    assert {seed: one["metrics"]["extraction_strength"]["value"] for seed, one in row["seeds"].items()} == {
        str(seed): value for seed, value in SEEDS.items()
    }
    texts = {"md": "| **0.270** ± 0.044", "tex": r"\textbf{0.270} $\pm$ 0.044", "html": "<b>0.270</b> <small>± 0.044"}
    assert [name for name, text in texts.items() if text not in FORMATS[name](found)] == []
    assert "MSA, 3 seeds" in FORMATS["csv"](found)
    assert [row.seeds for row in compare(runs[0]).rows] == [{}] * 4
    shutil.rmtree(runs[2] / "baselines")
    with pytest.raises(
        MismatchError, match=r"NPO, 2 seeds .*: other rows(.|\n)*only with seed 0, 1; seeds here: 0, 1, 2"
    ):
        compare(runs)


@pytest.mark.parametrize(
    ("both", "other", "why"),
    [
        ({}, {}, None), ({}, {"seed": 0}, "a seed stands twice"), ({}, {"forget": {"alpha": 2.0}}, ""),
        ({}, {"target": "models/target"}, ""), ({"target": "models/target"}, {}, "other target"),
        ({"target": "models/target", "pinned": "t"}, {}, None),
        ({"model": "entered"}, {}, "MSA is the same model twice"),
        ({}, {"data": "others"}, "other data"), ({"data": ""}, {}, "other data"), ({"label": True}, {}, ""),
    ],
)  # fmt: skip
def test_runs_that_differ_in_more_than_their_seed_are_not_joined(
    both: dict[str, Any], other: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    options = {key: value for key, value in both.items() if key != "label"} | {"asked": "the same", "strength": 0.2}
    paths: list[Any] = [
        seed_run(tmp_path / "a", **{"seed": 0} | options),
        seed_run(tmp_path / "b", **{"seed": 1} | options | other),
    ]
    names = ["one", "two"] if "label" in both else ["MSA (a)", "MSA (b)"]
    found = compare([f"{name}={path}" for name, path in zip(names, paths, strict=True)] if "label" in both else paths)
    assert [row.label for row in found.rows if row.section == "msa"] == (["MSA, 2 seeds"] if why is None else names)
    reasons = [note.partition("): ")[2] for note in found.notes if note.startswith("not joined (")]
    assert reasons[:1] == [why] * bool(why)


def test_rows_of_several_seeds_are_told_apart_and_a_refusal_says_why_runs_are_not_joined(tmp_path: Path) -> None:
    for recipe, alpha in {"s": 1.0, "t": 2.0}.items():
        for seed in (0, 1):
            seed_run(tmp_path / f"{recipe}{seed}", seed, 0.2, forget={"alpha": alpha}, asked=f"rows of {seed}")
    found = labels(compare(sorted(tmp_path.iterdir())))
    assert found[2:4] == ["MSA, 2 seeds (s0, s1)", "MSA, 2 seeds (t0, t1)"]
    seed_run(tmp_path / "u1", 1, 0.2, "other rows", forget={"alpha": 1.0})
    with pytest.raises(MismatchError, match=r"other rows of forget(.|\n)*not joined \(seeds 0, 1\): other data"):
        compare([tmp_path / "s0", tmp_path / "u1"])


def test_a_mean_needs_a_value_with_each_seed(tmp_path: Path) -> None:
    runs = [seed_run(tmp_path / f"s{seed}", seed, value) for seed, value in SEEDS.items()]
    path = runs[1] / "evaluation/unlearned/report.json"
    report = json.loads(path.read_text())
    report["metrics"]["model_utility"]["value"] = None
    path.write_text(json.dumps(report))
    found = compare(runs)
    assert found.rows[2].cells["model_utility"].value is None
    assert any("no value with seed 1" in note for note in found.notes)
