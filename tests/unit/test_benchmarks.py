"""The table of benchmarks, and that nothing outside it and a benchmark's own module knows one by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from msa_lite.catalogue import BENCHMARKS, OWN, published
from msa_lite.evals.benchmarks.benchmark import find_benchmark
from tests.tools.arrows import PACKAGE, sources

# Where published benchmarks may be named, and why.
ALLOWED = {
    "catalogue.py": "their entries",
    "evals/benchmarks/tofu.py": "its own module",
    "evals/benchmarks/muse.py": "its own module",
    "evals/benchmarks/restor.py": "its own module",
    "evals/judge/base.py": "the prompts of a file that each benchmark needs",
    "evals/judge/prompts.py": "what a judge is asked; manifests hold the hash of all prompts",
    "pipeline/table/rows.py": "the data that their tables read",
    "report/tables/metrics.py": "the papers that define metrics",
}
NAMED = re.compile(r"tofu|muse|restor(?![ei])", re.IGNORECASE)  # but not: restore, restoring


def words(source: str) -> Iterator[str]:
    """Give the names and the strings of a source. Comments and docstrings may say where facts are from."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        values = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "value"))
        yield from (value for value in values if isinstance(value, str) and id(node) not in texts)


def test_a_benchmark_is_known_to_its_module_and_its_entry_alone() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sources()}
    candidates = {place: text for place, text in texts.items() if NAMED.search(text)}  # parsing all of them takes long
    assert {place for place, text in candidates.items() if any(map(NAMED.search, words(text)))} == ALLOWED.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_an_entry_leads_to_the_value_of_its_name(name: str) -> None:
    kind = find_benchmark(name)
    assert kind.name == name
    assert kind.default_score is None or kind.default_score in BENCHMARKS[name].scores
    assert {*kind.preset} <= {*kind.switches, *kind.reads}


def test_the_users_own_benchmark_is_not_published() -> None:
    assert [OWN, *published()] == [*BENCHMARKS]
