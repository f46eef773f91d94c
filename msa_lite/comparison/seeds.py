"""Join the runs of one recipe that differ in their seed alone into one row: mean ± standard error over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from msa_lite.comparison.entries import METHOD_LABELS, Entry
from msa_lite.errors import MsaError
from msa_lite.io.files.reading import parse_yaml
from msa_lite.io.files.writing import canonical_json
from msa_lite.report.run.provenance import RECIPE_FILE, read_run, recorded_method, recorded_revisions
from msa_lite.report.run.stages import load_stages
from msa_lite.report.tables.reports import Metric

_OUTPUT = "OUTPUT"


class _SeedRun(NamedTuple):
    """An entry of a run, with what decides whether it can be joined with others."""

    recipe: str
    """The recipe, method and role, without seed and output."""
    seed: int
    inputs: Mapping[str, str]
    """The content hash of the data (empty: not known), and the revision of each model outside the run's output."""
    entry: Entry


def join_seeds(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries with one for each method of a recipe that was run with several seeds, and notes on these.

    Runs are of one recipe if their resolved recipes differ in seed and output alone. They are joined if the content of
    their data is the same, and target, prior and ideal are the same, or each run's own, in its output. Entries with a
    label of the user's stay as they are; so do target and ideal where all seeds ask them the same rows. A note says why
    others are not joined.
    """
    recipes: dict[str, list[_SeedRun]] = {}
    for run in filter(None, map(_seed_run, entries)):
        recipes.setdefault(run.recipe, []).append(run)
    joined, gone, notes = dict[int, Entry](), set[int](), list[str]()
    for runs in recipes.values():
        seeds = {run.seed: run.entry for run in sorted(runs, key=lambda run: run.seed)}
        settings = [[run.entry.report.settings.get(key) for key in ("model", "sets")] for run in runs]
        if len(runs) == 1 or (runs[0].entry.role != "method" and _common(settings)):
            continue
        if reason := _why_apart(runs):
            notes.append(f"not joined (seeds {_listed(seeds)}): {reason}")
            continue
        joined[id(runs[0].entry)] = _join(seeds)
        gone |= {id(run.entry) for run in runs[1:]}
        what = "mean ± its standard error over the seeds; others: over items"
        notes.append(f"rows of several seeds ({_listed(seeds)}): {what}")
    here = {seed for row in joined.values() for seed in row.seeds}
    for first, *others in recipes.values():
        known = {run.seed for run in (first, *others)}
        if first.entry.role == "method" and here - known:
            notes.append(f"{first.entry.label}: only with seed {_listed(known)}; seeds here: {_listed(here)}")
    return [joined.get(id(entry), entry) for entry in entries if id(entry) not in gone], list(dict.fromkeys(notes))


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _why_apart(runs: Sequence[_SeedRun]) -> str:
    """Return why runs of one recipe are not its seeds; empty where they are. What is not known counts as other."""
    if others := [name for name in runs[0].inputs if not _common([run.inputs.get(name) for run in runs])]:
        return f"other {', '.join(others)}"
    if len({run.seed for run in runs}) < len(runs):
        return "a seed stands twice"
    models, first = {canonical_json(run.entry.report.settings.get("model")) for run in runs}, runs[0].entry
    return f"{first.label} is the same model twice" if first.role == "method" and len(models) < len(runs) else ""


def _seed_run(entry: Entry) -> _SeedRun | None:
    """Return an entry as a run; None for one with a label of the user's, and for what lies in no run's folder."""
    evaluation = Path(entry.source).parent.parent
    if entry.named or evaluation.name != "evaluation":
        return None
    try:
        text, stages = read_run(evaluation.parent), load_stages(evaluation.parent)
        values = parse_yaml(text, RECIPE_FILE)
    except MsaError:
        return None
    seed, output = int(values.pop("seed")), str(values.pop("output")).rstrip("/")
    values = _moved(values, output)
    models = {**values, **(values.get("evaluate") or {})}
    noted = recorded_revisions(text).items()
    fixed = {role: model for role, model in noted if not str(models.get(role, _OUTPUT)).startswith(_OUTPUT)}
    inputs = {"data": stages.data, **fixed}
    return _SeedRun(canonical_json([entry.role, recorded_method(text)[0], values]), seed, inputs, entry)


def _moved(value: Any, output: str) -> Any:
    """Return a recipe's value with a fixed name in the place of the output, with which paths in it begin."""
    if isinstance(value, dict):
        return {key: _moved(item, output) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, output) for item in value]
    return f"{_OUTPUT}{value[len(output) :]}" if f"{value}/".startswith(f"{output}/") else value


def _join(seeds: Mapping[int, Entry]) -> Entry:
    """Return one entry of the runs by their seeds."""
    first, *_ = entries = list(seeds.values())
    settings, name = dict(first.report.settings), str((first.method or {}).get("name", first.label))
    models, sets = ([entry.report.settings.get(key) or {} for entry in entries] for key in ("model", "sets"))
    settings["model"] = _common(models) or models
    settings["sets"] = _common(sets) or {name: [one.get(name) for one in sets] for name in sets[0]}
    settings["method"] = _common([entry.method for entry in entries]) or (first.method and {"name": name})
    names = dict.fromkeys(name for entry in entries for name in entry.report.metrics)
    metrics = {name: _mean({seed: entry.report.metrics.get(name) for seed, entry in seeds.items()}) for name in names}
    label = _common([entry.label for entry in entries]) or METHOD_LABELS.get(name, name)
    report, source = replace(first.report, metrics=metrics, settings=settings), ", ".join(run.source for run in entries)
    return replace(first, label=f"{label}, {len(seeds)} seeds", report=report, source=source, seeds=seeds)


def _common(values: Sequence[Any]) -> Any:
    """Return the one value that all have, or None."""
    return values[0] if all(value == values[0] for value in values) else None


def _mean(metrics: Mapping[int, Metric | None]) -> Metric:
    """Return the mean of a metric over n seeds, with its standard error; no value where it is missing with one."""
    known = {seed: metric for seed, metric in metrics.items() if metric and metric.value is not None}
    first = next(metric for metric in (*known.values(), *metrics.values()) if metric)
    if missing := [str(seed) for seed in metrics if seed not in known]:
        return replace(first, value=None, stderr=None, note=first.note or f"no value with seed {', '.join(missing)}")
    values = [float(metric.value or 0.0) for metric in known.values()]
    note = _common([metric.note for metric in known.values()])
    return Metric(fmean(values), len(values), stdev(values) / math.sqrt(len(values)), first.higher_is_better, note=note)
