"""Hostile run folders: names that steer a terminal, odd JSON in any file, and a short run of the fuzzer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import msa_lite
from msa_lite.errors import MsaError
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import MANIFEST, describe_file, load_manifest, verify_stages, write_manifest
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.run import Context, prepare
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.run.report import REPORT_FILES, report_run
from msa_lite.pipeline.verbs.commands import find_verb
from msa_lite.record.check import check_record
from msa_lite.report.run.provenance import PURGED_FILE, RECIPE_FILE
from tests.e2e.conftest import CallCli

SIGNS = "\x1b]0;owned\x07\x1b[31m\x9b\u202e\r"


@pytest.fixture
def hostile(finished: Path, tmp_path: Path) -> Path:
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
    command: tuple[str, ...], as_json: bool, hostile: Path, call_cli: CallCli
) -> None:
    arguments = [word.replace("RUN", str(hostile)) for word in command]
    _, out, err = call_cli(*arguments, *(["--json"] if as_json else []))
    for text in (out, err):
        assert not [sign for sign in SIGNS if not sign.isprintable() and sign in text]
    assert "\\u202e" in out + err or command[0] in ("ask", "report", "compare")
    if as_json and out:
        json.loads(out)


# Every reader of a run's folder takes any JSON in any file of any stage: it goes on, or ends with one message.


READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda run: report_run(run, show_examples=True, rows=True),
    "verify": lambda run: (verify_stages(run), check_record(run)),
    "compare": lambda run: msa_lite.compare([str(run), str(run / "baselines/task_vector")]),
    "purge": msa_lite.purge,
    "dry run": lambda run: msa_lite.dry_run(str(run / RECIPE_FILE)),
    "attack": lambda run: msa_lite.attack(run, ["nothing like it"]),
}
ODD = {
    "null": b"null\n", "number": b"7", "list": b'[{"x": null}]', "object": b'{"kind": [], "models": {"a": null}}',
    "empty": b"", "text": b'"x"', "deep": b"[" * 50_000, "no text": b"\xff\xfe\x00", "infinite": b'{"value": 1e999}',
}  # fmt: skip


def texts_of(run: Path) -> list[Path]:
    """The texts of all stages in the list, and those of the run itself."""
    opened = open_run(run)
    verb = find_verb("run", opened.recipe)
    stages = verb.stages(Context.of(prepare(opened.recipe, verb.scope)))
    folders = [stage.folder for stage in stages if stage.folder and stage.folder.is_dir()]
    assert len(folders) > 8
    inner = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".jsonl")]
    of_weights = ("model", "tokenizer", "config", "generation", "special")
    inner = [path for path in inner if "model" not in path.parts and not path.name.startswith(of_weights)]
    own = [run / name for name in (RECIPE_FILE, PURGED_FILE, PROMPT_FILE, *REPORT_FILES, "verdict.json", "record.json")]
    return [*inner, *own, run / "record.key", run / "attacks/report.json"]


@pytest.mark.parametrize("odd", [pytest.param(o, marks=() if o == "null" else pytest.mark.slow) for o in ODD])
def test_no_content_of_a_file_stops_a_reader_without_a_message(odd: str, attacked: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(attacked, tmp_path / "run"))
    (run / RECIPE_FILE).write_text((run / RECIPE_FILE).read_text().replace(str(attacked), str(run)))
    faults = []
    paths = texts_of(run)
    if odd == "null":  # by default, one file of each name; all of them in the slow tests
        paths = [*{path.name: path for path in paths}.values()]
    for path in paths:
        former = path.read_bytes() if path.is_file() else None
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(ODD[odd])
        sealed = seal_anew(path)
        for name, reader in READERS.items():
            try:
                reader(run)
            except MsaError:
                continue
            except Exception as error:
                faults.append(f"{name} of {path.relative_to(run)}: {type(error).__name__}: {error}")
        for place, content in ((path, former), *sealed):
            place.unlink(missing_ok=True)
            if content is not None:
                place.write_bytes(content)
    assert faults == []


def seal_anew(path: Path) -> list[tuple[Path, bytes]]:
    """Enter a changed file into its stage's manifest, so that it is read; return the manifest as it was."""
    manifest = load_manifest(path.parent)
    if manifest is None or path.name == MANIFEST:
        return []
    former = (path.parent / MANIFEST).read_bytes()
    write_manifest(path.parent, manifest | {"files": manifest["files"] | {path.name: describe_file(path)}})
    return [(path.parent / MANIFEST, former)]


# A short run of the fuzzer, always of the same cases; `python -m tests.tools.fuzz` runs others, for longer.


@pytest.mark.parametrize(
    "options",
    [
        ("--cases", "60", "--each", "1", "--few", "--kills", "0", "--only", "merge", "--only", "kill merge"),
        ("--each", "1", "--few", "--kills", "0", "--only", "kill plain run"),
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                ("--cases", "200", "--only", "merge", "--only", "merge --as adapter"),
                ("--cases", "60", "--only", "moments"),
                ("--cases", "80", "--only", "recipe", "--only", "mergekit"),
                ("--cases", "100", "--only", "run folder", "--only", "handed on"),
                ("--each", "5", "--few", "--kills", "20", "--only", "kills"),
            )
        ),
    ],
    ids=lambda options: options[-1],
)
def test_no_case_breaks_the_contract(options: tuple[str, ...]) -> None:
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.fuzz", "--seed", "0", *options],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 break the contract" in done.stdout
