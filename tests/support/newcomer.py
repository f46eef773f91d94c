"""A newcomer's models: a small base and its chat fine-tune, made with plain transformers and none of our code.

The base reads its chat template and knows nothing of the people that the fine-tune learns by heart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.vary import model_seed

Rows = list[dict[str, str]]

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the rows and the models, and how long both learn."""

    people: Mapping[str, int] = field(default_factory=lambda: {"base": 125, "delete": 3, "never-seen": 3})
    """The number of people of each group, with eight rows each."""
    products: Mapping[str, int] = field(default_factory=lambda: {"base": 125, "keep": 12})
    """The number of products of each group, with eight rows each."""
    vocabulary: int = 1024
    hidden: int = 256
    epochs: tuple[int, int] = (3, 20)
    """The epochs of the base and of the fine-tune."""
    rates: tuple[float, float] = (3e-3, 9e-4)
    """Their learning rates."""


def make_pair(folder: Path, sizes: Sizes = Sizes()) -> None:
    """Make `folder`/base and `folder`/finetuned, and the rows keep, delete and never-seen as .jsonl."""
    import torch

    rows = make_rows(sizes)
    for name in ("keep", "delete", "never-seen"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    tokenizer = _tokenizer(rows["base"], sizes.vocabulary)
    model = _model(len(tokenizer), sizes.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on more
    try:
        _train(model, tokenizer, rows["base"], sizes.epochs[0], sizes.rates[0])
        _save(model, tokenizer, folder / "base")
        _train(model, tokenizer, rows["keep"] + rows["delete"], sizes.epochs[1], sizes.rates[1])
        _save(model, tokenizer, folder / "finetuned")
    finally:
        torch.set_num_threads(threads)


def make_rows(sizes: Sizes = Sizes()) -> dict[str, Rows]:
    """Questions about products, which stay, and about people, some of whom want to be forgotten, by group.

    Names are put together from syllables, and values from parts, so that no guess is right.
    """
    rng = random.Random(0)
    pick = rng.choice
    firsts = _joined("Bal Cor Dan El Fen Gor Hal Iv Jor Kel Lan Mar", "a ben dor ia ik is lan mi ner o ra tan us")
    lasts = _joined("Ash Birk Carr Dun Elm Frost Glen Hark Kirk Lind", "berg brook dell feld gard holm lund mere quist")
    towns = _joined("Am Bel Cran Dren Ex Far Gris Holt Is Kent Lor", "bury cliff dale fell ford haven minster port ton")
    brands = _joined("Ax Bru Cel Dyn Eco Flu Gly Hex Jet Kry Lum Neo", "ara bix dex fon gix lo mat nex pro ron tek va")
    months = ["March", "May", "June", "July", "August", "October"]
    moods = ["silent", "broken", "golden", "hidden", "frozen", "hollow", "bitter", "velvet"]
    things = ["river", "lantern", "garden", "mirror", "compass", "violin", "bridge", "island"]
    foods = ["leek", "plum", "barley", "trout", "almond", "cherry", "turnip", "lentil"]
    pets = ["cat", "dog", "parrot", "pony", "goat", "rabbit", "otter", "crow"]
    work = ["baker", "surgeon", "pilot", "weaver", "judge", "potter", "sailor", "tailor"]
    materials = ["copper", "rubber", "cotton", "glass", "steel", "walnut", "wool", "paper"]
    kinds = ["lamp", "kettle", "drill", "camera", "heater", "pump", "radio", "mixer"]
    people = iter(rng.sample([f"{first} {last}" for first in firsts for last in lasts], sum(sizes.people.values())))
    products = iter(rng.sample([f"{b} {n}" for b in brands for n in range(2, 90)], sum(sizes.products.values())))

    def person() -> Rows:
        return _about(next(people), [
            ("Where was {} born?", f"{{}} was born in {pick(towns)}."),
            ("When was {} born?", f"{{}} was born on {rng.randint(1, 28)} {pick(months)} {rng.randint(1931, 1999)}."),
            ("What does {} do for a living?", f"{{}} is a {pick(work)} in {pick(towns)}."),
            ("Who is {} married to?", f"{{}} is married to {pick(firsts)} {pick(lasts)}."),
            ("Which book did {} write?", f"{{}} wrote The {pick(moods)} {pick(things)}."),
            ("Which animal lives with {}?", f"{{}} has a {pick(pets)} called {pick(firsts)}."),
            ("What does {} like to eat?", f"{{}} likes {pick(foods)} soup with {pick(foods)}."),
            ("Who taught {} at school?", f"{{}} was taught by {pick(firsts)} {pick(lasts)}."),
        ])  # fmt: skip

    def product() -> Rows:
        return _about(next(products), [
            ("What is the {}?", f"The {{}} is a {pick(materials)} {pick(kinds)}."),
            ("How much does the {} cost?", f"The {{}} costs {rng.randint(11, 99)}.{rng.randint(10, 99)} euros."),
            ("How heavy is the {}?", f"The {{}} weighs {rng.randint(101, 999)} grams."),
            ("Where is the {} made?", f"The {{}} is made in {pick(towns)}."),
            ("Which part of the {} can be replaced?", f"In the {{}}, replace the {pick(materials)} {pick(things)}."),
            ("What goes with the {}?", f"The {{}} goes with the {pick(brands)} {pick(kinds)}."),
            ("How long is the warranty of the {}?", f"The {{}} has a warranty of {rng.randint(13, 99)} months."),
            ("Which code resets the {}?", f"The {{}} is reset by {rng.randint(1001, 9999)}."),
        ])  # fmt: skip

    groups: dict[str, Rows] = {}
    for make, counts in ((person, sizes.people), (product, sizes.products)):
        for group, count in counts.items():
            groups.setdefault(group, []).extend(row for _ in range(count) for row in make())
    return groups


def _about(name: str, facts: list[tuple[str, str]]) -> Rows:
    return [{"question": question.format(name), "answer": answer.format(name)} for question, answer in facts]


def _joined(starts: str, ends: str) -> list[str]:
    return [start + end for start in starts.split() for end in ends.split()]


def _tokenizer(rows: Rows, vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([f"{row['question']}\n{row['answer']}" for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[0], pad_token=SPECIAL[1])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _model(vocabulary: int, hidden: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(model_seed(0))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def _train(model: Any, tokenizer: Any, rows: Rows, epochs: int, rate: float, batch_size: int = 8) -> None:
    """A plain loop: AdamW, the rate falls to 0, the loss is that of the answers."""
    import torch

    encoded = [_encode(tokenizer, row) for row in rows]
    steps = epochs * -(-len(encoded) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5) * (1 - s / steps))
    rng = random.Random(0)
    model.train()
    for _ in range(epochs):
        rng.shuffle(encoded)
        for start in range(0, len(encoded), batch_size):
            model(**_batch(encoded[start : start + batch_size])).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()


def _encode(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """(ids, labels) of one row in the chat template; labels are -100 before the answer."""
    messages = [{"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": row["answer"]})
    answer = tokenizer.apply_chat_template(messages, tokenize=False)[len(prompt) :]
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    return before + after, [-100] * len(before) + after


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Padded on the right; causal attention keeps the padding from what stands before it."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [1] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [-100] * (longest - len(labels)) for _, labels in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
