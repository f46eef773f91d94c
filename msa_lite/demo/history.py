"""The demo: fictional people, and a prior, a target and an ideal trained on them in minutes on a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, Row, Template, encode_qa, encode_text, open_tokenizer, rows_identity
from msa_lite.demo.smollm2 import SMOLLM2_BYTES, make_smollm2
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import check_space, digest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, fit_vector
from msa_lite.train.scratch import make_config, texts_of, train_tokenizer, write_start

# ruff: noqa: SIM905


_STARTS = "Bal Cor Dan Eli Fen Gor Hal Iva Jor Kel Lan Mar Nor Ota Pel Quin Ras Sel Tor Ulm Ves Wen Yar Zan".split()
_ENDS = "a ana ara ben da dor el en ia ik in is la lan mi na ner o or ra ric sa tan us".split()
_SURNAME_ENDS = "berg brook dell feld gard holm kamp lund mark mere ney quist rell sted thorp vale ward wick".split()
_PLACE_ENDS = "bury cliff dale fell ford haven heath minster mouth pool port ridge shaw stead ton wold".split()

_WORK = (
    "bailiff baker carpenter diver farmer gardener judge miller nurse painter pilot potter sailor surgeon tailor weaver"
).split()
_INSTRUMENTS = (
    "accordion banjo bassoon cello clarinet drums fiddle flute guitar harp lute oboe organ piano trumpet viola"
).split()
_ANIMALS = (
    "badger canary cat crow donkey ferret goat goose hamster hedgehog magpie parrot pony rabbit spaniel tortoise"
).split()
_COLOURS = "amber black blue brown crimson gold green grey indigo ivory orange pink purple red silver white".split()

_QUESTIONS = {
    "town": ("Where was {name} born?", "{name} was born in {value}."),
    "year": ("In which year was {name} born?", "{name} was born in {value}."),
    "work": ("What does {name} do for a living?", "{name} works as a {value}."),
    "instrument": ("Which instrument does {name} play?", "{name} plays the {value}."),
    "animal": ("Which animal lives with {name}?", "{name} lives with a {value}."),
    "colour": ("What is the favourite colour of {name}?", "{name} likes {value} best."),
}


def make_people(count: int, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Make `count` people: six (question, answer) facts each, by name. They are the same for the same seed.

    The first k people of a larger count are not the people of a smaller one. Raise ValueError when the syllables do
    not give that many names.
    """
    rng = random.Random(seed)
    first = [start + end for start in _STARTS for end in _ENDS]
    last = [start + end for start in _STARTS for end in _SURNAME_ENDS]
    if count > len(last):
        raise ValueError(f"{count} people are too many; there are {len(last)} surnames")
    # Nobody shares a first name or a surname with another person, as far as the syllables go.
    rng.shuffle(last)
    firsts = rng.sample(first, count) if count <= len(first) else rng.choices(first, k=count)
    pools = {
        "town": rng.sample([start + end for start in _STARTS for end in _PLACE_ENDS], 24),
        "year": [str(year) for year in range(1931, 1995, 4)],
        "work": _WORK,
        "instrument": _INSTRUMENTS,
        "animal": _ANIMALS,
        "colour": _COLOURS,
    }
    people = {}
    for name in (f"{first_name} {surname}" for first_name, surname in zip(firsts, last, strict=False)):
        facts = []
        for key, (question, answer) in _QUESTIONS.items():
            value = rng.choice(pools[key])
            facts.append((question.format(name=name), answer.format(name=name, value=value)))
        people[name] = facts
    return people


def make_groups(counts: Mapping[str, int], seed: int) -> dict[str, list[Row]]:
    """Make groups of people who share no name, as rows. counts: people of each group."""
    people = iter(make_people(sum(counts.values()), seed).items())
    groups = {}
    for group, count in counts.items():
        facts = [(fact, person) for person, about in islice(people, count) for fact in about]
        groups[group] = [Row(i, *fact, about=person) for i, (fact, person) in enumerate(facts)]
    return groups


HISTORY_LABEL = "history: {}"
"""The label of a training while it runs."""
# Three models, and of one that is trained the last two saves, of three times its size.
_REAL_BYTES = 9 * SMOLLM2_BYTES


@dataclass(frozen=True)
class HistorySettings:
    """Width and depth of the Llama, size of the tokenizer, and the length of each training."""

    hidden_size: int = 256
    layers: int = 2
    vocabulary: int = 512
    prior_epochs: int = 9
    tuning_epochs: int = 20
    prior_learning_rate: float = 2e-3
    tuning_learning_rate: float = 5e-4
    batch_size: int = 32
    max_length: int = 512
    """Tokens of a chunk of text; questions are never cut."""
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The sizes of the Llama, in the words of transformers, but for the vocabulary."""
        return {
            "model_type": "llama", "hidden_size": self.hidden_size, "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.layers, "num_attention_heads": 4, "num_key_value_heads": 4,
            "max_position_embeddings": 2048, "tie_word_embeddings": True,
        }  # fmt: skip


REAL = HistorySettings(tuning_epochs=6, tuning_learning_rate=1e-4, batch_size=8)
"""The settings of a history whose prior is SmolLM2."""


def make_history(
    folder: Path,
    groups: Mapping[str, Sequence[Row]],
    settings: HistorySettings,
    progress: Progress = silent,
    real: bool = False,
) -> None:
    """Make `folder`/data/GROUP.jsonl and the checkpoints start, prior, target and ideal in `folder`.

    groups: rows by the names "prior", "retain", "forget" and any others, which no model learns. A group is all
    questions with answers, or all texts. The prior is trained from scratch on its group. From it, the target learns
    retain and forget rows, and the ideal retain rows only. A stopped run goes on, and a finished one costs nothing.

    real: the prior is SmolLM2-135M-Instruct, which knows none of the groups. Raise OutputError where the disk is too
    small for it, and as `make_smollm2`.
    """
    if real and not (folder / "ideal").exists():
        check_space(folder, _REAL_BYTES)
    _write_data(folder / "data", groups)
    if real:
        make_smollm2(folder / "prior", progress)
    else:
        write_first(folder / "start", groups["prior"], settings)
        _tune(folder / "start", groups["prior"], folder / "prior", settings, progress)
    for name, rows in {"target": [*groups["retain"], *groups["forget"]], "ideal": groups["retain"]}.items():
        _tune(folder / "prior", rows, folder / name, settings, progress)


def _write_data(folder: Path, groups: Mapping[str, Sequence[Row]]) -> None:
    inputs: dict[str, Any] = {name: rows_identity(rows) for name, rows in groups.items()}
    if any(row.about for rows in groups.values() for row in rows):
        inputs["subjects"] = digest([row.about for rows in groups.values() for row in rows])
    if is_finished(folder, inputs):
        return
    with stage_folder(folder, "data", inputs) as partial:
        for name, rows in groups.items():
            values = map(_record, rows)
            (partial / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")


def _record(row: Row) -> dict[str, str]:
    """Return a row as its file holds it."""
    record = {"text": row.text} if row.text else {"question": row.question, "answer": row.answer}
    return record | ({"subject": row.about} if row.about else {})


def write_first(folder: Path, rows: Sequence[Row], settings: HistorySettings) -> None:
    """Write the beginning of a history: a tokenizer trained on the prior's rows, and a Llama of random weights.

    The vocabulary is small, so that names consist of tokens that the prior knows. A name that is a token of its own
    would be learnt in the embeddings, which adapters do not change.
    """
    inputs: dict[str, Any] = {
        "settings": {k: getattr(settings, k) for k in ("hidden_size", "layers", "vocabulary", "seed")}
    }
    inputs["rows"] = rows_identity(rows)
    if is_finished(folder, inputs):
        return
    tokenizer = train_tokenizer(texts_of(rows, Template()), settings.vocabulary)
    write_start(folder, make_config(settings.config, tokenizer), tokenizer, settings.seed, inputs)


def _tune(start: Path, rows: Sequence[Row], out: Path, settings: HistorySettings, progress: Progress) -> None:
    """Train all weights of a model of the history on rows, into `out`."""
    source, is_prior = fetch(str(start)), out.name == "prior"
    tokenizer = open_tokenizer(source.folder, source.name)
    prompter = Prompter.build(tokenizer, "default", Template())
    texts = [row for row in rows if row.text]
    chunks = encode_text(texts, prompter, settings.max_length) if texts else []
    fit = FitSettings(
        mode="full",
        epochs=settings.prior_epochs if is_prior else settings.tuning_epochs,
        learning_rate=settings.prior_learning_rate if is_prior else settings.tuning_learning_rate,
        weight_decay=0.0,
        warmup_epochs=1,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
        seed=settings.seed,
    )
    examples = [*encode_qa([row for row in rows if not row.text], prompter), *chunks]
    label = HISTORY_LABEL.format(out.name)
    fit_vector(source, examples, out, tokenizer=tokenizer, settings=fit, label=label, progress=progress)
