"""Send a model or adapter to the Hub in one commit, so that its main branch is never half updated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msa_lite.errors import FormatError, MsaError, OutputError, StageError, UsageError, at_most
from msa_lite.io.files.spellings import masked, without_login
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, MERGEKIT_FILE
from msa_lite.io.weights.companions import TEMPLATES
from msa_lite.io.weights.hub import explain
from msa_lite.publish.contents import PublishOptions, make_contents

if TYPE_CHECKING:
    from msa_lite.publish.contents import Contents


TITLE = "Published with msa-lite"  # the first words of a commit on main, by which a repository is known as ours
LOGIN = "`hf auth login` with a token that may write (https://huggingface.co/settings/tokens), or set HF_TOKEN"
_HUB = "https://huggingface.co"
_TOKEN = re.compile(r"(?:^|/)(?:hf|api_org)_[A-Za-z0-9]{20,}$")
_QUERY = re.compile(r"\?[^\s'\"]+")  # of a URL; that of a storage server signs the request
_OF_ANYBODY = {".gitattributes", ".gitignore", CARD_FILE, "LICENSE"}  # in a repository that was made in the browser
# Files that an earlier upload may have left and that loaders would read. Anything else there is left alone.
_LOADED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    MERGEKIT_FILE, MANIFEST, TEMPLATES,
)  # fmt: skip


@dataclass(frozen=True)
class Destination:
    """A repository of the Hub to send to, which may not exist yet."""

    repo: str
    """Its full name, ACCOUNT/NAME."""
    private: bool
    """True if only its owner is to see it."""
    account: str
    """The name of the account that sends."""
    exists: bool
    """True if it is there already."""
    files: frozenset[str]
    """The names of the files on its main branch."""
    endpoint: str
    """The server, without a password that its address may hold."""

    @property
    def url(self) -> str:
        """Return its page."""
        return f"{self.endpoint}/{self.repo}"

    def describe(self) -> str:
        """Return one line for people."""
        privacy = "private" if self.private else "PUBLIC, everybody may see and load it"
        server = "" if self.endpoint == _HUB else f", at {self.endpoint}"
        return f"{self.repo} ({'there already' if self.exists else 'new'}, {privacy}) as {self.account}{server}"


def check_name(repo: str) -> None:
    """Raise UsageError for a name that no repository can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if _TOKEN.search(repo):  # its name would be the token, for all to see
        raise UsageError(f"REPO is a token, not the name of a repository; give ACCOUNT/NAME, and {LOGIN}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        signs = "letters, digits, and single -, _ and . within"
        raise UsageError(f"{repo}: no name of a repository; give ACCOUNT/NAME, each of {signs}") from error


def find_destination(repo: str, private: bool) -> Destination:
    """Return where an upload to `repo` goes; nothing is written.

    repo: ACCOUNT/NAME, or NAME alone for the account of the token. Raise UsageError for a name that no repository can
    have, offline, and without a token that may write there. Raise OutputError where the repository holds something
    else, or is not as private as wanted.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import get_session, hf_raise_for_status

    check_name(repo)
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{repo}: cannot be reached offline; unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
    with _hub_errors(repo, "nothing was sent"):
        if get_token() is None:
            raise UsageError(f"{repo}: no token to send with; {LOGIN}")
        api = HfApi()
        user = api.whoami()
        account, endpoint = str(user["name"]), without_login(str(api.endpoint))
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UsageError(f"{repo}: the token of {account} may only read; {LOGIN}")
        name = repo if "/" in repo else f"{account}/{repo}"
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            owner = name.partition("/")[0]
            if owner not in {account, *(organisation["name"] for organisation in user.get("orgs", ()))}:
                raise UsageError(
                    f"{name}: {account} sees no such repository, and cannot make it, being no member of {owner}; "
                    f"choose {account}/{name.partition('/')[2]}, or {LOGIN}"
                ) from None
            return Destination(name, private, account, False, frozenset(), endpoint)
        if info.id != name:
            raise UsageError(f"{name}: is called {info.id} now; send to that name")
        _check_repository(api, info, private)
        address = f"{api.endpoint}/api/models/{name}/auth-check/write"
        hf_raise_for_status(get_session().get(address, headers=api._build_hf_headers()))
        return Destination(name, private, account, True, frozenset(_files(info)), endpoint)


def _check_repository(api: Any, info: Any, private: bool) -> None:
    """Raise OutputError unless an existing model repository is as private as wanted, and empty or ours."""
    if info.private != private:
        wanted, opposite = ("private", "--public") if private else ("public", "--private")
        raise OutputError(
            f"{info.id}: is {opposite[2:]} already, and is to be {wanted}; an upload does not change that. Send with "
            f"{opposite}, choose another name, or change it in the repository's settings"
        )
    strange = sorted(_files(info) - _OF_ANYBODY)
    if strange and not any(commit.title.startswith(TITLE) for commit in api.list_repo_commits(info.id)):
        raise OutputError(
            f"{info.id}: holds files that msa-lite did not put there ({', '.join(at_most(strange, 3))}). Choose a new "
            "name: a model that was there before would stay in the repository's history"
        )


@contextmanager
def _hub_errors(repo: str, rest: str, kind: type[MsaError] = UsageError) -> Iterator[None]:
    """Turn the errors of the Hub's client into ours, without the user's token.

    rest: the end of the message, which says what has reached the Hub. kind: the error where the Hub refuses the token.
    """
    from huggingface_hub import get_token

    try:
        yield
    except MsaError:
        raise
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the library's own
        while type(error) is RuntimeError and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the library wraps that of each file
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = f"no answer of a Hub ({type(error).__name__}: {explain(error)})"
        if status is not None:
            text = f"the Hub answers {status} ({getattr(error, 'server_message', None) or HTTPStatus(status).phrase})"
        message = f"{repo}: {masked(_QUERY.sub('', text), get_token() or '')}; {rest}"
        if status not in (401, 403):
            raise StageError(f"{message}. Try again later") from None  # its traceback could hold what a server said
        first = "; the token is that of HF_TOKEN, which comes before `hf auth login`" if os.getenv("HF_TOKEN") else ""
        raise kind(f"{message}{first}. {LOGIN}") from None


@dataclass(frozen=True)
class Published:
    """The outcome of an upload."""

    kind: str
    """"model" or "adapter"."""
    repo: str
    """The repository's full name."""
    url: str
    """Its page."""
    commit: str
    """The commit of main that has the files."""
    private: bool
    """True if only its owner may see it."""
    changed: bool
    """False if all files were there already."""
    deleted: tuple[str, ...]
    """The stale files that were deleted."""
    json_keys: ClassVar = ("kind", "repo", "url", "commit", "private", "changed", "deleted", "new_version")

    @property
    def new_version(self) -> str | None:
        """Return the value of that key for the target's card, which points its readers here; None for an adapter."""
        return self.repo if self.kind == "model" else None


def stale_files(contents: Contents, names: Iterable[str]) -> list[str]:
    """Return the files of a repository that an upload of `contents` deletes."""
    sent = {item.name for item in contents.files}
    loaded = (n for n in names if any(fnmatch(n, p) and n.count("/") == p.count("/") for p in _LOADED))
    return sorted(name for name in loaded if name not in sent)


def push(contents: Contents, to: Destination) -> Published:
    """Send the files to a repository, whole or not at all as far as its main branch goes.

    One commit adds new files and deletes stale ones, on top of the main that was looked at. Raise FormatError for a
    card that the Hub does not take, OutputError when the repository has changed and is no place to send to any more,
    and StageError when the upload fails. Then main is as it was, and the same call sends only what is missing.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _hub_errors(to.repo, "nothing was sent"):
        _check_card(contents, to)
        if not to.exists:
            api.create_repo(to.repo, private=to.private, exist_ok=True)
        main = api.model_info(to.repo)
        _check_repository(api, main, to.private)
        stale = stale_files(contents, _files(main))
        operations: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in stale]
        for item in contents.files:
            addition = CommitOperationAdd(item.name, item.content)
            if addition.upload_info.sha256.hex() != item.sha256:
                path = contents.folder / item.name
                raise StageError(f"{path}: changed since it was checked; nothing was sent. Run again")
            operations.append(addition)
    with _hub_errors(to.repo, "what was sent stays there, and the same command sends only the rest", StageError):
        title = f"{TITLE}: {contents.kind}"
        commit = api.create_commit(to.repo, operations, commit_message=title, parent_commit=main.sha).oid
    return Published(contents.kind, to.repo, to.url, commit, to.private, commit != main.sha, tuple(stale))


def _check_card(contents: Contents, to: Destination) -> None:
    """Raise FormatError for a card that the Hub does not take; it would say so only after the weights."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(contents.card).validate()
    except ValueError as error:
        raise FormatError(f"{to.repo}: the Hub does not take the card: {error}") from None


def _files(info: Any) -> set[str]:
    """Return the names of a revision's files."""
    return {file.rfilename for file in info.siblings or ()}


_PLAIN = PublishOptions()


def push_folder(folder: str | Path, repo: str, options: PublishOptions = _PLAIN) -> Published:
    """Send a model or adapter, or that of a run, to a repository of the Hub. Nobody is asked.

    repo: ACCOUNT/NAME, or NAME for the account of the token. It is private unless `options.public`. Raise as
    `find_destination`, `make_contents` and `push`, which this calls in turn.
    """
    to = find_destination(repo, private=not options.public)  # first: the files of a large model take minutes to check
    contents = make_contents(Path(folder), replace(options, repo=to.repo))
    with _without_bars():
        return push(contents, to)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Send without the bars of the Hub's client."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
