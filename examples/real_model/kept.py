"""Keep the figures behind the page of results in files.

The folder of the experiments holds models, and may go. From these files the page can be made again, and runs that are
made later, in another folder, are added to theirs. They hold scores of rows, named by hashes, and no texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from collect import Point, Results, Run, Seed, collect_plan, tidy
from pydantic import TypeAdapter

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import write_json, write_text

PLAN = "plan.json"
_RUN, _POINT = TypeAdapter(Run), TypeAdapter(Point)


def keep(results: Results, folder: Path, out: Path) -> None:
    """Write plan.json and a file for each seed, a run or point a line, into a folder. out: that of the experiments."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, results.plan)
    for seed in results.seeds:
        lines = "".join(json.dumps(line, sort_keys=True) + "\n" for line in _lines(seed, out))
        write_text(folder / f"seed-{seed.number}.jsonl", lines)


def with_kept(results: Results, folder: Path) -> Results:
    """Add what was kept in a folder before to results. Where both have a run, that of the results stands.

    Experiments keep the time when they were first fixed. Raise FormatError for files of another form.
    """
    if not (folder / PLAN).is_file():
        return results
    plan = _joined_plan(results.plan, folder / PLAN)
    new = {seed.number: seed for seed in results.seeds}
    old = {number: _read(file) for number in plan["seeds"] if (file := folder / f"seed-{number}.jsonl").is_file()}
    seeds = [_joined(new.get(number), old.get(number)) for number in plan["seeds"]]
    return replace(collect_plan(plan), seeds=tuple(seed for seed in seeds if seed), problems=results.problems)


def _joined_plan(new: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the newer plan, with the times and seeds of the one in a file."""
    before = read_object(file)
    try:
        stamps = {
            one["name"]: {key: one[key] for key in ("fixed", "commit") if key in one} for one in before["experiments"]
        }
        return {
            **new,
            **{key: before[key] for key in ("fixed", "commit")},
            "experiments": [one | stamps.get(one["name"], {}) for one in new["experiments"]],
            "seeds": sorted({*new["seeds"], *before["seeds"]}),
        }
    except (KeyError, TypeError) as error:
        raise _other_form(file, error) from error


def _joined(new: Seed | None, old: Seed | None) -> Seed | None:
    if new is None or old is None:
        return new or old
    references = {name: values or old.references.get(name, {}) for name, values in new.references.items()}
    return Seed(
        new.number, {**old.runs, **new.runs}, {**old.distances, **new.distances}, references, new.grid or old.grid
    )


def _lines(seed: Seed, out: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a seed as objects of JSON: its own figures, its runs, and the points of its grid."""
    yield {"seed": seed.number, "distances": dict(seed.distances), "references": dict(seed.references)}
    for name, run in seed.runs.items():
        tidied = replace(run, command=tidy(run.command, out), error=tidy(run.error, out) if run.error else None)
        yield {"experiment": name, "run": _RUN.dump_python(tidied, mode="json")}
    for place, point in sorted(seed.grid.items()):
        yield {"place": place, "point": _POINT.dump_python(point, mode="json")}


def _read(file: Path) -> Seed:
    """Return a seed from the file that `keep` wrote."""
    try:
        first, *others = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        runs = {one["experiment"]: _RUN.validate_python(one["run"]) for one in others if "run" in one}
        grid = {tuple(one["place"]): _POINT.validate_python(one["point"]) for one in others if "point" in one}
        return Seed(first["seed"], runs, first["distances"], first["references"], grid)
    except (ValueError, KeyError, TypeError) as error:
        raise _other_form(file, error) from error


def _other_form(file: Path, error: Exception) -> FormatError:
    return FormatError(f"{file}: not as results.py writes it ({error}); restore it, or remove it")
