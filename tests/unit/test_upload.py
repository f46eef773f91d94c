"""Uploads to a Hub on loopback: the order, what is there already, stale files, and what faults leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.errors import FormatError, MsaError, OutputError, StageError, UsageError
from msa_lite.io.weights.hub import explain
from msa_lite.publish.upload import find_destination, push
from tests.support.hub import READER, STRANGER, WRITER, Fault, HubServer
from tests.support.hub_clients import REPO, SHARD, client_of, make_upload, publish, wanted

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of the library's own call


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server, client_of(server):
        yield server


MAIN = f"POST /api/models/{REPO}/commit/main"


@pytest.mark.parametrize(
    ("fault", "message", "status"),
    [
        (Fault("whoami", 401), "`hf auth login`", 2),
        (Fault("whoami", times=99), "nothing was sent", 4),
        (Fault("/api/repos/create", 403), "nothing was sent", 2),
        (Fault("PUT /lfs", times=99), "the same command sends only the rest", 4),
        (Fault("objects/batch", 403), "the same command sends only the rest", 4),
        (Fault(MAIN, 412, times=99), "the Hub answers 412", 4),
        (Fault(MAIN, 500, times=99), "the Hub answers 500", 4),
        (Fault(MAIN, 403, words=f"not {WRITER}, at https://store/x?Signature=abcdef"), "at https://store/x", 4),
    ],
)
def test_a_fault_leaves_main_as_it_was_and_a_rerun_sends_the_rest(
    hub: HubServer, tmp_path: Path, fault: Fault, message: str, status: int
) -> None:
    contents = make_upload(tmp_path / "model")
    hub.faults = [fault]
    with pytest.raises(MsaError) as caught:
        publish(contents)
    text = str(caught.value)
    assert (message in text, caught.value.exit_code) == (True, status), text
    assert WRITER not in text + repr(caught.value)
    assert "abcdef" not in text
    assert caught.value.__suppress_context__
    assert "main" not in hub.branch_names(REPO) or hub.on(REPO) == {}
    hub.faults = []
    stored = hub.received[REPO] if fault.where == MAIN else 0
    publish(contents)
    assert hub.on(REPO) == wanted(contents)
    assert hub.received[REPO] >= 2 * SHARD
    assert fault.where != MAIN or hub.received[REPO] == stored  # the weights were there


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda hub: hub.make(REPO, {"model.safetensors": b"theirs"}), "holds files that msa-lite did not put there"),
        (lambda hub: hub.make(REPO, private=False), "is public already, and is to be private"),
    ],
)
def test_a_repository_of_another_kind_is_refused(
    hub: HubServer, tmp_path: Path, prepare: Callable[[HubServer], None], message: str
) -> None:
    to = find_destination(REPO, private=True)
    prepare(hub)
    before = hub.on(REPO)
    with pytest.raises(OutputError, match=message):
        find_destination(REPO, private=True)
    with pytest.raises(OutputError, match=message):  # it became so meanwhile
        push(make_upload(tmp_path / "model"), to)
    assert hub.on(REPO) == before


@pytest.mark.parametrize("token", [READER, STRANGER, "hf_NobodyKnowsThisToken"])
def test_a_token_that_may_not_write_is_refused_before_anything_is_sent(hub: HubServer, token: str) -> None:
    with client_of(hub, token), pytest.raises(UsageError, match="`hf auth login`") as caught:
        find_destination(REPO, private=True)
    assert token not in str(caught.value)


def test_a_card_that_the_hub_does_not_take_makes_no_repository(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match='"license" must be a string'):
        publish(make_upload(tmp_path / "model", card="---\nlicense: 3\n---\n"))
    assert hub.branch_names(REPO) == []


def test_a_file_that_changes_is_not_published(hub: HubServer, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")
    (tmp_path / "model/model-00002-of-00002.safetensors").write_bytes(b"other")
    with pytest.raises(StageError, match="changed since it was checked; nothing was sent"):
        publish(contents)
    assert hub.on(REPO) == {}


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "made in the browser"])
def test_weights_come_first_and_main_moves_once(hub: HubServer, is_there: bool, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")
    if is_there:
        hub.make(REPO, {"README.md": "---\nlicense: mit\n---\n"})
    result = publish(contents)
    assert hub.on(REPO) == wanted(contents)
    assert result.changed
    paths = [path for method, path in hub.requests if method == "PUT" or "/commit/" in path]
    assert [path.split("/")[1] for path in paths] == ["lfs", "lfs", "api"]  # weights first, then one commit
    assert result.commit == hub.branches(f"models/{REPO}")["main"]
    assert hub.titles[REPO] == ["Published with msa-lite: model", "initial commit"]
    assert hub.branch_names(REPO) == ["main"]
    assert hub.private[REPO] is True
    assert result.new_version == REPO


def test_the_same_again_sends_nothing_and_a_new_card_alone_the_card(hub: HubServer, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")
    first = publish(contents)
    hub.requests.clear()
    hub.received.clear()
    again = publish(contents)
    assert (again.commit, again.changed) == (first.commit, False)
    assert [path for method, path in hub.requests if "/commit/" in path or method == "PUT"] == []
    result = publish(make_upload(tmp_path / "model", card="---\nlicense: mit\n---\n# Better said\n"))
    assert (result.changed, hub.received[REPO]) == (True, 0)
    assert b"Better said" in hub.on(REPO)["README.md"]


def test_stale_files_go_in_the_same_commit_and_other_peoples_stay(hub: HubServer, tmp_path: Path) -> None:
    publish(make_upload(tmp_path / "large", seed=1, shards=3))
    others = dict.fromkeys(("notes.md", "model.gguf", "old/model.safetensors", "handler.py"), b"mine")
    stale = {"additional_chat_templates/old.jinja": b"which transformers would read"}
    hub.commit(f"models/{REPO}", {**hub.find(f"models/{REPO}", "main")[1], **others, **stale})
    contents = make_upload(tmp_path / "small", shards=1)
    before = len(hub.titles[REPO])
    result = publish(contents)
    assert result.deleted == (*stale, *(f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)))
    assert hub.on(REPO) == wanted(contents) | others
    assert len(hub.titles[REPO]) == before + 1


def test_a_public_repository_is_made_only_when_that_is_wanted(hub: HubServer, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")
    publish(contents)
    assert hub.private[REPO]
    with pytest.raises(OutputError, match="is private already, and is to be public"):
        publish(contents, private=False)
    to = find_destination("open", private=False)
    assert (to.repo, to.exists) == ("alice/open", False)
    assert to.describe() == f"alice/open (new, PUBLIC, everybody may see and load it) as alice, at {hub.url}"
    assert replace(to, endpoint="https://huggingface.co").describe().endswith(" as alice")
    push(contents, to)
    assert not hub.private["alice/open"]


def test_offline_without_a_token_and_with_odd_names_nothing_is_asked(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for name in ("a/b/c", "https://huggingface.co/a/b", "alice/x@main", "", "a b"):
        with pytest.raises(UsageError, match="no name of a repository"):
            find_destination(name, private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no token to send with; `hf auth login`"):
        find_destination(REPO, private=True)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"):
        find_destination(REPO, private=True)
    assert hub.requests == []


def test_a_renamed_repository_and_another_organisation(hub: HubServer, tmp_path: Path) -> None:
    hub.make("alice/new-name")
    hub.renamed[REPO] = "alice/new-name"
    with pytest.raises(UsageError, match="is called alice/new-name now"):
        find_destination(REPO, private=True)
    assert find_destination("team/x", private=True).exists is False
    with pytest.raises(UsageError, match="no member of others; choose alice/x"):
        find_destination("others/x", private=True)


def test_a_token_in_the_place_of_the_name_makes_no_repository(hub: HubServer) -> None:
    token = "hf_" + "aBcD" * 8
    for repo in (token, f"alice/{token}"):
        with pytest.raises(UsageError, match="REPO is a token") as error:
            find_destination(repo, private=True)
        assert token not in str(error.value)
    assert hub.requests == []


def test_a_password_in_the_address_of_the_server_is_not_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("//", "//eve:s3cret@"))
    monkeypatch.setattr("tests.support.hub.HubHandler._account", ("alice", "write"))
    to = find_destination(REPO, private=True)
    assert to.endpoint == hub.url
    assert "s3cret" not in to.describe() + to.url


def test_an_error_of_the_client_does_not_tell_the_password_in_an_address() -> None:
    error = RuntimeError("Client error '401' for url 'http://eve:s3cret@127.0.0.1:1/api/models/a/b'\nmore")
    assert explain(error) == "Client error '401' for url 'http://127.0.0.1:1/api/models/a/b' more"
    assert explain(RuntimeError("write to eve@example.org")) == "write to eve@example.org"
