"""Tell forget rows from rows that no model saw by the model's own probabilities: membership inference.

Five scores of a row, all of them low for rows that look like training data: the mean loss (Yeom et al., 2018); zlib,
the loss over the bytes that the text takes when it is compressed (Carlini et al., 2021); Min-K% (Shi et al., 2023) and
Min-K%++ (Zhang et al., 2024); and reference, the loss minus that of the prior, which never saw the rows (Carlini et
al., 2021, with a smaller model). The share of tokens is that of open-unlearning, k = 40 %, as in this tool's min_k and
min_k_pp, so that an AUC is the same in both reports. Of questions, only the answers are scored.

What is measured is the AUC against holdout rows, ½ at chance. Where forget and holdout rows differ in more than that
one was trained on, it is off ½ for a model that saw neither; only the ideal shows by how much.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msa_lite.attacks.attack import Attack, Cost, Ground, Measure, Subject, Trial
from msa_lite.data import IGNORE
from msa_lite.evals.benchmark import Item, Record, Records
from msa_lite.evals.models import model_identity
from msa_lite.evals.qa import Qa
from msa_lite.evals.records import run_items
from msa_lite.io.files import digest
from msa_lite.io.progress import Progress, silent

_TRIAL = Trial("scores", "scores of the rows themselves")
_SCORES = ("loss", "min_k", "min_k_pp")
_MEASURES = (
    Measure("min_k_pp", "Min-K%++", "AUC of the 40 % least likely tokens, each against its alternatives", kind="auc"),
    Measure("loss", "loss", "AUC of the mean loss", kind="auc"),
    Measure("zlib", "zlib", "AUC of the loss over the bytes of the compressed text", kind="auc"),
    Measure("min_k", "Min-K%", "AUC of the 40 % least likely tokens", kind="auc"),
    Measure("reference", "reference", "AUC of the loss minus the prior's; needs a prior", kind="auc"),
)


class _Scored(Qa):
    """Rows that are scored, and that nothing is generated from."""

    def complete(self, set_name: str, record: Record) -> Record:
        texts: list[Record] = next(iter(record.get("scores", {}).values()), [])
        figures = {name: texts[0].get(name) if texts else None for name in _SCORES}
        return {"index": record["index"], **figures, **{k: record[k] for k in ("skipped",) if k in record}}


@dataclass(frozen=True)
class Membership(Attack):
    """Membership inference by five scores."""

    _priors: dict[str, dict[str, list[float | None]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Losses of priors by set, so that a prior runs once for all models under attack."""

    name = "membership"
    source = "Min-K%++, arXiv 2404.02936; loss, zlib and reference, arXiv 2012.07805; Min-K%, arXiv 2310.16789"
    needs = ("holdout",)
    uses = ("prior",)

    def describe(self) -> dict[str, Any]:
        """Return nothing: there are no settings."""
        return {}

    def faults(self, ground: Ground) -> Iterator[str]:
        """Yield missing rows."""
        if not ground.forget:
            yield "membership: there are no forget rows to score"
        if not ground.holdout:
            yield "membership: there are no holdout rows to tell the forget rows from; give evaluate.holdout"

    def trials(self, ground: Ground) -> Sequence[Trial]:
        """Return the one trial; its control are the holdout rows."""
        return [_TRIAL]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        """Return the AUCs of the scores."""
        return _MEASURES

    def cost(self, ground: Ground) -> Cost:
        """Return the tokens of all rows."""
        items = [item for part in _scored(ground).sets.values() for item in part.items]
        return Cost(
            scored=float(sum(len(text.ids) for item in items for texts in item.texts.values() for text in texts))
        )

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        """Score the rows; yield records with a value for each measure, None where it is not defined.

        reference is None where there is no prior among the others, and where the subject or the target is the prior.
        """
        benchmark, prior = _scored(ground), self._prior(subject, others)
        steps = len(benchmark.sets) * (2 if prior else 1)
        progress(self.name, 0, steps)
        records = {name: run_items(subject.runner, benchmark, name) for name in benchmark.sets}
        progress(self.name, len(records), steps)
        before = self._losses(prior, benchmark) if prior else {}
        for name, part in records.items():
            for place, (record, item) in enumerate(zip(part, benchmark.sets[name].items, strict=True)):
                loss, old = record["loss"], before[name][place] if prior else None
                size = len(zlib.compress(_text(benchmark, item).encode()))
                record["zlib"] = None if loss is None else loss / size
                record["reference"] = None if loss is None or old is None else loss - old
        progress(self.name, steps, steps)
        yield _TRIAL, records

    def _prior(self, subject: Subject, others: Mapping[str, Subject]) -> Subject | None:
        """Return the prior, if it is another model than the subject and the target."""
        prior = others.get("prior")
        rest = [subject, *(others[name] for name in ("target",) if name in others)]
        if prior is None or any(model_identity(s.source) == model_identity(prior.source) for s in rest):
            return None
        return prior

    def _losses(self, prior: Subject, benchmark: Qa) -> dict[str, list[float | None]]:
        key = digest([model_identity(prior.source), benchmark.describe()])
        if key not in self._priors:
            self._priors[key] = {
                name: [record["loss"] for record in run_items(prior.runner, benchmark, name)] for name in benchmark.sets
            }
        return self._priors[key]


def _scored(ground: Ground) -> _Scored:
    """Return the rows as texts to score."""
    rows = ground.benchmark(("forget", "holdout"))
    return _Scored(
        rows.split,
        {name: replace(part, with_z=True, decoding=None) for name, part in rows.sets.items()},
        rows.prompter,
    )


def _text(benchmark: Qa, item: Item) -> str:
    """Return the text of the scored tokens."""
    ids = [label for texts in item.texts.values() for text in texts for label in text.labels if label != IGNORE]
    return str(benchmark.tokenizer.decode(ids, skip_special_tokens=True))
