"""Write a first, commented recipe from the names of models and data; refuse what their headers and columns tell.

Models and data are known by their files alone: sizes, tokenizer, columns, base.
"""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import yaml

from msa_lite.data import DataSource, Row, load_rows, load_table
from msa_lite.data.forms import find_form
from msa_lite.errors import ColumnsError, Faults, MismatchError, MsaError, UsageError, join_faults
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import readable
from msa_lite.io.files.addresses import model_name, split_configuration
from msa_lite.io.files.reading import local_path, parse_yaml, read_text
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.checkpoint import Checkpoint
from msa_lite.io.weights.hub import explain, is_remote, is_remote_adapter, split_name
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.merger.vectors.vector import compare_checkpoints
from msa_lite.pipeline.stages.facts import find_headers
from msa_lite.pipeline.verbs.elsewhere import OtherTraining, read_training
from msa_lite.recipe import SETS, check_new_file, load_recipe, relative_paths, write_with_schema
from msa_lite.report.page.card import read_base_model
from msa_lite.settings import Columns

_MOST_SCORED = 400  # rows of a set that are scored, of a larger one
_WIDTH = 46  # of the part of a line before its comment
_NOT_GIVEN = "absent, private or gated: ask for access on its page, then `hf auth login`"


@dataclass(frozen=True)
class Wishes:
    """A request as its user describes it."""

    target: str
    """The finished model: a folder or repo[@revision]; "" for the one that `config` names."""
    forget: str
    """The rows to forget: FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION]."""
    prior: str | None = None
    """The checkpoint from before it saw the rows. None: the model that the target's own files name."""
    retain: str | None = None
    """Rows to keep."""
    holdout: str | None = None
    """Rows that no model was trained on."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns, by key as in a recipe."""
    config: str | None = None
    """The configuration of axolotl or LLaMA-Factory that made the target, or the folder of a Trainer. It gives target,
    prior, rows to keep and settings where they are not named here."""


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
    faults = Faults()
    wishes, training = _with_training(wishes, faults)
    names = [name for name in (wishes.target, wishes.prior) if name]
    with offline_where_unreachable() if any(map(is_remote, names)) else nullcontext():
        wishes, why_prior = (wishes, "") if faults else _with_prior(wishes)
        models, sets = dict[str, Checkpoint](), dict[str, SetFacts]()
        for name in ("target", "prior"):
            if model := getattr(wishes, name):
                with faults.gathered(training.origins.get(name, f"--{name} ")):
                    models[name] = inspect_model(model)
        for name in SETS:
            if source := getattr(wishes, name) or training.sets.get(name):
                with faults.gathered(training.origins[name]):
                    sets[name] = inspect_set(source, wishes.columns)
        with faults.gathered():
            _check_apart(sets)
        if len(models) == 2:
            with faults.gathered():
                _check_pair(wishes, models)
        faults.check()
        text = _text(path, wishes, models["target"], sets, why_prior, training)
    schema = write_with_schema(path, text, load_recipe(parse_yaml(text, str(path))))
    return Draft(Path(file), read_text(path), schema)


def _with_training(wishes: Wishes, faults: Faults) -> tuple[Wishes, OtherTraining]:
    """Return the wishes with the models that their configuration names, and the training that it describes."""
    given = {name: f"--{name} " for name in ("target", "prior", *SETS) if getattr(wishes, name)}
    training = read_training(wishes.config, faults, given) if wishes.config else OtherTraining()
    training.origins.update(given)
    target, prior = (getattr(wishes, name) or training.models.get(name, "") for name in ("target", "prior"))
    if not target:
        faults.append(UsageError(f"--target is needed: {wishes.config} names none that can be read"))
    return replace(wishes, target=model_name(target), prior=model_name(prior) or None), training


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


@dataclass(frozen=True)
class SetFacts:
    """A data set, as its file, folder or repository has it."""

    source: DataSource
    """The set, with its format and columns."""
    columns: Mapping[str, Any]
    """The columns that a recipe has to name; empty if they are known by their names."""
    read: str
    """The columns that rows are read from, in words."""
    rows: list[Row]
    """Its rows."""


def inspect_model(name: str) -> Checkpoint:
    """Read a model's config and headers; of an adapter, those of its base.

    Raise UsageError if it is not there or the Hub does not give it.
    """
    base = adapter_base(name) or name
    if not local_path(base).is_dir() and not is_remote(base):
        raise UsageError(f"{base}: no such folder, and no name of a Hub repository")
    if (checkpoint := find_headers(base)) is None:
        why = f"offline: {reason}" if (reason := offline_reason()) else _NOT_GIVEN
        raise UsageError(f"{base}: no such folder, and the Hub does not give it ({why})")
    return checkpoint


def adapter_base(name: str) -> str | None:
    """Return the model that an adapter was tuned from; None for a model that is no adapter.

    Raise UsageError for an adapter whose config names no model that is there.
    """
    folder = local_path(name)
    if folder.is_dir():
        return base_name(folder) if is_bare_adapter(folder) else None
    if not is_remote_adapter(name):
        return None
    return base_name(_fetch_small(name, "adapter_config.json").parent)


def guess_prior(target: str) -> tuple[str, str] | None:
    """Return the model that a target was tuned from, and the file that names it; None where nothing does."""
    folder = local_path(target)
    with nullcontext() if folder.is_dir() else offline_where_unreachable():
        if base := adapter_base(target):
            return base, "adapter_config.json"
        try:
            base = read_base_model(folder if folder.is_dir() else _fetch_small(target, CARD_FILE).parent)
        except MsaError:  # no card
            return None
    return (base, f"the card, {CARD_FILE}") if base else None


def inspect_set(text: str | DataSource, columns: Mapping[str, Any]) -> SetFacts:
    """Read a data set: FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION], or one with columns of its own.

    columns: as in a recipe, for sets whose columns are not known by their names.
    Raise UsageError or DataError for a set that cannot be read, and ColumnsError if none of its columns is known.
    """
    if has_own := isinstance(text, DataSource):
        columns = {key: value for key, value in asdict(text).items() if value != getattr(Columns(), key, value)}
        plain, text = DataSource(text.path, name=text.name, split=text.split, revision=text.revision), text.path
    else:
        path, name = split_configuration(text)
        plain = DataSource(path, name=name)
    available = list(load_table(plain).column_names)
    ignored = {key: names for key, names in columns.items() if key == "ignore"}
    fits = all(name in available for key, name in columns.items() if key not in ignored)
    # Columns that the user names come first, if the set has them all.
    for used in [columns] if has_own else [columns, ignored] if fits else [ignored]:
        source = replace(plain, format=_format(plain, used, available), **used)
        form = find_form(source, available) if source.format == "qa" else None
        if has_own or form or (source.format == "text" and source.text in available):
            rows = load_rows(source)
            read = ", ".join(form.columns if form else (source.text,))
            return SetFacts(source, used, read, rows)
    example = ",".join(f"{key}={name}" for key, name in zip(("question", "answer"), available, strict=False))
    raise ColumnsError(
        f"{text}: which columns hold questions and answers? There are {', '.join(available)}. Name them, as --columns "
        f"{example}; for documents, as --columns text={available[0]}",
        available,
    )


def _format(source: DataSource, columns: Mapping[str, Any], available: list[str]) -> Literal["qa", "text"]:
    """Return the format of a set: text if it has nothing but documents."""
    if "text" in columns:
        return "text"
    form = find_form(replace(source, **columns), available)
    return "qa" if form or "text" not in available else "text"


def _fetch_small(name: str, file: str) -> Path:
    """Return one small file of a Hub repository. Raise UsageError if the Hub does not give it."""
    from huggingface_hub import hf_hub_download

    try:
        repo, revision = split_name(name)
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        raise UsageError(f"{name}: {file} could not be fetched from the Hub ({explain(error)})") from error


def _text(
    path: Path,
    wishes: Wishes,
    target: Checkpoint,
    sets: Mapping[str, SetFacts],
    why_prior: str,
    training: OtherTraining,
) -> str:
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
        *_notes(wishes, training),
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
        lines += ["retain:", _set(path, "data", retain, sample)]
    else:
        lines += ["# retain:  # rows that must stay; without any, the verdict cannot be PASS",
                  "#   data: {path: keep.jsonl, sample: match_forget}"]  # fmt: skip
    lines += ["vector:", "  mode: lora  # adapters. full: all weights; `msa-lite plan` says what fits"]
    lines += [f"  {_line(path, key, value, 'as in the training')}" for key, value in training.vector.items()]
    lines += [_line(path, "prompt", training.prompt, "as in the training")] if training.prompt else []
    scored = [_set(path, "holdout", sets["holdout"])] if "holdout" in sets else []
    if max(len(facts.rows) for facts in sets.values()) > _MOST_SCORED:
        scored += [f"  limit: {_MOST_SCORED}  # at most so many rows of each set are scored, a sample"]
    lines += ["evaluate:", *scored] if scored else []
    return "\n".join([*lines, _line(path, "output", f"runs/{path.stem}", "the folder of the run"), ""])


def _notes(wishes: Wishes, training: OtherTraining) -> list[str]:
    """Return comments on what a training's configuration says besides. It may be a stranger's file."""
    notes = [f"From {wishes.config}.", *training.notes] if wishes.config else []
    lines = (textwrap.wrap(" ".join(note.split()), 110, subsequent_indent="  ") for note in notes)
    return ["#", *(f"# {line}" for line in chain.from_iterable(lines))] if notes else []


def _set(path: Path, key: str, facts: SetFacts, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the line of a data set."""
    source = facts.source
    values: dict[str, Any] = {"path": source.path}
    values |= {key: value for key in ("name", "split", "revision") if (value := getattr(source, key))}
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
