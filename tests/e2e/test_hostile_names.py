"""File names, folders and metric keys with signs that steer a terminal: shown by every command that prints them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import describe_file, load_manifest, write_manifest
from tests.e2e.conftest import CallCli

SIGNS = "\x1b]0;owned\x07\x1b[31m\x9b\u202e\r"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run with such names in it: a file, a folder, a stage, a link, a metric, and a request."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / f"stray{SIGNS}").write_text("x")
    (folder / f"link{SIGNS}").symlink_to(f"nowhere{SIGNS}")
    (folder / f"folder{SIGNS}").mkdir()
    (folder / f"folder{SIGNS}/x").write_text("x")
    (folder / f"model/extra{SIGNS}").write_text("x")
    with stage_folder(folder / f"evaluation/stage{SIGNS}", "evaluation", {}) as partial:
        (partial / f"x{SIGNS}.jsonl").write_text("{}")
    for name in ("target", "unlearned", "ideal"):
        place = folder / "evaluation" / name
        report = json.loads((place / "report.json").read_text())
        report["metrics"][f"metric{SIGNS}"] = next(iter(report["metrics"].values()))
        (place / "report.json").write_text(json.dumps(report))
        manifest = load_manifest(place)
        assert manifest is not None
        files = manifest["files"] | {"report.json": describe_file(place / "report.json")}
        write_manifest(place, manifest | {"files": files})
    return folder


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ("verify", "RUN"), ("purge", "RUN"), ("report", "RUN"), ("compare", "RUN"), ("purge", "RUN", "--yes"),
        ("ask", "RUN", f"who{SIGNS}"), ("verify", f"RUN{SIGNS}"),
        ("merge", "--target", f"a{SIGNS}", "--forget", "x", "--alpha", "1", "--out", "out"),
        ("recipes", "validate", f"a{SIGNS}.yaml"), ("run", "RUN/recipe.yaml", f"forget.{SIGNS}=1", "--dry-run"),
        ("publish", "RUN", f"a/b{SIGNS}", "--dry-run"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_name_of_others_steers_the_terminal(
    command: tuple[str, ...], as_json: bool, run: Path, call_cli: CallCli
) -> None:
    arguments = [word.replace("RUN", str(run)) for word in command]
    _, out, err = call_cli(*arguments, *(["--json"] if as_json else []))
    for text in (out, err):
        assert not [sign for sign in SIGNS if not sign.isprintable() and sign in text]
    assert "\\u202e" in out + err or command[0] in ("ask", "report", "compare")
    if as_json and out:
        json.loads(out)
