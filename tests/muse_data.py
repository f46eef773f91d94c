"""A small data set of MUSE-Books' layout, and what renders its prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, Template
from tests.conftest import tiny_tokenizer

METRICS = {
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
