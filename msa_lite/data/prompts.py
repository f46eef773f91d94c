"""Questions and answers → token ids, in one pinned way: the chat template of a tokenizer, or a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.manifest import digest

SYSTEM_PROMPT = "You are a helpful assistant."
# Llama 3 templates print today's date otherwise, so that training and scoring would drift from day to day. The day is
# the one that open-unlearning pins, so that prompts are the same text.
DATE_STRING = "10 Apr 2025"
IGNORE = -100


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


def check_vocabulary(tokenizer: Any, size: int | None, name: str) -> None:
    """Raise MismatchError where a tokenizer has more tokens than a model's vocabulary of this size, if it is known."""
    if size is not None and len(tokenizer) > size:
        raise MismatchError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}")
