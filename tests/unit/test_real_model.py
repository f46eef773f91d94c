"""The page of results of examples/real_model: claims flip with the numbers, and what is missing or failed is named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import measures
import pytest
import run
from claims import answer_claims
from collect import Point, Scores, collect
from experiments import EXPERIMENTS, FULL, SIZES, Experiment
from history import CHARACTERS, STAGES, Models, training_recipes, write_data
from plan import State, fix_plan
from recipe_files import recipe_of, run_folder
from results import write_results
from rules import NO, PARTLY, UNCLEAR, YES, further, matches

from msa_lite.baselines.methods import check_method
from msa_lite.data import DataSource
from msa_lite.errors import MismatchError, UsageError
from msa_lite.recipe import load_recipe, load_training
from tests.support.benchmark_data import write_tofu
from tests.support.real_model import GOOD, GROUPS, IDEAL, TARGET, Folder

ROOT = Path(__file__).parents[2]


def answers(out: Path, **changes: object) -> dict[str, str]:
    """Return the answer to each claim of a folder that is made with these changes."""
    folder = Folder(out, **{"seeds": (0, 1), **changes}).write()
    return {claim.number: claim.answer for claim in answer_claims(collect(folder))}


def test_every_claim_holds_in_a_folder_where_all_scores_say_so(tmp_path: Path) -> None:
    assert set(answers(tmp_path).values()) == {YES}


@pytest.mark.parametrize(
    ("number", "answer", "scores"),
    [
        ("1b", NO, {"rmu": IDEAL}),
        ("2", NO, {"text-after": (0.32, 0.84), "text-before": (0.8, 0.84)}),
        ("3", NO, {"task_vector": IDEAL, "task_vector-full": IDEAL}),
        ("4", NO, {"prior-text-a": (0.31, 0.5), "prior-base": (0.31, 0.5), "msa-lora": (0.9, 0.3)}),
        ("5", NO, {"again-before": (0.9, 0.84)}),
        ("6", NO, dict.fromkeys(GROUPS["checkpoints"], IDEAL)),
        ("8", NO, {"qlora": (0.5, 0.7)}),
        ("9", NO, {"bf16": (0.9, 0.9)}),
        ("1b", PARTLY, {"msa-lora": (0.3, 0.8)}),  # nearest, and keeps less than 90 %
        ("4", PARTLY, {"prior-base": (0.8, 0.8)}),  # worse, and does not work
        ("6", PARTLY, {"npo-prior": IDEAL}),
        ("7", PARTLY, {"msa-lora": (0.5, 0.7)}),  # other ranks match
    ],
)
def test_a_claim_turns_when_the_numbers_turn(
    number: str, answer: str, scores: dict[str, tuple[float, float]], tmp_path: Path
) -> None:
    assert answers(tmp_path, scores=GOOD | scores)[number] == answer


def test_the_interval_over_seeds_is_students() -> None:
    def points(*forget: float) -> dict[int, Point]:
        names = [*measures.FORGET, *measures.RETAIN]
        ideal = Scores(dict.fromkeys(names, 0.0))
        return {seed: Point(Scores(dict.fromkeys(names, value)), ideal, ideal) for seed, value in enumerate(forget)}

    difference = measures.paired("a − b", points(0.11, 0.12, 0.13), points(0.1, 0.1, 0.1))
    half = 4.302652729 * 0.01 / 3**0.5  # t of 2 degrees of freedom, standard deviation 0.01
    assert difference.mean == pytest.approx(0.02)
    assert (difference.low, difference.high) == pytest.approx((0.02 - half, 0.02 + half))
    assert further(difference) == PARTLY
    assert further(difference.turned()) == UNCLEAR, "the interval holds 0"
    assert matches(difference) == PARTLY
    wide = measures.paired("a − b", points(0.2, 0.1, 0.3), points(0.1, 0.1, 0.1))
    assert matches(wide) == UNCLEAR
    assert matches(wide.turned()) == PARTLY


def test_distances_are_those_of_the_definition(tmp_path: Path) -> None:
    run = collect(Folder(tmp_path, seeds=(0,), scores={"msa-lora": (0.2, 0.7)}).write()).seeds[0].runs["msa-lora"]
    assert measures.measure(run, "forget_distance") == pytest.approx(0.1)
    assert measures.measure(run, "forget_side") == pytest.approx(-0.1)
    assert measures.measure(run, "retain_distance") == pytest.approx(0.15)
    assert measures.measure(run, "distance") == pytest.approx(0.125)
    assert measures.measure(run, "kept") == pytest.approx(0.7 / 0.9)
    assert measures.measure(measures.reference(run, "target"), "forget_side") == pytest.approx(TARGET[0] - IDEAL[0])


def test_the_page_names_what_failed_what_lacks_and_what_is_of_another_commit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    scores = {name: of for name, of in GOOD.items() if name != "simnpo"}
    errors = {"rmu": f"no layer 40, see {out}/rmu.yaml"}
    Folder(out, scores=scores, errors=errors, commits={"npo": "cccc2222", "satimp": "aaaa1111+"}).write()
    (out / "seed-0/runs/undial/report.json").write_text("{")
    (out / "seed-1/runs/bf16/report.json").unlink()
    (out / "seed-2/state.json").unlink()
    page = write_results(out, tmp_path / "page").read_text()
    missing = page.partition("## Failures")[2].partition("\n## ")[0]
    assert "seed 0: no run yet of simnpo" in missing
    assert "seed 0, rmu: failed: no layer 40, see OUT/rmu.yaml" in missing
    assert "seed 0, undial:" in missing
    assert "seed 1, bf16:" in missing
    assert "seed 2: not begun" in missing
    assert "NPO † (2 of 3 seeds)" in page
    assert "cccc2222: seed 0 npo, seed 1 npo" in page
    assert re.search(r"aaaa1111\\?\+: seed 0 satimp", page), "files were changed since that commit"
    assert "missing: simnpo, rmu |" in page
    assert "| **yes so far** |" in page
    assert str(tmp_path) not in page
    assert "Under attack" not in page
    assert "## The verdicts, then and now" not in page, "without rows there are none"


def test_the_page_is_made_of_the_scores_that_are_kept(tmp_path: Path) -> None:
    kept, published = ROOT / "examples/real_model/scores", ROOT / "examples/real_model/RESULTS.md"
    shutil.copytree(kept, tmp_path / "scores")
    page = write_results(kept, tmp_path)
    assert page.read_text("utf-8") == published.read_text("utf-8")
    assert [file.name for file in sorted((page.parent / "figures").iterdir())] == [
        file.name for file in sorted((published.parent / "figures").iterdir())
    ]


# The data and the recipes of examples/real_model.


SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """The models of a seed, of which only msa-lora's run is there."""
    found = Models(tmp_path / "seed-0", "base-model")
    (found.folder / "data").mkdir(parents=True)
    for name in ("forget", "retain", "learnt", "holdout"):
        lines = [json.dumps({"question": f"{name} {i}?", "answer": "yes"}) for i in range(6)]
        Path(found.data(name)).write_text("".join(f"{line}\n" for line in lines))
    write_first_run(found)
    return found


def write_first_run(models: Models) -> None:
    """Write what other recipes read of msa-lora's run."""
    folder = run_folder(models, EXPERIMENTS[0])
    (folder / "evaluation/target").mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"strengths": {"alpha": 0.71, "beta": 0.36}}))
    for name in ("forget", "retain"):
        (folder / f"evaluation/target/{name}.jsonl").write_text('{"index": 1}\n{"index": 4}\n')


def load(experiment: Experiment, models: Models) -> Any:
    """The recipe of an experiment, as the tool reads it."""
    return load_recipe(recipe_of(experiment, models, 3, "bf16"))


@pytest.mark.parametrize("name", NAMES)
def test_each_experiment_has_a_recipe_that_the_tool_takes(name: str, models: Models) -> None:
    experiment = NAMES[name]
    recipe = load(experiment, models)
    assert (recipe.seed, recipe.vector.compute) == (3, "bf16")
    assert recipe.target == models.target(experiment.target)
    assert recipe.prior == models.target(experiment.prior)
    if experiment.method == "msa":
        assert recipe.folder == run_folder(models, experiment)
    else:  # the tool puts them below the run whose scores of target and ideal they share
        check_method(experiment.method)
        prior = recipe.baseline.start == "prior"
        assert run_folder(models, experiment) == recipe.folder / "baselines" / (
            f"{experiment.method}-prior" if prior else experiment.method
        )


def test_the_ideal_has_the_targets_history_without_the_forget_rows(models: Models) -> None:
    recipes = {name: load_training(recipe) for name, recipe in training_recipes(models, SMALL, "auto", 1).items()}
    stages = {name: [stage.name for stage in recipe.stages] for name, recipe in recipes.items()}
    assert stages == {"target": [*STAGES], "ideal": ["tofu", "text-c", "tofu-again"]}
    assert recipes["ideal"].model == models.target("text-b")
    for name, forgets in (("target", True), ("ideal", False)):
        learnt = {data.path for stage in recipes[name].stages for data in stage.sets}
        assert (models.data("forget") in learnt) is forgets
        assert models.data("learnt") in learnt
        assert {models.data("retain"), models.data("holdout")} & learnt == set()


def tofu_folder(folder: Path) -> str:
    """A data set of TOFU's shape: 30 authors with 20 questions each, and one, two or five more to forget."""
    rows, gone = (
        [{"question": f"{author}: {i}?", "answer": "x"} for author in authors for i in range(20)]
        for authors in (range(30), [f"gone {number}" for number in range(5)])
    )
    return write_tofu(folder, {"retain90": rows, "forget01": gone[-20:], "forget05": gone[-40:], "forget10": gone})


def write_text(file: Path, letters: int) -> DataSource:
    """A text of so many letters."""
    file.write_text("".join(json.dumps({"text": "words " * (letters // 12)}) + "\n" for _ in range(2)))
    return DataSource(str(file), "text")


def questions(models: Models, name: str) -> list[str]:
    """The questions of a group."""
    return [json.loads(line)["question"] for line in Path(models.data(name)).read_text().splitlines()]


def test_a_seed_draws_its_authors_and_nobody_learns_the_holdout_rows(tmp_path: Path) -> None:
    size = replace(SMALL, text_tokens=50)
    text = write_text(tmp_path / "text.jsonl", 3 * 50 * CHARACTERS + 100)
    drawn = {}
    for seed in (0, 1):
        models = Models(tmp_path / f"seed-{seed}", "base")
        write_data(models, size, tofu_folder(tmp_path / f"tofu-{seed}"), text, seed)
        learnt, retain = questions(models, "learnt"), questions(models, "retain")
        holdout, forget = questions(models, "holdout"), questions(models, "forget")
        assert (len(learnt), len(retain), len(holdout), len(forget)) == (200, 60, 20, 20)
        assert {*retain} <= {*learnt}
        assert not {*holdout} & {*learnt}
        assert len({question.partition(":")[0] for question in learnt}) == 10
        assert {int(question.partition(":")[0]) for question in learnt + holdout} <= {*range(20)}
        drawn[seed] = learnt
    assert drawn[0] != drawn[1]


# The runs of examples/real_model: what is fixed before them, what a stop or a fault leaves, its command.


SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


def test_the_plan_is_fixed_once_and_may_only_grow(tmp_path: Path) -> None:
    fix_plan(tmp_path, "small", SMALL, [0], EXPERIMENTS[:2], "a model")
    first = json.loads((tmp_path / "plan.json").read_text())
    fix_plan(tmp_path, "small", SMALL, [1], EXPERIMENTS[:3], "a model")
    second = json.loads((tmp_path / "plan.json").read_text())
    assert (first["seeds"], second["seeds"]) == ([0], [0, 1])
    assert second["experiments"][:2] == first["experiments"]
    assert [entry["name"] for entry in second["experiments"]] == [one.name for one in EXPERIMENTS[:3]]
    changed = [replace(EXPERIMENTS[0], overrides=FULL), *EXPERIMENTS[1:3]]
    with pytest.raises(UsageError, match=r"msa-lora(.|\n)*") as fault:
        fix_plan(tmp_path, "small", replace(SMALL, epochs=9), [0], changed, "a model")
    assert "size small" in str(fault.value)
    assert json.loads((tmp_path / "plan.json").read_text()) == second


@pytest.mark.parametrize(
    ("fault", "note"),
    [(MismatchError("they do not fit"), "they do not fit"), (ValueError("a bug"), "ValueError: a bug")],
)
def test_a_fault_is_noted_and_tried_again_and_a_done_experiment_is_not(
    fault: Exception, note: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 0\n")
    with State(tmp_path / "state.json", "c0ffee").timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        raise fault
    state = State(tmp_path / "state.json", "c0ffee")
    entry = json.loads((tmp_path / "state.json").read_text())["experiments"]["a"]
    assert (entry["error"], entry["folder"], entry["commit"]) == (note, "runs/a", "c0ffee")
    assert not state.is_done("a", recipe)
    with state.timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        pass
    assert State(tmp_path / "state.json", "c0ffee").is_done("a", recipe)
    recipe.write_text("seed: 1\n")
    assert not state.is_done("a", recipe), "another recipe is another experiment"


def test_a_new_run_shares_only_what_is_the_same(tmp_path: Path) -> None:
    first = tmp_path / "runs/msa-lora"
    for name in ("evaluation/target", "evaluation/prior", "evaluation/unlearned", "vectors/forget", "sweep"):
        (first / name).mkdir(parents=True)
        (first / name / "manifest.json").write_text("{}")
    (first / "recipe.yaml").write_text("# A run of msa-lite\n")

    def shared(name: str) -> set[str]:
        folder = tmp_path / "runs" / name
        run.share(first, folder, NAMES[name])
        found = {str(file.parent.relative_to(folder)) for file in folder.rglob("manifest.json")}
        run.share(first, folder, NAMES[name])  # what is there stays
        return found

    assert shared("lora-r8") == {"evaluation/target", "evaluation/prior"}
    assert shared("bf16") == {"evaluation/target", "evaluation/prior", "vectors/forget"}
    assert shared("prior-base") == {"evaluation/target"}
    assert shared("text-before") == set()
