"""The parts of a recipe about its results: scores, the choice of a candidate, evidence, attacks, merge, publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from msa_lite.catalogue import ATTACKS, BENCHMARKS, EVIDENCE, OWN, paper_scores, published, splits_help
from msa_lite.errors import nearest
from msa_lite.io.files.schema import Before, Closed
from msa_lite.recipe.inputs import AutoOffOr, AutoOr, Data, ModelName, check_points
from msa_lite.recipe.training import Rate
from msa_lite.settings import JudgeSettings, Margins


def _named(what: str, names: Callable[[], Iterable[str]]) -> Before:
    """Return the check that a value is one of some names, with all of them and the nearest in its message."""

    def check(value: object) -> object:
        if value not in (choices := list(names())):
            raise ValueError(f"no {what} of this name{nearest(str(value), choices)}; choose from {', '.join(choices)}")
        return value

    return Before(check, Literal[tuple(names())])


BenchmarkName = Annotated[str, _named("benchmark", lambda: BENCHMARKS)]
ScoreName = Annotated[str, _named("score", lambda: ["extraction", *paper_scores()])]
AttackName = Annotated[str, _named("attack", lambda: ATTACKS)]
EvidenceName = Annotated[str, _named("evidence", lambda: EVIDENCE)]


SETS = ("forget", "retain", "holdout")  # of rows, as `Evaluate` names them


class Evaluate(Closed):
    """The questions that models are asked, and the ideal beside them."""

    benchmark: BenchmarkName = Field(
        OWN, description="; ".join(f"{name}: {entry.summary}" for name, entry in BENCHMARKS.items())
    )
    split: str | None = Field(None, description=f"{splits_help()}.")
    data: str | None = None
    """The benchmark's data: a folder, or Hub id[@revision]. Default: the place where it was published."""
    forget: Data | None = None
    """Questions about the forget set, for qa and for the choice of α and β. Default: forget.data, if it is qa."""
    retain: Data | None = None
    """Questions about the retain set, likewise. Default: retain.data, if it is qa, minus rows of vector and filter."""
    holdout: Data | None = None
    """Questions that no model was trained on."""
    ideal: ModelName | None = None
    """A model that never saw the forget set, shown beside the unlearned one; some metrics need it."""
    judge: JudgeSettings = JudgeSettings()
    """The judge of generated answers."""
    compat: list[str] = []
    """Deviations of published code to repeat: open-unlearning, a benchmark's name, or single switches."""
    limit: int | None = Field(None, ge=1, lt=2**63)
    """Score at most this many rows of each set (a seeded sample)."""
    max_new_tokens: int = Field(200, ge=1, le=1_000_000)
    """Length limit of generated answers to qa questions."""

    @model_validator(mode="after")
    def _fits_the_benchmark(self) -> Evaluate:
        judged = self.judge.kind != "none"
        if self.benchmark == OWN:
            values = {"split": self.split, "data": self.data, "compat": self.compat, "judge": judged}
            if wrong := [name for name, value in values.items() if value]:
                raise ValueError(f"{', '.join(wrong)}: not for benchmark {OWN}; choose from {', '.join(published())}")
            return self
        if judged and not BENCHMARKS[self.benchmark].judged:
            raise ValueError(f"judge: nothing in {self.benchmark} is judged; leave it out")
        sets = {"forget": self.forget, "retain": self.retain, "holdout": self.holdout}
        if texts := [f"{name}.format" for name, data in sets.items() if data and data.format != "qa"]:
            raise ValueError(f"{', '.join(texts)}: with {self.benchmark} it must be qa")
        return self


class Select(Closed):
    """The choice among points (α, β), or among a baseline's epochs, on validation rows."""

    validation: AutoOr[Annotated[float, Field(gt=0, lt=1)]] = "auto"
    """The share of the retain rows that decide the choice; the others give the final scores. auto: 30 rows, or half of
    a small set; fewer than 12 rows serve for both. All forget rows decide. A score of a published benchmark divides all
    its sets: 0.15, and 0.1 for restor, as in the paper."""
    score: ScoreName | None = None
    """extraction: of the points that recite and know no more of the forget set than the control's 95 % bound allows and
    `keep` enough, the one that keeps most; if there is none, the nearest to control and target. tofu, muse, restor: the
    paper's scores. muse-gap: with the distance of the AUCs to the ideal's. -printed: as the paper prints the formulas.
    Default: extraction; for muse and restor without own questions, their own."""
    keep: float = Field(0.9, gt=0, le=1)
    """For extraction: the share of the target's knowledge of the retain set, above the level of unseen rows, that a
    point must keep."""


VerdictForm = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[Margins, Tag("margins")],
    Discriminator(lambda value: "margins" if isinstance(value, (dict, Margins)) else "switch"),
]
"""on, off, or margins. A fault is reported for the form that the user wrote."""


class EvidenceKeys(Closed):
    """The evidence that a run collects beside its scores."""

    collect: list[EvidenceName] = [*EVIDENCE]
    """says: what the model says instead of a forgotten answer. nearer: whether it is nearer to a model that never saw
    the rows, or to the target. []: none. If the data cannot decide, the result is undecided."""

    _once = field_validator("collect")(check_points)


class AttackKeys(Closed):
    """The attacks on the unlearned model, and on target and ideal beside it."""

    attacks: list[AttackName] = []
    """The attacks at the end of a run. Default: none. `msa-lite attack` makes these attacks, or all if none are
    named."""
    rows: int | None = Field(None, ge=1, lt=2**63)
    """Attack at most this many forget rows, a seeded sample. Default: 40 on a CPU, 400 on a GPU."""

    _once = field_validator("attacks")(check_points)


class Merge(Closed):
    """The merge of target and vectors into the unlearned model."""

    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """The stored dtype. same: the target's, file by file."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """The rounding to the stored dtype. stochastic: unbiased, for updates that are small beside the weights."""
    # SmolLM2, three histories: the distance to the ideal fell from 0.16 to 0.07, with the hold to 0.06.
    filter: AutoOffOr[Rate] = "auto"
    """The filter of the forget vector, which protects rows to keep; not in the paper. A number: its strength λ. At each
    λ, α = 1 takes back as much of the vector's effect on forget rows. auto: λ is chosen with α, up to 64; off if α is
    given. Without retain rows it uses holdout rows; without these, auto is off. off: the vector as it was fitted. For a
    baseline that trains, a number filters the change of the chosen epoch; auto is off."""
    keep_moments: bool = False
    """Keep `moments/` once the vectors are filtered; texts could be guessed from it. Default: it is removed."""
    form: Literal["model", "adapter"] = Field("model", alias="as")
    """model: a whole checkpoint. adapter: one adapter on the target, in fp32."""

    @model_validator(mode="after")
    def _adapters_are_fp32(self) -> Merge:
        if self.form == "adapter" and (self.dtype, self.rounding) != ("same", "nearest"):
            raise ValueError("an adapter is always fp32; leave out dtype and rounding")
        return self


class Publish(Closed):
    """The repository on the Hugging Face Hub that gets the model or adapter at the end of the run.

    No key here changes a result.
    """

    repo: str | None = None
    """ACCOUNT/NAME, or NAME for the account of the token. null: nothing is sent. A model with a FAIL is not sent
    either, unless you accept it (`--accept`, or `verdict: off`)."""
    private: bool = True
    """true: only its owner sees it. false: everybody does."""
    license: str | None = None
    """The licence's identifier, such as apache-2.0, if the target's card names none."""

    @model_validator(mode="after")
    def _needs_a_repository(self) -> Publish:
        if self.repo is None and self != Publish.model_construct():
            raise ValueError("settings without a repo to send to; give publish.repo, or leave publish out")
        return self
