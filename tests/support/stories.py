"""Make stories of runs for tests of the report: whole, unfinished, failed, huge, hostile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from msa_lite.report.page.run_files import make_page
from msa_lite.report.run.choice import Candidate, Choice
from msa_lite.report.run.evidence import EvidenceFigure, EvidenceFinding, undecided
from msa_lite.report.run.probing import Finding, ProbeFacts
from msa_lite.report.run.provenance import Provenance
from msa_lite.report.run.rows import SideBySide
from msa_lite.report.run.story import LIMIT, Story
from msa_lite.report.run.update import Fit, TensorUpdate, Update
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import Metric, Report
from msa_lite.report.verdict.figures import Bound, EarlierFacts
from msa_lite.report.verdict.verdict import Verdict, make_verdict
from tests.support.records import make_forgotten, make_kept

VALUES = {
    "accuracy_f": (1.0, 0.034, 0.0),
    "rouge_l_f": (0.998, 0.809, 0.812),
    "extraction_strength": (0.991, 0.331, 0.295),
    "accuracy_r": (0.996, 0.948, 0.987),
    "rouge_l_r": (0.999, 0.992, 0.994),
    "accuracy_h": (0.062, 0.042, 0.063),
}
"""The values of target, unlearned and ideal by metric."""
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)> \u202eevil\u202c {{ 7*7 }} </style></pre>&amp; $x_1$'
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_report(at: int, values: Mapping[str, tuple[float, ...]] = VALUES, split: str = "test") -> Report:
    """Return the report of target (0), unlearned model (1) or ideal (2)."""
    metrics = {
        name: Metric(value[at], 29, round(0.05 * value[at] * (1 - min(value[at], 1)), 4), _direction(name))
        for name, value in values.items()
    }
    return Report("qa", split, metrics, {"sets": {"forget": {"rows": 29}, "retain": {"rows": 173}}})


def _direction(name: str) -> bool | None:
    return metric_kind(name).higher_is_better


def make_choice(alphas: int = 4, betas: int = 2) -> Choice:
    """Return a choice over α and β; one point is broken, one misses the conditions."""
    grid = [{"alpha": 1 + 0.2 * a, "beta": 0.25 * b} for a in range(alphas) for b in range(betas)]
    noise = random.Random(0)
    points = [
        Candidate(
            values,
            {
                name: replace(m, value=(m.value or 0) * noise.uniform(0.8, 1.2))
                for name, m in make_report(1).metrics.items()
            },
            None if at == 5 else noise.uniform(0.5, 1),
            at not in (5, 6),
            {5: "the output is not finite", 6: "accuracy_r 0.81 < 0.93"}.get(at),
        )
        for at, values in enumerate(grid)
    ]
    target, ideal = make_report(0).metrics, make_report(2).metrics
    return Choice("extraction", grid[2], points, (), target, ideal, "validation", "qa")


def make_update(layers: int = 2) -> Update:
    """Return the update of a model with so many layers of seven kinds of module, and one tensor outside them."""
    noise = random.Random(1)
    tensors = [
        TensorUpdate(f"model.layers.{i}.mlp.{kind}.weight", i, f"mlp.{kind}", 64, noise.uniform(0.001, 0.1), 0.1, 1.0)
        for i in range(layers)
        for kind in _KINDS
    ]
    tensors.append(TensorUpdate("lm_head.weight", None, "lm_head", 64, 0.02, 0.1, 5.0))
    figures = {
        "tensors_touched": len(tensors), "weights_touched": 64 * len(tensors), "weights_changed": 60 * len(tensors),
        "rounding_loss": 0.0123, "relative_size": 0.05, "update_cosine": 0.9998, "vector_cosine": -0.12,
    }  # fmt: skip
    return Update("model", Path("run/model"), figures, tuple(tensors), ())


def make_fit(steps: int = 40) -> Fit:
    """Return a fit whose loss falls."""
    curve = tuple((at / 2, 2 / (at + 1)) for at in range(1, steps + 1))
    return Fit(48, {"mode": "lora", "lora_rank": 16, "learning_rate": 0.002}, curve, steps, steps / 2, {}, None)


def make_findings() -> tuple[EvidenceFinding, ...]:
    """One kind of evidence with figures of three models, and one that is undecided."""
    shares = {"target": (1.0, 0.0), "ideal": (0.0, 0.9), "unlearned": (0.1, 0.8)}
    figures = {
        name: {kind: EvidenceFigure(value, (max(0.0, value - 0.1), min(1.0, value + 0.1)), 29) for kind, value in pairs}
        for name, values in shares.items()
        for pairs in [zip(("tells", "other"), values, strict=True)]
    }
    says = EvidenceFinding("says", "other", "Of 29 forgotten rows it says something else: 80 %.", "ideal", 29, figures)
    return says, undecided("nearer", "2 subjects are too few")


def full() -> Story:
    """Return the story of a finished run that passed, with every part."""
    auc = {"loss_auc": Metric(0.592, 96, 0.059, None)}
    probed = Report("probe", "all", auc, {"intervals": {"loss_auc": (0.472, 0.705)}})
    prior = Finding("prior", probed, "cannot tell", "loss AUC 0.59, and a sign lies above 0.65")
    pair = {"one": "forget", "other": "earlier-1", "cosine": 0.031}
    answers = {"target": "In Marhaven.", "unlearned": "I do not know.", "ideal": "In Oslo."}
    models = {name: f"models/{name}" for name in ("target", "prior", "ideal")}
    return Story(
        folder=Path("runs/full"),
        verdict=_verdict("PASS"),
        method="msa",
        formula="θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0)",
        strengths={"alpha": 1.2, "beta": 0.25},
        earlier={"runs/march": {"alpha": 0.8, "beta": 0.5}},
        names=models,
        reports={name: make_report(at) for at, name in enumerate(("target", "unlearned", "ideal"))},
        validation={"target": make_report(0, split="validation"), "unlearned": make_report(1, split="validation")},
        choice=make_choice(),
        fits={"forget": make_fit(), "retain": make_fit()},
        update=make_update(),
        attacks=None,
        evidence=make_findings(),
        probe=ProbeFacts(False, "holdout", {"forget": 48, "holdout": 48}, (prior,)),
        interference=(pair,),
        examples=(SideBySide("forget", "Where was Fenin born?", "In Marhaven.", answers),),
        provenance=Provenance(
            recipe="target: models/target\nprior: models/prior\n",
            values={},
            method="msa",
            reason=None,
            models=models,
            revisions={name: f"sha256:{at}" * 8 for at, name in enumerate(models)},
            rows={"forget": "sha256:22a7"},
            files={"config.json": "5ba0ff" * 10},
            versions={"msa-lite": "0.1.0", "torch": "2.13.0"},
            seed=0,
        ),
        warnings=(),
        limits=(LIMIT,),
        missing=(),
    )


def _verdict(outcome: str) -> Verdict:
    passed = make_forgotten(48)
    failed = make_forgotten(48, unlearned=30, excess=Bound(0.6, 0.5, 0.7))
    again = EarlierFacts(3, 140, make_forgotten(60), {"runs/march": 1}, {"runs/april": "its data is gone"})
    verdict = make_verdict(passed if outcome == "PASS" else failed, make_kept(0.99, 288), earlier=again)
    assert verdict.outcome == outcome
    return verdict


def unfinished() -> Story:
    """Return the story of a run that has only its first vector."""
    story = full()
    return replace(
        story,
        verdict=None,
        strengths={},
        earlier={},
        reports={},
        validation={},
        choice=None,
        fits={"forget": story.fits["forget"]},
        update=None,
        probe=None,
        evidence=(),
        interference=(),
        examples=(),
        missing=("vectors/retain: the retain vector is not fitted yet", "model: the unlearned model is not merged yet"),
    )


def without_choice() -> Story:
    """Return the story of a run with one α and no ideal."""
    story = full()
    reports = {name: story.reports[name] for name in ("target", "unlearned")}
    verdict = replace(_verdict("PASS"), earlier=None)
    return replace(story, choice=None, reports=reports, examples=(), interference=(), earlier={}, verdict=verdict)


def failed() -> Story:
    """Return the story of a run that failed, with warnings."""
    return replace(full(), verdict=_verdict("FAIL"), warnings=("rounding to bfloat16 lost 41 % of the update",))


def huge() -> Story:
    """Return the story of a big model: 80 layers, 200 points, 30 long metrics, thousands of steps."""
    story = full()
    extra = {
        f"leaderboard_of_very_long_task_names_{at}/exact_match_after_flexible_extract": (0.5, 0.4, 0.45)
        for at in range(24)
    }
    values = VALUES | extra | {"long/word_perplexity": (12.3, 51.7, 13.0), "privleak": (-98.0, 12.5, 0.0)}
    return replace(
        story,
        names={name: f"an-organisation-with-a-long-name/{'a-very-long-model-name-' * 6}{name}" for name in story.names},
        reports={name: make_report(at, values) for at, name in enumerate(story.reports)},
        choice=make_choice(20, 10),
        fits={"forget": make_fit(20_000), "retain": make_fit(5_000)},
        update=make_update(80),
    )


def hostile() -> Story:
    """Return a story whose every text tries to break the page: markup, quotes, right-to-left signs, endless words."""
    story, text = full(), HOSTILE + "X" * 300
    arabic = "ما هو اسم المؤلف؟ " * 4
    metrics = {f"{HOSTILE}_f": Metric(0.5, 3, None, False, 1, HOSTILE), f"task/{text}": Metric(None, 0, None, None)}
    report = Report(text, text, metrics, {"sets": {HOSTILE: {"rows": 3}}})
    point = Candidate({"alpha": 1.0, HOSTILE: text}, metrics, 0.5, True, text)
    other = replace(point, values={"alpha": 2.0, HOSTILE: "b"})
    probed = Report(text, text, metrics, {"intervals": dict.fromkeys(metrics, (0.6, 0.7))})
    tensor = TensorUpdate(f"model.layers.0.{text}", 0, text, 64, 0.1, 0.1, 1.0)
    return replace(
        story,
        verdict=replace(
            _verdict("FAIL"), sentence=text, reasons=(text,), earlier=EarlierFacts(2, 9, None, {text: 1}, {text: text})
        ),
        method=HOSTILE,
        formula=text,
        strengths={HOSTILE: text},
        earlier={text: {HOSTILE: 1.0}},
        names=dict.fromkeys(("target", "prior", HOSTILE), text),
        reports=dict.fromkeys(("target", "unlearned"), report),
        choice=replace(story.choice, rule=text, split=text, candidates=(point, other), values=point.values),
        fits={text: replace(make_fit(3), settings={HOSTILE: text, "learning_rate": HOSTILE})},
        update=replace(make_update(), tensors=(tensor,), figures={"rounding_loss": 0.5, "rank": text}),
        evidence=(EvidenceFinding(HOSTILE, text, text, text, 3, {text: {text: EvidenceFigure(0.5, None, 3)}}),),
        probe=ProbeFacts(True, text, {text: 3}, (Finding(text, probed, "signs", text),)),
        interference=({"one": text, "other": arabic, "cosine": None},),
        examples=(SideBySide(text, arabic, text, {"target": text, HOSTILE: arabic, "ideal": ""}),),
        provenance=replace(
            story.provenance,
            recipe=text,
            reason=text,
            revisions={text: text},
            rows={text: text},
            files={text: text},
            versions={text: text, "msa-lite": HOSTILE},
        ),
        warnings=(text,),
        limits=(text,),
        missing=(text,),
    )


def baseline() -> Story:
    """Return the story of a baseline that tried several settings and wrote an adapter."""
    story = full()
    choice = make_choice()
    settings = [{"epoch": at, "learning_rate": 1e-5} for at, _ in enumerate(choice.candidates)]
    epochs = tuple(replace(point, values=values) for point, values in zip(choice.candidates, settings, strict=True))
    return replace(
        story,
        method="npo",
        formula="θ_u: the target, trained further",
        strengths=settings[2] | {"kind": "KL"},
        choice=replace(choice, candidates=epochs, values=settings[2], rule="tofu"),
        fits={f"learning_rate-{at}e-05": make_fit(20 + at) for at in range(6)},
        update=Update("adapter", Path("run/adapter"), {"modules": 14, "rank": 32, "truncation_loss": 2e-6}, (), ()),
        probe=None,
        interference=(),
        earlier={},
        examples=(),
    )


STORIES = {story.__name__: story for story in (full, unfinished, without_choice, failed, baseline, huge, hostile)}
"""Every story by name."""


@cache
def page_of(name: str) -> str:
    """Return the page of a story, drawn once in a process."""
    return make_page(STORIES[name]())
