"""The probe: AUCs with intervals, what is compared with what, verdicts that claim no more than is so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from msa_lite.data import Row
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.scores.probe import against_own, against_rows, compute_auc, probe_model, sample_probe
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.report import Metric, Report, load_report
from msa_lite.report.run.probing import LEAST_ROWS, ProbeVerdict, read_verdicts
from tests.support.benchmark_data import TABLES, make_prompter, make_tofu, write_data

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


SEEN, UNSEEN, WIDE = report(0.9, 0.95), report(0.45, 0.55), report(0.4, 0.7)


@pytest.mark.parametrize(
    ("reports", "verdict", "word"),
    [
        ({"prior": SEEN}, "signs", "0.90 to 0.95"),
        ({"prior": UNSEEN}, "no signs", "may leave none"),
        ({"prior": report(0.2, 0.4)}, "no signs", "only rows learnt well would show"),
        ({"prior": WIDE}, "cannot tell", "0.70"),
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
