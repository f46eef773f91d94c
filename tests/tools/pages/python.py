"""The page of the Python interface: which functions and results mkdocstrings describes, and in which order."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msa_lite
from msa_lite.pipeline.verbs.run import RunResult
from msa_lite.report import Report
from msa_lite.report.verdict.figures import Forgotten
from msa_lite.report.verdict.verdict import Verdict

_HEADER = """---
tags: [python, api]
search: {boost: 0.1}
---

# Python

Written by `python -m tests.tools.pages` from `msa_lite.__all__`. `import msa_lite` loads neither torch nor
transformers; each function loads what it needs. Errors are [classes of msa_lite.errors](errors.md).

A `recipe` is a file, the name of a shipped recipe, or a mapping. `overrides` are texts such as `"forget.alpha=1.25"`.
`progress` is `msa_lite.show_progress()`, or your own function `progress(label, done, total)`. In a
notebook, calls show bars without it and hide other packages' warnings, and results are tables.

## Functions
"""
_ARGUMENTS = """
## Arguments

Arguments of `evaluate`, `init_recipe` and `push_folder`.
"""
_RESULTS = """
## Results

The results of these functions, and their parts.
"""


def python_page() -> str:
    """Return the page: a directive for each public function, and for each class that they return."""
    public = {name: getattr(msa_lite, name) for name in msa_lite.__all__}
    functions = [f"msa_lite.{name}" for name, value in public.items() if not isinstance(value, type)]
    arguments = [f"msa_lite.{name}" for name, value in public.items() if isinstance(value, type)]
    classes = {kind for value in public.values() for kind in _results(value)}
    classes |= {part for kind in (RunResult, Report, Verdict, Forgotten) for part in _parts(kind)}
    names = sorted((f"{kind.__module__}.{kind.__name__}" for kind in classes), key=lambda name: name.rpartition(".")[2])
    sections = [_HEADER, *map(_directive, functions), _ARGUMENTS, *map(_directive, arguments)]
    return "".join([*sections, _RESULTS, *map(_directive, names)])


def _directive(name: str) -> str:
    # The fields of a data source are those of a data set and of columns.
    options = "    options:\n      inherited_members: true\n" if name == "msa_lite.DataSource" else ""
    return f"\n::: {name}\n{options}"


def _results(function: Callable[..., Any]) -> Iterator[type]:
    """Yield the dataclasses that a function returns."""
    yield from _dataclasses(typing.get_type_hints(function).get("return"))


def _parts(kind: type) -> Iterator[type]:
    """Yield the dataclasses in the fields of a dataclass."""
    for field in typing.get_type_hints(kind).values():
        yield from _dataclasses(field)


def _dataclasses(annotation: Any) -> Iterator[type]:
    """Yield the dataclasses of msa_lite in an annotation such as `dict[str, Report] | None`."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _dataclasses(part)
