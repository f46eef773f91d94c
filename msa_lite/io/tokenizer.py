"""Find the files of a tokenizer in a folder or on the Hub, hash them, and copy them."""

from __future__ import annotations

import shutil
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.io.companions import find_files
from msa_lite.io.files import digest, hash_file
from msa_lite.io.hub import Source, fetch_files

# The files that save_pretrained of a tokenizer writes, of any family.
_PATTERNS = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "*.tiktoken", "chat_template*",
)  # fmt: skip
_TEMPLATES = "chat_template"
_MAIN = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Check whether a folder holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in _MAIN)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to its tokenizer, the chat template included, sorted."""
    return find_files(folder, _PATTERNS)


def fetch_tokenizer(name: str) -> Source:
    """Find a folder's tokenizer, or fetch that of `repo[@revision]`; no weights are fetched or hashed.

    Raise UsageError when there is none.
    """
    source = fetch_files(name, (*_PATTERNS, "config.json"), hash_tokenizer)
    if not has_tokenizer(source.folder):
        raise UsageError(f"{name}: holds no tokenizer (tokenizer.json or tokenizer_config.json)")
    return source


def hash_tokenizer(folder: Path) -> str:
    """Return `sha256:…` over names and contents of a tokenizer's files."""
    return f"sha256:{digest({path.name: hash_file(path) for path in tokenizer_files(folder)})}"


def copy_tokenizer(source: Path, out: Path) -> None:
    """Replace the tokenizer of a folder by another's, or only the chat template, if the other has no more than that."""
    files = tokenizer_files(source)
    whole = has_tokenizer(source)
    for path in tokenizer_files(out):
        if whole or path.name.startswith(_TEMPLATES):
            path.unlink()
    for path in files:
        shutil.copyfile(path, out / path.name)
