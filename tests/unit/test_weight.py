"""The project does not grow by accident: what a small team has to carry stays below a ceiling."""

from __future__ import annotations

from pathlib import Path

from tests.tools.count import code_lines, inner_arrows, totals

# Today's totals. Lower one whenever it falls. Raising one is a decision: CONTRIBUTING lists each, with its reason.
CEILING = {
    "lines of the package": 36_522,
    "modules": 291,
    "lines of the tests": 44_988,
    "words of the docs": 49_995,
    "commands": 25,
    "options": 112,
    "keys of a recipe": 92,
}


def test_nothing_grows_beyond_its_ceiling() -> None:
    counts = totals()
    assert counts.keys() == CEILING.keys()
    assert {name: count for name, count in counts.items() if count > CEILING[name]} == {}


def test_lines_of_code_are_without_blanks_comments_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""One\n\ntwo."""\n\n# three\ndef f():\n    """Four."""\n    return """\nfive"""  # six\n')
    assert code_lines(path) == 3


def test_a_folder_has_few_arrows_inside() -> None:
    arrows = inner_arrows()
    many = {"msa_lite": 116, "msa_lite.train": 56}  # the rooms themselves have a table of their own
    assert {folder: count for folder, count in arrows.items() if count > many.get(folder, 45)} == {}
    assert arrows["msa_lite.pipeline.run"] > arrows["msa_lite.baselines"] > 0
