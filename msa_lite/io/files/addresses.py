"""Read addresses of the Hub's pages and files as the repositories that they name, as people paste them.

Nothing is asked over the network. A name without an address in it (a path, a plain repository) stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from msa_lite.errors import MsaError, UsageError, join_faults

RepositoryKind = Literal["model", "dataset"]
HUB_FILES = "hf://datasets/"
"""How the path of one file in a data set of the Hub begins: hf://datasets/ORG/NAME/FILE."""
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_START = re.compile(rf"[a-z][a-z0-9+.-]*://|git@|(?:{'|'.join(map(re.escape, _HOSTS))})(?:/|$)", re.IGNORECASE)
_REPO = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", re.ASCII)
_AT_REVISION = ("tree", "blob", "resolve", "raw", "commit", "commits")
_OTHERS = ("", "spaces", "collections", "papers", "docs", "blog", "models", "datasets")
_OF_EVERY_MODEL = re.compile(r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors|[^/]+\.(?:json|md|jinja|txt)")

_REFUSED = (
    "an address has a login, password or token in it, which files and messages would repeat; leave it out. `hf auth "
    "login` or HF_TOKEN opens private repositories; the key of a judge comes from the environment"
)
_SECRET = re.compile(
    r"(?:://|\bhttps?:/?)(?!git@)[^\s/?#]*@"  # a login; git@ is everybody's
    r"|://[^\s/?#@:]*:(?!\d{0,5}(?:[/?#]|$))\S{0,500}@"  # a password with a slash in it
    r"|(?:^|=)[^\s/:@=]{1,200}:(?!//)[^\s@]{1,200}@(?:[\w-]{1,63}\.){1,9}[a-z]{2,}[:/]"  # a login, no scheme
    r"|\b(?:hf_|gh[pousr]_|github_pat_|gsk_|glpat-|sk-(?:\w{1,9}-){0,2})[a-z0-9]{20,}"  # a token as servers write it
    # A parameter. Files keep it in their names as they are downloaded.
    r"|[?&#;](?:[\w.\[\]-]{0,40}(?:token(?!s|iz)|secret|passw|signature|credential|access.?key|api.?key)[\w.\[\]-]{0,40}"
    r"|(?:[\w-]{0,40}[-_.])?(?:key|sig|sas|pwd|pass|auth|authorization|bearer|jwt))=\S",
    re.IGNORECASE,
)


class AddressError(UsageError, ValueError):
    """An address that names no repository of the kind that is wanted; pydantic takes it for a fault of its key."""


@dataclass(frozen=True)
class Address:
    """A repository of the Hub, as an address names it."""

    repo: str
    """ORG/NAME."""
    revision: str | None = None
    """The branch, tag or commit; None: main."""
    file: str = ""
    """The file of a data set."""
    name: str | None = None
    """The configuration that a data set's viewer shows."""
    split: str | None = None
    """The split that it shows."""


def holds_secret(text: str) -> bool:
    """Check whether a text is an address with a login, password or token in it."""
    return bool(_SECRET.search(text) or ("%" in text and _SECRET.search(unquote(text))))


def check_secrets(value: Any, kind: type[MsaError] = UsageError, where: str = "") -> None:
    """Raise an error of this kind for addresses with a secret in them. It names their places, and does not repeat them.

    value: a text, or lists and mappings of values. where: what messages name.
    """
    if places := list(dict.fromkeys(_secret_places(value, ""))):
        raise kind(join_faults(f"{where and where + ': '}{_REFUSED}", filter(None, places)))


def _secret_places(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, str) and holds_secret(value):
        yield place
    elif isinstance(value, Mapping):
        for key, item in value.items():
            is_bad = isinstance(key, str) and holds_secret(key)
            yield from [place] if is_bad else _secret_places(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _secret_places(item, f"{place}.{number}".lstrip("."))


def model_name(text: str) -> str:
    """Return the address of a model or adapter as `repo[@revision]`, any other name as it is. Raise AddressError."""
    address = read_address(text, "model")
    return text if address is None else address.repo + (f"@{address.revision}" if address.revision else "")


def split_configuration(text: str) -> tuple[str, str | None]:
    """Split FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION] into path and configuration."""
    path, _, name = (text, "", "") if _START.match(text) else text.partition(":")
    return path, name or None


def read_address(text: str, kind: RepositoryKind) -> Address | None:
    """Return what an address of the Hub names; None for any other text, and for a path that is there.

    Raise AddressError for another server, another kind of repository, a page or folder that is no whole repository, and
    an address with a secret in it.
    """
    check_secrets(text, AddressError)
    if not _START.match(text) or os.path.exists(text):
        return None
    try:
        return _read(_split(text), kind)
    except ValueError as error:
        raise AddressError(f"{text.partition('?')[0]}: {error}") from error


def _split(text: str) -> SplitResult:
    """Return the parts of an address on a server of the Hub. Raise ValueError for any other server."""
    text = re.sub(r"^git@([^:/]+)[:/]", r"https://\1/", text)
    url = urlsplit(text if "://" in text else f"https://{text}")
    if url.scheme == "file":
        raise ValueError(f"give the path alone, {unquote(url.path)}")
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    is_hub = url.scheme == "hf" or (
        url.scheme in ("http", "https", "ssh") and (url.hostname in _HOSTS or url.netloc == own)
    )
    if not is_hub:
        raise ValueError("only the Hugging Face Hub is read from; download it, and give the file or folder")
    return url


def _read(url: SplitResult, kind: RepositoryKind) -> Address:
    """Return what an address names. Raise ValueError where it is no repository of this kind, or a part of one."""
    path = f"{url.netloc}{url.path}" if url.scheme == "hf" else url.path
    parts = [unquote(part) for part in path.split("/") if part not in ("", "api")]
    is_data = parts[:1] == ["datasets"]
    parts = parts[1:] if parts[:1] in (["datasets"], ["models"]) else parts
    end = 1 if len(parts) < 2 or parts[1] in (*_AT_REVISION, "viewer") else 2  # such as gpt2
    repo, _, revision = "/".join(parts[:end]).removesuffix(".git").partition("@")
    if parts[end:] and url.scheme == "hf":  # hf://datasets/ORG/NAME@REVISION/FILE
        parts[end:end] = ["blob", revision or "main"]
    page, *rest = [*parts[end:], "", ""]
    place, inside = rest[0] or revision, "/".join(filter(None, rest[1:]))
    if repo.partition("/")[0] in _OTHERS or not _REPO.fullmatch(repo):
        raise ValueError(f"names no {kind} of the Hub; give ORG/NAME, as its page shows it")
    if is_data != (kind == "dataset"):
        is_what, wanted = (
            ("a data set", "a model") if is_data else ("a model", "a data set (huggingface.co/datasets/…)")
        )
        raise ValueError(f"is {is_what} of the Hub, and {wanted} is wanted here")
    if page == "viewer":
        return Address(repo, None, "", rest[0] or None, rest[1] or None)
    if page and (page not in _AT_REVISION or not place):
        raise ValueError(f"is a page about {repo}; give {repo}")
    at = None if place in ("", "main") else place
    if page == "tree" or not (inside and (is_data or _OF_EVERY_MODEL.fullmatch(inside))):
        if inside and page not in ("commit", "commits"):
            options = ("--repo-type dataset " if is_data else "") + (f"--revision {at} " if at else "")
            files = f"{inside}/*" if page == "tree" else inside
            get = f"hf download {repo} {options}--include '{files}' --local-dir DIR"
            raise ValueError(f"is a part of {repo}. Give {repo}; or, if you mean that part, download it: {get}")
        inside = ""
    return Address(repo, at, inside if is_data else "")
