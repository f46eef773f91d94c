"""Write a first, commented recipe from the names of models and data; refuse what their headers and columns tell."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml

from msa_lite.errors import Faults, MismatchError, MsaError, UsageError, join_faults
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import local_path, parse_yaml, read_text
from msa_lite.io.weights.checkpoint import Checkpoint
from msa_lite.io.weights.hub import is_remote
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.merger.vectors.vector import compare_checkpoints
from msa_lite.pipeline.init.inspect import SetFacts, adapter_base, guess_prior, inspect_model, inspect_set
from msa_lite.recipe import SETS, check_new_file, load_recipe, relative_paths, write_with_schema

_MOST_SCORED = 400  # rows of a set that are scored, of a larger one
_WIDTH = 46  # of the part of a line before its comment


@dataclass(frozen=True)
class Wishes:
    """A request as its user describes it."""

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

    json_keys: ClassVar = ("file", "schema", "recipe", "next")

    file: Path
    """Its file."""
    text: str
    """The recipe with its comments."""
    schema: Path
    """The JSON schema beside it, for editors."""

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
    names = [name for name in (wishes.target, wishes.prior) if name]
    with offline_where_unreachable() if any(map(is_remote, names)) else nullcontext():
        wishes, why_prior = _with_prior(replace(wishes, output=wishes.output or f"runs/{path.stem}"))
        faults, models, sets = Faults(), dict[str, Checkpoint](), dict[str, SetFacts]()
        for name in ("target", "prior"):
            with faults.gathered(f"--{name} "):
                models[name] = inspect_model(getattr(wishes, name))
        for name in SETS:
            if text := getattr(wishes, name):
                with faults.gathered(f"--{name} "):
                    sets[name] = inspect_set(text, wishes.columns)
        with faults.gathered():
            _check_apart(sets)
        if len(models) == 2:
            with faults.gathered():
                _check_pair(wishes, models)
        faults.check()
        text = _text(path, wishes, models["target"], sets, why_prior)
    schema = write_with_schema(path, text, load_recipe(parse_yaml(text, str(path))))
    return Draft(Path(file), read_text(path), schema)


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
    return replace(wishes, prior=guess[0]), f"named by {guess[1]} of the target; "


def _check_pair(wishes: Wishes, models: Mapping[str, Checkpoint]) -> None:
    """Raise MismatchError if target and prior are the same model, or of different shapes."""
    names = wishes.target, wishes.prior or ""
    if names[0] == names[1] or os.path.realpath(local_path(names[0])) == os.path.realpath(local_path(names[1])):
        raise MismatchError(
            f"--target and --prior are the same model, {names[0]}: give as prior the model from before your "
            "fine-tuning, which has not seen the rows"
        )
    if faults := compare_checkpoints(models["target"], models["prior"], ("target", "prior")):
        raise MismatchError(join_faults(f"{names[1]} cannot be the prior of {names[0]}:", faults))


def _check_apart(sets: Mapping[str, SetFacts]) -> None:
    """Raise UsageError if another set holds the same rows as the forget set."""
    hashes = {name: {row.sha256 for row in facts.rows} for name, facts in sets.items()}
    same = [f"--{name}" for name, rows in hashes.items() if name != "forget" and rows == hashes.get("forget")]
    if same:
        raise UsageError(f"{' and '.join(same)}: the same rows as --forget; give other ones, or leave it out")


def _text(path: Path, wishes: Wishes, target: Checkpoint, sets: Mapping[str, SetFacts], why_prior: str) -> str:
    """Return the recipe's text, with a comment beside each line that was looked up or may be changed."""
    file, size = shlex.quote(str(path)), sum(entry.nbytes for entry in target.tensors.values())
    about = f"{target.config.get('model_type')}, {readable(size)} in {target.dtype_name}"
    if base := adapter_base(wishes.target):
        about = f"a LoRA adapter on {base} ({about}); the run merges the two first"
    lines = [
        f"# Forget the rows of {wishes.forget}. Written by `msa-lite init`; change what you like.",
        "#",
        f"# Look first:  msa-lite {file} --dry-run",
        f"# Start:       msa-lite {file}",
        f"# All keys:    msa-lite recipes validate {file}",
        "",
        _line(path, "target", wishes.target, about),
        _line(path, "prior", wishes.prior, f"{why_prior}it must not have seen the rows to forget"),
        "",
        "forget:",
        _set(path, "data", sets["forget"]),
        "  alpha: auto  # how strongly to forget. auto: searched. Or a number, or a list to try",
    ]
    if retain := sets.get("retain"):
        sample = {"sample": "match_forget"} if len(retain.rows) > len(sets["forget"].rows) else {}
        lines += ["retain:", _set(path, "data", retain, sample), "  beta: auto  # how strongly to keep, likewise"]
    else:
        lines += ["# retain:  # rows that must stay; without any, the verdict cannot be PASS",
                  "#   data: {path: keep.jsonl, sample: match_forget}"]  # fmt: skip
    lines += ["vector:", "  mode: lora  # adapters. full: all weights; `msa-lite plan` says what fits"]
    scored = [_set(path, "holdout", sets["holdout"])] if "holdout" in sets else []
    if max(len(facts.rows) for facts in sets.values()) > _MOST_SCORED:
        scored += [f"  limit: {_MOST_SCORED}  # a sample of so many rows of each set is scored"]
    lines += ["evaluate:", *scored] if scored else []
    return "\n".join([*lines, _line(path, "output", wishes.output, "the folder of the run"), ""])


def _set(path: Path, key: str, facts: SetFacts, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the line of a data set."""
    source = facts.source
    values: dict[str, Any] = {"path": source.path}
    values |= {"name": source.name} if source.name else {}
    values |= {"format": "text"} if source.format == "text" else {}
    values |= {"columns": dict(facts.columns)} if facts.columns else {}
    kind = "documents" if source.format == "text" else "rows"
    comment = f"{len(facts.rows)} {kind}, read from {facts.read}"
    return "  " + _line(path, key, {**values, **more}, comment)


def _line(path: Path, key: str, value: Any, comment: str) -> str:
    """Return a key in one line of YAML, with paths as they lead from the recipe's folder, and its comment."""
    value = relative_paths({key: value}, path.parent)[key]
    is_flow = isinstance(value, dict)
    text = yaml.safe_dump(
        value if is_flow else {key: value},
        default_flow_style=is_flow,
        allow_unicode=True,
        width=math.inf,
        sort_keys=False,
    )
    return f"{(f'{key}: {text}' if is_flow else text).strip():<{_WIDTH}} # {comment}"
