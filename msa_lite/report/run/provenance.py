"""Read where a run's result comes from, which stages its recipe asks for, and whether it was purged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from msa_lite.errors import FormatError, MsaError, UsageError
from msa_lite.io.files.reading import PlainDumper, parse_yaml, read_object, read_text
from msa_lite.io.files.writing import hash_file
from msa_lite.io.weights.hub import content_files, revision_of
from msa_lite.report.tables.reports import reading, stage_manifest

RECIPE_FILE = "recipe.yaml"  # of a run or training: the recipe as resolved, below a line that says which
RECORD_FILE = "record.json"  # of a finished run: its removal record
_RUN, _TRAINING = "# A run of msa-lite", "# A training of msa-lite"
GIVEN = "paths as the recipe has them: "  # opens the note of a run's recipe.yaml with them, by full path
_ROWS = "rows learnt, "
_NOTE = re.compile(r"^# ([\w ,]+): (\S+)$", re.MULTILINE)  # revisions of models, hashes of rows


@dataclass(frozen=True)
class Provenance:
    """The inputs of a run, and the hashes of what it made."""

    recipe: str
    """The recipe as resolved, with local paths as the recipe has them and without keys that hold nothing."""
    values: Mapping[str, Any]
    """The same as plain data, with full paths."""
    method: str
    """"msa", "task_vector" for a recipe without a prior, or the name of the baseline."""
    reason: str | None
    """The reason why this prior was taken, or none, where the recipe does not name it."""
    models: Mapping[str, str]
    """The names of target, prior and ideal, as in the recipe: a repository with its commit, or a folder."""
    revisions: Mapping[str, str]
    """The commit or content hash of each model."""
    rows: Mapping[str, str]
    """The hash of the rows that each vector learnt."""
    files: Mapping[str, str]
    """The SHA-256 of each file of the unlearned model; empty until it is merged."""
    versions: Mapping[str, str]
    """The versions of msa-lite and its libraries that merged the model."""
    seed: int | None
    """The seed of the run."""
    form: Literal["model", "adapter"] = "model"
    """The kind of the merge's result, which is also the name of its folder."""
    is_baseline: bool = False
    """True for the run of a method beside the recipe's own."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Local paths as the recipe has them, by full path: a report goes by mail, and names no folder of this machine."""
    day: str = ""
    """The day on which the run began, in UTC: "2026-01-31"."""
    json_keys: ClassVar = (
        "recipe", "method", "reason", "models", "revisions", "rows", "files", "versions", "seed", "form", "is_baseline",
    )  # fmt: skip


def load_provenance(folder: Path) -> Provenance:
    """Load the provenance from a run's folder. Raise FormatError for broken files."""
    path = folder / RECIPE_FILE
    text = read_text(path)
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise FormatError(f"{path}: not a recipe")
    given = given_paths_of(text, path)
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"# {GIVEN}"))
    notes = [line for line in text.splitlines()[1:] if line.startswith("# ")]
    pinned, baseline = recorded_revisions(text), recorded_method(text)[0]
    merge = values.get("merge")
    form: Literal["model", "adapter"] = (
        "adapter" if isinstance(merge, dict) and merge.get("as") == "adapter" else "model"
    )
    manifest = stage_manifest(folder / form) or {}
    revisions = {name: value for name, value in pinned.items() if not name.startswith(_ROWS)}
    seed = values.get("seed")
    return Provenance(
        recipe=_for_readers(text, values, given),
        values=values,
        method=baseline or _own_method(values),
        is_baseline=baseline is not None,
        form=form,
        reason=next((line[2:] for line in notes if not _NOTE.match(line)), None),
        models={name: given.get(model, model) for name, model in _models(values, revisions).items()},
        given=given,
        revisions=revisions,
        rows={name.removeprefix(_ROWS): value for name, value in pinned.items() if name.startswith(_ROWS)},
        files={name: item["sha256"] for name, item in manifest.get("files", {}).items()},
        versions=dict(manifest.get("versions") or {}),
        seed=seed if isinstance(seed, int) else None,
        day=_day(folder),
    )


def _day(folder: Path) -> str:
    """Return the day on which a run began, by the record of this recipe, which a copy keeps; else by the file's time.

    The record itself has the time of recipe.yaml, so both are the same.
    """
    with suppress(MsaError, KeyError, TypeError):
        record = read_object(folder / RECORD_FILE)
        if record["files"][RECIPE_FILE] == hash_file(folder / RECIPE_FILE):
            return str(record["started"])[:10]
    return datetime.fromtimestamp((folder / RECIPE_FILE).stat().st_mtime, UTC).date().isoformat()


def given_paths_of(text: str, path: Path) -> dict[str, str]:
    """Return the local paths as the recipe has them by full path, from the note in a run's recipe.yaml.

    text: the file's content. path: the file, for messages. Raise FormatError for a broken note.
    """
    note = next((line for line in text.splitlines() if line.startswith(f"# {GIVEN}")), None)
    with reading(path):
        return {str(full): str(given) for full, given in json.loads(note[len(GIVEN) + 2 :]).items()} if note else {}


def _for_readers(text: str, values: Any, given: Mapping[str, str]) -> str:
    """Return the text of a recipe with local paths as the recipe has them, without nulls; `values` is its content.

    The text is a recipe that does the same: null is the default of every key but `evaluate`.
    """

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            parts = {key: shown(one) for key, one in value.items() if one is not None or key == "evaluate"}
            return {key: part for key, part in parts.items() if part != {} or value[key] == {}}
        if isinstance(value, list):
            return [shown(one) for one in value]
        return given.get(value, value) if isinstance(value, str) else value

    notes = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return notes + yaml.dump(shown(values), Dumper=PlainDumper, sort_keys=False, allow_unicode=True)


def read_run(folder: Path) -> str:
    """Return the text of recipe.yaml in the folder of a run, of MSA or of a baseline. Raise UsageError for others."""
    try:
        text = read_text(folder / RECIPE_FILE)
    except FormatError as error:
        hint = f"; give the folder, {folder.parent}" if folder.name == RECIPE_FILE else ""
        is_there = folder.is_dir() or hint
        what = f"no run of msa-lite, since there is no {RECIPE_FILE} of one in it" if is_there else "no such folder"
        raise UsageError(f"{folder}: {what}{hint}") from error
    if not text.startswith(_RUN):
        what = "a training's folder, not a run's" if text.startswith(_TRAINING) else "no run of msa-lite"
        raise UsageError(f"{folder}: is {what}; give the folder that `msa-lite RECIPE.yaml` has written")
    return text


ENTERED = "baseline --model"  # the command that enters another method's result


def recorded_method(recipe: str) -> tuple[str | None, bool]:
    """Return the method of a baseline's run by the first line of its recipe.yaml, and whether its result was entered.

    The method is None for a recipe's own run.
    """
    method = re.search(r"`msa-lite baseline (--model )?([\w.-]+)`", recipe.partition("\n")[0])
    return (method[2], method[1] is not None) if method else (None, False)


def _own_method(values: Mapping[str, Any]) -> str:
    """Return the method of a recipe's own run, as `msa_scope` has it."""
    return "msa" if values.get("prior") or values.get("history") else "task_vector"


def recorded_revisions(recipe: str) -> dict[str, str]:
    """Return the revisions of models and the hashes of rows in the comments of a run's recipe.yaml, by name."""
    return dict(_NOTE.findall(recipe))


def _models(values: Mapping[str, Any], revisions: Mapping[str, str]) -> dict[str, str]:
    evaluate = values.get("evaluate")
    names = {
        "target": values.get("target"),
        "prior": values.get("prior"),
        "ideal": evaluate.get("ideal") if isinstance(evaluate, dict) else None,
    }
    return {name: str(value) for name, value in names.items() if value and (name != "prior" or name in revisions)}


WITH_VECTORS = ("msa", "task_vector")


def result_revision(folder: Path) -> str:
    """Return the revision of the model, or adapter, in a folder, by the hashes that its manifest records."""
    manifest = stage_manifest(folder) or {"files": {}}
    hashes = {name: item["sha256"] for name, item in manifest["files"].items()}
    return revision_of({name: hashes.get(name) for name in content_files(folder)})


PAGE_FILE = "report.html"  # of a run: the report for a browser
PURGED_FILE = "purged.json"  # what `msa-lite purge` has removed from a run's folder, and when


def purge_day(folder: Path) -> str | None:
    """Return the day on which a run's data was purged; None where it was not."""
    path = folder / PURGED_FILE
    return str(read_object(path).get("began"))[:10] if path.is_file() else None
