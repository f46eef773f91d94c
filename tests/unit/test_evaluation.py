"""Evaluations beside an ideal: what is compared, and when a model is run again. The probe: AUCs and its verdicts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Row
from msa_lite.errors import MismatchError, MsaError, StageError, UsageError
from msa_lite.evals.benchmarks.aggregates import NO_IDEAL
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine import answers
from msa_lite.evals.scores.evaluation import evaluate_benchmark
from msa_lite.evals.scores.probe import against_own, against_rows, compute_auc, probe_model, sample_probe
from msa_lite.evals.scores.records import ANSWERS_FILE, read_records
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import verify_folder
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.report import Metric, Report, load_report
from msa_lite.report.run.probing import LEAST_ROWS, ProbeVerdict, read_verdicts
from msa_lite.settings import JudgeSettings
from tests.support.benchmark_data import (
    MEMBERSHIP,
    TABLES,
    TOFU_METRICS,
    make_prompter,
    make_tofu,
    shortened,
    write_data,
)
from tests.support.judge import JudgeServer
from tests.support.models import save_adapter, save_checkpoint
from tests.support.plain import WIDE, broken_model

NEEDS_IDEAL = {"forget_quality", "acc_forget", "acc_recover", "acc_retain", "min_k_gap", "min_k_pp_gap"}


Models = tuple[Source, Source]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return shortened(make_tofu(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def tofu(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    """Without a holdout and with a single fact of the world, which saves the bootstrap."""
    tables = {name: rows for name, rows in TABLES.items() if name != "holdout01"}
    tables["world_facts_perturbed"] = tables["world_facts_perturbed"][:1]
    return shortened(make_tofu(tmp_path_factory.mktemp("tofu"), tables))


@pytest.fixture
def models(make_checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Source, Source]:
    """(target, ideal), copies that a test may delete."""
    folders = [make_checkpoint("llama", seed, max_position_embeddings=512, **WIDE) for seed in (0, 1)]
    copies = [shutil.copytree(folder, tmp_path / "models" / f"{i}") for i, folder in enumerate(folders)]
    return fetch(str(copies[0])), fetch(str(copies[1]))


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with JudgeServer() as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.key)
        monkeypatch.setenv("MSA_LITE_CACHE", str(tmp_path / "cache"))
        yield server


def evaluated(source: Source, tofu: Benchmark, out: Path, **options: Any) -> tuple[Report, list[str]]:
    """(report, labels of the progress: empty where nothing was run)."""
    labels: list[str] = []

    def note(label: str, done: float, total: float) -> None:
        if done < total:
            labels.append(label)

    report = evaluate_benchmark(source, tofu, out, progress=note, **options)
    assert report is not None
    assert report == load_report(out)
    assert verify_folder(out) == []
    return report, list(dict.fromkeys(labels))


def records_of(tofu: Benchmark, folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: read_records(folder / f"{name}.jsonl") for name in tofu.sets}


def test_the_report_follows_from_the_records_alone(whole: Benchmark, models: Models, tmp_path: Path) -> None:
    report, labels = evaluated(models[0], whole, tmp_path / "out", ideal=models[1])
    assert labels == ["scores: ideal", "scores"]
    mine, ideal = records_of(whole, tmp_path / "out"), records_of(whole, tmp_path / "out/ideal")
    assert whole.metrics(mine, ideal) == report.metrics
    assert whole.metrics(ideal, ideal) == load_report(tmp_path / "out/ideal").metrics
    assert set(report.metrics) == TOFU_METRICS | MEMBERSHIP
    assert report.settings["compat"] == []
    undefined = {name for name, value in report.values().items() if value is None}
    assert undefined == {"acc_forget", "acc_recover", "acc_retain"}  # there is no judge
    assert 0 < (report.metrics["forget_quality"].value or 0) < 1
    assert load_report(tmp_path / "out/ideal").metrics["forget_quality"].value == 1  # its own ideal
    report, _ = evaluated(models[0], whole, tmp_path / "out")  # now without one
    assert {name for name, value in report.values().items() if value is None} == NEEDS_IDEAL
    assert {report.metrics[name].note for name in NEEDS_IDEAL} == {NO_IDEAL}
    assert not (tmp_path / "out/ideal").exists()


def test_another_ideal_does_not_run_the_model_again(tofu: Benchmark, models: Models, tmp_path: Path) -> None:
    target, ideal = models
    out = tmp_path / "out"
    beside, _ = evaluated(target, tofu, out, ideal=ideal)
    assert evaluated(target, tofu, out, ideal=ideal) == (beside, [])
    evaluated(ideal, tofu, tmp_path / "earlier")
    for source in models:
        shutil.rmtree(source.folder)
    alone, labels = evaluated(target, tofu, out)
    assert labels == []
    assert alone.metrics["forget_quality"].note == NO_IDEAL
    assert not (out / "ideal").exists()
    again, labels = evaluated(target, tofu, out, ideal=tmp_path / "earlier")
    assert labels == []
    # The same numbers as beside the ideal that was scored on the way.
    assert again.metrics == beside.metrics
    assert evaluated(target, tofu, out, ideal=ideal) == (beside, [])


@pytest.fixture
def qa() -> Benchmark:
    rows = [Row(i, f"Where is {i}?", f"It is over there at {i}.") for i in range(2)]
    return load_qa({"forget": rows}, make_prompter(), 4)


def test_scores_by_another_rule_for_right_answers_are_made_anew(
    qa: Benchmark, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as former:
        former.setattr(answers, "accuracy", lambda reference, generated: 1.0)
        by_words = replace(qa, about=qa.about | {"answer_rule": "words alone"})
        for folder in (out, tmp_path / "earlier"):
            assert evaluated(models[0], by_words, folder)[0].metrics["accuracy_f"].value == 1.0
        assert evaluated(models[0], by_words, out)[1] == []
    report, labels = evaluated(models[0], qa, out)
    assert labels == [], "what the model says is known, whatever becomes of it"
    assert report.metrics["accuracy_f"].value == 0.0
    with pytest.raises(MismatchError, match="its answer_rule are not those of this evaluation"):
        evaluated(models[0], qa, tmp_path / "beside", ideal=tmp_path / "earlier")


def test_an_adapter_on_a_model_that_has_changed_is_run_again(tofu: Benchmark, models: Models, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    below = shutil.copytree(models[0].folder, tmp_path / "below")
    folder = save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(below))
    out, adapter = tmp_path / "out", fetch(str(folder))
    assert evaluated(models[0], tofu, out, ideal=adapter)[1] == ["scores: ideal", "scores"]
    before = load_report(out / "ideal").metrics["probability_f"]
    assert evaluated(models[0], tofu, out, ideal=adapter)[1] == []
    shutil.copy(models[1].folder / "model.safetensors", below)
    assert fetch(str(folder)) == adapter
    assert evaluated(models[0], tofu, out, ideal=adapter)[1] == ["scores: ideal"]
    assert load_report(out / "ideal").metrics["probability_f"] != before


def test_a_model_of_broken_weights_has_no_report(tofu: Benchmark, tmp_path: Path) -> None:
    source = fetch(str(save_checkpoint(tmp_path / "broken", broken_model("embeddings"))))
    with pytest.raises(StageError, match="no numbers"):
        evaluate_benchmark(source, tofu, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.jsonl"))
    assert not list(tmp_path.rglob("report.json"))


def test_processes_that_only_help_get_no_report_of_a_finished_folder_either(
    tofu: Benchmark, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = evaluated(models[0], tofu, tmp_path / "out")
    compared: list[str] = []
    monkeypatch.setattr(Ranks, "check_same", lambda self, inputs: compared.append(inputs))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert evaluate_benchmark(models[0], tofu, tmp_path / "out") is None
    monkeypatch.setenv("RANK", "0")
    assert evaluate_benchmark(models[0], tofu, tmp_path / "out") == report
    assert len(compared) == 2
    assert compared[0] == compared[1]


def test_an_ideal_that_was_asked_something_else_is_refused(tofu: Benchmark, models: Models, tmp_path: Path) -> None:
    evaluated(models[1], shortened(tofu, 3), tmp_path / "ideal")
    with pytest.raises(MismatchError, match="its sets are not those of this evaluation"):
        evaluated(models[0], tofu, tmp_path / "out", ideal=tmp_path / "ideal")
    evaluated(models[1], replace(tofu, compat=frozenset({"es_floor"})), tmp_path / "floored")
    with pytest.raises(MismatchError, match="its compat are not"):
        evaluated(models[0], tofu, tmp_path / "out", ideal=tmp_path / "floored")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_an_ideal_whose_records_are_gone_is_refused_before_the_model_is_run(
    tofu: Benchmark, models: Models, tmp_path: Path
) -> None:
    evaluated(models[1], tofu, tmp_path / "ideal")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "ideal/report.json", tmp_path / "alone")
    (tmp_path / "ideal/forget.jsonl").unlink()
    shutil.rmtree(models[0].folder)
    with pytest.raises(MsaError, match=r"forget\.jsonl"):
        evaluated(models[0], tofu, tmp_path / "out", ideal=tmp_path / "ideal")
    with pytest.raises(MismatchError, match="needs its records beside it"):
        evaluated(models[0], tofu, tmp_path / "out", ideal=tmp_path / "alone")
    assert not (tmp_path / "out.partial").exists()


def test_an_ideal_in_the_folder_that_is_written_is_refused(tofu: Benchmark, models: Models, tmp_path: Path) -> None:
    before, _ = evaluated(models[0], tofu, tmp_path / "out", ideal=models[1])
    for inside in (tmp_path / "out/ideal", tmp_path / "out"):
        with pytest.raises(UsageError, match="give the model instead"):
            evaluated(models[0], tofu, tmp_path / "out", ideal=inside)
    shutil.rmtree(models[1].folder)
    assert evaluated(models[0], tofu, tmp_path / "out", ideal=models[1]) == (before, [])


def test_records_that_were_damaged_are_made_anew(tofu: Benchmark, models: Models, tmp_path: Path) -> None:
    report, _ = evaluated(models[0], tofu, tmp_path / "out")
    for name, labels in (("forget.jsonl", []), (ANSWERS_FILE, ["scores"])):
        kept = tmp_path / "out" / name
        kept.write_bytes(kept.read_bytes()[:-20])
        assert evaluated(models[0], tofu, tmp_path / "out") == (report, labels)


def test_an_ideal_of_an_earlier_attempt_is_not_taken_for_the_present_one(
    tofu: Benchmark, models: Models, tmp_path: Path
) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if label == "scores" and done:
            raise KeyboardInterrupt

    wanted, _ = evaluated(models[0], tofu, tmp_path / "wanted", ideal=models[0])
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmark(models[0], tofu, tmp_path / "out", ideal=models[1], progress=stop)
    assert (tmp_path / "out.partial/ideal/report.json").is_file()
    found, _ = evaluated(models[0], tofu, tmp_path / "out", ideal=models[0])
    assert found.values() == pytest.approx(wanted.values())
    assert found.metrics["forget_quality"].value == 1


def settings(server: JudgeServer, **options: Any) -> JudgeSettings:
    return JudgeSettings(kind="openai", base_url=server.url, key_env="OPENAI_API_KEY", **options)


def test_a_judge_is_asked_of_forget_and_retain_questions_and_another_does_not_run_the_model_again(
    tofu: Benchmark, models: Models, tmp_path: Path, judge: JudgeServer
) -> None:
    judge.reply = lambda body: "Z"
    evaluated(models[0], tofu, tmp_path / "out", ideal=models[1])
    for source in models:
        shutil.rmtree(source.folder)
    report, labels = evaluated(models[0], tofu, tmp_path / "out", ideal=models[1], judge=settings(judge))
    assert labels == ["judge"]
    # Nothing fits: all is forgotten, nothing recovered, nothing retained; of four and three questions.
    found = {name: (report.metrics[name].value, report.metrics[name].n) for name in NEEDS_IDEAL if name[:3] == "acc"}
    assert found == {"acc_forget": (1, 4), "acc_recover": (0, 4), "acc_retain": (0, 3)}
    assert report.settings["judge"]["model"] == "gpt-4o"
    assert report.settings["judge"]["calls"] > 0
    records = records_of(tofu, tmp_path / "out")
    assert [record["judge"]["acc_forget"] for record in records["forget"]] == [1] * 4
    assert all("judge" not in record for name in ("real_authors", "world_facts") for record in records[name])
    assert tofu.metrics(records, records_of(tofu, tmp_path / "out/ideal")) == report.metrics
    assert not any(judge.key.encode() in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    judge.reply = lambda body: "?"
    second, _ = evaluated(models[0], tofu, tmp_path / "out", ideal=models[1], judge=settings(judge, model="other"))
    assert second.settings["judge"]["model"] == "other"
    assert "invalid" in str(second.metrics["acc_forget"].note)
    none, labels = evaluated(models[0], tofu, tmp_path / "out", ideal=models[1])
    assert labels == []
    assert none.metrics["acc_forget"].value is None
    assert "judge" not in none.settings
    assert all("judge" not in record for record in records_of(tofu, tmp_path / "out")["forget"])


# The probe: AUCs with intervals, what is compared with what, verdicts that claim no more than is so.


QUESTIONS = [Row(i, f"Where is it, {i}?", f"It is over there, {i}.") for i in range(8)]
OTHERS = [Row(i, f"Where was it, {i}?", f"It was here, {i}.") for i in range(6)]


def test_an_auc_counts_pairs_in_which_the_forget_row_is_better_known() -> None:
    # Losses 1, 2, 3 against 2, 3, 4: 1 is below all three; 2 below two and even with one; 3 below one, even with one.
    auc = compute_auc([1.0, 2.0, 3.0, None], [2.0, 3.0, 4.0])
    assert auc.value == pytest.approx((3 + 2.5 + 1.5) / 9)
    assert (auc.rows, auc.skipped) == ((3, 3), 1)
    assert auc.low <= auc.value <= auc.high


@pytest.mark.parametrize(("forget", "value"), [([], None), ([1.0], 1.0)])
def test_of_a_row_or_none_nothing_is_known(forget: list[float], value: float | None) -> None:
    auc = compute_auc(forget, [2.0, 3.0])
    assert (auc.value, auc.low, auc.high, auc.stderr) == (value, 0.0, 1.0, None)


def report(low: float, high: float, rows: int = 100) -> Report:
    metrics = {"loss_auc": Metric((low + high) / 2, 2 * rows, 0.01, None)}
    settings = {"intervals": {"loss_auc": [low, high]}, "rows": {"forget": rows, "holdout": rows}}
    return Report("probe", "all", metrics, settings)


SEEN, UNSEEN, UNSURE = report(0.9, 0.95), report(0.45, 0.55), report(0.4, 0.7)


@pytest.mark.parametrize(
    ("reports", "verdict", "word"),
    [
        ({"prior": SEEN}, "signs", "0.90 to 0.95"),
        ({"prior": UNSEEN}, "no signs", "may leave none"),
        ({"prior": report(0.2, 0.4)}, "no signs", "only rows learnt well would show"),
        ({"prior": UNSURE}, "cannot tell", "0.70"),
        ({"prior": report(0.58, 0.64)}, "no signs", "may leave none"),  # above ½, but so are models that saw neither
        ({"prior": report(1.0, 1.0, LEAST_ROWS - 1)}, "cannot tell", "too few"),
        ({"prior": UNSEEN, "target": SEEN}, "no signs", "may leave none"),
        ({"prior": UNSEEN, "target": UNSEEN}, "cannot tell", "the target"),
        ({"prior": SEEN, "ideal": SEEN}, "cannot tell", "the ideal"),
        ({"prior": SEEN, "target": SEEN}, "signs", "which only an ideal model would reveal"),
    ],
)
def test_a_verdict_claims_no_more_than_it_can(reports: Mapping[str, Report], verdict: ProbeVerdict, word: str) -> None:
    prior = read_verdicts(reports)[0]
    assert prior.verdict == verdict
    assert word in prior.explanation


def test_a_benchmark_is_compared_with_its_holdout_rows(tmp_path: Path) -> None:
    holdout = against_own(make_tofu(tmp_path / "a"))
    muse = against_own(MUSE.load(make_prompter(), BenchmarkSettings(write_data(tmp_path / "c"))))
    assert {name: len(part.items) for name, part in holdout.sets.items()} == {"forget": 4, "holdout": 3}
    assert (holdout.sets["forget"].ends, muse.sets["forget"].ends) == (True, False)
    without = {name: rows for name, rows in TABLES.items() if name != "holdout01"}
    assert against_own(make_tofu(tmp_path / "b", without)) is None
    assert against_own(load_qa({"forget": QUESTIONS}, make_prompter())) is None


def test_texts_are_scored_up_to_the_window_and_longer_answers_named() -> None:
    prompter = replace(make_prompter(), window=32)
    rows = [
        Row(0, text="abcdefgh" * 40),
        Row(1, "Where?", "Here."),
        Row(5, "Where?", "Here. " * 40),
        Row(6, "W" * 99, "H"),
    ]
    benchmark = load_qa({"forget": rows}, prompter, 4)
    text, *_, lost = benchmark.sets["forget"].items
    assert len(text.texts["text"][0].ids) - 1 == 32  # the last one is predicted, and never an input
    assert [item.can_be_asked(len(lost.prompt or ())) for item in (text, lost)] == [True, False]
    assert [line.split(":")[1].split(" are")[0] for line in benchmark.unscored()] == [" 2 of 4 rows (5 and 6)"]
    assert [line.split(":")[1] for line in benchmark.unasked()] == [" 1 of 4 rows (6)"]
    assert replace(benchmark, prompter=make_prompter()).unscored() == []


def test_texts_are_compared_in_chunks() -> None:
    long, short = Row(0, text="It is over there. " * 20), Row(1, text="It was here.")
    sides = against_rows([long, short], [short], make_prompter(), max_length=32)
    lengths = [len(item.texts["text"][0].ids) for item in sides.sets["forget"].items]
    assert len(lengths) > 3
    assert lengths[0] == max(lengths) == 32
    assert not sides.sets["forget"].ends


@pytest.fixture
def sides() -> Benchmark:
    return against_rows(QUESTIONS, OTHERS, make_prompter(), max_length=64)


def test_a_probed_model_leaves_scores_without_texts_and_is_not_asked_again(
    sides: Benchmark, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, asked = fetch(str(make_checkpoint("llama"))), []
    first, again = (
        probe_model(model, sides, tmp_path / "out", tmp_path, progress=lambda *step: asked.append(step[1:]))
        for _ in range(2)
    )
    assert asked[-1] == (14, 14)
    assert [step for step in asked if step == (14, 14)] == [(14, 14)]
    assert json_form(first) == json_form(again) == json_form(load_report(tmp_path / "out"))
    assert first.settings["rows"] == {"forget": 8, "holdout": 6}
    assert verify_folder(tmp_path / "out") == []
    lines = [json.loads(line) for line in (tmp_path / "out/forget.jsonl").read_text().splitlines()]
    assert [sorted(line) for line in lines] == [["index", "loss", "min_k_pp", "n_tokens", "sha256"]] * 8
    assert "over there" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir())


def test_the_cheap_form_asks_for_losses_alone(
    sides: Benchmark, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    few = sample_probe(sides, 4, seed=0, with_z=False)
    found = probe_model(fetch(str(make_checkpoint("llama"))), few, tmp_path / "out", tmp_path)
    assert list(found.metrics) == ["loss_auc"]
    assert found.settings["rows"] == {"forget": 4, "holdout": 4}


def test_the_interval_of_an_auc_is_of_95_percent() -> None:
    # Beside rows that are all alike the AUC is the share of forget rows below them: a binomial of 100 and ½, of which
    # 2.5 % lie below 40 and above 60, and 5 % below 42 and above 58.
    for sides in (([0.0, 1.0] * 50, [0.5] * 100), ([0.5] * 100, [0.0, 1.0] * 50)):  # each of them is drawn anew
        auc = compute_auc(*sides)
        assert auc.value == 0.5
        assert auc.low == pytest.approx(0.40, abs=0.011, rel=1e-9)
        assert auc.high == pytest.approx(0.60, abs=0.011, rel=1e-9)
