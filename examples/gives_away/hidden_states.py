"""Test by hidden states whether an unlearned model is nearer to a model that never saw the rows, or to the target.

The test is that of the evidence `nearer` (`msa_lite.evidence.nearer`), by another feature: the outputs of four layers,
at a quarter, half, three quarters and the end of the model, each the mean over the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import Example
from msa_lite.evals.engine.hidden_states import group_texts, predicting_places, read_states
from msa_lite.evals.engine.models import Runner
from msa_lite.evidence.nearer import RelativeTest, measure_distances, relative_test_of

DEPTHS = 4  # layers that are looked at


def run_by_states(folder: Path, method: str = "msa") -> RelativeTest | None:
    """Return the test of a finished run; None where its rows or models do not allow it."""
    from msa_lite.evidence.nearer import Nearer
    from msa_lite.pipeline.baseline.settings import baseline_scope
    from msa_lite.pipeline.prepare.run import msa_scope, prepare
    from msa_lite.pipeline.run.evidence import make_scene
    from msa_lite.pipeline.run.folder import open_run
    from msa_lite.recipe import load_recipe

    recipe = load_recipe(open_run(folder).recipe)
    scene = make_scene(prepare(recipe, msa_scope(recipe) if method == "msa" else baseline_scope(method, recipe)[0]))
    return None if Nearer().lacking(scene) else relative_test_of(measure_distances(scene, states_of), scene)


def states_of(runner: Runner, texts: Sequence[Example]) -> np.ndarray:
    """Return the (texts, layers, width) mean hidden states of texts; NaN for one that is longer than the window."""
    window = runner.window or 1 << 60
    places = [at for at, text in enumerate(texts) if len(text.ids) - 1 <= window]
    means: dict[int, Any] = {}
    for group in group_texts([len(predicting_places(texts[at])) for at in places]):
        for place, layers in zip(places[group], read_states(runner, [texts[at] for at in places[group]]), strict=True):
            chosen = [layers[max(0, round((at + 1) * len(layers) / DEPTHS) - 1)] for at in range(DEPTHS)]
            means[place] = np.stack([layer.float().mean(dim=0).cpu().numpy() for layer in chosen])
    unknown = np.full(next(iter(means.values())).shape if means else (DEPTHS, 1), np.nan)
    return np.stack([means.get(at, unknown) for at in range(len(texts))]).astype(np.float64)
