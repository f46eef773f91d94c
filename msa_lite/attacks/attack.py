"""Define an attack: trials that a model goes through, the records of each, and what the weights still give out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

from msa_lite.catalogue import ATTACKS
from msa_lite.data import Prompter, Row, rows_identity
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmarks.benchmark import Benchmark, Records
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.models import Runner, checkpoint_folder, load_model
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import digest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.report.tables.metrics import metric_kind


@dataclass(frozen=True)
class Ground:
    """The rows that models are attacked on."""

    forget: Sequence[Row]
    """The rows that the unlearned model was to forget; all attacks score these."""
    retain: Sequence[Row]
    """Rows that the unlearned model was to keep: examples in a prompt, and rows to tune on. None of them is scored."""
    holdout: Sequence[Row]
    """Rows of the same kind as the forget rows that no model has seen; empty where there are none."""
    learnt: Sequence[Row]
    """All rows that the forget vector learnt; `forget` is among them, or asks about them."""
    prompter: Prompter
    """Renders the questions as the run did."""
    max_new_tokens: int = 200
    """The most tokens of an answer."""
    max_length: int = 512
    """The most tokens of a row to tune on."""
    seed: int = 0
    rewordings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The benchmark's other wordings of the questions by name ("paraphrased"), one for each of the `forget` rows."""

    def benchmark(self, sets: Collection[str] = ("forget", "holdout")) -> Benchmark:
        """Return the rows of some sets as questions and texts to score."""
        return load_qa({name: getattr(self, name) for name in sets if getattr(self, name)}, self.prompter,
                       self.max_new_tokens)  # fmt: skip

    def describe(self, reads: Collection[str]) -> dict[str, Any]:
        """Return what decides the records of an attack on these rows, JSON-able. reads: as of the attack."""
        parts: dict[str, Any] = {name: rows_identity(getattr(self, name)) for name in reads if name != "rewordings"}
        if "rewordings" in reads:
            parts["rewordings"] = {name: digest([*questions]) for name, questions in self.rewordings.items()}
        settings = {"max_new_tokens": self.max_new_tokens, "max_length": self.max_length, "seed": self.seed}
        return {"questions": self.benchmark().describe(), **parts, **settings}


@dataclass
class Subject:
    """A model under attack. It is loaded at the first use, and stays in memory until it is closed."""

    name: str
    """Its name in reports: "target", "ideal", "unlearned", "prior", or the user's."""
    source: Source
    _runner: Runner | None = field(default=None, repr=False)
    results: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What an attack worked out with it and needs again for the next model, by a key that names attack and rows."""

    @property
    def runner(self) -> Runner:
        """Return the model, loaded. An attack that changes its weights has to put them back."""
        if self._runner is None:
            self._runner = Runner(load_model(self.source.folder, added=self.source.added))
            self.source.check_unchanged()
        return self._runner

    def close(self) -> None:
        """Free the model's memory."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def check_unquantised(name: str, source: Source) -> None:
    """Raise UsageError for a model that is stored quantised, or lies below such an adapter. name: for the message."""
    if load_checkpoint(checkpoint_folder(source.folder)).config.get("quantization_config"):
        raise UsageError(
            f"{name} ({source.name}): its weights are stored quantised, so they can be neither rounded nor tuned; "
            "give the model that it was made from. The attack quantise rounds that itself"
        )


Means = Mapping[tuple[str, str, str], float | None]
"""The mean of a measure over the forget rows, by (model, trial, measure)."""


class Measure(NamedTuple):
    """A number that an attack draws from the records of one model."""

    name: str
    """The key of the record: "accuracy", "leak_16", "loss"."""
    label: str
    """Its name in tables."""
    meaning: str
    """The definition, in half a sentence."""
    kind: Literal["mean", "auc", "share"] = "mean"
    """mean: over the forget rows; higher means that more comes out. auc: the chance that a forget row looks better
    known than a holdout row, by a value that is low for well-known rows. share: a mean that is 1 for the target and 0
    for the ideal by definition."""
    decides: bool = True
    """True if the outcome of the attack rests on it."""


class Trial(NamedTuple):
    """One state or prompt that a model is scored in: "nf4", "prefix-4", "forget-part step 8"."""

    name: str
    """Its name: letters, digits, blanks, "-"; also that of its files."""
    label: str
    """Its name in tables."""
    is_control: bool = False
    """True for the trial without an attack, which all others are compared with."""
    is_summary: bool = False
    """True for the trial that speaks for the whole attack. Without one, the strongest trial does."""
    teaches_forget_rows: bool = False
    """True where the trial teaches scored rows themselves. Holdout rows are no control then; only an ideal is."""


class Attack(ABC):
    """An attack with its settings."""

    name: ClassVar[str]
    """Its name in `msa_lite.catalogue`, and that of its folder."""
    source: ClassVar[str]
    """The publication of its protocol."""
    needs: ClassVar[Collection[str]] = ()
    """The sets of rows and the models that it cannot do without: "retain", "holdout", "ideal", "prior"."""
    uses: ClassVar[Collection[str]] = ()
    """The models that it looks at besides the attacked one: "target", "ideal", "prior"."""
    reads: ClassVar[Collection[str]] = ("retain", "learnt", "rewordings")
    """The parts of the ground that decide its records besides the scored rows."""
    only_results: ClassVar[bool] = False
    """True where target and ideal are the ends of its scale, so that it is not made on them."""

    def describe(self) -> dict[str, Any]:
        """Return its settings, JSON-able: all that decides its records besides models and rows."""
        return asdict(self)  # type: ignore[call-overload]

    def left_out(self, ground: Ground) -> dict[str, str]:
        """Return the parts of the attack that these rows do not allow, each with the reason. The others are made."""
        return {}

    def count_rows(self, ground: Ground) -> dict[str, int]:
        """Return the forget rows that each part of the attack scores; the part "" is the whole attack.

        An attack that is decided by AUCs returns nothing: their intervals have no width that rows alone decide.
        """
        return {"": len(ground.forget)}

    def fit_to(self, models: Mapping[str, Source]) -> Attack:
        """Return the attack with settings that depend on the models, the same for all of them.

        models: those that it is made on, and those that it uses, by name. Raise UsageError or MismatchError for models
        that it cannot be made on; only headers are read.
        """
        return self

    @abstractmethod
    def trials(self, ground: Ground) -> Sequence[Trial]:
        """Return the trials in their order."""

    @abstractmethod
    def measures(self, ground: Ground) -> Sequence[Measure]:
        """Return the numbers that its records give."""

    def figures(self, means: Means, model: str) -> dict[str, float]:
        """Return further figures of the published protocol for a model, by name: R of relearning, Q of rounding.

        means: the mean of a measure, by (model, trial, measure).
        """
        return {}

    @abstractmethod
    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        """Attack a model; yield the records of each trial by set ("forget", "holdout"), in the order of the rows.

        others: further models by name ("target", "ideal", "prior"), loaded at their first use; the caller closes them.
        progress: called with the label of the attack and the share that is done.
        """


def check_attack(name: str) -> None:
    """Raise UsageError for a name that no attack has."""
    if name not in ATTACKS:
        raise UsageError(f"no attack '{name}'{nearest(name, ATTACKS)}; choose from {', '.join(ATTACKS)}")


def make_attack(name: str, settings: Mapping[str, Any]) -> Attack:
    """Return an attack by its name, with settings in the place of its defaults. Raise UsageError for another name."""
    check_attack(name)
    module, _, kind = ATTACKS[name].implementation.rpartition(".")
    make: Callable[..., Attack] = getattr(import_module(module), kind)
    return make(**settings)


# Score of a record → its entry in the table of metrics. Published comparisons after an attack rest on the first.
_OF_QUESTIONS = {
    "extraction_strength": "extraction_strength", "accuracy": "accuracy_f", "rouge_l": "rouge_l_f",
    "probability": "probability_f",
}  # fmt: skip
_OF_TEXTS = {
    "extraction_strength": "extraction_strength", "exact_memorization": "exact_memorization",
    "probability": "probability_f",
}  # fmt: skip


def recall_measures(ground: Ground) -> tuple[Measure, ...]:
    """Return the scores of records of `ground.benchmark()`, for which higher means that more comes out.

    All decide but the probability, which stays far from 1 for answers that come out word by word. Where all forget rows
    are texts, nothing is generated, and exact memorization takes the place of accuracy and ROUGE-L.
    """
    scores = _OF_TEXTS if all(row.text for row in ground.forget) else _OF_QUESTIONS
    kinds = {score: metric_kind(metric) for score, metric in scores.items()}
    return tuple(
        Measure(score, kind.label, kind.formula, decides=score != "probability") for score, kind in kinds.items()
    )
