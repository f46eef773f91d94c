"""Draft a first recipe from a model, its data and a few wishes, with settings that fit the machine."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.budget.plan import Plan, gigabytes
from msa_lite.budget.speed import Machine, speed_of, this_device
from msa_lite.errors import Faults, MismatchError, MsaError, UsageError, join_faults
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import about, readable
from msa_lite.io.files.reading import local_path, parse_yaml, read_text
from msa_lite.io.weights.hub import is_remote
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.merger.vectors import compare_checkpoints
from msa_lite.pipeline.init.inspect import ModelFacts, SetFacts, guess_prior, inspect_model, inspect_set
from msa_lite.pipeline.prepare.rows import separate_sets
from msa_lite.pipeline.prepare.run import Context, msa_scope
from msa_lite.pipeline.run.msa import msa_stages
from msa_lite.pipeline.stages.facts import find_facts
from msa_lite.pipeline.stages.forecast import find_remedies, forecast
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import SETS, Recipe, check_new_file, load_recipe, relative_paths, set_key, write_with_schema


@dataclass(frozen=True)
class Proposal:
    """The settings of the fit, with the reason."""

    vector: dict[str, Any]
    """The section `vector` of the recipe."""
    why: str
    """The reason, in one line."""
    fits: bool
    """True if the run fits into the memory of this machine."""
    time: str
    """The time of the run on this machine, in words; a question mark where it cannot be predicted."""
    notes: Sequence[str] = ()
    """What the user should know, one sentence each."""


def propose(values: Mapping[str, Any]) -> Proposal:
    """Return all weights if they fit on this machine, else adapters, else the change that makes these fit.

    Vectors of all weights came nearer to the ideal than adapters (examples/real_model/RESULTS.md, claim 7). They
    take more memory, and a whole model's room on disk each.
    """
    recipe = load_recipe(values)
    facts = find_facts(recipe)
    device = this_device()
    machine = Machine(device, speed=speed_of(device))

    def build(recipe: Recipe) -> list[Stage]:
        return msa_stages(Context(recipe, msa_scope(recipe)))

    def plan(recipe: Recipe) -> Plan:
        return forecast(build(recipe), facts, machine, recipe.folder)

    drafted, full = plan(recipe), plan(load_recipe(recipe, ["vector.mode=full"]))
    need, disk = _peak(drafted), sum(full.disk.values())
    instead = f"all weights (full) would need {f'{gigabytes(disk)} of disk' if full.fits else _peak(full)}"
    if full.fits and disk <= full.free:
        why = f"all weights forget more precisely; needs {_peak(full)} of {device}, adapters (lora) {need}"
        return Proposal({"mode": "full"}, why, True, about(full.seconds))
    if drafted.fits:
        return Proposal({"mode": "lora"}, f"needs {need} of {device}; {instead}", True, about(drafted.seconds))
    fitting = (remedy for remedy in find_remedies(recipe, build, facts, machine) if remedy.fits)
    remedy = next((r for r in fitting if all(key.startswith("vector.") for key in r.overrides)), None)
    if remedy is None:
        why = f"needs {need}, more than {device} has; {instead}"
        note = f"the run does not fit on this machine, {device}: it needs {need}. Take a larger GPU, or a smaller model"
        return Proposal({"mode": "lora"}, why, False, about(None), [note])
    changed = load_recipe(recipe, remedy.overrides)
    why = f"needs {gigabytes(remedy.peak)} of {device}, lora alone {need} ({remedy.harm})"
    changes = reduce(set_key, remedy.overrides, dict[str, Any]())
    section = {"mode": changed.vector.mode} | changes["vector"]
    return Proposal(section, why, True, about(plan(changed).seconds))


def _peak(plan: Plan) -> str:
    return gigabytes(plan.peak.need.nbytes)


_MOST_SCORED = 400  # rows of a set that are scored, of a larger one
_WIDTH = 46  # of the part of a line before its comment


@dataclass(frozen=True)
class Wishes:
    """A request as its user describes it; all else is looked up."""

    target: str
    """The finished model: a folder or repo[@revision]."""
    forget: str
    """The rows to forget: FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION]."""
    prior: str | None = None
    """The checkpoint from before it saw the rows. None: the model that the target's own files name."""
    retain: str | None = None
    """Rows to keep."""
    holdout: str | None = None
    """Rows that no model was trained on."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns by key (question, answer, messages, text)."""
    output: str | None = None
    """The folder of the run. None: runs/NAME for a recipe NAME.yaml."""


@dataclass(frozen=True)
class Draft:
    """A recipe that was written."""

    json_keys: ClassVar = ("file", "schema", "recipe", "fits", "notes", "next")

    file: Path
    """Its file."""
    text: str
    """The recipe with its comments."""
    schema: Path
    """The JSON schema beside it, for editors."""
    fits: bool
    """True if the run fits into the memory of this machine, by prediction."""
    notes: Sequence[str] = ()
    """What the user should know, one sentence each."""

    @property
    def next(self) -> str:
        """Return the command to type next."""
        return f"msa-lite {shlex.quote(str(self.file))} --dry-run"

    @property
    def recipe(self) -> Any:
        """Return the recipe as a mapping."""
        return parse_yaml(self.text, str(self.file))


def init_recipe(file: str, wishes: Wishes) -> Draft:
    """Write a commented recipe to a new file.

    Inspect models, data and prior first. One error names all faults: missing models or data sets, unknown columns,
    target and prior that are the same or do not fit. Validate the recipe before writing it.
    """
    require("train")
    path = local_path(file)
    check_new_file(path)
    wishes = replace(wishes, output=wishes.output or f"runs/{path.stem}")
    names = [name for name in (wishes.target, wishes.prior) if name]
    with offline_where_unreachable() if any(map(is_remote, names)) else nullcontext():
        return _draft(path, file, wishes)


def _draft(path: Path, file: str, wishes: Wishes) -> Draft:
    """Look at models and data, and write the recipe."""
    wishes, why_prior = _with_prior(wishes)
    faults, models, sets = Faults(), dict[str, ModelFacts](), dict[str, SetFacts]()
    for name in ("target", "prior"):
        with faults.gathered(f"--{name} "):
            models[name] = inspect_model(getattr(wishes, name))
    for name in SETS:
        if text := getattr(wishes, name):
            with faults.gathered(f"--{name} "):
                sets[name] = inspect_set(text, wishes.columns)
    overlaps: list[str] = []
    with faults.gathered():
        _check_apart(sets)
        overlaps = separate_sets({name: facts.rows for name, facts in sets.items()})[1]
    if "target" in models and "prior" in models:
        with faults.gathered():
            _check_pair(models["target"], models["prior"])
    faults.check()
    values = _values(wishes, models, sets)
    proposal = propose(values)
    values = {key: proposal.vector if key == "vector" else value for key, value in values.items()}
    text = _text(path, wishes, _Facts(models, sets, proposal, why_prior), relative_paths(values, path.parent))
    schema = write_with_schema(path, text, load_recipe(parse_yaml(text, str(path))))
    notes = [*proposal.notes, *overlaps]
    return Draft(Path(file), read_text(path), schema, proposal.fits, notes)


@dataclass(frozen=True)
class _Facts:
    """All that comments say."""

    models: Mapping[str, ModelFacts]
    sets: Mapping[str, SetFacts]
    proposal: Proposal
    why_prior: str


def _with_prior(wishes: Wishes) -> tuple[Wishes, str]:
    """Return the wishes with a prior, and the reason for it. Raise UsageError where none is given or named."""
    if wishes.prior:
        return wishes, ""
    try:
        guess = guess_prior(wishes.target)
    except MsaError as error:
        raise UsageError(f"--prior is needed: {error}") from error
    if guess is None:
        target, reason = wishes.target, offline_reason()
        if not local_path(target).is_dir() and (reason or not is_remote(target)):
            why = f", and the Hub was not asked, offline ({reason})" if reason else ""
            raise UsageError(f"--target {target}: no such folder{why}. --prior is needed, too, where no file names it")
        raise UsageError(
            f"--prior is needed: neither an adapter_config.json nor the card of {target} names the model that it was "
            "tuned from"
        )
    return replace(wishes, prior=guess[0]), f"named by {guess[1]} of the target"


def _check_pair(target: ModelFacts, prior: ModelFacts) -> None:
    """Raise MismatchError if target and prior are the same model, or of different shapes."""
    places = [os.path.realpath(local_path(model.name)) for model in (target, prior)]
    if target.name == prior.name or places[0] == places[1]:
        raise MismatchError(
            f"--target and --prior are the same model, {target.name}: give as prior the model from before your "
            "fine-tuning, which has not seen the rows"
        )
    if faults := compare_checkpoints(target.checkpoint, prior.checkpoint, ("target", "prior")):
        raise MismatchError(join_faults(f"{prior.name} cannot be the prior of {target.name}:", faults))


def _check_apart(sets: Mapping[str, SetFacts]) -> None:
    """Raise UsageError if another set holds the same rows as the forget set."""
    hashes = {name: {row.sha256 for row in facts.rows} for name, facts in sets.items()}
    same = [f"--{name}" for name, rows in hashes.items() if name != "forget" and rows == hashes.get("forget")]
    if same:
        raise UsageError(f"{' and '.join(same)}: the same rows as --forget; give other ones, or leave it out")


def _values(wishes: Wishes, models: Mapping[str, ModelFacts], sets: Mapping[str, SetFacts]) -> dict[str, Any]:
    """Return the keys and values of the recipe. The section `vector` is empty: it depends on all others."""
    shared = {tuple(facts.columns.items()) for facts in sets.values()}
    columns = dict(next(iter(shared))) if len(shared) == 1 else {}
    data = {name: _data(facts, columns) for name, facts in sets.items()}
    values: dict[str, Any] = {"target": wishes.target, "prior": wishes.prior}
    if columns:
        values["columns"] = columns
    values["forget"] = {"data": data["forget"], "alpha": "auto"}
    if "retain" in data:
        more = len(sets["retain"].rows) > len(sets["forget"].rows)
        values["retain"] = {"data": data["retain"] | ({"sample": "match_forget"} if more else {}), "beta": "auto"}
    evaluate: dict[str, Any] = {"holdout": data["holdout"]} if "holdout" in data else {}
    if max(len(facts.rows) for facts in sets.values()) > _MOST_SCORED:
        evaluate["limit"] = _MOST_SCORED
    values["vector"] = {}  # filled in once these are known
    return values | ({"evaluate": evaluate} if evaluate else {}) | {"output": wishes.output}


def _data(facts: SetFacts, shared: Mapping[str, str]) -> dict[str, Any]:
    source = facts.source
    values: dict[str, Any] = {"path": source.path}
    values |= {"name": source.name} if source.name else {}
    values |= {"format": "text"} if source.format == "text" else {}
    return values | ({"columns": dict(facts.columns)} if facts.columns and not shared else {})


def _text(path: Path, wishes: Wishes, facts: _Facts, values: Mapping[str, Any]) -> str:
    """Return the recipe's text, with a comment beside each line that was looked up or may be changed."""
    comments, file = _comments(facts), shlex.quote(str(path))
    head = [
        f"Forget the rows of {wishes.forget}. Written by `msa-lite init`; change what you like.",
        "",
        f"Look first:  msa-lite {file} --dry-run",
        f"Start:       msa-lite {file}",
        f"All keys:    msa-lite recipes validate {file}",
        f"Time:        {facts.proposal.time} on this machine, by prediction",
    ]
    lines = [f"# {line}".rstrip() for line in head] + [""]
    for key, value in values.items():
        lines += [""] if key == "forget" else []
        lines += _lines(key, value, comments, key, 0)
        if key == "forget" and "retain" not in values:
            lines += ["# retain:                # rows that must stay; without any, the verdict cannot be PASS",
                      "#   data: {path: keep.jsonl, sample: match_forget}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def _comments(facts: _Facts) -> dict[str, str]:
    """Return a comment for each dotted key."""
    places = {"forget": "forget.data", "retain": "retain.data", "holdout": "evaluate.holdout"}
    comments = {places[name]: _about_set(rows) for name, rows in facts.sets.items()}
    target, prior = facts.models["target"], facts.models["prior"]
    templates = {True: "; chat template: yes", False: "; no chat template: rows are asked as plain text", None: ""}
    comments |= {
        "target": _about_model(target) + templates[target.has_template],
        "prior": "; ".join(filter(None, [facts.why_prior, "it must not have seen the rows to forget"])),
        "columns": "the columns of all data sets",
        "forget.alpha": "how strongly to forget. auto: searched. Or a number, or a list to try",
        "retain.beta": "how strongly to keep, likewise",
        "evaluate.limit": "a sample of so many rows of each set is scored",
        "vector.mode": facts.proposal.why,
        "output": "the folder of the run",
    }
    if prior.has_template is False and target.has_template:
        comments["prior"] += "; it has no chat template, so it is asked with the target's"
    return comments


def _about_model(model: ModelFacts) -> str:
    checkpoint = model.checkpoint
    size = sum(entry.nbytes for entry in checkpoint.tensors.values())
    about = f"{checkpoint.config.get('model_type')}, {readable(size)} in {checkpoint.dtype_name}"
    return f"a LoRA adapter on {model.base} ({about}); the run merges the two first" if model.base else about


def _about_set(facts: SetFacts) -> str:
    kind = "documents" if facts.source.format == "text" else "rows"
    return f"{len(facts.rows)} {kind}, read from {facts.read}"


def _lines(key: str, value: Any, comments: Mapping[str, str], where: str, depth: int) -> list[str]:
    """Return the lines of a key: sections as blocks, data sets and columns in one line."""
    indent = "  " * depth
    if isinstance(value, dict) and key not in ("data", "holdout", "columns"):
        lines = [f"{indent}{key}:"]
        for name, item in value.items():
            lines += _lines(name, item, comments, f"{where}.{name}", depth + 1)
        return lines
    line, comment = f"{indent}{key}: {_flow(value)}", comments.get(where)
    return [f"{line:<{_WIDTH}} # {comment}" if comment else line]


def _flow(value: Any) -> str:
    """Return a value in one line of YAML. A text that YAML would read as something else is quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        is_plain = parse_yaml(f"{{a: {value}}}", "") == {"a": value} and "#" not in value
    except MsaError:
        is_plain = False
    return value if is_plain else json.dumps(value, ensure_ascii=False)
