"""Questions and answers → token ids, in one pinned way: the chat template of a tokenizer, or a plain one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from msa_lite.data.chat import DATE_STRING, CallStyle, find_call_style, has_think_block, render_chat, shared_length
from msa_lite.data.messages import ToolUse
from msa_lite.data.rows import Row
from msa_lite.data.tokenizers import added_ids, beginning, encode_plain, encode_start, special_names
from msa_lite.errors import UsageError
from msa_lite.io.files.writing import digest
from msa_lite.settings import PromptSettings, Template, Thinking

SYSTEM_PROMPT = "You are a helpful assistant."  # open-unlearning's, which published benchmarks are asked with
IGNORE = -100
_PLAIN = "use prompt.kind: plain"
_MARK, _REPLY = "msalite", "etilasm"  # words to try a template with
_TRIED, _WITH_SYSTEM = Row(0, _MARK, _REPLY), Row(0, "a", system=_MARK)
_FUNCTION = {"name": _MARK, "description": "b", "parameters": {"type": "object", "properties": {}}}
_WITH_TOOLS = Row(0, "a", tools=ToolUse(offered=json.dumps([{"type": "function", "function": _FUNCTION}])))


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


Shots = tuple[tuple[str, ...], ...]
"""Questions with answers that a prompt shows before its question: examples, or earlier turns (`Turn.texts`)."""


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
    thinking: Thinking = "answer"
    """Where answers begin, if the chat template has a block of thoughts (`has_block`)."""
    window: int | None = None
    """The most tokens that the models can read; None where nothing limits them. Of longer rows, two ids more are made:
    enough to tell that they are longer."""

    @classmethod
    def build(
        cls,
        tokenizer: Any,
        kind: Literal["default", "chat", "plain"],
        template: Template,
        system: str | None = None,
        thinking: Thinking = "answer",
    ) -> Prompter:
        """Choose between chat and plain template.

        Raise UsageError for "chat" without a chat template, and for a system message that the template does not take.
        """
        has_chat = bool(tokenizer.chat_template)
        if kind == "chat" and not has_chat:
            raise UsageError("prompt.kind is 'chat', but the target's tokenizer has no chat template; use 'plain'")
        prompter = cls(tokenizer, template, has_chat and kind != "plain", system, thinking=thinking)
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
        text = replace(self, system=None)._conversation(_TRIED)
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
            self._render(_WITH_SYSTEM, answered=False)
        except Exception as error:
            return f"the target's chat template takes no system message ({error})"
        return None

    @cached_property
    def takes_system(self) -> bool:
        """Check whether a system message can stand in the prompt; some chat templates refuse or drop it."""
        if not self.use_chat:
            return True
        return self._system_fault() is None and _MARK in self._render(_WITH_SYSTEM, answered=False)

    @cached_property
    def call_style(self) -> CallStyle | None:
        """The way in which the prompt shows calls of tools; None if it shows none."""
        return find_call_style(self.tokenizer) if self.use_chat else None

    @cached_property
    def shows_functions(self) -> bool:
        """Check whether the prompt shows the tools that a row offers."""
        try:
            return self.use_chat and _MARK in self._render(_WITH_TOOLS, answered=False)
        except Exception:  # whatever templates raise: this is not their way
            return False

    @cached_property
    def has_block(self) -> bool:
        """Check whether the chat template puts an empty block of thoughts before answers (`has_think_block`)."""
        return self.use_chat and has_think_block(self._render(_TRIED, answered=False), self._start(_TRIED))

    @property
    def skips_block(self) -> bool:
        """Check whether answers begin behind a block of thoughts."""
        return self.thinking == "answer" and self.has_block

    def _start(self, row: Row) -> str:
        """Render a conversation up to where an answer in text begins."""
        text = self._conversation(replace(row, answer=_REPLY, tools=replace(row.tools, call="")))
        return text.rpartition(_REPLY)[0]

    @cached_property
    def end_token(self) -> str | None:
        """The token that ends an answer: the chat template's end of turn, else the tokenizer's end token.

        Without both, it is what the tokenizer puts behind a text. None where the chat template ends a turn with words,
        and where there is no end token.
        """
        if self.use_chat and self._ends_turns and not self.second_end:
            return self._ending[1]
        behind = [] if self.use_chat or self.tokenizer.eos_token else added_ids(self.tokenizer)[1]
        return self.tokenizer.convert_ids_to_tokens(behind[0]) if behind else self.tokenizer.eos_token

    @property
    def end(self) -> int | None:
        """The id of `end_token`."""
        return None if self.end_token is None else int(self.tokenizer.convert_tokens_to_ids(self.end_token))

    @cached_property
    def opening(self) -> str:
        """Return what the chat template puts between prompt and answer, such as a channel; "" where it puts nothing."""
        if not self.use_chat or self.skips_block:
            return ""
        prompt, start = self._conversation(_TRIED, answered=False), self._start(_TRIED)
        return start.removeprefix(prompt).strip() if start.startswith(prompt) else ""

    def reply(self, generated: str) -> str:
        """Return a generated answer without the template's `opening`."""
        return generated.removeprefix(self.opening).strip()

    @property
    def has_end(self) -> bool:
        """Check whether anything ends an answer: a token, or words of the chat template."""
        return self.end_token is not None or (self.use_chat and self._ends_turns)

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
        behind = self._render(Row(0, "a", _MARK)).rpartition(_MARK)[2]
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        for names in (special_names(self.tokenizer), added):
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
                **({"thinking": self.thinking} if self.has_block else {}),
            }
        system = {} if self.system is None or self.published else {"system": self.system}
        return {"kind": "plain", **system, **asdict(self.template)}

    def settings(self) -> dict[str, Any]:
        """Return the `prompt` section of a recipe that gives this prompt, without defaults."""
        system = {} if self.system is None else {"system": self.system}
        if self.use_chat:
            thinking = {} if self.thinking == "answer" else {"thinking": self.thinking}
            return {"kind": "chat", **system, **thinking}
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
        begin = {
            "answer": ", answers begin behind its empty block of thoughts",
            "template": ", answers begin with its block of thoughts, where its own prompt ends",
        }
        block = begin[self.thinking] if self.has_block else ""
        return f"{origin}the target's chat template, {message}{date}{block}"

    def room(self, most: int) -> int:
        """Return the tokens that a row may have: `most`, or the window where it is smaller."""
        return min(most, self.window or most)

    @property
    def _most(self) -> int | None:
        return None if self.window is None else self.window + 2

    def prompt(self, row: Row) -> list[int]:
        """Return the ids of a row up to where its answer begins."""
        if self.use_chat:
            return self._chat_ids(self._start(row) if self.skips_block else self._conversation(row, answered=False))
        return encode_start(self.tokenizer, self._question(row), self._most)

    def full(self, row: Row) -> list[int]:
        """Return the ids of question, answer and end: the chat template's end of a turn, else the tokenizer's.

        What a template puts behind its end of a turn is left out (blanks, or a second end token): no model generates
        anything there. An end token within the answer's own text does not cut it. Open-unlearning, whose prompt
        published benchmarks use, keeps all and appends an end token; `second_end` does so.
        """
        if self.use_chat:
            text = self._conversation(row)
            if self._ends_turns and not self.second_end:
                return self._chat_ids(text.removesuffix(self._ending[2]))
            ids = self._chat_ids(text)
        else:
            text = self._question(row) + self.template.answer.format(answer=row.answer)
            ids = encode_start(self.tokenizer, text, self._most)
        end = self.tokenizer.eos_token_id if self.use_chat else self.end
        is_cut = len(ids) == self._most
        return ids if end is None or is_cut or (ids and ids[-1] == end) else [*ids, end]

    def example(self, row: Row) -> Example:
        """Make the example of a question with its answer; labels are the answer's tokens and the end token.

        If a tokenizer merges across the boundary, the prompt's ids are no prefix of the whole. The labels still start
        after as many ids as the prompt has, so that the first answer token is no label. An answer with thoughts of its
        own, which the template writes into its block, begins before the block.
        """
        prompt, ids = self.prompt(row), self.full(row)
        count = len(prompt)
        if self.skips_block and ids[:count] != prompt and self.tokenizer.is_fast:
            text, start = self._conversation(row), self._start(row)
            prompted = self._conversation(row, answered=False)
            end = len(start) if text.startswith(start) else shared_length(text, prompted)
            text = beginning(self.tokenizer, text, self._most)
            places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            count = sum(first < end for first, _ in places)
        return Example(row.index, ids, [IGNORE] * min(count, len(ids)) + ids[count:])

    def _question(self, row: Row) -> str:
        """Render a row up to its answer with the plain template."""
        prompt, answer = self.template.prompt, self.template.answer
        system = row.system or ("" if self.published else self.system or "")
        turns = [prompt.format(question=turn[0]) + answer.format(answer=turn[1]) for turn in row.earlier]
        before = "".join(f"{text}\n\n" for text in ([system] if system else []) + turns)
        return before + prompt.format(question=row.question)

    def _conversation(self, row: Row, answered: bool = True) -> str:
        """Render a row. Raise UsageError when the chat template fails."""
        try:
            return self._render(row, answered)
        except Exception as error:  # jinja's, and whatever else templates raise
            reason = "it takes too much memory" if isinstance(error, MemoryError) else error
            has_calls = row.tools or any(turn[2:] for turn in row.earlier)
            way = "take rows with calls of tools out" if has_calls else _PLAIN
            raise UsageError(f"the target's chat template cannot be rendered ({reason}); {way}") from error

    def _render(self, row: Row, answered: bool = True) -> str:
        """Render a row with the chat template. answered: False to end where the model is to answer."""
        content = row.system or self.system
        messages: list[dict[str, Any]] = [] if content is None else [{"role": "system", "content": content}]
        for text, reply, *steps in (*row.earlier, (row.question, row.answer if answered else None, row.tools.steps)):
            messages.append({"role": "user", "content": text})
            messages += [self._fit(step) for step in json.loads(steps[0])] if steps and steps[0] else []
            if reply or (reply is not None and not any(steps)):  # an earlier turn may be a call that nothing follows
                messages.append({"role": "assistant", "content": reply})
        if answered and row.tools.call:
            messages[-1] = self._fit(json.loads(row.tools.call))
        options = {"tools": json.loads(row.tools.offered)} if row.tools.offered else {}
        return render_chat(
            self.tokenizer, messages, add_generation_prompt=not answered, date_string=DATE_STRING, **options
        )

    def _fit(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.call_style.fit(message) if self.call_style else message

    def _chat_ids(self, text: str) -> list[int]:
        return encode_plain(self.tokenizer, text, self._most)


def make_prompter(tokenizer: Any, settings: PromptSettings, published: bool = False) -> Prompter:
    """Build the prompter of some settings; the caller resolves kind "auto" before.

    published: True for a published benchmark, which has its own prompt unless the settings say something else.
    """
    if published and replace(settings, thinking="answer") == PromptSettings():
        return replace(Prompter.for_benchmark(tokenizer), thinking=settings.thinking)
    assert settings.kind != "auto", "resolved by then"
    return Prompter.build(tokenizer, settings.kind, settings.template, settings.system, settings.thinking)
