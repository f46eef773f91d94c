"""Find the files beside a model's weights that make it usable: config, tokenizer, chat template, licence; no pickle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from msa_lite.errors import FormatError, join_faults
from msa_lite.io.checkpoint import INDEX_FILE
from msa_lite.io.progress import readable

PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_OTHERS = {"manifest.json", INDEX_FILE}  # handled apart from the companions
_LARGEST = 256 << 20  # bytes; tokenizers of large vocabularies take about 30 MB


def find_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the regular files of a folder whose names fit one of the patterns, sorted; a pipe or device is none.

    Raise FormatError for names that are no UTF-8, which no manifest could hold.
    """
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if os.path.isfile(path)})
    if odd := [ascii(path.name) for path in files if not is_text(path.name)]:
        raise FormatError(join_faults(f"{folder}: names that are no UTF-8; rename these files:", odd))
    return files


def companion_files(folder: Path) -> list[Path]:
    """Return the files beside the weights that make a checkpoint usable, sorted; no weights, index or manifest.

    Raise as `find_files`.
    """
    return [
        path
        for path in find_files(folder, PATTERNS)
        if path.name.casefold() not in _OTHERS and not path.name.startswith(".") and path.suffix != ".safetensors"
    ]


def check_companions(files: list[Path]) -> None:
    """Raise FormatError for companion files that must not be copied into an output: large ones, and links elsewhere.

    A link could bring any file of the user into a published model. It has to stay within the model's folder, or the
    Hub's cache, where every snapshot is made of links.
    """
    faults = []
    for path in files:
        place = Path(os.path.realpath(path))
        if (size := place.stat().st_size) > _LARGEST:
            faults.append(f"{path.name}: {readable(size)}; move it elsewhere if it is no part of the model")
        elif not any(root in place.parents for root in _roots(path.parent)):
            faults.append(f"{path.name}: a link to {place}; put a copy of that file there, or remove the link")
    if faults:
        raise FormatError(join_faults(f"{files[0].parent}: files that cannot be copied beside a merged model:", faults))


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folders that a companion file may lie in: the model's, then the Hub's cache."""
    folder = Path(os.path.realpath(folder))
    yield folder
    if folder.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT, with links to ../../blobs
        yield folder.parent.parent / "blobs"
    from huggingface_hub import constants

    yield Path(os.path.realpath(constants.HF_HUB_CACHE))


def is_text(name: str) -> bool:
    """Check whether a name from the file system is UTF-8.

    Python turns other bytes (in a POSIX locale, all that are no ASCII) into lone surrogates.
    """
    try:
        name.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        return False
    return True
