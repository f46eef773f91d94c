"""A run that was made from another working folder is found, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_lite.pipeline.run.folder import find_former_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two recipes, a run beside the first and a folder of another purpose."""
    for file in (
        "project/my.yaml",
        "project/runs/mine/recipe.yaml",
        "project/sub/deeper/x",
        "project/runs/other/notes",
        "y/x",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("working", "recipe", "output", "is_found"),
    [
        ("y", "../project/my.yaml", "runs/mine", True),  # beside the recipe
        ("project/sub/deeper", "quickstart", "runs/mine", True),  # above the working folder
        (".", "quickstart", "runs/mine", True),  # one folder down
        ("y", "quickstart", "runs/mine", False),
        ("project", "my.yaml", "runs/mine", False),  # it is here, and the run goes on with it
        ("y", "../project/my.yaml", "runs/other", False),  # no run
        ("y", "../project/my.yaml", "{home}/runs/mine", False),  # means one place from anywhere
    ],
)
def test_a_run_from_another_working_folder_is_found(
    working: str, recipe: str, output: str, is_found: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / working)
    assert find_former_run(output.format(home=home), recipe) == (home / "project/runs/mine" if is_found else None)
