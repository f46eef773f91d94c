"""Tables of a benchmark's data set, checked as a whole: every configuration, split and column that lacks is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data import DataSource, Example, Prompter, Shots, load_table, pin_source, sample_rows
from msa_lite.errors import DataError, MsaError, join_faults
from msa_lite.io.reading import local_path

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One table of a data set: a configuration, its split, the columns needed. optional: it may be absent."""

    configuration: str
    columns: tuple[str, ...]
    split: str | None = None
    optional: bool = False


def load_parts(data: str, parts: Mapping[str, Part]) -> dict[str, Table]:
    """The rows of each part by name; optional parts that are absent are left out.

    data: folder in Hub layout, or Hub id[@revision]. Raises DataError that names everything that lacks, UsageError when
    there is no such data set.
    """
    path, revision = split_revision(data)
    source = pin_source(DataSource(path, revision=revision))
    known = _configurations(source)
    tables, faults = {}, []
    for name, part in parts.items():
        if known and part.configuration not in known:
            if not part.optional:
                faults.append(f"no configuration '{part.configuration}'")
            continue
        try:
            table = load_table(DataSource(path, name=part.configuration, split=part.split, revision=source.revision))
        except MsaError as error:
            if not known:
                if part.optional:
                    continue
                raise
            faults.append(f"configuration '{part.configuration}': {str(error).removeprefix(f'{path}: ')}")
            continue
        lacking = [column for column in part.columns if column not in table.column_names]
        if lacking:
            faults.append(f"configuration '{part.configuration}': no column {', '.join(map(repr, lacking))}")
        elif not len(table):
            faults.append(f"configuration '{part.configuration}': no rows")
        tables[name] = table.to_list()
    if faults:
        there = f"; there are {', '.join(known)}" if known else ""
        raise DataError(join_faults(f"{path}: not the data set that is needed{there}", dict.fromkeys(faults), limit=20))
    return tables


def split_revision(data: str) -> tuple[str, str | None]:
    """(path, revision) of a folder or Hub id[@revision]."""
    if local_path(data).exists():
        return data, None
    path, _, revision = data.partition("@")
    return path, revision or None


def pinned_data(data: str) -> str:
    """A folder as it is; a Hub id with its commit, as `pin_source` finds it."""
    path, revision = split_revision(data)
    pinned = pin_source(DataSource(path, revision=revision)).revision
    return f"{path}@{pinned}" if pinned else data


def _configurations(source: DataSource) -> list[str]:
    """Names of the configurations; none where they are not to be had, as from the cache alone."""
    import datasets

    try:
        names = list(datasets.get_dataset_config_names(source.path, revision=source.revision))
    except Exception:  # whatever its readers raise: then loading says what is wrong
        return []
    # Without the Hub, `datasets` says "default" of whatever its cache holds.
    return names if names != ["default"] or local_path(source.path).exists() else []


def sampled(table: Table, limit: int | None, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """(row number, row) of all rows, or of a seeded sample of `limit`, in the table's order."""
    return sample_rows([*enumerate(table)], limit or len(table), seed)


def answer_texts(
    prompter: Prompter, index: int, question: str, answers: Sequence[str | None], shots: Shots = ()
) -> tuple[Example, ...]:
    """The question with each of the answers. Empty answers, and those without a token of their own, are left out."""
    found = []
    for answer in answers:
        if answer is None or not str(answer).strip():
            continue
        text = prompter.example(index, str(question), str(answer), shots)
        if len(text.ids) - len(text.prompt_ids) > (text.ids[-1] == prompter.tokenizer.eos_token_id):
            found.append(text)
    return tuple(found)
