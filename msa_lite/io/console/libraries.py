"""The libraries underneath: which extra brings a package that is missing, and how to silence what they print."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from urllib.parse import unquote, urlsplit

from msa_lite.errors import UsageError

_TRAIN = (
    "accelerate", "datasets", "jinja2", "matplotlib", "peft", "psutil", "rouge_score", "scipy", "tokenizers",
    "torch", "transformers",
)  # fmt: skip
# Extra → the reason to install it, and the packages to look for.
EXTRAS = {
    "train": ("training and scoring need torch and its companions", _TRAIN),
    "qlora": ("vector.mode qlora needs bitsandbytes", ("bitsandbytes",)),
    "judge": ("a judge of kind 'openai' needs the openai package", ("openai",)),
    "smollm2": ("the Hub does not give SmolLM2, and reading it out of a package needs gguf", ("gguf",)),
    "web": ("a page in the browser needs starlette and uvicorn", (*_TRAIN, "starlette", "uvicorn")),
    "mergekit": ("mergekit is not installed", ("mergekit",)),
}


def _missing(extra: str) -> list[str]:
    return [name for name in EXTRAS[extra][1] if importlib.util.find_spec(name) is None]


def has(extra: str) -> bool:
    """Check whether the packages of an extra are there; none is loaded."""
    return not _missing(extra)


def readiness(extra: str) -> str:
    """Return "ready", or what an extra lacks, and for what; nothing is loaded."""
    missing = _missing(extra)
    return f"{EXTRAS[extra][0]}; missing: {', '.join(missing)}" if missing else "ready"


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the plain installation and the extras name, as far as they are there."""
    versions = {}
    for text in metadata.requires("msa-lite") or ():
        name, marker = re.match(r"[\w.-]+", text), re.search(r"extra == ['\"](\w+)", text)
        if name and (marker is None or marker[1] in EXTRAS):
            with suppress(metadata.PackageNotFoundError):
                versions[name[0]] = metadata.version(name[0])
    return dict(sorted(versions.items()))


def require(extra: str, reason: str | None = None) -> None:
    """Raise UsageError, with the command to install, unless the packages of an extra are there; none is loaded.

    reason: the sentence to give in the place of the extra's own.
    """
    if missing := _missing(extra):
        why, packages = EXTRAS[extra]
        named = f" (missing: {', '.join(missing)})" if len(missing) < len(packages) else ""
        raise UsageError(f"{reason or why}{named}: pip install {requirement(extra)}")


def requirement(extra: str) -> str:
    """Return what pip needs to install an extra from where msa-lite came: a clone, a file, a repository or an index."""
    name = f"msa-lite[{extra}]"
    try:
        record = metadata.distribution("msa-lite").read_text("direct_url.json")  # PEP 610; None: from an index
    except metadata.PackageNotFoundError:
        record = None
    origin = json.loads(record) if record else {}
    address = origin.get("url", "")
    if not address:
        return shlex.quote(name)
    if not address.startswith("file:") or "vcs_info" in origin:
        vcs = origin.get("vcs_info", {})
        source = f"{vcs['vcs']}+{address}@{vcs['commit_id']}" if vcs else address
        return shlex.quote(f"{name} @ {source}")
    path = shlex.quote(f"{unquote(urlsplit(address).path)}[{extra}]")
    return f"-e {path}" if origin.get("dir_info", {}).get("editable") else path


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save models without bars; restore its settings afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as bars

    downloads = not are_progress_bars_disabled()  # which transformers' switch moves as well
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Hub's bars that the environment switches off
            bars.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


_TALKERS = (
    "transformers", "datasets", "peft", "bitsandbytes", "accelerate.big_modeling", "huggingface_hub", "httpx", "httpx2",
    "openai",
)  # fmt: skip
_LEVELS = ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY")  # read when these are loaded


def silence_libraries() -> None:
    """Hide warnings of the libraries underneath, those that are loaded already and those to come. None is loaded."""
    for name in _LEVELS:
        os.environ.setdefault(name, "error")
    for name in _TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the libraries in the block. Afterwards, whoever runs this process has all settings as they were."""
    levels = {name: logging.getLogger(name).level for name in _TALKERS}
    unset = [name for name in _LEVELS if name not in os.environ]
    with warnings.catch_warnings():
        silence_libraries()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            for name in unset:
                os.environ.pop(name, None)
