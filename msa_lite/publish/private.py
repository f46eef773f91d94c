"""Keep what is private out of files that are sent: paths of this machine, and names of models that are not public."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import read_bytes, read_object
from msa_lite.io.files.writing import indented_json
from msa_lite.io.finished.seal import PUBLISHED
from msa_lite.io.weights.checkpoint import read_shard
from msa_lite.report.page.card import is_local

# Keys by which libraries note where a model or tokenizer came from. They can go: loading does not need them.
_ORIGINS = (
    "_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path", "tokenizer_file",
    "special_tokens_map_file", "vocab_file",
)  # fmt: skip
_ADAPTER_ORIGIN = "base_model_name_or_path"  # PEFT wants the key, if only with null
_PATH = re.compile(r"(~[\w.-]*/|/[^/\s<>{}]+/|file:/|[A-Za-z]:[\\/]\w|\\\\\w)")
# Paths within a text. Only places where people keep their files: licences and templates have slashes of other kinds.
_PERSONAL = re.compile(
    r"(?<![\w.])(?:/(?:home|Users|root|mnt|media|scratch|tmp)/[^/\s]|~[A-Za-z_][\w.-]*/\w|file:/|[A-Za-z]:[\\/]+Users[\\/])"
)
_PLAIN_HEADER = {"format", "total_size", "total_parameters"}  # the notes that libraries write into a file of weights
_FACTS = ("made_by", "kind", "inputs", "terms", "target_card", "interference", "versions")
_OUTCOME = (
    "sentence", "basis", "verdict", "reasons", "method", "chosen", "benchmark", "dataset", "split", "main", "metrics",
    "sweep", "rows", "fits",
)  # fmt: skip


@dataclass(frozen=True)
class Secrets:
    """The names that may be told, and what must not stand in a file."""

    told: Mapping[str, str]
    """Repositories by role ("target", "prior") that may be named, with their commits: "owner/name@commit"."""
    withheld: frozenset[str]
    """Repositories and folders that must not be named."""

    def fault(self, text: str) -> str | None:
        """Return what a text of a file should not hold, or None."""
        if _PATH.match(text) or has_path(text):
            return "a path of a machine"
        return "the name of a model that is not to be told" if any(name in text for name in self.withheld) else None


def has_path(text: str) -> bool:
    """Check whether somewhere in a text stands a path to a person's files."""
    return _PERSONAL.search(text) is not None


def find_secrets(manifest: Mapping[str, Any], told: Mapping[str, str]) -> Secrets:
    """Return what may be told of a merge's sources. told: the sources to be named, by role."""
    names = set()
    for role, name in manifest.get("sources", {}).items():
        if role in told:
            continue
        local = is_local(manifest["inputs"].get(role, {}).get("revision", ""))
        forms = {name, str(Path(name).resolve())} if local else {name.partition("@")[0]}
        names |= {form for form in forms if "/" in form}  # a bare word, as "gpt2", stands in files for other reasons
    return Secrets(told, frozenset(names))


def clean_config(path: Path, secrets: Secrets) -> tuple[str | None, list[str]]:
    """Return a JSON file's content without origins that must not be told, and the faults that remain.

    The content is None where the file can go as it is.
    """
    try:
        content = read_object(path)
    except FormatError as error:
        return None, [str(error)]
    repositories = {name.partition("@")[0] for name in secrets.told.values()}
    cleaned = _without_origins(content, repositories)
    if cleaned != content:  # the record has one hash of a file that is changed: that without any origin
        cleaned = _without_origins(content, ())
    faults = []
    for key, text in _texts(cleaned):
        if fault := secrets.fault(text):
            faults.append(f"{path.name}: {key} holds {fault}; change it and merge again")
    return (None if cleaned == content else indented_json(cleaned)), faults


def _without_origins(value: Any, repositories: Collection[str]) -> Any:
    """Return a JSON value without the origins that must not be told, at any depth."""
    if isinstance(value, list):
        return [_without_origins(item, repositories) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_origins(item, repositories) for key, item in value.items()}
    for key in _ORIGINS:
        if isinstance(cleaned.get(key), str) and cleaned[key] not in repositories:
            if key == _ADAPTER_ORIGIN:
                cleaned |= {key: None} | ({"revision": None} if "revision" in cleaned else {})
            else:
                del cleaned[key]
    return cleaned


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value with its key, and every key of an object."""
    if isinstance(value, str):
        yield key or "the file", value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield f"a key of {key}" if key else "a key", name
            yield from _texts(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def weight_faults(path: Path, secrets: Secrets) -> tuple[list[str], list[str]]:
    """Return what a weights file's header holds and should not, and the names of notes that a program put there."""
    shard = read_shard(path)
    texts = list(shard.metadata.items())
    texts += [("a name in it", name) for name in (*shard.metadata, *(entry.name for entry in shard.tensors))]
    faults = {key: fault for key, text in texts if (fault := secrets.fault(text))}
    end = "save the target again without it"
    messages = [f"{path.name}: its header holds {fault} ({key}); {end}" for key, fault in faults.items()]
    return messages, sorted(shard.metadata.keys() - _PLAIN_HEADER)


def text_faults(path: Path, secrets: Secrets) -> list[str]:
    """Return what a file of plain text, such as a licence, holds and should not."""
    fault = secrets.fault(read_bytes(path).decode("utf-8", errors="replace"))
    return [f"{path.name}: holds {fault}; change it and merge again"] if fault else []


def public_manifest(manifest: Mapping[str, Any], secrets: Secrets) -> dict[str, Any]:
    """Return the manifest for the Hub without its list of files: no path, no name that is not to be told."""
    facts = {key: manifest[key] for key in _FACTS if key in manifest}
    if outcome := manifest.get("outcome"):
        facts["outcome"] = {key: outcome[key] for key in _OUTCOME if key in outcome}
    change = {key: value for key, value in manifest.get("change", {}).items() if key != "notes"}
    total = manifest.get("fidelity", {}).get("total")
    told = {"sources": dict(secrets.told), "change": change, PUBLISHED: True}
    return json.loads(json.dumps(facts | told | ({"fidelity": {"total": total}} if total else {})))


def is_public(repo: str) -> bool:
    """Ask the Hub, as nobody in particular, whether a model is there for everybody; False where it cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return HfApi(token=False).model_info(repo, timeout=10).private is False
    except Exception:  # offline, private or not there, an error of the HTTP client
        return False
