"""Patterns of adapters: as Python reads them, in a time that no pattern can blow up; and other texts of strangers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.weights.adapter import _KEYS, _PREFIX, unwrapped
from msa_lite.io.weights.counts import named_progress, parse_count
from msa_lite.io.weights.hub import fetch, find_branch
from msa_lite.io.weights.matching import find_name
from msa_lite.io.weights.patterns import Patterns
from msa_lite.io.weights.vocabulary import has_token_role
from msa_lite.merger.checks.memory import parse_size


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """What backtracks takes years; a busy machine never takes this long for the rest."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("still busy"))
    signal.alarm(120)
    yield
    signal.alarm(0)


def by_python(patterns: list[str], name: str) -> int | None:
    """The number of the first pattern that fits, as PEFT looks for it."""
    return next((n for n, p in enumerate(patterns) if re.match(rf"(.*\.)?({p})$", name)), None)


pieces = st.sampled_from(
    [
        *("a", "b", "0", "1", ".", "|", "_", "-", r"\.", r"\d", r"\w", "[ab]", "[^.]", "^", "$", r"\b"),
        *(".*", "a*", "a+", "0{1,2}", "(a|b)", "(?:ab)?", "(?i:A)"),
    ]
)
expressions = st.lists(pieces, max_size=5).map("".join)
modules = st.text("ab01._-", max_size=8)


@settings(max_examples=200)
@given(st.lists(expressions, max_size=4, unique=True), st.lists(modules, max_size=4))
def test_the_first_pattern_that_fits_is_the_one_that_python_finds(patterns: list[str], names: list[str]) -> None:
    found = Patterns({pattern: number for number, pattern in enumerate(patterns)})
    if found.faults:  # of one or the other engine
        return
    for name in names:
        assert found.first([name], None) == by_python(patterns, name)


@settings(max_examples=100)
@given(st.lists(st.text("abc.-", min_size=1, max_size=5), max_size=6, unique=True), modules)
def test_names_are_patterns_with_their_dots_escaped_or_not(names: list[str], module: str) -> None:
    for make in (re.escape, str):
        patterns = list(dict.fromkeys(map(make, names)))
        assert Patterns({p: n for n, p in enumerate(patterns)}).first([module], None) == by_python(patterns, module)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(a)\1", "invalid escape"),
        ("(?=a)b", "invalid perl operator"),
        ("a{,3}", r"write \{0,n\}"),
        ("[[:alpha:]]", "classes of POSIX"),
        ("é.*", "printable ASCII"),
        ("(" * 3000, "it has 3000 characters"),
        ("((a{1000}){1000}){1000}", "repetition"),
    ],
)
def test_patterns_of_no_or_another_meaning_are_refused(pattern: str, says: str) -> None:
    (fault,) = Patterns({pattern: 1, "fine": 2}).faults
    assert re.search(says, fault)


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(x*)*y", "(x|x)*y", "(.*.*.*)*y", "(?:(?:x?){30}){30}y", "([x_]*)*y"])
def test_patterns_that_blow_up_are_matched_at_once(pattern: str) -> None:
    assert Patterns({pattern: 1}).faults == []
    assert Patterns({pattern: 1}).first(["x" * 900], None) is None
    assert Patterns({pattern: 1}).first(["x" * 900 + "y"], None) == 1


@pytest.mark.parametrize("form", ["model\\.layers\\.{}\\.q_proj", "model.layers.{}.q_proj"])
def test_as_many_patterns_as_modules_are_matched(form: str) -> None:
    patterns = Patterns({form.format(number): number for number in range(20_000)})
    assert [patterns.first([f"model.layers.{n}.q_proj"], None) for n in range(20_000)] == list(range(20_000))


def test_too_many_patterns_for_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.io.weights.patterns._EFFORT", 5 * 10**8)  # a tenth, for a tenth of the patterns
    patterns = Patterns({f"[ab]{number}x*x*x*x*z": number for number in range(400)})
    with pytest.raises(FormatError, match="too many patterns for so many modules"):
        patterns.first((f"{number:05}" + "x" * 895 for number in range(100_000)), None)


def test_too_many_ways_to_place_dots_are_refused() -> None:
    patterns = Patterns({"x" * place + "." + "x" * (900 - place): place for place in range(900)})
    with pytest.raises(FormatError, match="too many patterns for so many modules"):
        patterns.first((f"{number:05}" + "x" * 896 for number in range(100_000)), None)


def test_more_expressions_than_anybody_writes_are_refused() -> None:
    assert re.search("more than 5000 regular expressions", "".join(Patterns({f"{n}a*": 1 for n in range(6000)}).faults))


def test_names_of_other_letters_are_only_matched_with_names() -> None:
    assert Patterns({"q": 1}).first(["é.q"], None) == 1
    with pytest.raises(FormatError, match="only matched with names of ASCII"):
        Patterns({r"\w": 1}).first(["é"], None)


def quietly(call: Callable[[str], Any], *errors: type[Exception]) -> Callable[[str], Any]:
    def run(text: str) -> Any:
        try:
            return call(text)
        except errors:
            return None

    return run


READERS: dict[str, Callable[[str], Any]] = {
    **{f"key {kind}": lambda text, pattern=pattern: re.fullmatch(pattern, text) for kind, pattern in _KEYS.items()},
    "prefix": lambda text: _PREFIX.sub("", text),
    "unwrapped": unwrapped,
    "find_name": lambda text: find_name(text, {"x"}),
    "role": has_token_role,
    "size": quietly(parse_size, UsageError),
    "count": quietly(parse_count, ValueError),
    "progress": named_progress,
    "branch": quietly(lambda text: find_branch([text], f"step={text}"), ValueError),
    "hub": quietly(lambda text: fetch(f"./{text}"), UsageError),
}


UNITS = (" ", "1", "x.", "1.", "@", "9e", "step1", "tokens=1.", "module.", ".lora_A", ".base_layer", "*")


@pytest.mark.parametrize("reader", READERS)
def test_long_texts_are_read_in_a_time_that_grows_with_them(reader: str) -> None:
    frames = (("", ""), ("", "!"), ("1", "!"), ("x.lora_A", "!"), ("step", "!"))
    for unit in UNITS:
        found = [READERS[reader](start + unit * (100_000 // len(unit)) + end) for start, end in frames]
        assert len(found) == len(frames)


@pytest.mark.parametrize(
    "text", ["9" * 310, "1" * 5000, "9" * 25 + "TB", "1" * 100_000 + "GB", "-1", "", "1e9", "0x10", "٣MB"]
)
def test_sizes_that_no_machine_has_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_size(text)
