"""A model made from scratch: its tokenizer, its config and random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_lite.data import Row, Template, check_vocabulary
from msa_lite.errors import UsageError, join_faults, nearest
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.models.guards import too_large

_MOST_LAYERS, _WIDEST = 1000, 1 << 20


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer of at most `vocabulary` tokens, with <s>, </s>, <pad>; <s> opens each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # it would go to stdout
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def texts_of(rows: Sequence[Row], template: Template) -> list[str]:
    """Return the texts to train a tokenizer on: questions stand with their answers in the plain template."""
    whole = template.prompt + template.answer
    return [row.text or whole.format(question=row.question, answer=row.answer) for row in rows]


def make_config(values: Mapping[str, Any], tokenizer: Any) -> Any:
    """Make the config of a new model. values: settings under transformers' names, with model_type; those not given are
    transformers' defaults.

    Vocabulary size and ids of special tokens come from the tokenizer unless `values` gives them. Raise UsageError for
    values that transformers does not know or refuses, MismatchError for too small a vocabulary.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    kind = values["model_type"]
    if kind not in KINDS:
        raise UsageError(
            f"model.config.model_type: transformers has no causal language model '{kind}'{nearest(kind, KINDS)}"
        )
    default = AutoConfig.for_model(kind)
    keys = {*default.to_dict(), *default.attribute_map}
    if unknown := [key for key in values if key not in keys]:
        faults = (f"{key}: unknown key{nearest(key, keys)}" for key in unknown)
        raise UsageError(join_faults(f"model.config of a {kind}:", faults))
    if sizes := [*too_large(values, _MOST_LAYERS, _WIDEST)]:
        raise UsageError(join_faults("model.config: larger than any model that is trained here:", sizes))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    settings = {"vocab_size": len(tokenizer), **special, **{k: v for k, v in values.items() if k != "model_type"}}
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # the errors of transformers' own checks have no base of their own
        raise _refused(kind, error) from error
    check_vocabulary(tokenizer, config.vocab_size, "model.config")
    return config


def make_empty(config: Any) -> Any:
    """Make a model with this config, without weights. Raise UsageError where transformers cannot make it."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever the model's own code raises
        raise _refused(config.model_type, error) from error


def count_parameters(config: Any) -> int:
    """Count the weights of a model with this config. Raise UsageError as `make_empty`."""
    return sum(parameter.numel() for parameter in make_empty(config).parameters())


def _refused(kind: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(f"model.config: transformers cannot make a {kind} of it ({reason})")


def write_start(folder: Path, config: Any, tokenizer: Any, seed: int, inputs: dict[str, Any]) -> None:
    """Write a checkpoint of random fp32 weights and its tokenizer. inputs: for the manifest."""
    import torch
    from transformers import AutoModelForCausalLM

    with stage_folder(folder, "checkpoint", inputs) as partial:
        torch.manual_seed(seed)
        with without_bars():
            AutoModelForCausalLM.from_config(config).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
