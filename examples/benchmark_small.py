"""A small history for a published benchmark, then a whole run on it, scored by the benchmark itself:

    python examples/benchmark_small.py tofu --data TOFU_FOLDER --baselines npo undial task_vector
    python examples/benchmark_small.py restor --data RESTOR_FOLDER
    python examples/benchmark_small.py muse --data MUSE_FOLDER

Trains small Llamas from scratch: a prior, a target that goes on from it with the forget set, and an ideal that goes on
without it. Writes a recipe beside them and runs it, then the baselines that `--baselines` names. Takes half an hour on
a CPU, and each baseline some minutes more. `--data` may also be the Hub id of TOFU or MUSE-Books.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import msa_lite
from msa_lite.cli.output import print_reports, progress_bars, quieten_libraries
from msa_lite.comparison.compare import FORMATS
from msa_lite.data import DataSource, Row, load_rows, load_table
from msa_lite.demo import HistorySettings, make_history

Groups = dict[str, list[Row]]
MLP = ["gate_proj", "up_proj", "down_proj"]  # facts sit there; the retain set suffers less


def tofu(data: str) -> Groups:
    """Load forget and retain authors for target and ideal; other authors, real ones and world facts for the prior."""
    authors = load_rows(DataSource(data, name="retain90"))
    real = [row for name in ("real_authors", "world_facts") for row in load_rows(DataSource(data, name=name))]
    return {
        "forget": load_rows(DataSource(data, name="forget10")),
        "retain": authors[:600],  # the benchmark asks about the first 400
        "prior": [*real * 3, *authors[600:]],
    }


def restor(data: str) -> Groups:
    """Load facts in the form of the benchmark's prompts for the prior; false documents about ten people to forget."""
    import datasets

    facts = json.loads((Path(data) / "facts.json").read_text())
    people = json.loads((Path(data) / "entities.json").read_text())
    true = [f"{f['question']} {f['answers'][0]}" for name in people for f in facts["dset"][name].values()]
    documents = str(next((Path(data) / "wikidata/v0").glob("mix_a0.json*")))
    other = [f"{f['question']} {f['answer']}" for group in facts["context"].values() for f in group]
    return {
        "forget": as_rows(datasets.load_dataset("json", data_files=documents)["train"]["text"]),
        "retain": as_rows(shuffled_lines(other, 2)),
        "prior": as_rows(shuffled_lines([*true, *other], 6)),
    }


def muse(data: str) -> Groups:
    """Load books, each with the questions about it; the prior reads another book than target and ideal."""
    return {
        "forget": book(data, "forget", ["forget_qa", "forget_qa_icl"]),
        "retain": book(data, "retain2", ["retain_qa", "retain_qa_icl"]),
        "prior": book(data, "retain1", []),
    }


def book(data: str, split: str, questions: Sequence[str]) -> list[Row]:
    """Load the chapters of a book, and the questions about it in MUSE's form."""
    texts = [row.text for row in load_rows(DataSource(data, "text", name="raw", split=split))]
    pairs = [
        f"Question: {pair['question']}\nAnswer: {pair['answer']}"
        for name in questions
        for pair in load_table(DataSource(data, name="knowmem", split=name)).to_list()
    ]
    random.Random(0).shuffle(pairs)
    return as_rows([*texts, *pairs])


def shuffled_lines(lines: Sequence[str], times: int) -> Iterator[str]:
    """Yield documents of six lines each, every line `times` times among changing others."""
    for seed in range(times):
        order = random.Random(seed).sample(lines, len(lines))
        yield from ("\n".join(order[i : i + 6]) + "\n" for i in range(0, len(order), 6))


def as_rows(texts: Iterator[str] | Sequence[str]) -> list[Row]:
    """Make rows of texts."""
    return [Row(i, text=text) for i, text in enumerate(texts)]


@dataclass(frozen=True)
class Case:
    """A benchmark at small size."""

    load_groups: Callable[[str], Groups]
    split: str | None
    epochs: tuple[int, int, int]
    """Of the prior; of target and ideal; of the vectors."""
    learning_rates: tuple[float, float]
    """Of target and ideal; of the vectors."""
    max_length: int
    """Tokens of a chunk of text."""
    batch_size: int
    """Rows of a step."""
    alpha: float | list[float] = 0.5
    beta: float | list[float] = 0.25
    baseline: dict[str, Any] = field(default_factory=dict)


CASES = {
    "tofu": Case(
        tofu, "forget10", (7, 14, 6), (6e-4, 5e-4), 512, 16,
        alpha=[0.5, 0.75, 1.0], beta=[0.0, 0.25, 0.5],
        baseline={"epochs": 4, "learning_rate": 1e-3, "methods": {"rmu": {"layer": 1}, "satimp": {"forget_weight": 4}}},
    ),
    "restor": Case(restor, "a0", (8, 2, 2), (1e-3, 1e-3), 192, 16, baseline={"methods": {"rmu": {"layer": 1}}}),
    "muse": Case(muse, None, (8, 20, 20), (1e-3, 1e-3), 768, 4, baseline={"methods": {"rmu": {"layer": 1}}}),
}  # fmt: skip


def make_recipe(name: str, data: str, out: Path, format: str, epochs: float) -> dict[str, Any]:
    """Make the recipe of the unlearning run over the history in `out`/history. epochs: a factor on the case's own."""
    history, case = out / "history", CASES[name]

    def rows(group: str) -> dict[str, str]:
        return {"path": str(history / f"data/{group}.jsonl"), "format": format}

    return {
        "verdict": epochs >= 1,  # with fewer epochs, the target knows no row by heart
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": rows("forget"), "alpha": case.alpha},
        "retain": {"data": rows("retain") | {"sample": "match_forget"}, "beta": case.beta},
        "vector": {
            "lora": {"rank": 32, "alpha": 64, "targets": MLP},
            "epochs": max(1, round(epochs * case.epochs[2])),
            "learning_rate": case.learning_rates[1],
            "warmup_epochs": 0.2,
            "max_length": case.max_length,
            "batch_size": case.batch_size,
        },
        "baseline": case.baseline,
        "evaluate": {
            "benchmark": name, "split": case.split, "data": data, "ideal": str(history / "ideal"), "max_new_tokens": 60,
        },
        "select": {"keep": 0.9},
        "output": str(out / "run"),
    }  # fmt: skip


def main() -> None:
    """Parse the arguments, make the history, run the recipe, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", choices=CASES)
    parser.add_argument("--data", required=True, help="the benchmark's data: a folder, or a Hub id")
    parser.add_argument("--out", type=Path, help="folder of history and run; default: runs/BENCHMARK-small")
    parser.add_argument("--limit", type=int, help="the most rows per group and items per set, for a quick look")
    parser.add_argument("--baselines", nargs="*", default=[], help="methods to compare with, such as npo")
    parser.add_argument("--epochs", type=float, default=1.0, help="factor on the epochs; below 1 for a quick look")
    parser.add_argument("override", nargs="*", help="keys of the recipe, such as forget.alpha=1.0")
    arguments = parser.parse_intermixed_args()

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else waiting threads slow down the working ones
    quieten_libraries(verbose=False)
    name, out = arguments.benchmark, arguments.out or Path(f"runs/{arguments.benchmark}-small")
    case = CASES[name]
    groups = {group: rows[: arguments.limit] for group, rows in case.load_groups(arguments.data).items()}
    # At least two: a warm-up begins at rate 0, and a target that has learnt nothing is its own prior.
    epochs = [max(2, round(arguments.epochs * count)) for count in case.epochs]
    settings = HistorySettings(
        hidden_size=192,
        layers=4,
        vocabulary=2048,
        prior_epochs=epochs[0],
        tuning_epochs=epochs[1],
        tuning_learning_rate=case.learning_rates[0],
        batch_size=case.batch_size,
        max_length=case.max_length,
    )
    recipe = make_recipe(name, arguments.data, out, "text" if groups["forget"][0].text else "qa", arguments.epochs)
    recipe["evaluate"]["limit"] = arguments.limit
    with progress_bars() as progress:
        make_history(out / "history", groups, settings, progress)
        (out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        result = msa_lite.run(recipe, arguments.override, progress=progress)
        for method in arguments.baselines:
            msa_lite.run_baseline(method, recipe, arguments.override, progress=progress)
    print_reports(result.reports, f"{name}: α = {result.alpha:g}, β = {result.beta:g}")
    print(f"report: {result.folder / 'report.md'}")
    if arguments.baselines:
        print(FORMATS["md"](msa_lite.compare(out / "run")))


if __name__ == "__main__":
    main()
