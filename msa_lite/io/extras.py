"""The packages that a plain installation leaves out, by the extra of msa-lite that brings them."""

from __future__ import annotations

import importlib.util

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
