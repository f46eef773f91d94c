"""Who may import whom, read from the source; and what stays out of memory until it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import msa_lite

PACKAGE = Path(msa_lite.__file__).parent
PARTS = {"data", "mergekit", "report", "train", "vectors"}
STAGES = {"baselines", "demo", "evals", "merger"}
# Part of the package → what it may import besides itself, wherever the import stands.
ALLOWED = {
    "errors": set[str](),
    "conditions": set[str](),
    "counts": set[str](),
    "io": {"counts", "errors"},
    **{part: {"errors", "io", *PARTS} for part in PARTS | STAGES},
    "evals": {"conditions", "errors", "io", *PARTS},
    "recipe": {"conditions", "counts", "errors", "io"},
    "pipeline": {"errors", "io", "job", "recipe", *PARTS, *STAGES},
    "job": {"errors", "io", "recipe", *PARTS, *STAGES},
    "cli": {"baselines", "data", "errors", "evals", "io", "mergekit", "merger", "pipeline", "recipe", "report"},
    "__main__": {"cli"},
    "__init__": {"evals", "io", "merger", "pipeline", "train"},  # the public functions
}
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    part = inside.parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} has no layer yet: give it one in ALLOWED"
    module = ".".join(["msa_lite", *inside.parts[:-1]])
    wrong = [
        f"line {line}: {part} imports {other}"
        for line, other in imported_parts(path.read_text(), module)
        if other not in {part, *ALLOWED[part]}
    ]
    assert wrong == []


def test_every_layer_of_the_table_is_there_and_stages_do_not_meet() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES} == set(ALLOWED)
    assert [part for part in STAGES if ALLOWED[part] & STAGES] == []
    assert [part for part in ALLOWED if "cli" in ALLOWED[part]] == ["__main__"]
    assert sorted(part for part in ALLOWED if "recipe" in ALLOWED[part]) == ["cli", "job", "pipeline"]


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
        "ray",
    }
    assert heavy & set(loaded) == set()
