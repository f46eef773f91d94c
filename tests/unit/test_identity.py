"""Every option that decides a result is part of what it is known by: a rerun with another one makes it anew.

The options are read from signatures and fields, so that a new one has to be put here: among those that decide, with
another value, or among those that do not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.baselines.methods import settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.choose.choice import Candidates
from msa_lite.choose.rules import LeastExtraction, PaperScore
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.data import DataSource
from msa_lite.evals.judge.base import describe_judge
from msa_lite.evals.scores import evaluation
from msa_lite.evals.scores.suite import OwnQuestions, PublishedBenchmark, evaluate
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import INDEX_FILE
from msa_lite.io.weights.companions import CODE, PATTERNS
from msa_lite.io.weights.hub import Source, fetch, hash_content
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.adapters import output as adapter
from msa_lite.merger.stream import model
from msa_lite.record.facts import hash_files, hashed_revision
from msa_lite.report.run.provenance import result_revision
from msa_lite.settings import JudgeSettings
from msa_lite.train import FitSettings, KeptEpochs, Until, VectorFit, fit_vector
from tests.support.benchmark_data import TABLES, make_tofu, write_tofu
from tests.support.fits import ragged_rows
from tests.support.identity import (
    Change,
    Stop,
    assert_all_named,
    assert_not_told_apart,
    assert_told_apart,
    names_of,
    one_each,
)  # fmt: skip
from tests.support.merges import make_merge, write_parts

Make = Callable[..., Path]


def recorded(patch: pytest.MonkeyPatch, module: Any, call: Callable[..., Any], options: Change) -> dict[str, Any]:
    """What a merge's manifest would record of its inputs."""
    found: list[dict[str, Any]] = []
    own = module.find_inputs

    def find_inputs(*args: Any) -> Any:
        found.append(own(*args).record)
        raise Stop

    with patch.context() as context:
        context.setattr(module, "find_inputs", find_inputs)
        with pytest.raises(Stop):
            call(**options)
    return found[0]


@pytest.fixture
def merged(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> tuple[Change, Change]:
    """(options of a merge, another value of those that models and merges to an adapter share)."""
    base = {
        "target": str(make_checkpoint("llama")),
        "out": tmp_path / "out",
        "forget": str(make_adapter("llama", seed=1)),
        "alpha": 1.0,
        "retain": str(make_adapter("llama", seed=2)),
        "beta": 0.5,
        "prior": str(make_checkpoint("llama", seed=3)),
    }
    other = {name: str(make_checkpoint("llama", seed=4)) for name in ("target", "prior")}
    other |= {name: str(make_adapter("llama", seed=5)) for name in ("forget", "retain")}
    return base, other | {"alpha": 0.9, "beta": 0.4}


@pytest.mark.parametrize(
    ("call", "module", "own", "others"),
    [
        (merge, model, {"dtype": "bfloat16", "rounding": "nearest", "seed": 1, "exact": True, "untie": True},
         {"threads": 1}),
        (merge_adapters, adapter, {"max_rank": 3}, {}),
    ],
    ids=["model", "adapter"],
)  # fmt: skip
def test_a_merge_is_known_by_each_of_its_options(
    call: Callable[..., Any],
    module: Any,
    own: Change,
    others: Change,
    merged: tuple[Change, Change],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, shared = merged
    base |= {"rounding": "stochastic"} if call is merge else {}  # which a seed decides
    changes = shared | own
    others = others | {"out": tmp_path / "b", "max_memory": "1GB", "replace": True, "progress": print}
    assert_all_named(call, changes, others)

    def identity(change: Change) -> Any:
        return recorded(monkeypatch, module, call, {**base, **change})

    assert_told_apart(identity, one_each(changes))
    assert_not_told_apart(identity, one_each(others))


# Models


@pytest.mark.parametrize("by_content", [True, False])
@pytest.mark.parametrize("pattern", [*PATTERNS, "*.safetensors", INDEX_FILE])
def test_a_folder_is_known_by_each_file_that_is_read_or_copied(
    pattern: str, by_content: bool, make_checkpoint: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_checkpoint("llama", chat=True), tmp_path / "model")
    path = folder / pattern.replace("*", "other")
    path.parent.mkdir(exist_ok=True)
    if pattern == CODE:  # of a model that needs it
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "other.Model"}}))
    found = [fetch(str(folder), by_content).revision]
    for text in ("{}", "[]"):  # of one length
        path.write_text(text)
        found.append(fetch(str(folder), by_content).revision)
    assert len(set(found)) == 3
    path.rename(folder / pattern.replace("*", "moved") if "*" in pattern else folder / "other")
    assert fetch(str(folder), by_content).revision not in found[1:]
    written = sorted(p for p in folder.iterdir() if p.name in ("config.json", "tokenizer.json", "chat_template.jinja"))
    assert len(written) == 3
    for path in written:
        before = fetch(str(folder), by_content).revision
        path.write_bytes(path.read_bytes() + b" ")
        assert fetch(str(folder), by_content).revision != before, path.name


def test_a_source_is_known_by_what_it_is_used_with() -> None:
    class Rows:
        def describe(self) -> str:
            return "a row"

    base = Source("m", Path("m"), "a" * 40)
    changes = {"revision": "b" * 40, "tokenizer": Source("t", Path("t"), "c" * 40), "added": Rows()}
    assert_all_named(Source, changes, ["name", "folder", "seen"])
    assert_told_apart(lambda change: replace(base, **change).identity(), one_each(changes))
    assert_not_told_apart(
        lambda change: replace(base, **change).identity(),
        {"moved": {"name": "n", "folder": Path(), "seen": {Path("x"): (1,)}}},
    )


# Fits

SETTINGS = {
    "mode": "full",
    "lora_rank": 3,
    "lora_alpha": 5.0,
    "lora_dropout": 0.25,
    "lora_targets": ("q_proj",),
    "epochs": 7,
    "learning_rate": 1e-3,
    "weight_decay": 0.07,
    "warmup_epochs": 0.5,
    "batch_size": 6,
    "micro_batch_size": 2,
    "schedule": "constant",
    "seed": 11,
    "warmup_steps": 3,
    "optimizer": "adamw_8bit",
    "compute": "bf16",
}
PRIOR = Source("some/prior", Path("prior"), "a" * 40)
ROWS = ragged_rows(4)


class Described:
    """Stands for an objective, or for what comes after an epoch."""

    longest = 8

    def __init__(self, text: str) -> None:
        self.text = text

    def describe(self) -> str:
        return self.text

    def __call__(self, *given: Any) -> KeptEpochs:
        return KeptEpochs(frozenset())


def test_a_fit_is_known_by_each_of_its_settings() -> None:
    assert_all_named(FitSettings, SETTINGS, [])
    assert_told_apart(lambda change: replace(FitSettings(), **change).describe(), one_each(SETTINGS))
    full = FitSettings(mode="full")
    unused = {name: value for name, value in SETTINGS.items() if name.startswith("lora_")}
    assert_not_told_apart(lambda change: replace(full, **change).describe(), one_each(unused))


def test_a_fit_is_known_by_all_that_it_learns_from() -> None:
    first, *more = ROWS
    changes = {
        "prior": PRIOR.__class__("some/prior", Path("prior"), "b" * 40),
        "examples": more,
        "settings": FitSettings(seed=1),
        "objective": Described("another loss"),
        "after_epoch": Described("the best"),
        "until": Until(PRIOR, load=list),
    }
    assert_all_named(VectorFit, changes, ["tokenizer", "label", "extra_files", "tracking"])
    assert {*names_of(fit_vector)} < {*names_of(VectorFit), "out", "progress"}
    base = {"prior": PRIOR, "examples": ROWS, "tokenizer": None, "settings": FitSettings()}

    def identity(change: Change) -> Any:
        return VectorFit(**{**base, **change}).inputs()

    rows = {
        "ids": [replace(first, ids=[9, *first.ids[1:]]), *more],
        "labels": [replace(first, labels=first.ids), *more],
        "order": [*more, first],
    }
    apart = {name: {"examples": value} for name, value in rows.items()}
    assert_told_apart(identity, one_each(changes) | apart)


def test_an_open_ended_fit_is_known_by_its_rule() -> None:
    other = Source("some/target", Path("target"), "b" * 40)
    changes = {"target": other, "least_steps": 3, "closed": 0.5, "tries": 2}
    assert_all_named(Until, changes, ["load"])
    base = Until(PRIOR, load=list)
    assert_told_apart(lambda change: replace(base, **change).describe(), one_each(changes))
    assert_not_told_apart(lambda change: replace(base, **change).describe(), {"load": {"load": dict}})


def test_a_baselines_objective_is_known_by_all_that_decides_its_loss() -> None:
    retain, alternatives = ragged_rows(3, 1), ragged_rows(4, 2)
    relabelled = [replace(retain[0], labels=retain[0].ids), *retain[1:]]
    changes = {
        "name": "simnpo",
        "parameters": settings_grid("dpo", {"retain_weight": 2.0})[0],
        "retain": ragged_rows(3, 3),
        "alternatives": ragged_rows(4, 3),
        "seed": 1,
    }
    # The forget rows and full are in the fit's identity, the reference and its rows come from these and the prior.
    assert_all_named(BaselineObjective, changes, ["forget", "pad", "full"])
    given = {"name": "dpo", "parameters": settings_grid("dpo", {})[0], "forget": ROWS, "retain": retain, "pad": 2}

    def identity(change: Change) -> Any:
        return BaselineObjective(**{**given, "seed": 0, "alternatives": alternatives, **change}).describe()

    assert_told_apart(identity, one_each(changes) | {"labels": {"retain": relabelled}})
    of_the_fit = given["parameters"] | {"learning_rate": 1e-3}
    assert_not_told_apart(identity, {"padding": {"pad": 0}, "rate": {"parameters": of_the_fit}})


def test_the_files_of_a_manifest_give_the_revision_that_a_model_is_known_by(tmp_path: Path) -> None:
    """Reports and removal records take the hashes of a manifest: a template in a folder of its own is among them."""
    write_parts(tmp_path)
    template = tmp_path / "target/additional_chat_templates/tool_use.jinja"
    template.parent.mkdir()
    template.write_text("TOOLS")
    out = make_merge(tmp_path)
    assert (out / "additional_chat_templates/tool_use.jinja").read_text() == "TOOLS"
    revision = hash_content(out)
    assert hashed_revision(hash_files(out)) == revision
    assert result_revision(out) == revision


# Scores, and choices by them


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Change], Any]:
    """What an evaluation's manifest would record, by the options of `evaluate` and of its questions."""
    found: list[dict[str, Any]] = []

    def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
        found.append(inputs)
        raise Stop

    monkeypatch.setattr(evaluation, "is_finished", is_finished)
    monkeypatch.setenv("OPENAI_API_KEY", "any")

    def ask(options: Change) -> Any:
        options = dict(options)
        kind = next(kind for kind in (PublishedBenchmark, OwnQuestions) if names_of(kind)[0] in options)
        questions = kind(**{name: options.pop(name) for name in names_of(kind) if name in options})
        with pytest.raises(Stop):
            evaluate(**{"out": tmp_path / "out", "questions": questions, **options})
        return found.pop()

    return ask


def test_scores_are_known_by_each_option_of_an_evaluation(
    asked: Callable[[Change], Any], make_checkpoint: Make, tmp_path: Path
) -> None:
    one, two = str(make_checkpoint("llama", chat=True)), str(make_checkpoint("llama", seed=1, chat=True))
    plain = str(make_checkpoint("llama"))
    names = ["forget", "retain", "holdout", "more"]
    for name in names:
        lines = (f'{{"question": "Where is {name} {i}?", "answer": "At {i}."}}\n' for i in range(6))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sets = {name: DataSource(str(tmp_path / f"{name}.jsonl")) for name in names}
    more = sets.pop("more")
    qa = {"model": one, "limit": 4, **sets}
    tofu = {"model": one, "benchmark": "tofu", "data": write_tofu(tmp_path / "tofu"), "split": "forget01"}
    other_tofu = write_tofu(tmp_path / "other", {name: rows[1:] for name, rows in TABLES.items()})
    more_splits = {name.replace("01", "05"): rows for name, rows in TABLES.items() if "01" in name}
    changes: dict[str, tuple[Change, Change]] = {
        "model": (qa, {"model": two}),
        "forget": (qa, {"forget": more}),
        "retain": (qa, {"retain": more}),
        "holdout": (qa, {"holdout": more}),
        "ideal": (qa, {"ideal": two}),
        "tokenizer": (qa, {"tokenizer": plain}),
        "limit": (qa, {"limit": 3}),
        "max_new_tokens": (qa, {"max_new_tokens": 7}),
        "prompt": (qa, {"prompt": "plain"}),
        "seed": (qa, {"seed": 1}),
        "data": (tofu, {"data": other_tofu}),
        "judge": (tofu, {"judge": JudgeSettings("openai", base_url="http://localhost:1/v1")}),
        "compat": (tofu, {"compat": ["open-unlearning"]}),
        "split": (tofu | {"data": write_tofu(tmp_path / "splits", TABLES | more_splits)}, {"split": "forget05"}),
    }
    options = {name for kind in (OwnQuestions, PublishedBenchmark) for name in names_of(kind)}
    assert options | {*names_of(evaluate)} == {*changes, "benchmark", "questions", "out", "progress"}
    before: Any = None
    last: Change = {}
    for name, (base, change) in changes.items():  # those of one base stand together
        if base is not last:
            before, last = asked(base), base
            assert asked(base) == before
        assert asked({**base, **change}) != before, name


def test_a_judge_is_known_by_all_that_decides_its_verdicts(make_checkpoint: Make, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("restor: {system: Is it right}")
    base = JudgeSettings("openai", "a", "http://localhost:1/v1")
    changes = {"kind": "none", "model": "b", "base_url": "http://localhost:2/v1"}
    changes["prompts"] = str(prompts)
    assert_all_named(JudgeSettings, changes, {"key_env"})
    assert_told_apart(lambda change: describe_judge(replace(base, **change)), one_each(changes))
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "judge")
    local = JudgeSettings("local", str(folder))
    before = describe_judge(local)
    assert describe_judge(local) == before
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert describe_judge(local) != before


def finished_evaluation(folder: Path, text: str) -> Path:
    with stage_folder(folder, "evaluation", {"text": text}) as partial:
        (partial / "forget.jsonl").write_text(text)
    assert load_manifest(folder)
    return folder


def test_a_choice_is_known_by_candidates_rows_and_rule(tmp_path: Path) -> None:
    tofu = make_tofu(tmp_path / "tofu")
    ideals = {name: finished_evaluation(tmp_path / name, name) for name in ("one", "two")}
    base = Candidates([{"alpha": 1.0}], load=list, made_of={"seed": 0})
    rows = Validation(tofu, LeastExtraction(0.9), ideals["one"], prior=ideals["one"])
    changes = {
        "values": [{"alpha": 2.0}],
        "made_of": {"seed": 1},
        "search": StrengthSearch(None, None),
    }
    assert_all_named(Candidates, changes, ["load", "known", "release", "remedies", "helped"])
    assert_told_apart(lambda change: replace(base, **change).inputs(rows), one_each(changes))
    validation = {
        "benchmark": tofu.only({"forget"}),
        "rule": PaperScore("tofu"),
        "ideal": ideals["two"],
        "judge": JudgeSettings("openai", "a"),
        "prior": ideals["two"],
    }
    assert_all_named(Validation, validation, ["unjudged"])
    assert_told_apart(lambda change: base.inputs(replace(rows, **change)), one_each(validation))
    kept = {"keep": {"rule": LeastExtraction(0.8)}}
    assert_told_apart(lambda change: base.inputs(replace(rows, **change)), kept)
    # What is scored already holds for other grids and rules, but not for other models or questions.
    grids = {name: {name: changes[name]} for name in ("values", "search")}
    assert_not_told_apart(lambda change: replace(base, **change).scored_by(rows), grids)
    others = {"made_of": {"made_of": changes["made_of"]}}
    assert_told_apart(lambda change: replace(base, **change).scored_by(rows), others)
