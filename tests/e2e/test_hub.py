"""Checkpoints and data sets from the Hub: the unpatched client libraries against a server on loopback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.hub_clients import Hub

WEIGHTS = save({"model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3)}, {"format": "pt"})
WANTED = {
    "model.safetensors": WEIGHTS,
    "config.json": '{"model_type": "llama", "vocab_size": 4}',
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "LICENSE": "Do as you like.",
    "README.md": "---\nlicense: mit\n---\n# Tiny",  # names the licence; a merge does not copy it
}
UNWANTED = {
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": "raise SystemExit('never run')",
    "notes.md": "# Tiny",
    "checkpoint-10/model.safetensors": WEIGHTS,
    "checkpoint-10/config.json": "{}",
    "inference/generate.py": "raise SystemExit('never run')",
    "additional_chat_templates/old/tool_use.jinja": "TOOLS",
}
CARD = """---
configs:
- config_name: forget
  data_files: forget.json
- config_name: retain
  data_files: retain.json
---
"""
LOAD = """
from dataclasses import replace
from msa_lite.data import DataSource, load_rows, pin_source, stream_texts
def load(source):
    return [[row.question, row.answer] for row in load_rows(source)]
DATA = DataSource('org/data', name='forget')
TEXTS = replace(DATA, format='text', text='answer')
def error_of(function, source):
    try:
        return function(source)
    except MsaError as error:
        return [type(error).__name__, str(error)]
"""


def qa_json(count: int, note: str = "") -> str:
    """Rows of questions and answers as a JSON file."""
    return "".join(json.dumps({"question": f"q{i}{note}", "answer": f"a{i}{note}"}) + "\n" for i in range(count))


def assert_usage_error(result: Any, *parts: str) -> None:
    """`result` is a UsageError with one line, which holds all `parts`."""
    kind, message = result
    assert kind == "UsageError"
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def test_only_weights_and_their_companions_are_fetched(hub: Hub) -> None:
    commit = hub.server.commit("models/org/tiny", {**WANTED, **UNWANTED})
    folder, revision, pinned = hub.fetch("org/tiny@main")
    assert (revision, pinned) == (commit, f"org/tiny@{commit}")
    assert {str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()} == set(WANTED)
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    fetched = [path for _, path in hub.server.requests if "/resolve/" in path]
    assert fetched
    assert [path for path in fetched for name in UNWANTED if path.endswith(f"/resolve/{commit}/{name}")] == []
    config = '{"model_type": "llama", "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}'  # which needs the code
    hub.server.commit("models/org/coded", {**WANTED, **UNWANTED, "config.json": config})
    folder = Path(hub.fetch("org/coded@main")[0])
    assert {str(p.relative_to(folder)) for p in folder.rglob("*.py") if p.is_file()} == {"modeling_tiny.py"}


def test_what_the_cache_holds_needs_no_hub(hub: Hub) -> None:
    hub.server.commit("models/org/tiny", WANTED)
    online = hub.fetch("org/tiny@main")
    asked = len(hub.server.requests)
    assert hub.fetch("org/tiny@main", offline=True) == online
    assert len(hub.server.requests) == asked
    assert_usage_error(hub.fetch("org/other", offline=True), "org/other: no such folder", "HF_HUB_OFFLINE=0")
    hub.server.stop()
    assert hub.fetch("org/tiny@main") == online
    assert_usage_error(hub.fetch("org/other"), "org/other: no such folder", "ConnectError")


def test_the_command_line_merges_from_the_hub_and_records_the_commit(hub: Hub, tmp_path: Path) -> None:
    commit = hub.server.commit("models/org/tiny", {**WANTED, **UNWANTED})
    out = tmp_path / "out"
    done = hub.start("merge", "--target", "org/tiny", "--alpha", "0", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "manifest.json").read_text())["sources"] == {"target": f"org/tiny@{commit}"}
    assert (out / "model.safetensors").read_bytes() == WEIGHTS


@pytest.fixture
def data_hub(hub: Hub) -> Hub:
    """A Hub that has org/data with the configurations forget (2 rows) and retain (5 rows)."""
    hub.server.commit("datasets/org/data", {"README.md": CARD, "forget.json": qa_json(2), "retain.json": qa_json(5)})
    return hub


ROWS = [["q0", "a0"], ["q1", "a1"]]
NEW_ROWS = [["q0 new", "a0 new"]]
UNFETCHED = "could not be fetched from the Hub"


def test_rows_come_from_a_pinned_commit(data_hub: Hub) -> None:
    code = (
        f"{LOAD}old = pin_source(DATA)\nresult = [old == replace(DATA, revision=old.revision), old.revision, load(old)]"
    )
    same, first, rows = data_hub.python(code)
    assert same
    assert rows == ROWS
    second = data_hub.server.commit("datasets/org/data", {"README.md": CARD, "forget.json": qa_json(1, " new")})
    code = f"{LOAD}new = pin_source(DATA)\nresult = [new.revision, load(new), load(DATA), "
    code += f"load(replace(DATA, revision={first!r}))]"
    assert data_hub.python(code) == [second, NEW_ROWS, NEW_ROWS, ROWS]
    assert first != second


def test_rows_come_from_the_cache_without_a_hub(data_hub: Hub) -> None:
    code = f"{LOAD}source = pin_source(DATA)\nresult = [source.revision, load(source), load(DATA)]"
    online = data_hub.python(code)
    assert online[1:] == [ROWS, ROWS]
    asked = len(data_hub.server.requests)
    assert data_hub.python(code, offline=True) == online
    assert len(data_hub.server.requests) == asked
    data_hub.server.stop()  # not offline mode, but no answer: loading works too, after half a minute of retries
    assert data_hub.python(f"{LOAD}result = pin_source(DATA).revision") == online[0]


def test_rows_of_the_hub_are_in_no_cache_of_datasets(data_hub: Hub) -> None:
    assert data_hub.python(f"{LOAD}result = [load(DATA), [row for row in stream_texts(TEXTS)]]")[1] == ["a0", "a1"]
    files = data_hub.pythons.home.rglob("*")
    assert not [path for path in files if "arrow" in path.name or path.name == "org___data"]


def test_a_data_set_that_is_not_there_is_wrong_usage(data_hub: Hub) -> None:
    code = "none, unknown = DataSource('org/none'), [replace(DATA, revision='v9'), replace(DATA, name='holdout')]\n"
    code += (
        "result = [error_of(load, none), error_of(pin_source, none), *(error_of(load, source) for source in unknown)]"
    )
    *missing, revision, name = data_hub.python(LOAD + code)
    for result in missing:
        assert_usage_error(result, "org/none: no such file or folder", UNFETCHED, "Repository Not Found")
    assert_usage_error(revision, "org/data: ", UNFETCHED, "Revision Not Found")
    assert_usage_error(name, "holdout", "retain")
    assert_usage_error(data_hub.python(f"{LOAD}result = load(DATA)", offline=True), "org/data: cannot be loaded")
