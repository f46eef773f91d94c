"""Find recipes: files of the user, and those that come with the package."""

from __future__ import annotations

from pathlib import Path

from msa_lite.errors import OutputError, UsageError, nearest
from msa_lite.io.files import write_text
from msa_lite.io.reading import local_path, read_text

_ENDINGS = (".yaml", ".yml")


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name (`quickstart`, `tofu/forget10`, …)."""
    package = Path(__file__).parents[1]
    folder = next((f for f in (package / "shipped_recipes", package.parent / "recipes") if f.is_dir()), None)
    if folder is None:
        return {}
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: the user's own, or a shipped one by name. Raise UsageError for neither."""
    path = local_path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    key = name.removeprefix("recipes/").removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    choices = ", ".join(shipped) or "none"
    raise UsageError(f"{name}: neither a file nor a shipped recipe{nearest(key, shipped)}; shipped are {choices}")


def title_of(path: Path) -> str:
    """Return the first comment line of a recipe file, which says what it is for."""
    first = read_text(path).partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def copy_recipe(name: str, file: str, force: bool = False) -> Path:
    """Copy a shipped recipe, with its comments, to a new file; return the file. Raise as `check_new_file`.

    The copy means the same as the original: the relative paths of both start from the working folder.
    """
    shipped, path = find_recipe(name), local_path(file)
    if shipped not in shipped_recipes().values():
        raise UsageError(f"{name}: is a file of your own, not a shipped recipe; `cp` copies it")
    check_new_file(path, force)
    write_text(path, read_text(shipped))
    return path


def check_new_file(path: Path, force: bool = False) -> None:
    """Raise UsageError or OutputError unless a recipe can be written to this file. force: it may replace a file."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{path}: a recipe's file ends in .yaml, as {path.name or 'my-request'}.yaml")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name the file to write")
    if path.exists() and not force:
        raise OutputError(f"{path}: is there already; name another file, or replace it with --force")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another place")
