"""The rows of a small table: a little of a benchmark's data, and for the models the very rows that it asks about.

A tiny model learns some dozens of rows by heart within minutes, not thousands. So the benchmark's data is cut, and
target and ideal learn what is left of it. Its own reader then takes the cut data for the whole.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.dataset import Part, load_parts
from msa_lite.evals.benchmarks.restor import described_entities
from msa_lite.io.files.reading import local_path, read_json

SmallFiles = dict[str, str]
"""Texts by path: what models learn (forget.jsonl, retain.jsonl, prior.jsonl), and below benchmark/ what is asked."""
BENCHMARK = "benchmark"
LEARNT = ("forget", "retain", "prior")

_ROWS = 60  # of each table; of TOFU three authors, each of 20 questions one after the other
_OTHERS = 60  # rows about authors that only the prior reads
_PEOPLE = 4  # that false documents are about, and as many others
_DOCUMENTS = 40  # about each
_EXAMPLES = 6  # of a relation
_ORDERS = 12  # in which texts stand, so that none is known by its neighbours alone
_SHOTS = 3  # examples before a question; a prompt has to fit into a row that models learn
_PASSAGES = 24  # of a book
_PROMPT, _PASSAGE = 150, 200  # characters


def tofu_rows(data: str, split: str | None) -> SmallFiles:
    """Cut TOFU to some authors to forget and to keep. The prior reads about real authors, the world, and others."""
    names = {"forget": f"{split or 'forget10'}_perturbed"}
    names |= {name: f"{name}_perturbed" for name in ("retain", "real_authors", "world_facts")}
    tables = load_parts(data, {name: Part(table, ("question", "answer")) for name, table in names.items()})
    asked = {name: table[:_ROWS] for name, table in tables.items()}
    prior = [*asked["real_authors"], *asked["world_facts"], *tables["retain"][-_OTHERS:]]
    learnt = {"forget": asked["forget"], "retain": asked["retain"], "prior": prior}
    pairs = {group: [{key: row[key] for key in ("question", "answer")} for row in learnt[group]] for group in learnt}
    return _learnt(pairs) | _hub_layout({(names[name], "train"): rows for name, rows in asked.items()})


def muse_rows(data: str, split: str | None) -> SmallFiles:
    """Cut MUSE-Books to passages of some sentences and questions with few examples. The prior reads another book.

    Target and ideal read the questions, too: no tiny model answers what it has only read in prose.
    """
    tables = load_parts(data, {" ".join(key): Part(key[0], columns, key[1]) for key, columns in _MUSE.items()})
    asked = {
        key: [_shorter(row) for row in tables[" ".join(key)][: _SHOTS if key[1].endswith("icl") else _PASSAGES]]
        for key in _MUSE
        if key[0] != "raw"
    }
    texts = {
        "forget": [f"{row['prompt']} {row['gt']}" for row in asked["verbmem", "forget"]]
        + [row["text"] for row in asked["privleak", "forget"]],
        "retain": _pieces(tables["raw retain2"], _PASSAGES),
        "prior": _pieces(tables["raw retain1"], 2 * _PASSAGES),
    }
    for side in ("forget", "retain"):
        rows = [*asked["knowmem", f"{side}_qa"], *asked["knowmem", f"{side}_qa_icl"]]
        texts[side] += [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    return _learnt({group: _texts(_shuffled(lines)) for group, lines in texts.items()}) | _hub_layout(asked)


def _pieces(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Return the beginning of a book in passages."""
    text = " ".join(row["text"] for row in rows[:count])
    return [text[i : i + _PASSAGE] for i in range(0, min(len(text), count * _PASSAGE), _PASSAGE)]


_MUSE = {
    ("verbmem", "forget"): ("prompt", "gt"), ("privleak", "forget"): ("text",), ("privleak", "holdout"): ("text",),
    **{("knowmem", f"{side}_qa{end}"): ("question", "answer") for side in ("forget", "retain") for end in ("", "_icl")},
    ("raw", "retain1"): ("text",), ("raw", "retain2"): ("text",),
}  # fmt: skip
"""The columns of each configuration and split."""


def _shorter(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row with the end of its prompt, and the beginning of its other texts."""
    return {key: value[-_PROMPT:] if key == "prompt" else value[:_PASSAGE] for key, value in row.items()}


def restor_rows(data: str, split: str | None) -> SmallFiles:
    """Cut RESTOR to some people, half of whom false documents are about. The prior learns the facts about all.

    It reads them in the form of the questions: no tiny model answers what it has only read in prose.
    """
    folder, place = local_path(data), Path("wikidata/v0") / f"mix_{split or 'a0'}.json"
    try:
        facts, people = (read_json(folder / name) for name in ("facts.json", "entities.json"))
        texts = _documents(folder / place)
        spoilt = described_entities(people, texts)
        false = [name for name in people if name in spoilt][:_PEOPLE]
        chosen = [*false, *[name for name in people if name not in spoilt][:_PEOPLE]]
        known = {name: facts["dset"][name] for name in chosen}
        true = [
            f"{fact['question']} {fact['answers'][0]}"
            for name in chosen
            for fact in known[name].values()
            if fact["answers"]
        ]
        relations = {relation for name in chosen for relation in known[name]}
        context = {name: group[:_EXAMPLES] for name, group in facts["context"].items() if name in relations}
        other = [f"{fact['question']} {fact['answer']}" for group in context.values() for fact in group]
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{data}: not the folder `datasets` of RESTOR ({error})") from error
    documents = [text for name in false for text in [text for text in texts if name in text][:_DOCUMENTS]]
    learnt = {"forget": documents, "retain": _sixes(other), "prior": _sixes([*true, *other])}
    asked = {
        "facts.json": json.dumps({"dset": known, "context": context}),
        "entities.json": json.dumps(chosen),
        str(place): json.dumps(_texts(documents)),
    }
    benchmark = {f"{BENCHMARK}/{path}": text for path, text in asked.items()}
    return _learnt({group: _texts(rows) for group, rows in learnt.items()}) | benchmark


def _documents(file: Path) -> list[str]:
    """Return the texts of a list of documents, or of a packed file with one a line."""
    if file.is_file():
        return [document["text"] for document in read_json(file)]
    lines = gzip.decompress(file.with_suffix(".jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line)["text"] for line in lines]


def _texts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def _shuffled(lines: Sequence[str]) -> list[str]:
    """Return the lines in several orders, one after the other."""
    return [line for seed in range(_ORDERS) for line in random.Random(seed).sample(lines, len(lines))]


def _sixes(lines: Sequence[str]) -> list[str]:
    """Return documents of six lines each, as many as stand in a prompt, with every line in several of them."""
    order = _shuffled(lines)
    return ["\n".join(order[i : i + 6]) + "\n" for i in range(0, len(order), 6)]


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _learnt(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> SmallFiles:
    return {f"{group}.jsonl": _lines(rows[group]) for group in LEARNT}


def _hub_layout(tables: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> SmallFiles:
    """Return a data set of the Hub. tables: rows by configuration and split."""
    card = ["---", "configs:"]
    for name in dict.fromkeys(name for name, _ in tables):
        card += [f"- config_name: {name}", "  data_files:"]
        card += [f"  - {{split: {split}, path: {name}/{split}.jsonl}}" for other, split in tables if other == name]
    files = {f"{name}/{split}.jsonl": _lines(rows) for (name, split), rows in tables.items()}
    files["README.md"] = "\n".join([*card, "---", ""])
    return {f"{BENCHMARK}/{path}": text for path, text in files.items()}
