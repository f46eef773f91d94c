"""Define the parts of a recipe that name its inputs: data sets, columns and the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

OneValue = TypeVar("OneValue")
OneOrMore = Annotated[
    Annotated[OneValue, Tag("one")] | Annotated[list[OneValue], Field(min_length=1), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]
"""A value, or a list of values. A fault is reported for the form that the user wrote."""


Tracker = Literal["tensorboard", "wandb", "trackio"]
Trackers = Annotated[
    Annotated[Tracker, Tag("one")] | Annotated[list[Tracker], Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]
"""A tracker, or a list of trackers, which may be empty."""


def tracker_names(track: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trackers, each once."""
    return tuple(dict.fromkeys([track] if isinstance(track, str) else track))


class Closed(BaseModel):
    """A part of a recipe, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Columns(Closed):
    """The columns that rows are read from.

    With the defaults, common forms of questions are recognised by their columns: messages (OpenAI), conversations
    (ShareGPT), instruction, input and output (Alpaca), prompt and completion (TRL).
    """

    question: str = "question"
    """The column of questions (format qa)."""
    answer: str = "answer"
    """The column of answers (format qa)."""
    text: str = "text"
    """The column of documents (format text)."""
    messages: str | None = None
    """The column of conversations (format qa), in the place of question and answer."""
    subject: str | None = None
    """The column that says whom or what a row is about, as a person's name. Rows about one person are not independent,
    and intervals take that into account. null: the first of the columns subject, person and author, or id if its values
    repeat."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Columns:
        if self.messages and (self.question, self.answer) != ("question", "answer"):
            raise ValueError("messages stands in the place of question and answer; name one or the other")
        return self


class Data(Closed):
    """A data set."""

    path: str
    """A Hub id, a folder in Hub layout, or a .jsonl, .json, .csv, .parquet or .txt file."""
    format: Literal["qa", "text"] = "qa"
    """qa: questions with answers; the answers are learnt. text: documents; every token is learnt."""
    name: str | None = None
    """The configuration of a Hub data set or folder."""
    split: str | None = None
    """The split. Default: train, or the only one."""
    revision: str | None = None
    """The commit, branch or tag of a Hub data set."""
    columns: Columns | None = None
    """The columns of this data set. Default: the recipe's `columns`."""

    def flat(self, columns: Columns) -> dict[str, Any]:
        """Return the fields of a `DataSource`. columns: the recipe's, for a data set that names none."""
        used = self.columns or columns
        return {**self.model_dump(exclude={"columns", "sample"}), **used.model_dump(exclude_none=True)}


class RetainData(Data):
    """A retain set. The vector may use a sample of it."""

    sample: Literal["match_forget"] | None = None
    """match_forget: the vector learns a seeded sample as large as the forget set, as in the paper; others are scored.
    null: it learns all rows."""


class Prompt(Closed):
    """The text around a row of format qa. `msa-lite recipes validate RECIPE --show-prompt` prints one row with it.

    A word in the place of this section is its kind, as in `prompt: auto`.
    """

    kind: Literal["default", "chat", "plain", "auto"] = "default"
    """chat: the target's chat template. plain: the plain template below. default: the chat template if there is one,
    else plain. If the recipe scores a published benchmark and sets nothing else here, default is the benchmark's own
    prompt (tofu and muse with a chat template: with open-unlearning's system message). auto: several forms are tried on
    some forget rows, and the one in which the target gives them the highest probability is taken."""
    system: str | None = None
    """A system message for every row that has none of its own. null: none, but a chat template may add its own."""
    prompt: str = "Question: {question}\nAnswer:"
    """The plain template up to the answer. It holds {question}."""
    answer: str = " {answer}"
    """The plain template of the answer. It holds {answer}. The blank belongs here, not at the end of the prompt."""

    @model_validator(mode="after")
    def _holds_fields(self) -> Prompt:
        for key, text in (("question", self.prompt), ("answer", self.answer)):
            try:
                fields = [(name, how, kind) for _, name, how, kind in Formatter().parse(text) if name is not None]
            except ValueError as error:
                raise ValueError(f"the plain template has a broken {{…}} ({error})") from error
            if wrong := next((field for field in fields if field != (key, "", None)), None):
                raise ValueError(
                    f"the plain template has an unknown or broken {{{wrong[0]}}}; only {{{key}}} is filled in"
                )
            if not fields:
                raise ValueError(f"the plain template lacks {{{key}}}")
        return self


def _kind_alone(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


PromptOrKind = Annotated[
    Prompt, BeforeValidator(_kind_alone, json_schema_input_type=Prompt | Literal["default", "chat", "plain", "auto"])
]
"""A prompt, or the word for its kind."""
