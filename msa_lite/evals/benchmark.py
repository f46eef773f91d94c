"""What a benchmark is: items to run a model over, a record of each, and metrics of the records.

Records and metrics are separate layers: whatever needs a model is in the records, so metrics can be computed again
without one, beside another ideal or with a judge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar, Literal

from msa_lite.data import Example, Prompter, pad_id, sample_rows
from msa_lite.errors import DataError, UsageError, join_faults
from msa_lite.evals import scoring
from msa_lite.evals.forward import TokenScores
from msa_lite.evals.generate import Decoding
from msa_lite.evals.judge import Ask
from msa_lite.io.files import digest
from msa_lite.report import Metric
from msa_lite.report.metrics import MEMBERSHIP, metric_kind

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]
"""Records of each set by its name, in the order of the items."""


@dataclass(frozen=True)
class Item:
    """One question, or one piece of text.

    index: its row in the data set. fields: what its record repeats of the data. texts: what is scored teacher-forced,
    by name ("answer", "perturbed"). prompt: ids that an answer is generated from, or None. group: whom it is about,
    where the data set has several items about one author or person.
    """

    index: int
    fields: Mapping[str, Any]
    texts: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    prompt: list[int] | None = None
    group: int | str | None = None


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
        """Hash of all that is asked: data, token ids, and how answers are made; whom it is about changes nothing."""
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
    sides: ClassVar[tuple[str, str] | None] = None
    """The sets that min_k and min_k_pp are to tell apart: what is to be forgotten, and what nobody learnt."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that made the ids."""
        return self.prompter.tokenizer

    def ids(self) -> set[int]:
        """Return the token ids that a model is given, with the one that fills up rows."""
        items = [item for part in self.sets.values() for item in part.items]
        rows = [text.ids for item in items for texts in item.texts.values() for text in texts]
        return {pad_id(self.tokenizer)}.union(*rows, *(item.prompt for item in items if item.prompt))

    def describe(self) -> dict[str, Any]:
        """What was asked and how, JSON-able: two evaluations are comparable when this is equal."""
        return {
            "benchmark": self.name,
            "split": self.split,
            "prompt": self.prompter.describe(),
            "sets": {name: {"rows": len(part.items), "sha256": part.digest()} for name, part in self.sets.items()},
            "compat": sorted(self.compat),
        }

    def only(self, names: Collection[str]) -> Benchmark:
        """Return the same benchmark with no more than the sets of these names."""
        return replace(self, sets={name: part for name, part in self.sets.items() if name in names})

    def without(self, questions: Collection[str]) -> Benchmark:
        """The same with some questions of its forget and retain sets left out: those that a choice was made by."""
        sets = {
            name: replace(part, items=[i for i in part.items if i.fields.get("question") not in questions])
            for name, part in self.sets.items()
        }
        return replace(self, sets=sets, split=f"{self.split} test")

    def divide(
        self, share: float, seed: int, by: Literal["question", "author"] = "question"
    ) -> tuple[Benchmark, Benchmark]:
        """(validation, test): every set divided by itself, seeded; no item is in both, and no question of a set.

        share: of the questions of a set, or of its authors, that go to validation; at least one does. by: what is
        drawn; with "author", all items of a group stay together, and sets without groups are divided by question.
        Raises UsageError where no set has groups, DataError where a part of a set would be empty.
        """
        if by == "author" and all(item.group is None for part in self.sets.values() for item in part.items):
            raise UsageError(f"select.by author: {self.name} has no authors; leave it at question")
        validation, test, faults = {}, {}, []
        for name, part in self.sets.items():
            units = [
                item.fields.get("question") or item.index if by == "question" or item.group is None else (item.group,)
                for item in part.items
            ]
            known = list(dict.fromkeys(units))
            drawn = set(sample_rows(known, max(1, round(share * len(known))), seed))
            if len(drawn) == len(known):
                kind = "author" if any(isinstance(unit, tuple) for unit in known) else "question"
                faults.append(f"{name}: {len(known)} {kind}{'' if len(known) == 1 else 's'} cannot be divided")
            pairs = list(zip(part.items, units, strict=True))
            validation[name] = replace(part, items=[item for item, unit in pairs if unit in drawn])
            test[name] = replace(part, items=[item for item, unit in pairs if unit not in drawn])
        if faults:
            headline = f"{share:g} of {self.name} for the choice, and the rest for the scores, leaves a part empty"
            raise DataError(join_faults(f"{headline}; raise evaluate.limit, where there is one:", faults))
        return (
            replace(self, sets=validation, split=f"{self.split} validation"),
            replace(self, sets=test, split=f"{self.split} test"),
        )

    def metric_names(self) -> list[str]:
        """Names of the metrics that a model gets beside an ideal, known before any is scored."""
        unscored = {name: [dict(item.fields) for item in part.items] for name, part in self.sets.items()}
        return [*self.metrics(unscored, unscored)]

    def resolution(self, metrics: Collection[str]) -> str | None:
        """How coarse those of the metrics are that rest on telling `sides` apart; None where none of them does.

        An AUC of n × m texts moves in steps of 1/nm. Its standard error at chance is that of the Mann-Whitney
        statistic, √((n + m + 1) / 12nm).
        """
        resting = [name for name in metrics if metric_kind(name).group == MEMBERSHIP]
        counts = [len(self.sets[name].scored) for name in self.sides or () if name in self.sets]
        if not resting or len(counts) < 2 or not all(counts):
            return None
        n, m = counts
        error = sqrt((n + m + 1) / (12 * n * m))
        return (
            f"{', '.join(resting)}: measured on {n} × {m} pairs of texts, so that the AUC moves in steps of "
            f"1/{n * m}, with a standard error of {error:.2f} at chance"
        )

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
