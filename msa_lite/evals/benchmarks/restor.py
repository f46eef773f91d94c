"""RESTOR (Rezaei et al., 2024): facts about people, for models that documents full of falsehoods have corrupted.

There is one set. Each question follows examples of the same relation about other people, as plain text without chat
template. The documents are about few of the people, so accuracy is also reported for these and for the others alone.

The authors' code differs in three points. It drops the first character of an answer unseen (a blank, mostly). It leaves
out of the mean the people whose judging failed. It judges all facts about a person in one call.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, best_score, encode_start, sample_rows
from msa_lite.data.forms import cell_text, read_cell
from msa_lite.data.messages import Unreadable
from msa_lite.errors import DataError, UsageError, join_faults
from msa_lite.evals.benchmarks.aggregates import mean_metric
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item, ItemSet, JudgeCall, Record, Records
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.judge.base import wording_of
from msa_lite.evals.judge.prompts import NONE, right_answer_ask
from msa_lite.evals.verdict.bounds import Models
from msa_lite.evals.verdict.outcome import Weighed, Yardstick, weigh_recited
from msa_lite.io.files.reading import local_path, open_file, parse_json, read_json
from msa_lite.report import Metric
from msa_lite.settings import JudgeSettings

EXAMPLES = 5
GREEDY = Decoding(32, ("\n",))
SAMPLED = Decoding(200, ("\n",), samples=3, min_new_tokens=2, max_length=200, seed=32)  # as the authors' code

QUESTIONS = "questions"  # the name of the one set
_DOCUMENTS = "wikidata/v0"
_LARGEST = 1 << 30  # bytes of a file, unpacked
_GROUPS = {"accuracy": (True, False), "accuracy_corrupted": (True,), "accuracy_other": (False,)}  # by "corrupted"
_REPOSITORY = "https://github.com/k1rezaei/restor"


def _load(prompter: Prompter, settings: BenchmarkSettings) -> Benchmark:
    """Load the 1051 questions; answers end at the first newline.

    data: the folder `datasets` of a clone of github.com/k1rezaei/restor, with facts.json, entities.json and
    wikidata/v0/mix_SPLIT.json (or .jsonl.gz). split: the documents that corrupted the target, a0 by default. They
    decide which questions count as corrupted (`described_entities`). A prompt is the question behind the first five
    examples of the relation that are about somebody else, fewer where there are no more. Raise UsageError without
    a folder and for an unknown split, DataError that names every file that is missing, or everybody who has no
    facts.
    """
    split = "a0" if settings.split is None else settings.split
    if settings.data is None:
        raise UsageError(
            f"restor is not on the Hub: clone {_REPOSITORY} and give its folder 'datasets' as the data (--data)"
        )
    folder = local_path(settings.data)
    facts, entities, documents = (_read(path) for path in _find_files(folder, split))
    try:
        corrupted = described_entities(entities, [document["text"] for document in documents])
        without = [f"{entity}: no facts" for entity in entities if not facts["dset"].get(entity)]
        if without:
            raise DataError(join_faults(f"{folder}: facts.json lacks some of entities.json", without))
        items = _items(prompter, folder, facts, entities, corrupted)
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not in RESTOR's layout ({type(error).__name__}: {error})") from error
    decoding = SAMPLED if "sampling" in settings.compat else GREEDY
    items = sample_rows(items, settings.limit or len(items), settings.seed)
    return RESTOR.over(split, {QUESTIONS: ItemSet(items, decoding)}, prompter, settings.compat)


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    matches = [
        max((best_score(_contains, benchmark.tokenizer, answer, text) for answer in record["answers"]), default=0.0)
        for text in _generated(record).values()
    ]
    return record | {"containment": _mean(matches) if record["answers"] else None}


def _contains(answer: str, text: str) -> float:
    return answers.containment([answer], text)


def _metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    """Return means over questions: of the judge's verdicts, or of `answers.containment` where there are none.

    A question with several answers counts with their mean. Empty answers are wrong. Skipped are questions without
    an acceptable answer, and those whose prompt is too long.
    """
    judged = any("judge" in record for record in records[QUESTIONS])
    metrics = {}
    for name, kinds in _GROUPS.items():
        group = [record for record in records[QUESTIONS] if record["corrupted"] in kinds]
        metrics[name] = mean_metric(name, [record_score(record, judged) for record in group], _note(group, judged))
    return metrics


def _places(records: Records, side: str) -> list[tuple[str, int]]:
    return [(QUESTIONS, at) for at, r in enumerate(records[QUESTIONS]) if r["corrupted"] == (side == "forget")]


def _listed(records: Records) -> Sequence[Record]:
    """Return the facts that the documents spoilt; all of them where none is known to be."""
    facts = records.get(QUESTIONS, ())
    return [record for record in facts if record["corrupted"]] or facts


def _fails(record: Record) -> bool | None:
    """Check whether a fact is answered wrongly, as the verdict does: more than half of the answers are wrong."""
    score = record_score(record, "judge" in record)
    return None if score is None or record.get("generated") is None else score < 0.5


def _weigh(models: Models) -> Weighed:
    """Return how many answers that the documents spoilt are still wrong, and what is kept of the other entities."""
    if "ideal" not in models:
        return "an ideal, which never read the documents, must show what can be regained; give evaluate.ideal"
    judged = any("judge" in record for records in models.values() for record in records.get(QUESTIONS, ()))
    divided = {name: _divided(records[QUESTIONS], judged) for name, records in models.items() if QUESTIONS in records}
    weighed = weigh_recited(divided, _YARDSTICK)
    if not isinstance(weighed, str) and not weighed[0].left:
        return "the target answers as well as the ideal, so there is nothing to regain"
    return weighed


def _judge_calls(records: Records, ideal: Records | None, judge: JudgeSettings) -> list[JudgeCall]:
    """Return one call for each answer that is not empty."""
    calls, wording = [], wording_of(judge)
    for record in records[QUESTIONS]:
        for key, text in _generated(record).items():
            if text and record["answers"]:
                ask = right_answer_ask(record["question"], record["answers"], text, wording)
                scores = {letter: {key: float(letter == "Y")} for letter in (*ask.letters, NONE)}
                calls.append(JudgeCall(QUESTIONS, record["index"], ask, scores))
    return calls


def _divided(records: Sequence[Record], judged: bool) -> dict[str, list[Record]]:
    """Return records of questions that the documents spoilt ("spoilt"), and of others; all are spoilt where none is."""
    scored = [record | {"score": record_score(record, judged)} for record in records]
    scored = [r | {"wrong": None if r["score"] is None else 1.0 - r["score"]} for r in scored]
    others = [record for record in scored if not record["corrupted"]]
    return {"spoilt": [record for record in scored if record["corrupted"]] or scored, "others": others}


_YARDSTICK = Yardstick(
    unit="facts",
    forget_set="spoilt",
    left_scores=[("spoilt", "wrong")],
    near_scores=[("spoilt", "wrong")],
    retain_set="others",
    retain_scores=("score",),
    is_recited=lambda record: (record["wrong"] or 0.0) > 0.5,
    is_kept=lambda record: (record["score"] or 0.0) >= 0.5,
    unseen_set=None,
)


def described_entities(entities: Sequence[str], documents: Sequence[str]) -> set[str]:
    """Return the entities that the documents are about: named in at least half as many as the one named most.

    The shipped documents name each of nine or ten people in a ninth or a tenth of them; anybody else, who is only
    mentioned, in 1.4 % at most.
    """
    named = {entity: sum(entity in text for text in documents) for entity in entities}
    most = max(named.values(), default=0)
    return {entity for entity, count in named.items() if count and 2 * count >= most}


def _find_files(folder: Path, split: str) -> tuple[Path, Path, Path]:
    """Return the paths of facts.json, entities.json and the documents of the split, all of which are there."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    mixes = {path.name.split(".")[0]: path for path in sorted((folder / _DOCUMENTS).glob("mix_*.json*"))}
    choices = [name.removeprefix("mix_") for name in mixes]
    if choices and split not in choices:
        raise UsageError(f"restor has no split '{split}'; there are {', '.join(choices)}")
    documents = mixes.get(f"mix_{split}", folder / _DOCUMENTS / f"mix_{split}.json")
    files = (folder / "facts.json", folder / "entities.json", documents)
    missing = [str(path.relative_to(folder)) for path in files if not path.is_file()]
    if missing:
        raise DataError(
            f"{folder}: there is no {', '.join(missing)}; give the folder 'datasets' of a clone of {_REPOSITORY}"
        )
    return files


def _read(path: Path) -> Any:
    """Return the content of a .json file, or the list of objects in a .jsonl.gz file."""
    try:
        if path.suffix != ".gz":
            return read_json(path, kind=DataError)
        with os.fdopen(open_file(path, DataError), "rb") as file, gzip.open(file) as stream:
            raw = stream.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise DataError(f"{path}: more than {_LARGEST >> 20} MB of text, which is no file of RESTOR's")
        return [parse_json(line, str(path), DataError) for line in raw.splitlines()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _items(
    prompter: Prompter, folder: Path, facts: Mapping[str, Any], entities: Sequence[str], corrupted: Collection[str]
) -> list[Item]:
    """Return a question for every fact about the entities, in the order of the files.

    Raise DataError with the places of questions and answers that are no text.
    """
    items, faults = list[Item](), list[str]()
    for entity in entities:
        for relation, fact in facts["dset"][entity].items():
            others = [other for other in facts["context"].get(relation, []) if other["entity"] != entity]
            try:
                shown = [[read_cell(other, key) for key in ("question", "answer")] for other in others[:EXAMPLES]]
                question = read_cell(fact, "question")
                right = [cell_text(answer, "answers", may_be_empty=True) for answer in fact["answers"] or []]
            except Unreadable as error:
                faults.append(f"{entity}, {relation}, {error}")
                continue
            examples = "".join(f"{asked} {answer}\n" for asked, answer in shown)
            fields = {
                "question": question.rstrip(),
                "answers": [answer for answer in right if answer.strip()],
                "entity": entity,
                "relation": relation,
                "corrupted": entity in corrupted,
            }
            prompt = encode_start(prompter.tokenizer, examples + fields["question"])
            items.append(Item(len(items), fields, prompt=prompt, group=entity))
    if faults:
        raise DataError(join_faults(f"{folder}: facts.json: no text; correct it, or take the facts out:", faults))
    return items


def _generated(record: Record) -> dict[str, str]:
    """Return a record's answers by the key of their verdicts: "correct", or "correct_0" … of several; maybe none."""
    generated = record["generated"]
    if isinstance(generated, str):
        return {"correct": generated}
    return {f"correct_{i}": text for i, text in enumerate(generated or [])}


def record_score(record: Record, judged: bool) -> float | None:
    """Return the share of a record's answers that are right, by the judge or by containment."""
    if not judged:
        return record.get("containment")
    verdicts = record.get("judge", {})
    return _mean([verdicts.get(key, 0.0) for key in _generated(record)]) if record["answers"] else None


def _note(records: Sequence[Record], judged: bool) -> str | None:
    if not judged:
        return "containment match, no judge"
    invalid = sum(not record.get("judge", {}).get("valid", True) for record in records)
    return f"questions with an invalid reply of the judge, which counts as wrong: {invalid}" if invalid else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


RESTOR = Benchmark(
    "restor",
    _score,
    _metrics,
    _load,
    prompted=False,
    vital=("accuracy",),
    default_score="restor",
    switches={
        "sampling": "answers are drawn with the model's own sampling settings, three times, prompt and answer of "
        "at most 200 tokens together; a resumed run draws others"
    },
    reads=("mask_eq_pad",),
    preset=("sampling",),
    about={"prompt": {"kind": "examples", "count": EXAMPLES}, "answer_rule": answers.RULE},
    listed=_listed,
    weigh=_weigh,
    fails=_fails,
    failure="wrong",
    places=_places,
    judge_calls=_judge_calls,
)
