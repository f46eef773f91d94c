"""Running a model over examples: teacher-forced scores of the labelled tokens, and greedy answers.

One forward pass gives everything that the teacher-forced metrics need. Rows are sorted by length and batched by a
budget of tokens, so results do not depend on file order and padding is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example, make_collator
from msa_lite.io.adapter import ADAPTER_CONFIG
from msa_lite.io.hub import fetch
from msa_lite.io.progress import Progress, silent

_LOGIT_BYTES = 256 << 20  # fp32 logits of one batch
_GENERATE_TOKENS = 4096  # prompt tokens of one generation batch


@dataclass(frozen=True)
class TokenScores:
    """Teacher-forced results of one example over its n labelled tokens.

    log_probs: (n,) log p(x_t | x_<t), fp32 log-softmax. matches: (n,) whether the argmax is the token.
    """

    log_probs: np.ndarray
    matches: np.ndarray


def load_model(folder: Path) -> Any:
    """A causal language model ready to score: on the GPU in the stored dtype, on a CPU in fp32.

    folder: a checkpoint, or a PEFT adapter, whose model is then loaded below it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if (Path(folder) / ADAPTER_CONFIG).is_file():
        from peft import PeftConfig, PeftModel

        config = PeftConfig.from_pretrained(str(folder))
        name = config.base_model_name_or_path + (f"@{config.revision}" if config.revision else "")
        return PeftModel.from_pretrained(load_model(fetch(name).folder), str(folder)).eval()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if cuda else torch.float32)
    return model.to("cuda" if cuda else "cpu").eval()


def _batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in order of length, longest first, so many a batch that count × longest stays within the budget."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while order:
        count = max(1, budget // max(1, lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def score_tokens(model: Any, examples: Sequence[Example], progress: Progress = silent) -> list[TokenScores]:
    """Teacher-forced scores of every example, in the order given."""
    import torch

    vocabulary = model.get_output_embeddings().weight.shape[0]
    collate = make_collator(0)
    results: list[TokenScores | None] = [None] * len(examples)
    done = 0
    for batch in _batches([len(e.ids) for e in examples], _LOGIT_BYTES // (4 * vocabulary)):
        inputs = collate([{"input_ids": examples[i].ids, "labels": examples[i].labels} for i in batch])
        inputs = {key: value.to(model.device) for key, value in inputs.items()}
        labels = inputs.pop("labels")
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits
            for row, i in enumerate(batch):
                positions = torch.nonzero(labels[row, 1:] != IGNORE).flatten()
                wanted = labels[row, positions + 1]
                scores = torch.log_softmax(logits[row, positions].float(), dim=-1)
                picked = scores.gather(-1, wanted[:, None])[:, 0]
                results[i] = TokenScores(picked.cpu().numpy(), (scores.argmax(-1) == wanted).cpu().numpy())
        done += len(batch)
        progress("score", done, len(examples))
    return [result for result in results if result is not None]


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    progress: Progress = silent,
) -> list[str]:
    """Greedy answers to prompts (token ids), decoded without special tokens and stripped, in the order given.

    Left padding with a mask from lengths; stops at the model's own end tokens and the tokenizer's.
    """
    import torch
    from transformers import GenerationConfig

    known = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    # What is left out here is taken from the model's own generation config, which may hold penalties.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        min_new_tokens=0,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    answers = [""] * len(prompts)
    done = 0
    for batch in _batches([len(p) for p in prompts], _GENERATE_TOKENS):
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in batch], device=model.device)
        mask = torch.tensor(
            [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch], device=model.device
        )
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        for row, i in enumerate(batch):
            answers[i] = tokenizer.decode(output[row, width:], skip_special_tokens=True).strip()
        done += len(batch)
        progress("generate", done, len(prompts))
    return answers
