"""Tiny models of four architectures, tokenizers and adapters, built in code: no network, no files from elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_lite.io.weights.hub import tokenizer_files
from tests.support.families import small_config
from tests.support.vary import model_seed

VOCABULARY = 300


def tiny_config(kind: str, **changes: Any) -> Any:
    """A config of a two-layer model: llama (tied embeddings), qwen2 (biases), olmo2 (q and k norms), gpt2 (Conv1D).

    Of four experts each: mixtral, qwen3_moe and others (stored one by one), gpt_oss and llama4 (stored stacked, as
    (in, out)), granitemoe (stored stacked, under other names).
    """
    import transformers as tf

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if kind == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return tf.GPT2Config(**(sizes | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | changes))
    kinds = {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config, "olmo2": tf.Olmo2Config}
    common |= {"tie_word_embeddings": kind == "llama"}
    if kind in kinds:
        return kinds[kind](**(common | changes))
    experts = {"llama4_text": {"intermediate_size_mlp": 48}, "deepseek_v3": {"first_k_dense_replace": 1}}
    name = "llama4_text" if kind == "llama4" else kind
    return small_config(tf.CONFIG_MAPPING[name](), **(common | experts.get(name, {}) | changes))


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model of random weights, biases and norms included, so that nothing is right by being zero or one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(model_seed(seed))
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def tiny_vision_model(kind: str, seed: int = 0) -> Any:
    """A vision-language model: qwen3_5 (its text alone has a class of its own), mistral3 (loaded whole)."""
    import torch
    import transformers as tf

    text = tiny_config("llama", tie_word_embeddings=False).to_dict() | {"head_dim": 8}
    text = {key: value for key, value in text.items() if key not in ("model_type", "architectures", "rope_parameters")}
    sees = {"hidden_size": 32, "intermediate_size": 48}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    pixtral = {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = {
        "qwen3_5": lambda: tf.Qwen3_5Config(
            text_config=text | linear, vision_config=sees | {"depth": 1, "num_heads": 4, "out_hidden_size": 32}
        ),
        "mistral3": lambda: tf.Mistral3Config(
            text_config=tf.MistralConfig(**text), vision_config=tf.PixtralVisionConfig(**sees, **pixtral)
        ),
    }[kind]()
    torch.manual_seed(model_seed(seed))
    return tf.AutoModelForImageTextToText.from_config(config).float()


def tiny_tokenizer(chat: bool = False) -> Any:
    """A byte-level tokenizer with <s>, </s> and <pad>; with `chat`, a template that prints a date as Llama 3's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["Question: Where is it?\nAnswer: It is over there."] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chat:
        fast.chat_template = (
            "<s>{{ date_string if date_string is defined else 'today' }}\n"
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
    return fast


def save_checkpoint(folder: Path, model: Any, dtype: str = "float32", shard: str = "5GB", chat: bool = False) -> Path:
    """Save a model and its tokenizer in Hugging Face layout."""
    import torch

    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, model: Any, seed: int = 1, scale: float = 0.05, **config: Any) -> Path:
    """Save a PEFT adapter with random factors on every linear layer (`config` goes to LoraConfig).

    Whatever else it trains (modules_to_save, biases, magnitudes, token rows) is moved from the model's own values.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    peft_model = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad:
                moved = torch.randn(parameter.shape, generator=generator) * scale
                is_factor = "lora_" in name and "magnitude" not in name
                parameter.copy_(moved if is_factor else parameter + moved)
    peft_model.save_pretrained(folder)
    peft_model.unload()
    return folder


TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def load(folder: Path) -> tuple[Any, Any]:
    """A folder's model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def load_weights(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, as they are stored."""
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


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

    if not folder.exists():
        save_checkpoint(folder, tiny_model("llama"))
        chat_tokenizer(SMOL).save_pretrained(folder)


# Raises on a system message, and ends turns with a word of its own that is not the tokenizer's end token.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Puts in a system message where there is none, and ends turns with the end token and a newline.
SMOL = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<im>system\nYou are Smol.</s>\n"
    "{% endif %}<im>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant\n{% endif %}"
)
# Ends nothing: answers stand as they are.
OPEN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Leaves system messages out without a word.
DEAF = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}</s>{% endif %}{% endfor %}"

# The next ones are in the words of the models that they are named after, whose end tokens `chat_tokenizer` may add.
# Ends every turn with the end token and a newline, and names the model where there is no system message.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are Smol.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends every turn with an end of turn, and prints a date.
LLAMA3 = (
    "{{ bos_token }}<|start|>date\n{{ date_string }}<|eot_id|>{% for m in messages %}"
    "<|start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
# Ends every turn with an end of turn and a newline, and the conversation with the end token.
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Ends answers alone, with the end token; behind those of earlier turns comes a newline.
OLMO = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}<|assistant|>\n{% endif %}"
)
# Puts a special token of its own between the header and the answer.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def chat_tokenizer(template: str, added: Sequence[str] = (), eos: str | None = None, special: bool = True) -> Any:
    """The tiny tokenizer with a chat template, with added tokens, and with one of them as its end token."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    tokenizer.chat_template = template
    if eos is not None:
        tokenizer.eos_token = eos
    return tokenizer
