"""Turn the Hub's errors into ours: wait out those that pass by themselves, and say of others what to do."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from msa_lite.errors import MsaError, StageError, UsageError
from msa_lite.io.hub import explain
from msa_lite.io.masking import masked
from msa_lite.io.progress import notices

LOGIN = "`hf auth login` with a token that may write (https://huggingface.co/settings/tokens), or set HF_TOKEN"
_PAUSES = (1.0, 4.0)  # seconds between tries
_LONGEST = 300.0  # seconds that a server may ask to wait
_PASSING = (408, 409, 412, 429, 500, 502, 503, 504)  # 409 and 412: another commit came first
_QUERY = re.compile(r"\?[^\s'\"]+")  # of a URL; that of a storage server signs the request

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
