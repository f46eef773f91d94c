"""Read the folder of the experiments: the plan, the state of each seed, and the reports of all runs.

Nothing here runs a model or writes a file. What is missing or damaged becomes a line of `Results.problems`, so that the
page can be made while the experiments go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError
from msa_lite.evals.scores.records import read_records
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import digest
from msa_lite.report import Metric, load_report
from msa_lite.report.run.attacks import ATTACKS_FOLDER, AttackFacts, facts_of
from msa_lite.report.run.choice import CHOICE_FILE, candidate_name, load_choice
from msa_lite.report.run.probing import load_probe
from msa_lite.report.tables.reports import REPORT_FILE

MODELS = ("target", "ideal", "unlearned")
POINTS = "hindsight"
ROW_SCORES = ("rouge_l", "probability", "extraction_strength", "accuracy")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Experiment:
    """One experiment of the plan."""

    name: str
    group: str
    """The table that it belongs to: "main", "lora", "exposure"."""
    target: str
    """The stage of the history that is the target."""
    prior: str
    """The stage that is the prior."""
    what: str
    """What it tries, in words."""
    fixed: str = ""
    """The time when it was fixed, where that is not the plan's."""
    once: bool = False
    """True where seed 0 alone is to run it."""


@dataclass(frozen=True)
class Scores:
    """The metrics of one model on the test rows."""

    values: Mapping[str, float | None]
    rows: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    """The values of `ROW_SCORES` by set, "forget" or "retain", and row; empty where there are no records. A row's name
    is a hash of question and answer, not its index: the grid's rows are the runs' test rows, numbered anew."""


@dataclass(frozen=True)
class Point:
    """An unlearned model beside the models that it is compared with."""

    unlearned: Scores | None = None
    target: Scores | None = None
    ideal: Scores | None = None
    tofu: Mapping[str, float | None] = field(default_factory=dict)
    """TOFU's own metrics of the unlearned model; empty where they were not measured."""


@dataclass(frozen=True)
class Run(Point):
    """One experiment with one seed."""

    strengths: Mapping[str, Any] = field(default_factory=dict)
    """The values that made the model: alpha and beta, or a baseline's parameters."""
    fidelity: Mapping[str, Any] = field(default_factory=dict)
    """What the stored numbers hold of the update: relative_size, rounding_loss, update_cosine."""
    probe: str | None = None
    """The short probe's verdict on the prior: "signs", "no signs", "cannot tell"; None without a probe."""
    attacks: AttackFacts | None = None
    """What attacks brought back; None if the model was not attacked."""
    under_attack: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)
    """The metrics of each attack by name, "TRIAL.MEASURE.MODEL", also of target and ideal."""
    outcome: str | None = None
    """The verdict of the run: PASS, PARTLY or FAIL."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Test rows of each set."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that made it."""
    command: str = ""
    seconds: float | None = None
    commit: str = ""
    date: str = ""
    error: str | None = None
    """The message it ended with; None if it ended well."""


@dataclass(frozen=True)
class Seed:
    """All that one seed left."""

    number: int
    runs: Mapping[str, Run]
    """By experiment; also those that failed."""
    distances: Mapping[str, float]
    """‖target − prior‖ / ‖target‖ over all weights, by prior."""
    references: Mapping[str, Mapping[str, float | None]]
    """TOFU's own metrics of "target" and "ideal"."""
    grid: Mapping[tuple[float, float], Point]
    """Every (alpha, beta) of the fixed grid, scored on the test rows."""


@dataclass(frozen=True)
class Results:
    """All that the experiments left so far."""

    plan: Mapping[str, Any]
    experiments: tuple[Experiment, ...]
    seeds: tuple[Seed, ...]
    problems: tuple[str, ...]
    """What failed or is damaged, one line each."""

    @property
    def commit(self) -> str:
        """Return the commit of most runs; "" without any."""
        commits = Counter(run.commit for _, _, run in self.all_runs() if run.commit)
        return max(commits, key=lambda one: commits[one], default="")

    def wanted(self, name: str) -> list[int]:
        """Return the seeds that an experiment is to run with."""
        once = any(one.once for one in self.experiments if one.name == name)
        return [int(seed) for seed in self.plan.get("seeds", []) if seed == 0 or not once]

    def runs(self, name: str) -> dict[int, Run]:
        """Return the runs of an experiment that have a model with scores, by seed."""
        there = {seed.number: seed.runs.get(name) for seed in self.seeds}
        return {number: run for number, run in there.items() if run is not None and run.unlearned is not None}

    def group(self, name: str) -> tuple[Experiment, ...]:
        """Return the experiments of a group in the plan's order."""
        return tuple(one for one in self.experiments if one.group == name)

    def missing(self) -> Iterator[str]:
        """Yield what there is not yet, a line for each seed and kind."""
        seeds = {seed.number: seed for seed in self.seeds}
        for number in self.plan.get("seeds", []):
            seed = seeds.get(int(number))
            if seed is None:
                yield f"seed {number}: not begun"
                continue
            wanted = [one.name for one in self.experiments if seed.number in self.wanted(one.name)]
            if absent := [name for name in wanted if name not in seed.runs]:
                yield f"seed {number}: no run yet of {', '.join(absent)}"
            if unscored := [name for name, values in seed.references.items() if not values]:
                yield f"seed {number}: no TOFU metrics of {' and '.join(unscored)}"
            if not seed.grid:
                yield f"seed {number}: no sweep over the grid yet"

    def all_runs(self) -> Iterator[tuple[int, str, Run]]:
        """Yield seed, experiment and run, in the order of the plan, also of those that failed."""
        for seed in self.seeds:
            for one in self.experiments:
                if run := seed.runs.get(one.name):
                    yield seed.number, one.name, run


def collect(out: Path) -> Results:
    """Read everything that is there. Raise MsaError only where there is no readable plan."""
    results = collect_plan(read_object(out / "plan.json"))
    problems: list[str] = []
    seeds = [_seed(out, int(number), results.experiments, problems) for number in results.plan.get("seeds", [])]
    return replace(results, seeds=tuple(seed for seed in seeds if seed), problems=tuple(problems))


def collect_plan(plan: Mapping[str, Any]) -> Results:
    """Return the results of a plan of which nothing is done."""
    experiments = tuple(
        Experiment(
            str(one["name"]), str(one["group"]), str(one.get("target") or ""), str(one.get("prior") or ""),
            str(one.get("what") or ""), str(one.get("fixed") or ""), bool(one.get("once")),
        )
        for one in plan.get("experiments", [])
    )  # fmt: skip
    return Results(plan, experiments, (), ())


def seed_names(seeds: Iterable[int]) -> str:
    """Return seeds in words: "seed 0", "seeds 1, 2"."""
    numbers = sorted(seeds)
    return f"seed{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def only_seeds(results: Results, seeds: Container[int]) -> Results:
    """Return the results of some seeds."""
    plan = {**results.plan, "seeds": [seed for seed in results.plan.get("seeds", []) if seed in seeds]}
    return replace(results, plan=plan, seeds=tuple(seed for seed in results.seeds if seed.number in seeds))


def tidy(text: str, out: Path) -> str:
    """Return text without the paths of the machine: OUT for the folder of the experiments, `.` for the repository."""
    for path, name in ((out.resolve(), "OUT"), (out, "OUT"), (_ROOT, "."), (Path.home(), "~")):
        if len(path.parts) > 1:
            text = text.replace(str(path), name)
    return " ".join(text.split())


def _seed(out: Path, number: int, experiments: tuple[Experiment, ...], problems: list[str]) -> Seed | None:
    folder = out / f"seed-{number}"
    if not (folder / "state.json").is_file():
        return None
    try:
        state = read_object(folder / "state.json")
    except MsaError as error:
        problems.append(f"seed {number}: {tidy(str(error), out)}")
        return None
    entries = state.get("experiments") or {}
    runs = {
        one.name: _run(folder, one.name, entry, lambda text, name=one.name: _note(problems, out, number, name, text))
        for one in experiments
        if (entry := entries.get(one.name))
    }
    distances = {str(name): float(value) for name, value in (state.get("distances") or {}).items() if value is not None}
    references = {name: _tofu(folder, name) for name in ("target", "ideal")}
    if error := (entries.get(POINTS) or {}).get("error"):
        _note(problems, out, number, POINTS, f"failed: {error}")
    grid = _grid(folder, runs.get("msa-lora"), lambda text: _note(problems, out, number, POINTS, text))
    return Seed(number, runs, distances, references, grid)


def _note(problems: list[str], out: Path, seed: int, name: str, text: str) -> None:
    problems.append(f"seed {seed}, {name}: {tidy(text.splitlines()[0], out)}")


def _run(seed: Path, name: str, entry: Mapping[str, Any], note: Any) -> Run:
    """Return a run as its report tells it; without scores where the report is missing or damaged."""
    base = {
        "command": str(entry.get("command") or ""),
        "seconds": entry.get("seconds"),
        "commit": str(entry.get("commit") or ""),
        "date": str(entry.get("date") or ""),
        "error": entry.get("error"),
    }
    if base["error"]:
        note(f"failed: {base['error']}")
        return Run(**base)
    folder = seed / str(entry.get("folder") or f"runs/{name}")
    try:
        report = read_object(folder / "report.json")
        models = {model: _model(report, model, folder) for model in MODELS}
        probe = load_probe(folder / "probe")
        absent = [model for model, scores in models.items() if scores is None]
        if absent:
            note(f"no scores of {' and '.join(absent)}")
        attacks, under_attack = _attacks(folder / ATTACKS_FOLDER)
        return Run(
            **models,
            **base,
            attacks=attacks,
            under_attack=under_attack,
            tofu=_tofu(seed, name),
            strengths=report.get("strengths") or {},
            fidelity=(report.get("update") or {}).get("figures") or {},
            probe=next((one.verdict for one in probe.models if one.name == "prior"), None) if probe else None,
            outcome=report.get("outcome"),
            rows=report.get("rows") or {},
            versions=(report.get("provenance") or {}).get("versions") or {},
        )
    except MsaError as error:
        note(str(error))
    except (KeyError, TypeError, AttributeError) as error:
        note(f"report.json has another form than expected ({type(error).__name__}: {error})")
    return Run(**base)


def _model(report: Mapping[str, Any], model: str, folder: Path) -> Scores | None:
    """Return a model's metrics from a run's report; None if it has none."""
    entries = {name: metric["models"][model] for name, metric in report["metrics"].items() if model in metric["models"]}
    values = {name: entry["value"] for name, entry in entries.items()}
    return Scores(values, _rows(folder / "evaluation" / model)) if values else None


def _rows(folder: Path) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return the scores of each row of a model's records; rows without one of the scores are left out."""
    rows: dict[str, dict[str, tuple[float, ...]]] = {}
    for name in ("forget", "retain"):
        file = folder / f"{name}.jsonl"
        for record in read_records(file) if file.is_file() else ():
            values = tuple(record.get(key) for key in ROW_SCORES)
            if all(isinstance(value, (int, float)) for value in values):
                text = f"{record.get('question')} {record.get('answer')}"
                rows.setdefault(name, {})[digest(text)[:12]] = tuple(round(float(value), 6) for value in values)
    return rows


def _tofu(seed: Path, name: str) -> Mapping[str, float | None]:
    """Return TOFU's own metrics of a model; empty where there are none."""
    try:
        return load_report(seed / "tofu" / name).values()
    except MsaError:
        return {}


def _attacks(folder: Path) -> tuple[AttackFacts | None, dict[str, Mapping[str, Metric]]]:
    """Return what attacks brought back, and the metrics of each; not load_attacks, since the weights may be gone."""
    if not (folder / REPORT_FILE).is_file():
        return None, {}
    facts = facts_of(load_report(folder))
    return facts, {one.name: load_report(folder / one.name).metrics for one in facts.attacks}


def _grid(seed: Path, run: Run | None, note: Any) -> dict[tuple[float, float], Point]:
    """Return the points of the fixed grid. The ideal is the sweep's own, else that of the run."""
    folder = seed / POINTS / "sweep"
    if not (folder / CHOICE_FILE).is_file():
        return {}
    try:
        choice = load_choice(folder)
    except MsaError as error:
        note(str(error))
        return {}
    target = Scores({name: metric.value for name, metric in choice.target.items()}, _rows(folder / "target"))
    if run and run.target and (other := _differing(target, run.target)):
        note(f"the grid was scored on other rows than the run msa-lora: the target's {', '.join(other)} differ much")
    ideal = run.ideal if run else None
    if choice.ideal is not None:
        records = seed / POINTS / "evaluation/ideal_validation"  # the sweep's own rows, of which it has the metrics
        ideal = Scores({name: metric.value for name, metric in choice.ideal.items()}, _rows(records))
    points = {}
    for point in choice.candidates:
        if point.metrics and {"alpha", "beta"} <= set(point.values):
            records = folder / candidate_name(point.values)
            scores = Scores({key: metric.value for key, metric in point.metrics.items()}, _rows(records))
            points[float(point.values["alpha"]), float(point.values["beta"])] = Point(scores, target, ideal)
    return points


def _differing(scores: Scores, other: Scores) -> list[str]:
    """Return the metrics of one model that differ between two measurements by more than a few rows left out."""
    pairs = {name: (value, other.values.get(name)) for name, value in scores.values.items()}
    return [name for name, pair in pairs.items() if None not in pair and abs(pair[0] - pair[1]) > 0.1]
