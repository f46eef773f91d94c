"""Define a benchmark: items to run a model over, a record of each, and metrics of the records.

A benchmark is one module with a value of `Benchmark`, and one entry in `msa_lite.catalogue`.

Records and metrics are separate layers. Records hold everything that needs a model, so metrics can be computed again
without one, beside another ideal or with a judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

from msa_lite.catalogue import BENCHMARKS
from msa_lite.data import Example, Prompter, name_rows, pad_id, sample_rows, special_names
from msa_lite.errors import DataError, join_faults
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.forward import MAX_TOKENS, completion
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.verdict.bounds import Models, Record, Records
from msa_lite.evals.verdict.outcome import Weighed, is_recited
from msa_lite.io.files.writing import digest
from msa_lite.report import Metric
from msa_lite.report.run.rows import Failure
from msa_lite.report.tables.metrics import MEMBERSHIP, metric_kind
from msa_lite.settings import JudgeSettings


@dataclass(frozen=True)
class Item:
    """One question, or one piece of text."""

    index: int
    """Its row in the data set."""
    fields: Mapping[str, Any]
    """The part of the data that its record repeats."""
    texts: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    """The texts to score teacher-forced, by name ("answer", "perturbed")."""
    prompt: list[int] | None = None
    """The token ids to generate an answer from; None where none is generated."""
    group: int | str | None = None
    """The author or person that it is about, where the data set has several items about one. Its record repeats it as
    "subject", so that intervals can count the persons."""

    def can_be_asked(self, window: float) -> bool:
        """Check whether a model of this window has room for an answer to the prompt."""
        return len(self.prompt or ()) < window

    def can_be_scored(self, window: float) -> bool:
        """Check whether the texts fit a window. Their last tokens are predicted, and never an input."""
        return all(len(text.ids) - 1 <= window for group in self.texts.values() for text in group)


@dataclass(frozen=True)
class ItemSet:
    """Items that are treated alike."""

    items: Sequence[Item]
    """The items, in the order of their records."""
    decoding: Decoding | None = None
    """The way in which answers to their prompts are generated."""
    with_z: bool = False
    """True where Min-K++ is wanted."""
    ends: bool = True
    """True where the texts end in an end token, which memorization metrics leave out."""

    @property
    def scored(self) -> list[Item]:
        """The items with texts."""
        return [item for item in self.items if item.texts]

    @property
    def answered(self) -> list[Item]:
        """The items with a prompt."""
        return [item for item in self.items if item.prompt is not None]

    def digest(self) -> str:
        """Return a hash of everything that is asked: data, token ids, decoding. Groups do not change it."""
        items = [
            [i.index, dict(i.fields), i.prompt, {name: [t.ids for t in texts] for name, texts in i.texts.items()}]
            for i in self.items
        ]
        return digest([items, asdict(self.decoding) if self.decoding else None])

    def describe(self) -> dict[str, Any]:
        """Return what is asked, JSON-able: the number of rows, the hash of all, and where there are groups, theirs."""
        groups = [item.group for item in self.items]
        subjects = {"subjects": digest(groups)} if any(group is not None for group in groups) else {}
        return {"rows": len(self.items), "sha256": self.digest()} | subjects


@dataclass(frozen=True)
class BenchmarkSettings:
    """The part of a published benchmark to load."""

    data: str | None = None
    """A folder, or Hub id[@revision]; None for the benchmark's `home`."""
    split: str | None = None
    """None for the benchmark's default one."""
    limit: int | None = None
    """The most items of each set, a seeded sample; None for all."""
    seed: int = 0
    compat: frozenset[str] = frozenset()
    """The deviations of published code to repeat (`evals.compat`)."""


def _no_wordings(settings: BenchmarkSettings, questions: Sequence[str]) -> dict[str, list[str]]:
    return {}


def _no_calls(records: Records, ideal: Records | None, judge: JudgeSettings) -> list[JudgeCall]:
    return []


def _no_verdict(models: Models) -> Weighed:
    return "the benchmark does not say what a verdict rests on"


def _set_of_side(records: Records, side: str) -> list[tuple[str, int]]:
    return [(side, at) for at in range(len(records.get(side, ())))]


def fails_by_verdict(record: Record) -> bool | None:
    """Check whether a row to forget is recited, by the check of the verdict; None where the model was not asked."""
    score = record.get("exact_memorization" if "text" in record else "generated")
    return None if score is None else is_recited(record)


@dataclass(frozen=True)
class Benchmark:
    """A data set with its metrics: three functions and a few facts, and once it is loaded, its items."""

    name: str
    """Its name in `msa_lite.catalogue.BENCHMARKS`."""
    score: Callable[[Benchmark, str, Record], Record]
    """score(benchmark, set, record): return the record with the scores that follow from its texts, such as ROUGE."""
    metrics: Callable[[Records, Records | None], dict[str, Metric]]
    """metrics(records, ideal's): return the metrics. Those that need an ideal have the reason where there is none."""
    load: Callable[[Prompter, BenchmarkSettings], Benchmark] | None = None
    """Return it with its items; None for one without data of its own. Raise UsageError for an unknown split, DataError
    with all that the data lacks."""

    home: str | None = None
    """The data set that `load` takes by default; None where it has to be named."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """The data set by split, where splits have several."""
    prompted: bool = True
    """False where questions are asked as they are, without the prompt of a recipe."""
    forget_set: str = "forget"
    """The set of the rows to forget."""
    sides: tuple[str, str] | None = None
    """The sets that min_k and min_k_pp are to tell apart: the texts to forget, and texts that nobody learnt."""
    vital: Collection[str] = ()
    """Metrics of what is to be kept. A candidate that has 0 where the target has more is broken."""
    default_score: str | None = None
    """The selection score where neither the recipe names one nor gives questions about the forget set."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Its own `compat` switches: for each, what published code does otherwise."""
    reads: Collection[str] = ()
    """The common `compat` switches that change something in it."""
    preset: Collection[str] = ()
    """The switches that its name stands for in `compat`: what its authors' code does."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else decides its records, for `describe`."""

    weigh: Callable[[Models], Weighed] = _no_verdict
    """Return what became of the forget and the retain set, or the reason why nothing can be said."""
    fails: Callable[[Record], bool | None] = fails_by_verdict
    """Check whether a model fails on a row to forget (`failure`); None where it was not asked."""
    failure: Failure = "recited"
    """The word for a model that fails on a row to forget."""
    listed: Callable[[Records], Sequence[Record]] | None = None
    """Return the records of the rows to forget, where they are not those of `forget_set`."""
    places: Callable[[Records, str], list[tuple[str, int]]] = _set_of_side
    """Return (set, position) of the records about what is to be forgotten, or kept ("forget", "retain")."""
    judge_calls: Callable[[Records, Records | None, JudgeSettings], list[JudgeCall]] = _no_calls
    """Return the calls to a judge about records, beside those of the ideal."""
    wordings: Callable[[BenchmarkSettings, Sequence[str]], dict[str, list[str]]] = _no_wordings
    """Return other wordings of questions about the forget set by name, one for each. Raise as `load`."""

    split: str = ""
    """The part of the data set, as reports name it."""
    sets: Mapping[str, ItemSet] = field(default_factory=dict)
    """The items by set; none before it is loaded."""
    prompter: Prompter = None  # type: ignore[assignment]  # `over` sets it with the items
    """The way in which questions become token ids."""
    compat: frozenset[str] = frozenset()
    """The deviations of published code that are repeated (`evals.compat`)."""

    def over(
        self, split: str, sets: Mapping[str, ItemSet], prompter: Prompter, compat: frozenset[str] = frozenset()
    ) -> Benchmark:
        """Return the benchmark with these items."""
        return replace(self, split=split, sets=sets, prompter=prompter, compat=compat)

    @property
    def count(self) -> int:
        """The number of its items."""
        return sum(len(part.items) for part in self.sets.values())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that made the ids."""
        return self.prompter.tokenizer

    @property
    def has_special(self) -> bool:
        """Check whether its rows hold special tokens, which earlier versions left out of answers."""
        names = special_names(self.tokenizer)
        return any(name in text for text in self._texts() for name in names)

    def _texts(self) -> Iterator[str]:
        values = (value for part in self.sets.values() for item in part.items for value in item.fields.values())
        return (value for value in values if isinstance(value, str))

    def ids(self) -> set[int]:
        """Return the token ids that a model is given, with the one that fills up rows."""
        items = [item for part in self.sets.values() for item in part.items]
        rows = [text.ids for item in items for texts in item.texts.values() for text in texts]
        return {pad_id(self.tokenizer)}.union(*rows, *(item.prompt for item in items if item.prompt))

    def unasked(self) -> list[str]:
        """Return a sentence for each set with items whose prompts fill the window, which no model answers."""
        return self._beyond(
            Item.can_be_asked, ": the prompt alone fills the window of {} tokens, so nothing can be answered"
        )

    def unscored(self) -> list[str]:
        """Return a sentence for each set with items whose texts, each with its prompt, are longer than the window."""
        return self._beyond(
            Item.can_be_scored, " are longer than the window of {} tokens, so their probabilities are not scored"
        )

    def _beyond(self, fits: Callable[[Item, float], bool], reason: str) -> list[str]:
        window, notes = self.prompter.window or math.inf, []
        for name, part in self.sets.items():
            if long := [item.index for item in part.items if not fits(item, window)]:
                notes.append(f"{name}: {name_rows(long, len(part.items))}{reason.format(window)}")
        return notes

    def describe(self) -> dict[str, Any]:
        """Return what is asked and how, JSON-able. Two evaluations are comparable when this is equal."""
        other = any(map(answers.is_other_script, self._texts()))
        return {
            "benchmark": self.name,
            "split": self.split,
            "prompt": self.prompter.describe(),
            "sets": {name: part.describe() for name, part in self.sets.items()},
            "compat": sorted(self.compat),
        } | {
            **self.about,
            **({"rouge_words": answers.RULE} if other else {}),
            **({"special_tokens": "kept"} if self.has_special else {}),
        }

    def only(self, names: Collection[str]) -> Benchmark:
        """Return the benchmark with only these sets."""
        return replace(self, sets={name: part for name, part in self.sets.items() if name in names})

    def without(self, questions: Collection[str]) -> Benchmark:
        """Return the benchmark without some questions: those that a choice was made by."""
        sets = {
            name: replace(part, items=[i for i in part.items if i.fields.get("question") not in questions])
            for name, part in self.sets.items()
        }
        return replace(self, sets=sets, split=f"{self.split} test")

    def divide(self, share: float, seed: int) -> tuple[Benchmark, Benchmark]:
        """Return (validation, test). Every set is divided by itself, seeded; the parts share no question of a set.

        share: the part of a set's questions that goes to validation; at least one does. Raise DataError where a part
        of a set would be empty.
        """
        validation, test, faults = {}, {}, []
        for name, part in self.sets.items():
            units = [item.fields.get("question") or item.index for item in part.items]
            distinct = list(dict.fromkeys(units))
            drawn = set(sample_rows(distinct, max(1, round(share * len(distinct))), seed))
            if len(drawn) == len(distinct):
                faults.append(f"{name}: {len(distinct)} question{'' if len(distinct) == 1 else 's'} cannot be divided")
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
        """Return the names of the metrics that a model gets beside an ideal, before any model is scored."""
        unscored = {name: [dict(item.fields) for item in part.items] for name, part in self.sets.items()}
        return [*self.metrics(unscored, unscored)]

    def resolution(self, metrics: Collection[str]) -> str | None:
        """Say how coarse those metrics are that tell `sides` apart; None where none of them does.

        An AUC of n × m texts moves in steps of 1/nm. Its standard error at chance is that of the Mann-Whitney
        statistic, √((n + m + 1) / 12nm).
        """
        names = [name for name in metrics if metric_kind(name).group == MEMBERSHIP]
        counts = [len(self.sets[name].scored) for name in self.sides or () if name in self.sets]
        if not names or len(counts) < 2 or not all(counts):
            return None
        n, m = counts
        error = math.sqrt((n + m + 1) / (12 * n * m))
        return (
            f"{', '.join(names)}: measured on {n} × {m} pairs of texts, so that the AUC moves in steps of "
            f"1/{n * m}, with a standard error of {error:.2f} at chance"
        )


@dataclass(frozen=True)
class JudgeCall:
    """One call to a judge."""

    set_name: str
    """The set of the record that it is about."""
    index: int
    """The index of the record."""
    ask: Ask
    """The messages and the letters to choose from."""
    scores: Mapping[str, Record]
    """The record's judged scores by name, for each possible letter, "Z" included."""


def judged_rows(name: str, parts: Sequence[Benchmark | None], limit: int | None = None) -> str:
    """Say which rows of a benchmark a judge is asked about. parts: its loaded questions; none: not known yet."""
    loaded, told = [part.sets for part in parts if part], []
    for place in BENCHMARKS[name].judged:
        count = sum(len(sets[place].items) for sets in loaded if place in sets)
        told.append(f"{place} ({count if loaded else 'all' if limit is None else f'at most {limit}'})")
    return f"the questions of {name} {' and '.join(told)} with their right answers"


def find_benchmark(name: str) -> Benchmark:
    """Return a benchmark, without items, by its name in `BENCHMARKS`."""
    module, _, constant = BENCHMARKS[name].implementation.rpartition(".")
    benchmark: Benchmark = getattr(import_module(module), constant)
    return benchmark


def data_home(name: str, split: str | None) -> str | None:
    """Return the data set that a benchmark loads by default for a split; None where it has to be named."""
    benchmark = find_benchmark(name)
    return benchmark.homes.get(split or "", benchmark.home)


def text_item(tokenizer: Any, index: int, text: str, group: str | None = None, window: int | None = None) -> Item:
    """Return the item of a text that is scored and nothing is generated from. window: the most tokens to read of it."""
    most = MAX_TOKENS if window is None else min(MAX_TOKENS, window)
    return Item(index, {"text": text}, {"text": completion(tokenizer, index, "", text, most)}, group=group)


def flat_scores(record: Record, name: str = "answer") -> Record:
    """Return the scores of a record's text by that name, of several texts the first's; all None without such a text."""
    texts = record.get("scores", {}).get(name) or [{}]
    keys = ("probability", "extraction_strength", "exact_memorization", "min_k", "min_k_pp")
    return {key: texts[0].get(key) for key in keys if key != "min_k_pp" or "min_k_pp" in texts[0]}


def losses(record: Record, name: str) -> list[float | None]:
    """Return the mean −log p of each of a record's texts by that name."""
    return [text["loss"] for text in record.get("scores", {}).get(name, [])]


def column(records: Sequence[Record], key: str) -> list[float | None]:
    """Return one score of every record."""
    return [record.get(key) for record in records]
