"""What a benchmark is: items to run a model over, a record of each, and metrics of the records.

Records and metrics are separate layers: whatever needs a model is in the records, so metrics can be computed again
without one, beside another ideal or with a judge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from msa_lite.data import Example, Prompter
from msa_lite.evals import scoring
from msa_lite.evals.forward import TokenScores
from msa_lite.evals.generate import Decoding
from msa_lite.evals.judge import Ask
from msa_lite.io.manifest import digest
from msa_lite.report import Metric

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]
"""Records of each set by its name, in the order of the items."""


@dataclass(frozen=True)
class Item:
    """One question, or one piece of text.

    index: its row in the data set. fields: what its record repeats of the data. texts: what is scored teacher-forced,
    by name ("answer", "perturbed"). prompt: ids that an answer is generated from, or None.
    """

    index: int
    fields: Mapping[str, Any]
    texts: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    prompt: list[int] | None = None


@dataclass(frozen=True)
class ItemSet:
    """Items that are treated alike.

    decoding: how answers to their prompts are made. with_z: whether Min-K++ is wanted. ends: whether the texts end in
    an end token, which memorization metrics leave out.
    """

    items: Sequence[Item]
    decoding: Decoding | None = None
    with_z: bool = False
    ends: bool = True

    @property
    def scored(self) -> list[Item]:
        """The items with texts."""
        return [item for item in self.items if item.texts]

    @property
    def answered(self) -> list[Item]:
        """The items with a prompt."""
        return [item for item in self.items if item.prompt is not None]

    def digest(self) -> str:
        """Hash of all that is asked: data, token ids, and how answers are made."""
        items = [
            [i.index, dict(i.fields), i.prompt, {name: [t.ids for t in texts] for name, texts in i.texts.items()}]
            for i in self.items
        ]
        return digest([items, asdict(self.decoding) if self.decoding else None])


@dataclass(frozen=True)
class Benchmark(ABC):
    """A data set with its metrics, loaded: what each kind adds are its records' own scores, and the aggregates."""

    split: str
    sets: Mapping[str, ItemSet]
    prompter: Prompter
    compat: frozenset[str] = frozenset()

    name: ClassVar[str]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that made the ids."""
        return self.prompter.tokenizer

    def describe(self) -> dict[str, Any]:
        """What was asked and how, JSON-able: two evaluations are comparable when this is equal."""
        return {
            "benchmark": self.name,
            "split": self.split,
            "prompt": self.prompter.describe(),
            "sets": {name: {"rows": len(part.items), "sha256": part.digest()} for name, part in self.sets.items()},
            "compat": sorted(self.compat),
        }

    def without(self, questions: Collection[str]) -> Benchmark:
        """The same with some questions of its forget and retain sets left out: those that a choice was made by."""
        sets = {
            name: replace(part, items=[i for i in part.items if i.fields.get("question") not in questions])
            for name, part in self.sets.items()
        }
        return replace(self, sets=sets, split=f"{self.split} test")

    @abstractmethod
    def complete(self, set_name: str, record: Record) -> Record:
        """A record with the scores that follow from its texts: ROUGE, truth ratio and the like."""

    @staticmethod
    @abstractmethod
    def metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
        """Aggregates. Without records of the ideal, metrics that need it are None with the reason."""

    def asks(self, records: Records, ideal: Records | None, separate: bool) -> list[Asked]:
        """What a judge is to be asked; nothing for most benchmarks. separate: see `JudgeSettings`."""
        return []


@dataclass(frozen=True)
class Asked:
    """One call to a judge: whose record (set and index), and what each letter of the reply is worth.

    scores: for each possible letter, "Z" included, the record's judged scores by name.
    """

    set_name: str
    index: int
    ask: Ask
    scores: Mapping[str, Record]


def token_record(scores: TokenScores, drop_last: bool, es_floor: bool) -> Record:
    """What a record keeps of one text scored teacher-forced.

    n_tokens: labelled tokens, over which `probability` and `loss` (mean −log p) go. The memorization scores go without
    the last of them where `drop_last`. Scores that are not defined are None.
    """
    cut = slice(None, -1 if drop_last else None)
    record = {
        "n_tokens": len(scores.log_probs),
        "loss": scoring.mean_loss(scores.log_probs),
        "probability": scoring.probability(scores.log_probs),
        "extraction_strength": scoring.extraction_strength(scores.matches[cut], es_floor),
        "exact_memorization": scoring.exact_memorization(scores.matches[cut]),
        "min_k": scoring.min_k(scores.log_probs[cut]),
    }
    return record if scores.z is None else record | {"min_k_pp": scoring.min_k_pp(scores.z[cut])}


def flat_scores(record: Record, name: str = "answer") -> Record:
    """The scores of a record's text by that name, all None where it has none; of several texts the first's."""
    texts = record.get("scores", {}).get(name) or [{}]
    keys = ("probability", "extraction_strength", "exact_memorization", "min_k", "min_k_pp")
    return {key: texts[0].get(key) for key in keys if key != "min_k_pp" or "min_k_pp" in texts[0]}


def losses(record: Record, name: str) -> list[float | None]:
    """Mean −log p of each of a record's texts by that name."""
    return [text["loss"] for text in record.get("scores", {}).get(name, [])]


def column(records: Sequence[Record], key: str) -> list[float | None]:
    """One score of every record."""
    return [record.get(key) for record in records]
