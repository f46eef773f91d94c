"""Read addresses of the Hub's pages and files as the repositories that they name, as people paste them.

Nothing is asked over the network. A name without an address in it (a path, a plain repository) stays as it is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from msa_lite.errors import UsageError

RepositoryKind = Literal["model", "dataset"]
HUB_FILES = "hf://datasets/"
"""How the path of one file in a data set of the Hub begins: hf://datasets/ORG/NAME/FILE."""
_SCHEME = re.compile(r"(?:[a-z][a-z0-9+.-]*://|git@)", re.IGNORECASE)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_BARE = re.compile(rf"(?:{'|'.join(map(re.escape, _HOSTS))})(?:/|$)", re.IGNORECASE)
_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
_AT_REVISION = ("tree", "blob", "resolve", "raw", "commit", "commits", "blame", "edit")
_OF_EVERY_MODEL = re.compile(
    r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors|[^./]+\.(?:json|md|jinja|txt)|[^/]+\.index\.json"
)
_NO_REPOSITORY = {
    "spaces", "collections", "papers", "docs", "blog", "models", "organizations", "settings", "learn", "posts", "tasks",
}  # fmt: skip


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


def model_name(text: str) -> str:
    """Return the address of a model or adapter as `repo[@revision]`, any other name as it is. Raise AddressError."""
    address = read_address(text, "model")
    return text if address is None else address.repo + (f"@{address.revision}" if address.revision else "")


def split_configuration(text: str) -> tuple[str, str | None]:
    """Split FILE, FOLDER[:CONFIGURATION] or Hub id[:CONFIGURATION] into path and configuration."""
    path, _, name = ("", "", "") if is_address(text) else text.partition(":")
    return path or text, name or None


def is_address(text: str) -> bool:
    """Check whether a name is an address, and no path that is there."""
    return bool(_SCHEME.match(text) or _BARE.match(text)) and not os.path.exists(text)


def read_address(text: str, kind: RepositoryKind) -> Address | None:
    """Return what an address of the Hub names; None for any other text.

    Raise AddressError for another server, another kind of repository, and a page or folder that is no whole repository.
    """
    if not is_address(text):
        return None
    shown = re.sub(r"(?<=://)[^/\s@]*@(?=[\w.-]+[:/])", "", text.partition("?")[0])  # without a login or signature
    parts = _parts(text, shown)
    parts = parts[1:] if parts[:1] == ["api"] else parts
    actual: RepositoryKind = "dataset" if parts[:1] == ["datasets"] else "model"
    parts = parts[1:] if parts[:1] in (["datasets"], ["models"]) and len(parts) > 1 else parts
    if not parts or parts[0] in _NO_REPOSITORY or parts[0] == "datasets":
        raise AddressError(f"{shown}: names no {kind} of the Hub; give ORG/NAME, as its page shows it")
    alone = len(parts) == 1 or parts[1] in (*_AT_REVISION, "viewer")  # such as gpt2
    names, (page, *rest) = parts[: 1 if alone else 2], [*parts[1 if alone else 2 :], ""]
    names[-1], _, revision = names[-1].removesuffix(".git").partition("@")
    repo, rest = "/".join(names), [part for part in rest if part]
    if not all(map(_NAME.fullmatch, names)):
        raise AddressError(f"{shown}: {repo} is no name of a repository; give ORG/NAME, as its page shows it")
    if actual != kind:
        plain = {"model": "a model", "dataset": "a data set (huggingface.co/datasets/…)"}
        raise AddressError(f"{shown}: is {plain[actual]} of the Hub, and {plain[kind]} is wanted here")
    if text.lower().startswith("hf:"):  # hf://datasets/ORG/NAME@REVISION/FILE
        page, rest = "blob", [revision or "main", *filter(None, [page]), *rest]
    if page == "viewer" and kind == "dataset":
        name, split, *_ = [*rest, None, None]
        return Address(repo, None, "", name, split)
    if page and (page not in _AT_REVISION or not rest):
        raise AddressError(f"{shown}: is a page about {repo}; give {repo}")
    branch = rest[0] if rest and rest[0] != "main" else None
    return Address(repo, branch, _file(shown, kind, page, repo, rest))


def _parts(text: str, shown: str) -> list[str]:
    """Return the parts of an address's path, on a server of the Hub. Raise AddressError for any other server."""
    text = re.sub(r"^git@([^:/]+)[:/]", r"https://\1/", text)
    try:
        url = urlsplit(text if "://" in text else f"https://{text}")
        host, own = url.hostname or "", urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    except ValueError as error:
        raise AddressError(f"{shown}: is no address ({error})") from error
    path = url.path
    if url.scheme == "hf":  # hf://datasets/ORG/NAME: what stands for the server is the first part
        path, host = f"{url.netloc}{url.path}", _HOSTS[0]
    elif url.scheme == "file":
        raise AddressError(f"{shown}: give the path alone, {unquote(url.path)}")
    if url.scheme not in ("hf", "http", "https", "ssh") or (host not in _HOSTS and url.netloc not in ("", own)):
        raise AddressError(f"{shown}: only the Hugging Face Hub is read from; download it, and give the file or folder")
    return [unquote(part) for part in path.split("/") if part]


def _file(shown: str, kind: RepositoryKind, page: str, repo: str, rest: list[str]) -> str:
    """Return the file of a data set that an address names; "" for a whole repository. Raise AddressError for a part.

    Of a model, a file that is part of every model or adapter stands for the repository.
    """
    inside = "/".join(rest[1:])
    if not inside or page in ("commit", "commits"):
        return ""
    if page == "tree" or ".." in rest:
        what, files = "a folder", f"{inside}/*"
    elif kind == "dataset":
        return inside
    elif _OF_EVERY_MODEL.fullmatch(inside):
        return ""
    else:
        what, files = "a file", inside
    options = "--repo-type dataset " if kind == "dataset" else ""
    options += f"--revision {rest[0]} " if rest[0] != "main" else ""
    get = f"hf download {repo} {options}--include '{files}' --local-dir DIR"
    raise AddressError(f"{shown}: is {what} inside {repo}. Give {repo}; or, if you mean that part, download it: {get}")
