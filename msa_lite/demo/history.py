"""The demo's model history: a prior that knows some people, a target that learnt others, an ideal that never met those
to be forgotten. Nothing is downloaded; the models are trained here in a minute or two on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, Row, Template, encode_qa
from msa_lite.demo.people import Fact, make_people
from msa_lite.io.hub import Source, fetch
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.train import FitSettings, fit_vector

SETS = ("prior", "retain", "forget", "holdout")


@dataclass(frozen=True)
class HistorySettings:
    """Sizes of the demo: people in each group, the Llama's width and depth, and how long each model is trained.

    prior, retain, forget, holdout: numbers of people, who share no name. The prior is trained from nothing on the
    first group; the target goes on from it with retain and forget people, the ideal with retain people alone.
    """

    prior: int = 100
    retain: int = 60
    forget: int = 12
    holdout: int = 12
    hidden_size: int = 128
    layers: int = 3
    vocabulary: int = 512
    prior_epochs: int = 60
    tuning_epochs: int = 40
    prior_learning_rate: float = 2e-3
    tuning_learning_rate: float = 1e-3
    batch_size: int = 32
    seed: int = 0


def make_history(folder: Path, settings: HistorySettings, progress: Progress = silent) -> None:
    """Make `folder`/data/{prior,retain,forget,holdout}.jsonl and the checkpoints start, prior, target and ideal.

    What is there from the same settings is kept, so a stopped run goes on and a finished one costs nothing.
    """
    people = make_people(settings.prior + settings.retain + settings.forget + settings.holdout, settings.seed)
    groups, first = {}, 0
    for name in SETS:
        count = getattr(settings, name)
        groups[name] = [fact for person in people[first : first + count] for fact in person]
        first += count
    _write_data(folder / "data", groups, settings)
    _write_start(folder / "start", groups["prior"], settings)
    start = fetch(str(folder / "start"))
    first_fit = _fit_settings(settings.prior_epochs, settings.prior_learning_rate, settings)
    later_fit = _fit_settings(settings.tuning_epochs, settings.tuning_learning_rate, settings)
    prior = _tune(start, groups["prior"], folder / "prior", first_fit, progress)
    _tune(prior, groups["retain"] + groups["forget"], folder / "target", later_fit, progress)
    _tune(prior, groups["retain"], folder / "ideal", later_fit, progress)


def _write_data(folder: Path, groups: dict[str, list[Fact]], settings: HistorySettings) -> None:
    inputs = {"sizes": {name: len(facts) for name, facts in groups.items()}, "seed": settings.seed}
    if is_finished(folder, inputs):
        return
    with stage_folder(folder, "data", inputs) as partial:
        for name, facts in groups.items():
            (partial / f"{name}.jsonl").write_text("".join(json.dumps(asdict(fact)) + "\n" for fact in facts))


def _write_start(folder: Path, facts: Sequence[Fact], settings: HistorySettings) -> None:
    """A tokenizer trained on the prior's facts and a Llama of random weights: the beginning of the history.

    The vocabulary is small, so that names are put together from parts that the prior knows. A name that is one token
    of its own would be learnt in the embeddings, which adapters leave alone.
    """
    inputs: dict[str, Any] = {
        "settings": {k: getattr(settings, k) for k in ("hidden_size", "layers", "vocabulary", "seed")}
    }
    inputs["facts"] = len(facts)
    if is_finished(folder, inputs):
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with stage_folder(folder, "checkpoint", inputs) as partial:
        template = Template()
        texts = [(template.prompt + template.answer).format(question=f.question, answer=f.answer) for f in facts]
        tokenizer = _train_tokenizer(texts, settings.vocabulary)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=4 * settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(settings.seed)
        LlamaForCausalLM(config).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
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


def _fit_settings(epochs: int, learning_rate: float, settings: HistorySettings) -> FitSettings:
    return FitSettings(
        mode="full",
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=0.0,
        warmup_epochs=1,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
        seed=settings.seed,
    )


def _tune(source: Source, facts: Sequence[Fact], out: Path, fit: FitSettings, progress: Progress) -> Source:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    rows = [Row(i, fact.question, fact.answer) for i, fact in enumerate(facts)]
    examples = encode_qa(rows, Prompter.build(tokenizer, "plain", Template()))
    label = f"history: {out.name}"
    fit_vector(source, examples, out, tokenizer=tokenizer, settings=fit, label=label, progress=progress)
    return fetch(str(out))
