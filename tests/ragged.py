"""Rows of unlike lengths in token ids, and adapters on tiny models, for tests of what is trained on them."""

from __future__ import annotations

import random
from typing import Any

from msa_lite.data import IGNORE, Example

VOCABULARY = 150
PAD = 2


def ragged_rows(count: int, seed: int = 0) -> list[Example]:
    """Rows of 3 to 12 tokens behind prompts of 1 to 4; ids from 3 on, so that none is padding."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        prompt, answer = draw.randint(1, 4), draw.randint(3, 12)
        ids = [draw.randrange(3, VOCABULARY) for _ in range(prompt + answer)]
        rows.append(Example(index, ids, [IGNORE] * prompt + ids[prompt:]))
    return rows


def with_adapter(model: Any, moved: bool = False) -> Any:
    """The model under a fresh LoRA adapter; with `moved`, one that changes what it says."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=not moved
    )
    return get_peft_model(model, config)
