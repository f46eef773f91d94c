"""Merge to a checkpoint in the target's own layout: checks, stage folder, resume by shard, manifest.

Dtype policy: fp32 arithmetic (fp64 with `exact`, and for fp64 tensors), rounded once on storing. Memory is bounded by
a setting and does not grow with the model, its largest tensor or the number of its files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from msa_lite.errors import FormatError, MismatchError
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.files.reading import parse_json, read_bytes
from msa_lite.io.files.writing import check_space, digest, hash_file, write_text
from msa_lite.io.finished.manifest import partial_folder
from msa_lite.io.finished.seal import JOURNAL, MERGEKIT_FILE
from msa_lite.io.weights.companions import tell_companions
from msa_lite.io.weights.hub import copy_tokenizer
from msa_lite.io.weights.writer import write_companions
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_merge, msa_terms
from msa_lite.merger.checks.inputs import ModelLike, find_inputs
from msa_lite.merger.checks.interference import tell_interference
from msa_lite.merger.checks.memory import MAX_MEMORY, Bounds, describe_work, find_bounds, parse_size
from msa_lite.merger.fidelity import NAMES, Change, Merged, fidelity_report, total, warnings
from msa_lite.merger.formula import OneOrSeveral, Term
from msa_lite.merger.mergekit.recipes import recipe_beside
from msa_lite.merger.stream.stream import Stream

logger = logging.getLogger(__name__)

_LONGEST = 1 << 30  # bytes of a journal: some hundred for each tensor


def merge(
    target: ModelLike,
    out: str | Path,
    *,
    forget: OneOrSeveral[ModelLike] | None = None,
    alpha: OneOrSeveral[float] = 1.0,
    retain: OneOrSeveral[ModelLike] | None = None,
    beta: OneOrSeveral[float] | None = None,
    prior: ModelLike | None = None,
    dtype: str = "same",
    rounding: str = "nearest",
    seed: int = 0,
    exact: bool = False,
    untie: bool = False,
    max_memory: str | int = MAX_MEMORY,
    threads: int | None = None,
    replace: bool = False,
    progress: Progress = silent,
) -> Merged:
    """Subtract α times the forget vector from the target, add β times the retain vector, write the result to `out`.

    target, prior: folder or `repo[@revision]`. forget, retain: PEFT adapter folders, or full checkpoints. Checkpoints
    need the prior; so do adapters with more than factors (modules_to_save, biases, DoRA). alpha, beta ≥ 0; a vector
    whose strength is 0 is not opened. Several requests: lists of vectors, and of strengths in the same order. The order
    of the requests does not change a byte of the weights; how far they interfere is logged first.

    dtype: "same" or a name in `DTYPES`. rounding: "nearest" or "stochastic" (unbiased, from `seed`). exact: fp64
    arithmetic. untie: give the output a head of its own where the target ties it to the embedding, so that each of
    the two gets its own change. max_memory: bytes or "512MB", of which 100 MB are kept for Python itself. threads: at
    most this many, by default one a core. An `out` that was made from the same inputs is left as it is; one that
    msa-lite made from other inputs is only overwritten with `replace`.

    Raise before anything is written: UsageError, MismatchError (tensors that do not fit, all named), FormatError
    (broken files, quantised targets), OutputError (`out` is taken, locked or the disk is too small). Raise during the
    work: StageError when the disk fails; finished shards stay, and the same call merges the others. MismatchError when
    merged values do not fit the dtype or the vectors turn out to change nothing, FormatError for deltas that are not
    finite; then nothing stays.
    """
    precision = Precision(dtype, rounding, seed, exact)
    terms: list[Term[ModelLike]] = msa_terms(forget, alpha, retain, beta, precision, threads)
    limits: dict[str, Any] = {"max_memory": max_memory, "threads": threads, "replace": replace, "progress": progress}
    return merge_terms(target, out, terms, prior, precision, untie=untie, **limits)


def merge_terms(
    target: ModelLike,
    out: str | Path,
    terms: Sequence[Term[ModelLike]],
    prior: ModelLike | None,
    precision: Precision,
    *,
    untie: bool = False,
    max_memory: str | int = MAX_MEMORY,
    threads: int | None = None,
    replace: bool = False,
    compare: Collection[Path] | None = None,
    progress: Progress = silent,
) -> Merged:
    """Write θ_D + Σ weight · vector to `out`, as `merge` does, for the terms of MSA or of a baseline.

    compare: folders of vectors, to tell only how far each of these interferes with all others.
    """
    parse_size(max_memory)
    options = precision.record | ({"untie": True} if untie else {})
    inputs = find_inputs(out, "model", target, terms, prior, options, replace)
    if manifest := inputs.finished:
        return Merged.recorded(inputs.out, manifest)
    checked = check_merge(inputs.target, inputs.terms, inputs.prior, precision, untie)
    bounds, recipe = find_bounds(checked, max_memory, threads), recipe_beside(checked, inputs.sources)
    pairs = tell_interference(checked, compare)
    needed = checked.output_bytes
    check_space(inputs.out, needed - _bytes_done(inputs.out))
    for line in tell_companions(checked.target):
        notices.info("%s", line)
    for line in (*checked.tell_forms(), describe_work(checked, bounds)):
        logger.info("%s", line)
    checked.check_factors()
    with inputs.stage(needed, resumable=True) as (partial, facts, hashes):
        changes = _write_shards(checked, bounds, partial, hashes, progress)
        merged = dataclasses.replace(_summary(checked, inputs.out, changes), interference=tuple(pairs))
        write_companions(checked.target, partial, precision.stored)
        if tokenizer := inputs.target.tokenizer:
            copy_tokenizer(tokenizer.folder, partial)
        write_text(partial / MERGEKIT_FILE, recipe)
        facts["mergekit"] = any(not line.startswith("#") for line in recipe.splitlines())
        facts |= {"forms": dict(checked.forms)} if checked.forms else {}
        facts["change"] = merged.change
        facts["fidelity"] = fidelity_report(changes)
        facts |= {"interference": pairs} if pairs else {}
    for note in merged.notes:
        logger.warning("%s", note)
    return merged


def _bytes_done(out: Path) -> int:
    """Return the bytes that an interrupted merge has written already."""
    return sum(path.stat().st_size for path in partial_folder(out).glob("*.safetensors"))


def _write_shards(
    checked: CheckedMerge, bounds: Bounds, partial: Path, hashes: dict[str, str], progress: Progress
) -> dict[str, Change]:
    """Write every shard that an earlier attempt has not left whole; return the changes by tensor.

    Adds the files' hashes to `hashes`.
    """
    journal = _Journal(partial)
    amount = sum(entry.nbytes for shard in checked.target.shards for entry in shard.tensors)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress("merge", min(done, amount), amount)

    with threadpool_limits(1, user_api="blas"), Stream(checked, bounds) as stream:
        for shard in checked.target.shards:
            path = partial / shard.path.name
            if journal.has(path):
                report(sum(entry.nbytes for entry in shard.tensors))
            else:
                path.unlink(missing_ok=True)
                journal.record(path.name, *stream.write(shard, path, report))
    progress("merge", amount, amount)
    hashes.update(journal.hashes)
    return journal.changes


class _Journal:
    """The finished shards of a merge, one line each, written when the shard is safely on the disk.

    A line holds the hash of its content. A line that a kill cut off, or that was damaged, counts as not there.
    """

    def __init__(self, partial: Path) -> None:
        self._path = partial / JOURNAL
        self.hashes: dict[str, str] = {}
        self.changes: dict[str, Change] = {}
        with suppress(FormatError):  # there is none yet
            for line in read_bytes(self._path, _LONGEST).splitlines():
                with suppress(FormatError, KeyError, TypeError, AttributeError):
                    self._take(parse_json(line, JOURNAL))

    def _take(self, item: Any) -> None:
        """Take over a line if it is as `record` wrote it."""
        if item.pop("line") == digest(item):
            self.changes |= {name: Change(**sums) for name, sums in item["changes"].items()}
            self.hashes[item["file"]] = item["sha256"]

    def has(self, path: Path) -> bool:
        """Check by its hash whether a finished shard is still there unchanged."""
        known = self.hashes.get(path.name)
        return known is not None and path.is_file() and hash_file(path) == known

    def record(self, name: str, sha256: str, changes: dict[str, Change]) -> None:
        """Append a shard that is on the disk."""
        self.hashes[name] = sha256
        self.changes |= changes
        sums = {tensor: asdict(change) for tensor, change in changes.items()}
        item = {"file": name, "sha256": sha256, "changes": sums}
        with open(self._path, "a", encoding="utf-8") as stream:
            # A line that a kill cut off stands alone.
            stream.write(f"\n{json.dumps(item | {'line': digest(item)})}\n")
            stream.flush()
            os.fsync(stream.fileno())


def _summary(checked: CheckedMerge, out: Path, changes: dict[str, Change]) -> Merged:
    """Return the totals. Raise MismatchError when a vector is zero or nothing changed."""
    change, stored, terms = total(changes.values()), checked.precision.stored, checked.terms
    idle = [term.name for term in terms if not change.vectors.get(term.name)]
    if idle:
        names = " and the ".join(idle)
        raise MismatchError(f"{out}: the {names} vector is all zeros and changes nothing; fit it again")
    apart = sum(term.weight * term.weight * change.vectors[term.name] for term in terms)  # ** overflows loudly
    if apart and change.wanted < 1e-12 * apart:  # squared norms: nothing but rounding is left
        names = "forget and retain vector" if len(terms) == 2 else "the vectors"
        raise MismatchError(f"{out}: {names} cancel each other out; nothing was written")
    if terms and not change.changed:
        hint = "" if stored == "F32" else " (try --dtype float32)"
        raise MismatchError(
            f"{out}: the vectors change none of the {change.weights} weights they touch: they are too small for "
            f"this dtype{hint}; nothing was written"
        )
    is_coded = checked.keeps_codes
    dtypes = sorted({NAMES[checked.precision.output(checked.target.tensors[name])] for name in checked.touched})
    form = checked.forms["target"] if is_coded else " and ".join(dtypes)
    return Merged(
        out,
        tensors_touched=len(checked.touched),
        weights_touched=change.weights,
        weights_changed=change.changed,
        rounding_loss=change.rounding_loss,
        relative_size=change.relative_size,
        update_cosine=change.update_cosine,
        vector_cosine=change.vector_cosine,
        notes=(*checked.notes(), *warnings(change, form, checked.precision.is_stochastic, is_coded)),
    )
