"""Strategies of hostile values: JSON, names, numbers as text, and edits of JSON documents and of raw bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

NAMES = (
    "", ".", "..", "/", "\x00", "\n", " ", "a" * 300, "x" * 5000, "../escape", "/etc/passwd", "~nobody/x", "a/b", "é",
    "\ud800", "\u202e", "-", "--out", "*", "config.json", "manifest.json", ".lock", ".journal.jsonl", "CON", "%s",
    "{0}", "model.safetensors", "MODEL.SAFETENSORS", "weights.txt", "LICENSE", "mergekit_config.yml", "README.md",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e-320, 1e30,
    1e308, -1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    *NAMES, "null", "true", "1e-5", "1e400", "nan", "inf", "0x10", "1_000", "١", "(a+)+$", "(.*)*x", "[", "(?P<a",
    r"(a)\1", "a{1,65535}", "{question:>999999999}", "{question.__class__}",
    "{% for i in range(10**9) %}{% endfor %}", "F8_E4M3", "float64", "bfloat16", "F4", "all-linear", "none", "LORA",
    "local", "huge" * 1000,
)  # fmt: skip


def deep(levels: int, kind: str = "[") -> Any:
    """Return a list or an object nested so deep."""
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "[" else {"a": value}
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
VALUES = st.one_of(
    SCALARS,
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from([[], {}, [[]], [None], {"": None}, deep(90), deep(150), deep(150, "{")]),
)


def dump(value: Any) -> str:
    """Return JSON, of surrogates and NaN as well."""
    return json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document, the document's own first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if len(path) < 6:
            yield from places(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    """Return the document with an item in that place."""
    if not path:
        return item
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = put(value[key], tuple(rest), item) if rest else item
    return copy


def take(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the document without the value in that place."""
    if not path:
        return None
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) > 1:
        copy[path[0]] = take(value[path[0]], path[1:])
    else:
        del copy[path[0]]
    return copy


@st.composite
def edited(draw: Callable[..., Any], value: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return a JSON document with one to three values replaced, taken out or put in. keys: names of new ones."""
    for _ in range(draw(st.integers(1, 3))):
        spots = list(places(value))
        path = spots[draw(st.integers(0, len(spots) - 1))] if draw(st.integers(0, 19)) else ()
        what = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
        if what == "add":
            path = next(p for p in (path, ()) if p == () or isinstance(_at(value, p), dict))
            place = _at(value, path)
            if isinstance(place, dict):
                key = draw(st.sampled_from(keys or NAMES))
                value = put(value, path, {**place, key: draw(VALUES)})
        else:
            value = put(value, path, draw(VALUES)) if what == "replace" else take(value, path)
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def flipped(draw: Callable[..., Any], raw: bytes) -> bytes:
    """Return bytes of which one is another."""
    at = draw(st.integers(0, len(raw) - 1))
    return raw[:at] + bytes([raw[at] ^ draw(st.integers(1, 255))]) + raw[at + 1 :]


@st.composite
def damaged(draw: Callable[..., Any], raw: bytes) -> bytes:
    """Return bytes with some flipped, cut off, put in or doubled, or with other bytes altogether."""
    what = draw(st.sampled_from(["flip", "flip", "cut", "insert", "double", "other"]))
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if what == "flip" and raw:
        return draw(flipped(raw))  # type: ignore[no-any-return]
    if what == "cut":
        return raw[:at]
    if what == "insert":
        return raw[:at] + draw(st.binary(min_size=1, max_size=9)) + raw[at:]
    if what == "double":
        return raw + raw
    others = [b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 20000, b'{"a":' * 5000, b"\x00" * 64, b"9" * 5000]
    return draw(st.sampled_from(others))
