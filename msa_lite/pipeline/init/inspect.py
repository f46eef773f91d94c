"""Look at a model or data set that a first recipe may name, by its files alone: sizes, tokenizer, columns, base."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import DataSource, Row, load_rows, load_table
from msa_lite.data.forms import find_form
from msa_lite.errors import ColumnsError, MsaError, UsageError
from msa_lite.io.files.reading import local_path
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.checkpoint import Checkpoint
from msa_lite.io.weights.hub import (
    explain,
    is_remote,
    is_remote_adapter,
    split_name,
)
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.pipeline.stages.facts import find_headers
from msa_lite.report.page.card import read_base_model


@dataclass(frozen=True)
class SetFacts:
    """A data set, as its file, folder or repository has it."""

    source: DataSource
    """The set, with its format and columns."""
    columns: Mapping[str, str]
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
        raise UsageError(f"{base}: no such folder, and the Hub does not give it ({_hub_answer(base)})")
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


def inspect_set(text: str, columns: Mapping[str, str]) -> SetFacts:
    """Read a data set: FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION].

    columns: names by key (question, answer, messages, text), for sets whose columns are not known by their names.
    Raise UsageError or DataError for a set that cannot be read, and ColumnsError if none of its columns is known.
    """
    path, _, name = text.partition(":")
    plain = DataSource(path, name=name or None)
    available = list(load_table(plain).column_names)
    present = {key: name for key, name in columns.items() if name in available}
    # Columns that the user names come first, if the set has them all.
    for used in ([columns] if present == dict(columns) and columns else []) + [{}]:
        source = replace(plain, format=_format(plain, used, available), **used)
        form = find_form(source, available) if source.format == "qa" else None
        if form or (source.format == "text" and source.text in available):
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


def _hub_answer(name: str) -> str:
    """Return why the Hub gives no headers of a model, in one line."""
    from huggingface_hub import HfApi

    if reason := offline_reason():
        return f"offline: {reason}"
    repo, revision = split_name(name)
    try:
        HfApi().model_info(repo, revision=revision)
    except Exception as error:  # as in `_fetch_small`
        return explain(error)
    return "it may be gated: ask for access on its page, then `hf auth login`"
