"""Every option of a recipe that decides a stage's result is part of what the stage is known by.

The options are read from the schema, so that a new one has to be put here, with another value and a stage that it
decides, or among those that decide nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.judge.base import describe_judge
from msa_lite.evals.scores.evaluation import NO_JUDGE, ideal_identity
from msa_lite.io.console.progress import silent
from msa_lite.io.files.writing import canonical_json
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Precision, Term
from msa_lite.pipeline.baseline import trials
from msa_lite.pipeline.prepare.earlier import earlier_terms
from msa_lite.pipeline.prepare.run import Context, msa_scope, prepare
from msa_lite.pipeline.run import choice as choosing
from msa_lite.pipeline.run import merge as merging
from msa_lite.pipeline.run import scores as scoring
from msa_lite.pipeline.run import vectors
from msa_lite.pipeline.run.msa import msa_stages
from msa_lite.pipeline.staged import training
from msa_lite.pipeline.staged.training import train_stages
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.pipeline.verbs.run import run_baseline
from msa_lite.recipe import Recipe, TrainingRecipe, load_recipe
from msa_lite.recipe.outputs import Publish
from msa_lite.recipe.training import Baseline, Training, TrainingStage
from msa_lite.report import Report, write_report
from msa_lite.train import VectorFit
from msa_lite.train.fit import tracking
from tests.support.identity import (
    DATA,
    OF_TEXT,
    UNSAID,
    Stop,
    base,
    changed,
    fill,
    leaves,
    rows_of,
    tables_once,
    write_place,
)

__all__ = ["tables_once"]  # a fixture
FITS = ("forget", "retain")


@pytest.fixture(scope="module")
def place(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_place(tmp_path_factory.mktemp("recipes"), make_checkpoint)
    template = shutil.copytree(folder / "target", folder / "tokenizer") / "chat_template.jinja"
    template.write_text("{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{% endfor %}")
    return folder


def plain(value: Any) -> Any:
    """A value in JSON: sources by what they are known by."""
    if isinstance(value, Source):
        return value.identity()
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@pytest.fixture
def identify(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """identify(recipe) → what each stage of its run is known by."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    found: dict[str, Any] = {}

    def fit(fit: VectorFit, out: Path, progress: Any) -> None:
        found[out.name] = inputs = fit.inputs()
        found[f"{out.name} rows"] = inputs["examples"]

    def merge(
        target: Source,
        out: Path,
        terms: Any,
        prior: Source,
        *precision: Precision,
        replace: bool,
        progress: Any,
        compare: bool = True,
    ) -> None:
        vectors = {term.name: {"vector": term.vector, "weight": term.weight} for term in terms}
        records = [one.record for one in precision]
        found[out.name] = plain({"target": target, **vectors, "prior": prior, "precision": records})

    def score(source: Source, asked: Any, out: Path, *, ideal: Any = None, judge: Any = NO_JUDGE, **others: Any) -> Any:
        found[f"scores of {out.name}"] = [
            model_identity(source), asked.describe(), ideal_identity(ideal), describe_judge(judge)
        ]  # fmt: skip
        return SimpleNamespace()

    def choose(candidates: Any, validation: Any, *others: Any) -> Any:
        found["sweep"], found["points"] = candidates.inputs(validation), candidates.made_of
        return SimpleNamespace(values={"alpha": 1.0, "beta": 0.5}, doubts=[], candidates=[])

    for module, name, double in (
        (vectors, "run_fit", fit),
        (merging, "merge_terms", merge),
        (merging, "merge_terms_to_adapter", merge),
        (scoring, "evaluate_benchmark", score),
        (choosing, "choose", choose),
    ):
        monkeypatch.setattr(module, name, double)

    def identities(recipe: dict[str, Any]) -> dict[str, str]:
        found.clear()
        resolved = load_recipe(recipe)
        job = prepare(resolved, msa_scope(resolved))
        for name in job.recipe.vector_names:
            vectors.fit_one(job, name, silent)
        for stage in msa_stages(Context.of(job)):
            if stage.kind == "choose":
                stage.run(silent)
        weights = {"forget": -1.0, "retain": 0.5 if resolved.has_choice else resolved.points[0].beta}
        own = [Term(name, place / "prior", weight) for name, weight in weights.items()]
        merging.merge_vectors(job, [*own, *earlier_terms(job.earlier)], silent)
        monkeypatch.setattr(scoring, "fetch", lambda name: fetch(str(place / "target")))
        for name in Context.of(job).scored:
            scoring.score_model(job, name, "test", silent, {"name": "msa"})
        return {name: canonical_json(value) for name, value in found.items()}

    return identities


PLAIN = {"prompt.kind": "plain"}
TOFU = {"evaluate.benchmark": "tofu", "evaluate.split": "forget01", "evaluate.data": "{place}/tofu"}
MUSE = {"evaluate.benchmark": "muse", "evaluate.data": "{place}/both"}
BY_TOFU = TOFU | {"select.score": "tofu", "evaluate.ideal": "{place}/ideal", "evaluate.limit": None}
JUDGED = TOFU | {"evaluate.judge.kind": "openai", "evaluate.judge.base_url": "http://localhost:1/v1"}
HISTORY = {
    "prior": None,
    "history.checkpoints": [
        {"checkpoint": "{place}/prior", "seen_tokens": 10},
        {"checkpoint": "{place}/other", "seen_tokens": 20},
    ],
    "history.exposure": 15,
}
LATER = [{"checkpoint": "{place}/other", "seen_tokens": 12}]
# Option → (another value, the stages that it decides at least, what else the recipe says with both values).
CASES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "target": ("{place}/other", ("model", "points", "sweep", "scores of target"), {}),
    "prior": ("{place}/other", (*FITS, "model", "points", "sweep"), {}),
    "history.checkpoints": (HISTORY["history.checkpoints"][:1] + LATER, FITS, HISTORY),
    "history.exposure": (25, FITS, HISTORY),
    "forget.alpha": ([0.5, 2.0], ("sweep",), {}),
    "retain.beta": ([0.0, 0.7], ("sweep",), {}),
    "retain.data.sample": ("match_forget", ("retain",), {"forget.data.path": "{place}/few.jsonl"}),
    "earlier": (["{place}/first"], ("model", "points", "sweep"), {}),
    # What else a fit is told is in its settings, each of which test_identity and test_settings_reach follow.
    "vector.mode": ("full", FITS, {}),
    "vector.lora.rank": (3, FITS, {}),
    "vector.hold": (0.5, ("forget",), {}),
    "vector.epochs": ("auto", FITS, {}),
    "vector.learning_rate": (1e-3, FITS, {}),
    "retain.vector.epochs": (3, ("retain",), {}),
    "vector.max_length": (60, FITS, {}),
    "vector.optimizer": ("adamw", FITS, {}),
    "vector.compute": ("fp32", FITS, {}),
    **{key: (value, FITS, {}) for key, value in DATA.items() if key.startswith("columns.")},
    "columns.text": ("text2", ("forget",), {"forget.data.format": "text"}),
    "columns.subject": ("answer2", ("sweep", "scores of target"), {}),
    "prompt.kind": ("plain", (*FITS, "sweep", "scores of target"), {}),
    "prompt.system": ("Be kind.", (*FITS, "sweep", "scores of target"), {}),
    "prompt.prompt": ("Q: {question}\nA:", (*FITS, "sweep", "scores of target"), PLAIN),
    "prompt.answer": (" - {answer}", (*FITS, "sweep", "scores of target"), PLAIN),
    "merge.dtype": ("bfloat16", ("model", "points", "sweep"), {}),
    "merge.rounding": ("stochastic", ("model", "points", "sweep"), {}),
    "merge.as": ("adapter", ("model",), {}),
    "merge.filter": (2.0, ("points", "sweep"), {}),
    "evaluate.benchmark": ("tofu", ("scores of target",), MUSE),
    "evaluate.split": ("forget05", ("scores of target",), TOFU),
    "evaluate.data": ("{place}/tofu-2", ("scores of target",), TOFU),
    "evaluate.compat": (["open-unlearning"], ("scores of target",), TOFU),
    "evaluate.ideal": ("{place}/ideal", ("scores of target",), {}),
    "evaluate.limit": (5, ("sweep", "scores of target"), {}),
    "evaluate.max_new_tokens": (7, ("sweep", "scores of target"), {}),
    "evaluate.judge.kind": ("openai", ("scores of target",), TOFU),
    "evaluate.judge.model": ("another", ("scores of target",), JUDGED),
    "evaluate.judge.base_url": ("http://localhost:2/v1", ("scores of target",), JUDGED),
    "evaluate.judge.prompts": ("{place}/prompts.yaml", ("scores of target",), JUDGED),
    "select.validation": (0.5, ("sweep", "scores of target"), {}),
    "select.score": ("tofu-printed", ("sweep",), BY_TOFU),
    "select.keep": (0.5, ("sweep",), {}),
    "verdict.recited": (0.05, ("sweep",), {}),
    "verdict.left": (0.1, ("sweep",), {}),
    "seed": (
        1,
        (*FITS, "retain rows", "points", "sweep", "model", "scores of target"),
        {"merge.rounding": "stochastic", "retain.data.sample": "match_forget", "forget.data.path": "{place}/few.jsonl"},
    ),
}
OTHERS = {
    "output": "a run may be moved",
    "request": "a name for the record",
    "prompt.thinking": "of templates with a block of thoughts alone: test_answer_ends",
    "merge.keep_moments": "files that stay: test_filter_and_evidence",
    "track": "who is told of losses and scores: test_train_stages",
    "evaluate.judge.key_env": "whose account pays",
    "verdict.kept": "what a PASS wants; a choice has select.keep",
    **dict.fromkeys(leaves(Publish, "publish."), "where the model is sent, and what its card says"),
}


# All data sets are read alike: every option of one, and of the others where the rows come from.
SETS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    **{f"forget.data.{key}": (value, ("forget",), {}) for key, value in DATA.items()},
    **{f"forget.data.{key}": (value, ("forget",), {"forget.data.format": "text"}) for key, value in OF_TEXT.items()},
}
OTHER_SETS = {"retain.data": ("retain",)} | {
    f"evaluate.{name}": ("sweep", "scores of target") for name in ("forget", "retain", "holdout")
}
for name, stages in OTHER_SETS.items():
    SETS |= {f"{name}.{key}": (DATA[key], stages, {}) for key in ("path", "columns.question")}


def test_every_option_of_a_recipe_is_here() -> None:
    every = leaves(Recipe)
    assert {*CASES, *SETS} <= every
    alike = {f"{name}.{key}" for name in OTHER_SETS for key in (*DATA, *OF_TEXT)}
    for name in every - {*CASES, *SETS} - alike:
        judges = name.startswith("evaluate.judge.") and name.rpartition(".")[2] in OTHERS
        # The demo and the probe's options make other models and rows, which are in these cases. Attacks come after a
        # run: test_attack.
        # What is found beside the scores: test_evidence.
        elsewhere = name.startswith(
            ("attack.", "baseline.", "demo.", "evidence.", "probe.", "vector.", "retain.vector.")
        )
        assert name in OTHERS or name.endswith(tuple(UNSAID)) or judges or elsewhere, f"{name}: in none of the lists"


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, str]]:
    """What stages are known by, for recipes that several cases begin with."""
    return {}


@pytest.mark.parametrize("option", [*CASES, *SETS])
def test_an_option_decides_its_stages(
    option: str, identify: Callable[..., dict[str, str]], place: Path, known: dict[str, dict[str, str]]
) -> None:
    (place / "prompts.yaml").write_text("tofu: {system: Which one agrees}")
    (place / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(5, "few")))
    value, wanted, others = (CASES | SETS)[option]
    if "few.jsonl" in str(others):
        others = others | {"forget.data.name": None, "forget.data.split": None}
    before = changed(base(place), fill(others, place), place)
    if (key := canonical_json(before)) not in known:
        known[key] = identify(before)
    one, two = known[key], identify(changed(before, fill({option: value}, place), place))
    assert [stage for stage in wanted if one.get(stage) == two.get(stage)] == []
    if option.startswith("retain.vector."):
        assert [stage for stage in one if one[stage] != two[stage]] == ["retain"]


def test_what_decides_nothing_makes_nothing_anew(identify: Callable[..., dict[str, str]], place: Path) -> None:
    before = changed(base(place), fill(JUDGED, place), place)
    changes = {
        "output": str(place / "elsewhere"),
        "request": "A 1",
        "verdict": False,
        "publish.repo": "me/mine",
    }
    assert identify(before) == identify(changed(before, changes, place))


# Every option of a recipe that decides a baseline's fit, or a stage of a training, is part of what it is known by.


# Baselines

BASELINE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "baseline.start": ("npo", "prior", {}),
    "baseline.epochs": ("npo", 3, {}),
    "baseline.learning_rate": ("npo", 3e-3, {}),
    "baseline.methods": ("npo", {"npo": {"beta": 0.3}}, {}),
    "seed": ("npo", 1, {}),
    "vector.weight_decay": ("npo", 0.07, {}),
    "retain.data.path": ("npo", "OTHER", {}),
    "select.keep": ("npo", 0.5, {}),
    "select.validation": ("npo", 0.5, {}),
    "request": ("npo", "A 1", {}),  # decides nothing
}


# Candidates' values, which are in the identity of the choice.
OF_NO_FIT = {"scale"}


def test_every_option_of_a_baseline_is_here() -> None:
    assert {f"baseline.{name}" for name in leaves(Baseline) - OF_NO_FIT} == {n for n in BASELINE if "baseline." in n}


def only_fits(stages: Sequence[Stage], progress: Any, *_: Any) -> None:
    for stage in stages:
        if stage.kind == "fit":
            stage.run(progress)


@pytest.mark.parametrize("option", BASELINE)
def test_an_option_decides_a_baselines_fit(
    option: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(Report("qa", "validation", {}), tmp_path)
    found: list[str] = []

    def fit(fit: VectorFit, out: Path, progress: Any) -> None:
        found.append(canonical_json([fit.inputs()]))
        raise Stop

    monkeypatch.setattr(vectors, "run_fit", fit)
    monkeypatch.setattr("msa_lite.pipeline.verbs.run.execute", only_fits)
    monkeypatch.setattr(trials, "scores_folder", lambda *given: tmp_path)
    method, value, others = BASELINE[option]
    lists = {"forget.alpha": 1.0, "retain.beta": 0.5, "output": str(tmp_path / "run")}
    before = changed(base(place), lists | fill(others, place), place)
    for recipe in (before, changed(before, fill({option: value}, place), place)):
        with pytest.raises(Stop):
            run_baseline(method, recipe)
    assert (found[0] == found[1]) is (option == "request")


# Trainings in stages

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NEW = {"model": {"config": LLAMA, "tokenizer": "{place}/target"}}
OWN_TOKENIZER = {"model": {"config": LLAMA, "tokenizer": {"vocabulary": 320}}}
# Of what a fit is told; test_identity and test_settings_reach follow every setting.
TUNED = {"epochs": 3, "max_length": 60, "schedule": "constant"}
TEXT = {"stages.0.data.format": "text", "training.max_length": 60}
# As above; an option of a stage stands behind `stages.0`.
TRAINING: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{part}.{name}": (value, {}) for part in ("training", "stages.0") for name, value in TUNED.items()},
    **{f"stages.0.data.{name}": (DATA[name], {"training.max_length": 200}) for name in ("path", "columns.question")},
    "stages.0.tokens": (40, TEXT),
    "model": ("{place}/other", {}),
    "model.config": (LLAMA | {"hidden_size": 32}, NEW),
    "model.tokenizer": ("{place}/tokenizer", NEW),
    "model.tokenizer.vocabulary": (310, OWN_TOKENIZER),
    **{key: (value, {}) for key, value in DATA.items() if key.startswith("columns.")},
    "columns.text": ("text2", TEXT),
    "prompt.kind": ("plain", {}),
    "prompt.system": ("Be kind.", {}),
    "prompt.prompt": ("Q: {question}\nA:", PLAIN),
    "prompt.answer": (" - {answer}", PLAIN),
    "seed": (1, NEW),  # that of a stage: test_settings_reach
}
OF_NO_STAGE = {
    "output": "elsewhere", "stages.0.name": "known", "track": "tensorboard",
    "prompt.thinking": "template",  # where a template has no block of thoughts; else: test_answer_ends
}  # fmt: skip


def test_every_option_of_a_training_is_here() -> None:
    every = leaves(TrainingRecipe) - {"stages"} | leaves(TrainingStage, "stages.0.")
    every -= {f"{part}.{name}" for part in ("training", "stages.0") for name in Training.model_fields}
    left = {f"stages.0.data.{name}" for name in {*UNSAID, *DATA, *OF_TEXT}} - {*TRAINING}
    assert every - {*TRAINING, *OF_NO_STAGE} == {*UNSAID - {"revision"}, *left}


@pytest.mark.parametrize("option", [*TRAINING, *OF_NO_STAGE])
def test_an_option_decides_a_stage_of_a_training(
    option: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
        found.append(canonical_json(inputs))
        raise Stop

    monkeypatch.setattr(training, "is_finished", is_finished)
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    data = base(place)["forget"]["data"]
    recipe = {"model": str(place / "target"), "stages": [{"data": data}], "output": str(tmp_path / "models")}
    monkeypatch.chdir(tmp_path)
    value, more = TRAINING.get(option) or (OF_NO_STAGE[option], {})
    before = changed(recipe, fill(more, place), place)
    for one in (before, changed(before, fill({option: value}, place), place)):
        with pytest.raises(Stop):
            train_stages(one)
    assert (found[0] == found[1]) is (option in OF_NO_STAGE)
