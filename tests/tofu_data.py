"""A small data set of TOFU's layout, and records of it made up by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.evals.benchmark import BenchmarkSettings, Record, token_record
from msa_lite.evals.forward import TokenScores
from msa_lite.evals.generate import Decoding
from msa_lite.evals.tofu import Tofu
from tests.muse_data import make_prompter, write_data

Row = dict[str, Any]


def row(number: int, wrong: int, paraphrased: bool = True) -> Row:
    """A question with its right answer, said twice, and some wrong ones."""
    found: Row = {"question": f"Where is author {number}?", "answer": f"Author {number} is over there."}
    found["perturbed_answer"] = [f"It is {i} miles from author {number}." for i in range(wrong)]
    return found | ({"paraphrased_answer": f"Over there is author {number}."} if paraphrased else {})


TABLES: dict[str, list[Row]] = {
    "forget01_perturbed": [row(i, 3) for i in range(4)],
    "retain_perturbed": [row(i, 2) for i in range(10, 13)],
    "real_authors_perturbed": [row(i, 2, False) for i in range(20, 22)],
    "world_facts_perturbed": [row(i, 1, False) for i in range(30, 33)],
    "holdout01": [{"question": f"Where was {i}?", "answer": f"It was {i} miles away."} for i in range(3)],
}
UTILITY = [f"{name}_{end}" for name in ("probability", "rouge_l", "truth_ratio") for end in ("r", "ra", "wf")]
METRICS = {
    "probability_f", "rouge_l_f", "truth_ratio_f", "extraction_strength", "exact_memorization", "forget_quality",
    "model_utility", "model_utility_ra_wf", "acc_forget", "acc_recover", "acc_retain", *UTILITY,
}  # fmt: skip
MEMBERSHIP = {"min_k", "min_k_gap", "min_k_pp", "min_k_pp_gap"}


def write_tofu(folder: Path, tables: Mapping[str, Sequence[Row]] = TABLES) -> str:
    """The data set in Hub layout."""
    return write_data(folder, {(name, "train"): rows for name, rows in tables.items()})


def make_tofu(folder: Path, tables: Mapping[str, Sequence[Row]] = TABLES, **options: Any) -> Tofu:
    """The benchmark over such a data set, forget01."""
    return Tofu.load(make_prompter(), BenchmarkSettings(write_tofu(folder, tables), "forget01", **options))


def token_scores(chances: Sequence[float], right: str = "", es_floor: bool = False) -> Record:
    """A text's scores from its tokens' probabilities, the end token's last. right: "1" for each token that the argmax
    is, "0" for others."""
    matches = np.array([sign == "1" for sign in right or "0" * len(chances)], bool)
    log_probs = np.log(np.array(chances, np.float64))
    return token_record(TokenScores(log_probs, matches, log_probs), True, es_floor)


def made_up(
    tofu: Tofu,
    set_name: str,
    index: int,
    generated: str | None = "",
    **texts: Sequence[Record],
) -> Record:
    """The record of an item whose texts have the given scores, complete."""
    fields = tofu.sets[set_name].items[index].fields
    scores = {name: list(found) for name, found in texts.items()}
    return tofu.complete(set_name, {"index": index, **fields, "scores": scores, "generated": generated})


def shortened(tofu: Tofu, tokens: int = 6) -> Tofu:
    """The same with answers of a few tokens, which tests wait for less long."""
    sets = {
        name: replace(part, decoding=Decoding(tokens)) if part.decoding else part for name, part in tofu.sets.items()
    }
    return replace(tofu, sets=sets)
