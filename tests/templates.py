"""Chat templates in the manner of well-known models, in words that the tiny tokenizer can spell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.conftest import tiny_tokenizer

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
