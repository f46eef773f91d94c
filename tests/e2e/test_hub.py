"""Checkpoints and data sets from the Hub: the unpatched client libraries against a server on loopback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, times, write_recipe
from tests.support.hub import Fault
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
    assert hub.fetch("https://huggingface.co/org/tiny/tree/main", offline=True) == online
    assert len(hub.server.requests) == asked
    assert_usage_error(hub.fetch("org/other", offline=True), "org/other: no such folder", "HF_HUB_OFFLINE=0")
    hub.server.stop()
    assert hub.fetch("org/tiny@main") == online
    assert_usage_error(hub.fetch("org/other"), "org/other: no such folder", "ConnectError")


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


def test_of_the_address_of_a_file_that_file_alone_is_read(data_hub: Hub) -> None:
    code = "address = DataSource('https://huggingface.co/datasets/org/data/blob/main/forget.json')\n"
    code += "pinned = pin_source(address)\ntexts = replace(pinned, format='text', text='answer')\n"
    code += (
        "result = [pinned.path, pinned.revision == pin_source(DATA).revision, load(address), [*stream_texts(texts)]]"
    )
    path = "hf://datasets/org/data/forget.json"
    assert data_hub.python(LOAD + code) == [path, True, ROWS, ["a0", "a1"]]
    code = f"result = error_of(load, DataSource({path.replace('forget', 'none')!r}))"
    assert_usage_error(data_hub.python(LOAD + code), "none.json", "org/data has no such file")


def test_rows_of_the_hub_are_in_no_cache_of_datasets(data_hub: Hub) -> None:
    assert data_hub.python(f"{LOAD}result = [load(DATA), [row for row in stream_texts(TEXTS)]]")[1] == ["a0", "a1"]
    files = data_hub.pythons.home.rglob("*")
    assert not [path for path in files if "arrow" in path.name or path.name == "org___data"]


def test_of_texts_in_several_files_no_more_is_fetched_than_is_read(hub: Hub) -> None:
    files = {
        f"en/{number}.jsonl.gz": gzip.compress(json.dumps({"text": f"Of {number}."}).encode()) for number in range(3)
    }
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - {split: train, path: 'en/*.jsonl.gz'}\n---\n"
    hub.server.commit("datasets/org/c4", {"README.md": card, **files})
    code = "texts = stream_texts(replace(TEXTS, path='org/c4', name='en', text='text'))\nresult = next(iter(texts))"
    assert hub.python(LOAD + code) == "Of 0."
    assert {name for _, asked in hub.server.requests for name in files if asked.endswith(name)} == {"en/0.jsonl.gz"}


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


# Merging what is on the Hub: what does not fit is told from headers, before any weights are fetched.


MERGED_ROWS, COLUMNS, RANK = 600, 512, 2
NAME = "model.layers.0.mlp.up_proj"
MERGED_WEIGHTS = "model.safetensors"
BIG = MERGED_ROWS * COLUMNS * 4


def checkpoint(seed: int, rows: int = MERGED_ROWS) -> dict[str, bytes | str]:
    """Files of a one-layer checkpoint of 1.2 MB in the first of two shards."""
    random = np.random.default_rng(seed)
    first = {f"{NAME}.weight": random.standard_normal((rows, COLUMNS)).astype(np.float32)}
    last = {"model.norm.weight": random.standard_normal(COLUMNS).astype(np.float32)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {f"{NAME}.weight": names[0], "model.norm.weight": names[1]}}
    return {
        names[0]: save(first, {"format": "pt"}),
        names[1]: save(last, {"format": "pt"}),
        "model.safetensors.index.json": json.dumps(index),
        "config.json": '{"model_type": "llama"}',
    }


def adapter() -> dict[str, bytes | str]:
    """Files of an adapter for it."""
    a, b = np.ones((RANK, COLUMNS), np.float32), np.ones((MERGED_ROWS, RANK), np.float32)
    tensors = {f"base_model.model.{NAME}.lora_A.weight": a, f"base_model.model.{NAME}.lora_B.weight": b}
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK})
    return {"adapter_model.safetensors": save(tensors, {"format": "pt"}), "adapter_config.json": config}


def merge(hub: Hub, out: Path, extra: str = "", **arguments: Any) -> Any:
    """[class, message] of the error, or the number of weights that changed."""
    call = "".join(f", {key}={value!r}" for key, value in arguments.items())
    code = f"msa_lite.merge('org/target', {str(out)!r}{call})"
    return hub.python(f"{extra}\nimport msa_lite\nresult = {code}.weights_changed")


@pytest.fixture
def repositories(hub: Hub) -> Hub:
    hub.server.commit("models/org/target", checkpoint(0))
    hub.server.commit("models/org/prior", checkpoint(1))
    hub.server.commit("models/org/tuned", checkpoint(2))
    hub.server.commit("models/org/adapter", adapter())
    hub.server.commit("models/org/other", checkpoint(3, MERGED_ROWS + 1))
    return hub


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"forget": "org/tuned", "prior": "org/other"}, "MismatchError", "(601, 512) in the prior"),
        ({"forget": "org/other", "prior": "org/prior"}, "MismatchError", "(601, 512) in the tuned checkpoint"),
    ],
)
def test_what_does_not_fit_costs_no_download(
    repositories: Hub, tmp_path: Path, arguments: dict[str, str], kind: str, says: str
) -> None:
    found, message = merge(repositories, tmp_path / "out", **arguments)
    assert found == kind
    assert says in message
    assert sum(repositories.server.sent.values()) < BIG / 2
    assert not (tmp_path / "out").exists()


def test_what_fits_is_merged_and_recorded_with_its_commits(repositories: Hub, tmp_path: Path) -> None:
    assert merge(repositories, tmp_path / "out", forget="hf.co/org/adapter/", alpha=0.5) == MERGED_ROWS * COLUMNS
    before = np.random.default_rng(0).standard_normal((MERGED_ROWS, COLUMNS)).astype(np.float32)
    after = load_file(tmp_path / "out/model-00001-of-00002.safetensors")[f"{NAME}.weight"]
    assert np.allclose(after, before - 0.5 * RANK, atol=1e-6)
    sources = json.loads((tmp_path / "out/manifest.json").read_text())["sources"]
    pinned = f"org/target@{repositories.server.find('models/org/target', 'main')[0]}"
    assert sources["target"] == pinned
    assert pinned in (tmp_path / "out/mergekit_config.yml").read_text()


def test_the_card_has_the_licence_and_names_what_everybody_may_see(repositories: Hub, tmp_path: Path) -> None:
    """The prior is on no card of a Hub that does not say that it is there for everybody."""
    repositories.server.commit("models/org/target", checkpoint(0) | {"README.md": "---\nlicense: mit\n---\n# Theirs"})
    pages = {name: f"https://huggingface.co/org/{name}/tree/main" for name in ("tuned", "prior")}
    merge(repositories, tmp_path / "out", forget=pages["tuned"], prior=pages["prior"])
    card = (tmp_path / "out/README.md").read_text()
    assert "license: mit" in card
    assert "Theirs" not in card
    assert "org/prior" in card
    code = (
        "from pathlib import Path\nfrom msa_lite.publish.contents import PublishOptions, make_contents\n"
        f"result = make_contents(Path({str(tmp_path / 'out')!r}), PublishOptions(public=True)).card"
    )
    assert "base_model: org/target" in repositories.python(code)
    repositories.server.hide("models/org/prior")
    card = repositories.python(code)
    assert "base_model: org/target" in card
    assert "org/prior" not in card


def test_mergekit_reads_repositories_at_the_commit_that_was_checked(
    hub: Hub, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    names = ("target", "tuned", "later")
    files = {n: {p.name: p.read_bytes() for p in make_checkpoint("llama", s).iterdir()} for s, n in enumerate(names)}
    commits = {name: hub.server.commit(f"models/org/{name}", files[name]) for name in ("target", "tuned")}
    later: list[str] = []  # main moves on while the weights are fetched
    move = lambda: later.append(hub.server.commit("models/org/tuned", files["later"]))  # noqa: E731
    hub.server.faults.append(Fault(r"GET /org/tuned/resolve/.*safetensors", act=move))
    recipe = tmp_path / "ties.yml"
    entry = "{model: org/tuned, parameters: {weight: -1.0, density: 0.5}}"
    recipe.write_text(f"merge_method: ties\nbase_model: org/target\nmodels: [{entry}]\ndtype: float32\n")
    done = hub.start("merge", "--mergekit", str(recipe), "--with", "mergekit", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    sources = json.loads((tmp_path / "out/manifest.json").read_text())["sources"]
    assert sources == {"target": f"org/target@{commits['target']}", "forget": f"org/tuned@{commits['tuned']}"}
    assert later
    assert [path for _, path in hub.server.requests if later[0] in path] == []
    before, after = (load_file(p / MERGED_WEIGHTS) for p in (make_checkpoint("llama", 0), tmp_path / "out"))
    assert any((before[name] != after[name]).any() for name in before)


# Checkpoints by their number of tokens, from a Hub on loopback; and runs that choose their prior from a history.


REPO = "models/org/olmo"
EARLY, LATE = "stage1-step920000-tokens3859B", "stage1-step928646-tokens3896B"
FIRST, SECOND = "stage2-ingredient1-step1000-tokens5B", "stage2-ingredient2-step1000-tokens5B"


def numbered_checkpoint(number: int) -> dict[str, bytes | str]:
    """Files of a checkpoint that differs from others by its weights alone."""
    weights = {"model.embed_tokens.weight": np.full((4, 3), number, np.float32)}
    return {"model.safetensors": save(weights, {"format": "pt"}), "config.json": '{"model_type": "llama"}'}


@pytest.fixture
def commits(hub: Hub) -> dict[str, str]:
    """Commits by branch of a repository with branches as OLMo 2 has them."""
    branches = ["main", EARLY, LATE, FIRST, SECOND]
    return {branch: hub.server.commit(REPO, numbered_checkpoint(i), branch) for i, branch in enumerate(branches)}


def test_a_merge_takes_numbers_for_every_model_and_records_commits(
    hub: Hub, commits: dict[str, str], tmp_path: Path
) -> None:
    models = ["--target", "org/olmo", "--forget", "org/olmo@tokens=3896B", "--prior", "org/olmo@tokens=3859B"]
    done = hub.start("merge", *models, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/manifest.json").read_text())["sources"] == {
        "target": f"org/olmo@{commits['main']}",
        "forget": f"org/olmo@{commits[LATE]}",
        "prior": f"org/olmo@{commits[EARLY]}",
    }
    # θ_D − α (θ_1 − θ_0) = 0 − 1 · (2 − 1)
    assert (tmp_path / "out/model.safetensors").read_bytes() == numbered_checkpoint(-1)["model.safetensors"]
    printed = hub.start("mergekit", *models)
    assert f"org/olmo@{commits[EARLY]}" in printed.stdout, printed.stderr
    assert "tokens=" not in printed.stdout


def test_a_run_takes_the_prior_from_its_history_says_why_and_resumes(
    recipe: dict[str, Any], history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    prior = recipe.pop("prior")  # the target, saved after the exposure, stands for another one
    recipe["history"] = {
        "checkpoints": [
            {"checkpoint": str(history / "target"), "seen_tokens": "30k"},
            {"checkpoint": prior, "seen_tokens": "20k"},
            {"checkpoint": str(history / "start"), "seen_tokens": 0},
        ],
        "exposure": ["40k", "25k"],
    }
    path = write_recipe(recipe, tmp_path)
    why = (
        f"prior: {history / 'prior'}, seen 20k tokens: the latest of 2 checkpoints from before the forget data first "
        "came in at 25k tokens (5k tokens before; 1 later checkpoint has seen it)"
    )
    code, out, err = call_cli("run", path, "--json")
    assert code == 0, err
    assert err.splitlines()[1] == why  # below the line that says what is run
    assert set(json.loads(out)["metrics"]) == {"target", "ideal", "unlearned"}
    resolved = tmp_path / "run/recipe.yaml"
    assert f"# {why}\n" in resolved.read_text()
    pinned = load_recipe(resolved)
    assert (pinned.prior, pinned.history) == (str(history / "prior"), None)

    before = times(tmp_path / "run")
    code, _, err = call_cli(resolved)
    assert (code, why in err) == (0, False)
    assert times(tmp_path / "run") == before
    code, _, err = call_cli("mergekit", path)
    assert (code, err.strip()) == (0, why)
