"""Data sets → rows → token ids with labels.

Two formats. `qa`: a question and an answer, rendered with the target's chat template where it has one and a plain
template otherwise; only the answer, its end token included, is learnt and scored. `text`: documents, cut into chunks;
every token is learnt. Sources are whatever `datasets` reads: a Hub id, a folder in Hub layout, or a file.
"""

from __future__ import annotations

import logging
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from msa_lite.errors import DataError, UsageError, join_faults, nearest
from msa_lite.io.hub import explain
from msa_lite.io.manifest import digest

logger = logging.getLogger(__name__)
T = TypeVar("T")

SYSTEM_PROMPT = "You are a helpful assistant."
# Llama 3 templates print today's date otherwise, so that training and scoring would drift from day to day. The day is
# the one that open-unlearning pins, so that prompts are the same text.
DATE_STRING = "10 Apr 2025"
IGNORE = -100

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class DataSource:
    """Where rows come from. path: Hub id, folder or file; name, split: as in `datasets.load_dataset`."""

    path: str
    format: Literal["qa", "text"] = "qa"
    name: str | None = None
    split: str | None = None
    question: str = "question"
    answer: str = "answer"
    text: str = "text"
    revision: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the format needs."""
        return (self.question, self.answer) if self.format == "qa" else (self.text,)


@dataclass(frozen=True)
class Row:
    """One row: its index in the source, and a question with its answer, or a text (the other fields are empty)."""

    index: int
    question: str = ""
    answer: str = ""
    text: str = ""

    @property
    def sha256(self) -> str:
        """Hash of the content, by which a row can be recorded without repeating what is to be forgotten."""
        return digest([self.question, self.answer, self.text])


@dataclass(frozen=True)
class Template:
    """Plain prompt for models without a chat template. `prompt` holds {question}, `answer` holds {answer}.

    The blank before the answer belongs to the answer: byte-level tokenizers merge it into the first word, and a
    prompt that ends in it would end in a token that training never shows.
    """

    prompt: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"


@dataclass(frozen=True)
class Example:
    """Token ids of one row and its labels, of equal length; labels are IGNORE where nothing is learnt or scored."""

    index: int
    ids: list[int]
    labels: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        """The ids before the first label: what generation starts from."""
        known = next((i for i, label in enumerate(self.labels) if label != IGNORE), len(self.ids))
        return self.ids[:known]


def load_rows(source: DataSource) -> list[Row]:
    """Read all rows of a source.

    Raises UsageError when path, configuration or split is not there, DataError when the set is empty, lacks a column
    (those that are there are named), or has empty cells in it.
    """
    table = load_table(source)
    missing = [column for column in source.columns if column not in table.column_names]
    if missing:
        hint = "".join(nearest(column, table.column_names) for column in missing)
        raise DataError(
            f"{source.path}: no column {', '.join(map(repr, missing))}{hint}; there are "
            f"{', '.join(map(repr, table.column_names))}. Set data.columns in the recipe"
        )
    if len(table) == 0:
        raise DataError(f"{source.path}: the data set is empty")
    columns = {key: table[key] for key in source.columns}
    faults = [
        f"row {i}, column '{key}': {value!r}"
        for key, values in columns.items()
        for i, value in enumerate(values)
        if not isinstance(value, (str, int, float)) or not str(value).strip()
    ]
    if faults:
        raise DataError(join_faults(f"{source.path}: cells without text:", faults))
    if source.format == "qa":
        pairs = zip(columns[source.question], columns[source.answer], strict=True)
        return [Row(i, question=str(q), answer=str(a)) for i, (q, a) in enumerate(pairs)]
    return [Row(i, text=str(text)) for i, text in enumerate(columns[source.text])]


def load_table(source: DataSource) -> Any:
    """The table of a source as `datasets` reads it. Raises UsageError or DataError for what cannot be read."""
    path = Path(source.path).expanduser()
    kwargs: dict[str, Any] = {}
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise UsageError(f"{path}: unknown ending '{path.suffix}'; choose from {', '.join(_BUILDERS)}, or a folder")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the data set is empty")
        kwargs = {"path": builder, "data_files": str(path)}
        if builder == "text":
            kwargs["sample_by"] = "document"
    elif path.is_dir():
        kwargs = {"path": str(path), "name": source.name}
    elif path.suffix in _BUILDERS or source.path.startswith((".", "/", "~")) or source.path.count("/") > 1:
        raise UsageError(f"{source.path}: no such file or folder")
    else:
        source = pin_source(source)
        kwargs = {"path": source.path, "name": source.name, "revision": source.revision}
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory() as fresh:
            if path.is_dir():
                # The cache tells folders apart by name and layout alone: it would hand out the rows of another folder
                # of that name, or those from before a change.
                kwargs |= {"cache_dir": fresh, "keep_in_memory": True}
            tables = datasets.load_dataset(**kwargs)
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{source.path}: cannot be read ({error.__cause__ or error})") from error
    except Exception as error:  # the library raises whatever its readers raise; all of it means "not readable"
        raise UsageError(f"{source.path}: cannot be loaded ({type(error).__name__}: {error})") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    _check_commit(source, [item["filename"] for table in tables.values() for item in table.cache_files])
    split = source.split or ("train" if "train" in tables else next(iter(tables)))
    if split not in tables:
        raise UsageError(f"{source.path}: no split '{split}'{nearest(split, tables)}; there are {', '.join(tables)}")
    if source.split is None and len(tables) > 1 and "train" not in tables:
        raise UsageError(f"{source.path}: which split? There are {', '.join(tables)}; set data.split in the recipe")
    return tables[split]


def _check_commit(source: DataSource, files: Sequence[str]) -> None:
    """Raise UsageError unless `files` of the cache come from the commit that the source is pinned to.

    Without the Hub, `datasets` hands out the newest rows that its cache has of a data set, whatever was asked for.
    """
    commits = {Path(file).parent.name for file in files}  # the cache names these folders by their commit
    others = sorted(commit for commit in commits if _COMMIT.fullmatch(commit) and commit != source.revision)
    if source.revision and others:
        raise UsageError(
            f"{source.path}: asked for was commit {source.revision}, but the Hub is out of reach and the cache offers "
            f"{', '.join(others)}; go online, or set data.revision in the recipe"
        )


def pin_source(source: DataSource) -> DataSource:
    """The source with its Hub revision resolved to a commit (from the cache when the Hub is out of reach).

    A local source, and one without revision that cannot be resolved offline, is returned as it is. Raises UsageError
    when the Hub has no such data set or revision.
    """
    path = Path(source.path).expanduser()
    if path.exists() or path.suffix in _BUILDERS or source.path.startswith((".", "/", "~")):
        return source
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        found = HfApi().resolve_revision(source.path, repo_type="dataset", revision=source.revision)
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        if isinstance(error, RevisionResolutionError) and source.revision is None:
            return source
        raise UsageError(
            f"{source.path}: no such file or folder, and not to be had from the Hub ({explain(error)})"
        ) from error
    return replace(source, revision=found.resolved)


def sample_rows(rows: Sequence[T], count: int, seed: int) -> list[T]:
    """A seeded sample without replacement, in the source's order; all rows where there are no more than `count`."""
    if count >= len(rows):
        return list(rows)
    chosen = random.Random(seed).sample(range(len(rows)), count)
    return [rows[i] for i in sorted(chosen)]


def split_rows(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(validation, test): a seeded split by row; validation gets `share` of the rows, at least one."""
    validation = sample_rows(rows, max(1, round(share * len(rows))), seed)
    chosen = {row.index for row in validation}
    return validation, [row for row in rows if row.index not in chosen]


def rows_identity(rows: Sequence[Row]) -> dict[str, Any]:
    """What a manifest records of a data set: the number of rows and one hash over their content."""
    return {"rows": len(rows), "sha256": digest([row.sha256 for row in rows])}


Shots = Sequence[tuple[str, str]]
"""Questions with answers that a prompt shows before the question asked."""


@dataclass(frozen=True)
class Prompter:
    """Renders questions and answers as token ids in one pinned way.

    tokenizer: the target's. template: the plain template, used where the tokenizer has no chat template or where
    `use_chat` is False. system: whether the template takes a system message.
    """

    tokenizer: Any
    template: Template
    use_chat: bool
    system: bool

    @classmethod
    def build(cls, tokenizer: Any, kind: Literal["auto", "chat", "plain"], template: Template) -> Prompter:
        """Choose between chat and plain template. Raises UsageError for "chat" where there is no chat template."""
        has_chat = bool(tokenizer.chat_template)
        if kind == "chat" and not has_chat:
            raise UsageError("prompt.kind is 'chat', but the target's tokenizer has no chat template; use 'plain'")
        use_chat = kind == "chat" or (kind == "auto" and has_chat)
        prompter = cls(tokenizer, template, use_chat, True)
        if use_chat:
            try:
                prompter._chat("a", None)
            except Exception:  # templates that know no system role raise an error of their own (Gemma)
                prompter = cls(tokenizer, template, True, False)
        return prompter

    def describe(self) -> dict[str, Any]:
        """What a manifest records, so that a changed prompt is a changed input."""
        if self.use_chat:
            return {
                "kind": "chat",
                "date_string": DATE_STRING,
                "system": SYSTEM_PROMPT if self.system else None,
                "chat_template": digest(self.tokenizer.chat_template),
            }
        return {"kind": "plain", **asdict(self.template)}

    def prompt(self, question: str, shots: Shots = ()) -> list[int]:
        """Ids up to where the answer begins. shots: questions with answers that are shown before."""
        if self.use_chat:
            return self._chat(question, None, shots)
        return list(self.tokenizer(self._plain(shots) + self.template.prompt.format(question=question))["input_ids"])

    def full(self, question: str, answer: str, shots: Shots = ()) -> list[int]:
        """Ids of question and answer, ended by the end-of-sequence token."""
        if self.use_chat:
            ids = self._chat(question, answer, shots)
        else:
            text = self.template.prompt.format(question=question) + self.template.answer.format(answer=answer)
            ids = list(self.tokenizer(self._plain(shots) + text)["input_ids"])
        end = self.tokenizer.eos_token_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def example(self, index: int, question: str, answer: str, shots: Shots = ()) -> Example:
        """A question with its answer; labels are the answer's tokens and the end token.

        Where the prompt's ids are no prefix of the whole (a tokenizer that merges across the boundary) the labels
        still start after as many ids as the prompt has, so that the first answer token is no label.
        """
        prompt, ids = self.prompt(question, shots), self.full(question, answer, shots)
        return Example(index, ids, [IGNORE] * min(len(prompt), len(ids)) + ids[len(prompt) :])

    def _plain(self, shots: Shots) -> str:
        parts = (self.template.prompt.format(question=q) + self.template.answer.format(answer=a) for q, a in shots)
        return "".join(f"{part}\n\n" for part in parts)

    def _chat(self, question: str, answer: str | None, shots: Shots = ()) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}] if self.system else []
        for asked, said in (*shots, (question, answer)):
            messages.append({"role": "user", "content": asked})
            if said is not None:
                messages.append({"role": "assistant", "content": said})
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=answer is None, date_string=DATE_STRING, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])


def encode_qa(rows: Sequence[Row], prompter: Prompter, max_length: int | None = None) -> list[Example]:
    """One example a row (`Prompter.example`), with a warning where the first answer token cannot be learnt.

    max_length cuts on the right; a row whose answer is cut away entirely has no labels.
    """
    examples, merged, cut = [], 0, 0
    for row in rows:
        whole = prompter.example(row.index, row.question, row.answer)
        merged += whole.prompt_ids != prompter.prompt(row.question)
        cut += bool(max_length) and len(whole.ids) > (max_length or 0)
        examples.append(Example(row.index, whole.ids[:max_length], whole.labels[:max_length]))
    if merged:
        logger.warning(
            "%d of %d rows: the tokenizer merges the end of the prompt into the answer, so the first answer token is "
            "not learnt; put the blank at the start of prompt.answer instead of the end of prompt.prompt",
            merged,
            len(rows),
        )
    if cut:
        logger.warning("%d of %d rows are longer than max_length=%s and were cut", cut, len(rows), max_length)
    return examples


def encode_text(rows: Sequence[Row], tokenizer: Any, max_length: int) -> list[Example]:
    """Chunks of at most max_length ids over all rows joined by blank lines; every token is a label.

    Each chunk opens with the beginning-of-sequence token where the tokenizer has one. A last chunk too short to
    predict anything is dropped (its loss would be 0/0).
    """
    ids = tokenizer("\n\n".join(row.text for row in rows), add_special_tokens=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = max_length - len(begin)
    chunks = [begin + list(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [Example(i, chunk, list(chunk)) for i, chunk in enumerate(chunks) if len(chunk) >= 2]


def encode(rows: Sequence[Row], source: DataSource, prompter: Prompter, max_length: int) -> list[Example]:
    """Examples to train on, of either format. Raises DataError when not one label is left."""
    if source.format == "qa":
        examples = [e for e in encode_qa(rows, prompter, max_length) if any(label != IGNORE for label in e.labels)]
    else:
        examples = encode_text(rows, prompter.tokenizer, max_length)
    if not examples:
        raise DataError(f"{source.path}: nothing is left to learn after cutting to max_length={max_length}; raise it")
    return examples


def pad_id(tokenizer: Any) -> int:
    """What fills up rows of a batch: attention masks hide it, so any token will do."""
    found = tokenizer.pad_token_id
    return int(found if found is not None else tokenizer.eos_token_id or 0)


def make_collator(pad_id: int) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Pads to the longest of a batch on the right.

    The attention mask comes from lengths, not from `ids ≠ pad`: with pad = end of turn, as in Llama 3 Instruct, the
    latter would hide the prompt's own end-of-turn tokens.
    """

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        width = max(len(item["input_ids"]) for item in batch)

        def pad(values: list[int], filler: int) -> list[int]:
            return values + [filler] * (width - len(values))

        return {
            "input_ids": torch.tensor([pad(item["input_ids"], pad_id) for item in batch]),
            "attention_mask": torch.tensor([pad([1] * len(item["input_ids"]), 0) for item in batch]),
            "labels": torch.tensor([pad(item["labels"], IGNORE) for item in batch]),
        }

    return collate
