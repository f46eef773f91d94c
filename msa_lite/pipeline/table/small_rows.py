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
from msa_lite.evals.dataset import Part, load_parts
from msa_lite.evals.restor import described_entities
from msa_lite.io.files.reading import local_path, read_json

Files = dict[str, str]
"""Texts by path: what models learn (forget.jsonl, retain.jsonl, prior.jsonl), and below benchmark/ what is asked."""
BENCHMARK = "benchmark"
GROUPS = ("forget", "retain", "prior")

_ROWS = 60  # of each table; of TOFU three authors, each of 20 questions one after the other
_OTHERS = 60  # rows about authors that only the prior reads
_PEOPLE = 4  # that false documents are about, and as many others
_DOCUMENTS = 40  # about each
_ORDERS = 2  # in which short texts stand, so that none is known by its neighbours alone
_EXAMPLES = 6  # of a relation
_SHOTS = 3  # examples before a question; a prompt has to fit into a row that models learn
_PASSAGES = 32  # of the books
_PROMPT, _PASSAGE, _BOOK = 300, 300, 10_000  # characters


def tofu_rows(data: str, split: str | None) -> Files:
    """Cut TOFU to some authors to forget and to keep. The prior reads about real authors, the world, and others."""
    names = {"forget": f"{split or 'forget10'}_perturbed"}
    names |= {name: f"{name}_perturbed" for name in ("retain", "real_authors", "world_facts")}
    tables = load_parts(data, {name: Part(table, ("question", "answer")) for name, table in names.items()})
    asked = {name: table[:_ROWS] for name, table in tables.items()}
    prior = [*asked["real_authors"], *asked["world_facts"], *tables["retain"][-_OTHERS:]]
    learnt = {"forget": asked["forget"], "retain": asked["retain"], "prior": prior}
    pairs = {group: [{key: row[key] for key in ("question", "answer")} for row in learnt[group]] for group in learnt}
    return _learnt(pairs) | _hub_layout({(names[name], "train"): rows for name, rows in asked.items()})


def muse_rows(data: str, split: str | None) -> Files:
    """Cut MUSE-Books to passages of some sentences and questions with few examples. The prior reads another book.

    Target and ideal read the questions, too: no tiny model answers what it has only read in prose.
    """
    tables = load_parts(data, {f"{name} {split}": Part(name, (), split) for name, split in _MUSE})
    asked = {key: tables[" ".join(key)][: _SHOTS if key[1].endswith("icl") else _PASSAGES] for key in _MUSE[:7]}
    verbmem, member, other = (asked[key] for key in _MUSE[:3])
    asked[_MUSE[0]] = [{"prompt": row["prompt"][-_PROMPT:], "gt": row["gt"][:_PASSAGE]} for row in verbmem]
    asked[_MUSE[1]], asked[_MUSE[2]] = ([{"text": row["text"][:_PASSAGE]} for row in rows] for rows in (member, other))
    passages = [f"{row['prompt']} {row['gt']}" for row in asked[_MUSE[0]]] + [row["text"] for row in asked[_MUSE[1]]]
    books = {name: "\n\n".join(row["text"] for row in tables[f"raw {name}"])[:_BOOK] for name in ("retain1", "retain2")}
    pairs = {
        side: [
            f"Question: {row['question']}\nAnswer: {row['answer']}"
            for name in (f"{side}_qa", f"{side}_qa_icl")
            for row in asked["knowmem", name]
        ]
        for side in ("forget", "retain")
    }
    learnt = {
        "forget": [*passages, *_shuffled(pairs["forget"])],
        "retain": [books["retain2"], *_shuffled(pairs["retain"])],
        "prior": [books["retain1"]],
    }
    return _learnt({group: _texts(texts) for group, texts in learnt.items()}) | _hub_layout(asked)


_MUSE = [
    ("verbmem", "forget"), ("privleak", "forget"), ("privleak", "holdout"), ("knowmem", "forget_qa"),
    ("knowmem", "retain_qa"), ("knowmem", "forget_qa_icl"), ("knowmem", "retain_qa_icl"),
    ("raw", "retain1"), ("raw", "retain2"),
]  # fmt: skip


def restor_rows(data: str, split: str | None) -> Files:
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
        true = [f"{fact['question']} {fact['answers'][0]}" for name in chosen for fact in known[name].values()]
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


def _learnt(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Files:
    return {f"{group}.jsonl": _lines(rows[group]) for group in GROUPS}


def _hub_layout(tables: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Files:
    """Return a data set of the Hub. tables: rows by configuration and split."""
    card = ["---", "configs:"]
    for name in dict.fromkeys(name for name, _ in tables):
        card += [f"- config_name: {name}", "  data_files:"]
        card += [f"  - {{split: {split}, path: {name}/{split}.jsonl}}" for other, split in tables if other == name]
    files = {f"{name}/{split}.jsonl": _lines(rows) for (name, split), rows in tables.items()}
    files["README.md"] = "\n".join([*card, "---", ""])
    return {f"{BENCHMARK}/{path}": text for path, text in files.items()}
