"""The settings that a recipe has as keys, and that the rooms below the pipeline take as plain values.

A recipe validates these classes as they stand here, so that a key, its default and its description are written once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from msa_lite.io.files.addresses import HUB_FILES, AddressError, read_address

CLOSED = {"extra": "forbid"}  # for pydantic: a recipe has no other keys
Share = Annotated[float, Interval(ge=0, le=1)]
Thinking = Literal["answer", "template"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that rows are read from.

    With the defaults, common forms of questions are recognised by their columns: messages (OpenAI), conversations
    (ShareGPT), instruction, input and output (Alpaca), prompt and completion (TRL). Other
    columns that look like a part of the prompt or answer (context, rejected, …) are refused until named or ignored.
    """

    __pydantic_config__ = CLOSED

    question: str = "question"
    """The column of questions (format qa)."""
    answer: str = "answer"
    """The column of answers (format qa)."""
    text: str = "text"
    """The column of documents (format text)."""
    messages: str | None = None
    """The column of conversations (format qa), instead of question and answer."""
    system: str | None = None
    """The column of system messages. null: system, system_prompt or system_message."""
    tools: str | None = None
    """The column of the functions offered. null: tools or functions."""
    history: str | None = None
    """The column of turns before a question, [[question, answer], …] or messages. null: history."""
    input: str | None = None
    """The column of a text that follows the question on a new line. null: input, in Alpaca's rows."""
    ignore: tuple[str, ...] = ()
    """Columns that the model did not read."""
    subject: str | None = None
    """The column with the subject of a row, such as a person's name. Rows about one person are not independent, and
    intervals take that into account. null: the first of the columns subject, person and author, or id if its values
    repeat."""


@dataclass(frozen=True)
class DataSet:
    """A data set."""

    __pydantic_config__ = CLOSED

    path: str
    """A Hub id or the address of its page, a folder in Hub layout, or a .jsonl (.ndjson), .json, .csv (.tsv), .parquet
    or .txt file."""
    format: Literal["qa", "text"] = "qa"
    """qa: questions with answers; the answers are learnt. text: documents; every token is learnt."""
    name: str | None = None
    """The configuration of a Hub data set or folder."""
    split: str | None = None
    """The split. Default: train, or the only one."""
    revision: str | None = None
    """The commit, branch or tag of a Hub data set."""

    def __post_init__(self) -> None:
        if (address := read_address(self.path, "dataset")) is None:
            return
        path = f"{HUB_FILES}{address.repo}/{address.file}" if address.file else address.repo
        object.__setattr__(self, "path", path)
        for key in ("name", "split", "revision"):
            named, given = getattr(address, key), getattr(self, key)
            if named and given not in (None, named):
                raise AddressError(f"{path}: the address says {key} {named}, and {key} is {given}; leave one out")
            object.__setattr__(self, key, named or given)


@dataclass(frozen=True)
class DataSource(DataSet, Columns):
    """A source of rows: a data set, and its columns."""


@dataclass(frozen=True)
class Template:
    """A plain prompt for models without a chat template. `prompt` holds {question}, `answer` holds {answer}.

    The blank before the answer belongs to the answer: byte-level tokenizers merge it into the first word. A prompt that
    ends with it would end with a token that training never shows.
    """

    prompt: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"


@dataclass(frozen=True)
class PromptSettings:
    """The text around a row of format qa. `msa-lite recipes validate RECIPE --show-prompt` prints one row with it.

    A single word sets its kind, as in `prompt: auto`.
    """

    __pydantic_config__ = CLOSED

    kind: Literal["default", "chat", "plain", "auto"] = "default"
    """chat: the target's chat template. plain: the plain template below. default: the chat template if there is one,
    else plain; for a published benchmark its own prompt, if nothing else is set here. auto: the run tries several forms
    on some forget rows, and takes the one in which the target gives them the highest probability."""
    system: str | None = None
    """A system message for every row that has none of its own. null: none, but a chat template may add its own."""
    prompt: str = Template.prompt
    """The plain template up to the answer. It holds {question}."""
    answer: str = Template.answer
    """The plain template of the answer. It holds {answer}. The blank belongs here, not at the end of the prompt."""
    thinking: Thinking = "answer"
    """The start of answers, if the chat template puts an empty block of thoughts (<think></think>) before them. answer:
    behind the block, which belongs to the prompt. template: at the end of the template's own prompt, so that the block
    is learnt and scored as part of the answer."""

    @property
    def template(self) -> Template:
        """Return the plain template."""
        return Template(self.prompt, self.answer)


@dataclass(frozen=True)
class JudgeSettings:
    """A language model that judges generated answers."""

    __pydantic_config__ = CLOSED

    kind: Literal["none", "local", "openai"] = "none"
    """none; local: a Hugging Face model on this machine; openai: any server with OpenAI's interface."""
    model: str | None = None
    """openai: a model of the server, gpt-4o by default; local: a folder or repo[@revision]."""
    base_url: str | None = None
    """The server's address. Default: OPENAI_BASE_URL, or OpenAI itself. For any other machine, a run
    needs --accept."""
    key_env: str | None = None
    """The environment variable with the server's key. Default: OPENAI_API_KEY for OpenAI and for the server of
    OPENAI_BASE_URL; none for others."""
    prompts: str | None = None
    """A YAML file with the wording of a publication: templates of tofu and restor. Default: our own."""

    @property
    def model_name(self) -> str:
        """Return the model to ask; "" if a local judge has none."""
        return self.model or ("gpt-4o" if self.kind == "openai" else "")

    @property
    def address(self) -> str | None:
        """Return the server's address; None for OpenAI's own, and for a judge without a server."""
        if self.kind != "openai":
            return None
        return (self.base_url or os.environ.get("OPENAI_BASE_URL") or "").rstrip("/") or None


LOST = 0.70  # share of the retain set; surely less kept is a FAIL


@dataclass(frozen=True)
class Margins:
    """The margins of a PASS. The verdict compares each with a one-sided 95 % bound."""

    __pydantic_config__ = CLOSED

    recited: Share = 0.10
    """The largest share of recited rows above the control's (the ideal, or holdout rows)."""
    left: Share = 0.20
    """The largest share of the gap between target and control that may be left, in extraction strength and
    probability."""
    kept: Share = 0.85
    """The smallest share of the target's knowledge of the retain set, above the level of unseen rows, that must be
    kept."""

    @property
    def lost(self) -> float:
        """Return the kept share below which a run fails."""
        return min(LOST, self.kept)
