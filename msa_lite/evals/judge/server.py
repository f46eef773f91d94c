"""Find the server of a judge: its address, the key that it gets, and whether the user has to agree first.

A recipe may be a stranger's. What the environment names is the user's own: OpenAI's server, or that of OPENAI_BASE_URL,
with OPENAI_API_KEY. A server that only the recipe names gets the key of `key_env` or none. It gets nothing before the
user agrees, unless it is on this machine and gets no key.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address

from msa_lite.errors import UsageError, allowed_by
from msa_lite.settings import JudgeSettings

OPENAI = "https://api.openai.com/v1"
KEY = "OPENAI_API_KEY"
BASE_URL = "OPENAI_BASE_URL"
# Narrower than any parser of addresses, so that no two of them read another host out of one.
_ADDRESS = re.compile(
    r"(https?)://([\w.-]+|\[[\da-f:.]+\])(?::(\d{1,5}))?(?:/[\w./~%:+,-]*)?", re.ASCII | re.IGNORECASE
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Server:
    """The server of a judge."""

    address: str
    """Its address, as the recipe or the environment names it."""
    key_name: str
    """The environment variable with its key; "" for none."""
    is_own: bool
    """True if it is OpenAI's, or that of OPENAI_BASE_URL."""
    is_here: bool
    """True if it is on this machine."""
    is_plain: bool
    """True for http without encryption."""

    @property
    def needs_consent(self) -> bool:
        """Check whether the user has to agree first."""
        return not self.is_own and bool(not self.is_here or self.key_name)

    @property
    def key(self) -> str:
        """Return its key; "" for none."""
        return os.environ.get(self.key_name, "") if self.key_name else ""

    def check_key(self) -> None:
        """Raise UsageError for a key that is missing, or that no header can hold, without repeating it."""
        if not self.key_name:
            return
        if not self.key:
            raise UsageError(
                f"a judge of kind 'openai' needs a key: set {KEY} in the environment, to any word if none is needed"
                if self.key_name == KEY
                else "judge.key_env: the environment has no variable of this name"  # it may be a key by mistake
            )
        if not (self.key.isascii() and self.key.isprintable() and self.key == self.key.strip()):
            raise UsageError(f"{self.key_name}: no key has a line break, a letter beyond ASCII, or a space at its ends")
        if len(self.key) >= 8 and self.key in self.address:
            raise UsageError("judge.base_url: it is written to manifests; put no key in it")

    def gets(self, model: str, rows: str) -> str:
        """Say what goes to it. rows: those that the judge is asked about."""
        key = f"the key {self.key_name}" if self.key_name else "no key"
        plain = " (plain http, which others can read)" if self.is_plain and not self.is_here else ""
        return f"the judge {model} at {self.address}{plain} gets {rows}, and {key}"


def find_server(settings: JudgeSettings) -> Server | None:
    """Return the server of a judge of kind openai; None for any other. Raise UsageError for an invalid address."""
    if settings.kind != "openai":
        return None
    if settings.key_env is not None and not _VARIABLE.fullmatch(settings.key_env):
        raise UsageError("judge.key_env: takes the name of an environment variable, such as MY_KEY, and no key")
    address = settings.address or OPENAI
    if (origin := _origin(address)) is None:
        place = "judge.base_url" if settings.base_url else BASE_URL
        raise UsageError(
            f"{place}: is no address such as http://localhost:8000/v1. It is written to manifests, so it has no login, "
            "password or query; a host beyond ASCII is written as xn--…"
        )
    is_own = origin in (_origin(OPENAI), _origin(os.environ.get(BASE_URL, "")))
    is_here = _is_here(origin[1])
    needs_none = not is_own or (is_here and not os.environ.get(KEY))
    key_name = settings.key_env or ("" if needs_none else KEY)
    return Server(address, key_name, is_own, is_here, is_plain=origin[0] == "http")


def check_consent(settings: JudgeSettings, accept: bool = False) -> None:
    """Raise UsageError for a server that the user did not name or accept, unless it is here and gets no key."""
    server = find_server(settings)
    if server is None or accept or not server.needs_consent:
        return
    server.check_key()
    gets = server.gets(settings.model_name, "questions about the data, right answers and models' answers")
    raise allowed_by(
        UsageError(
            f"only the recipe names this server: {gets}. If you trust it, `msa-lite run` takes --accept. All commands "
            f"take {BASE_URL}={server.address} in the environment, whose {settings.key_env or KEY} then goes there"
        ),
        "--accept",
    )


def _origin(address: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an address, in one form; None for another text."""
    if not (parts := _ADDRESS.fullmatch(address)):
        return None
    scheme, host = parts[1].lower(), parts[2].lower()
    port = int(parts[3] or {"http": 80, "https": 443}[scheme])
    return (scheme, host.strip("[]"), port) if port < 1 << 16 else None


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
