"""Find out where an upload goes and what stands there; turn the Hub's errors into ours."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any, TypeVar

from msa_lite.errors import MsaError, OutputError, StageError, UsageError
from msa_lite.io.console.progress import notices
from msa_lite.io.files.spellings import masked, without_login
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.io.weights.hub import explain

LOGIN = "`hf auth login` with a token that may write (https://huggingface.co/settings/tokens), or set HF_TOKEN"
_PAUSES = (1.0, 4.0)  # seconds between tries
_LONGEST = 300.0  # seconds that a server may ask to wait
_PASSING = (408, 409, 412, 429, 500, 502, 503, 504)  # 409 and 412: another commit came first
_QUERY = re.compile(r"\?[^\s'\"]+")  # of a URL; that of a storage server signs the request

_ODD = (LookupError, TypeError, AttributeError, RecursionError, JSONDecodeError, UnicodeDecodeError)

Answer = TypeVar("Answer")


def read_token() -> str | None:
    """Return the token that the user gave by HF_TOKEN or `hf auth login`, or None."""
    from huggingface_hub import get_token

    return get_token()


def patiently(action: Callable[[], Answer], repo: str, has_begun: Callable[[], bool] = lambda: False) -> Answer:
    """Return the result of an action on the Hub. Call it anew after an error that passes by itself.

    An action that is called anew must go on where it was. has_begun: says whether something was sent already. Raise
    UsageError where the Hub refuses the token before anything was sent, else StageError.
    """
    for pause in (*_PAUSES, None):
        try:
            return action()
        except MsaError:
            raise
        except Exception as error:  # the errors of the HTTP client underneath have no base that is the library's own
            cause = _cause(error)
            seconds = _passes_after(cause)
            if pause is None or seconds is None or seconds > _LONGEST:
                raise _refusal(cause, repo, has_begun()) from None  # its traceback could hold what a server said
            seconds = max(pause, seconds)
            notices.info("%s: %s; trying again in %.0f s", repo, describe_error(cause), seconds)
            time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


def describe_error(error: Exception) -> str:
    """Return an error of the Hub's client in one line, without the user's token."""
    status = status_of(error)
    if status is None:
        text = f"no answer from the Hub ({explain(error)})" if _is_broken(error) else explain(error)
        if isinstance(error, _ODD) or type(error) is ValueError:  # the library found an answer of another shape
            text = f"the server answers as no Hub does ({type(error).__name__}: {error})"
    else:
        words = getattr(error, "server_message", None) or HTTPStatus(status).phrase
        text = f"the Hub answers {status} ({words})"
    return masked(_QUERY.sub("", text), read_token() or "")


def status_of(error: Exception) -> int | None:
    """Return the status of an HTTP answer; None for other errors."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _cause(error: Exception) -> Exception:
    """Return the error that the library wrapped, as it does for each file of an upload."""
    while type(error) is RuntimeError and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _passes_after(error: Exception) -> float | None:
    """Return the seconds after which the same request may succeed; None for an error that stays."""
    from huggingface_hub.errors import RevisionNotFoundError

    # A revision may be a branch that somebody removed, or a commit that a mirror does not know yet.
    if _is_broken(error) or isinstance(error, RevisionNotFoundError):
        return 0.0
    if status_of(error) not in _PASSING:
        return None
    pause = error.response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
    return float(pause) if re.fullmatch(r"\d{1,9}", pause) else 0.0


def _is_broken(error: Exception) -> bool:
    """Check whether the connection is what failed."""
    from huggingface_hub.utils import httpx

    return isinstance(error, (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError))


def _refusal(error: Exception, repo: str, has_begun: bool) -> MsaError:
    """Return our error for one of the Hub's."""
    reason = f"{repo}: {describe_error(error)}"
    rest = "what was sent stays there, and the same command sends only the rest" if has_begun else "nothing was sent"
    if status_of(error) in (401, 403):
        if os.environ.get("HF_TOKEN"):
            reason += "; the token is that of HF_TOKEN, which comes before `hf auth login`"
        return (StageError if has_begun else UsageError)(f"{reason}; {rest}. {LOGIN}")
    seconds = _passes_after(error) or 0.0
    later = f"try again in {seconds:.0f} s; " if seconds > _LONGEST else ""
    return StageError(f"{reason}; {later}{rest}")


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
        wanted, opposite = ("private", "--public") if private else ("public", "--private")
        raise OutputError(
            f"{info.id}: is {opposite[2:]} already, and is to be {wanted}; an upload does not change that. Send with "
            f"{opposite}, choose another name, or change it in the repository's settings"
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
