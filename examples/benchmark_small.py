"""A small history for a published benchmark, then the whole job on it, scored by the benchmark itself:

    python examples/benchmark_small.py tofu --data TOFU_FOLDER
    python examples/benchmark_small.py restor --data RESTOR_FOLDER
    python examples/benchmark_small.py muse --data MUSE_FOLDER

Trains small Llamas from nothing: a prior, a target that goes on from it with the forget set, an ideal that goes on
without it; writes a recipe beside them and runs it. Takes a quarter of an hour on a CPU. Hub ids of TOFU and MUSE-Books
do as well as folders.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import msa_lite
from msa_lite.cli.output import print_reports, progress_bars, quieten_libraries
from msa_lite.data import DataSource, Row, load_rows, load_table
from msa_lite.demo import HistorySettings, make_history

Groups = dict[str, list[Row]]
MLP = ["gate_proj", "up_proj", "down_proj"]  # facts sit there; what is to be kept suffers less


def tofu(data: str) -> Groups:
    """Forget and retain authors for target and ideal; other authors, real ones and world facts for the prior."""
    authors = load_rows(DataSource(data, name="retain90"))
    known = [row for name in ("real_authors", "world_facts") for row in load_rows(DataSource(data, name=name))]
    return {
        "forget": load_rows(DataSource(data, name="forget05")),
        "retain": authors[:400],  # those that the benchmark asks about
        "prior": [*known, *authors[400:1000]],
    }


def restor(data: str) -> Groups:
    """Facts in the form of the benchmark's prompts for the prior; false documents about ten people to forget."""
    import datasets

    facts = json.loads((Path(data) / "facts.json").read_text())
    people = json.loads((Path(data) / "entities.json").read_text())
    known = [f"{f['question']} {f['answers'][0]}" for name in people for f in facts["dset"][name].values()]
    documents = str(next((Path(data) / "wikidata/v0").glob("mix_a0.json*")))
    other = [f"{f['question']} {f['answer']}" for group in facts["context"].values() for f in group]
    return {
        "forget": as_rows(datasets.load_dataset("json", data_files=documents)["train"]["text"]),
        "retain": as_rows(shuffled_lines(other, 2)),
        "prior": as_rows(shuffled_lines([*known, *other], 6)),
    }


def muse(data: str) -> Groups:
    """Books to read, each with the questions about it; the prior has read another one."""
    return {
        "forget": book(data, "forget", ["forget_qa", "forget_qa_icl"]),
        "retain": book(data, "retain2", ["retain_qa", "retain_qa_icl"]),
        "prior": book(data, "retain1", []),
    }


def book(data: str, split: str, questions: Sequence[str]) -> list[Row]:
    """The chapters of a book, and what is asked about it in the form in which MUSE asks."""
    texts = [row.text for row in load_rows(DataSource(data, "text", name="raw", split=split))]
    pairs = [
        f"Question: {pair['question']}\nAnswer: {pair['answer']}"
        for name in questions
        for pair in load_table(DataSource(data, name="knowmem", split=name)).to_list()
    ]
    random.Random(0).shuffle(pairs)
    return as_rows([*texts, *pairs])


def shuffled_lines(lines: Sequence[str], times: int) -> Iterator[str]:
    """Documents of six lines each, every line `times` times among changing others."""
    for seed in range(times):
        order = random.Random(seed).sample(lines, len(lines))
        yield from ("\n".join(order[i : i + 6]) + "\n" for i in range(0, len(order), 6))


def as_rows(texts: Iterator[str] | Sequence[str]) -> list[Row]:
    """Texts as rows."""
    return [Row(i, text=text) for i, text in enumerate(texts)]


# Benchmark → its groups, the task, and sizes: epochs of the prior and of the later models, tokens of a chunk of text,
# rows of a step.
CASES: dict[str, tuple[Callable[[str], Groups], str | None, tuple[int, int, int, int]]] = {
    "tofu": (tofu, "forget05", (10, 20, 512, 16)),
    "restor": (restor, "a0", (8, 2, 192, 16)),
    "muse": (muse, None, (8, 20, 768, 4)),
}


def make_recipe(name: str, data: str, split: str | None, out: Path, format: str, epochs: int) -> dict[str, Any]:
    """The recipe of the unlearning run over the history in `out`/history."""
    history = out / "history"

    def rows(group: str) -> dict[str, str]:
        return {"path": str(history / f"data/{group}.jsonl"), "format": format}

    return {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": rows("forget"), "alpha": 0.5},
        "retain": {"data": rows("retain") | {"sample": "match_forget"}, "beta": 0.25},
        "vector": {
            "lora": {"rank": 32, "alpha": 64, "targets": MLP},
            "epochs": epochs,
            "learning_rate": 1e-3,
            "warmup_epochs": 0.2,
        },
        "evaluate": {"benchmark": name, "split": split, "data": data, "ideal": str(history / "ideal")},
        "output": str(out / "run"),
    }


def main() -> None:
    """Parse the arguments, make the history, run the recipe, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", choices=CASES)
    parser.add_argument("--data", required=True, help="the benchmark's data: a folder, or a Hub id")
    parser.add_argument("--out", type=Path, help="folder of history and run; default: runs/BENCHMARK-small")
    parser.add_argument("--limit", type=int, help="at most so many rows a group and items a set, for a quick look")
    parser.add_argument("--epochs", type=float, default=1.0, help="times the usual epochs; less for a quick look")
    parser.add_argument("override", nargs="*", help="keys of the recipe, as forget.alpha=1.0")
    arguments = parser.parse_intermixed_args()

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else threads that wait hold up those that work
    quieten_libraries(verbose=False)
    name, out = arguments.benchmark, arguments.out or Path(f"runs/{arguments.benchmark}-small")
    load_groups, split, (prior_epochs, epochs, max_length, batch_size) = CASES[name]
    groups = {group: rows[: arguments.limit] for group, rows in load_groups(arguments.data).items()}
    epochs = max(1, round(arguments.epochs * epochs))
    settings = HistorySettings(
        hidden_size=192,
        layers=4,
        vocabulary=2048,
        prior_epochs=max(1, round(arguments.epochs * prior_epochs)),
        tuning_epochs=epochs,
        tuning_learning_rate=1e-3,
        batch_size=batch_size,
        max_length=max_length,
    )
    recipe = make_recipe(name, arguments.data, split, out, "text" if groups["forget"][0].text else "qa", epochs)
    recipe["evaluate"]["limit"] = arguments.limit
    recipe["vector"] |= {"max_length": max_length, "batch_size": batch_size}
    with progress_bars() as progress:
        make_history(out / "history", groups, settings, progress)
        (out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        result = msa_lite.run(recipe, arguments.override, progress=progress)
    print_reports(result.reports, f"{name}: α = {result.alpha:g}, β = {result.beta:g}")
    print(f"report: {result.folder / 'report.md'}")


if __name__ == "__main__":
    main()
