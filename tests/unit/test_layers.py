"""Who may import whom, read from the source; and what stays out of memory until it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import msa_lite

PACKAGE = Path(msa_lite.__file__).parent
# Room of the package → the rooms that it imports from, wherever the import stands. Exactly these: an arrow that nobody
# needs any more has to go.
ARROWS = {
    "errors": set[str](),
    "conditions": set[str](),
    "counts": set[str](),
    "io": {"counts", "errors"},
    "recipe": {"conditions", "counts", "errors", "io"},
    "data": {"errors", "io"},
    "report": {"errors", "io"},
    "train": {"data", "errors", "io"},
    "merger": {"errors", "io"},
    "baselines": {"data", "errors", "io"},
    "demo": {"data", "io", "train"},
    "evals": {"data", "errors", "io", "report"},
    "compare": {"errors", "evals", "io", "report"},
    "choose": {"conditions", "data", "errors", "evals", "io", "report"},
    "pipeline": {
        "baselines", "choose", "data", "demo", "errors", "evals", "io", "merger", "recipe", "report", "train",
    },
    "cli": {
        "baselines", "choose", "compare", "data", "errors", "evals", "io", "merger", "pipeline", "recipe", "report",
    },
    "__main__": {"cli"},
    "__init__": {"compare", "evals", "io", "merger", "pipeline", "train"},  # the public functions
}  # fmt: skip
# Modules that hold arithmetic alone: the formula, and the scores of one item.
PURE = ("merger/formula.py", "evals/scoring.py")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(name: str) -> str:
    """The part of msa_lite that a dotted name belongs to; `__init__` for the package itself."""
    first = [*name.split("."), ""][1]
    return first if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file() else "__init__"


def imported_parts(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, part) of each import of msa_lite in a module's source, also inside functions and `if TYPE_CHECKING`.

    module: the dotted name of the package that the source file stands in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, part_of(name)) for name in names if name.split(".")[0] == "msa_lite")


def room_of(path: Path) -> str:
    """The room that a source file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def package_of(path: Path) -> str:
    """The dotted name of the package that a source file stands in."""
    return ".".join(["msa_lite", *path.relative_to(PACKAGE).parts[:-1]])


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_from_exactly_the_rooms_of_the_table(room: str) -> None:
    found: dict[str, str] = {}
    for path in (path for path in SOURCES if room_of(path) == room):
        for line, other in imported_parts(path.read_text(), package_of(path)):
            found.setdefault(other, f"{path.relative_to(PACKAGE)}:{line}")
    found.pop(room, None)
    assert {other: place for other, place in found.items() if other not in ARROWS[room]} == {}
    assert sorted(ARROWS[room] - found.keys()) == [], "arrows that no import needs any more"


def test_every_room_has_its_arrows_and_recipes_stay_at_the_top() -> None:
    assert {room_of(path) for path in SOURCES} == set(ARROWS)
    assert [room for room in ARROWS if "cli" in ARROWS[room]] == ["__main__"]
    assert sorted(room for room in ARROWS if "recipe" in ARROWS[room]) == ["cli", "pipeline"]


def imported_modules(path: Path) -> set[str]:
    """The modules of msa_lite that a source file imports, by dotted name."""
    modules = {".".join(["msa_lite", *p.relative_to(PACKAGE).with_suffix("").parts]): p for p in SOURCES}
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msa_lite"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in modules else f"{node.module}")
    return {name if name in modules else f"{name}.__init__" for name in names}


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """The first circle of a graph, as a list of its nodes; empty where there is none."""
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_go_in_a_circle() -> None:
    modules = {
        ".".join(["msa_lite", *path.relative_to(PACKAGE).with_suffix("").parts]): imported_modules(path)
        for path in SOURCES
    }
    assert circles(ARROWS) == []
    assert circles(modules) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


@pytest.mark.parametrize("name", PURE)
def test_the_modules_of_arithmetic_import_nothing_of_ours(name: str) -> None:
    path = PACKAGE / name
    assert list(imported_parts(path.read_text(), package_of(path))) == []


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import msa_lite.recipe", ["recipe"]),
        ("from msa_lite import merge, recipe", ["__init__", "recipe"]),
        ("def f():\n    from msa_lite.io.hub import fetch", ["io"]),
        ("if TYPE_CHECKING:\n    from msa_lite.cli import main", ["cli"]),
        ("from . import scoring\nfrom .. import merger\nfrom ..io.hub import fetch", ["evals", "merger", "io"]),
        ("import msa_lite_extra, numpy", []),
    ],
)
def test_imports_are_found_in_every_form(source: str, parts: list[str]) -> None:
    assert [part for _, part in imported_parts(source, "msa_lite.evals")] == parts


@pytest.mark.parametrize(
    "statement",
    [
        "import msa_lite",
        "import msa_lite.cli",
        "sys.argv[1:] = ['--help']; runpy.run_module('msa_lite', run_name='__main__')",
        "sys.argv[1:] = ['compare', '--published', 'restor-olmo-2-7b', '--format', 'html']; "
        "runpy.run_module('msa_lite', run_name='__main__')",
        "sys.argv[1:] = ['recipes', 'list']; runpy.run_module('msa_lite', run_name='__main__')",
    ],
)
def test_help_and_listings_load_neither_torch_nor_transformers(statement: str) -> None:
    code = f"import json, runpy, sys\ntry:\n    {statement}\nexcept SystemExit as end:\n    assert not end.code\n"
    code += "print()\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "msa_lite" in loaded
    heavy = {
        "torch",
        "transformers",
        "datasets",
        "peft",
        "accelerate",
        "scipy",
        "openai",
        "lm_eval",
        "matplotlib",
    }
    assert heavy & set(loaded) == set()
