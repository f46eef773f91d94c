"""What a model says of texts, computed the plain way, one text and one token at a time; and models to compute it of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msa_lite.data import IGNORE, Example
from msa_lite.evals.engine import models
from msa_lite.evals.engine.forward import TokenScores
from msa_lite.io.models.streaming import read_sizes
from tests.support.models import VOCABULARY, tiny_model
from tests.support.vary import model_seed

WINDOW = 512
# Wide weights, so that predictions differ from token to token and from one visible token to the next.
WIDE = {"initializer_range": 0.3}


KINDS = ["llama", "qwen2", "olmo2", "gpt2"]
PLAIN = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}  # no dropout
# Gemma 2 and Mistral look 8 tokens back; Gemma 2, Granite and Cohere change their logits behind the head; LFM 2 has a
# layer that keeps a state in the place of a cache.
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "final_logit_softcapping": 2.0, "head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
}
BIASED = {"mpt": ("MptConfig", {"max_seq_len": WINDOW})}  # padding takes room in its window


@cache
def wide_model(kind: str, seed: int = 0) -> Any:
    """A model of one of KINDS or SPECIAL with sharp predictions, in evaluation mode."""
    import torch
    import transformers as tf

    if kind in KINDS:
        window = "n_positions" if kind == "gpt2" else "max_position_embeddings"
        return tiny_model(kind, seed, **WIDE, **{window: WINDOW}).eval()
    config, changes = (SPECIAL | BIASED)[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": WINDOW, "vocab_size": VOCABULARY}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False}
    torch.manual_seed(model_seed(seed))
    return tf.AutoModelForCausalLM.from_config(getattr(tf, config)(**sizes, **tokens, **WIDE, **changes)).float().eval()


def broken_model(where: str) -> Any:
    """A copy of a wide model with NaN among its weights: one logit's in the "head", or most tokens' "embeddings"."""
    import copy

    import torch

    model = copy.deepcopy(wide_model("qwen2"))
    with torch.no_grad():
        if where == "head":
            model.get_output_embeddings().weight[VOCABULARY - 1] = torch.nan
        else:
            model.get_input_embeddings().weight[8:] = torch.nan
    return model


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


def plain_tokens(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What `generate` of transformers appends to one prompt, greedily, the end token included."""
    import torch

    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=2)
    return list(output[0, len(prompt) :].tolist())


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
    return plain_text(tokenizer, takewhile(lambda token: token not in ends, output[0, ids.shape[1] :].tolist()))


def plain_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of generated tokens without end and padding tokens, and without a beginning token at its start."""
    kept = [token for token in ids if token not in (tokenizer.eos_token_id, tokenizer.pad_token_id)]
    return str(tokenizer.decode(kept[kept[:1] == [tokenizer.bos_token_id] :])).strip()


class Crowded:
    """Has a model run out of memory above `room` tokens of a batch; keeps the shapes that it was called with."""

    def __init__(self, model: Any, room: int = 1 << 60) -> None:
        self.room = room
        self.shapes: list[tuple[int, int]] = []
        self.hook = model.base_model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.shape != (1, 8):  # with so many a Runner asks once how the model makes its logits
            self.shapes.append(tuple(ids.shape))
        if ids.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def __enter__(self) -> Crowded:
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


def set_small_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, layers: int = 1) -> None:
    """Leave room for so many layers of a model beside the two that pass through."""
    sizes = read_sizes(folder, torch.float32)
    assert sizes is not None
    room = sum(sizes.others.values()) + (layers + 2) * max(sizes.layers.values())
    monkeypatch.setattr(models, "free_bytes", lambda: int(room / 0.75) + 1)
