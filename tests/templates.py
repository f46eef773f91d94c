"""Chat templates in the manner of well-known models, in words that the tiny tokenizer can spell."""

from __future__ import annotations

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


def chat_tokenizer(template: str) -> Any:
    """The tiny tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer
