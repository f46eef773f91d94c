"""The merge to a checkpoint in the target's own layout: checks, stage folder, resume by shard, and what is recorded.

Dtype policy: fp32 arithmetic (fp64 with `exact`, and for fp64 tensors), rounded once on storing. Memory is bounded by
a setting and does not grow with the model, its largest tensor or the number of its files.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from msa_lite.errors import FormatError, MismatchError, MsaError
from msa_lite.io.disk import check_space, disk_faults
from msa_lite.io.files import digest, hash_file, write_text
from msa_lite.io.hub import Source
from msa_lite.io.manifest import discarded, partial_folder, stage_folder
from msa_lite.io.progress import Progress, readable, silent
from msa_lite.io.reading import parse_json, read_bytes
from msa_lite.io.seal import JOURNAL
from msa_lite.io.tokenizer import copy_tokenizer
from msa_lite.io.writer import output_bytes, write_companions
from msa_lite.merger.fidelity import NAMES, Change, fidelity_report, sums, total, warnings
from msa_lite.merger.inputs import Inputs, find_inputs
from msa_lite.merger.plan import (
    DTYPES,
    Budget,
    MergePlan,
    Precision,
    check_arguments,
    estimate,
    make_budget,
    make_plan,
    parse_size,
)
from msa_lite.merger.stream import Stream
from msa_lite.merger.translate import recipe_beside

logger = logging.getLogger(__name__)

_LONGEST = 1 << 30  # bytes of a journal: some hundred for each tensor
MERGEKIT_FILE = "mergekit_config.yml"


@dataclass(frozen=True)
class Merged:
    """Result of a merge: its folder, what became of the update in total, and what a user should know about it.

    change: the figures of `Change.as_dict`. notes: warnings, one sentence each.
    """

    folder: Path
    tensors_touched: int
    weights_touched: int
    weights_changed: int
    rounding_loss: float
    relative_size: float | None = None
    update_cosine: float | None = None
    vector_cosine: float | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json` and the manifest."""
        values = {key: value for key, value in vars(self).items() if key != "folder"}
        return {"out": str(self.folder), **values, "notes": list(self.notes)}

    def describe(self) -> str:
        """What was done, in a few lines."""
        if not self.weights_touched:
            return "the target as it is, no weight changed"
        size = "of no known part" if self.relative_size is None else f"{self.relative_size:.2e}"
        lines = [
            f"{self.weights_changed / self.weights_touched:.2%} of {self.weights_touched} weights in "
            f"{self.tensors_touched} tensors changed",
            f"update: {size} of the weights' norm; rounding lost {self.rounding_loss:.2%} of it",
        ]
        if self.update_cosine is not None:
            lines[-1] += f" (cosine of stored and wanted update {self.update_cosine:.4f})"
        if self.vector_cosine is not None:
            lines.append(f"cosine of forget and retain vector: {self.vector_cosine:.3f}")
        return "\n".join(lines)


def merge(
    target: str | Source,
    out: str | Path,
    *,
    forget: str | Source | None = None,
    alpha: float = 1.0,
    retain: str | Source | None = None,
    beta: float | None = None,
    prior: str | Source | None = None,
    dtype: str = "same",
    rounding: str = "nearest",
    seed: int = 0,
    exact: bool = False,
    max_memory: str | int = "512MB",
    threads: int | None = None,
    replace: bool = False,
    progress: Progress = silent,
) -> Merged:
    """Subtract α times the forget vector from the target, add β times the retain vector, write the result to `out`.

    target, prior: folder or `repo[@revision]`; forget, retain: PEFT adapter folders, or full checkpoints. Checkpoints,
    and what in an adapter is no product of factors (modules_to_save, biases, DoRA), need the prior. alpha, beta ≥ 0;
    a vector whose strength is 0 is not opened. dtype: "same" or a name in `DTYPES`. rounding: "nearest" or
    "stochastic" (unbiased, from `seed`). exact: fp64 arithmetic. max_memory: bytes or "512MB", of which 100 MB are
    kept for Python itself. threads: at most so many, by default one a core. An `out` that was made from the same
    inputs is left as it is; one that msa-lite made from others is only overwritten with `replace`.

    Raises before anything is written: UsageError, MismatchError (tensors that do not fit, all named), FormatError
    (broken files, quantised targets), OutputError (`out` is taken, locked or the disk is too small). While it works:
    StageError when the disk fails, after which finished shards stay and the same call goes on with the others;
    MismatchError when merged values do not fit the dtype or the vectors turn out to change nothing, FormatError for
    deltas that are not finite; then nothing stays.
    """
    vectors = {"forget": (forget, alpha), "retain": (retain, beta)}
    check_arguments(vectors, dtype, rounding, threads, seed)
    parse_size(max_memory)
    stochastic = rounding == "stochastic"
    options = {"dtype": dtype, **({"exact": True} if exact else {})}
    options |= {"rounding": rounding, "seed": seed} if stochastic else {}
    inputs = find_inputs(out, "model", target, vectors, prior, options, replace)
    if (change := inputs.finished) is not None:
        return Merged(folder=inputs.out, **{**change, "notes": tuple(change.get("notes", ()))})
    plan = make_plan(inputs.sources, inputs.alpha, inputs.beta, Precision(DTYPES[dtype], stochastic, seed, exact))
    merged = _write(plan, inputs, make_budget(plan, max_memory, threads), recipe_beside(plan, inputs.sources), progress)
    for note in merged.notes:
        logger.warning("%s", note)
    return merged


def _write(plan: MergePlan, inputs: Inputs, budget: Budget, recipe: str, progress: Progress) -> Merged:
    """Fill the output's folder."""
    out, dtype = inputs.out, plan.precision.dtype
    needed = output_bytes(plan.target.tensors.values(), dtype)
    check_space(out, needed - _done_already(out))
    forecast = estimate(plan, budget)
    logger.info(
        "%s to read, %s to write, about %s of memory, %d threads, at least %.1f s", readable(forecast["bytes_read"]),
        readable(forecast["bytes_written"]), readable(forecast["memory"]), forecast["threads"], forecast["seconds"],
    )  # fmt: skip
    plan.check_factors()
    facts, hashes = inputs.facts(), dict[str, str]()
    with (
        disk_faults(out, needed),
        stage_folder(out, "model", inputs.record, facts, True, hashes, inputs.check_output) as partial,
        inputs.unchanged(),
    ):
        changes = _write_shards(plan, budget, partial, hashes, progress)
        merged = _summary(plan, out, changes)
        write_companions(plan.target, partial, dtype)
        if tokenizer := inputs.sources["target"].tokenizer:
            copy_tokenizer(tokenizer.folder, partial)
        write_text(partial / MERGEKIT_FILE, recipe)
        facts["change"] = {key: value for key, value in merged.as_dict().items() if key != "out"}
        facts["fidelity"] = fidelity_report(changes)
    return merged


def _done_already(out: Path) -> int:
    """Bytes of an interrupted merge that need not be found on the disk again."""
    partial = partial_folder(out)
    return sum(path.stat().st_size for path in partial.glob("*.safetensors")) if partial.is_dir() else 0


def _write_shards(
    plan: MergePlan, budget: Budget, partial: Path, hashes: dict[str, str], progress: Progress
) -> dict[str, Change]:
    """Write every shard that an earlier attempt has not left whole; hashes and changes by file and tensor."""
    journal = _Journal(partial)
    amount = sum(entry.nbytes for entry in plan.target.tensors.values())
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress("merge", min(done, amount), amount)

    try:
        with threadpool_limits(1, user_api="blas"), Stream(plan, budget) as stream:
            for shard in plan.target.shards:
                path = partial / shard.path.name
                if journal.has(path):
                    report(sum(entry.nbytes for entry in shard.tensors))
                else:
                    path.unlink(missing_ok=True)
                    journal.record(path.name, *stream.write(shard, path, report))
    except MsaError as error:  # the inputs are at fault, so that a rerun would end the same way
        raise discarded(error) from None
    progress("merge", amount, amount)
    hashes.update(journal.hashes)
    return journal.changes


class _Journal:
    """The finished shards of a merge, one line each, written when the shard is safely on the disk.

    A line holds the hash of what it says. One that a kill cut off, or that was damaged, counts as not there.
    """

    def __init__(self, partial: Path) -> None:
        self._path = partial / JOURNAL
        self.hashes: dict[str, str] = {}
        self.changes: dict[str, Change] = {}
        for item in self._items():
            self.hashes[item["file"]] = item["sha256"]
            self.changes |= {name: Change(**values) for name, values in item["changes"].items()}

    def _items(self) -> Iterator[dict[str, Any]]:
        """Yield what the lines say that are as `record` wrote them."""
        with suppress(FormatError):
            for line in read_bytes(self._path, _LONGEST).splitlines():
                with suppress(FormatError):
                    item = parse_json(line, JOURNAL)
                    if isinstance(item, dict) and item.pop("line", None) == digest(item):
                        yield item

    def has(self, path: Path) -> bool:
        """Whether a shard is there as it was finished, by its hash."""
        known = self.hashes.get(path.name)
        return known is not None and path.is_file() and hash_file(path) == known

    def record(self, name: str, sha256: str, changes: dict[str, Change]) -> None:
        """Put down a shard that is on the disk."""
        self.hashes[name] = sha256
        self.changes |= changes
        item = {"file": name, "sha256": sha256, "changes": {n: sums(change) for n, change in changes.items()}}
        with open(self._path, "a", encoding="utf-8") as stream:
            # A line that a kill cut off stands alone.
            stream.write(f"\n{json.dumps(item | {'line': digest(item)})}\n")
            stream.flush()
            os.fsync(stream.fileno())


def _summary(plan: MergePlan, out: Path, changes: dict[str, Change]) -> Merged:
    """The totals. Raises MismatchError when a vector is zero or nothing changed; the partial folder is then removed."""
    change = total(changes)
    vectors = (("forget", plan.forget, change.forget), ("retain", plan.retain, change.retain))
    idle = [name for name, vector, norm in vectors if vector and not norm]
    if idle:
        raise discarded(
            MismatchError(f"{out}: the {' and the '.join(idle)} vector is all zeros and changes nothing; fit it again")
        )
    apart = plan.alpha * plan.alpha * change.forget + plan.beta * plan.beta * change.retain  # ** overflows loudly
    if apart and change.wanted < 1e-12 * apart:  # squared norms: nothing but rounding is left
        raise discarded(MismatchError(f"{out}: forget and retain vector cancel each other out; nothing was written"))
    if (plan.forget or plan.retain) and not change.changed:
        hint = "" if plan.precision.dtype in ("F32", "F64") else " (try --dtype float32)"
        raise discarded(
            MismatchError(
                f"{out}: the vectors change none of the {change.weights} weights they touch: they are too small for "
                f"this dtype{hint}; nothing was written"
            )
        )
    figures = change.as_dict()
    kinds = {plan.precision.dtype or plan.target.tensors[name].dtype for name in plan.touched}
    stored = " and ".join(sorted(NAMES[kind] for kind in kinds))
    return Merged(
        out,
        len(plan.touched),
        change.weights,
        change.changed,
        change.rounding_loss,
        figures["relative_size"],
        figures["update_cosine"],
        figures["vector_cosine"],
        (*plan.notes(), *warnings(change, stored, plan.precision.stochastic)),
    )
