"""What of a folder may be published: which files, a card for the public, nothing private, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file

from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, add_files, verify_folder
from msa_lite.publish import private
from msa_lite.publish.contents import Contents, PublishOptions, changed_when_sent, make_contents
from msa_lite.publish.private import Secrets, clean_config
from msa_lite.report.page.card import model_card
from tests.support.merges import OUTCOME, add_outcome, make_merge, write_parts

CARD = "---\nlicense: apache-2.0\n---\n"
MODEL = [
    "LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", CARD_FILE, MANIFEST,
]  # fmt: skip


def contents(folder: Path, open_repositories: set[str] | None = None, **options: Any) -> Contents:
    """What may be sent, where these repositories are public."""
    return make_contents(folder, PublishOptions(**options), lambda repo: repo in (open_repositories or set()))


def bytes_of(sent: Contents) -> dict[str, bytes]:
    """The content of every file by name, as described."""
    values = {file.name: file.read() for file in sent.files}
    known = {file.name: (file.sha256, file.nbytes) for file in sent.files}
    assert known == {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in values.items()}
    return values


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A merged model whose target has no card."""
    write_parts(tmp_path)
    return make_merge(tmp_path)


def download(sent: Contents, place: Path) -> Path:
    """The folder that somebody has who downloads the repository."""
    place.mkdir()
    for name, data in bytes_of(sent).items():
        (place / name).write_bytes(data)
    (place / ".cache/huggingface").mkdir(parents=True)
    (place / ".cache/huggingface/x.lock").touch()
    (place / ".gitattributes").write_text("* -text")
    return place


def test_code_and_further_templates_of_the_target_go_along_and_are_told(tmp_path: Path) -> None:
    write_parts(tmp_path, CARD)
    target = tmp_path / "target"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Own"}}))
    (target / "modeling_own.py").write_text("class Own: ...")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    out = make_merge(tmp_path)
    sent = contents(out)
    assert {"modeling_own.py", "additional_chat_templates/tool_use.jinja"} <= {file.name for file in sent.files}
    assert [caution for caution in sent.cautions if "Python code" in caution and "modeling_own.py" in caution]
    (target / "modeling_own.py").write_text("# made in /home/eve/secret")
    shutil.rmtree(out)
    with pytest.raises(MismatchError, match=r"modeling_own\.py"):
        contents(make_merge(tmp_path, alpha=1.1))


def test_a_model_goes_with_what_loading_needs_and_a_card_for_the_public(tmp_path: Path) -> None:
    write_parts(tmp_path, CARD)
    out = make_merge(tmp_path)
    shutil.copyfile(tmp_path / "target/trainer_state.json", out / "state.json")  # the merge does not take it along
    add_files(out, ["state.json"], {"outcome": OUTCOME})
    sent = contents(out, repo="me/unlearned")
    assert [file.name for file in sent.files] == MODEL
    assert (sent.kind, sent.folder) == ("model", out)
    assert sent.card.encode() == bytes_of(sent)[CARD_FILE]
    manifest = json.loads(bytes_of(sent)[MANIFEST])
    assert model_card(manifest) == sent.card.replace("me/unlearned", "PATH/TO/THIS/FOLDER")
    assert manifest["outcome"] == json.loads(json.dumps(OUTCOME))
    assert ModelCard(sent.card).data.license == "apache-2.0"
    assert 'place = "me/unlearned"' in sent.card
    assert "name_or_path" not in bytes_of(sent)["tokenizer_config.json"].decode()
    everything = b"".join(bytes_of(sent).values())
    for private_part in (str(tmp_path), "/home/eve", "trainer", "run/model", "forget/"):
        assert private_part.encode() not in everything
    assert next(caution for caution in sent.cautions if caution.startswith("not sent")).endswith(" state.json")


def test_a_download_can_be_verified_and_told_from_a_changed_one(tmp_path: Path) -> None:
    write_parts(tmp_path, CARD)
    out = make_merge(tmp_path, hub=True)
    add_outcome(out)
    place = download(contents(out, {"me/target"}), tmp_path / "download")
    assert verify_folder(place) == []
    assert contents(place).card.startswith("---")  # it can be handed on from there
    (place / "config.json").write_text("{}")
    (place / "extra").touch()
    assert [fault.partition(":")[0] for fault in verify_folder(place)] == ["config.json", "extra"]


def test_a_run_is_taken_for_its_model_or_adapter(tmp_path: Path) -> None:
    write_parts(tmp_path)
    model = make_merge(tmp_path)
    assert contents(tmp_path / "run").folder == model
    adapter = make_merge(tmp_path, "adapter")
    with pytest.raises(UsageError, match="both a model and an adapter; say which one with --as"):
        contents(tmp_path / "run")
    assert contents(tmp_path / "run", form="adapter").folder == adapter
    with pytest.raises(UsageError, match="holds the model, not the adapter"):
        contents(model, form="adapter")
    with pytest.raises(UsageError, match="neither model nor adapter of msa-lite in there"):
        contents(tmp_path)


def test_the_base_is_named_where_the_hub_says_that_it_is_public(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for form in ("model", "adapter"):
        out = make_merge(tmp_path, form, hub=True)
        hidden = contents(out)
        kept = {item.name: item.sha256 for item in hidden.files if item.name not in (CARD_FILE, MANIFEST)}
        own = {name: hash_file(out / name) for name in kept}
        changed = changed_when_sent(out, own)
        assert own | changed == kept
        assert ("adapter_config.json" in changed) is (form == "adapter")
        everything = b"".join(bytes_of(hidden).values())
        assert b"me/target" not in everything
        assert b"them/prior" not in everything
        assert "a model whose name is not given" in hidden.card
        assert any("does not name the target" in caution for caution in hidden.cautions)
        assert b"them/prior" not in b"".join(bytes_of(contents(out, {"me/target"})).values())
        shown = contents(out, {"me/target", "them/prior"})
        assert ModelCard(shown.card).data.base_model == "me/target"
        assert "them/prior" in shown.card
        assert not any("does not name" in caution for caution in shown.cautions)
        if form == "adapter":
            assert json.loads(bytes_of(shown)["adapter_config.json"])["base_model_name_or_path"] == "me/target"


def test_a_config_goes_as_it_is_or_without_any_origin(tmp_path: Path) -> None:
    path, private = tmp_path / "config.json", Secrets({}, frozenset())
    told = Secrets({"target": "me/target@main"}, frozenset())
    path.write_text('{"_name_or_path": "me/target", "tokenizer_name_or_path": "/home/eve/x", "a": 1}')
    assert json.loads(clean_config(path, told)[0] or "") == {"a": 1}
    assert clean_config(path, told) == clean_config(path, private), "of which the record has the hash"
    path.write_text('{"_name_or_path": "me/target"}')
    assert clean_config(path, told) == (None, [])


def test_a_public_model_needs_a_licence(out: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no licence; give the one that holds with --license"):
        contents(out, public=True)
    given = contents(out, public=True, license="mit")
    assert ModelCard(given.card).data.license == "mit"
    with pytest.raises(UsageError, match=r"no licence of the Hub"):
        contents(out, license="a b\nc")
    write_parts(tmp_path / "other", CARD)
    with pytest.raises(UsageError, match=r"has apache-2.0, which holds"):
        contents(make_merge(tmp_path / "other"), license="mit")


def test_a_verdict_of_fail_needs_consent(out: Path) -> None:
    assert any("nothing was scored" in caution for caution in contents(out).cautions)
    (out.parent / "verdict.json").write_text('{"outcome": "FAIL", "sentence": "It knows all."}')  # a run stopped there
    with pytest.raises(UsageError, match=r"its verdict is FAIL. It knows all."):
        contents(out)
    (out.parent / "verdict.json").write_text('{"outcome": "PASS", "sentence": "It knows nothing."}')
    add_outcome(out, verdict="PARTLY")
    assert any("its verdict is PARTLY: It still answers" in caution for caution in contents(out).cautions)
    add_outcome(out, verdict="FAIL")
    with pytest.raises(UsageError, match=r"(?s)its verdict is FAIL.*--accept"):
        contents(out)
    assert "**FAIL**" in contents(out, accept=True).card


def make_stage(folder: Path, kind: str, files: dict[str, str] | None = None) -> Path:
    """A finished folder of this kind."""
    with stage_folder(folder, kind, {"settings": {"mode": "full"}}) as partial:
        for name, text in (files or {"rows.jsonl": "{}"}).items():
            (partial / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", ["evaluation", "sweep", "checkpoint"])
def test_other_folders_are_refused_with_any_consent(tmp_path: Path, kind: str) -> None:
    folder = make_stage(tmp_path / "stage", kind)
    with pytest.raises(UsageError, match="only an unlearned model or an adapter can be published"):
        contents(folder, can_undo=True, accept=True)


def test_vectors_need_consent_and_go_without_records(tmp_path: Path) -> None:
    write_parts(tmp_path)
    files = {path.name: path for path in (tmp_path / "forget").iterdir()}
    with stage_folder(tmp_path / "vector", "vector", {"settings": {"mode": "lora", "lora_rank": 2}}) as partial:
        for name, path in files.items():
            shutil.copyfile(path, partial / name)
        (partial / "rows.jsonl").write_text("{}")
        (partial / "train_log.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"(?s)is a vector.*can put the data back.*--i-know-this-can-undo-the-removal"):
        contents(tmp_path / "vector")
    sent = contents(tmp_path / "vector", can_undo=True)
    assert [file.name for file in sent.files] == ["adapter_config.json", "adapter_model.safetensors", CARD_FILE]
    assert "can put that data back" in sent.card
    assert ModelCard(sent.card).data.library_name == "peft"


def test_a_merge_that_subtracts_nothing_needs_consent(tmp_path: Path) -> None:
    """It is the target itself, or the target with data added: a forget-tuned model may be made so."""
    write_parts(tmp_path)
    out = make_merge(tmp_path, alpha=0.0)
    with pytest.raises(UsageError, match=r"(?s)nothing was subtracted.*--i-know-this-can-undo-the-removal"):
        contents(out)
    assert contents(out, can_undo=True).kind == "model"


def test_a_folder_that_is_not_as_it_was_written_is_refused(out: Path) -> None:
    (out / CARD_FILE).write_text("my own words")
    (out / "notes.txt").write_text("for me")
    sent = contents(out)
    assert "my own words" not in sent.card
    assert any("changes that you made in README.md do not go along" in caution for caution in sent.cautions)
    assert any("notes.txt" in caution for caution in sent.cautions)
    assert "notes.txt" not in bytes_of(sent)
    (out / "tokenizer.json").write_text("{}")
    (out / "config.json").unlink()
    with pytest.raises(MismatchError, match=r"(?s)config.json: missing.*tokenizer.json: "):
        contents(out)
    (out / MANIFEST).write_text((out / MANIFEST).read_text().replace("1.2", "0.2"))
    with pytest.raises(MismatchError, match="not as msa-lite wrote it"):
        contents(out)


PLACES: list[Any] = ["~/secret", "C:\\Users\\eve", "file:///x", {"deep": ["/srv/eve/x"]}, "is me/target"]
PRIVATE = [
    ("NOTICE", "Made of them/prior.", ".*holds the name of a model that is not to be told; change it and merge again"),
    ("chat_template.jinja", "{# from ~eve/acme/x #}{{ messages }}", ".*holds a path of a machine; change it"),
    ("preprocessor_config.json", '{"note": "see file:///scratch/acme"}', ".*holds a path of a machine; change it"),
    *(("config.json", json.dumps({"model_type": "llama", "custom": {"place": value}}), "custom.place")
      for value in PLACES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "fault"), PRIVATE)
def test_a_private_word_within_any_text_is_refused(tmp_path: Path, name: str, text: str, fault: str) -> None:
    write_parts(tmp_path)
    (tmp_path / "target" / name).write_text(text)
    with pytest.raises(MismatchError, match=rf"{name}: {fault}"):
        contents(make_merge(tmp_path, hub=True), {"me/target"} if name != "config.json" else None)


@pytest.mark.parametrize(
    "text", ["https://example.org/home/eve", "{{ a }}/{{ b }}</think>\n\n", "and/or/not 1/2/3 ~5/6"]
)
def test_addresses_and_slashes_are_no_paths(tmp_path: Path, text: str) -> None:
    write_parts(tmp_path)
    for name in ("LICENSE", "chat_template.jinja"):
        (tmp_path / "target" / name).write_text(text)
    sent = bytes_of(contents(make_merge(tmp_path)))
    assert sent["LICENSE"] == sent["chat_template.jinja"] == text.encode()


@pytest.mark.parametrize(
    ("notes", "fault"),
    [
        ({}, None),
        ({"comment": "Maria was born in Toledo."}, None),
        ({"trained_in": "the folder /home/eve/7"}, "its header holds a path of a machine"),
        ({"/home/eve/7": "1"}, "its header holds a path of a machine"),
    ],
)
def test_notes_in_the_header_of_the_weights_are_told_and_hold_no_path(
    tmp_path: Path, notes: dict[str, str], fault: str | None
) -> None:
    write_parts(tmp_path)
    path = tmp_path / "target/model.safetensors"
    save_file(load_file(path), path, {"format": "pt", **notes})
    out = make_merge(tmp_path)
    if fault:
        with pytest.raises(MismatchError, match=fault):
            contents(out)
    else:
        told = "notes in the header of the weights go along: comment" in contents(out).cautions
        assert told == bool(notes)


def test_what_somebody_wrote_into_the_manifest_is_not_sent(out: Path) -> None:
    add_outcome(out, examples=[{"question": "Where was Maria born?"}])
    assert b"Maria" not in b"".join(bytes_of(contents(out)).values())
    add_outcome(out, reasons=["see /home/eve/rows.jsonl"])
    with pytest.raises(MismatchError, match=r"the README\.md to send would hold a path of a machine"):
        contents(out)
    (out / "LICENSES").mkdir()
    (out / "LICENSES/rows.txt").write_text("Maria")
    add_files(out, ["LICENSES/rows.txt"], {"outcome": OUTCOME})
    assert "LICENSES/rows.txt" not in bytes_of(contents(out))


def test_origins_that_libraries_note_are_left_out(tmp_path: Path) -> None:
    inner = {"_name_or_path": "runs/acme/target", "layers": [{"name_or_path": "acme"}]}
    write_parts(tmp_path, _name_or_path="/home/eve/model", transformers_version="5.0", text_config=inner)
    sent = bytes_of(contents(make_merge(tmp_path)))
    assert json.loads(sent["config.json"]) == {
        "model_type": "llama", "dtype": "float32", "vocab_size": 300, "transformers_version": "5.0",
        "text_config": {"layers": [{}]},
    }  # fmt: skip


def test_all_reasons_come_in_one_message(out: Path) -> None:
    add_outcome(out, verdict="FAIL")
    (out / "config.json").unlink()
    with pytest.raises(MsaError, match=r"(?s)3 faults.*--accept.*--license.*config.json: missing"):
        contents(out, public=True)


def test_offline_no_repository_counts_as_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert private.is_public("gpt2") is False
