"""A sweep's points scored by workers on a Ray cluster, over as many machines as it has.

Workers meet in the sweep's folder, as processes on one machine do, so the recipe's paths have to be on a disk that all
machines share.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from msa_lite.choose.choice import Check, Crew
from msa_lite.errors import StageError, UsageError
from msa_lite.io.hub import explain
from msa_lite.pipeline.prepare import RunPlan
from msa_lite.pipeline.strengths import help_sweep
from msa_lite.recipe import Recipe


def ray_crew(recipe: Recipe, plan: RunPlan, workers: int) -> Crew:
    """So many workers, or one a GPU for 0, on the cluster of RAY_ADDRESS, or on this machine.

    A worker has a GPU where the cluster has any, and a core otherwise. Raises UsageError without the package.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray needs Ray: pip install 'msa-lite[ray]'")

    @contextmanager
    def crew(folder: Path) -> Iterator[Check]:
        import ray

        started = not ray.is_initialized()
        if started:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        running: list[Any] = []
        try:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            help_ray = ray.remote(_help).options(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)
            here = str(Path.cwd())
            given = recipe.model_dump(mode="json"), plan, here
            running += [help_ray.remote(*given) for _ in range(workers or gpus or 1)]

            def check() -> None:
                ended, _ = ray.wait(running, num_returns=len(running), timeout=0)
                _get(ended)

            with redirect_stdout(sys.stderr):  # where Ray's own warnings of workers belong; it prints them to stdout
                yield check
                _get(running)
        finally:
            for task in running:  # after an error they would wait for ever for what is to be scored
                ray.cancel(task, force=True)
            if started:
                ray.shutdown()

    def _get(tasks: list[Any]) -> None:
        import ray

        try:
            ray.get(tasks)
        except ray.exceptions.RayError as error:
            reason = explain(getattr(error, "cause", None) or error)  # what the worker has raised, unless it was killed
            raise StageError(f"a worker of the sweep failed ({reason}); points that are scored stay") from error

    return crew


def _help(recipe: dict[str, object], plan: RunPlan, folder: str) -> None:
    """What a worker does: paths of the recipe are seen from the folder that the command was given in."""
    os.chdir(folder)
    help_sweep(Recipe.model_validate(recipe), plan, opened=True)
