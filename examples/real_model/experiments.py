"""List what is tried: the sizes of the test, and the experiments with all their settings.

All of it is fixed before any test row is scored; `run.py` writes it to plan.json, with the time and the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Size:
    """How much data is learnt, forgotten and scored."""

    forget: str
    """The configuration of TOFU to forget."""
    authors: int | None
    """Other authors that target and ideal learn, drawn by the seed from the first 20. None: all of retain90."""
    scored: int
    """Retain rows that are scored: half of them choose α and β, at most 30, the others test. Holdout rows: a third."""
    text_tokens: int
    """Tokens of each of the three stages of text."""
    epochs: int
    """Passes over the authors; half as many the second time."""
    learning_rate: float
    """Of all stages."""
    batch_size: int
    """Rows of a step of all stages."""
    limit: int
    """Rows of each set of TOFU's own evaluation."""
    minutes: float
    """A seed's time, for the estimate before the first measurement."""


SIZES = {
    "small": Size("forget01", 10, 60, 13_000, 6, 2e-4, 16, 30, 200),
    "full-forget05": Size("forget05", None, 120, 2_000_000, 5, 1e-4, 32, 200, 240),
    "full-forget10": Size("forget10", None, 120, 2_000_000, 5, 1e-4, 32, 400, 300),
}
"""The three stages of text lie before, between and after what is learnt of TOFU. `full` is for a GPU."""

Checkpoint = Literal["base", "text-a", "text-b", "tofu", "text-c", "tofu-again"]
"""A model of the history: base → text-a → text-b → tofu → text-c → tofu-again."""


@dataclass(frozen=True)
class Experiment:
    """One run of the tool."""

    name: str
    group: str
    what: str
    """What differs from msa-lora, for the tables."""
    target: Checkpoint = "tofu"
    prior: Checkpoint = "text-b"
    overrides: Sequence[str] = ()
    """Keys of the recipe."""
    method: str = "msa"
    """msa, or a baseline."""
    vectors_of: str | None = None
    """The experiment whose vectors are used again."""
    strengths_of: str | None = None
    """The experiment whose α and β are used again."""
    owner: str = "msa-lora"
    """For a baseline: the experiment of MSA whose recipe it shares."""
    on_tofu: bool = False
    """True to score the model on TOFU's own metrics, too."""
    once: bool = False
    """True to run it with seed 0 alone, for a first answer on a setting; its interval is then over rows."""


HINDSIGHT = ("forget.alpha=[0.25, 0.5, 0.75, 1.0, 1.5]", "retain.beta=[0.0, 0.25, 0.5, 1.0]")
"""The grid that is scored on test rows, to see what the choice on validation rows missed."""
FIXED = ("vector.epochs=9",)
"""Where a prior knows the rows already, a fit until they are known would end at once. The other fits take 8 or 9."""
FULL = ("vector.mode=full",)
FILTER = ("merge.filter=auto",)
"""All other experiments are the paper's method, without a filter and a hold."""
ALL = ("retain.data.sample=null",)
FROM_PRIOR = ("baseline.start=prior", "baseline.scale=[1.0, 2.0]", "baseline.epochs=3")
STARTED_AT_PRIOR = "trained on the prior for 3 epochs at the default weight, and added to the target once or twice"
METHODS = {
    "npo": "retain_weight=[1, 4]",
    "grad_diff": "retain_weight=[1, 4]",
    "rmu": "retain_weight=[1, 4]",
    "undial": "retain_weight=[1, 4]",
    "satimp": "forget_weight=[0.1, 4]",
    "simnpo": "retain_weight=[1, 4]",
}
"""The baselines, each with two values of one weight. Every epoch of both is a candidate.

These are the ends of the paper's grids for models of 1B, but for NPO, whose grid is 2 to 8, and SimNPO, which the paper
does not have. The paper gives baselines 5 or 10 epochs and up to two learning rates; here they have 4, and one."""
ATTACKED = ("msa-lora", "task_vector", "msa-full", "npo", "grad_diff", "rmu", "undial", "simnpo")
"""The experiments whose models are attacked with --attacks."""
WITH_CHECKPOINTS = ("npo", "grad_diff", "rmu", "undial", "satimp")
"""Those of the paper's table of baselines with checkpoints."""
WITH_ALL_WEIGHTS = ("undial", "grad_diff", "npo")
"""The baselines that came nearest to the ideal with adapters."""


def baseline(name: str, full: bool = False, once: bool = False) -> Experiment:
    """Return the run of a baseline from the target. full: with all weights, beside msa-full."""
    key, _, values = METHODS[name].partition("=")
    group, owner, end = ("full", "msa-full", "-full") if full else ("baselines", "msa-lora", "")
    weights = ", all weights" if full else ""
    return Experiment(
        f"{name}{end}", group, f"{key} {values}, 4 epochs{weights}",
        overrides=(f"baseline.methods.{name}.{key}={values}",), method=name, owner=owner, on_tofu=True,
        once=once,
    )  # fmt: skip


def lora(name: str, what: str, *overrides: str) -> Experiment:
    """Return a variant of the vectors."""
    return Experiment(name, "lora", what, overrides=overrides, once=True)


EXPERIMENTS = (
    Experiment("msa-lora", "main", "LoRA of rank 32", on_tofu=True),
    Experiment("task_vector", "baselines", "the target as its own prior", method="task_vector", on_tofu=True),
    Experiment("msa-full", "main", "all weights", overrides=FULL, on_tofu=True),
    *(baseline(name) for name in WITH_CHECKPOINTS),
    Experiment("text-before", "exposure", "text after TOFU; prior from before TOFU", "text-c"),
    Experiment("text-after", "exposure", "text after TOFU; prior from after TOFU", "text-c", "tofu", FIXED),
    Experiment("again-before", "repeated", "TOFU twice; prior before the first", "tofu-again"),
    Experiment("again-between", "repeated", "TOFU twice; prior after the first", "tofu-again", "tofu", FIXED,
               vectors_of="text-after"),
    Experiment("again-late", "repeated", "TOFU twice; prior before the second", "tofu-again", "text-c", FIXED,
               once=True),
    Experiment("task_vector-full", "full", "the target as its own prior, all weights", method="task_vector",
               owner="msa-full", on_tofu=True),
    *(baseline(name, full=True, once=name != "undial") for name in WITH_ALL_WEIGHTS),
    Experiment("text-before-full", "later", "text-before with all weights", "text-c", overrides=FULL,
               once=True),
    Experiment("again-before-full", "later", "again-before with all weights", "tofu-again", overrides=FULL,
               once=True),
    Experiment("prior-text-a", "distance", "a prior one stage of text earlier", prior="text-a", once=True),
    Experiment("prior-base", "distance", "a prior two stages of text earlier", prior="base"),
    Experiment("bf16", "storage", "msa-lora stored in bf16", overrides=("merge.dtype=bfloat16",), vectors_of="msa-lora",
               strengths_of="msa-lora", once=True),
    Experiment("retain-all", "retain", "a retain vector of all 140 rows that are not scored, not of 40", overrides=ALL,
               once=True),
    Experiment("retain-all-full", "retain", "the same with all weights", overrides=(*FULL, *ALL), once=True),
    lora("lora-r8", "rank 8, lora_alpha 16, rate 1.4e-3", "vector.lora.rank=8", "vector.lora.alpha=16"),
    lora("lora-r128", "rank 128, lora_alpha 256, rate 8.5e-5", "vector.lora.rank=128", "vector.lora.alpha=256"),
    lora("lora-rate-high", "rank 32 at 1e-3", "vector.learning_rate=1e-3"),
    lora("lora-rate-low", "rank 32 at 1e-4", "vector.learning_rate=1e-4"),
    lora("lora-mlp", "rank 32 on MLP modules alone", "vector.lora.targets=[gate_proj, up_proj, down_proj]"),
    lora("qlora", "rank 32 on a 4-bit prior", "vector.mode=qlora"),
    lora("full-rate-high", "all weights at 1e-4", "vector.mode=full", "vector.learning_rate=1e-4"),
    *(
        Experiment(f"{name}-prior", "checkpoints", STARTED_AT_PRIOR, method=name, overrides=FROM_PRIOR, once=True)
        for name in WITH_CHECKPOINTS
    ),
    baseline("simnpo"),  # not of the paper
    Experiment("msa-lora-filter", "filter", "msa-lora, filtered", overrides=(*FILTER, "vector.hold=0"),
               vectors_of="msa-lora", on_tofu=True),
    Experiment("msa-lora-held", "filter", "msa-lora, filtered and held: msa-lite's default", overrides=FILTER,
               on_tofu=True),
    Experiment("msa-full-filter", "filter", "msa-full, filtered: msa-lite's default", overrides=(*FULL, *FILTER),
               vectors_of="msa-full", on_tofu=True),
    Experiment("task_vector-filter", "filter", "task_vector, filtered", method="task_vector", owner="msa-lora-filter",
               on_tofu=True),
)  # fmt: skip
"""In the order of their runs. Those that others use again come first."""
