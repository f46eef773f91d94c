"""Remove the influence of chosen training data from a finished language model by Model State Arithmetic (MSA).

θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), in one call: `msa_lite.run("recipe.yaml")`. What the command line can do,
these functions do in one call each.

    run             run a recipe: vectors, choice of α and β, merge, scores, report
    sweep           choose α and β on validation rows, and merge the best point
    run_vectors     fit only the vectors of a recipe
    run_moments     measure the inputs of a target's layers, for the filter of its forget vector
    run_baseline    run a method that MSA is compared with
    train_stages    train targets, ideals and the checkpoints before them, in stages
    table           make a table of the paper, or one's own: its models, its rows, the comparison
    init_recipe     write a commented recipe for the models and data of `Wishes`
    plan            predict memory, disk and time of a run or a training
    dry_run         tell what a command on a recipe would do, and write nothing
    probe           check whether a prior has already seen the forget set
    ask             ask target, unlearned model and ideal of a run the same question
    open_page       open a page of the browser to ask them in; its `serve()` answers
    attack          attack the models of a run: does it stay forgotten?
    purge           list and remove what still holds the data of a run
    report_run      write the report of a run, finished or not

    fit_vector      tune a prior on examples, as of a `DataSource`, to a vector
    merge           subtract a forget vector from a target and add a retain vector, without torch
    merge_adapters  the same as one LoRA adapter on the target
    filter_vector   keep what a vector changes on rows to forget, suppress what it changes on rows to keep
    mergekit_recipe print a merge as a recipe for mergekit
    evaluate        score a model on `OwnQuestions` or a `PublishedBenchmark`
    compare         put reports side by side, as in the paper
    push_folder     send a model or adapter to the Hugging Face Hub, by `PublishOptions`

    show_progress   show on stderr what the command line shows, for their argument `progress`

In a notebook they show bars without it, and tables of their results.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP threads that spin while they wait make training several times slower as soon as another process holds a core.
# torch reads the policy when it is loaded, so it is set here. It is the only variable that the package sets; a user's
# own value stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from msa_lite.comparison.compare import compare as compare
    from msa_lite.data import DataSource as DataSource
    from msa_lite.evals.scores.suite import OwnQuestions as OwnQuestions
    from msa_lite.evals.scores.suite import PublishedBenchmark as PublishedBenchmark
    from msa_lite.evals.scores.suite import evaluate as evaluate
    from msa_lite.io.console.display import show_progress as show_progress
    from msa_lite.merger import merge as merge
    from msa_lite.merger import merge_adapters as merge_adapters
    from msa_lite.merger import mergekit_recipe as mergekit_recipe
    from msa_lite.merger.filtering import filter_vector as filter_vector
    from msa_lite.pipeline.attack.run import attack as attack
    from msa_lite.pipeline.purge.purge import purge as purge
    from msa_lite.pipeline.run.checks import probe as probe
    from msa_lite.pipeline.run.report import report_run as report_run
    from msa_lite.pipeline.staged.training import train_stages as train_stages
    from msa_lite.pipeline.table.work import table as table
    from msa_lite.pipeline.verbs.ask import ask as ask
    from msa_lite.pipeline.verbs.commands import dry_run as dry_run
    from msa_lite.pipeline.verbs.commands import plan as plan
    from msa_lite.pipeline.verbs.init import Wishes as Wishes
    from msa_lite.pipeline.verbs.init import init_recipe as init_recipe
    from msa_lite.pipeline.verbs.run import run as run
    from msa_lite.pipeline.verbs.run import run_baseline as run_baseline
    from msa_lite.pipeline.verbs.run import run_moments as run_moments
    from msa_lite.pipeline.verbs.run import run_vectors as run_vectors
    from msa_lite.pipeline.verbs.run import sweep as sweep
    from msa_lite.publish.contents import PublishOptions as PublishOptions
    from msa_lite.publish.upload import push_folder as push_folder
    from msa_lite.train import fit_vector as fit_vector
    from msa_lite.web import open_page as open_page

    __version__: str

_HOMES = {
    "pipeline.verbs.run": ("run", "run_baseline", "run_moments", "run_vectors", "sweep"),
    "pipeline.verbs.commands": ("dry_run", "plan"),
    "pipeline.attack.run": ("attack",),
    "pipeline.staged.training": ("train_stages",),
    "pipeline.table.work": ("table",),
    "pipeline.run.checks": ("probe",),
    "pipeline.run.report": ("report_run",),
    "pipeline.verbs.init": ("Wishes", "init_recipe"),
    "pipeline.verbs.ask": ("ask",),
    "web": ("open_page",),
    "pipeline.purge.purge": ("purge",),
    "evals.scores.suite": ("OwnQuestions", "PublishedBenchmark", "evaluate"),
    "comparison.compare": ("compare",),
    "merger.filtering": ("filter_vector",),
    "merger": ("merge", "merge_adapters", "mergekit_recipe"),
    "publish.upload": ("push_folder",),
    "publish.contents": ("PublishOptions",),
    "train": ("fit_vector",),
    "data": ("DataSource",),
    "io.console.display": ("show_progress",),
}  # fmt: skip
"""The module that each public name is loaded from."""

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Load a public function when it is first used: importing msa_lite loads neither torch nor transformers."""
    import importlib
    import sys
    from importlib import metadata

    if name == "__version__":
        return metadata.version("msa-lite")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"msa_lite.{home}"), name)
            if "IPython" not in sys.modules:
                return value
            from msa_lite.io.console.display import for_notebooks

            return for_notebooks(value)
    raise AttributeError(f"module 'msa_lite' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
