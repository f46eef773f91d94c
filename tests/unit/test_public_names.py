"""The public side of the package: its names, their help, the version and the marker for type checkers."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import msa_lite
from tests.tools.arrows import PACKAGE, ROOT


def test_the_public_names_are_there_and_listed() -> None:
    assert [name for name in msa_lite.__all__ if not callable(getattr(msa_lite, name))] == []
    assert {*msa_lite.__all__, "__version__"} <= set(dir(msa_lite))
    assert {name for name in dir(msa_lite) if not name.startswith("__")} == set(msa_lite.__all__)
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = msa_lite.rum


def test_help_opens_with_one_line_for_each_function() -> None:
    text = pydoc.render_doc(msa_lite, renderer=pydoc.plaintext)
    head = text.partition("PACKAGE CONTENTS")[0]
    lines = re.findall(r"^ {8}(\w+) +\S.*$", head, re.MULTILINE)
    functions = [name for name in msa_lite.__all__ if not isinstance(getattr(msa_lite, name), type)]
    assert sorted(lines) == functions
    assert all(re.search(rf"\b{name}\b", head) for name in msa_lite.__all__)  # the classes of arguments, too
    assert f"\nVERSION\n    {version('msa-lite')}\n" in text


def test_the_version_is_the_installed_one_and_names_load_nothing_heavy() -> None:
    code = (
        "import msa_lite, sys; dir(msa_lite); print(msa_lite.__version__, {'torch', 'numpy', 'click'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [version("msa-lite"), "set()"]


def test_type_checkers_see_the_types_of_an_installed_package() -> None:
    assert (PACKAGE / "py.typed").is_file()
    settings = (ROOT / "pyproject.toml").read_text()
    assert '[tool.hatch.build.targets.wheel]\npackages = ["msa_lite"]' in settings  # all files of it
    ignored = Path(ROOT / ".gitignore").read_text().split()
    assert not any(pattern.strip("/") in ("py.typed", "*.typed", "msa_lite") for pattern in ignored)
