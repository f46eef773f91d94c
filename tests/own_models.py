"""Models as people have them, made from a plain one: with added tokens, as an adapter, without a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from msa_lite.io.weights.hub import tokenizer_files
from tests.conftest import save_adapter, save_checkpoint, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def load(folder: Path) -> tuple[Any, Any]:
    """A folder's model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def add_turn_token(folder: Path, out: Path, pad_to: int | None = None) -> Path:
    """A copy with one token more, which its chat template needs, and rows padded to a multiple of `pad_to`."""
    import torch

    model, tokenizer = load(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=pad_to, mean_resizing=False)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def pad_rows(folder: Path, out: Path, multiple: int = 64) -> Path:
    """A copy whose embedding and head have rows that no token is of."""
    model, tokenizer = load(folder)
    model.resize_token_embeddings(pad_to_multiple_of=multiple, mean_resizing=False)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_lora(base: Path, out: Path, template: bool = False, **config: Any) -> Path:
    """A LoRA adapter on a checkpoint, with its own tokenizer and chat template where that is asked for."""
    model, tokenizer = load(base)
    save_adapter(out, model, **config)
    if template:
        tokenizer.chat_template = TEMPLATE.replace("<|turn|>", "")
        tokenizer.save_pretrained(out)
    return out


def drop_tokenizer(folder: Path, out: Path) -> Path:
    """A copy as `model.save_pretrained` alone writes it."""
    shutil.copytree(folder, out)
    for path in tokenizer_files(out):
        path.unlink()
    return out


def make_small_smollm2(folder: Path, progress: Any = None) -> None:
    """Stands for `make_smollm2`: a tiny Llama with a template of SmolLM2's form."""
    from tests.templates import SMOL, chat_tokenizer

    if not folder.exists():
        save_checkpoint(folder, tiny_model("llama"))
        chat_tokenizer(SMOL).save_pretrained(folder)
