"""Parts of a recipe that say what goes in: data sets, and how their rows become text."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

OneValue = TypeVar("OneValue")
OneOrMore = Annotated[
    Annotated[OneValue, Tag("one")] | Annotated[list[OneValue], Field(min_length=1), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]
"""A value or a list of such. What is wrong with it is said of the one that it is meant to be."""


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Columns(Closed):
    """Names of the columns that rows are read from.

    With the defaults, other forms of questions are known by their columns: messages (OpenAI), conversations (ShareGPT),
    instruction, input and output (Alpaca), prompt and completion (TRL).
    """

    question: str = "question"
    """Column of questions, for format qa."""
    answer: str = "answer"
    """Column of answers, for format qa."""
    text: str = "text"
    """Column of documents, for format text."""
    messages: str | None = None
    """Column of conversations, for format qa; in the place of question and answer."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Columns:
        if self.messages and (self.question, self.answer) != ("question", "answer"):
            raise ValueError("messages stands in the place of question and answer; name one or the other")
        return self


class Data(Closed):
    """A data set: a Hub id, a folder in Hub layout, or a .jsonl, .json, .csv, .parquet or .txt file."""

    path: str
    """Hub id, folder or file."""
    format: Literal["qa", "text"] = "qa"
    """qa: questions with answers, the answers are learnt. text: documents, every token is learnt."""
    name: str | None = None
    """Configuration of a Hub data set or folder."""
    split: str | None = None
    """Split; 'train' when there is one of that name, or the only one."""
    revision: str | None = None
    """Commit, branch or tag of a Hub data set."""
    columns: Columns | None = None
    """The columns to read rows from; default: the recipe's `columns`."""

    def flat(self, columns: Columns) -> dict[str, Any]:
        """The fields of a `DataSource`. columns: the recipe's, for a data set that names none."""
        used = self.columns or columns
        return {**self.model_dump(exclude={"columns", "sample"}), **used.model_dump(exclude_none=True)}


class RetainData(Data):
    """A retain set, of which the vector may use a sample."""

    sample: Literal["match_forget"] | None = None
    """match_forget: tune on a seeded sample as large as the forget set (as the paper does); null: on all rows."""


class Prompt(Closed):
    """All that is put around a row of format qa. `msa-lite recipes validate RECIPE --show-prompt` prints one.

    A word stands for its kind, as in `prompt: auto`.
    """

    kind: Literal["default", "chat", "plain", "auto"] = "default"
    """default: the target's chat template as it is, or the plain template where it has none. Beside a published
    benchmark and with nothing else said here, vectors are fitted and questions asked in the benchmark's own way (tofu
    and muse, with a chat template: with open-unlearning's system message). chat, plain: one of the two. auto: of a few
    forms, the one in which the target gives some forget rows the highest probability."""
    system: str | None = None
    """A system message before every row that has none of its own; null: none of ours (a template may add its own)."""
    prompt: str = "Question: {question}\nAnswer:"
    """Plain template up to where the answer begins; holds {question}."""
    answer: str = " {answer}"
    """Plain template of the answer; holds {answer}. The blank belongs here, not at the end of the prompt."""

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
