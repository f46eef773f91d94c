"""The libraries underneath: which extra brings a package that is missing, and how to silence their progress bars."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from msa_lite.errors import UsageError

_TRAIN = (
    "accelerate", "datasets", "peft", "psutil", "rouge_score", "safetensors", "scipy", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
# Extra → the reason to install it, and the packages to look for.
_EXTRAS = {
    "train": ("training and scoring need torch and its companions", _TRAIN),
    "qlora": ("vector.mode qlora needs bitsandbytes", ("bitsandbytes",)),
    "judge": ("a judge of kind 'openai' needs the openai package", ("openai",)),
    "smollm2": ("the Hub does not give SmolLM2, and reading it out of a package needs gguf", ("gguf",)),
    "lm-eval": ("the benchmark lm-eval needs lm-evaluation-harness", ("lm_eval",)),
}


def require(extra: str, reason: str | None = None) -> None:
    """Raise UsageError, with the command to install, unless the packages of an extra are there; none is loaded.

    reason: the sentence to give in the place of the extra's own.
    """
    usual, packages = _EXTRAS[extra]
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise UsageError(f"{reason or usual}: pip install 'msa-lite[{extra}]'")


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save models without bars; restore its settings afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    downloads = not are_progress_bars_disabled()  # which transformers' switch moves as well
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Hub's bars that the environment switches off
            logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()
