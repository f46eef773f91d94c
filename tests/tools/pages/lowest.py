"""The lower bounds of pyproject.toml as exact versions, for an environment with the oldest packages promised."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tests.tools.arrows import ROOT

_HEADER = "# Written by `python -m tests.tools.pages` from pyproject.toml: {}\n"


def lowest_page() -> str:
    """Return constraints/lowest.txt, for all extras. Raise ValueError as `_page`."""
    use = "CI runs all tests with these: PIP_CONSTRAINT=constraints/lowest.txt bash .ci/run"
    extras = _project()["optional-dependencies"].values()
    wanted = [*_project()["dependencies"], *(text for extra in extras for text in extra)]
    return _page(f"its lower bounds as exact versions.\n# {use}", wanted)


def plain_page() -> str:
    """Return constraints/plain.txt, for the plain installation. Raise ValueError as `_page`."""
    return _page(
        "the lower bounds of the plain installation.\n# `.ci/run nightly` tries it with these",
        _project()["dependencies"],
    )


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _page(title: str, requirements: Iterable[str]) -> str:
    """Return the highest bound of each package. Raise ValueError for one without exactly one lower bound."""
    pins: dict[str, str] = {}
    for requirement in map(Requirement, requirements):
        if requirement.name == "msa-lite":
            continue
        bounds = [bound for bound in requirement.specifier if bound.operator != "<"]
        if [bound.operator for bound in bounds] != [">="]:
            raise ValueError(f"pyproject.toml: {requirement}: exactly one lower bound is needed")
        pins[requirement.name] = max(pins.get(requirement.name, "0"), bounds[0].version, key=Version)
    return _HEADER.format(title) + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
