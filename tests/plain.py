"""What a model says of texts, computed the plain way: one text at a time, one token at a time, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example
from msa_lite.evals.forward import TokenScores
from tests.conftest import VOCABULARY, tiny_model

WINDOW = 512
# Wide weights, so that predictions differ from token to token and from one visible token to the next.
WIDE = {"initializer_range": 0.3}


@cache
def wide_model(kind: str, seed: int = 0) -> Any:
    """A model of tests.conftest with sharp predictions, in evaluation mode."""
    window = {"n_positions": WINDOW} if kind == "gpt2" else {"max_position_embeddings": WINDOW}
    return tiny_model(kind, seed, **WIDE, **window).eval()


@cache
def special_model(kind: str) -> Any:
    """A model that does more than the usual: gemma2 and mistral look 8 tokens back, gemma2, granite and cohere change
    the logits behind the head."""
    import torch
    import transformers as tf

    changes: dict[str, Any] = {
        "gemma2": {"sliding_window": 8, "final_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8},
        "mistral": {"sliding_window": 8},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
    }[kind]
    kinds = {
        "gemma2": tf.Gemma2Config, "mistral": tf.MistralConfig, "granite": tf.GraniteConfig, "cohere": tf.CohereConfig,
    }  # fmt: skip
    config = kinds[kind](
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        **WIDE, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).float().eval()


def plain_scores(model: Any, text: Example, hidden: int | None = None) -> TokenScores:
    """Scores of one text by a forward pass of its own; `hidden`: a token that no position attends to."""
    import torch

    ids = torch.tensor([text.ids])
    mask = torch.ones_like(ids) if hidden is None else (ids != hidden).long()
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits[0].double().numpy()
    log_probs, matches, z = [], [], []
    for t in range(1, len(text.ids)):
        if text.labels[t] == IGNORE:
            continue
        row = logits[t - 1] - logits[t - 1].max()
        scores = row - np.log(np.exp(row).sum())
        mean = (np.exp(scores) * scores).sum()
        deviation = np.sqrt((np.exp(scores) * (scores - mean) ** 2).sum())
        log_probs.append(scores[text.labels[t]])
        matches.append(scores.argmax() == text.labels[t])
        z.append((scores[text.labels[t]] - mean) / max(deviation, 1e-3))
    return TokenScores(np.array(log_probs), np.array(matches, bool), np.array(z))


def plain_answer(model: Any, tokenizer: Any, prompt: list[int], tokens: int, hidden: int | None = None) -> str:
    """The greedy answer of transformers' own `generate` to one prompt, with the tokenizer's end token and the model's
    own, and none of the other settings that a model may come with."""
    import torch

    ids = torch.tensor([prompt])
    known = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids) if hidden is None else (ids != hidden).long(),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=sorted(ends),
            pad_token_id=tokenizer.pad_token_id,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
