"""Answer the claims: the paper's six, and six of our own, each by a rule that was fixed before a test row was seen.

A claim has parts; each part is a comparison with an answer of its own. `RULES` says in words what the functions below
do, and RESULTS.md repeats it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from collect import Point, Results
from experiments import WITH_ALL_WEIGHTS
from measures import KEEP, LEAST, MARGIN, Difference, measure, paired, works

YES, NO, PARTLY, UNCLEAR, UNKNOWN = "yes", "no", "partly", "unclear", "not enough data"
BASELINES = ("task_vector", "npo", "simnpo", "grad_diff", "rmu", "satimp", "undial")
"""With adapters, as msa-lora."""
FULL_BASELINES = tuple(f"{name}-full" for name in ("task_vector", *WITH_ALL_WEIGHTS))
"""With all weights, as msa-full."""
STARTED_EARLY = ("npo", "grad_diff", "rmu", "satimp", "undial")
LORA = ("msa-lora", "lora-r8", "lora-r128", "lora-rate-low", "lora-rate-high", "lora-mlp")
GRID = "hindsight grid"
PROBED = ("msa-lora", "prior-text-a", "prior-base", "text-before", "text-after", "again-before", "again-between",
          "again-late")  # fmt: skip
NAMES = {"msa-lora": "MSA (LoRA)", "msa-full": "MSA (full)", "task_vector": "Task Vector", "npo": "NPO",
         "simnpo": "SimNPO", "grad_diff": "GradDiff", "rmu": "RMU", "satimp": "SatImp", "undial": "UNDIAL"}  # fmt: skip
NAMES |= {name: f"{NAMES[name.removesuffix('-full')]} (full)" for name in FULL_BASELINES}

RULES = (
    "A forget distance is the mean of |model − ideal| over ROUGE-L, probability, extraction strength and accuracy on "
    "the forget set. A retain distance is the same on the retain set. The distance is the mean of the two",
    "The forget side is the mean of model − ideal on the forget set; below 0 means over-unlearning",
    "Kept is the share of the target's own retain scores that is left, as the tool's rule counts it: the mean over "
    "probability (twice), ROUGE-L and accuracy, none above 1",
    "Further: yes if the distance is larger in every seed and the 95 % interval of the difference excludes 0; no if it "
    "is smaller in every seed and the interval excludes 0; else partly if its mean is larger, and unclear if it is not",
    f"Matches: yes if the upper end of the interval of the difference is at most {MARGIN}; no if the lower end is more "
    "than that; else partly if the mean is at most that, and unclear if it is not",
    f"Keeps enough: yes if at least {KEEP:.0%} is kept in the mean and {LEAST:.0%} in every seed; partly if "
    f"{LEAST:.0%} is kept in the mean; else no",
    f"Works: the forget distance is at most half of the target's, and at least {LEAST:.0%} is kept. Yes if in every "
    "seed, partly if in some, else no",
    "A claim is answered yes if all of its parts are; no if all parts that it rests on are; unclear if none of these "
    "is even partly so; else partly. A part without runs does not count and is named",
    "Claim 1 is also answered no if a baseline is surely nearer to the ideal. Claim 7 is about the tool's default rank "
    "and rate: partly if only others match. Claim 10 compares the best points of the grid, of which more have β > 0. "
    "Claim 11 compares with a grid that was scored on nearly all test rows",
    "Claim 12: yes if the probe warned of each run that does not work and of no other; no if it warned of none of them",
    "Intervals: with two seeds or more, the t-interval of the paired differences over seeds; with one seed, the "
    "bootstrap interval over its test rows, which does not tell how much another seed would differ",
)


@dataclass(frozen=True)
class Part:
    """One comparison that a claim rests on."""

    label: str
    answer: str
    difference: Difference | None = None
    """The numbers; None where `text` has them."""
    text: str = ""
    core: bool = True
    """False for a condition beside the claim: alone it does not make the answer better than no."""


@dataclass(frozen=True)
class Claim:
    """A claim with its answer."""

    number: str
    text: str
    answer: str
    numbers: str
    """The answer in numbers, short."""
    experiments: tuple[str, ...]
    """The experiments that it rests on."""
    parts: tuple[Part, ...]
    complete: bool = True
    """False while some seed lacks some of the experiments."""


def further(difference: Difference) -> str:
    """Answer whether a measure is surely larger for the first method: the rule "further" of `RULES`."""
    if difference.mean is None:
        return UNKNOWN
    if difference.is_sure:
        return YES
    if difference.turned().is_sure:
        return NO
    return PARTLY if difference.mean > 0 else UNCLEAR


def matches(difference: Difference) -> str:
    """Answer whether the first method is no further from the ideal than the second, within `MARGIN`."""
    if difference.mean is None:
        return UNKNOWN
    if difference.high is not None and difference.high <= MARGIN:
        return YES
    if difference.low is not None and difference.low > MARGIN:
        return NO
    return PARTLY if difference.mean <= MARGIN else UNCLEAR


def combine(parts: Sequence[Part]) -> str:
    """Answer a claim by its parts."""
    known = [part for part in parts if part.answer != UNKNOWN]
    core = [part for part in known if part.core]
    if not core:
        return UNKNOWN
    if all(part.answer == YES for part in known):
        return YES
    answers = {part.answer for part in core}
    if answers == {NO}:
        return NO
    return UNCLEAR if answers <= {NO, UNCLEAR} else PARTLY


def answer_claims(results: Results) -> tuple[Claim, ...]:
    """Answer all claims with what is there."""
    return tuple(answer(results) for answer in _ANSWERS)


def _claim(
    results: Results, number: str, text: str, parts: Sequence[Part], experiments: Sequence[str], numbers: str
) -> Claim:
    """Answer a claim by its parts, and name the experiments that it still lacks."""
    absent = [name for name in experiments if not (any_grid(results) if name == GRID else results.runs(name))]
    rest = f"missing: {', '.join(absent)}" if absent else ""
    answer = combine(parts)
    numbers = rest if answer == UNKNOWN else ". ".join(filter(None, [numbers, rest]))
    done = all(name == GRID or {*results.wanted(name)} <= {*results.runs(name)} for name in experiments) and not absent
    return Claim(number, text, answer, numbers, tuple(experiments), tuple(parts), done or answer == UNKNOWN)


def any_grid(results: Results) -> bool:
    """Check whether some seed has points of the fixed grid."""
    return any(seed.grid for seed in results.seeds)


def _further(results: Results, first: str, second: str) -> Part:
    label = f"{name_of(first)} further than {name_of(second)}"
    difference = paired(label, results.runs(first), results.runs(second))
    return Part(label, further(difference), difference)


def _matches(results: Results, first: str, second: str, core: bool = True) -> Part:
    label = f"{name_of(first)} matches {name_of(second)}"
    difference = paired(label, results.runs(first), results.runs(second))
    return Part(label, matches(difference), difference, core=core)


def _kept(results: Results, name: str) -> Part:
    shares = _by_seed(results.runs(name), "kept")
    label = f"{name_of(name)} keeps enough"
    if not shares:
        return Part(label, UNKNOWN, core=False)
    mean, least = statistics.fmean(shares.values()), min(shares.values())
    answer = YES if mean >= KEEP and least >= LEAST else PARTLY if mean >= LEAST else NO
    return Part(label, answer, text=f"{mean:.0%} kept, at least {least:.0%} in each seed", core=False)


def _works(results: Results, name: str) -> Part:
    states = {seed: state for seed, run in results.runs(name).items() if (state := works(run)) is not None}
    label = f"{name_of(name)} works"
    if not states:
        return Part(label, UNKNOWN)
    count = sum(states.values())
    answer = YES if count == len(states) else PARTLY if count else NO
    return Part(label, answer, text=f"in {count} of {len(states)} seeds")


def _by_seed(points: Mapping[int, Point], name: str) -> dict[int, float]:
    return {seed: value for seed, point in points.items() if (value := measure(point, name)) is not None}


def mean_measure(points: Mapping[int, Point], name: str = "distance") -> float | None:
    values = _by_seed(points, name)
    return statistics.fmean(values.values()) if values else None


def _distances(results: Results, names: Sequence[str]) -> str:
    """Return the mean distances of experiments, nearest first, with the seeds of those that have fewer."""
    known = {name: value for name in names if (value := mean_measure(results.runs(name))) is not None}
    most = max((len(results.runs(name)) for name in known), default=0)
    return ", ".join(
        f"{name_of(name)} {value:.3f}" + ("" if len(results.runs(name)) == most else f" ({_seeds(results, name)})")
        for name, value in sorted(known.items(), key=lambda one: one[1])
    )


def _seeds(results: Results, name: str) -> str:
    seeds = results.runs(name)
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def name_of(experiment: str) -> str:
    return NAMES.get(experiment, experiment)


def _nearest(method: str, number: str, baselines: Sequence[str]) -> Callable[[Results], Claim]:
    def answer(results: Results) -> Claim:
        parts = [_further(results, name, method) for name in baselines]
        nearer = sum(part.answer == YES for part in parts)
        known = sum(part.answer != UNKNOWN for part in parts)
        numbers = f"distances: {_distances(results, (method, *baselines))}; surely nearer than {nearer} of {known}"
        kept = _kept(results, method)
        numbers += f"; {kept.text}" if kept.text else ""
        text = f"{name_of(method)} is nearer to the ideal than each baseline of the same mode, with utility kept"
        claim = _claim(results, number, text, [*parts, kept], (method, *baselines), numbers)
        beaten = any(part.difference and further(part.difference.turned()) == YES for part in parts)
        return replace(claim, answer=NO) if beaten else claim

    return answer


def _before_exposure(results: Results) -> Claim:
    names = ("text-before", "text-after")
    parts = [_further(results, "text-after", "text-before")]
    return _claim(results, "2", "A prior from before the exposure is needed", parts, names, _distances(results, names))


def _task_vector(results: Results) -> Claim:
    names = ("task_vector", "msa-lora", "task_vector-full", "msa-full")
    parts = [_further(results, *names[:2]), _further(results, *names[2:])]
    return _claim(results, "3", "Task Vector is worse than MSA", parts, names, _distances(results, names))


def _far_priors(results: Results) -> Claim:
    names = ("prior-text-a", "prior-base")
    parts = [_further(results, name, "msa-lora") for name in names] + [_works(results, name) for name in names]
    numbers = _distances(results, ("msa-lora", *names))
    return _claim(results, "4", "Far priors are worse and still work", parts, ("msa-lora", *names), numbers)


def _repeated(results: Results) -> Claim:
    names = ("again-before", "again-between", "again-late")
    parts = [_further(results, name, names[0]) for name in names[1:]]
    text = "After repeated exposure, the prior from before the first is needed"
    return _claim(results, "5", text, parts, names, _distances(results, names))


def _checkpoints(results: Results) -> Claim:
    opposite = {YES: NO, PARTLY: UNCLEAR, UNCLEAR: PARTLY, NO: YES, UNKNOWN: UNKNOWN}
    parts = []
    for name in STARTED_EARLY:
        label = f"{name_of(name)} gains nothing from the prior"
        gain = paired(label, results.runs(name), results.runs(f"{name}-prior"))
        parts.append(Part(label, opposite[further(gain)], gain))
    names = [one for name in STARTED_EARLY for one in (name, f"{name}-prior")]
    return _claim(results, "6", "Baselines gain nothing from checkpoints", parts, names, _distances(results, names))


def _lora_matches(results: Results) -> Claim:
    parts = [_matches(results, name, "msa-full", core=name == "msa-lora") for name in LORA]
    default, others = parts[0], parts[1:]
    only_others = default.answer == NO and any(part.answer == YES for part in others)
    answer = PARTLY if only_others else default.answer
    numbers = f"distances: {_distances(results, ('msa-full', 'full-rate-high', *LORA))}"
    names = ("msa-full", "full-rate-high", *LORA)
    claim = _claim(results, "7", "LoRA vectors match full ones (at the tool's rank and rate)", parts, names, numbers)
    return replace(claim, answer=answer)


def _qlora(results: Results) -> Claim:
    names = ("qlora", "msa-lora")
    parts = [_matches(results, *names)]
    return _claim(results, "8", "QLoRA vectors lose nothing against LoRA", parts, names, _both_sides(results, names))


def _storage(results: Results) -> Claim:
    names = ("bf16", "msa-lora")
    lost = [
        float(run.fidelity["rounding_loss"])
        for run in results.runs("bf16").values()
        if run.fidelity.get("rounding_loss") is not None
    ]
    numbers = _both_sides(results, names)
    if lost:
        numbers += f"; rounding took {statistics.fmean(lost):.2g} of the update"
    return _claim(results, "9", "Storing the model in bf16 loses nothing", [_matches(results, *names)], names, numbers)


def _both_sides(results: Results, names: Sequence[str]) -> str:
    texts = []
    for name in names:
        values = [mean_measure(results.runs(name), key) for key in ("forget_distance", "retain_distance", "kept")]
        if None not in values:
            texts.append(
                "{}: forget distance {:.3f}, retain distance {:.3f}, kept {:.0%}".format(name_of(name), *values)
            )
    return "; ".join(texts)


def best_points(results: Results, keep: Callable[[float, float], bool] = lambda a, b: True) -> dict[int, tuple]:
    """Return (alpha, beta, point) of the grid's point nearest to the ideal by seed, of those that `keep` accepts."""
    best = {}
    for seed in results.seeds:
        known = [
            (value, alpha, beta, point)
            for (alpha, beta), point in sorted(seed.grid.items())
            if keep(alpha, beta) and (value := measure(point, "distance")) is not None
        ]
        if known:
            _, alpha, beta, point = min(known, key=lambda one: one[0])
            best[seed.number] = (alpha, beta, point)
    return best


def _which_beta(results: Results) -> Claim:
    without = best_points(results, lambda alpha, beta: beta == 0)
    with_retain = best_points(results, lambda alpha, beta: beta > 0)
    label = "Best point with β = 0 further than the best with β > 0"
    first, second = ({seed: point for seed, (_, _, point) in best.items()} for best in (without, with_retain))
    difference = paired(label, first, second)
    places = [f"seed {seed}: α {a:g}, β {b:g}" for seed, (a, b, _) in best_points(results).items()]
    chosen = [
        f"seed {seed}: α {run.strengths['alpha']:g}, β {run.strengths['beta']:g}"
        for seed, run in results.runs("msa-lora").items()
        if {"alpha", "beta"} <= run.strengths.keys()
    ]
    numbers = f"best in hindsight: {'; '.join(places)}. Chosen by the search: {'; '.join(chosen) or '–'}"
    part = Part(label, further(difference), difference)
    return _claim(results, "10", "A retain vector (β > 0) helps", [part], ("msa-lora", GRID), numbers)


def _choice(results: Results) -> Claim:
    best = best_points(results)
    points = {seed: point for seed, (_, _, point) in best.items()}
    difference = paired("Chosen point matches the best in hindsight", results.runs("msa-lora"), points)
    texts = []
    for title, group in (
        ("chosen", {s: r for s, r in results.runs("msa-lora").items() if s in best}),
        ("best", points),
    ):
        values = [mean_measure(group, key) for key in ("distance", "kept")]
        if None not in values:
            texts.append("{}: distance {:.3f}, kept {:.0%}".format(title, *values))
    part = Part(difference.label, matches(difference), difference)
    numbers = "; ".join(texts) + ". The best point is picked on the test rows themselves, which flatters it"
    text = "The default rule chooses well against the best point in hindsight"
    return _claim(results, "11", text, [part], ("msa-lora", GRID), numbers)


def _probe(results: Results) -> Claim:
    cases = [
        (name, seed, run.probe == "signs", not state)
        for name in PROBED
        for seed, run in results.runs(name).items()
        if run.probe is not None and (state := works(run)) is not None
    ]
    counts = {key: sum((warned, failed) == key for _, _, warned, failed in cases) for key in _CASES}
    failures, others = (sum(n for (_, failed), n in counts.items() if failed is state) for state in (True, False))
    missed, alarms = counts[False, True], counts[True, False]
    if not failures or not others:
        answer = UNKNOWN
    elif not missed and not alarms:
        answer = YES
    else:
        answer = PARTLY if counts[True, True] else NO
    text = "; ".join(f"{counts[key]} {words}" for key, words in _CASES.items())
    parts = [Part("Probe of the prior against the outcome", answer, text=text)]
    wrong: dict[str, list[str]] = {}
    for name, seed, warned, failed in cases:
        if warned != failed:
            wrong.setdefault(name, []).append(str(seed))
    names = [f"{name} (seed {', '.join(seeds)})" for name, seeds in wrong.items()]
    numbers = text + (f". Wrong: {', '.join(names)}" if names else "")
    claim = _claim(results, "12", "The probe warns where MSA then fails", parts, PROBED, numbers)
    if answer == UNKNOWN and cases:
        why = "no run failed" if not failures else "no run worked"
        return replace(claim, numbers=f"{why}; {numbers}")
    return claim


_CASES = {
    (True, True): "warned and failed",
    (True, False): "warned and worked",
    (False, True): "not warned and failed",
    (False, False): "not warned and worked",
}
_ANSWERS: tuple[Callable[[Results], Claim], ...] = (
    _nearest("msa-full", "1a", FULL_BASELINES),
    _nearest("msa-lora", "1b", BASELINES),
    _before_exposure,
    _task_vector,
    _far_priors,
    _repeated,
    _checkpoints,
    _lora_matches,
    _qlora,
    _storage,
    _which_beta,
    _choice,
    _probe,
)
