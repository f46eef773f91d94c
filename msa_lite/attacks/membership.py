"""Tell forget rows from rows that no model saw by the model's own probabilities: membership inference.

Five scores of a row, all of them low for rows that look like training data: the mean loss (Yeom et al., 2018); zlib,
the loss over the bytes that the text takes when it is compressed (Carlini et al., 2021); Min-K% (Shi et al., 2023) and
Min-K%++ (Zhang et al., 2024); and reference, the loss minus that of the prior, which never saw the rows (Carlini et
al., 2021, with a smaller model). The share of tokens is that of open-unlearning, k = 40 %, as in this tool's min_k and
min_k_pp, so that an AUC is the same in both reports. Of questions, only the answers are scored.

What is measured is the AUC against holdout rows, ½ at chance; and with 100 holdout rows or more, the share of forget
rows that are found while 1 % of the holdout rows are taken for such (LiRA, Carlini et al., 2022, arXiv 2112.03570).
If forget and holdout rows differ in other ways, too, the
AUC is not ½ for a model that saw neither; the ideal's AUC shows by how much.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from msa_lite.attacks.attack import Attack, Ground, Measure, Subject, Trial
from msa_lite.data import IGNORE, decode_answer
from msa_lite.evals.benchmarks.benchmark import Benchmark, Item, Record, Records, column
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.engine.scoring import threshold_at_fpr
from msa_lite.evals.scores.records import run_items
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import digest

_TRIAL = Trial("scores", "scores of the rows themselves")
_SCORES = ("loss", "min_k", "min_k_pp")
_MEASURES = (
    Measure("min_k_pp", "Min-K%++", "AUC of the 40 % least likely tokens, each against its alternatives", kind="auc"),
    Measure("loss", "loss", "AUC of the mean loss", kind="auc"),
    Measure("zlib", "zlib", "AUC of the loss over the bytes of the compressed text", kind="auc"),
    Measure("min_k", "Min-K%", "AUC of the 40 % least likely tokens", kind="auc"),
    # Does not decide: without a prior there is none, and an outcome uses only rows that have every deciding score.
    Measure("reference", "reference", "AUC of the loss minus the prior's", kind="auc", decides=False),
)
_FEWEST = 100  # holdout rows, for one of them to be 1 %
_FOUND = [
    Measure(f"found_{m.name}", f"{m.label} at 1 %", "forget rows found with 1 % of false alarms", decides=False)
    for m in _MEASURES
]


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    texts: list[Record] = next(iter(record.get("scores", {}).values()), [])
    figures = {name: texts[0].get(name) if texts else None for name in _SCORES}
    return {"index": record["index"], **figures, **{k: record[k] for k in ("skipped",) if k in record}}


@dataclass(frozen=True)
class Membership(Attack):
    """Membership inference by five scores."""

    name = "membership"
    source = "Min-K%++, arXiv 2404.02936; loss, zlib and reference, arXiv 2012.07805; Min-K%, arXiv 2310.16789"
    needs = ("holdout",)
    uses = ("prior",)
    reads = ()

    def count_rows(self, ground: Ground) -> dict[str, int]:
        """Return nothing, since AUCs decide."""
        return {}

    def trials(self, ground: Ground) -> Sequence[Trial]:
        """Return the one trial; its control are the holdout rows."""
        return [_TRIAL]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        """Return the AUCs of the scores, and the shares of found rows where there are enough holdout rows."""
        return [*_MEASURES, *(_FOUND if len(ground.holdout) >= _FEWEST else ())]

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        """Score the rows; yield records with a value for each measure, None where it is not defined.

        reference is None where there is no prior among the others, and where the subject is the prior.
        """
        benchmark, prior = _scored(ground), others.get("prior")
        if prior is not None and model_identity(prior.source) == model_identity(subject.source):
            prior = None
        steps = len(benchmark.sets) * (2 if prior else 1)
        progress(self.name, 0, steps)
        records = {name: run_items(subject.runner, benchmark, name) for name in benchmark.sets}
        progress(self.name, len(records), steps)
        prior_losses = _losses(prior, benchmark) if prior else {}
        for name, rows in records.items():
            references = prior_losses.get(name, [None] * len(rows))
            for record, item, reference in zip(rows, benchmark.sets[name].items, references, strict=True):
                loss, size = record["loss"], len(zlib.compress(_text(benchmark, item).encode()))
                record["zlib"] = None if loss is None else loss / size
                record["reference"] = None if loss is None or reference is None else loss - reference
        _find(records)
        progress(self.name, steps, steps)
        yield _TRIAL, records


def _losses(prior: Subject, benchmark: Benchmark) -> dict[str, list[float | None]]:
    """Return the losses of a prior by set. It runs once for all models under attack."""
    key = ("membership", digest(benchmark.describe()))
    if key not in prior.results:
        prior.results[key] = {name: column(run_items(prior.runner, benchmark, name), "loss") for name in benchmark.sets}
    losses: dict[str, list[float | None]] = prior.results[key]
    return losses


def _scored(ground: Ground) -> Benchmark:
    """Return the rows as texts to score, and to generate nothing from."""
    rows = ground.benchmark()
    sets = {name: replace(items, with_z=True, decoding=None) for name, items in rows.sets.items()}
    return replace(rows, score=_score, sets=sets)


def _find(records: Records) -> None:
    """Add to each record whether each of its scores is below the threshold of 1 % false alarms: 1 or 0, or None."""
    for measure in _MEASURES:
        threshold = threshold_at_fpr(column(records.get("holdout", []), measure.name))
        for record in chain.from_iterable(records.values()):
            score = record[measure.name]
            defined = threshold is not None and score is not None
            record[f"found_{measure.name}"] = float(score < threshold) if defined else None


def _text(benchmark: Benchmark, item: Item) -> str:
    """Return the text of the scored tokens."""
    ids = [label for texts in item.texts.values() for text in texts for label in text.labels if label != IGNORE]
    end = benchmark.prompter.end
    return decode_answer(benchmark.tokenizer, ids, () if end is None else (end,))
