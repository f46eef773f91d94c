"""Define the recipe of a run as a closed schema. All faults are reported at once, before any work.

The text below a field is its description in `msa-lite recipes schema`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from msa_lite.catalogue import BENCHMARKS, OWN
from msa_lite.io.files.schema import Closed
from msa_lite.recipe.inputs import (
    AutoOr,
    ColumnNames,
    Data,
    Demo,
    History,
    ModelName,
    OneOrMore,
    Prompt,
    Request,
    RetainData,
    Trackers,
    check_points,
    choose_prior,
    no_truth,
)
from msa_lite.recipe.outputs import SETS, AttackKeys, Evaluate, EvidenceKeys, Merge, Publish, Select, VerdictForm
from msa_lite.recipe.training import SEEDS, Baseline, RetainVector, VectorSpec
from msa_lite.settings import Columns, Margins, PromptSettings
from msa_lite.strengths import Strengths

Strength = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_truth)]
AUTO: Literal["auto"] = "auto"
AUTO_FILTERS = (1.0, 4.0, 16.0, 64.0)
"""The strengths λ of the filter that `merge.filter: auto` tries; 64 only where 16 is best."""
NO_PRIOR = (
    "the recipe names no prior, so the vectors are fitted from the target itself (task_vector); with the filter this "
    "came as near to the ideal as with a prior in three histories of SmolLM2-135M, but not in three of small models"
)
AUTO_HOLD = 1.0
"""The weight h of `vector.hold: auto`, where there is a hold."""
StrengthValues = AutoOr[OneOrMore[Strength]]
"""auto, a value, or a list of values."""


def beyond_search(strength: float) -> list[str]:
    """Return the sentence that the search does not go as far as this λ, and why; nothing for a smaller one."""
    why = "with λ = 256, three histories were farther from the aim at the one α that was tried"
    last = AUTO_FILTERS[-1]
    return [f"λ = {strength:g} is beyond the search, which ends at {last:g}: {why}"] if strength > last else []


class Forget(Closed):
    """The forget set, and the strength α of its vector, which is subtracted."""

    data: Data
    """The rows to forget."""
    alpha: StrengthValues = AUTO
    """α ≥ 0. A list: the best value on validation rows is taken. auto: a search from 1/16 to 8."""

    _points = field_validator("alpha")(check_points)


class Retain(Closed):
    """The retain set, and the strength β of its vector, which is added."""

    data: RetainData
    """The rows to keep."""
    beta: StrengthValues = AUTO
    """β ≥ 0. 0: no retain vector is fitted. A list: as for α. auto: 0 with a filter, else a search among 0, α/2 and
    α."""
    vector: RetainVector | None = None
    """The settings of the retain vector's fit that differ from those of `vector`. null: none."""

    _points = field_validator("beta")(check_points)


class Recipe(Closed):
    """A run: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), with its models, data, strengths and scores."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": [key]} for key in ("prior", "history", "retain")]}
    )

    target: ModelName
    """θ_D, the finished model that is to forget: a folder or repo[@revision]."""
    history: History | None = None
    """Earlier checkpoints, instead of `prior`. The latest one from before the exposure becomes the prior."""
    prior: ModelName | None = None
    """θ_0, a checkpoint from before the target saw the forget set: a folder or repo[@revision]. Without `prior` and
    `history`, the vectors are fitted from the target itself (task_vector). This needs rows to keep, for the filter, and
    holdout rows or an ideal."""
    forget: Forget
    """The forget set."""
    retain: Retain | None = Field(None, validate_default=True)
    """The retain set. It is optional if there is a prior."""
    earlier: list[str] = []
    """The folders of finished runs: earlier requests against the same target. The merge includes their vectors, and
    those of their own earlier runs, at the strengths of their runs. Some of their rows are scored again."""
    vector: VectorSpec = VectorSpec()
    """The fit of the vectors. `retain.vector` may give the retain vector other settings."""
    columns: ColumnNames = Columns()
    """The columns of all data sets that do not name their own."""
    prompt: Prompt = PromptSettings()
    """The prompt of rows of format qa."""
    merge: Merge = Merge()
    """The merge."""
    evaluate: Evaluate | None = Evaluate()
    """The scores. null: nothing is scored."""
    select: Select = Select()
    """The choice of α and β, or of a baseline's epoch."""
    baseline: Baseline = Baseline()
    """The methods that MSA is compared with (`msa-lite baseline METHOD`)."""
    evidence: EvidenceKeys = EvidenceKeys()
    """The evidence that a run collects beside its scores."""
    attack: AttackKeys = AttackKeys()
    """The attacks on the unlearned model (`msa-lite attack`)."""
    verdict: VerdictForm = True
    """Judge the run. off: the exit code is 0 even if nothing was forgotten, and checks before the fit (does the target
    know the rows?) only warn. Or the margins of a PASS, as {recited: 0.10, left: 0.20, kept: 0.85}."""
    demo: Demo | None = None
    """Models and data that the run makes first, for a demonstration."""
    publish: Publish = Publish()
    """The repository on the Hub that the model is sent to at the end, if any."""
    request: Request | None = None
    """The id of the deletion request, at most 200 characters. record.json has it; it does not change a result."""
    track: Trackers = []
    """The trackers that get the loss of each step and the scores of each candidate: tensorboard (files in
    `$output/tracking`), wandb, trackio or mlflow (a file there, or the server of MLFLOW_TRACKING_URI), or a list of
    them. They get no rows, and change no result."""
    output: str
    """The folder of the run."""
    seed: int = Field(0, ge=0, lt=SEEDS)
    """The seed of every random choice."""

    @model_validator(mode="after")
    def _has_retain_rows(self) -> Recipe:
        if isinstance(self.merge.filter, float) and not self.can_filter:
            raise ValueError(
                "merge.filter: only with rows to keep, or rows that no model saw; give retain.data, or evaluate.holdout"
            )
        uses = {"vector.hold": self.vector.hold not in (AUTO, 0.0), "vector.start: retain": self.starts_at_retain}
        if self.retain is None and (names := [name for name, is_used in uses.items() if is_used]):
            raise ValueError(f"{' and '.join(names)}: only with rows to keep; give retain.data, or leave it out")
        if self.starts_at_retain and self.retain and self.retain.beta not in (AUTO, 0.0):
            raise ValueError("retain.beta: there is no β with vector.start: retain; leave it out")
        return self

    @field_validator("prior")
    @classmethod
    def _prior_or_history(cls, prior: str | None, info: ValidationInfo) -> str | None:
        if prior is not None and info.data.get("history") is not None:
            raise ValueError("stands beside a history, from which the prior is chosen; leave out one, or set it null")
        return prior

    @field_validator("retain")
    @classmethod
    def _retain_or_prior(cls, retain: Retain | None, info: ValidationInfo) -> Retain | None:
        if retain is None and all(info.data.get(key, "faulty") is None for key in ("prior", "history")):
            raise PydanticCustomError(
                "missing",
                "is missing, and so is a prior. Name the prior, or a history from which it is chosen; or give "
                "retain.data: without a prior the vectors are fitted from the target, and their filter needs such rows",
            )
        return retain

    @model_validator(mode="after")
    def _works_without_prior(self) -> Recipe:
        if self.has_prior:
            return self
        if self.baseline.start == "prior":
            raise ValueError("baseline.start: there is no prior; name one, or leave start at target")
        if self.evaluate and self.evaluate.benchmark == OWN and not (self.evaluate.ideal or self.evaluate.holdout):
            raise ValueError(
                "evaluate.holdout: without a prior or an ideal, there is no control for the verdict; give "
                "evaluate.holdout, similar rows that no model has learnt"
            )
        return self

    @field_validator("earlier")
    @classmethod
    def _names_runs_once(cls, earlier: list[str]) -> list[str]:
        places = [Path(name).expanduser().resolve() for name in earlier]
        if twice := [name for name, place in zip(earlier, places, strict=True) if places.count(place) > 1]:
            raise ValueError(f"{twice[-1]}: stands there twice; leave one out")
        return earlier

    @model_validator(mode="after")
    def _vectors_fit_the_result(self) -> Recipe:
        if self.merge.form == "adapter" and self.vector.mode == "full":
            raise ValueError("merge.as: vector.mode full makes no adapter; choose merge.as model, or vector.mode lora")
        return self

    @model_validator(mode="after")
    def _points_need_scores(self) -> Recipe:
        if self.evaluate is None and AUTO in (self.forget.alpha, self._beta):
            raise ValueError(
                "alpha and beta are auto, and that needs scores to choose by: give forget.alpha (and retain.beta) a "
                "number, 1.0 for a start, or do not set evaluate to null"
            )
        if self.evaluate is None and self.has_choice:
            raise ValueError("several values of alpha or beta need scores to choose by; do not set evaluate to null")
        return self

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.output).expanduser()

    @property
    def has_prior(self) -> bool:
        """Check whether there is a prior; without one, the target is its own."""
        return self.prior is not None or self.history is not None

    @property
    def prior_checkpoint(self) -> str:
        """The name of the model that vectors are fitted from: the prior θ_0, or the target where there is none."""
        return choose_prior(self.history).checkpoint if self.history is not None else self.prior or self.target

    @property
    def prior_reason(self) -> str | None:
        """The reason for this prior, or for none, in a sentence; None if the recipe names the prior."""
        if self.history is not None:
            return choose_prior(self.history).why
        return None if self.has_prior else NO_PRIOR if any(self.filters) else f"{NO_PRIOR}; here the filter is off"

    @property
    def data_sets(self) -> dict[str, Data]:
        """The rows to learn and to score, by their places: "forget", "retain", "evaluate.holdout", …"""
        sets = {"forget": self.forget.data, "retain": self.retain.data if self.retain else None}
        if self.evaluate:
            sets |= {f"evaluate.{name}": getattr(self.evaluate, name) for name in SETS}
        return {place: data for place, data in sets.items() if data}

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of an answer; the default of `evaluate` where nothing is scored."""
        return (self.evaluate or Evaluate()).max_new_tokens

    @property
    def margins(self) -> Margins:
        """The margins of a PASS."""
        return Margins() if isinstance(self.verdict, bool) else self.verdict

    def vector_of(self, name: str) -> VectorSpec:
        """Return the settings of the fit of a vector ("forget", "retain")."""
        changes = self.retain.vector if name == "retain" and self.retain else None
        return self.vector.model_copy(update=changes.model_dump(exclude_none=True)) if changes else self.vector

    def is_open_ended(self, name: str) -> bool:
        """Check whether the fit of a vector goes on until the prior knows the rows; a target knows them already."""
        return self.vector_of(name).epochs == "auto" and self.has_prior

    @property
    def validation(self) -> float:
        """The share of a benchmark's questions that a choice by its own score is made on."""
        if not isinstance(self.select.validation, str):
            return self.select.validation
        return BENCHMARKS[self.evaluate.benchmark if self.evaluate else OWN].validation

    @property
    def alphas(self) -> list[float] | None:
        """The values of α; None if α is searched."""
        return _listed(self.forget.alpha)

    @property
    def betas(self) -> list[float] | None:
        """The values of β, [0] without a retain set; None if β is searched."""
        return _listed(self._beta)

    @property
    def filters(self) -> list[float]:
        """The values of the filter's strength λ; 0: no filter."""
        value = self.merge.filter
        if value == "off" or (self.alphas and not any(self.alphas)):
            return [0.0]
        if isinstance(value, float):
            return [value]
        return [*AUTO_FILTERS] if self.can_filter and self.alphas is None else [0.0]

    @property
    def can_filter(self) -> bool:
        """Check whether there are rows whose outputs a filter can leave: rows to keep, or holdout rows.

        In three histories of small models the distance to the ideal was 0.026 with holdout rows alone, 0.020 with rows
        to keep alone, and 0.033 without a filter (tests/benchmarks/variants.md).
        """
        return bool(self.retain or (self.evaluate and self.evaluate.holdout))

    @property
    def hold(self) -> float:
        """The weight h of the hold of the forget vector's fit; 0: none."""
        value = self.vector.hold
        if isinstance(value, float):
            return value
        is_held = self.retain and any(self.filters) and self.vector.mode != "full" and self.has_prior
        return AUTO_HOLD if is_held else 0.0

    @property
    def filter_notice(self) -> str | None:
        """The sentence that tells of the filter and the hold; None where there is nothing to tell."""
        strengths = ", ".join(f"{strength:g}" for strength in self.filters if strength)
        parts = [f"the filter λ = {strengths}"] if strengths else []
        parts += [f"the hold h = {self.hold:g}"] if self.hold else []
        told = [f"not of the paper: {', '.join(parts)} (merge.filter, vector.hold)"] if parts else []
        return "; ".join([*told, *beyond_search(max(self.filters)), *self.lost_filter]) or None

    @property
    def lost_filter(self) -> list[str]:
        """The sentence why there is no filter, where the recipe does not turn it off: no rows, or a given α."""
        if self.merge.filter == AUTO and not self.can_filter and self.alphas is None:
            return ["no filter, because there are no rows to keep and no holdout rows (retain.data, evaluate.holdout)"]
        is_auto = self.merge.filter == AUTO and self.can_filter
        if not is_auto or not any(self.alphas or []):
            return []
        filtered = self.model_copy(update={"merge": self.merge.model_copy(update={"filter": 1.0})})
        both = ", and the hold with it" if filtered.hold > self.hold else ""
        return [f"no filter, because forget.alpha is given; merge.filter=1 turns it on{both}"]

    @property
    def starts_at_retain(self) -> bool:
        """Check whether the forget vector is fitted from the prior as tuned on the retain rows."""
        return self.vector.start == "retain"

    @property
    def _beta(self) -> float | list[float] | Literal["auto"]:
        """The value of β: 0 with a filter, which leaves nothing to mend.

        Five runs tried seven pairs of points, β = 0 and β = α/2, with α above 1. β = 0 was always nearer to the aim.
        """
        if self.retain is None or self.starts_at_retain or (self.retain.beta == AUTO and any(self.filters)):
            return 0.0
        return self.retain.beta

    @property
    def vector_names(self) -> list[str]:
        """Return the vectors that are needed, in the order of their fits.

        These are all whose strength is not 0, or is searched; and the retain vector if the forget vector starts at it.
        """
        strengths = {"forget": self.alphas, "retain": self.betas}
        names = [name for name, values in strengths.items() if values is None or any(values)]
        return ["retain", *names] if self.starts_at_retain and "forget" in names else names

    def weights(self, strengths: Strengths) -> dict[str, float]:
        """Return the weight of each vector in θ_u = θ_D + Σ weight · vector.

        A checkpoint that was fitted from θ_2 still differs from θ_0 by the retain vector, which is taken out again:
        θ_12 - θ_2 = (θ_12 - θ_0) - (θ_2 - θ_0).
        """
        is_shifted = self.starts_at_retain and self.vector.mode == "full"
        return strengths.weights | ({"retain": strengths.alpha} if is_shifted else {})

    @property
    def is_searched(self) -> bool:
        """Check whether α or β is auto, so that no list of points is known before the search."""
        return self.alphas is None or self.betas is None

    @property
    def has_choice(self) -> bool:
        """Check whether there is more than one point (α, β, λ) to choose from."""
        return self.is_searched or len(self.points) > 1

    @property
    def points(self) -> list[Strengths]:
        """Return all points (α, β, λ); empty if α or β is searched."""
        return [Strengths(*point) for point in product(self.alphas or [], self.betas or [], self.filters)]


def _listed(value: float | list[float] | Literal["auto"]) -> list[float] | None:
    if isinstance(value, list):
        return value
    return None if isinstance(value, str) else [value]
