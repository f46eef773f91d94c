"""What holds for the files of the repository, whatever they are about."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not the whole repository")
def test_the_slow_tests_that_a_plain_run_leaves_out_are_run_with_every_change() -> None:
    assert "not slow" in (ROOT / "pyproject.toml").read_text()
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("pytest ")]
    assert commands == ["pytest -n 2 --dist worksteal -m slow"]


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


def find_tests(source: str) -> Iterator[ast.FunctionDef]:
    """The test functions and methods in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def test_every_test_can_fail() -> None:
    files = {path: list(find_tests(path.read_text())) for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert Path(__file__) in files
    faults = [
        f"{p.relative_to(ROOT)}:{t.lineno} {t.name}" for p, tests in files.items() for t in tests if not can_fail(t)
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert x", True),
        ("with pytest.raises(ValueError):\n        f()", True),
        ("assert_close(a, b)", True),
        ("np.testing.assert_allclose(a, b)", True),
        ("run()", False),
        ("if x:\n        assertion(x)", False),
    ],
)
def test_what_counts_as_an_assertion(body: str, expected: bool) -> None:
    (found,) = find_tests(f"def test_x():\n    {body}\n")
    assert can_fail(found) is expected
