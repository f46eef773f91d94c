"""Check folders with the user's own lm-eval tasks: refuse tasks that would run code, unless the user allows it.

Task files may name Python functions (`!function`), include other files, and hold Jinja templates, which the harness
renders without a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msa_lite.errors import UsageError, join_faults
from msa_lite.io.reading import read_text

_PLAIN = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value", "binary", "set")


def check_no_code(folder: Path) -> None:
    """Raise UsageError, with every place, if task files of a folder name Python code, or files outside of it."""
    todo, seen, faults = sorted(folder.rglob("*.yaml")), set[Path](), list[str]()
    while todo:
        path = todo.pop(0)
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        if not path.resolve().is_relative_to(folder.resolve()):
            faults.append(f"{name}: lies outside of the folder")
            continue
        root = _compose(path)
        faults += [f"{name}: {tag}" for tag in dict.fromkeys(_code(root))]
        todo += [path.parent / included for included in _includes(root)]
    if faults:
        headline = f"{folder}: these tasks would run code; read it, and then allow it with --allow-code:"
        raise UsageError(join_faults(headline, faults))


@contextmanager
def sandboxed() -> Iterator[None]:
    """Make the harness render templates in Jinja's sandbox, which keeps them away from Python."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    own = utils.env
    utils.env = SandboxedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    utils.env.filters.update(own.filters)
    try:
        yield
    finally:
        utils.env = own


def _compose(path: Path) -> Any:
    import yaml

    try:
        return yaml.compose(read_text(path, kind=UsageError), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())})") from error


def _code(root: Any) -> Iterator[str]:
    """Yield the tags of values that are not plain, with the value of a scalar."""
    import yaml

    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:  # an alias is the same node
            continue
        seen.add(id(node))
        if node.tag.removeprefix(_PLAIN) not in _KINDS:
            yield f"{node.tag} {node.value}" if isinstance(node, yaml.ScalarNode) else str(node.tag)
        if isinstance(node, yaml.MappingNode):
            todo += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _includes(root: Any) -> Iterator[str]:
    import yaml

    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "include":
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from (str(part.value) for part in parts if isinstance(part, yaml.ScalarNode))
