"""The files beside a model's weights: what makes it usable is copied with it, what else lies there is left and named.

Names are those in the folder: "config.json", "additional_chat_templates/tool_use.jinja".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msa_lite.errors import FormatError, clip, join_faults
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import read_object
from msa_lite.io.weights.checkpoint import INDEX_FILE, Checkpoint

TEMPLATES = "additional_chat_templates/*.jinja"
CODE = "*.py"
PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", TEMPLATES, CODE)
"""The files that count for a model's revision, and are fetched with it."""
TOKENIZER = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "emoji.json", "tekken.json", "*.model", "*.tiktoken", "chat_template*", TEMPLATES,
)  # fmt: skip
"""The files that save_pretrained of a tokenizer writes, of any family."""
LOADED = (
    *TOKENIZER, "config.json", "generation_config.json", "*processor_config.json", "hf_quant_config.json", "LICENSE*",
    "NOTICE*", CODE,
)  # fmt: skip
"""What is copied and published: what loading needs, and the licence. A training's other files may hold rows."""
_OTHERS = {"manifest.json", INDEX_FILE}  # handled apart from the companions
_LARGEST = 256 << 20  # bytes; tokenizers of large vocabularies take about 30 MB
_CODED = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_KNOWN = ("README.md", ".gitattributes")  # written anew, or of no use in a folder
_SHOWN = 300  # characters of a list of files


def unnamed_shards(checkpoint: Checkpoint) -> list[Path]:
    """Return the weight files in a checkpoint's folder that are no part of it: its index does not name them.

    Adapters beside a model, and Mistral's second copy of its weights (consolidated), are none.
    """
    known = {shard.path.name for shard in checkpoint.shards}
    paths = find_files(checkpoint.folder, ("*.safetensors",)) if known else []
    others = ("adapter_model", "consolidated", ".")
    return [path for path in paths if path.name not in known and not path.name.casefold().startswith(others)]


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

    Python code is among them where a config says that the model needs it (auto_map). It is copied, and never run.
    Raise as `find_files`.
    """
    patterns = [pattern for pattern in PATTERNS if pattern != CODE or needs_code(folder)]
    return [
        path
        for path in find_files(folder, patterns)
        if path.name.casefold() not in _OTHERS and not path.name.startswith(".") and path.suffix != ".safetensors"
    ]


def copied_files(folder: Path) -> list[Path]:
    """Return the companion files that a model made of this one gets: `LOADED` alone.

    An adapter's config is none: transformers would load the base that it names in the model's place.
    """
    loaded = {*find_files(folder, LOADED)}
    return [path for path in companion_files(folder) if path in loaded]


def needs_code(folder: Path) -> bool:
    """Check whether a config says that the model, or what prepares its inputs, is Python code beside it."""
    for name in _CODED:
        with suppress(FormatError):  # told where the file is read
            if (folder / name).is_file() and "auto_map" in read_object(folder / name):
                return True
    return False


def name_in(folder: Path, path: Path) -> str:
    """Return a file's name in a folder, the folders between them included."""
    return path.relative_to(folder).as_posix()


def copy_into(out: Path, folder: Path, path: Path) -> None:
    """Copy a folder's file byte for byte into another folder, under the same name."""
    place = out / name_in(folder, path)
    place.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, place)


def left_behind(checkpoint: Checkpoint) -> list[str]:
    """Return what lies in a checkpoint's folder and is not copied with it: files, and folders with a slash behind.

    The card is none, nor are hidden files, weights that `unnamed_shards` tells, and what lies beside chat templates in
    their folder.
    """
    folder = checkpoint.folder
    copied = {name_in(folder, path).partition("/")[0] for path in copied_files(folder)}
    copied |= {path.name for path in (*(shard.path for shard in checkpoint.shards), *unnamed_shards(checkpoint))}
    others = [path for path in folder.iterdir() if path.name not in {*copied, *_OTHERS, *_KNOWN}]
    return sorted(path.name + "/" * path.is_dir() for path in others if not path.name.startswith("."))


def tell_companions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line on the code that is copied with a checkpoint, and one on what is not copied."""
    if code := [path.name for path in copied_files(checkpoint.folder) if path.match(CODE)]:
        yield f"the target's own Python code is copied, and never run here: {clip(', '.join(code), _SHOWN)}"
    if left := left_behind(checkpoint):
        yield f"beside the target's weights, and not copied: {clip(', '.join(left), _SHOWN)}"


def check_companions(folder: Path, files: list[Path]) -> None:
    """Raise FormatError for companion files that must not be copied into an output: large ones, and links elsewhere.

    A link could bring any file of the user into a published model. It has to stay within the model's folder, or the
    Hub's cache, where every snapshot is made of links.
    """
    faults = []
    for path in files:
        place, name = Path(os.path.realpath(path)), name_in(folder, path)
        if (size := place.stat().st_size) > _LARGEST:
            faults.append(f"{name}: {readable(size)}; move it elsewhere if it is no part of the model")
        elif not any(root in place.parents for root in _roots(folder)):
            faults.append(f"{name}: a link to {place}; put a copy of that file there, or remove the link")
    if faults:
        raise FormatError(join_faults(f"{folder}: files that cannot be copied beside a merged model:", faults))


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
