"""Uploads to a Hub on loopback: the order, what is there already, stale files, and what faults leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.errors import OutputError, StageError, UsageError
from msa_lite.io.files.writing import json_form
from msa_lite.io.weights.hub import explain
from msa_lite.publish.destination import find_destination
from msa_lite.publish.upload import push
from tests.support.hub import WRITER, Fault, HubServer
from tests.support.hub_clients import REPO, SHARD, client_of, make_upload, publish, wanted
from tests.tools.upload_faults import CASES, NOTE, Case, run_case

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of the library's own call


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server, client_of(server):
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_leaves_main_old_or_new_and_a_rerun_sends_the_rest(case: Case, tmp_path: Path) -> None:
    outcome = run_case(case, tmp_path)
    assert outcome.status == case.status, outcome.message
    assert case.message in outcome.message
    assert bool(outcome.message) == bool(case.status)
    assert outcome.main in (("new",) if not case.status else ("old", "empty", "none"))
    assert outcome.main != "empty" or outcome.status == 4  # 2 and 3: nothing is made
    assert outcome.rerun == (None if case.for_good else case.rerun * SHARD)
    assert "\n" not in outcome.message
    assert case.token not in outcome.message


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"7", b'"x"', b"<html>Hello", b"[" * 5000, b"\xff", b""])
@pytest.mark.parametrize(
    "place",
    ["whoami", f"GET /api/models/{REPO}", "repos/create", "preupload", "objects/batch", "/commit/", "auth-check"],
)
def test_answers_of_any_shape_are_told_in_one_line(
    place: str, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case("odd", fault=lambda hub: Fault(place, 200, times=99, content=content), earlier=False)
    outcome = run_case(case, tmp_path)
    assert outcome.main in (("new",) if not outcome.status else ("none", "empty"))
    assert outcome.status in (0, 2, 3, 4)
    if outcome.status:
        assert len(outcome.message) > 40
        assert "\n" not in outcome.message
        assert outcome.message.startswith((f"{REPO}: the server answers as no Hub does", f"{REPO}: the Hub answers"))


def test_waits_are_as_long_as_the_hub_says(tmp_path: Path) -> None:
    cases = {case.name: case for case in CASES}
    assert 7.0 in run_case(cases["429 once, Retry-After 7"], tmp_path).waits
    assert max(run_case(cases["429, Retry-After 3600"], tmp_path).waits, default=0) < 60
    with HubServer() as hub, client_of(hub) as waits:
        hub.faults = [Fault("POST /.*preupload", 429, headers={"Retry-After": "9"})]
        publish(make_upload(tmp_path / "model"))
    assert waits == [10.0]  # the library's own way: a second more


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "made in the browser"])
def test_weights_come_first_and_main_moves_once(hub: HubServer, is_there: bool, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")
    if is_there:
        hub.make(REPO, {"README.md": "---\nlicense: mit\n---\n"})
    result = publish(contents)
    assert hub.on(REPO) == wanted(contents)
    assert result.sent == {item.name: item.nbytes for item in contents.files}
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
    assert (again.commit, again.sent) == (first.commit, {})
    assert [method for method, _ in hub.requests if method != "GET"] == []
    result = publish(make_upload(tmp_path / "model", card="---\nlicense: mit\n---\n# Better said\n"))
    assert ([*result.sent], hub.received[REPO]) == (["README.md"], 0)
    assert b"Better said" in hub.on(REPO)["README.md"]


def test_stale_files_go_in_the_same_commit_and_other_peoples_stay(hub: HubServer, tmp_path: Path) -> None:
    publish(make_upload(tmp_path / "large", seed=1, shards=3))
    others = {NOTE: b"mine", "model.gguf": b"quantised", "old/model.safetensors": b"a folder", "handler.py": b"mine"}
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


@pytest.mark.parametrize("when", ["before", "while it is sent"])
def test_a_file_that_changes_is_not_published(hub: HubServer, tmp_path: Path, when: str) -> None:
    contents = make_upload(tmp_path / "model")

    def change() -> None:
        for name in ("model-00002-of-00002.safetensors", "config.json"):
            (tmp_path / "model" / name).write_bytes(b"other")

    if when == "before":
        change()
    else:
        hub.faults = [Fault("PUT /lfs", act=change)]
    with pytest.raises(StageError, match="changed since it was checked; main is as it was"):
        publish(contents)
    assert hub.on(REPO) == {}


def test_a_hub_that_stores_something_else_is_found_out(hub: HubServer, tmp_path: Path) -> None:
    contents = make_upload(tmp_path / "model")

    def spoil() -> None:  # as main is moved
        oid = next(item.sha256 for item in contents.files if item.name.startswith("model-00001"))
        hub.objects[REPO][oid] = bytes(SHARD)

    hub.faults = [Fault("POST /api/models/.*/commit/main", act=spoil)]
    with pytest.raises(StageError, match=r"does not have what was sent; run again:\n  model-00001-of-00002"):
        publish(contents)


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


def test_a_server_that_is_gone(hub: HubServer, tmp_path: Path) -> None:
    to = find_destination(REPO, private=True)
    hub.faults = [Fault("", times=99)]
    with pytest.raises(StageError, match=r"no answer from the Hub .*; nothing was sent"):
        push(make_upload(tmp_path / "model"), to)
    assert hub.branch_names(REPO) == []


def test_a_repository_that_turns_public_meanwhile_keeps_its_main(hub: HubServer, tmp_path: Path) -> None:
    contents, other = make_upload(tmp_path / "model"), make_upload(tmp_path / "other", seed=3)
    publish(contents)
    to = find_destination(REPO, private=True)
    hub.faults = [Fault("PUT /lfs", act=lambda: hub.private.update({REPO: False}))]
    for _ in ("while weights are sent", "before"):
        with pytest.raises(OutputError, match="is public already"):
            push(other, to)
        assert hub.on(REPO) == wanted(contents)


def test_no_token_is_told_whatever_the_server_says(hub: HubServer, tmp_path: Path) -> None:
    words = f"Bearer {WRITER} is not welcome; neither is {WRITER[::-1]}"
    hub.faults = [Fault("POST /.*/commit/", 403, words=words)]
    with pytest.raises(StageError) as caught:
        publish(make_upload(tmp_path / "model"))
    text = "".join(map(str, [caught.value, repr(caught.value), caught.value.__cause__]))
    assert "is not welcome" in text
    assert WRITER not in text
    assert WRITER[::-1] not in text
    assert caught.value.__suppress_context__


def test_signed_addresses_are_not_told(hub: HubServer, tmp_path: Path) -> None:
    hub.faults = [Fault("POST /.*/commit/", 400, words="at https://store/x?X-Amz-Signature=abcdef now")]
    with pytest.raises(StageError, match=r"at https://store/x now\)") as caught:
        publish(make_upload(tmp_path / "model"))
    assert "abcdef" not in str(caught.value)


def test_an_adapter_is_no_new_version_of_its_model(hub: HubServer, tmp_path: Path) -> None:
    contents = replace(make_upload(tmp_path / "model"), kind="adapter")
    result = publish(contents)
    assert (result.new_version, json_form(result)["kind"]) == (None, "adapter")
    assert hub.titles[REPO][0] == "Published with msa-lite: adapter"


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
