"""Fictional people: names and places made of syllables, six facts each, as questions with answers."""
# ruff: noqa: SIM905

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice

from msa_lite.data import Row

_STARTS = "Bal Cor Dan Eli Fen Gor Hal Iva Jor Kel Lan Mar Nor Ota Pel Quin Ras Sel Tor Ulm Ves Wen Yar Zan".split()
_ENDS = "a ana ara ben da dor el en ia ik in is la lan mi na ner o or ra ric sa tan us".split()
_SURNAME_ENDS = "berg brook dell feld gard holm kamp lund mark mere ney quist rell sted thorp vale ward wick".split()
_PLACE_ENDS = "bury cliff dale fell ford haven heath minster mouth pool port ridge shaw stead ton wold".split()

_WORK = (
    "archer baker carpenter diver farmer gardener judge miller nurse painter pilot potter sailor surgeon tailor weaver"
).split()
_INSTRUMENTS = (
    "accordion banjo bassoon cello clarinet drums fiddle flute guitar harp lute oboe organ piano trumpet viola"
).split()
_ANIMALS = (
    "badger canary cat crow donkey ferret goat goose hamster hedgehog otter parrot pony rabbit spaniel tortoise"
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
    for name in (f"{one} {two}" for one, two in zip(firsts, last, strict=False)):
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
