"""Parts of a recipe that say what goes in: data sets, and how their rows become text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

T = TypeVar("T")
OneOrMore = Annotated[
    Annotated[T, Tag("one")] | Annotated[list[T], Field(min_length=1), Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]
"""A value or a list of such. What is wrong with it is said of the one that it is meant to be."""


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Columns(Closed):
    """Names of the columns that rows are read from."""

    question: str = "question"
    """Column of questions, for format qa."""
    answer: str = "answer"
    """Column of answers, for format qa."""
    text: str = "text"
    """Column of documents, for format text."""


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
    columns: Columns = Columns()
    """Where rows are read from."""

    def flat(self) -> dict[str, Any]:
        """The fields of a `DataSource`."""
        return {**self.model_dump(exclude={"columns", "sample"}), **self.columns.model_dump()}


class RetainData(Data):
    """A retain set, of which the vector may use a sample."""

    sample: Literal["match_forget"] | None = None
    """match_forget: tune on a seeded sample as large as the forget set (as the paper does); null: on all rows."""


class Prompt(Closed):
    """How questions and answers become text."""

    kind: Literal["auto", "chat", "plain"] = "auto"
    """auto: the target's chat template where it has one, the plain template otherwise."""
    prompt: str = "Question: {question}\nAnswer:"
    """Plain template up to where the answer begins; holds {question}."""
    answer: str = " {answer}"
    """Plain template of the answer; holds {answer}. The blank belongs here, not at the end of the prompt."""

    @model_validator(mode="after")
    def _holds_fields(self) -> Prompt:
        for key, text in (("question", self.prompt), ("answer", self.answer)):
            try:
                filled = text.format(**{key: "\0"})
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"the plain template has an unknown or broken {{…}} ({error})") from error
            if "\0" not in filled:
                raise ValueError(f"the plain template lacks {{{key}}}")
        return self
