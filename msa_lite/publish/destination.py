"""Find out where an upload goes: the account, the repository as it is now, and reasons to send nothing there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msa_lite.errors import OutputError, UsageError
from msa_lite.io.masking import without_login
from msa_lite.io.seal import CARD_FILE
from msa_lite.publish.replies import LOGIN, describe_error, patiently, read_token

TITLE = "Published with msa-lite"  # the first words of a commit on main, by which a repository is known as ours
_HUB = "https://huggingface.co"
_TOKEN = re.compile(r"(?:^|/)(?:hf|api_org)_[A-Za-z0-9]{20,}$")
_OF_ANYBODY = {".gitattributes", ".gitignore", CARD_FILE, "LICENSE"}  # in a repository that was made in the browser


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


def find_destination(repo: str, private: bool) -> Destination:
    """Return where an upload to `repo` goes; nothing is written.

    repo: ACCOUNT/NAME, or NAME alone for the account of the token. Raise UsageError for a name that no repository can
    have, offline, and without a token that may write there. Raise OutputError where something else has the name, and
    where the repository is not as private as wanted.
    """
    check_name(repo)
    _check_online(repo)
    return patiently(lambda: _find(repo, private), repo)


def check_privacy(info: Any, private: bool) -> None:
    """Raise OutputError unless an existing repository is as private as wanted."""
    if info.private != private:
        wanted, other = ("private", "--public") if private else ("public", "--private")
        raise OutputError(
            f"{info.id}: is {other[2:]} already, and is to be {wanted}; an upload does not change that. Send with "
            f"{other}, choose another name, or change it in the repository's settings"
        )


def check_repository(api: Any, info: Any, private: bool) -> None:
    """Raise OutputError unless an existing model repository is as private as wanted, and empty or ours."""
    check_privacy(info, private)
    strange = sorted(_names(info) - _OF_ANYBODY)
    if strange and not any(commit.title.startswith(TITLE) for commit in api.list_repo_commits(info.id)):
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise OutputError(
            f"{info.id}: holds files that msa-lite did not put there ({', '.join(strange[:3])}{more}). Choose a new "
            "name: a model that was there before would stay in the repository's history"
        )


def _names(info: Any) -> set[str]:
    return {file.rfilename for file in info.siblings or ()}


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


def _check_online(repo: str) -> None:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise UsageError(f"{repo}: cannot be reached offline; unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
    try:
        token = read_token()
    except Exception as error:  # a token that is fetched or refreshed over the network
        raise UsageError(f"{repo}: no token to send with ({type(error).__name__}); {LOGIN}") from None
    if token is None:
        raise UsageError(f"{repo}: no token to send with; {LOGIN}")


def _find(repo: str, private: bool) -> Destination:
    """Ask the Hub who sends, and what is there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api = HfApi()
    user = api.whoami()
    account = str(user["name"])
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UsageError(f"{repo}: the token of {account} may only read; {LOGIN}")
    name = repo if "/" in repo else f"{account}/{repo}"
    try:
        info = api.model_info(name)
    except RepositoryNotFoundError as error:
        if isinstance(error, GatedRepoError):
            raise UsageError(f"{name}: {describe_error(error)}; {LOGIN}") from None
        _check_free(api, name, account, user.get("orgs", ()))
        return Destination(name, private, account, False, frozenset(), without_login(str(api.endpoint)))
    if info.id != name:
        raise UsageError(f"{name}: is called {info.id} now; send to that name")
    check_repository(api, info, private)
    api.auth_check(name, write=True)
    return Destination(name, private, account, True, frozenset(_names(info)), without_login(str(api.endpoint)))


def _check_free(api: Any, name: str, account: str, organisations: Iterable[Any]) -> None:
    """Raise UsageError where the account may not make a repository, OutputError where another kind has the name."""
    from huggingface_hub.errors import RepositoryNotFoundError

    owner = name.partition("/")[0]
    if owner not in {account, *(organisation["name"] for organisation in organisations)}:
        raise UsageError(
            f"{name}: {account} sees no such repository, and cannot make it, being no member of {owner}; choose "
            f"{account}/{name.partition('/')[2]}, or {LOGIN}"
        )
    for kind in ("dataset", "space"):
        try:
            api.repo_info(name, repo_type=kind)
        except RepositoryNotFoundError:
            continue
        raise OutputError(f"{name}: is a {kind}, no model; choose another name")
