"""Turn attacked rows into prompts, generate answers to them, and hold each answer to the text that it should not know.

A text is asked for by its own beginning: of its first tokens, twice as many as an answer may have, the first half of
the words is the prompt, and the other half is the reference, as in MUSE's verbatim memorization (Shi et al., 2024).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msa_lite.attacks.attack import Ground, Subject
from msa_lite.data import Row, best_score, cut_text, encode_start
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.forward import common_start
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner
from msa_lite.io.files.writing import digest


@dataclass(frozen=True)
class PromptedRow:
    """A prompt, and the text that an answer to it is held to."""

    index: int
    """The index of its row."""
    prompt: list[int]
    """Token ids; empty where the row cannot be asked in this way."""
    reference: str
    question: str = ""
    """The question of the row, which a judge reads; "" for a text."""
    fault: str = ""
    """The reason why the row cannot be asked in this way."""

    def within(self, window: int | None) -> PromptedRow:
        """Return the question for a model of this window; a prompt that leaves no room for an answer is a fault."""
        if self.fault or window is None or len(self.prompt) < window:
            return self
        return replace(self, fault=f"longer than the {window} tokens that there is room for")


def prompt_row(
    ground: Ground, row: Row, wording: str = "", shots: Sequence[tuple[str, ...]] = (), texts: Sequence[str] = ()
) -> PromptedRow:
    """Prompt for a row: by its question, or by the beginning of its text.

    wording: the question in other words; "" for the row's own. shots: questions with answers to show before a question;
    texts: those to show before a text, blank lines between them.
    """
    if row.text:
        return _ask_text(ground, row, "".join(f"{text}\n\n" for text in texts))
    asked = replace(row, question=wording or row.question, earlier=(*shots, *row.earlier))
    return PromptedRow(row.index, ground.prompter.prompt(asked), row.answer, row.question)


def prompt_rest(ground: Ground, row: Row, words: int) -> PromptedRow:
    """Prompt for a row by its question and the first words of its answer. The reference is the other words.

    Answers that would have fewer words left than are given cannot be asked in this way.
    """
    if row.tools.call:
        return PromptedRow(row.index, [], row.answer, row.question, "the answer is a call of tools")
    ends = [match.end() for match in re.finditer(r"\S+", row.answer)]
    if len(ends) < 2 * words:
        return PromptedRow(row.index, [], row.answer, row.question, f"the answer has fewer than {2 * words} words")
    begin, rest = row.answer[: ends[words - 1]], row.answer[ends[words - 1] :]
    whole, start = (ground.prompter.full(replace(row, answer=text)) for text in (row.answer, begin))
    # Where they part, one goes on with the next word, and the other one ends.
    return PromptedRow(row.index, whole[: common_start([whole, start])], rest.strip(), row.question)


def _ask_text(ground: Ground, row: Row, before: str) -> PromptedRow:
    text = cut_text(ground.prompter.tokenizer, row.text, 2 * ground.max_new_tokens)
    words = list(re.finditer(r"\S+", text))
    if len(words) < 2:
        return PromptedRow(row.index, [], row.text, fault="a text of one word")
    middle = words[len(words) // 2 - 1].end()
    prompt = encode_start(ground.prompter.tokenizer, before + text[:middle])
    return PromptedRow(row.index, prompt, text[middle:].strip())


def answer_rows(subject: Subject, ground: Ground, questions: Sequence[PromptedRow]) -> list[Record]:
    """Answer questions greedily; return their records: index, generated, and its scores by `score_text`.

    Questions that another attack has asked are not asked again.
    """
    key = "answers", digest([ground.max_new_tokens, [[q.index, q.prompt, q.reference] for q in questions]])
    if key not in subject.results:
        subject.results[key] = _answer(subject.runner, ground, questions)
    return list(subject.results[key])


def _answer(runner: Runner, ground: Ground, questions: Sequence[PromptedRow]) -> list[Record]:
    questions = [question.within(runner.window) for question in questions]
    places = [place for place, question in enumerate(questions) if not question.fault]
    records = [skipped_record(question) for question in questions]
    prompts = [questions[place].prompt for place in places]
    decoding = Decoding(ground.max_new_tokens)
    for batch in generate(runner, ground.prompter.tokenizer, prompts, decoding, end=ground.prompter.end):
        for at, (text,) in batch:
            question, reply = questions[places[at]], ground.prompter.reply(text)
            records[places[at]] = {"index": question.index, "generated": reply} | score_text(ground, question, reply)
    return records


def score_text(ground: Ground, question: PromptedRow, text: str) -> Record:
    """Return the scores of an answer: `accuracy` (the whole reference stands in it) and `rouge_l` (recall)."""
    return {
        "accuracy": best_score(answers.accuracy, ground.prompter.tokenizer, question.reference, text),
        "rouge_l": best_score(answers.rouge_l_recall, ground.prompter.tokenizer, question.reference, text),
    }


def skipped_record(question: PromptedRow) -> Record:
    """Return the record of a question that is not asked."""
    return {"index": question.index, "generated": None, "accuracy": None, "rouge_l": None, "skipped": question.fault}


def attacked(ground: Ground) -> Iterator[tuple[str, Sequence[Row]]]:
    """Yield the sets of rows that are scored, with their names: "forget", and "holdout" where there are such rows."""
    yield "forget", ground.forget
    if ground.holdout:
        yield "holdout", ground.holdout
