"""Say what a command on a recipe sends to other machines: rows to a judge, losses to a tracker, a model to the Hub."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from msa_lite.evals.benchmarks.benchmark import judged_rows
from msa_lite.evals.judge.server import find_server
from msa_lite.pipeline.prepare.run import Context
from msa_lite.train.fit.tracking import MLFLOW_ADDRESS


def going_out(context: Context, scores: bool, publishes: bool = False) -> list[str]:
    """Return a sentence for each place that gets something.

    scores: the command ends with the scores of the test rows. publishes: it ends with sending the model. Raise
    UsageError for an invalid address of a judge.
    """
    recipe, evaluate = context.recipe, context.recipe.evaluate
    told, server = [], find_server(evaluate.judge) if evaluate else None
    if evaluate and server and (scores or context.asks_judge):
        answers = [*context.scored] if scores else []
        answers += ["every candidate"] if context.asks_judge else []
        answers += ["the attack sample"] if scores and "sample" in recipe.attack.attacks else []
        run = context.prepared
        parts = [run.test if scores else None, run.validation if context.asks_judge else None] if run else []
        rows = judged_rows(evaluate.benchmark, parts, evaluate.limit)
        needs = "; only the recipe names it, so the run needs --accept" if server.needs_consent else ""
        told.append(server.gets(evaluate.judge.model_name, f"{rows}, the answers of {', '.join(answers)}") + needs)
    trackers = {"wandb": "Weights & Biases"}
    if (address := os.environ.get(MLFLOW_ADDRESS, "")) and not address.startswith(("file:", "sqlite:", "/")):
        trackers["mlflow"] = f"MLflow ({urlsplit(address).hostname or address})"
    gets = "gets losses, rates, scores and the name of the run, and no rows"
    told += [f"{place} {gets}" for name, place in trackers.items() if name in recipe.track]
    if publishes and recipe.publish.repo:
        readers = "only its owner can read it" if recipe.publish.private else "everybody can read it"
        told.append(f"the Hub gets the model as {recipe.publish.repo}; {readers}")
    return told
