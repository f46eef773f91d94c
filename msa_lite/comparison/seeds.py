"""Join the runs of one recipe that differ in their seed alone into one row: mean ± standard error over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from msa_lite.comparison.entries import METHOD_LABELS, Entry
from msa_lite.errors import MsaError
from msa_lite.io.files.reading import parse_yaml
from msa_lite.io.files.writing import canonical_json
from msa_lite.report.run.provenance import RECIPE_FILE, read_run, recorded_method, recorded_revisions
from msa_lite.report.tables.reports import Metric

_OUTPUT = "OUTPUT"


def join_seeds(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries with one for each method of a recipe that was run with several seeds, and notes on these.

    Two runs are of one recipe if their resolved recipes differ in seed and output alone, and target, prior and ideal
    are the same, or each run's own, in its output. Entries with a label of the user's, and runs of a seed that stands
    twice, stay as they are; so do target and ideal where all seeds ask them the same rows.
    """
    groups: dict[str, list[tuple[int, Entry]]] = {}
    for entry in entries:
        if not entry.named and (known := _recipe_of(entry)):
            groups.setdefault(known[0], []).append((known[1], entry))
    rows, notes = {id(entry): entry for entry in entries}, dict[str, None]()
    for group in groups.values():
        seeds = dict(sorted(group, key=lambda pair: pair[0]))
        same = _common([[entry.report.settings.get(key) for key in ("model", "sets")] for entry in seeds.values()])
        if 1 < len(seeds) == len(group) and (group[0][1].role == "method" or same is None):
            places = [id(entry) for _, entry in group]
            rows = {place: row for place, row in rows.items() if place not in places[1:]} | {places[0]: _join(seeds)}
            listed = ", ".join(map(str, seeds))
            notes[f"rows of several seeds ({listed}): mean ± its standard error over the seeds; others: over items"] = (
                None
            )
    return list(rows.values()), list(notes)


def _recipe_of(entry: Entry) -> tuple[str, int] | None:
    """Return what the runs of one recipe, method and role have in common, and the seed; None for what is no run."""
    place = Path(entry.source)
    with suppress(MsaError, LookupError, TypeError, ValueError):
        if place.parent.parent.name == "evaluation":
            values = parse_yaml(text := read_run(place.parent.parent.parent), RECIPE_FILE)
            seed, output = int(values.pop("seed")), str(values.pop("output")).rstrip("/")
            values = _moved(values, output)
            models = {**values, **(values.get("evaluate") or {})}
            noted = recorded_revisions(text).items()
            fixed = [(role, model) for role, model in noted if not str(models.get(role, _OUTPUT)).startswith(_OUTPUT)]
            return canonical_json([entry.role, recorded_method(text)[0], values, fixed]), seed
    return None


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
    source, report = (
        ", ".join(entry.source for entry in entries),
        replace(first.report, metrics=metrics, settings=settings),
    )
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
