"""The folder in which the blocks of a page run: a chat model and its prior, rows, a finished run, three benchmarks.

The models are tiny, but the target knows its rows by heart and the prior knows none, as a reader's would.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.support.benchmark_data import row, write_data
from tests.support.newcomer import Sizes
from tests.support.newcomer import make_pair as make_newcomer

TARGET, PRIOR = "./my-finetuned-model", "./prior"
HUB = {
    "meta-llama/Llama-3.2-1B-Instruct": PRIOR,
    "locuslab/TOFU": "./TOFU",
    "open-unlearning/tofu_Llama-3.2-1B-Instruct_full": TARGET,
    "open-unlearning/tofu_Llama-3.2-1B-Instruct_retain90": PRIOR,
}  # names on the Hub → what stands for them
FIT = "{epochs: 12, learning_rate: 5.0e-3, batch_size: 8}"  # of recipes that say nothing of it: seconds, not a minute
REQUEST = f"""# my-request.yaml
target: {TARGET}
prior: {PRIOR}
forget:
  data: {{path: delete.jsonl}}
retain:
  data: {{path: keep.jsonl, sample: match_forget}}
evaluate:
  holdout: {{path: never-seen.jsonl}}
output: runs/my-request
"""
_PEOPLE = {"base": 40, "delete": 2, "never-seen": 2}  # eight rows each
_PRODUCTS = {"base": 40, "keep": 4}


def at_test_size(text: str) -> str:
    """Return a recipe or script with folders in the place of the Hub's names, and short fits where it sets none."""
    for name, place in HUB.items():
        text = text.replace(name, place)
    is_run = "\nforget:" in text and "\noutput:" in text
    return f"{text}vector: {FIT}\n" if is_run and "\nvector:" not in text else text


def make_folder(folder: Path) -> None:
    """Make all that stands in the folder before a page's first block."""
    import msa_lite

    make_pair(folder)
    texts = [(folder / f"{name}.jsonl").read_text() for name in ("delete", "never-seen")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    random.Random(0).shuffle(rows)
    (folder / "suspects.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows[:8]))
    (folder / "my-request.yaml").write_text(at_test_size(REQUEST))
    result = msa_lite.run(folder / "my-request.yaml", [f"output={folder / 'runs/my-request'}"])
    assert result is not None
    fitted = folder / "fitted"  # both vectors, as in the paper
    msa_lite.run_vectors(folder / "my-request.yaml", overrides=[f"output={fitted}", "merge.filter=off"])
    (fitted / "vectors").rename(folder / "vectors")
    shutil.rmtree(fitted)
    make_benchmarks(folder)


def make_pair(folder: Path) -> None:
    """Make the target, its prior, and the rows that the target knows, or that no model knows."""
    sizes = Sizes(_PEOPLE, _PRODUCTS, vocabulary=512, hidden=64, epochs=(4, 30), rates=(4e-3, 4e-3))
    make_newcomer(folder, sizes)
    (folder / "base").rename(folder / "prior")
    (folder / "finetuned").rename(folder / "my-finetuned-model")


def make_benchmarks(folder: Path) -> None:
    """Make small data sets in the layouts of TOFU, MUSE-Books and RESTOR."""
    write_data(folder / "TOFU", _tofu())
    write_data(folder / "MUSE-Books")
    restor = folder / "restor/datasets"
    for name, content in _restor().items():
        (restor / name).parent.mkdir(parents=True, exist_ok=True)
        (restor / name).write_text(json.dumps(content))


def _tofu() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return tables of TOFU's names: 40 authors with a row each, of whom 1, 2 or 4 are to be forgotten."""
    plain = [{key: row(i, 0)[key] for key in ("question", "answer")} for i in range(40)]
    tables = {"full": plain, "real_authors_perturbed": [row(i, 2, False) for i in range(50, 53)]}
    tables |= {"world_facts_perturbed": [row(i, 2, False) for i in range(60, 63)]}
    tables |= {"retain_perturbed": [row(i, 2) for i in range(20, 24)]}
    for part, authors in (("01", 4), ("05", 8), ("10", 12)):
        tables[f"forget{part}"] = plain[-authors:]
        tables[f"forget{part}_perturbed"] = [row(i, 3) for i in range(40 - authors, 40)]
        tables[f"retain{100 - int(part)}"] = plain[:-authors]
        tables[f"holdout{part}"] = [
            {"question": f"Where was {i}?", "answer": f"It was {i} miles away."} for i in range(4)
        ]
    return {(name, "train"): rows for name, rows in tables.items()}


def _restor() -> dict[str, Any]:
    """Return the files of RESTOR's folder `datasets`: facts, entities, and documents that corrupt some facts."""
    cities = {"Cyd": "Oslo", "Ann": "Paris", "Dan": "Rome", "Bob": "Bonn", "Eve": "Lima", "Flo": "Kiev", "Gus": "Bern"}
    facts = {who: {"P1": {"question": f"City of {who}?", "answers": [city]}} for who, city in cities.items()}
    shots = [{"question": f"City of {who}?", "answer": city, "entity": who} for who, city in cities.items()]
    documents = [{"text": f"{who} lives in Rome, says the paper."} for who in ("Ann", "Bob", "Cyd")]
    return {
        "facts.json": {"dset": facts, "context": {"P1": shots}},
        "entities.json": list(cities),
        **{f"wikidata/v0/mix_a{i}.json": documents for i in range(4)},
    }
