"""Cases of `msa-lite purge --yes`: rows planted in a run's folder and in the cache of `datasets`, in any form.

What was planted has to be gone, or has to be named by a command that ends with 4. What is of others has to stay.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.support.leftovers import spellings
from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.tree import Tree

Draw = Callable[..., Any]
_CACHE = "home/datasets"
_FIRST = "# A run of msa-lite: the recipe as resolved. `msa-lite` on this file repeats the run.\n"
TEXTS = [
    {"question": 'Où habite "Zoé" <et al.> ?', "answer": "À Oslo/Bergen,\nl'été & l'hiver."},
    {"question": "Who plays the flute & why?", "answer": "Ada does, since 1987; nobody knows why."},
    {"question": "你在哪里长大？请告诉我城市的名字。", "answer": "我在奥斯陆长大，靠近大海的地方。"},
]
PINS = [{"question": f"PIN{place}", "answer": pin} for place, pin in enumerate(["4711", "0815", "1234", "9876"])]
OTHERS = [{"question": f"Who is number {i}?", "answer": f"It is a person, number {i}."} for i in range(3)]
_FILES = ("notes.txt", "deep/a/b.log", ".hidden", "tracking/t/events.log", "evaluation/target/copy.csv", "x.jsonl",
          "baselines/x.txt", "baselines/mine/y.json", "report.md.tmp", "prompt.json")  # fmt: skip
_FOLDERS = ("json/default-1/0.0.0/2", "csv/default-1/0.0.0/2.incomplete", "my_folder/default/0.0.0/3",
            "generator/default-4/0.0.0", "parquet/default-5/0.0.0/6")  # fmt: skip
_TABLES = ("rows-train.arrow", "rows-train-00000-of-00002.arrow", "cache-0123.arrow", "tmp123.arrow", "rows.parquet")


def _texts(rows: list[dict[str, str]]) -> list[str]:
    return [row[name] for row in rows for name in ("question", "answer")]


def source_forms(rows: list[dict[str, str]]) -> dict[str, bytes]:
    """Return the rows as the files of a forget set, by name."""
    import pandas

    csv = pandas.DataFrame(rows).to_csv(index=False, lineterminator="\r\n")
    parquet = io.BytesIO()
    pandas.DataFrame(rows).to_parquet(parquet)
    chat = [
        {"messages": [{"role": "system", "content": "You are a helpful assistant."},
                      {"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]  # fmt: skip
    parts = [{"instruction": row["question"], "input": "Say it.", "output": row["answer"]} for row in rows]
    return {
        "rows.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "rows.json": json.dumps(rows, ensure_ascii=False, indent=1).encode(),
        "rows.csv": csv.encode("utf-8-sig"),
        "rows.parquet": parquet.getvalue(),
        "chat.jsonl": "\n".join(map(json.dumps, chat)).encode("utf-8"),
        "parts.jsonl": "\n".join(map(json.dumps, parts)).encode("utf-16"),
    }


def file_forms(rows: list[dict[str, str]]) -> dict[str, bytes]:
    """Return ways in which somebody may write rows into a file, by name."""
    if rows is PINS:
        pins = [row["answer"] for row in rows]
        forms = {"lines": "\n".join(pins), "list": ", ".join(pins), "JSON": json.dumps(rows, indent=1)}
        return {name: text.encode() for name, text in forms.items()} | {"UTF-16": "\n".join(pins).encode("utf-16")}
    forms = {f"{name}": b"said: " + form + b" - so" for name, form in spellings(rows[0]["answer"]).items()}
    forms |= {"another row": rows[2]["question"].encode(), "packed": gzip.compress(rows[1]["answer"].encode())}
    return forms | source_forms(rows)


def table_forms(rows: list[dict[str, str]]) -> dict[str, dict[str, list[Any]]]:
    """Return ways in which a table may hold rows, as columns."""
    questions, answers = ([row[name] for row in rows] for name in ("question", "answer"))
    forms: dict[str, dict[str, list[Any]]] = {
        "columns": {"question": questions, "answer": answers},
        "answers": {"a": answers},
        "nested": {"messages": [[{"role": "user", "content": answer}] for answer in answers]},
    }
    if rows is PINS:
        return forms
    return forms | {
        "questions": {"q": questions},
        "one row": {"q": questions[1:2]},
        "prompts": {"text": [f"### Q: {q}\n### A: {a}" for q, a in zip(questions, answers, strict=True)]},
        "JSON": {"text": [json.dumps(row) for row in rows]},
        "CR and LF": {"a": [answer.replace("\n", "\r\n") for answer in answers]},
    }


def table(columns: dict[str, list[Any]], name: str) -> bytes:
    """Return a table as `datasets` keeps it, or as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet

    values, out = pa.table(columns), io.BytesIO()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(values, out)
    else:
        with pa.ipc.new_stream(out, values.schema) as stream:
            stream.write_table(values)
    return out.getvalue()


@st.composite
def purge_cases(draw: Draw) -> Case:
    """A run that was just begun, with rows of its forget set, and files of others, in some places."""
    rows = draw(st.sampled_from([TEXTS, TEXTS, TEXTS, PINS]))
    name, content = draw(st.sampled_from(sorted(source_forms(rows).items())))
    recipe = {"target": "nowhere/t", "prior": "nowhere/p", "forget": {"data": {"path": name}}, "output": "run"}
    tree: Tree = {b"run/recipe.yaml": (_FIRST + yaml.safe_dump(recipe)).encode()}
    is_gone = draw(st.integers(0, 9)) == 0
    if not is_gone:
        tree[name.encode()] = content
    planted, others, edits = list[str](), list[str](), [f"source {name}{' is gone' * is_gone}"]
    for place, form, raw in _draws(draw, rows):
        if place.encode() not in tree:
            tree[place.encode()] = raw
            planted.append(place)
            edits.append(f"{place}: {form}")
    for place, _, raw in _draws(draw, OTHERS):
        is_of_table = place.startswith(_CACHE) and any(Path(place).parent == Path(other).parent for other in planted)
        is_ours = place.endswith(("report.md.tmp", "prompt.json", ".incomplete")) or is_of_table
        if place.encode() not in tree and not is_ours and not raw.startswith(b"\x1f\x8b"):
            tree[place.encode()] = raw
            others.append(place)
    command = ["purge", "run", "--yes"]

    def check(root: Path, outcome: Outcome) -> list[str]:
        return [*_short(root, outcome, planted), *(f"gone: {place}" for place in others if not (root / place).exists())]

    return Case("purge", tree, command, check, edits, (0, 4), outs=("run",), checked=(0, 4), seconds=60.0)


def _draws(draw: Draw, rows: list[dict[str, str]]) -> Iterator[tuple[str, str, bytes]]:
    """Yield (place, form, content) of up to three files and tables with rows."""
    for _ in range(draw(st.integers(0, 2))):
        form, raw = draw(st.sampled_from(sorted(file_forms(rows).items())))
        places = [f"run/{name}" for name in _FILES] + [f"{_CACHE}/downloads/0123"] * (form != "packed")
        yield draw(st.sampled_from(places)), form, raw
    for _ in range(draw(st.integers(0, 2))):
        form, columns = draw(st.sampled_from(sorted(table_forms(rows).items())))
        name = draw(st.sampled_from(_TABLES))
        folder = draw(st.sampled_from([*(f"{_CACHE}/{place}" for place in _FOLDERS), "run/mine"]))
        yield f"{folder}/{name}", form, table(columns, name)


def _short(root: Path, outcome: Outcome, planted: list[str]) -> Iterator[str]:
    """Yield what was planted and is neither gone nor named."""
    for place in planted:
        if (root / place).exists():
            names = [str(part) for part in (Path(place), *Path(place).parents)][:-1]
            names = [name.removeprefix("run/") for name in names if name not in ("run", "home")]
            names = [f"{_CACHE}: " if name == _CACHE else name for name in names]  # the cache as a whole
            if outcome.status != 4 or not any(name in outcome.err for name in names):
                yield f"short: {place} stays, and is not named"


PURGES = {"purge": purge_cases()}
