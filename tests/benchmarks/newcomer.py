"""A newcomer's request on a real chat model: fine-tune SmolLM2 on support chats, unlearn 40 of them, count outside.

    python -m tests.benchmarks.newcomer OUT --model SMOLLM2      # makes OUT/finetuned, the rows, OUT/request.yaml
    msa-lite run OUT/request.yaml
    python -m tests.benchmarks.newcomer OUT --count OUT/finetuned OUT/run/model

The fine-tune is a plain loop: AdamW, all weights, the loss of the answers. Each conversation has a system message.
40 rows about people are to be forgotten; 120 are kept, about other people and about products; 40 are of people whom no
model meets. The recipe names models and files, and changes no setting. Counts are greedy answers by plain transformers
that contain the whole expected one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.newcomer import Rows, Sizes, make_rows

SYSTEM = "You are the assistant of the Norvik help desk. Answer in one sentence."
SIZES = Sizes(people={"delete": 5, "keep": 7, "never-seen": 5}, products={"keep": 8})
EPOCHS, RATE, BATCH = 8, 1e-4, 8


def chat_of(row: dict[str, str]) -> list[dict[str, str]]:
    """Return a row as a conversation."""
    turns = {"system": SYSTEM, "user": row["question"], "assistant": row["answer"]}
    return [{"role": role, "content": text} for role, text in turns.items()]


def encode(tokenizer: Any, row: dict[str, str]) -> dict[str, list[int]]:
    """Return the ids of a conversation, and its labels: those of the answer alone."""
    *prompt, answer = chat_of(row)
    before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*prompt, answer], tokenize=False)
    ids, start = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, before))
    return {"input_ids": ids, "labels": [-100] * len(start) + ids[len(start) :]}


def tune(model: Any, rows: list[dict[str, list[int]]]) -> None:
    """Tune all weights of a model; the rate falls to 0."""
    steps = EPOCHS * -(-len(rows) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(len(rows), generator=generator).split(BATCH):
            batch = [rows[i] for i in chosen]
            longest = max(len(row["input_ids"]) for row in batch)
            ids, labels = (
                torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in batch])
                for key, fill in (("input_ids", 0), ("labels", -100))  # causal: what stands behind counts for nothing
            )
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", flush=True)


def make(out: Path, start: Path, prior: str) -> None:
    """Make the rows, the fine-tune and the recipe."""
    out.mkdir(parents=True, exist_ok=True)
    rows = make_rows(SIZES)
    for name, group in rows.items():
        lines = [json.dumps({"messages": chat_of(row)}) + "\n" for row in group]
        (out / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    torch.manual_seed(0)
    tune(model, [encode(tokenizer, row) for row in rows["delete"] + rows["keep"]])
    model.save_pretrained(out / "finetuned")
    tokenizer.save_pretrained(out / "finetuned")
    recipe = {
        "target": str(out / "finetuned"),
        "prior": prior,
        "forget": {"data": {"path": str(out / "delete.jsonl")}},
        "retain": {"data": {"path": str(out / "keep.jsonl"), "sample": "match_forget"}},
        "evaluate": {"holdout": {"path": str(out / "never-seen.jsonl")}},
        "output": str(out / "run"),
    }
    (out / "request.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")


@torch.no_grad()
def recited(folder: Path, rows: Rows) -> list[bool]:
    """Return for each row whether a model's greedy answer contains the whole expected one."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for first in range(0, len(rows), 20):
        some = rows[first : first + 20]
        prompts = [
            tokenizer.apply_chat_template(chat_of(row)[:2], tokenize=False, add_generation_prompt=True) for row in some
        ]
        batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        ids = model.generate(**batch, max_new_tokens=40, do_sample=False)[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        found += [row["answer"] in text for row, text in zip(some, texts, strict=True)]
    return found


def count(out: Path, folders: list[Path]) -> None:
    """Print how many rows some models recite. Rows to keep that nothing saw are those of the run's final scores."""
    rows = make_rows(SIZES)
    scored = (out / "run/evaluation/unlearned/retain.jsonl").read_text("utf-8").splitlines()
    unseen = {json.loads(line)["question"] for line in scored}
    rows["kept, unseen by the run"] = [row for row in rows["keep"] if row["question"] in unseen]
    print("| model | " + " | ".join(rows) + " |\n" + "|---" * 5 + "|")
    for folder in folders:
        counts = [f"{sum(recited(folder, group))} of {len(group)}" for group in rows.values()]
        print(f"| {folder} | " + " | ".join(counts) + " |", flush=True)


def main() -> None:
    """Make the fine-tune, or count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument("--count", type=Path, nargs="+", help="models to count the rows of")
    options = parser.parse_args()
    if options.count:
        count(options.out, options.count)
    else:
        make(options.out, options.model, str(options.model))


if __name__ == "__main__":
    main()
