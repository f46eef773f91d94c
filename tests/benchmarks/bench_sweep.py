"""What a sweep over α and β costs beside scoring a plain model as often, and beside merged models on the disk.

    python -m tests.benchmarks.bench_sweep [--grid 3] [--questions 30] [--tokens 32] [--hidden 512] [--layers 8]
        [--vocabulary 8192] [--rank 32] [--rounds 3]

Linux only. The target is a Llama of random weights in bf16; the vectors are fp32 adapters on all linear layers. As many
questions as `--questions` of each set decide: their answers are scored, and answers of `--tokens` tokens generated,
since random weights hardly ever end one before. All sides score the target and grid × grid points:

    plain    the target again and again, with nothing set: the least that so many evaluations cost
    sweep    the choice as a run makes it: one loaded target, weights set for each point, reports, tables, pictures
    merge    msa-lite's merge to the disk for each point, loaded from there
    peft     add_weighted_adapter, merge_and_unload and save_pretrained for each point, loaded from there
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from msa_lite.demo import make_groups
from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.libraries import silence_libraries
from msa_lite.merger import merge
from msa_lite.pipeline.prepare.run import Context, Run, msa_scope, prepare
from msa_lite.pipeline.run.choice import choice_stages
from msa_lite.pipeline.run.scores import validation_of
from msa_lite.pipeline.stages.stage import execute
from msa_lite.recipe import Recipe
from tests.benchmarks.paired import Meter, machine, print_table, take_turns
from tests.support.models import save_adapter, save_checkpoint, tiny_model

SIDES = ("plain", "sweep", "merge", "peft")
VECTORS = ("forget", "retain")


def make_inputs(work: Path, options: argparse.Namespace) -> None:
    """Write rows, models and vectors."""
    for name, facts in make_groups(dict.fromkeys(VECTORS, -(-2 * options.questions // 6)), 0).items():
        lines = [json.dumps({"question": fact.question, "answer": fact.answer}) for fact in facts]
        (work / f"{name}.jsonl").write_text("\n".join(lines))
    shape = {"vocab_size": options.vocabulary, "hidden_size": options.hidden, "num_hidden_layers": options.layers,
             "intermediate_size": 4 * options.hidden, "num_attention_heads": options.hidden // 64}  # fmt: skip
    for seed, name in enumerate(("prior", "target")):
        save_checkpoint(work / name, tiny_model("llama", seed, **shape), "bfloat16")
    for seed, name in enumerate(VECTORS, 1):
        folder = work / "run/vectors" / name
        save_adapter(folder, tiny_model("llama", 0, **shape), seed, 0.003, r=options.rank, lora_alpha=options.rank)


def prepared(work: Path, options: argparse.Namespace) -> Run:
    """Return the run of a recipe that sweeps grid × grid points; half of its rows are for the choice."""
    strengths = [round((i + 1) / options.grid, 3) for i in range(options.grid)]
    recipe = {
        "verdict": False,
        "target": str(work / "target"),
        "prior": str(work / "prior"),
        "forget": {"data": {"path": str(work / "forget.jsonl")}, "alpha": strengths},
        "retain": {"data": {"path": str(work / "retain.jsonl")}, "beta": strengths},
        "evaluate": {"limit": 2 * options.questions, "max_new_tokens": options.tokens},
        "select": {"validation": 0.5},
        "output": str(work / "run"),
    }
    loaded = Recipe.model_validate(recipe)
    return prepare(loaded, msa_scope(loaded))


def merge_by_peft(target: Path, vectors: dict[str, str], alpha: float, beta: float, out: Path) -> None:
    """Merge as PEFT's manual has it, in the stored dtype."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target)
    model = PeftModel.from_pretrained(model, vectors["forget"], adapter_name="forget")
    model.load_adapter(vectors["retain"], adapter_name="retain")
    model.add_weighted_adapter([*VECTORS], [-alpha, beta], "both", combination_type="cat")
    model.merge_and_unload(adapter_names=["both"]).save_pretrained(out)


def run_side(side: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Score the target and all points in one way. Returns the meter's figures."""
    for name in ("sweep", "evaluation"):
        shutil.rmtree(work / "run" / name, ignore_errors=True)
    run = prepared(work, options)
    validation, target = validation_of(run), run.sources["target"].folder
    vectors = {name: str(run.vector_folder(name)) for name in VECTORS}

    def score(model: Any) -> None:
        shutil.rmtree(work / "scores", ignore_errors=True)
        validation.score_into(work / "scores", lambda: model)

    plain = load_model(target)
    score(plain)  # not counted: imports
    meter = Meter()
    if side == "sweep":
        execute(choice_stages(Context.of(run), ()), lambda label, done, total: None)
        return meter.read()
    score(plain)
    for point in run.recipe.points:
        if side == "plain":
            score(plain)
            continue
        shutil.rmtree(work / "out", ignore_errors=True)
        if side == "peft":
            merge_by_peft(target, vectors, point.alpha, point.beta, work / "out")
        else:
            merge(str(target), work / "out", **vectors, alpha=point.alpha, beta=point.beta)
        score(load_model(work / "out"))
    return meter.read()


def main() -> None:
    """Measure, or run one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"grid": 3, "questions": 30, "tokens": 32, "hidden": 512, "layers": 8, "vocabulary": 8192, "rank": 32}
    for name, value in (sizes | {"rounds": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    silence_libraries()
    logging.getLogger("msa_lite").setLevel(logging.ERROR)  # doubts about a choice among random weights
    if options.side:
        print(json.dumps(run_side(options.side, options.work, options)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), options)
        runs = take_turns(SIDES, options.rounds, ["--work", folder])
    print_table(runs, "plain")


if __name__ == "__main__":
    main()
