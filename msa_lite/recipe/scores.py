"""Parts of a recipe that say what is scored, by whom, and how the best is chosen by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from msa_lite.benchmarks import BENCHMARKS, OWN, paper_scores, published, splits_help
from msa_lite.conditions import parse_condition
from msa_lite.errors import nearest
from msa_lite.recipe.inputs import Closed, Data

logger = logging.getLogger(__name__)

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_name(what: str, names: Callable[[], Iterable[str]]) -> BeforeValidator:
    """Return the check that a value is one of some names, with all of them and the nearest in its message."""

    def check(value: object) -> object:
        if value not in (choices := list(names())):
            raise ValueError(f"no {what} of this name{nearest(str(value), choices)}; choose from {', '.join(choices)}")
        return value

    return BeforeValidator(check)


def _score_names() -> list[str]:
    return ["extraction", *paper_scores()]


BenchmarkName = Annotated[
    str, _check_name("benchmark", lambda: BENCHMARKS), WithJsonSchema({"enum": [*BENCHMARKS], "type": "string"})
]
ScoreName = Annotated[
    str, _check_name("score", _score_names), WithJsonSchema({"enum": _score_names(), "type": "string"})
]


class JudgeKeys(Closed):
    """A language model that says which candidate an answer agrees with (tofu, restor)."""

    kind: Literal["none", "local", "openai"] = "none"
    """none; local: a Hugging Face model on this machine; openai: any server with OpenAI's interface, whose key is
    OPENAI_API_KEY in the environment."""
    model: str | None = None
    """openai: a model of the server, gpt-4o by default; local: a folder or repo[@revision]."""
    base_url: str | None = None
    """The server's address; default: OPENAI_BASE_URL, or OpenAI itself."""
    separate: bool = False
    """acc_forget by a call of its own, in which the ideal's answer is no candidate."""
    batch: bool = False
    """Calls go through OpenAI's Batch API: half the price, up to 24 hours."""
    concurrency: int = Field(8, ge=1, le=1000)
    """Calls under way at a time."""
    timeout: float = Field(60.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds without a sign from the server after which a call is tried again."""
    price: tuple[Price, Price] | None = None
    """USD per million prompt and completion tokens, for the estimate; default: the list price, where it is known."""


class Evaluate(Closed):
    """What is scored, and beside which ideal."""

    benchmark: BenchmarkName = Field(
        OWN, description="; ".join(f"{name}: {entry.summary}" for name, entry in BENCHMARKS.items())
    )
    split: str | None = Field(None, description=f"{splits_help()}.")
    data: str | None = None
    """The benchmark's data: a folder, or Hub id[@revision]; default: where it was published."""
    forget: Data | None = None
    """Questions about the forget set, for qa and for the choice of α and β; default: forget.data, where it is qa."""
    retain: Data | None = None
    """Questions about the retain set, likewise; default: retain.data, where it is qa."""
    holdout: Data | None = None
    """Questions that no model was trained on."""
    ideal: str | None = None
    """A model that never saw the forget set, to be shown beside the unlearned one; some metrics need it."""
    judge: JudgeKeys = JudgeKeys()
    """Who judges generated answers."""
    compat: list[str] = []
    """Deviations of published code to repeat: open-unlearning, tofu, muse, restor, or single switches."""
    limit: int | None = Field(None, ge=1, lt=2**63)
    """Score at most so many rows of each set (a seeded sample)."""
    max_new_tokens: int = Field(200, ge=1, le=1_000_000)
    """Length limit of generated answers to qa questions."""

    @model_validator(mode="after")
    def _fits_the_benchmark(self) -> Evaluate:
        judged = self.judge.kind != "none"
        if self.benchmark == OWN:
            values = {"split": self.split, "data": self.data, "compat": self.compat, "judge": judged}
            if wrong := [name for name, value in values.items() if value]:
                raise ValueError(f"{', '.join(wrong)}: not for benchmark {OWN}; choose from {', '.join(published())}")
        elif judged and not BENCHMARKS[self.benchmark].judged:
            raise ValueError(f"judge: nothing in {self.benchmark} is judged; leave it out")
        return self


def _check_condition(text: str) -> str:
    parse_condition(text)
    return text


Share = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[float, Field(gt=0, lt=1), Tag("one")],
    Discriminator(lambda value: "auto" if value in ("auto", None) else "one"),
    BeforeValidator(lambda value: "auto" if value is None else value),
]
"""auto, which recipes of earlier versions have as null, or a share between 0 and 1."""


def _present_name(score: object) -> object:
    """Return "extraction" for "exposure", its name in recipes of earlier versions, and tell the user."""
    if score != "exposure":
        return score
    logger.warning("select.score: 'exposure' is now called 'extraction'; write that, it means the same")
    return "extraction"


class Select(Closed):
    """How the best is chosen among points (α, β), or among a baseline's epochs, on validation rows."""

    validation: Share = "auto"
    """Share of the rows that the choice is made on; the final scores are on the others. auto: 30 rows of each set of
    your own, or half of a small one; of fewer than 12, all are chosen on and all are scored. By a score of tofu, muse
    or restor: 0.15, and 0.1 for restor, as in the paper."""
    by: Literal["question", "author"] = "question"
    """What is drawn for the validation part: questions, or, by a score of tofu or restor, whole authors or people."""
    score: Annotated[ScoreName | None, BeforeValidator(_present_name)] = None
    """extraction: of the points that `keep` enough of the retain set, the one with the least left to extract of the
    forget set. tofu, muse, restor: the paper's scores; muse-gap: with the distance of the AUCs to the ideal's;
    -printed: in the form in which the paper prints them. Default: extraction; of muse and restor, where no questions
    are given, their own."""
    keep: float = Field(0.9, gt=0, le=1)
    """For extraction: the share of the target's retain scores that a point has to keep, within the noise of rows."""
    maximise: str | None = None
    """In the place of a score: the metric to be highest …"""
    minimise: str | None = None
    """… or lowest, among the points that meet `subject_to`."""
    subject_to: dict[str, Annotated[str, AfterValidator(_check_condition)]] = {}
    """Conditions by metric, as {rouge_l_r: ">= 0.95 * target"}; a number, or times what target or ideal have."""
    judge: bool = True
    """Whether a judge of kind openai is asked for its terms of the score: a call for each answer of a point. A local
    one is not, since it would be in memory beside the target."""
    refine: int = Field(0, ge=0, le=5)
    """So many times, points half-way between the best and its neighbours in the grid are tried as well."""
    four_bit: bool = False
    """Hold the target in 4-bit (NF4) while points of adapters are tried; the choice is then scored again, merged."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Select:
        asked = [name for name in ("score", "maximise", "minimise") if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} cannot all decide; leave one")
        if self.subject_to and asked not in (["maximise"], ["minimise"]):
            raise ValueError("subject_to needs a metric to maximise or minimise beside it")
        return self


class ProbeKeys(Closed):
    """What forget rows are compared with, to see whether a prior has already seen them."""

    against: Data | None = None
    """Rows of the same kind that no candidate can have seen; default: evaluate.holdout, or what the benchmark has."""
    paired: bool = False
    """They are paraphrases of the forget rows: one each, in the same order."""

    @model_validator(mode="after")
    def _pairs_rows(self) -> ProbeKeys:
        if self.paired and self.against is None:
            raise ValueError("paired: only with against, which holds the paraphrases")
        return self
