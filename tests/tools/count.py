"""Count what has to be carried: `python -m tests.tools.count` prints lines, files and arrows by room, and totals."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import click

from tests.tools.arrows import ROOT, imported_names, module_of, room_of, sources
from tests.tools.pages.commands import contexts

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> int:
    """Return the lines of a source file that are neither blank, nor comment, nor docstring."""
    source = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in node.body:
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and type(part.value.value) is str
                ):
                    documented.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(used - documented)


def inner_arrows() -> Counter[str]:
    """Return the arrows inside each folder: pairs of its modules and folders of which one imports from the other."""
    pairs: set[tuple[str, str, str]] = set()
    modules = {module_of(path).removesuffix(".__init__") for path in sources()}
    for path in sources():
        own = module_of(path).removesuffix(".__init__").split(".")
        names = {name for _, name in imported_names(path.read_text(), module_of(path).rpartition(".")[0])}
        homes = {name if name in modules else name.rpartition(".")[0] for name in names} & modules
        for home in (home.split(".") for home in homes):
            shared = next((at for at, pair in enumerate(zip(own, home, strict=False)) if len({*pair}) > 1), 99)
            if shared < min(len(own), len(home)):
                pairs.add((".".join(own[:shared]), own[shared], home[shared]))
    return Counter(folder for folder, _, _ in pairs)


@cache
def totals() -> dict[str, int]:
    """Return totals by name: lines of code, words of the docs, and what a user may set; a data source is one key."""
    from msa_lite.recipe import Recipe
    from tests.tools.keys import recipe_keys

    commands = [context.command for context in contexts()]
    keys = {_source(key) for key, _ in recipe_keys(Recipe)}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    return {
        "lines of the package": sum(map(code_lines, sources())),
        "modules": len(sources()),
        "lines of the tests": sum(map(code_lines, (ROOT / "tests").rglob("*.py"))),
        "words of the docs": sum(len(page.split()) for page in pages),
        "commands": len(commands),
        "options": sum(isinstance(given, click.Option) for command in commands for given in command.params),
        "keys of a recipe": len(keys),
    }


def _source(key: str) -> str:
    """Return the key of a data source for each of the keys below it."""
    place, found, _ = f".{key}".rpartition(".columns.")
    place = place if found else f".{key}".rpartition(".")[0]
    names = ("data", "forget", "retain", "holdout", "against")
    is_source = place.rpartition(".")[2] in names and place.count(".") == 2
    return place.removeprefix(".") if is_source else key


def table() -> str:
    """Return lines of code, files and the most arrows in one folder of each room, the largest first, and the totals."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sources():
        lines[room_of(path)] += code_lines(path)
        files[room_of(path)] += 1
    arrows: dict[str, int] = {}
    for folder, count in inner_arrows().items():
        room = folder.removeprefix("msa_lite").removeprefix(".").partition(".")[0]
        arrows[room] = max(count, arrows.get(room, 0))
    rows = [f"{'room':<16}{'lines':>8}{'files':>8}{'arrows':>8}"]
    rows += [f"{room:<16}{count:>8,}{files[room]:>8}{arrows.get(room, 0):>8}" for room, count in lines.most_common()]
    return "\n".join([*rows, "", *(f"{name:<24}{count:>8,}" for name, count in totals().items())])


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
