"""Tell a model's window: the most tokens that it reads of a row. Fits, scores and plans cut rows to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from msa_lite.io.weights.checkpoint import Checkpoint, text_part

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
# Their tables of positions begin behind the number of the padding token.
_AFTER_PADDING = {
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


def read_window(checkpoints: Iterable[Checkpoint]) -> int | None:
    """Return the smallest window of some models by their config.json; None where nothing limits them.

    Without torch, which transformers' configs load, where config.json names it. A config that transformers cannot read
    counts for nothing here: `open_config` refuses it.
    """
    windows = []
    for checkpoint in checkpoints:
        text = {**checkpoint.config, **text_part(checkpoint.config)}
        with suppress(Exception):  # without transformers, too; the errors of its own checks have no base of their own
            if sum(name in text for name in _POSITIONS) != 1:  # its class has a default, or two names for one number
                from transformers import AutoConfig

                windows.append(model_window(AutoConfig.for_model(**checkpoint.config)))
            else:
                windows.append(_window(text))
    return min((window for window in windows if window), default=None)


def model_window(config: Any) -> int | None:
    """Return the most tokens that a model reads, by its config as transformers has it; None where nothing limits them.

    - Positions in a table, learnt (GPT-2, OPT) or not (GPT-J), and MPT's biases: a longer row is an error.
    - Rotary positions: `max_position_embeddings`; with yarn and linear scaling at least `factor` times the length
      before it, which Qwen's and Vicuna's configs name there. A longer row runs, but the model was not made for it,
      and with `dynamic` and `longrope` it would change the other rows of its batch.
    - No limit: ALiBi (BLOOM, Falcon) and recurrent models (Mamba, RWKV).

    Two more numbers are no limits. A sliding window hides old tokens, of rows of any length. A tokenizer's
    `model_max_length` is often that of another model, or of a training, and transformers only warns of longer rows.
    """
    text = config.get_text_config()
    return _window(vars(text) | {"model_type": text.model_type})


def _window(config: Mapping[str, Any]) -> int | None:
    size = next((size for name in _POSITIONS if (size := config.get(name)) and size > 0), None)
    if size is None or config.get("alibi"):
        return None
    if config.get("model_type") in _AFTER_PADDING:
        return int(size - config["pad_token_id"] - 1)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not {"yarn", "linear"} & {rope.get("rope_type"), rope.get("type")}:
        return int(size)
    return int(max(size, (rope.get("original_max_position_embeddings") or size) * (rope.get("factor") or 1)))
