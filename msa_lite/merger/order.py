"""Put the terms of several requests into one order, so that the merge does not depend on how they came in.

Sums of floats depend on their order. Here it follows from what the vectors are, and from nothing else: forget before
retain, then by the hash of weights and LoRA settings. So a request can be dropped, added or moved, and the merge of
those that are left is, byte for byte, the merge of these from nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.io.adapter import ADAPTER_FILE, deciding_fields, is_adapter
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.io.files import digest, hash_file
from msa_lite.io.hub import Source
from msa_lite.io.progress import notices
from msa_lite.io.seal import MANIFEST, is_sealed, load_manifest
from msa_lite.merger.formula import Term, number_terms
from msa_lite.strengths import rounded


def in_order(terms: Sequence[Term[Source]]) -> tuple[list[Term[Source]], dict[str, list[Term[Source]]]]:
    """Return the terms of a merge, none of weight 0, in the one order, named by it; and those that are shared, by name.

    A retain vector that several requests share becomes one term, with the sum of its betas. Raise UsageError for a
    forget vector that is listed twice: subtracting it twice is never meant.
    """
    groups, merged = group_terms(terms), []
    for group in groups:
        weight, names = sum_weights(term.weight for term in group), " and ".join(term.vector.name for term in group)
        if len(group) > 1 and group[0].side == "forget":
            raise UsageError(
                f"the same forget vector is given twice: {names}. Leave one out; to subtract it more strongly, give it "
                "a larger alpha"
            )
        if len(group) > 1:
            notices.info("%s: the same retain vector, so its betas add up: %g", names, weight)
        merged.append(replace(group[0], weight=weight))
    named = number_terms(merged)
    return named, {term.name: group for term, group in zip(named, groups, strict=True) if len(group) > 1}


def group_terms(terms: Sequence[Term[Source]]) -> list[list[Term[Source]]]:
    """Return the terms in the one order; those of one side whose vectors are the same stand together.

    Nothing is hashed where no side has two vectors.
    """
    if len({term.side for term in terms}) == len(terms):
        return [[term] for term in sorted(terms, key=lambda term: term.side)]
    groups: dict[tuple[str, str], list[Term[Source]]] = {}
    for term in terms:
        groups.setdefault((term.side, hash_vector(term.vector.folder)), []).append(term)
    return [sorted(groups[key], key=lambda term: (term.vector.name, term.weight)) for key in sorted(groups)]


def sum_weights(weights: Iterable[float]) -> float:
    """Return the weight of a vector that has several; it does not depend on their order."""
    used = [weight for weight in weights if weight]
    return used[0] if len(used) == 1 else rounded(math.fsum(used))


def hash_vector(folder: Path) -> str:
    """Return the SHA-256 over all that decides a vector; copies have the same, under any name.

    The hashes of a folder's manifest are taken where the files have not been written to since.
    """
    lora = is_adapter(folder)
    files = [folder / ADAPTER_FILE] if lora else [shard.path for shard in load_checkpoint(folder).shards]
    manifest = load_manifest(folder)
    known = manifest["files"] if manifest and is_sealed(manifest) else {}
    hashes = {path.name: _recorded(path, known.get(path.name)) or hash_file(path) for path in files if path.exists()}
    return digest({"config": deciding_fields(folder) if lora else None, "weights": hashes})


def _recorded(path: Path, item: Mapping[str, object] | None) -> str | None:
    """Return a file's hash in the manifest beside it; None where there is none, or the file may have changed since."""
    status, written = path.stat(), path.with_name(MANIFEST).stat() if item else None
    if item is None or written is None or item["bytes"] != status.st_size or status.st_mtime_ns >= written.st_mtime_ns:
        return None
    return str(item["sha256"])
