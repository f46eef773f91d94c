"""Read files that a stranger may have written: text, JSON, YAML, without tracebacks and without surprises."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node

from msa_lite.errors import FormatError, MsaError, UsageError
from msa_lite.io.files.addresses import check_secrets, holds_secret

_DATE = "tag:yaml.org,2002:timestamp"


class PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases, merge keys, dates, sets and binary data."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node. Raise YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"alias *{event.anchor} in line {event.start_mark.line + 1}; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping of texts to values. Raise YAMLError for a key that stands twice, or is no scalar."""
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key that is no text")
            if key in keys:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            keys.add(key)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """SafeDumper without aliases, which the loader refuses: a value that stands twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True."""
        return True


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_DATE, "tag:yaml.org,2002:merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rsplit(":", 1)[-1] in ("null", "bool", "int", "float", "str", "seq", "map")
}


SMALL = 64 << 20  # bytes; tokenizers of large vocabularies take about 30 MB
YAML_LIMIT = 256 << 10  # bytes; a recipe is a page, and the parser is slow
_DEPTH = 100  # levels of lists and mappings within each other
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CHUNK = 1 << 20

ErrorKind = type[MsaError]


def local_path(name: str | Path, kind: ErrorKind = UsageError) -> Path:
    """Return the path that a user names, with ~ written out. It need not exist.

    Raise an error of this kind for names that no file can have: too long, with a zero byte, below the home of an
    unknown user, or a link that leads to itself.
    """
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # of `stat`, of encodings, of `expanduser`
        start = printable(name)[:80].replace("\0", "\\0")
        raise kind(f"{start}: can be no path ({getattr(error, 'strerror', None) or error})") from error
    return path


def open_file(path: Path, kind: ErrorKind = FormatError) -> int:
    """Open a regular file for reading; return its descriptor. A read gives all that is asked for, up to the file's end.

    Raise an error of this kind for what cannot be opened or read, for folders, pipes, sockets and devices, on which a
    read may never end, and for files that the system makes up (/proc), which may give nothing, and later something.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise kind(f"{printable(path)}: cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    state, fault = os.fstat(handle), None
    if not stat.S_ISREG(state.st_mode):
        fault = "is a folder, pipe or device, not a file"
    else:
        try:
            if os.pread(handle, 1, 0) and not state.st_size:
                fault = "is no stored file: the system makes up what it holds"
        except OSError as error:
            fault = f"cannot be read ({error.strerror or error})"
    if fault:
        os.close(handle)
        raise kind(f"{printable(path)}: {fault}")
    return handle


def read_bytes(path: Path, limit: int = SMALL, kind: ErrorKind = FormatError) -> bytes:
    """Read a whole file of at most `limit` bytes. Raise as `open_file`, and for a larger one."""
    handle = open_file(path, kind)
    try:
        chunks, left = [], limit + 1 if os.fstat(handle).st_size <= limit else 0
        while left > 0 and (chunk := os.read(handle, min(left, _CHUNK))):
            chunks.append(chunk)
            left -= len(chunk)
    except OSError as error:
        raise kind(f"{printable(path)}: cannot be read ({error.strerror or error})") from error
    finally:
        os.close(handle)
    if left <= 0:
        raise kind(f"{printable(path)}: has more than {limit} bytes, which is no file of its kind")
    return b"".join(chunks)


def read_text(path: Path, limit: int = SMALL, kind: ErrorKind = FormatError) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark. Raise as `read_bytes`, and for other bytes."""
    return _decoded(read_bytes(path, limit, kind), printable(path), kind)


def read_json(path: Path, limit: int = SMALL, kind: ErrorKind = FormatError) -> Any:
    """Read a JSON file. Raise as `read_text` and `parse_json`."""
    return parse_json(read_bytes(path, limit, kind), printable(path), kind)


def read_object(path: Path, limit: int = SMALL, kind: ErrorKind = FormatError) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raise as `read_json`, and for any other value."""
    value = read_json(path, limit, kind)
    if not isinstance(value, dict):
        raise kind(f"{printable(path)}: not a JSON object")
    return value


def read_objects(path: Path, *keys: str, limit: int = SMALL, kind: ErrorKind = FormatError) -> list[dict[str, Any]]:
    """Read a file with a JSON object in each line. Raise as `read_object`, and for objects without one of the keys."""
    objects = []
    for number, line in enumerate(read_text(path, limit, kind).splitlines(), 1):
        value = parse_json(line, f"{printable(path)}: line {number}", kind)
        if not isinstance(value, dict) or any(key not in value for key in keys):
            raise kind(f"{printable(path)}: line {number}: no object with {', '.join(keys)}")
        objects.append(value)
    return objects


def parse_json(
    text: bytes | str,
    where: str,
    kind: ErrorKind = FormatError,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    values: int | None = None,
) -> Any:
    """Parse JSON. where: what messages name. pairs: makes the value of an object, in the place of a dict.

    values: the most lists, objects and commas, since a byte of JSON may take forty of memory.

    Raise an error of this kind for what is no JSON, is nested more than 100 deep, holds too many values, or text that
    no file can hold (lone surrogates).
    """
    text = _decoded(text, where, kind) if isinstance(text, bytes) else text
    if values is not None and sum(text.count(mark) for mark in "[{,") > values:
        raise kind(f"{where}: more than {values} values, which is no file of its kind")
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not JSON ({_reason(error)})") from error
    check_json(value, text, where, kind)
    return value


def check_json(value: Any, text: str, where: str, kind: ErrorKind = FormatError) -> None:
    """Raise an error of this kind for a value of JSON that is nested more than 100 deep, or holds lone surrogates.

    text: the JSON that it was read from. where: what messages name.
    """
    try:
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not JSON ({_reason(error)})") from error
    if text.count("[") + text.count("{") > _DEPTH and _is_deep(value):
        raise kind(f"{where}: not JSON that anybody writes (nested more than {_DEPTH} deep)")


def read_yaml(path: Path, kind: ErrorKind = FormatError) -> Any:
    """Read a YAML file. Raise as `read_text`, `parse_yaml` and `check_secrets`."""
    value = parse_yaml(read_text(path, YAML_LIMIT, kind), printable(path), kind)
    check_secrets(value, kind, printable(path))
    return value


def parse_yaml(text: str, where: str, kind: ErrorKind = FormatError) -> Any:
    """Parse YAML of plain values. where: what messages name.

    Raise an error of this kind for what is no YAML, for aliases (of which a few lines may stand for gigabytes), keys
    that stand twice, and tags other than those of JSON. Dates stay text.
    """
    try:
        value = yaml.load(text, PlainLoader)
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates
    # PyYAML's constructors raise whatever int() and the like raise of a value that a tag does not fit.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if holds_secret(text):  # the parser quotes the file
            raise kind(f"{where}: not YAML, and a password or token stands in it") from None
        raise kind(f"{where}: not YAML ({_reason(error)})") from error
    if _is_deep(value):
        raise kind(f"{where}: not YAML that anybody writes (nested more than {_DEPTH} deep)")
    return value


def _reason(error: BaseException) -> str:
    """Return why a parser failed, in one line."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, LookupError | AttributeError | TypeError):  # PyYAML's constructors on a tag's wrong value
        return "a value does not fit its tag"
    if isinstance(error, UnicodeEncodeError):
        return "it holds a lone surrogate, which is no character"
    return " ".join(str(error).split())


def _decoded(raw: bytes, where: str, kind: ErrorKind) -> str:
    """Decode UTF-8, with or without a byte order mark. Raise an error of this kind."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _is_deep(value: Any) -> bool:
    """Check whether lists and mappings are nested more than `_DEPTH` deep, level by level."""
    level = [value]
    for _ in range(_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def printable(path: object) -> str:
    """Return a path or text in a form that can be written to any file, also where its bytes are no UTF-8."""
    text = str(path)
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        return text.encode("utf-8", "backslashreplace").decode()
