"""Score models on benchmarks: pure metrics, passes over a model, records, and one module a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msa_lite.evals.scores.suite import evaluate as evaluate

__all__ = ["evaluate"]


def __getattr__(name: str) -> Any:
    """`evaluate` when it is first used: single modules here are imported without the others."""
    if name not in __all__:
        raise AttributeError(f"module 'msa_lite.evals' has no attribute '{name}'")
    from msa_lite.evals.scores import suite

    return getattr(suite, name)
