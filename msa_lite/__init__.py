"""msa-lite: remove the influence of chosen training data from a finished language model by Model State Arithmetic.

θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), in one call: `msa_lite.run("recipe.yaml")`.
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
    from msa_lite.evals.suite import evaluate as evaluate
    from msa_lite.io.console.display import show_progress as show_progress
    from msa_lite.merger import merge as merge
    from msa_lite.merger import merge_adapters as merge_adapters
    from msa_lite.merger import mergekit_recipe as mergekit_recipe
    from msa_lite.pipeline import Wishes as Wishes
    from msa_lite.pipeline import dry_run as dry_run
    from msa_lite.pipeline import init_recipe as init_recipe
    from msa_lite.pipeline import plan as plan
    from msa_lite.pipeline import report_run as report_run
    from msa_lite.pipeline import run as run
    from msa_lite.pipeline import run_baseline as run_baseline
    from msa_lite.pipeline import run_vectors as run_vectors
    from msa_lite.pipeline import sweep as sweep
    from msa_lite.pipeline import train_stages as train_stages
    from msa_lite.pipeline.ask import ask as ask
    from msa_lite.pipeline.attack.attack import attack as attack
    from msa_lite.pipeline.purge.purge import purge as purge
    from msa_lite.pipeline.run.probe import probe as probe
    from msa_lite.publish.contents import PublishOptions as PublishOptions
    from msa_lite.publish.upload import push_folder as push_folder
    from msa_lite.train import fit_vector as fit_vector

_HOMES = {
    "run": "pipeline",
    "run_baseline": "pipeline",
    "run_vectors": "pipeline",
    "sweep": "pipeline",
    "train_stages": "pipeline",
    "plan": "pipeline",
    "dry_run": "pipeline",
    "init_recipe": "pipeline",
    "Wishes": "pipeline",
    "probe": "pipeline",
    "ask": "pipeline",
    "attack": "pipeline",
    "purge": "pipeline",
    "report_run": "pipeline",
    "evaluate": "evals.suite",
    "compare": "comparison.compare",
    "merge": "merger",
    "merge_adapters": "merger",
    "mergekit_recipe": "merger",
    "push_folder": "publish.upload",
    "PublishOptions": "publish.contents",
    "fit_vector": "train",
    "DataSource": "data",
    "show_progress": "io.console.display",
}

__all__ = [
    "DataSource",
    "PublishOptions",
    "Wishes",
    "ask",
    "attack",
    "compare",
    "dry_run",
    "evaluate",
    "fit_vector",
    "init_recipe",
    "merge",
    "merge_adapters",
    "mergekit_recipe",
    "plan",
    "probe",
    "purge",
    "push_folder",
    "report_run",
    "run",
    "run_baseline",
    "run_vectors",
    "show_progress",
    "sweep",
    "train_stages",
]


def __getattr__(name: str) -> Any:
    """Load a public function when it is first used: importing msa_lite loads neither torch nor transformers."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'msa_lite' has no attribute '{name}'")
    return getattr(importlib.import_module(f"msa_lite.{_HOMES[name]}"), name)
