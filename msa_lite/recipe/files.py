"""Find recipes: files of the user, and those that come with the package."""

from __future__ import annotations

from pathlib import Path

from msa_lite.errors import UsageError, nearest
from msa_lite.io.reading import local_path, read_text


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
