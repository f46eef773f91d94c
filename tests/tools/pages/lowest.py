"""The lower bounds of pyproject.toml as exact versions, for an environment with the oldest packages promised."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement

from tests.tools.arrows import ROOT

_HEADER = """# Written by `python -m tests.tools.pages` from pyproject.toml: its lower bounds as exact versions.
# CI runs all tests with these: PIP_CONSTRAINT=constraints/lowest.txt bash .ci/run
"""


def lowest_page() -> str:
    """Return constraints/lowest.txt. Raise ValueError for a dependency without exactly one lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    pins = {}
    for text in (*project["dependencies"], *(text for extra in extras for text in extra)):
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            continue
        bounds = [bound for bound in requirement.specifier if bound.operator != "<"]
        if [bound.operator for bound in bounds] != [">="]:
            raise ValueError(f"pyproject.toml: {text}: exactly one lower bound is needed")
        pins[requirement.name] = bounds[0].version
    return _HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
