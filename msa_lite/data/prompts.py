"""Questions and answers → token ids, in one pinned way: the chat template of a tokenizer, or a plain one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from msa_lite.data.rows import Row
from msa_lite.errors import MismatchError, NoTokenizerError, UsageError, clip
from msa_lite.io.files.writing import digest
from msa_lite.io.models.devices import limited
from msa_lite.io.models.loading import read_tokenizer
from msa_lite.io.weights.hub import has_tokenizer

logger = logging.getLogger(__name__)


COMPARED_ROWS = 64
_LONGEST = 1 << 20  # characters that a chat template may add
_CHARACTERS = 2000  # of a row to compare
_SHOWN = 48  # characters of a row to show in a message


def open_tokenizer(folder: Path, name: str) -> Any:
    """Load a model's tokenizer. name: of the model, for messages.

    Raise NoTokenizerError if there is none, FormatError if it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise NoTokenizerError(f"{name}: was saved without a tokenizer")
    return read_tokenizer(folder, name)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """Render messages as text with the tokenizer's chat template, a program by whoever made the model.

    Raise whatever the template raises, OverrunError if it runs too long, and MemoryError or ValueError if it makes far
    more text than it gets.
    """
    with limited():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    if not isinstance(text, str) or len(text) > _LONGEST + 10 * sum(len(m["content"]) for m in messages):
        raise ValueError("it makes no text, or far more than it gets")
    return text


def check_same_ids(rows: Iterable[Row], target: Any, prior: Any, names: tuple[str, str]) -> None:
    """Raise MismatchError, with an example, when the tokenizers of target and prior make different ids of a row.

    Only plain texts count: chat templates may differ, and so may tokens added to the target's. names: of target and
    prior.
    """
    size = len(prior)
    for row in rows:
        text = " ".join(value for value in vars(row).values() if isinstance(value, str) and value)[:_CHARACTERS]
        ours, theirs = (list(t(text, add_special_tokens=False)["input_ids"]) for t in (target, prior))
        place = next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
        if place is None or any(token >= size for token in ours[: place + 1]):
            continue
        start = clip(" ".join(text.split()), _SHOWN)
        raise MismatchError(
            f"the tokenizers of target {names[0]} and prior {names[1]} read the forget rows differently. Row "
            f"{row.index}, {start!r}: token {place + 1} is {_token(target, ours, place)} to the target and "
            f"{_token(prior, theirs, place)} to the prior. Give the checkpoint that the target was tuned from; if only "
            "its tokenizer files are wrong, replace them by the target's"
        )


def _token(tokenizer: Any, ids: Sequence[int], place: int) -> str:
    """Describe a token by id and text, for a message."""
    if place >= len(ids):
        return "none, the row is at its end,"
    return f"{ids[place]} ({tokenizer.decode([ids[place]])!r})"


SYSTEM_PROMPT = "You are a helpful assistant."  # open-unlearning's, which published benchmarks are asked with
# Without it, Llama 3 templates print today's date, and training and scoring would change from day to day. This is the
# day that open-unlearning pins, so that prompts are the same text.
DATE_STRING = "10 Apr 2025"
IGNORE = -100
_MARK, _REPLY = "msalite", "etilasm"  # words to try a template with


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
    """The choice of a prompt, before a tokenizer is known."""

    kind: Literal["default", "chat", "plain", "auto"] = "default"
    """default: the chat template if there is one, else the plain one; published benchmarks have their own prompt.
    auto: the form in which the model knows its rows (`msa_lite.evals.prompt_search`)."""
    system: str | None = None
    """A system message; None: no message of ours."""
    template: Template = Template()
    """The plain template."""


@dataclass(frozen=True)
class Example:
    """Token ids of one row and its labels, of equal length; a label is IGNORE where nothing is learnt or scored."""

    index: int
    ids: list[int]
    labels: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        """Return the ids before the first label, from which generation starts."""
        count = next((i for i, label in enumerate(self.labels) if label != IGNORE), len(self.ids))
        return self.ids[:count]


Shots = Sequence[tuple[str, str]]
"""Questions with answers that a prompt shows before its question: examples, or earlier turns."""


@dataclass(frozen=True)
class Prompter:
    """A way to render questions and answers as token ids."""

    tokenizer: Any
    """The target's."""
    template: Template
    """The plain template, used where `use_chat` is False."""
    use_chat: bool
    """True to use the tokenizer's chat template."""
    system: str | None = None
    """The system message; a row's own takes its place."""
    published: bool = False
    """True for open-unlearning's prompt, which shows its system message in chat templates alone."""
    second_end: bool = False
    """True to keep all that the chat template puts behind an answer, and to end it with the tokenizer's end token, as
    open-unlearning does. False: an answer ends at its first end token, and a model has nothing to say after it."""

    @classmethod
    def build(
        cls,
        tokenizer: Any,
        kind: Literal["default", "chat", "plain"],
        template: Template,
        system: str | None = None,
    ) -> Prompter:
        """Choose between chat and plain template.

        Raise UsageError for "chat" without a chat template, and for a system message that the template does not take.
        """
        has_chat = bool(tokenizer.chat_template)
        if kind == "chat" and not has_chat:
            raise UsageError("prompt.kind is 'chat', but the target's tokenizer has no chat template; use 'plain'")
        prompter = cls(tokenizer, template, has_chat and kind != "plain", system)
        prompter._check()
        return prompter

    @classmethod
    def for_benchmark(cls, tokenizer: Any) -> Prompter:
        """Return open-unlearning's prompt, which published benchmarks use.

        It is the chat template, with open-unlearning's system message if the template takes one, or the plain template.
        """
        prompter = cls(tokenizer, Template(), bool(tokenizer.chat_template), None, True)
        prompter._check()
        fault = prompter.use_chat and prompter._system_fault()
        # Templates without a system role raise an error of their own (Gemma); dropping the message does no harm.
        return cls(tokenizer, Template(), prompter.use_chat, None if fault else SYSTEM_PROMPT, True)

    def _check(self) -> None:
        """Raise UsageError if the chat template cannot be rendered, or does not take the system message."""
        if not self.use_chat:
            return
        text = replace(self, system=None)._conversation(_MARK, _REPLY)
        if lost := [what for what, mark in (("question", _MARK), ("answer", _REPLY)) if mark not in text]:
            raise UsageError(
                f"the target's chat template leaves out the {' and the '.join(lost)}; use prompt.kind: plain"
            )
        if self.system is not None:
            if fault := self._system_fault():
                raise UsageError(f"prompt.system: {fault}; leave it out")
            if not self.takes_system:
                raise UsageError("prompt.system: the target's chat template leaves system messages out; leave it out")

    def _system_fault(self) -> str | None:
        try:
            self._render("a", None, system=_MARK)
        except Exception as error:
            return f"the target's chat template takes no system message ({error})"
        return None

    @cached_property
    def takes_system(self) -> bool:
        """Check whether a system message can stand in the prompt; some chat templates refuse or drop it."""
        if not self.use_chat:
            return True
        return self._system_fault() is None and _MARK in self._render("a", None, system=_MARK)

    @cached_property
    def end_token(self) -> str | None:
        """The token that ends an answer: the chat template's end of turn, else the tokenizer's end token.

        None where the chat template ends a turn with words, and where there is no end token.
        """
        if self.use_chat and self._ends_turns and not self.second_end:
            return self._ending[1]
        return self.tokenizer.eos_token

    @property
    def end(self) -> int | None:
        """The id of `end_token`."""
        return None if self.end_token is None else int(self.tokenizer.convert_tokens_to_ids(self.end_token))

    @property
    def _ends_turns(self) -> bool:
        """Check whether the chat template itself ends an answer."""
        return bool(self._ending[0].strip())

    @cached_property
    def _ending(self) -> tuple[str, str | None, str]:
        """Return what the chat template puts behind an answer: (the end of the turn, its token, what follows).

        The token is the first special one; else the first added one, since some models add their end of turn as a
        plain word. Without such a token the end of the turn is all but the blanks at its end.
        """
        behind = self._render("a", _MARK).rpartition(_MARK)[2]
        added = {str(token): token.special for token in self.tokenizer.added_tokens_decoder.values()}
        special = {*self.tokenizer.all_special_tokens, *(name for name, is_special in added.items() if is_special)}
        for names in (special, added):
            pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name.strip())
            if pattern and (match := re.search(pattern, behind)):
                return behind[: match.end()], match[0], behind[match.end() :]
        end = behind.rstrip()
        return end, None, behind[len(end) :]

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records, so that a changed prompt is a changed input."""
        if self.use_chat:
            return {
                "kind": "chat",
                "date_string": DATE_STRING,
                "system": self.system,
                "chat_template": digest(self.tokenizer.chat_template),
                # Generation stops there too. The tokenizer's own end token is no news: it always did.
                **({} if self.end_token in (None, self.tokenizer.eos_token) else {"end": self.end_token}),
            }
        system = {} if self.system is None or self.published else {"system": self.system}
        return {"kind": "plain", **system, **asdict(self.template)}

    def settings(self) -> dict[str, Any]:
        """Return the `prompt` section of a recipe that gives this prompt, without defaults."""
        system = {} if self.system is None else {"system": self.system}
        if self.use_chat:
            return {"kind": "chat", **system}
        default = asdict(Template())
        return {"kind": "plain", **system} | {k: v for k, v in asdict(self.template).items() if v != default[k]}

    @property
    def sentence(self) -> str:
        """Return the prompt in words."""
        if not self.use_chat:
            system = "" if self.system is None or self.published else f"{self.system!r}, "
            return f"{system}{self.template.prompt!r} and {self.template.answer!r}, no chat template"
        message = "no system message of ours" if self.system is None else f"system message {self.system!r}"
        origin = "open-unlearning's: " if self.published else ""
        date = f", date {DATE_STRING}" if "date_string" in str(self.tokenizer.chat_template) else ""
        return f"{origin}the target's chat template, {message}{date}"

    def prompt(self, question: str, shots: Shots = (), system: str = "") -> list[int]:
        """Return the ids up to where the answer begins. shots: questions with answers to show before."""
        if self.use_chat:
            return self._chat_ids(self._conversation(question, None, shots, system))
        text = self._plain(shots, system) + self.template.prompt.format(question=question)
        return list(self.tokenizer(text)["input_ids"])

    def full(self, question: str, answer: str, shots: Shots = (), system: str = "") -> list[int]:
        """Return the ids of question, answer and end: the chat template's end of a turn, else the tokenizer's.

        What a template puts behind its end of a turn is left out (blanks, or a second end token): no model generates
        anything there. An end token within the answer's own text does not cut it. Open-unlearning, whose prompt
        published benchmarks use, keeps all and appends an end token; `second_end` does so.
        """
        if self.use_chat:
            text = self._conversation(question, answer, shots, system)
            if self._ends_turns and not self.second_end:
                return self._chat_ids(text.removesuffix(self._ending[2]))
            ids = self._chat_ids(text)
        else:
            text = self.template.prompt.format(question=question) + self.template.answer.format(answer=answer)
            ids = list(self.tokenizer(self._plain(shots, system) + text)["input_ids"])
        end = self.tokenizer.eos_token_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def example(self, index: int, question: str, answer: str, shots: Shots = (), system: str = "") -> Example:
        """Make the example of a question with its answer; labels are the answer's tokens and the end token.

        If a tokenizer merges across the boundary, the prompt's ids are no prefix of the whole. The labels still start
        after as many ids as the prompt has, so that the first answer token is no label.
        """
        prompt, ids = self.prompt(question, shots, system), self.full(question, answer, shots, system)
        return Example(index, ids, [IGNORE] * min(len(prompt), len(ids)) + ids[len(prompt) :])

    def _plain(self, shots: Shots, system: str) -> str:
        system = system or ("" if self.published else self.system or "")
        turns = [self.template.prompt.format(question=q) + self.template.answer.format(answer=a) for q, a in shots]
        return "".join(f"{text}\n\n" for text in ([system] if system else []) + turns)

    def _conversation(self, question: str, answer: str | None, shots: Shots = (), system: str = "") -> str:
        """Render a row. Raise UsageError when the chat template fails."""
        try:
            return self._render(question, answer, shots, system)
        except Exception as error:  # jinja's, and whatever else templates raise
            reason = "it takes too much memory" if isinstance(error, MemoryError) else error
            raise UsageError(
                f"the target's chat template cannot be rendered ({reason}); use prompt.kind: plain"
            ) from error

    def _render(self, question: str, answer: str | None, shots: Shots = (), system: str = "") -> str:
        """Render a conversation with the chat template. system: the row's own, in place of the prompter's."""
        content = system or self.system
        messages = [] if content is None else [{"role": "system", "content": content}]
        for text, reply in (*shots, (question, answer)):
            messages.append({"role": "user", "content": text})
            if reply is not None:
                messages.append({"role": "assistant", "content": reply})
        return render_chat(self.tokenizer, messages, add_generation_prompt=answer is None, date_string=DATE_STRING)

    def _chat_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def make_prompter(tokenizer: Any, settings: PromptSettings, published: bool = False) -> Prompter:
    """Build the prompter of some settings; the caller resolves kind "auto" before.

    published: True for a published benchmark, which has its own prompt unless the settings say something else.
    """
    if published and settings == PromptSettings():
        return Prompter.for_benchmark(tokenizer)
    assert settings.kind != "auto", "resolved by then"
    return Prompter.build(tokenizer, settings.kind, settings.template, settings.system)


def check_vocabulary(tokenizer: Any, size: int | None, name: str) -> None:
    """Raise MismatchError when a tokenizer has more tokens than a model's vocabulary. size: None if not known."""
    if size is not None and len(tokenizer) > size:
        first = tokenizer.convert_ids_to_tokens(list(range(size, len(tokenizer)))[:3])
        raise MismatchError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}; "
            f"the model has no row for {', '.join(map(repr, first))}"
        )
