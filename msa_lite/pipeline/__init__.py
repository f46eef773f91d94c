"""The order of stages, from a recipe to scores and a report: the whole run of MSA, and that of a baseline.

This is the only part that knows both what a recipe is and what the stages are. Every stage skips itself when its folder
was made from the same inputs, so running a recipe again does only what is missing or has changed.
"""

from msa_lite.pipeline.ask import Answers, ask
from msa_lite.pipeline.attack.run import Attacked
from msa_lite.pipeline.init.draft import Draft, Wishes, init_recipe
from msa_lite.pipeline.purge.purge import Purge, purge
from msa_lite.pipeline.run.msa import merge_arguments
from msa_lite.pipeline.run.probe import ProbeResult, probe
from msa_lite.pipeline.run.report import report_run
from msa_lite.pipeline.staged.training import TrainingResult, train_stages
from msa_lite.pipeline.verbs.attack import attack, dry_attack
from msa_lite.pipeline.verbs.dry_run import DryRun, dry_evaluation, dry_run
from msa_lite.pipeline.verbs.plan import plan
from msa_lite.pipeline.verbs.run import RunResult, run_baseline, run_vectors, sweep
from msa_lite.pipeline.verbs.run import run_recipe as run

__all__ = [
    "Answers",
    "Attacked",
    "Draft",
    "DryRun",
    "ProbeResult",
    "Purge",
    "RunResult",
    "TrainingResult",
    "Wishes",
    "ask",
    "attack",
    "dry_attack",
    "dry_evaluation",
    "dry_run",
    "init_recipe",
    "merge_arguments",
    "plan",
    "probe",
    "purge",
    "report_run",
    "run",
    "run_baseline",
    "run_vectors",
    "sweep",
    "train_stages",
]
