"""Ask a model about items, once each, and make a record of each; read records as rows and examples to show."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import sample_rows
from msa_lite.evals.benchmarks.benchmark import Benchmark, Item, ItemSet, Record, Records
from msa_lite.evals.engine import scoring
from msa_lite.evals.engine.forward import TokenScores, known_beginning, score_bundles
from msa_lite.evals.engine.generate import generate
from msa_lite.evals.engine.models import Runner, model_identity, open_runner
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.reading import read_text
from msa_lite.io.files.writing import digest, write_text
from msa_lite.io.finished.seal import check_read
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.weights.hub import Source
from msa_lite.report.run.rows import ListedRow, RowList, SideBySide, sorted_rows

ANSWERS_FILE = "answers.sqlite"
"""The file of a run with every answer and score that it has asked a model for. It holds rows."""


def open_answers(folder: Path, others: Sequence[Path] = ()) -> Cache:
    """Open what models were asked before, kept in a folder: each text's scores, and each prompt's answer.

    others: folders whose answers count, too.
    """
    files = [other / ANSWERS_FILE for other in others]
    return Cache(folder / ANSWERS_FILE, "remove the file; the models are then asked again", files)


def collect_records(
    source: Source,
    benchmark: Benchmark,
    answers: Cache,
    ranks: Ranks = Ranks(),
    label: str = "scores",
    progress: Progress = silent,
) -> dict[str, list[Record]]:
    """Ask a model everything that the answers lack, and add it to them. Return the records by set, in items' order.

    All processes share the answers; those other than the first get no records.
    """
    keys = _keys(model_identity(source), benchmark)
    kept = answers.read(keys.values())
    ranks.wait()  # nobody adds an answer before everybody has read what is there
    missing = set({key: asked for asked, key in keys.items() if key not in kept}.values())  # equal ones are asked once
    shares = {name: _share(benchmark.sets[name], name, missing, ranks) for name in benchmark.sets}
    total, done = sum(len(texts) + len(prompts) for texts, prompts in shares.values()), 0
    if total:
        progress(label, 0, total)  # loading the model may take minutes
        with open_runner(source) as runner:
            for name, (texts, prompts) in shares.items():
                for batch in _ask(runner, benchmark, benchmark.sets[name], texts, prompts):
                    answers.keep({keys[name, kind, index]: json.dumps(line) for kind, index, line in batch})
                    done += len(batch)
                    progress(label, done, total)
    else:
        progress(label, 1, 1)  # all was asked before
    ranks.wait()
    if not ranks.first:
        return {}
    values = answers.read(keys.values())
    lines = [(name, kind, index, json.loads(values[key])) for (name, kind, index), key in keys.items()]
    return {
        name: _join(benchmark, name, [(kind, index, line) for of, kind, index, line in lines if of == name])
        for name in benchmark.sets
    }


def run_items(runner: Runner, benchmark: Benchmark, name: str) -> list[Record]:
    """Return the records of one set in the order of the items, without writing anything."""
    items = benchmark.sets[name]
    batches = _ask(runner, benchmark, items, items.scored, items.answered)
    return _join(benchmark, name, [answer for batch in batches for answer in batch])


def read_records(path: Path) -> list[Record]:
    """Return the records of a .jsonl file. Raise FormatError where it is not as the manifest beside it says."""
    check_read(path)
    # Not splitlines: it also cuts at characters that answers may hold.
    return [json.loads(line) for line in read_text(path, _MOST).split("\n") if line]


def records_by_set(folder: Path) -> dict[str, list[Record]]:
    """Return the records of an evaluation by set."""
    return {path.stem: read_records(path) for path in sorted(folder.glob("*.jsonl"))}


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write per-item records, one JSON object a line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records))


_MOST = 4 << 30  # bytes of a set's records
_Kind = Literal["scores", "generated"]
_Answer = tuple[_Kind, int, Record]
"""The kind, the item's index, and what a record gets."""


def _keys(model: Mapping[str, Any], benchmark: Benchmark) -> dict[tuple[str, _Kind, int], str]:
    """Return the key of everything to ask a model, by set, kind and index: a hash of all that decides the answer."""
    keys: dict[tuple[str, _Kind, int], str] = {}
    for name, part in benchmark.sets.items():
        scored = digest([model, "scores", part.with_z, *_switches(benchmark, part)])
        for item in part.scored:
            texts = {key: [[text.ids, text.labels] for text in group] for key, group in item.texts.items()}
            keys[name, "scores", item.index] = digest([scored, texts])
        if part.decoding:
            kept = ["with special tokens"] if benchmark.has_special else []
            how = [asdict(part.decoding), benchmark.prompter.describe(), _hidden_token(benchmark), *kept]
            answered = digest([model, "generated", how])
            for item in part.answered:
                keys[name, "generated", item.index] = digest([answered, item.prompt])
    return keys


def _switches(benchmark: Benchmark, part: ItemSet) -> tuple[bool, bool, int | None]:
    """Return (the last token is left out, es_floor, the hidden token), which decide the scores of texts."""
    drop_last = (part.ends and benchmark.prompter.has_end) or "drop_last_token" in benchmark.compat
    return drop_last, "es_floor" in benchmark.compat, _hidden_token(benchmark)


def _share(
    part: ItemSet, name: str, missing: Collection[tuple[str, _Kind, int]], ranks: Ranks
) -> tuple[list[Item], list[Item]]:
    """Return the texts and the prompts that this process asks: dealt out by length, as much work for each process."""
    texts = [item for item in part.scored if (name, "scores", item.index) in missing]
    prompts = [item for item in part.answered if (name, "generated", item.index) in missing]
    texts.sort(key=lambda item: -sum(len(text.ids) for group in item.texts.values() for text in group))
    prompts.sort(key=lambda item: -len(item.prompt or ()))
    return texts[ranks.rank :: ranks.count], prompts[ranks.rank :: ranks.count]


def _ask(
    runner: Runner, benchmark: Benchmark, part: ItemSet, texts: Sequence[Item], prompts: Sequence[Item]
) -> Iterator[list[_Answer]]:
    """Yield batches of answers. Scores go first: they tell how far a model recites a text, so how its answer begins."""
    known: dict[int, list[int]] = {}
    drop_last, es_floor, hidden = _switches(benchmark, part)
    window = runner.window or 1 << 60
    bundles = [[text for group in item.texts.values() for text in group] for item in texts]
    yield [_too_long(item, "scores", {}, window) for item in texts if not item.can_be_scored(window)]
    numbers = [i for i, item in enumerate(texts) if item.can_be_scored(window)]
    for batch in score_bundles(runner, [bundles[i] for i in numbers], with_z=part.with_z, hidden=hidden):
        scored: list[_Answer] = []
        for at, scores in batch:
            item, token_scores = texts[numbers[at]], iter(scores)
            if item.prompt and hidden is None:
                pairs = zip(bundles[numbers[at]], scores, strict=True)
                beginnings = (known_beginning(item.prompt, *pair) for pair in pairs)
                known[item.index] = max(beginnings, key=len, default=[])
            named = {
                name: [token_record(next(token_scores), drop_last, es_floor) for _ in group]
                for name, group in item.texts.items()
            }
            scored.append(("scores", item.index, {"scores": named}))
        yield scored
    decoding = part.decoding
    if decoding is None or not prompts:
        return
    window = min(window, decoding.max_length or window)
    yield [_too_long(item, "generated", None, window) for item in prompts if not item.can_be_asked(window)]
    items = [item for item in prompts if item.can_be_asked(window)]
    asked, starts = [item.prompt or [] for item in items], [known.get(item.index, []) for item in items]
    prompter = benchmark.prompter
    how: dict[str, Any] = {"known": starts, "hidden": hidden, "end": prompter.end}
    for generated in generate(runner, benchmark.tokenizer, asked, decoding, **how):
        replies = [(items[at].index, [prompter.reply(text) for text in texts]) for at, texts in generated]
        yield [("generated", index, {"generated": texts if decoding.samples else texts[0]}) for index, texts in replies]


def token_record(scores: TokenScores, drop_last: bool, es_floor: bool) -> Record:
    """Return the part of a record about one text scored teacher-forced.

    n_tokens: the labelled tokens; `probability` and `loss` (mean −log p) cover them. With `drop_last`, the memorization
    scores leave out the last of them. Scores that are not defined are None.
    """
    cut = slice(None, -1 if drop_last else None)
    record = {
        "n_tokens": len(scores.log_probs),
        "loss": scoring.mean_loss(scores.log_probs),
        "probability": scoring.probability(scores.log_probs),
        "extraction_strength": scoring.extraction_strength(scores.matches[cut], es_floor),
        "exact_memorization": scoring.exact_memorization(scores.matches[cut]),
        "min_k": scoring.min_k(scores.log_probs[cut]),
    }
    return record if scores.z is None else record | {"min_k_pp": scoring.min_k_pp(scores.z[cut])}


def _hidden_token(benchmark: Benchmark) -> int | None:
    """Return the token that `mask_eq_pad` hides: the padding token, or the end token where there is none."""
    if "mask_eq_pad" not in benchmark.compat:
        return None
    tokenizer = benchmark.tokenizer
    padding: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None else padding


def _too_long(item: Item, kind: _Kind, value: Any, window: int) -> _Answer:
    return kind, item.index, {kind: value, "skipped": f"longer than the {window} tokens that there is room for"}


def _join(benchmark: Benchmark, name: str, answers: Sequence[_Answer]) -> list[Record]:
    """Return the records of a set, put together from the answers."""
    records: dict[int, Record] = {}
    for _, index, line in sorted(answers, key=lambda answer: answer[0] == "generated"):  # always in the same order
        records.setdefault(index, {}).update(line)
    joined = []
    for item in benchmark.sets[name].items:
        subject = {} if item.group is None else {"subject": item.group}
        record = {"index": item.index, **item.fields, **subject, **records.get(item.index, {})}
        joined.append(benchmark.score(benchmark, name, record))
    return joined


def list_rows(benchmark: Benchmark, models: Mapping[str, Records], known: int = 0) -> RowList:
    """Return all rows to forget, those to keep and the holdout, with what target, unlearned model and ideal answer.

    models: records by set, by the name of the model; known: the rows to forget that there are,
    if that is known; those without a record are counted as `unscored`.
    """
    listed = benchmark.listed or (lambda records: records.get(benchmark.forget_set, ()))
    rows = _rows({name: listed(records) for name, records in models.items()}, benchmark.fails)

    def loses(record: Record) -> bool | None:
        fails = benchmark.fails(record)
        return None if fails is None else fails == (benchmark.failure == "wrong")

    kept = {name: [s[part][at] for part, at in benchmark.places(s, "retain")] for name, s in models.items()}
    unseen = _rows({name: records.get("holdout", ()) for name, records in models.items()}, benchmark.fails)
    retain, left_out = sorted_rows(_rows(kept, loses)), max(0, known - len(rows))
    return RowList(sorted_rows(rows), benchmark.failure, left_out, retain, unseen)


def _rows(models: Records, fails: Callable[[Record], bool | None]) -> list[ListedRow]:
    """Return the rows of some records by model. fails: check whether a model fails on a row."""
    sides = {name: {record["index"]: record for record in records} for name, records in models.items()}
    indices = dict.fromkeys(index for records in sides.values() for index in records)
    return [
        _row(index, {name: side[index] for name, side in sides.items() if index in side}, fails) for index in indices
    ]


def _row(index: int, records: Mapping[str, Record], fails: Callable[[Record], bool | None]) -> ListedRow:
    first = next(iter(records.values()))
    text = first.get("text") or ""
    return ListedRow(
        index,
        first.get("question") or first.get("prompt") or "",
        _expected(first),
        text,
        {name: _answer(record) for name, record in records.items()},
        {name: fails(record) for name, record in records.items()},
        {name: record.get("exact_memorization") for name, record in records.items()} if text else {},
    )


def _expected(record: Record) -> str:
    return " / ".join(record["answers"]) if "answers" in record else record.get("answer") or record.get("gt") or ""


def _answer(record: Record, all_samples: bool = True) -> str | None:
    """Return what was generated; of several samples all in one text, or the first."""
    generated = record.get("generated")
    if generated is None or isinstance(generated, str):
        return generated
    return " / ".join(generated) if all_samples else (generated or [""])[0]


COUNT = 10


def pick_examples(benchmark: Benchmark, models: Mapping[str, Records], seed: int) -> list[SideBySide]:
    """Return a seeded sample of ten questions with the answers of target, unlearned model and ideal.

    Half of them are about the forget set; where one set has too few, the other makes up for it. models: records by set,
    by the name of the model. Texts are left out, since nothing is generated from them.
    """
    models = {name: models[name] for name in ("target", "unlearned", "ideal") if name in models}
    target, half, examples = models["target"], COUNT // 2, []
    places = {
        side: [(name, at) for name, at in benchmark.places(target, side) if _answer(target[name][at]) is not None]
        for side in ("forget", "retain")
    }
    room = {"forget": max(half, COUNT - len(places["retain"])), "retain": max(half, COUNT - len(places["forget"]))}
    for side in places:
        for name, at in sample_rows(places[side], room[side], seed):
            answers = {model: _answer(sets[name][at], all_samples=False) or "" for model, sets in models.items()}
            record = target[name][at]
            examples.append(SideBySide(side, record["question"], _expected(record), answers))
    return examples
