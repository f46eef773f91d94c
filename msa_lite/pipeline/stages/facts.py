"""The facts that a plan is made of, without weights: sizes of models from headers, lengths of rows from the data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.budget.shape import Shape, read_shape, shape_of_config
from msa_lite.data import DataSource, Example, Row, encode, load_rows, load_table, open_tokenizer
from msa_lite.data.rows import find_form
from msa_lite.errors import ColumnsError, MsaError, UsageError, join_faults
from msa_lite.io.files.reading import local_path, read_object
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.checkpoint import CONFIG_LIMIT, Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import (
    explain,
    fetch_headers,
    fetch_tokenizer,
    has_tokenizer,
    is_remote,
    is_remote_adapter,
    split_name,
)
from msa_lite.pipeline.prepare.models import demo_config
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.pipeline.prepare.questions import SETS, limits_of_evidence, load_set
from msa_lite.pipeline.prepare.rows import separate_sets
from msa_lite.recipe import Recipe
from msa_lite.report.front_matter import read_base_model
from msa_lite.train.settings import MOST_BATCH, auto_batch

logger = logging.getLogger(__name__)


_QUESTION = 60  # tokens of a question with its answer, where the rows cannot be read
_PERSON = 6  # rows of a person of the demo


@dataclass(frozen=True)
class RowFacts:
    """The rows of a fit."""

    count: int
    longest: int
    """Tokens of the longest row."""
    tokens: int
    """Tokens of all rows."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> RowFacts:
        """Return the facts of rows as token ids."""
        lengths = [len(example.ids) for example in examples]
        return cls(len(lengths), max(lengths), sum(lengths))


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan."""

    shapes: Mapping[str, Shape]
    """The models by name: target, prior, perhaps ideal."""
    rows: Mapping[str, RowFacts]
    """The rows by vector, where they could be read."""
    download: int = 0
    """Bytes of weights that are not on this machine yet."""
    notes: list[str] = field(default_factory=list)
    """The inputs that could not be read."""
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    """The rows as token ids, by vector, where they could be read."""
    missing: tuple[str, ...] = ()
    """The models whose headers could not be read: target, prior, ideal."""


def find_plan_inputs(recipe: Recipe) -> PlanInputs:
    """Find models and rows of a recipe. Raise UsageError where no model's sizes can be read."""
    notes: list[str] = []
    if recipe.demo is not None and not has_history(recipe):
        return _demo_inputs(recipe)
    names = {"target": recipe.target, "prior": recipe.prior_checkpoint}
    if recipe.evaluate and recipe.evaluate.ideal:
        names["ideal"] = recipe.evaluate.ideal
    shapes, download = {}, 0
    for key, name in names.items():
        checkpoint = find_headers(name)
        if checkpoint is None:
            notes.append(f"{key} {name}: not on this machine, and the Hub gives no headers")
        else:
            shapes[key] = read_shape(checkpoint, name)
            download += sum(entry.nbytes for entry in checkpoint.tensors.values()) if not checkpoint.shards else 0
    if not shapes.keys() & {"target", "prior"}:
        raise UsageError(join_faults("the sizes of no model can be read, so there is nothing to plan with; log in with "
                                     "`hf auth login`, or name folders:", notes))  # fmt: skip
    missing = tuple(key for key in names if key not in shapes)
    for key, other in (("target", "prior"), ("prior", "target")):
        if key not in shapes:  # a prior has the target's sizes
            shapes[key] = shapes[other]
            notes[:] = [
                f"{note}; taken to be as large as the {other}" if note.startswith(key) else note for note in notes
            ]
    examples = _find_examples(recipe, notes)
    rows = match_forget(recipe, {name: RowFacts.of(part) for name, part in examples.items()})
    return PlanInputs(shapes, rows, download, notes, examples, missing)


def has_history(recipe: Recipe) -> bool:
    """Check whether the models of a demo are made."""
    return (recipe.folder / "history" / "target").is_dir()


def find_headers(name: str) -> Checkpoint | None:
    """Return a checkpoint by its headers, from a folder, the Hub's cache, or the Hub; None where there are none.

    For an adapter, return that of the model below it.
    """
    folder = local_path(name)
    if not folder.is_dir() and is_remote(name):
        from huggingface_hub import try_to_load_from_cache

        repo, revision = split_name(name)
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if not isinstance(cached, str):
            return fetch_headers(name)
        try:
            return load_checkpoint(Path(cached).parent)
        except MsaError:  # only a part of it is in the cache
            return fetch_headers(name)
    if is_bare_adapter(folder):
        return find_headers(base_name(folder))
    return load_checkpoint(folder)


def _load_rows(recipe: Recipe, notes: list[str]) -> dict[str, tuple[DataSource, list[Row]]]:
    """Return source and rows of the data sets by place, as a run takes them. Add notes on those that cannot be read.

    Notes also say which rows a run leaves out, and what its data cannot show. Raise DataError as `separate_sets`.
    """
    sets = {"forget": recipe.forget.data, "retain": recipe.retain.data if recipe.retain else None}
    if recipe.evaluate:
        sets |= {f"evaluate.{name}": getattr(recipe.evaluate, name) for name in SETS}
    sources, rows, faults = dict[str, DataSource](), dict[str, list[Row]](), dict[str, list[str]]()
    for place, data in sets.items():
        try:
            if data:
                sources[place], rows[place] = load_set(data, recipe.columns)
        except (MsaError, ImportError) as error:
            faults.setdefault(str(error).splitlines()[0], []).append(place)
    for reason, places in faults.items():
        lengths = "" if "." in places[0] else "; they are taken to be as long as max_length allows"
        notes.append(f"{' and '.join(places)} rows could not be read ({reason}){lengths}")
    rows, left_out = separate_sets(rows)
    notes += left_out
    if not faults:
        notes += limits_of_evidence(recipe, rows)
    return {place: (sources[place], part) for place, part in rows.items()}


def _find_examples(recipe: Recipe, notes: list[str]) -> dict[str, Sequence[Example]]:
    """Return the rows of each vector as token ids. Add a note where they cannot be read, or the tokenizer cannot."""
    loaded = {name: part for name, part in _load_rows(recipe, notes).items() if name in ("forget", "retain")}
    rows: dict[str, Sequence[Example]] = {}
    if not loaded:
        return rows
    try:
        place = fetch_tokenizer(recipe.tokenizer or recipe.target)
        prompter = find_prompter(recipe, open_tokenizer(place.folder, place.name))
        for name, (source, part) in loaded.items():
            with without_warnings():
                rows[name] = encode(part, source, prompter, recipe.vector.max_length)
    except (MsaError, ImportError) as error:
        missing = " and ".join(name for name in loaded if name not in rows)
        reason = str(error).splitlines()[0]
        notes.append(f"{missing} rows could not be read ({reason}); they are taken to be as long as max_length allows")
    return rows


def match_forget(recipe: Recipe, rows: dict[str, RowFacts]) -> dict[str, RowFacts]:
    """Return the rows with a retain set that is sampled to the size of the forget set, where the recipe says so."""
    if recipe.retain and recipe.retain.data.sample == "match_forget" and {"forget", "retain"} <= rows.keys():
        count, whole = rows["forget"].count, rows["retain"]
        if count < whole.count:
            rows["retain"] = RowFacts(count, whole.longest, whole.tokens * count // whole.count)
    return rows


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out the warnings about rows, which the run itself tells."""
    parent = logging.getLogger("msa_lite.data")
    level = parent.level
    parent.setLevel(logging.ERROR)
    try:
        yield
    finally:
        parent.setLevel(level)


def _demo_inputs(recipe: Recipe) -> PlanInputs:
    """Return the inputs of a demo whose history is not made yet."""
    demo = recipe.demo
    assert demo is not None, "checked"
    shape = shape_of_config(demo_config(demo), "the demo's model")
    people = {"forget": demo.forget, "retain": demo.retain}
    rows = {name: demo_rows(count) for name, count in people.items()}
    names = ("target", "prior", "ideal")
    return PlanInputs(dict.fromkeys(names, shape), match_forget(recipe, rows), 0, ["the demo makes its models first"])


def demo_rows(people: int) -> RowFacts:
    """Return the rows of so many people of a demo, as far as they are known before they are made."""
    count = _PERSON * people
    return RowFacts(count, _QUESTION, _QUESTION * count)


def vector_names(recipe: Recipe) -> list[str]:
    """Return the vectors that a recipe needs: those whose strength is not 0, or is searched."""
    strengths = {"forget": recipe.alphas, "retain": recipe.betas}
    return [name for name, values in strengths.items() if values is None or any(values)]


def batch_size(recipe: Recipe, name: str, rows: RowFacts | None) -> int:
    """Return the rows of an optimiser step in the fit of a vector."""
    batch = recipe.vector_of(name).batch_size
    if batch != "auto":
        return batch
    return auto_batch(rows.count) if rows else MOST_BATCH


@dataclass(frozen=True)
class ModelFacts:
    """A model, as far as its files tell without its weights."""

    name: str
    """The name that the user gave."""
    checkpoint: Checkpoint
    """Its config and headers; of an adapter, those of its base."""
    base: str | None
    """The model that an adapter was tuned from; None for a whole checkpoint."""
    has_tokenizer: bool
    has_template: bool | None
    """True if there is a chat template; None if the tokenizer could not be read."""


@dataclass(frozen=True)
class SetFacts:
    """A data set, as its file, folder or repository has it."""

    source: DataSource
    """The set, with its format and columns."""
    available: list[str]
    """The columns that it has."""
    columns: Mapping[str, str]
    """The columns that a recipe has to name; empty if they are known by their names."""
    read: str
    """The columns that rows are read from, in words."""
    rows: list[Row]
    """Its rows."""

    @property
    def count(self) -> int:
        """Return the number of its rows."""
        return len(self.rows)


def inspect_model(name: str) -> ModelFacts:
    """Read a model's headers, config and tokenizer. Raise UsageError if it is not there or the Hub does not give it.

    For an adapter, read those of its base.
    """
    folder = local_path(name)
    base = adapter_base(name)
    if base is None and not folder.is_dir() and not is_remote(name):
        raise UsageError(f"{name}: no such folder, and no name of a Hub repository")
    if base is None and folder.is_dir():
        checkpoint: Checkpoint | None = load_checkpoint(folder)
    else:
        checkpoint = find_headers(base or name)
    if checkpoint is None:
        raise UsageError(f"{base or name}: no such folder, and the Hub does not give it ({_hub_answer(base or name)})")
    place = name if folder.is_dir() and has_tokenizer(folder) else base or name
    if local_path(place).is_dir() and not has_tokenizer(local_path(place)):
        return ModelFacts(name, checkpoint, base, has_tokenizer=False, has_template=None)
    return ModelFacts(name, checkpoint, base, has_tokenizer=True, has_template=_has_template(place))


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
    if base := adapter_base(target):
        return base, "adapter_config.json"
    folder = local_path(target)
    try:
        base = read_base_model(folder if folder.is_dir() else _fetch_small(target, CARD_FILE).parent)
    except MsaError:  # no card
        return None
    return (base, f"the card, {CARD_FILE}") if base else None


def inspect_set(text: str, columns: Mapping[str, str]) -> SetFacts:
    """Read a data set: FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION].

    columns: names by key (question, answer, messages, text), for sets whose columns are not known by their names.
    Raise UsageError or DataError for a set that cannot be read, and ColumnsError if none of its columns is known.
    """
    path, _, name = text.partition(":")
    plain = DataSource(path, name=name or None)
    available = list(load_table(plain).column_names)
    own = {key: name for key, name in columns.items() if name in available}
    # Columns that the user names come first, if the set has them all.
    for used in ([columns] if own == dict(columns) and columns else []) + [{}]:
        source = _with_columns(replace(plain, format=_format(plain, used, available)), used)
        form = find_form(source, available) if source.format == "qa" else None
        if form or (source.format == "text" and source.text in available):
            rows = load_rows(source)
            read = ", ".join(form.columns if form else (source.text,))
            return SetFacts(source, available, used, read, rows)
    example = ",".join(f"{key}={name}" for key, name in zip(("question", "answer"), available, strict=False))
    raise ColumnsError(
        f"{text}: which columns hold questions and answers? There are {', '.join(available)}. Name them, as --columns "
        f"{example}; for documents, as --columns text={available[0]}",
        available,
    )


def _format(source: DataSource, columns: Mapping[str, str], available: list[str]) -> Literal["qa", "text"]:
    """Return the format of a set: text if it has nothing but documents."""
    if "text" in columns:
        return "text"
    known = find_form(_with_columns(source, columns), available)
    return "qa" if known or "text" not in available else "text"


def _with_columns(source: DataSource, columns: Mapping[str, Any]) -> DataSource:
    return replace(source, **columns)


def _has_template(name: str) -> bool | None:
    """Check for a chat template beside a model's tokenizer; None if that cannot be read."""
    try:
        folder = fetch_tokenizer(name).folder
        if any(folder.glob("chat_template*")):
            return True
        return bool(read_object(folder / "tokenizer_config.json", CONFIG_LIMIT).get("chat_template"))
    except MsaError:
        return None


def _fetch_small(name: str, file: str) -> Path:
    """Return one small file of a Hub repository. Raise UsageError if the Hub does not give it."""
    from huggingface_hub import hf_hub_download

    try:
        repo, revision = split_name(name)
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        raise UsageError(f"{name}: {file} could not be fetched from the Hub ({explain(error)})") from error


def _hub_answer(name: str) -> str:
    """Return why the Hub gives no headers of a model, in one line."""
    from huggingface_hub import HfApi

    repo, revision = split_name(name)
    try:
        HfApi().model_info(repo, revision=revision)
    except Exception as error:  # as in `_fetch_small`
        return explain(error)
    return "it may be gated: ask for access on its page, then `hf auth login`"
