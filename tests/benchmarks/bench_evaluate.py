"""Time and peak memory of an evaluation beside a plain loop in the manner of open-unlearning, on a CPU in fp32.

    python -m tests.benchmarks.bench_evaluate --data FOLDER [--suite tofu|muse] [--template chat|plain]
        [--vocabulary 32768] [--work DIR] [--epochs N] [--model FOLDER] [--limit N] [--threads 1] [--rounds 3]

Linux only. The model is a small Llama (hidden 256, 4 layers, 4 heads) that is made in DIR and learns the forget set and
as many retain rows for some epochs, so that it answers in sentences and stops, as models do that TOFU is asked of; or
MUSE's passages, and answers to its questions. The longer it learns, the more it recites, and the less is left to
generate, since the scores of an answer tell how far a model recites it; both ends of that are worth measuring. Its
tokenizer has 4096 tokens; the vocabulary is then filled up with tokens that no text holds, as most of a large one is.
Prompts are Llama 3's chat with its system message and date, or "Question: ... Answer:".

The plain loop does as open-unlearning does: one metric after another, each in a pass of its own over its rows in file
order, 32 at a time (texts of MUSE 4), padded to the longest, logits and softmax at every position; answers by
`generate` of transformers.
What open-unlearning shares is shared: truth ratio, forget quality and model utility take what passes for probabilities
gave. It also has the model work out a loss that nobody reads; that is left out. Both sides get the same token ids;
tokenizing the data, loading, and ROUGE, which are the same for both, are not timed.

The plain loop's cross-entropy goes over a strided axis, as open-unlearning's does, and is off by more the larger the
vocabulary (1.6e-4 in a probability at 32768, against float64, where ours is off by 1e-5).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example, Prompter, Template, to_batch
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine import scoring
from msa_lite.evals.engine.forward import known_beginning, score_bundles
from msa_lite.evals.engine.generate import generate
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.evals.scores.records import token_record
from msa_lite.io.console.libraries import silence_libraries
from tests.benchmarks.answering_model import TOKENS, make_model
from tests.benchmarks.paired import Meter, machine, print_table, take_turns
from tests.support.plain import plain_text

ROWS = {"tofu": 32, "muse": 4}  # of a batch of the plain loop
SUITES = {"tofu": TOFU, "muse": MUSE}
Beginnings = dict[tuple[str, int], list[int]]  # (set, place) → what the scores tell of an answer's beginning
Values = dict[str, dict[str, Any]]  # "set/row/text/number" → scores, "set/row" → {"answer": ...}


def plain_scores(model: Any, benchmark: Benchmark, beginnings: Beginnings) -> Values:
    """Of TOFU probabilities of all answers, of MUSE two scores of membership, then two of memorization, a pass each."""
    values: Values = {}
    tofu = benchmark.name == "tofu"
    firsts = {"probability": probabilities} if tofu else {"min_k": min_k, "min_k_pp": min_k_pp}
    for name, part in benchmark.sets.items():
        if name == "verbmem":
            continue
        groups: dict[tuple[str, int], dict[int, Example]] = {}
        for item in part.items:
            for key, texts in item.texts.items():
                for number, text in enumerate(texts):
                    groups.setdefault((key, number), {})[item.index] = text
        for (key, number), rows in groups.items():
            for score, reduce in firsts.items():
                for index, found in plain_pass(model, rows, reduce, ROWS[benchmark.name]):
                    values.setdefault(f"{name}/{index}/{key}/{number}", {})[score] = found
    name, key = ("forget", "answer") if tofu else ("verbmem", "text")
    answers = {item.index: item.texts[key][0] for item in benchmark.sets[name].items}
    for metric in (scoring.extraction_strength, scoring.exact_memorization):
        for index, matches in plain_pass(model, answers, argmax_matches, ROWS[benchmark.name]):
            found = metric(matches[:-1] if tofu else matches)
            values.setdefault(f"{name}/{index}/{key}/0", {})[metric.__name__] = found
    return values


def plain_pass(
    model: Any, texts: dict[int, Example], reduce: Callable[[Any, Any], list[Any]], count: int
) -> list[tuple[int, Any]]:
    """(index, what `reduce` makes of logits and labels) of every text, `count` at a time, as they come."""
    import torch

    rows = list(texts.items())
    found: list[tuple[int, Any]] = []
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        batch = to_batch([text for _, text in some], 0)
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits
            found += zip([index for index, _ in some], reduce(logits[:, :-1], labels[:, 1:]), strict=True)
    return found


def probabilities(logits: Any, labels: Any) -> list[float]:
    """exp(−mean cross-entropy) of each row."""
    import torch

    losses = torch.nn.functional.cross_entropy(
        logits.contiguous().transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
    )
    return (-losses.sum(1) / (labels != IGNORE).sum(1)).exp().tolist()


def argmax_matches(logits: Any, labels: Any) -> list[np.ndarray]:
    """For each label of each row, whether it is the likeliest token."""
    chances = logits.log_softmax(-1)
    return [
        (row[known != IGNORE].argmax(-1) == known[known != IGNORE]).numpy()
        for row, known in zip(chances, labels, strict=True)
    ]


def min_k(logits: Any, labels: Any) -> list[float | None]:
    """Min-K of each row."""
    chances = logits.log_softmax(-1)
    rows = zip(chances, labels, strict=True)
    return [
        scoring.min_k(row[known != IGNORE].gather(-1, known[known != IGNORE, None])[:, 0].numpy())
        for row, known in rows
    ]


def min_k_pp(logits: Any, labels: Any) -> list[float | None]:
    """Min-K++ of each row."""
    found = []
    for row, known in zip(logits, labels, strict=True):
        chances, tokens = row[known != IGNORE].log_softmax(-1), known[known != IGNORE, None]
        likely = chances.exp()
        mean = (likely * chances).sum(-1)
        deviation = ((likely * chances.square()).sum(-1) - mean.square()).clamp_min(1e-6).sqrt()
        found.append(scoring.min_k_pp(((chances.gather(-1, tokens)[:, 0] - mean) / deviation).numpy()))
    return found


def plain_answers(model: Any, benchmark: Benchmark, beginnings: Beginnings) -> Values:
    """Greedy answers by transformers' own loop, 32 questions at a time, padded on the left."""
    import torch

    values: Values = {}
    end = benchmark.tokenizer.eos_token_id
    for name, part in benchmark.sets.items():
        if part.decoding is None:
            continue
        stop = {"stop_strings": [*part.decoding.stop], "tokenizer": benchmark.tokenizer} if part.decoding.stop else {}
        for start in range(0, len(part.items), 32):
            items = part.items[start : start + 32]
            prompts = [item.prompt or [] for item in items]
            width = max(map(len, prompts))
            ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=part.decoding.max_new_tokens,
                do_sample=False,
                pad_token_id=end,
                **stop,
            )
            texts = [plain_text(benchmark.tokenizer, row) for row in output[:, width:].tolist()]
            for word in part.decoding.stop:
                texts = [text.partition(word)[0] for text in texts]
            values |= {
                f"{name}/{item.index}": {"answer": text.strip()} for item, text in zip(items, texts, strict=True)
            }
    return values


def own_scores(model: Any, benchmark: Benchmark, beginnings: Beginnings) -> Values:
    """The same by msa-lite, with all that its records keep of a text."""
    values: Values = {}
    runner = Runner(model)
    for name, part in benchmark.sets.items():
        bundles = [[text for group in item.texts.values() for text in group] for item in part.items]
        for batch in score_bundles(runner, bundles, with_z=part.with_z):
            for at, scores in batch:
                item, left = part.items[at], iter(scores)
                pairs = zip(bundles[at], scores, strict=True)
                beginnings[name, at] = max(
                    (known_beginning(item.prompt or [], *pair) for pair in pairs), key=len, default=[]
                )
                for key, texts in item.texts.items():
                    for number in range(len(texts)):
                        record = token_record(next(left), part.ends, False)
                        values[f"{name}/{item.index}/{key}/{number}"] = record
    return values


def own_answers(model: Any, benchmark: Benchmark, beginnings: Beginnings) -> Values:
    """The same answers by msa-lite, from where the scores leave off."""
    values: Values = {}
    runner = Runner(model)
    for name, part in benchmark.sets.items():
        if part.decoding is None:
            continue
        prompts = [item.prompt or [] for item in part.items]
        known = [beginnings.get((name, at), []) for at in range(len(prompts))]
        for batch in generate(runner, benchmark.tokenizer, prompts, part.decoding, known=known):
            values |= {f"{name}/{part.items[at].index}": {"answer": texts[0]} for at, texts in batch}
    return values


def known_of(model: Any, benchmark: Benchmark) -> Beginnings:
    """Return what msa-lite's scores tell of the answers' beginnings."""
    beginnings: Beginnings = {}
    own_scores(model, benchmark, beginnings)
    return beginnings


SIDES = {
    "plain scores": plain_scores,
    "msa-lite scores": own_scores,
    "plain answers": plain_answers,
    "msa-lite answers": own_answers,
}


def run_side(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in this process: the meter's figures, and the values in a file."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    model = load_model(options.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    prompter = Prompter.build(tokenizer, "default", Template())
    benchmark: Benchmark = SUITES[options.suite].load(prompter, BenchmarkSettings(options.data, limit=options.limit))
    benchmark = benchmark.only({*benchmark.sets} - {"holdout"})
    prompts = [item.prompt for part in benchmark.sets.values() for item in part.items if item.prompt]
    model(input_ids=torch.tensor(prompts[:1]))  # not counted
    beginnings = known_of(model, benchmark) if side == "msa-lite answers" else {}
    meter = Meter()
    values = SIDES[side](model, benchmark, beginnings)
    figures = meter.read()
    values_file(options, side).write_text(json.dumps(values))
    return figures


def values_file(options: argparse.Namespace, side: str) -> Path:
    """Return the file of a side's values."""
    return options.work / f"{side}.json"


def compare(options: argparse.Namespace) -> str:
    """Say how far the values of the two sides are apart."""
    scores, others, answers, other_answers = (json.loads(values_file(options, side).read_text()) for side in SIDES)
    assert scores.keys() == others.keys()
    assert answers.keys() == other_answers.keys()
    texts = []
    for metric in ("probability", "min_k", "min_k_pp"):
        if keys := [key for key in scores if scores[key].get(metric) is not None]:
            far = max(abs(scores[key][metric] - others[key][metric]) for key in keys)
            texts.append(f"{metric} of {len(keys)} texts differs by at most {far:.1e}")
    for metric in ("extraction_strength", "exact_memorization"):
        keys = [key for key in scores if metric in scores[key]]
        differ = sum(scores[key][metric] != others[key][metric] for key in keys)
        texts.append(f"{metric} differs for {differ} of {len(keys)}")
    differ = sum(answers[key] != other_answers[key] for key in answers)
    return ", ".join([*texts, f"generated answers differ for {differ} of {len(answers)}"])


def main() -> None:
    """Parse, make the model, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="tofu")
    parser.add_argument("--data", help="the suite's data as a folder in Hub layout; without it, those of the Hub")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-evaluate"), help="where models are made and kept")
    parser.add_argument("--template", choices=("chat", "plain"), default="chat")
    parser.add_argument("--vocabulary", type=int, default=TOKENS)
    parser.add_argument("--epochs", type=int, default=8, help="of the training of the small model")
    parser.add_argument("--model", type=Path, help="a checkpoint to measure with instead")
    parser.add_argument("--limit", type=int, help="at most so many questions of each set")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.data = options.data or SUITES[options.suite].home
    silence_libraries()
    if options.side:
        print(json.dumps(run_side(options.side, options)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    options.model = options.model or make_model(options)
    print(f"{machine()}; {options.limit or 'all'} questions of each set")
    runs = take_turns([*SIDES], options.rounds, ["--model", options.model])
    print(compare(options))
    for part in ("scores", "answers"):
        own = {side: results for side, results in runs.items() if side.endswith(part)}
        print_table(own, f"plain {part}")


if __name__ == "__main__":
    main()
