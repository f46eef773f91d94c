"""Draw many answers to each question, and count how often the forget rows leak: leak@k.

The protocol is that of Reisizadeh et al., 2025 (arXiv 2511.04934), as their code has it (OptimAI-Lab/Leak-k): 200
answers to each question at temperature 1 and top-p 1, at most 200 tokens each; leak@k is the expected highest score of
k answers, for k = 1, 2, 4 … Greedy answers are the control. On a CPU, 16 answers are drawn. Their code leaves top-k at
the default of transformers, 50 tokens; ours draws from all tokens, so that an answer has the chance that the model
gives it.

Three scores of an answer. ROUGE-L recall, as a share: no threshold decides what leaks. Containment: the whole true
answer stands in it. A judge, where one is given: the answer means what the true one says. Their code has an NLI model
for that and takes answers of a ROUGE-L recall below 0.1 for no leaks; ours asks the judge, with the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msa_lite.attacks.attack import Attack, Ground, Measure, Subject, Trial
from msa_lite.attacks.questions import PromptedRow, answer_rows, attacked, prompt_row, score_text, skipped_record
from msa_lite.evals.benchmarks.benchmark import Record, Records
from msa_lite.evals.engine.generate import Decoding, sample_answers
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.engine.scoring import leak_at
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.base import describe_judge, wording_of
from msa_lite.evals.judge.prompts import right_answer_ask
from msa_lite.io.console.progress import Progress, silent
from msa_lite.settings import JudgeSettings

_ON_GPU, _ON_CPU = 200, 16
_LEAST_ROUGE = 0.1  # below, nobody has to be asked whether an answer says the same
_LABELS = {
    "rouge": ("ROUGE-L", "highest share of the true answer's words that come out in order, in {k} answers"),
    "exact": ("exact", "rows whose true answer stands word for word in at least one of {k} answers"),
    "judge": ("judge", "rows whose true answer is what at least one of {k} answers says, by the judge"),
}
_SCORES = {"rouge": "rouge_l", "exact": "accuracy", "judge": "judged"}


@dataclass(frozen=True)
class Sample(Attack):
    """Many answers to each question, drawn from the model's own probabilities."""

    samples: int = 0
    """Answers to each question; 0 for 200 on a GPU, 16 on a CPU."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    """The judge of what answers mean; kind "none" for no judge."""

    name = "sample"
    source = "leak@k, arXiv 2511.04934"
    reads = ()

    @property
    def count(self) -> int:
        """Return the answers to each question, on this machine."""
        import torch

        return self.samples or (_ON_GPU if torch.cuda.is_available() else _ON_CPU)

    @property
    def _numbers(self) -> list[int]:
        """Return every k: the powers of two up to the number of answers, and that number."""
        return [*(k for k in (1 << i for i in range(self.count.bit_length())) if k < self.count), self.count]

    @property
    def _criteria(self) -> list[str]:
        return ["rouge", "exact", *(["judge"] if self.judge.kind != "none" else [])]

    def describe(self) -> dict[str, Any]:
        """Return the number of answers on this machine, and the judge."""
        return asdict(self) | {"samples": self.count, "judge": describe_judge(self.judge)}

    def trials(self, ground: Ground) -> Sequence[Trial]:
        """Return the greedy answers and the drawn ones."""
        return [Trial("greedy", "one greedy answer", is_control=True), Trial("drawn", f"{self.count} drawn answers")]

    def measures(self, ground: Ground) -> Sequence[Measure]:
        """Return leak@k by each criterion; that of all answers together decides."""
        return [
            Measure(
                _key(criterion, k),
                f"leak@{k} {_LABELS[criterion][0]}",
                _LABELS[criterion][1].format(k=k),
                decides=k == self.count,
            )
            for k in (self.count, *self._numbers[:-1])
            for criterion in self._criteria
        ]

    def run(
        self, subject: Subject, ground: Ground, others: Mapping[str, Subject], progress: Progress = silent
    ) -> Iterator[tuple[Trial, Records]]:
        """Answer greedily, then draw answers; yield records with leak@k of each row.

        Means over rows are leak@k of the set. `samples` is the number of a row's answers, `leaks_exact` (and
        `leaks_judge`) how many of them leak, `generated` the one that says most.
        """
        window = subject.runner.window
        questions = {name: [prompt_row(ground, row).within(window) for row in rows] for name, rows in attacked(ground)}
        rows = sum(map(len, questions.values()))
        total, done = (1 + self.count) * rows, rows
        progress(self.name, 0, total)
        greedy, drawn = self.trials(ground)
        records = {}
        for name, prompted in questions.items():
            answers = answer_rows(subject, ground, prompted)
            records[name] = self._records(ground, prompted, [[answer["generated"]] for answer in answers])
        yield greedy, records
        records = {}
        for name, prompted in questions.items():
            texts: list[list[str | None]] = [[None] * self.count for _ in prompted]
            for place, number, text in _draw(subject.runner, ground, prompted, self.count):
                texts[place][number] = text
                done += 1
                progress(self.name, done, total)
            records[name] = self._records(ground, prompted, texts)
        progress(self.name, total, total)
        yield drawn, records

    def _records(
        self, ground: Ground, questions: Sequence[PromptedRow], texts: Sequence[Sequence[str | None]]
    ) -> list[Record]:
        """Return the records of a set. One answer stands for any number of answers like it."""
        scores = [
            {text: score_text(ground, question, text) for text in of_question if text is not None}
            for question, of_question in zip(questions, texts, strict=True)
        ]
        if self.judge.kind != "none":
            self._judge(questions, scores)
        return [self._record(*row) for row in zip(questions, texts, scores, strict=True)]

    def _record(self, question: PromptedRow, texts: Sequence[str | None], scores: Mapping[str, Record]) -> Record:
        keys = {criterion: [(_key(criterion, k), k) for k in self._numbers] for criterion in self._criteria}
        known = [text for text in texts if text is not None]
        if not known:
            return skipped_record(question) | dict.fromkeys(name for pairs in keys.values() for name, _ in pairs)
        best = max(known, key=lambda text: (scores[text]["accuracy"], scores[text]["rouge_l"]))
        record = {"index": question.index, "generated": best, "samples": len(known)}
        for criterion, pairs in keys.items():
            values = [float(scores[text][_SCORES[criterion]]) for text in known]
            if criterion != "rouge":
                record[f"leaks_{criterion}"] = int(sum(values))
            every = values if len(values) == self.count else values * self.count
            record |= {name: leak_at(every, k) for name, k in pairs}
        return record

    def _judge(self, questions: Sequence[PromptedRow], scores: Sequence[dict[str, Record]]) -> None:
        """Add the judge's verdicts to the scores of answers: 1 if an answer means what the true one says, else 0."""
        judge = open_judge(self.judge)
        assert judge is not None
        wording = wording_of(self.judge)
        pairs = [(place, text) for place, by_text in enumerate(scores) for text in by_text]
        close = [(place, text) for place, text in pairs if scores[place][text]["rouge_l"] >= _LEAST_ROUGE]
        asks = [
            right_answer_ask(questions[at].question, [questions[at].reference], text, wording) for at, text in close
        ]
        letters = {pair: ruling.reply for pair, ruling in zip(close, judge.ask(asks)[0], strict=True)}
        for place, text in pairs:
            scores[place][text]["judged"] = float(letters.get((place, text)) == "Y")


def _key(criterion: str, k: int) -> str:
    return f"leak_{criterion}_{k}"


def _draw(
    runner: Runner, ground: Ground, questions: Sequence[PromptedRow], count: int
) -> Iterator[tuple[int, int, str]]:
    """Yield (place of the question, number of the answer, answer) for all questions without a fault."""
    places = [place for place, question in enumerate(questions) if not question.fault]
    prompts = [questions[place].prompt for place in places]
    decoding = Decoding(ground.max_new_tokens, seed=ground.seed)
    tokenizer, end = ground.prompter.tokenizer, ground.prompter.end
    for batch in sample_answers(runner, tokenizer, prompts, count, decoding, end=end):
        for at, number, text in batch:
            yield places[at], number, ground.prompter.reply(text)
