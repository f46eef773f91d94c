"""Which epoch of a baseline is kept: the best so far by the rule, never a broken one while there is another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose.choice import _best
from msa_lite.choose.rules import PaperScore, Rank
from msa_lite.choose.validation import Validation
from msa_lite.data import Prompter, Template
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.pipeline.baseline import settings as module
from msa_lite.pipeline.baseline.settings import BestEpoch
from msa_lite.report import Metric, Report, write_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.train import KeptEpochs, epoch_folder
from tests.support.models import tiny_tokenizer


def report(forget: float, retain: float) -> Report:
    metrics = {"extraction_strength": Metric(forget, 4, None, False), "rouge_l_r": Metric(retain, 4, None, True)}
    return Report("qa", "validation", metrics)


def scored(scores: Path, *epochs: tuple[float, float]) -> Path:
    """Scores of epochs (forget set, retain set), made before: no model is asked."""
    for number, (forget, retain) in enumerate(epochs, 1):
        folder = epoch_folder(scores, number)
        folder.mkdir(parents=True)
        write_report(report(forget, retain), folder)
    return scores


def best(folder: Path, first: int = 1, scales: Sequence[float] = ()) -> BestEpoch:
    """What decides, beside a target that knows everything, whose scores go into a folder of their own."""
    target = folder / "target"
    target.mkdir()
    write_report(report(1.0, 1.0), target)
    questions = QA.over("validation", {}, Prompter.build(tiny_tokenizer(), "plain", Template()))
    return BestEpoch(Validation(questions, PaperScore("tofu")), target, first, scales)


def test_a_broken_epoch_is_never_kept_and_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: told.append(text % values))
    # Nothing at all is left at epoch 3, so that least is left of the forget set as well.
    scores, say = scored(tmp_path, (0.6, 0.9), (0.4, 0.9), (0.0, 0.0)), best(tmp_path)
    assert [say(None, epoch, scores) for epoch in (1, 2)] == [KeptEpochs(frozenset([1])), KeptEpochs(frozenset([2]))]
    assert told == []
    assert say(None, 3, scores) == KeptEpochs(frozenset([2]), go_on=False)
    assert told == ["epoch 3 is broken (0 is left of the target's probability_r and rouge_l_r); training ends there"]


@pytest.mark.parametrize("first", [1, 2])
def test_a_first_epoch_that_is_broken_is_all_there_is(first: int, tmp_path: Path) -> None:
    """Epochs before the `first` are no candidates."""
    scores = scored(tmp_path, *[(0.5, 0.9)] * (first - 1), (0.0, 0.0))
    assert best(tmp_path, first=first)(None, first, scores) == KeptEpochs(frozenset([first]), go_on=False)


@pytest.mark.parametrize("scales", [[], [0.5, 1.0, 1.5]], ids=["from the target", "from the prior"])
@pytest.mark.parametrize("seed", range(8))
def test_the_epoch_that_is_kept_as_training_goes_is_the_choice_among_all(
    seed: int, scales: list[float], tmp_path: Path
) -> None:
    """Coarse scores, so that there are ties; a candidate of the prior's that is broken ends nothing."""
    draw, say = random.Random(seed), best(tmp_path, scales=scales)
    ranks: list[Any] = []
    candidates: list[dict[str, Any]] = []
    for epoch in range(1, 6):
        for scale in scales or [1.0]:
            candidates.append(say.values_of(epoch, scale))
            folder = tmp_path / "scores" / candidate_name(candidates[-1])
            folder.mkdir(parents=True)
            write_report(report(draw.choice([0.3, 0.5, 0.7]), draw.choice([0.0, 0.5, 0.9])), folder)
            ranks.append(say.validation.rank(folder, say.reference))
        kept = say(None, epoch, tmp_path / "scores")
        assert kept.go_on is (bool(scales) or isinstance(ranks[-1], Rank))
        if any(isinstance(rank, Rank) for rank in ranks):
            assert kept.epochs == {candidates[_best(candidates, ranks)]["epoch"]}
        else:
            assert kept.epochs == {epoch}
