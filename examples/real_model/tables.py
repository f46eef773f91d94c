"""Make the tables of the page of results: scores and measures of each method, and what is behind the answers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from changes import CHANGES
from claims import NAMES, mean_measure, name_of
from collect import ROW_SCORES, Point, Results, Run, only_seeds, seed_names
from figures import grid_means
from measures import FORGET, MEASURES, RETAIN, measure, reference, works
from rules import UNKNOWN, Claim, mark

from msa_lite.report.tables.formats import Cell, Section, TextTable, markdown
from msa_lite.report.tables.reports import number

GROUPS = {
    "lora": "LoRA: rank, rate and modules; 4 bits",
    "retain": "The rows of the retain vector",
    "storage": "Storage in bf16",
    "filter": "A filter of the forget vector",
    "distance": "Priors from further away",
    "exposure": "Text after the exposure",
    "repeated": "Repeated exposure",
    "checkpoints": "Baselines that start from the prior",
}
"""Groups of experiments with a table of their own, with its heading."""
_BESIDE = {
    "lora": ("msa-lora", "msa-full"),
    "retain": ("msa-lora", "msa-full"),
    "storage": ("msa-lora",),
    "filter": ("msa-lora", "msa-full", "task_vector", "undial"),
    "distance": ("msa-lora",),
    "exposure": ("text-before-full",),
    "repeated": ("again-before-full",),
    "checkpoints": ("msa-lora", "npo", "grad_diff", "rmu", "satimp", "undial"),
}
"""Experiments of other groups to show beside a group's own."""
_SETTINGS = {"alpha": "α", "beta": "β", "scale": "scale", "epoch": "epoch", "learning_rate": "rate"}
_FORMS = {"forget_side": "{:+.3f}"}
_NAMED = ("what it tries",)
_NOTES = (
    "verdict: as the tool said it then; for MSA on validation and test rows, for baselines on test rows",
    "minutes: of the last call, without what an earlier one had left (vectors, scores)",
)
_OF_TOFU = (
    "(TOFU): TOFU's own metrics on 30 rows of each of its sets; some of these rows chose α and β, and half of the "
    "retain authors are unknown to the target. Forget quality: the p-value of each seed",
)
_OF_EPOCHS = ("epoch: each of 4 is a candidate (from the prior, of 3); where the last is best, more may be better",)
_OTHER_COMMIT = "†"
_LABELS = {
    "rouge_l": "ROUGE-L",
    "probability": "probability",
    "extraction_strength": "extraction",
    "accuracy": "accuracy",
}


def main_tables(results: Results) -> list[str]:
    """Return two tables of the target, the ideal, MSA and the baselines: their scores, and the measures."""
    names = [name for name in NAMES if results.runs(name)]
    return [_scores_table(results, names), _measures_table(results, names)] if names else []


def group_table(results: Results, group: str) -> str | None:
    """Return the measures of a group's experiments beside those that they vary, all over the seeds that the group has.

    None where none has run.
    """
    own = [one.name for one in results.group(group) if results.runs(one.name)]
    shared = only_seeds(results, {seed for name in own for seed in results.runs(name)})
    beside = [name for name in _BESIDE.get(group, ()) if shared.runs(name)]
    return _measures_table(shared, own, beside, _NAMED) if own else None


def storage_table(results: Results) -> str | None:
    """Return what the stored numbers hold of the update, beside what was forgotten; None without such figures."""
    rows, shared = [], only_seeds(results, results.runs("bf16"))
    for name in ("msa-lora", "bf16"):
        runs = shared.runs(name)
        figures = {key: _known(run.fidelity.get(key) for run in runs.values()) for key in _FIDELITY}
        if figures["rounding_loss"]:
            own = [mean_measure(runs, key) for key in ("forget_distance", "kept")]
            rows.append([Cell(name_of(name)), *(_mean_cell(of, "{:.3g}") for of in figures.values()), *map(_cell, own)])
    headings = ["model", *_FIDELITY.values(), MEASURES["forget_distance"], MEASURES["kept"]]
    return markdown(TextTable(headings, [Section(rows)])) if rows else None


_FIDELITY = {
    "relative_size": "‖update‖ / ‖weights‖",
    "rounding_loss": "share of the update lost by rounding",
    "update_cosine": "cosine of update wanted and stored",
}


def grid_table(results: Results) -> str | None:
    """Return the mean distance to the ideal for each α and β; None without a grid."""
    means = grid_means(results)
    if not means:
        return None
    alphas, betas = (sorted({place[i] for place in means}) for i in (0, 1))
    best = min(means, key=lambda place: means[place])
    rows = [
        [Cell(f"α = {alpha:g}"), *(Cell(number(means.get((alpha, beta))), (alpha, beta) == best) for beta in betas)]
        for alpha in alphas
    ]
    return markdown(TextTable(["", *(f"β = {beta:g}" for beta in betas)], [Section(rows)]))


def claims_table(claims: Iterable[Claim]) -> str:
    """Return the answers: claim, answer, numbers, experiments."""
    rows = [
        [
            Cell(f"{one.number}. {one.text}"),
            Cell(_marked(one), True),
            Cell(one.numbers),
            Cell(", ".join(one.experiments)),
        ]
        for one in claims
    ]
    return markdown(TextTable(["claim", "answer", "numbers", "experiments"], [Section(rows)], left=4))


def _marked(claim: Claim) -> str:
    """Return the answer to a claim, with a mark where it rests on one seed, or where runs are missing."""
    return claim.answer + ("" if claim.complete else " so far") + mark(*(part.difference for part in claim.parts))


def parts_table(claims: Iterable[Claim]) -> str:
    """Return the comparisons that the answers rest on, each with its interval and the value of each seed."""
    rows = []
    for claim in claims:
        for part in claim.parts:
            if part.answer == UNKNOWN and not part.text:
                continue
            numbers = ["–", "–", part.text or "–"]
            if (one := part.difference) and one.mean is not None:
                ends = "–" if one.low is None else f"{one.low:+.3f} to {one.high:+.3f} ({one.source})"
                seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in one.by_seed.items())
                numbers = [f"{one.mean:+.3f}", ends, seeds]
            rows.append(
                [Cell(text) for text in (claim.number, part.label, part.answer + mark(part.difference), *numbers)]
            )
    headings = ["claim", "comparison", "answer", "difference", "95 % interval", "by seed"]
    return markdown(TextTable(headings, [Section(rows)], left=6))


def changes_table() -> str:
    """Return what was changed after scores on test rows had been seen."""
    rows = [[Cell(text) for text in (one.when, one.seen, one.what, one.why)] for one in CHANGES]
    return markdown(TextTable(["when (UTC)", "seen before", "change", "why"], [Section(rows)], left=4))


def other_commits(results: Results) -> list[str]:
    """Return the runs of another commit than that of most runs, as "commit: seed 0 npo, …"."""
    others: dict[str, list[str]] = {}
    for seed, name, run in results.all_runs():
        if _is_other(results, run):
            others.setdefault(run.commit, []).append(f"seed {seed} {name}")
    return [f"{commit}: {', '.join(runs)}" for commit, runs in others.items()]


def not_best(results: Results) -> list[str]:
    """Say where MSA or LoRA is not best: a line for each measure, and for each experiment that does not work."""
    full = [name for name in NAMES if name.endswith("-full") and name != "msa-full"]
    lines = [*_beaten(results, "msa-lora", [one for one in NAMES if one != "msa-lora"]),
             *_beaten(results, "msa-full", full)]  # fmt: skip
    if nearer := _better(results, "msa-lora", [one.name for one in results.group("lora")], "distance", 1):
        lines.append(f"Variants nearer to the ideal: {nearer}")
    for one in results.experiments:
        runs = {} if one.group in ("baselines", "full", "checkpoints") else results.runs(one.name)
        failed = {seed: run for seed, run in runs.items() if works(run) is False}
        if failed:
            targets = {seed: reference(run, "target") for seed, run in failed.items()}
            left, before = mean_measure(failed, "forget_distance"), mean_measure(targets, "forget_distance")
            lines.append(
                f"{name_of(one.name)} does not work in {len(failed)} of {len(runs)} seeds: forget distance there "
                f"{number(left)} (target {number(before)}), kept {number(mean_measure(failed, 'kept'))}"
            )
    return lines


def _beaten(results: Results, own: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each measure in which others have a better mean than an experiment.

    Not for forget quality, a p-value, whose mean says nothing, nor for what is better neither high nor low.
    """
    for name, heading in MEASURES.items():
        if name in ("forget_side", "truth_ratio_f", "forget_quality"):
            continue
        if better := _better(results, own, names, name, 1 if heading.endswith("↓") else -1):
            yield f"{heading[:-2].capitalize()}, better than {name_of(own)}: {better}"


def _better(results: Results, first: str, names: Sequence[str], measure: str, sign: int) -> str:
    """Name those that are better than the first, with both means over the seeds that both have.

    sign: 1 if low values are good, else −1.
    """
    own, better = results.runs(first), []
    for name in names:
        runs = {seed: run for seed, run in results.runs(name).items() if seed in own}
        beside = {seed: own[seed] for seed in runs}
        value, other = mean_measure(runs, measure), mean_measure(beside, measure)
        if value is not None and other is not None and sign * (round(other, 3) - round(value, 3)) > 0:
            seeds = f" ({seed_names(runs)})" if len(runs) < len(own) else ""
            better.append(f"{name_of(name)} {number(value)} against {number(other)}{seeds}")
    return "; ".join(better)


def _scores_table(results: Results, names: Sequence[str]) -> str:
    """Return the eight scores of each model."""
    headings = ["model", *(f"{_LABELS[key]} {of}" for of in "fr" for key in ROW_SCORES)]
    first = results.runs(names[0])

    def line(label: str, points: Mapping[int, Point]) -> list[Cell]:
        models = [point.unlearned for point in points.values() if point.unlearned]
        return [
            Cell(label),
            *(_mean_cell(_known(one.values.get(name) for one in models), "{:.3f}") for name in (*FORGET, *RETAIN)),
        ]

    references = [
        line(name, {seed: reference(run, name) for seed, run in first.items()}) for name in ("target", "ideal")
    ]
    rows = [line(_label(results, name), results.runs(name)) for name in names]
    notes = ["f: forget set, r: retain set; mean ± standard deviation over seeds"]
    return markdown(TextTable(headings, [Section(references), Section(rows)], notes=notes))


def _measures_table(
    results: Results, names: Sequence[str], beside: Sequence[str] = (), extra: Sequence[str] = ()
) -> str:
    """Return the measures of experiments, with what was chosen, verdicts and minutes.

    beside: experiments of other groups, in a section of their own. extra: columns of text before the measures.
    """
    shown = [
        key for key in MEASURES if any(measure(run, key) is not None for name in names for run in _runs(results, name))
    ]
    probed = bool(extra) and any(run.probe == "signs" for name in names for run in _runs(results, name))
    whats = {one.name: one.what for one in results.experiments}

    def line(label: str, points: Iterable[Point], what: str = "", tail: Sequence[str] = ("", "", "")) -> list[Cell]:
        known = list(points)
        values = {key: _known(measure(point, key) for point in known) for key in shown}
        cells = [_values_cell(key, of) for key, of in values.items()]
        return [Cell(label), *(Cell(what) for _ in extra), *cells, *map(Cell, tail)]

    def own_line(name: str) -> list[Cell]:
        runs = _runs(results, name)
        tail = [_chosen(runs), _outcomes(runs), _minutes(runs)]
        tail += [", ".join(dict.fromkeys(run.probe for run in runs if run.probe))] if probed else []
        return line(_label(results, name), runs, whats.get(name, ""), tail)

    blank = [""] * (3 + probed)
    references = [line(model, _references(results, names, model), "", blank) for model in ("target", "ideal")]
    sections = [Section(references), Section([own_line(name) for name in names])]
    if beside:
        sections.append(Section([own_line(name) for name in beside], "beside them"))
    headings = ["model", *extra, *(MEASURES[key] for key in shown), "chosen", "verdict", "minutes"]
    trained = any("epoch" in run.strengths for name in (*names, *beside) for run in _runs(results, name))
    notes = _NOTES + _OF_EPOCHS * trained + _OF_TOFU * ("model_utility" in shown)
    return markdown(TextTable(headings + ["prior's probe"] * probed, sections, notes=notes, left=1 + len(extra)))


def _runs(results: Results, name: str) -> list[Run]:
    return list(results.runs(name).values())


def _references(results: Results, names: Sequence[str], model: str) -> list[Point]:
    """Return the target or the ideal of experiments by seed, with TOFU's own metrics where it is the main target."""
    points = {seed: reference(run, model) for seed, run in results.runs(names[0]).items()}
    targets = {one.name: one.target for one in results.experiments}
    if targets.get(names[0]) != targets.get("msa-lora"):
        return list(points.values())
    own = {seed.number: seed.references.get(model, {}) for seed in results.seeds}
    return [Point(one.unlearned, one.target, one.ideal, own.get(seed, {})) for seed, one in points.items()]


def _label(results: Results, name: str) -> str:
    """Return a method's name, marked where runs are of another commit or where seeds lack."""
    runs = results.runs(name)
    mark = f" {_OTHER_COMMIT}" if any(_is_other(results, run) for run in runs.values()) else ""
    every, wanted = len(results.plan.get("seeds", [])), len(results.wanted(name))
    lacking = f" ({len(runs)} of {wanted} seeds)" if len(runs) < wanted else ""
    return name_of(name) + mark + (lacking or (f" ({seed_names(runs)})" if len(runs) < every else ""))


def _is_other(results: Results, run: Run) -> bool:
    most = results.commit
    return bool(run.commit) and not (most.startswith(run.commit) or run.commit == most)


def _chosen(runs: Iterable[Run]) -> str:
    """Return what each seed chose: strengths, or epoch and rate of a baseline; equal ones once."""
    texts = []
    for run in runs:
        keys = ("epoch", "learning_rate", "scale") if "epoch" in run.strengths else tuple(_SETTINGS)
        texts.append(", ".join(f"{_SETTINGS[key]} {_text(run.strengths[key])}" for key in keys if key in run.strengths))
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _outcomes(runs: Iterable[Run]) -> str:
    outcomes = [run.outcome for run in runs if run.outcome]
    return ", ".join(f"{outcomes.count(one)} × {one}" for one in dict.fromkeys(outcomes))


def _minutes(runs: Iterable[Run]) -> str:
    seconds = _known(run.seconds for run in runs)
    return f"{statistics.fmean(seconds) / 60:.1f}" if seconds else "–"


def _known(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _cell(value: float | None) -> Cell:
    return Cell(number(value))


def _mean_cell(values: Sequence[float], form: str) -> Cell:
    """Return the mean of the seeds' values ± their standard deviation."""
    if not values:
        return Cell("–")
    error = f" ± {form.format(statistics.stdev(values)).lstrip('+')}" if len(values) > 1 else ""
    return Cell(form.format(statistics.fmean(values)) + error)


def _values_cell(key: str, values: Sequence[float]) -> Cell:
    """Return the mean of a measure; a p-value, which has no mean that says anything, of each seed."""
    if key == "forget_quality" and values:
        return Cell(", ".join(f"{value:.2g}" for value in values))
    return _mean_cell(values, _FORMS.get(key, "{:.3f}"))
