"""The rooms of the package and who imports whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "msa_lite"
Graph = Mapping[str, set[str]]
FOLDERED = ("pipeline", "evals", "report", "merger", "train", "io")  # rooms that are drawn inside, too


def sources() -> list[Path]:
    """Return the source files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room that a source file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """Return a source file's dotted name."""
    return ".".join(["msa_lite", *path.relative_to(PACKAGE).with_suffix("").parts])


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for each import of msa_lite, also inside functions and `if TYPE_CHECKING`.

    package: the dotted name of the package that the source file stands in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "msa_lite")


def imported_rooms(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, room) for each import of msa_lite; the package itself is the room `__init__`."""
    for line, name in imported_names(source, package):
        first = [*name.split("."), ""][1]
        is_room = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
        yield line, first if first and is_room else "__init__"


def room_graph() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    graph: dict[str, set[str]] = {}
    for path in sources():
        package = module_of(path).rpartition(".")[0]
        rooms = {room for _, room in imported_rooms(path.read_text(), package)}
        graph.setdefault(room_of(path), set()).update(rooms - {room_of(path)})
    return graph


def folder_graph(room: str) -> dict[str, set[str]]:
    """Return the folders (and modules beside them) of a room that each of its folders imports from."""
    place, prefix = PACKAGE / room, f"msa_lite.{room}."
    graph: dict[str, set[str]] = {}
    for path in sorted(place.rglob("*.py")):
        folder = path.relative_to(place).parts[0].removesuffix(".py")
        names = (name for _, name in imported_names(path.read_text(), module_of(path).rpartition(".")[0]))
        inner = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        graph.setdefault(folder, set()).update(inner - {folder})
    graph.pop("__init__")
    return graph


def module_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports from."""
    graph = {}
    for path in sources():
        module = module_of(path)
        names = {name for _, name in imported_names(path.read_text(), module.rpartition(".")[0])}
        graph[module] = {_home(name) for name in names} - {module}
    return graph


def _home(name: str) -> str:
    """Return the module that a dotted name stands for, or is defined in."""
    place = ROOT.joinpath(*name.split("."))
    if place.with_suffix(".py").is_file():
        return name
    return f"{name}.__init__" if place.is_dir() else _home(name.rpartition(".")[0])


def find_circle(graph: Graph) -> list[str]:
    """Return the nodes of a circle, or nothing where there is none."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def without_detours(graph: Graph) -> dict[str, set[str]]:
    """Return the graph without the arrows that a longer way says already (transitive reduction)."""
    reach: dict[str, set[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        reach[node] = graph[node].union(*(reach[other] for other in graph[node]))
    return {node: {to for to in graph[node] if not any(to in reach[o] for o in graph[node])} for node in graph}


def drawing() -> str:
    """Return the rooms as a Mermaid drawing and a table of all arrows, in Markdown."""
    graph = room_graph()
    arrows = without_detours(graph)
    heights: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        heights[room] = 1 + max((heights[other] for other in graph[room]), default=0)
    order = sorted(graph, key=lambda room: (-heights[room], room))
    lines = ["```mermaid", "graph TD"]
    lines += [f"    {room} --> {other}" for room in order for other in sorted(arrows[room]) if room.strip("_") == room]
    lines += ["```", "", "| room | purpose | imports from |", "|---|---|---|"]
    for room in (room for room in order if room.strip("_") == room):
        lines.append(f"| `{room}` | {purpose(room)} | {', '.join(sorted(graph[room])) or '–'} |")
    for room in FOLDERED:
        inner = folder_graph(room)
        ordered = {folder: sorted(inner[folder]) for folder in sorted(inner)}  # so that the order is always the same
        lines += ["", f"Inside `{room}`:", "", "| folder | purpose | imports from |", "|---|---|---|"]
        for folder in TopologicalSorter(ordered).static_order():
            lines.append(f"| `{folder}` | {purpose(f'{room}/{folder}')} | {', '.join(ordered[folder]) or '–'} |")
    return "\n".join(lines) + "\n"


def purpose(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    path = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")
