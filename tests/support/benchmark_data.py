"""Small data sets of MUSE-Books' and MUSE-News' layout, and what renders their prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import Prompter, Template
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine.forward import TokenScores
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.scores.records import token_record
from tests.support.models import tiny_tokenizer

MUSE_METRICS = {
    "extraction_strength", "exact_memorization", "verbmem_f", "knowmem_f", "knowmem_r", "min_k", "min_k_pp",
    "min_k_gap", "min_k_pp_gap", "privleak",
}  # fmt: skip
PLAIN = Template()
SHOTS = [{"question": f"Which is {i}?", "answer": f"Number {i}"} for i in range(10)]
ROWS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("verbmem", "forget"): [
        {"prompt": "There was a cat", "gt": "that sat over there."},
        {"prompt": "Where it was", "gt": "is where it is, there."},
    ],
    ("knowmem", "forget_qa"): [{"answer": "a cat", "question": "Who sat?"}, {"answer": "", "question": "Where?"}],
    ("knowmem", "forget_qa_icl"): SHOTS,
    ("knowmem", "retain_qa"): [{"answer": "over there", "question": "Where is it?"}],
    ("knowmem", "retain_qa_icl"): SHOTS[::-1],
    ("privleak", "forget"): [{"text": f"It is over there, {i} cats sat."} for i in range(4)],
    ("privleak", "holdout"): [{"text": f"No dog has run away on day {i}!"} for i in range(4)],
}
FOLDS = range(1, 5)
ARTICLES = [[{"text": f"Article {fold}.{i}: it was said that {i} cats sat there."} for i in range(2)] for fold in FOLDS]
NEWS: dict[tuple[str, str], list[dict[str, Any]]] = {
    **ROWS,
    **{("scal", f"forget_{fold}"): list(chain(*ARTICLES[:fold])) for fold in FOLDS},  # each holds the one before
    **{("sust", f"forget_{fold}"): ARTICLES[fold - 1] for fold in FOLDS},  # they share no row
    ("train", "forget"): list(chain(*ARTICLES)),
    ("train", "retain1"): [{"text": f"Nothing of it was said on day {i}."} for i in range(3)],
}
Rows = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def write_data(folder: Path, rows: Rows = ROWS) -> str:
    """A data set in Hub layout."""
    card = ["---", "configs:"]
    for configuration in dict.fromkeys(name for name, _ in rows):
        card += [f"- config_name: {configuration}", "  data_files:"]
        for split in (split for name, split in rows if name == configuration):
            card += [f"  - split: {split}", f"    path: {configuration}/{split}.jsonl"]
            (folder / configuration).mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in rows[configuration, split])
            (folder / configuration / f"{split}.jsonl").write_text(lines)
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return str(folder)


def make_prompter(chat: bool = False, template: Template = PLAIN) -> Prompter:
    return Prompter.build(tiny_tokenizer(chat), "default", template)


TofuRow = dict[str, Any]


def row(number: int, wrong: int, paraphrased: bool = True) -> TofuRow:
    """A question with its right answer, said twice, and some wrong ones."""
    found: TofuRow = {"question": f"Where is author {number}?", "answer": f"Author {number} is over there."}
    found["perturbed_answer"] = [f"It is {i} miles from author {number}." for i in range(wrong)]
    return found | ({"paraphrased_answer": f"Over there is author {number}."} if paraphrased else {})


TABLES: dict[str, list[TofuRow]] = {
    "forget01_perturbed": [row(i, 3) for i in range(4)],
    "retain_perturbed": [row(i, 2) for i in range(10, 13)],
    "real_authors_perturbed": [row(i, 2, False) for i in range(20, 22)],
    "world_facts_perturbed": [row(i, 1, False) for i in range(30, 33)],
    "holdout01": [{"question": f"Where was {i}?", "answer": f"It was {i} miles away."} for i in range(3)],
}
UTILITY = [f"{name}_{end}" for name in ("probability", "rouge_l", "truth_ratio") for end in ("r", "ra", "wf")]
TOFU_METRICS = {
    "probability_f", "rouge_l_f", "truth_ratio_f", "extraction_strength", "exact_memorization", "forget_quality",
    "model_utility", "model_utility_ra_wf", "acc_forget", "acc_recover", "acc_retain", *UTILITY,
}  # fmt: skip
MEMBERSHIP = {"min_k", "min_k_gap", "min_k_pp", "min_k_pp_gap"}


def write_tofu(folder: Path, tables: Mapping[str, Sequence[TofuRow]] = TABLES) -> str:
    """The data set in Hub layout."""
    return write_data(folder, {(name, "train"): rows for name, rows in tables.items()})


def make_tofu(folder: Path, tables: Mapping[str, Sequence[TofuRow]] = TABLES, **options: Any) -> Benchmark:
    """The benchmark over such a data set, forget01."""
    return TOFU.load(make_prompter(), BenchmarkSettings(write_tofu(folder, tables), "forget01", **options))


def token_scores(chances: Sequence[float], right: str = "", es_floor: bool = False) -> Record:
    """A text's scores from its tokens' probabilities, the end token's last. right: "1" for each token that the argmax
    is, "0" for others."""
    matches = np.array([sign == "1" for sign in right or "0" * len(chances)], bool)
    log_probs = np.log(np.array(chances, np.float64))
    return token_record(TokenScores(log_probs, matches, log_probs), True, es_floor)


def made_up(
    tofu: Benchmark,
    set_name: str,
    index: int,
    generated: str | None = "",
    **texts: Sequence[Record],
) -> Record:
    """The record of an item whose texts have the given scores, complete."""
    fields = tofu.sets[set_name].items[index].fields
    scores = {name: list(found) for name, found in texts.items()}
    return tofu.score(tofu, set_name, {"index": index, **fields, "scores": scores, "generated": generated})


def shortened(tofu: Benchmark, tokens: int = 6) -> Benchmark:
    """The same with answers of a few tokens, which tests wait for less long."""
    sets = {
        name: replace(part, decoding=Decoding(tokens)) if part.decoding else part for name, part in tofu.sets.items()
    }
    return replace(tofu, sets=sets)
