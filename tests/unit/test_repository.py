"""What holds for the files of the repository, whatever they are about."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from msa_lite.report.page import card

ROOT = Path(__file__).parents[2]
# Written in two parts, so that this file does not hold what it looks for.
MACHINE_PATHS = ["/root" + "/", "/work" + "/main", "/work" + "/shared"]


def tracked_text_files() -> Iterator[tuple[Path, str]]:
    """(path, content) of the files that git knows, as far as they are text and not deleted."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            data = (ROOT / name).read_bytes()
            if b"\0" not in data:
                yield Path(name), data.decode()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so that git cannot list its files")
def test_no_file_names_a_path_of_somebodys_machine() -> None:
    files = dict(tracked_text_files())
    assert Path("pyproject.toml") in files
    assert [f"{path}: {p}" for path, text in files.items() for p in MACHINE_PATHS if p in text] == []


def test_what_a_plain_run_of_the_tests_leaves_out_is_run_each_night_and_before_a_release() -> None:
    assert "not slow" in (ROOT / "pyproject.toml").read_text()
    script = (ROOT / ".ci/run").read_text().partition("== nightly")[2]
    assert "pytest -n 2 --dist worksteal -m slow" in script.splitlines()
    assert "ATEN_CPU_CAPABILITY" in script
    for name in ("nightly", "release"):
        assert "bash .ci/run nightly" in (ROOT / f".github/workflows/{name}.yml").read_text()


def test_ci_runs_both_commands_of_the_readme_in_their_order() -> None:
    readme, script = ((ROOT / name).read_text() for name in ("README.md", ".ci/run"))
    commands = re.findall(r"^<!-- ci: (\w+) -->\n```bash\n.+\n```$", readme, re.MULTILINE)
    assert commands == ["quickstart", "tests"]
    assert re.findall(r'^run "\$(\w+)"$', script, re.MULTILINE) == commands


def test_no_test_is_skipped_for_want_of_a_package_that_the_extra_test_brings() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    assert [source for source in sources if "importorskip(" in source] == []


def test_the_paper_is_cited_alike_in_the_code_and_for_citation_managers() -> None:
    file = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = file["preferred-citation"]
    names = tuple(f"{author['given-names']} {author['family-names']}" for author in paper["authors"])
    assert (paper["title"], names, paper["url"]) == (card.PAPER_TITLE, card.AUTHORS, card.PAPER_URL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = (project["version"], project["license"], project["urls"]["Source"])
    assert (file["version"], file["license"], file["repository-code"]) == ours


def can_fail(function: ast.AST) -> bool:
    """Whether a test asserts something: `assert`, pytest.raises or pytest.warns, or a helper called assert_…"""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in {"raises", "warns"} or name.startswith("assert_"):
                return True
    return False


@cache
def parse(source: str) -> ast.Module:
    """Parse a file once for all tests here."""
    return ast.parse(source)


def find_tests(source: str) -> Iterator[ast.FunctionDef]:
    """The test functions in a file."""
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def test_every_test_can_fail() -> None:
    files = {path: list(find_tests(path.read_text())) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    assert Path(__file__) in files
    faults = [
        f"{p.relative_to(ROOT)}:{t.lineno} {t.name}" for p, tests in files.items() for t in tests if not can_fail(t)
    ]
    assert faults == []


def test_what_counts_as_an_assertion() -> None:
    counting = ("assert x", "with pytest.raises(ValueError): f()", "np.testing.assert_allclose(a, b)")
    for body, expected in (*((body, True) for body in counting), ("run()", False)):
        (found,) = find_tests(f"def test_x():\n    {body}\n")
        assert can_fail(found) is expected, body


def careless_checks(source: str) -> Iterator[int]:
    """Lines that depend on the machine: `approx` and `allclose` without a relative tolerance, asserts on a clock."""
    if not re.search("approx|allclose|assert_close|time", source):
        return
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            relative = given.get("rel") or given.get("rtol")
            of_zero = bool(node.args) and ast.unparse(node.args[0]) in ("0", "0.0")
            if name == "approx" and "abs" in given and relative is None and not of_zero:
                yield node.lineno
            is_zero = isinstance(relative, ast.Constant) and relative.value == 0
            if name in ("allclose", "assert_allclose", "assert_close") and "atol" in given and is_zero:
                yield node.lineno
        if isinstance(node, ast.Assert):
            calls = [ast.unparse(call.func) for call in ast.walk(node.test) if isinstance(call, ast.Call)]
            if {"time.monotonic", "time.time", "time.perf_counter"} & set(calls):
                yield node.lineno


def test_no_test_depends_on_the_processor_or_its_speed() -> None:
    files = sorted(path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" not in path.parts)
    assert [f"{p.relative_to(ROOT)}:{line}" for p in files for line in careless_checks(p.read_text())] == []


def test_what_counts_as_careless() -> None:
    clock = "assert time.monotonic() - start < 5"
    for line in ("assert x == approx(-47, abs=1e-5)", "assert np.allclose(a, b, rtol=0, atol=1e-5)", clock):
        assert list(careless_checks(line)), line
    for line in ("assert x == approx(-47, abs=1e-5, rel=1e-5)", "assert x == approx(0, abs=1e-5)"):
        assert not list(careless_checks(line)), line
