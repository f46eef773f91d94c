"""Run a model over items and write a record of each; read them as rows and examples to show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.data import sample_rows
from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Benchmark, Item, ItemSet, Record, Records
from msa_lite.evals.forward import TokenScores, known_beginning, score_bundles
from msa_lite.evals.generate import generate
from msa_lite.evals.models import Runner, load_model
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import canonical_json, write_text
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.weights.hub import Source
from msa_lite.report.rows import ListedRow, RowList, SideBySide, sorted_rows


def collect_records(
    source: Source,
    benchmark: Benchmark,
    folder: Path,
    ranks: Ranks = Ranks(),
    label: str = "scores",
    progress: Progress = silent,
) -> dict[str, list[Record]]:
    """Run a model over every set of a benchmark. Return the records by set, in the order of the items.

    Write `SET.jsonl` into `folder`, which all processes share. Sets and items that are there already are not run
    again. Processes other than the first get no records.
    """
    names = [name for name in benchmark.sets if not (folder / f"{name}.jsonl").is_file()]
    if ranks.first:
        for name in benchmark.sets.keys() - set(names):  # a kill after the records were written leaves parts
            _remove_parts(folder, name)
    todo = {name: _Set.open(benchmark.sets[name], folder, name, ranks) for name in names}
    ranks.wait()  # nobody appends before everybody has read what is there
    total, done = sum(map(len, todo.values())), 0
    runner: Runner | None = None
    if total:
        progress(label, 0, total)  # loading the model may take minutes
    for work in todo.values():
        if len(work):
            if runner is None:
                runner = Runner(load_model(source.folder, added=source.added))
                source.check_unchanged()
            for count in work.run(runner, benchmark):
                done += count
                progress(label, done, total)
    if runner is not None:
        runner.close()
    ranks.wait()
    if not ranks.first:
        return {}
    for name in todo:
        write_records(folder / f"{name}.jsonl", _join(benchmark, name, list(_read_parts(folder, name))))
        _remove_parts(folder, name)
    return {name: read_records(folder / f"{name}.jsonl") for name in benchmark.sets}


def run_items(runner: Runner, benchmark: Benchmark, name: str) -> list[Record]:
    """Return the records of one set in the order of the items, without writing anything."""
    items = benchmark.sets[name]
    part = _Set(items, items.scored, items.answered, None)
    lines = list(part.lines(runner, benchmark))
    return _join(benchmark, name, [line for batch in lines for line in batch])


def take_rows(benchmark: Benchmark, name: str, records: Sequence[Record], folder: Path) -> None:
    """Write what a model said of the same rows elsewhere into a part file in `folder`, so that they are not run again.

    records: those of a set of this name, asked in the same way. Rows are the same if all their fields are. Only rows of
    benchmarks whose rows stand alone (`Benchmark.by_row`) may be taken.
    """
    part = benchmark.sets[name]
    if part.ends != any("text" not in record for record in records):  # other tokens are left out
        return
    known = {row_key(benchmark, record): record for record in records if "skipped" not in record}
    there = [{line["index"] for line in _read_parts(folder, name) if key in line} for key in ("scores", "generated")]
    lines = []
    for item in part.items:
        record = known.get(row_key(benchmark, item.fields), {})
        for key, asked, indices in zip(("scores", "generated"), (item.texts, item.prompt), there, strict=True):
            if asked and key in record and item.index not in indices:
                lines.append({"index": item.index, key: record[key]})
    if lines:
        with open(folder / f"{name}.taken.part", "a", encoding="utf-8") as stream:
            stream.write("\n" + "".join(json.dumps(line) + "\n" for line in lines))


def row_key(benchmark: Benchmark, fields: Mapping[str, Any]) -> str:
    """Return what tells the rows of a benchmark apart: their fields."""
    return canonical_json([fields.get(name) for name in sorted(benchmark.fields)])


def read_records(path: Path) -> list[Record]:
    """Return the records of a .jsonl file."""
    # Not splitlines: it also cuts at characters that answers may hold.
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write per-item records, one JSON object a line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records))


@dataclass(frozen=True)
class _Set:
    """The part of one set that this process has to run."""

    items: ItemSet
    """The whole set."""
    texts: Sequence[Item]
    """The items whose texts are not scored yet."""
    prompts: Sequence[Item]
    """The items whose prompts are not answered yet."""
    part: Path | None
    """The file that lines are appended to; None where nothing is written."""

    @classmethod
    def open(cls, items: ItemSet, folder: Path, name: str, ranks: Ranks) -> _Set:
        lines = list(_read_parts(folder, name))
        scored = {line["index"] for line in lines if "scores" in line}
        answered = {line["index"] for line in lines if "generated" in line}
        texts = [item for item in items.scored if item.index not in scored]
        prompts = [item for item in items.answered if item.index not in answered]
        # Dealt out by length, so that every process has the same amount of work.
        texts.sort(key=lambda item: -sum(len(text.ids) for group in item.texts.values() for text in group))
        prompts.sort(key=lambda item: -len(item.prompt or ()))
        share = slice(ranks.rank, None, ranks.count)
        return cls(items, texts[share], prompts[share], folder / f"{name}.{ranks.rank}.part")

    def __len__(self) -> int:
        """Count the texts and prompts that are left."""
        return len(self.texts) + len(self.prompts)

    def run(self, runner: Runner, benchmark: Benchmark) -> Iterator[int]:
        """Score and generate, and append to the part file. Yield the number of finished items, batch by batch."""
        assert self.part is not None
        with open(self.part, "a", encoding="utf-8") as stream:
            stream.write("\n")  # ends the half-written line of a killed process
            for batch in self.lines(runner, benchmark):
                stream.write("".join(json.dumps(line) + "\n" for line in batch))
                stream.flush()
                yield len(batch)

    def lines(self, runner: Runner, benchmark: Benchmark) -> Iterator[list[Record]]:
        """Yield batches of lines {index, scores} and {index, generated}.

        Scores go first: they tell how far the model recites a text, and so how its own answer begins.
        """
        known: dict[int, list[int]] = {}
        hidden = _hidden_token(benchmark)
        es_floor = "es_floor" in benchmark.compat
        drop_last = self.items.ends or "drop_last_token" in benchmark.compat
        window = runner.window or 1 << 60
        bundles = [[text for group in item.texts.values() for text in group] for item in self.texts]
        # The last token of a text is predicted, and never an input.
        fitting = [all(len(text.ids) - 1 <= window for text in bundle) for bundle in bundles]
        yield [_too_long(self.texts[i], "scores", {}, window) for i, fits in enumerate(fitting) if not fits]
        numbers = [i for i, fits in enumerate(fitting) if fits]
        for batch in score_bundles(runner, [bundles[i] for i in numbers], with_z=self.items.with_z, hidden=hidden):
            lines = []
            for at, scores in batch:
                item, token_scores = self.texts[numbers[at]], iter(scores)
                if item.prompt and hidden is None:
                    pairs = zip(bundles[numbers[at]], scores, strict=True)
                    beginnings = (known_beginning(item.prompt, *pair) for pair in pairs)
                    known[item.index] = max(beginnings, key=len, default=[])
                named = {
                    name: [token_record(next(token_scores), drop_last, es_floor) for _ in group]
                    for name, group in item.texts.items()
                }
                lines.append({"index": item.index, "scores": named})
            yield lines
        decoding = self.items.decoding
        if decoding is None or not self.prompts:
            return
        window = min(window, decoding.max_length or window)
        yield [_too_long(item, "generated", None, window) for item in self.prompts if len(item.prompt or ()) >= window]
        fitting_items = [item for item in self.prompts if len(item.prompt or ()) < window]
        prompts = [item.prompt or [] for item in fitting_items]
        starts = [known.get(item.index, []) for item in fitting_items]
        end = benchmark.prompter.end
        for generated in generate(runner, benchmark.tokenizer, prompts, decoding, known=starts, hidden=hidden, end=end):
            yield [
                {"index": fitting_items[at].index, "generated": answers if decoding.samples else answers[0]}
                for at, answers in generated
            ]


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


def _too_long(item: Item, key: str, value: Any, window: int) -> Record:
    return {"index": item.index, key: value, "skipped": f"longer than the {window} tokens that there is room for"}


def _read_parts(folder: Path, name: str) -> Iterator[Record]:
    for path in sorted(folder.glob(f"{name}.*.part")):
        for line in path.read_text("utf-8").split("\n"):
            with suppress(ValueError, RecursionError):  # blank, or cut off by a kill
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def _join(benchmark: Benchmark, name: str, lines: Sequence[Record]) -> list[Record]:
    """Return the records of a set, put together from their lines."""
    records: dict[int, Record] = {}
    for line in sorted(lines, key=lambda line: "generated" in line):  # so that a stop does not change the order of keys
        records.setdefault(line["index"], {}).update(line)
    joined = []
    for item in benchmark.sets[name].items:
        subject = {} if item.group is None else {"subject": item.group}
        record = {"index": item.index, **item.fields, **subject, **records.get(item.index, {})}
        joined.append(benchmark.complete(name, record))
    return joined


def _remove_parts(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}.*.part"):
        path.unlink()


def list_rows(benchmark: type[Benchmark], models: Mapping[str, Records], known: int = 0) -> RowList:
    """Return all rows to forget with the answers of target, unlearned model and ideal.

    models: records by set, by the name of the model; known: the rows to forget that there are,
    if that is known; those without a record are counted as `unscored`.
    """
    sides = {name: {record["index"]: record for record in benchmark.forget_records(r)} for name, r in models.items()}
    indices = list(dict.fromkeys(index for records in sides.values() for index in records))
    rows = [
        _row(benchmark, index, {name: records[index] for name, records in sides.items() if index in records})
        for index in indices
    ]
    return RowList(sorted_rows(rows), benchmark.wording, max(0, known - len(rows)))


def _row(benchmark: type[Benchmark], index: int, records: Mapping[str, Record]) -> ListedRow:
    first = next(iter(records.values()))
    text = first.get("text") or ""
    return ListedRow(
        index,
        first.get("question") or first.get("prompt") or "",
        _expected(first),
        text,
        {name: _answer(record) for name, record in records.items()},
        {name: benchmark.fails(record) for name, record in records.items()},
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


def pick_examples(
    benchmark: type[Benchmark], models: Mapping[str, Records], seed: int, count: int = COUNT
) -> list[SideBySide]:
    """Return a seeded sample of questions with the answers of target, unlearned model and ideal.

    Half of them are about the forget set; where one set has too few, the other makes up for it. models: records by set,
    by the name of the model. Texts are left out, since nothing is generated from them.
    """
    models = {name: models[name] for name in ("target", "unlearned", "ideal") if name in models}
    target, half, examples = models["target"], count // 2, []
    places = {
        side: [(name, at) for name, at in benchmark.places(target, side) if _answer(target[name][at]) is not None]
        for side in ("forget", "retain")
    }
    room = {"forget": max(half, count - len(places["retain"])), "retain": max(half, count - len(places["forget"]))}
    for side in places:
        for name, at in sample_rows(places[side], room[side], seed):
            answers = {model: _answer(sets[name][at], all_samples=False) or "" for model, sets in models.items()}
            record = target[name][at]
            examples.append(SideBySide(side, record["question"], _expected(record), answers))
    return examples
