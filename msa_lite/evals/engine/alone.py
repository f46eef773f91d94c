"""Decode answers by transformers' own `generate`, one prompt at a time, for models that go wrong in batches.

Not every family goes on rightly from a padded batch. The states of RWKV take padding for tokens, BART counts it among
the positions, and some models keep no cache. A check finds out: it asks nothing but the model's logits.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msa_lite.errors import NotFiniteError
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.engine.together import Choose, PromptBatch, decode_together, is_stopped, likeliest
from msa_lite.io.models.devices import free_memory, is_out_of_memory

logger = logging.getLogger(__name__)

_TOKENS = 24  # of the longer prompt of a check; the shorter one has about half
_STEPS = 3  # new tokens of each
# Of the logits' spread. Rounding of two layers in bf16 changes 0.015 of it, in fp32 1e-6; a lost state or a wrong
# position changes all of it, or less where few of many layers are wrong.
_FINE = 0.01  # for a model in fp32
_COARSE = 0.1  # for one in 16 or 4 bits
_LEAST_SPREAD = 1e-3  # logits that are as near as that mean nothing


def decode_alone(runner: Runner, batch: PromptBatch, choose: Choose) -> list[list[int]]:
    """Return what `decode_together` does, by transformers' own `generate`, one prompt at a time."""
    import torch
    from transformers import LogitsProcessorList, StoppingCriteriaList

    answers: list[list[int]] = []
    for place, (prompt, tokens) in enumerate(zip(batch.prompts, batch.room, strict=True)):
        answer: list[int] = []
        answers.append(answer)
        if tokens <= 0:
            continue

        def pick(ids: Any, logits: Any, place: int = place, answer: list[int] = answer) -> Any:
            """Leave `choose`'s token alone to be chosen from."""
            [token] = choose(logits, torch.tensor([place], device=logits.device), len(answer)).tolist()
            answer.append(token)
            return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([token], device=logits.device), 0)

        def stops(ids: Any, _scores: Any, answer: list[int] = answer) -> Any:
            return torch.tensor([is_stopped(batch.tokenizer, answer, batch.stop)], device=ids.device)

        ids = torch.tensor([prompt], device=runner.device)
        with torch.inference_mode(), _plain_settings(runner.model):
            runner.model.generate(
                synced_gpus=False,  # transformers would wait for other processes that share the weights
                input_ids=ids,
                attention_mask=torch.ones_like(ids) if batch.hidden is None else (ids != batch.hidden).long(),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=[*batch.ends] or None,
                pad_token_id=pad_token(batch.tokenizer, batch.ends),
                logits_processor=LogitsProcessorList([pick]),
                stopping_criteria=StoppingCriteriaList([stops] if batch.stop else []),
            )
        if answer[-1] in batch.ends:
            answer.pop()
    return answers


@contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """Have `generate` use none of the settings that a model comes with: it fills in what it is not told."""
    from transformers import GenerationConfig

    settings = vars(model.generation_config)
    own = dict(settings)
    settings.clear()
    settings.update(vars(GenerationConfig()))
    try:
        yield
    finally:
        settings.clear()
        settings.update(own)


def pad_token(tokenizer: Any, ends: Sequence[int]) -> int:
    """Return a token to pad with: the tokenizer's own, or an end token."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0))


def check_batches(runner: Runner, tokenizer: Any, prompts: Sequence[list[int]]) -> None:
    """Set `runner.batched`: check, once per model, that batches go on as transformers' `generate`; warn if not.

    Two prompts of different lengths, cut from a real one, run as a batch and one at a time. Both get the same new
    tokens, and their logits are compared. The tokens that each would choose may differ where two are about as likely.
    """
    import torch

    longest = max(prompts, key=len, default=[])
    if runner.batched is not None or not longest:
        return
    most = max(2, min(_TOKENS, (runner.window or _TOKENS) - _STEPS))
    long = (longest * most)[:most]
    short = long[: (most - 1) // 3 + 1] + long[-1:]  # shares its beginning with the long one, as prompts do
    try:
        difference = _difference(runner, tokenizer, [long, short])
    except NotFiniteError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        if is_out_of_memory(error):  # the first batch will say so
            free_memory()
            return
        difference = math.inf
        logger.debug("a batch of two prompts failed", exc_info=error)
    fine = runner.model.dtype in (torch.float32, torch.float64) and not getattr(runner.model, "is_quantized", False)
    runner.batched = difference <= (_FINE if fine else _COARSE)
    if not runner.batched:
        logger.warning(
            "%s: batches do not give the answers that transformers' generate gives to single prompts; answers are "
            "generated one at a time, which is right but slower",
            type(runner.model).__name__,
        )


def _difference(runner: Runner, tokenizer: Any, prompts: Sequence[list[int]]) -> float:
    """Return how far logits of a batch are from those of its prompts alone: the RMS difference over their spread.

    The largest of all new tokens' counts: 0 for equal logits, about 1.4 for unrelated ones, NaN if one is NaN.
    """
    import torch

    alone: dict[tuple[int, int], Any] = {}
    together: dict[tuple[int, int], Any] = {}

    def first(logits: Any, rows: Any, step: int) -> Any:
        alone.update({(row, step): values.clone() for row, values in zip(rows.tolist(), logits, strict=True)})
        return likeliest(logits, rows, step)

    def again(logits: Any, rows: Any, step: int) -> Any:
        together.update({(row, step): values.clone() for row, values in zip(rows.tolist(), logits, strict=True)})
        return logits.new_tensor([alone[row, step].argmax() for row in rows.tolist()]).long()

    batch = PromptBatch(tokenizer, prompts, [_STEPS] * len(prompts))
    decode_alone(runner, batch, first)
    decode_together(runner, batch, again)
    differences = [
        (together[place] - values).square().mean().sqrt() / values.std().clamp_min(_LEAST_SPREAD)
        for place, values in alone.items()
    ]
    return float(torch.stack(differences).max())
