"""Check a merge: everything that headers, arguments and the disk tell before the first byte is written."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, UsageError, at_most, join_faults, nearest
from msa_lite.io.weights.checkpoint import INDEX_FILE, Checkpoint, TensorEntry, load_checkpoint
from msa_lite.io.weights.companions import check_companions, copied_files, unnamed_shards
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.hub import Source, tokenizer_files
from msa_lite.io.weights.matching import check_names
from msa_lite.io.weights.quantised import dequantised, describe_forms, packed_weights
from msa_lite.io.weights.quantised_forms import Packed, Scaled, Turned
from msa_lite.io.weights.tied_head import check_head, settled, ties_head, token_names, untie_fault, untied
from msa_lite.io.weights.writer import output_bytes, output_dtype
from msa_lite.merger.fidelity import NAMES
from msa_lite.merger.formula import OneOrSeveral, Term, VectorLike, number_terms
from msa_lite.merger.vectors.deltas import Delta, Dora, Product, Stacked, turned
from msa_lite.merger.vectors.vector import Vector, load_vector

logger = logging.getLogger(__name__)

DTYPES = {"same": None, "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
ROUNDINGS = ("nearest", "stochastic")
_THREADS = 1024  # more than any machine has cores; each takes memory, and a billion would take for ever to count
_SEEDS = 2**64


@dataclass(frozen=True)
class Precision:
    """The arithmetic and the rounding of a merge."""

    dtype: str = "same"
    """The dtype of the output's floats, of `DTYPES`; "same": as the target stores them."""
    rounding: str = "nearest"
    """The rounding, of `ROUNDINGS`; stochastic rounding takes its numbers from `seed`."""
    seed: int = 0
    """The seed of stochastic rounding."""
    exact: bool = False
    """Compute in fp64."""

    @property
    def stored(self) -> str | None:
        """Return the safetensors name of the output's floats; None: as the target stores them."""
        return DTYPES[self.dtype]

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def record(self) -> dict[str, Any]:
        """Return the settings that decide the result, for a manifest."""
        options = {"dtype": self.dtype, **({"exact": True} if self.exact else {})}
        return options | ({"rounding": self.rounding, "seed": self.seed} if self.is_stochastic else {})

    def work(self, entry: TensorEntry) -> type[np.floating[Any]]:
        """Return the dtype that a tensor is merged in."""
        return np.float64 if self.exact or entry.dtype == "F64" else np.float32

    def output(self, entry: TensorEntry) -> str:
        """Return the dtype that a tensor is stored in, by its safetensors name."""
        return output_dtype(entry, self.stored)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the settings."""
        for name, value, choices in (("dtype", self.dtype, DTYPES), ("rounding", self.rounding, ROUNDINGS)):
            if value not in choices:
                yield f"{name} '{value}'{nearest(value, choices)}: choose from {', '.join(choices)}"
        if self.seed < 0:
            yield f"seed is {self.seed}; it must be ≥ 0"
        if self.seed >= _SEEDS:
            yield "seed: below 2^64"


@dataclass(frozen=True)
class CheckedMerge:
    """A merge whose inputs fit: target + Σ weight · vector."""

    target: Checkpoint
    terms: tuple[Term[Vector], ...]
    precision: Precision = Precision()
    is_untied: bool = False
    """True where the output gets a head of its own, which the target ties to its embedding."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """By name of a model that is stored as codes and scales, the form: {"target": "fp8"}."""
    is_apart: bool = False
    """True where the target's config ties embedding and head, but its files hold two matrices."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """The embedding by the name of the stored head that is its copy; both are rounded alike."""

    @property
    def vectors(self) -> list[Vector]:
        """Return the vectors of all terms."""
        return [term.vector for term in self.terms]

    @cached_property
    def touched(self) -> list[str]:
        """Return the target's tensors that a vector changes, in the order of its files."""
        return [name for name in self.target.tensors if any(name in vector.deltas for vector in self.vectors)]

    @cached_property
    def rewritten(self) -> list[str]:
        """Return the target's tensors whose bytes change: those touched, and those stored in another dtype."""
        touched = set(self.touched)
        return [
            name
            for name, entry in self.target.tensors.items()
            if entry.nbytes and (name in touched or self.is_cast(entry))
        ]

    def is_cast(self, entry: TensorEntry) -> bool:
        """Check whether the output stores a tensor in another dtype than the target does, or without its codes."""
        return self.precision.output(entry) != entry.dtype or (isinstance(entry, Packed) and not self.keeps_codes)

    @property
    def keeps_codes(self) -> bool:
        """Check whether the output is stored as codes, as the target is."""
        return "target" in self.forms and self.precision.stored is None

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output's weights."""
        return output_bytes((e for shard in self.target.shards for e in shard.tensors), self.precision.stored)

    def deltas(self, name: str) -> list[Term[Delta]]:
        """Return the terms that change a tensor, each with its delta; none of weight 0."""
        terms = [term for term in self.terms if term.weight and name in term.vector.deltas]
        return [term.with_vector(term.vector.deltas[name]) for term in terms]

    def is_low_rank(self, name: str) -> bool:
        """Check whether only products of factors change a tensor, so that one multiplication does it."""
        return all(isinstance(term.vector, Product) for term in self.deltas(name))

    def notes(self) -> list[str]:
        """Return notes for the user on its tied head, and on weights that keep the target's values."""
        vectors = [term.vector for term in self.terms if term.weight]
        notes = []
        if common := dict.fromkeys(name for vector in vectors for name in vector.common):
            name = next(iter(common))
            known = min(vector.common[name] for vector in vectors if name in vector.common)
            notes.append(
                f"the target has rows for {self.target.tensors[name].shape[0]} tokens, the vectors for {known}: in "
                f"{', '.join(common)} only the common rows changed; the others stay the target's"
            )
        if self.is_apart:
            notes.append(
                "the target's files hold two matrices for embedding and head, which its config.json does not say; "
                "the result's does (tie_word_embeddings: false)"
            )
        if lacking := dict.fromkeys(name for vector in vectors for name in vector.lacking):
            notes.append(
                f"{len(lacking)} tensors of the target stay as they are, because the tuned checkpoint or the prior "
                f"lacks them (transformers drops some, as those of multi-token prediction): "
                + ", ".join(at_most([*lacking], 3))
            )
        return notes

    def tell_forms(self, writes: bool = True) -> Iterator[str]:
        """Say of each model that is stored as codes how it is read, and what becomes of the target's form.

        writes: whether the target's weights are written.
        """
        for name, form in self.forms.items():
            what = name if name in ("target", "prior") else f"{name} vector's model"
            if name == "target" and not writes:
                continue
            if name == "target" and self.keeps_codes:
                yield f"the target is stored in {form}: what changes is dequantised, merged and stored in {form} again"
            else:
                plain = f", and written in {NAMES[self.precision.stored]}" if self.precision.stored else ""
                plain *= name == "target"
                yield f"the {what} is stored in {form}; its weights are read by dequantising{plain}"

    def check_factors(self) -> None:
        """Read the vectors' factors; refuse NaN, infinities and all zeros, which headers do not show."""
        for vector in self.vectors:
            vector.check_factors()

    def low_ranks(self, name: str) -> list[LowRank]:
        """Return all factors that change a tensor, those of each expert of a stacked one."""
        deltas = [term.vector for term in self.deltas(name)]
        products = [part for delta in deltas for part in (delta.slices if isinstance(delta, Stacked) else (delta,))]
        return [part.low for part in products if isinstance(part, (Product, Dora))]

    def factor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor's factors in the dtype that they are multiplied in."""
        lows = self.low_ranks(name)
        numbers = sum(low.rank * sum(low.shape) for low in lows)
        size = np.dtype(self.precision.work(self.target.tensors[name])).itemsize
        # Experts' shares are taken from their whole B, while that of the layer's other weight is kept, too.
        return numbers * size + 2 * sum({(low.b.file, low.b.name): low.held_bytes for low in lows}.values())


def msa_terms(
    forget: OneOrSeveral[VectorLike] | None,
    alpha: OneOrSeveral[float] | None,
    retain: OneOrSeveral[VectorLike] | None,
    beta: OneOrSeveral[float] | None,
    precision: Precision = Precision(),
    threads: int | None = None,
) -> list[Term[VectorLike]]:
    """Return the terms of MSA. Raise UsageError for wrong arguments of a merge, all at once.

    The k-th strength is that of the k-th vector. Without a list, 1.0 is that of every forget vector.
    No file is read.
    """
    forgets, retains, alphas, betas = (_as_list(value) for value in (forget, retain, alpha, beta))
    if alpha == 1.0 and len(forgets) > 1:
        alphas = [1.0] * len(forgets)
    faults = [*_strength_faults("forget", "alpha", forgets, alphas)]
    faults += _strength_faults("retain", "beta", retains, betas)
    faults += precision.faults()
    if threads is not None and threads < 1:
        faults.append(f"threads is {threads}; at least 1 is needed")
    if threads is not None and threads > _THREADS:
        faults.append(f"threads: at most {_THREADS}")
    if faults:
        raise UsageError("; ".join(faults) if len(faults) == 1 else join_faults("wrong arguments:", faults))
    terms = [Term("forget", vector, -float(strength)) for vector, strength in zip(forgets, alphas, strict=False)]
    terms += [Term("retain", vector, float(strength)) for vector, strength in zip(retains, betas, strict=False)]
    return number_terms(terms)


def _as_list(value: Any) -> list[Any]:
    """Return the values of an argument that takes one or several; None is no value."""
    return [] if value is None else [*value] if isinstance(value, (list, tuple)) else [value]


def _strength_faults(name: str, symbol: str, vectors: Sequence[Any], strengths: Sequence[Any]) -> Iterator[str]:
    """Yield the faults of the strengths of one side. A strength of 0 needs no vector."""
    for strength in strengths:
        if not 0 <= strength < math.inf:
            yield f"{symbol} is {strength}; it must be a number ≥ 0"
        elif strength > sys.float_info.max:
            yield f"{symbol} is an integer that no float holds"
        elif strength > 0 and not vectors:
            yield f"{symbol} is {strength:g}, but there is no {name} vector"
    if len(vectors) == 1 and not strengths:
        yield f"there is a {name} vector, but no {symbol}; say how strongly it counts"
    elif vectors and len(vectors) != len(strengths):
        hint = ", or none: then each is 1.0" if name == "forget" else ""
        yield (
            f"{name} vectors: {len(vectors)}, {symbol}: {len(strengths)}; give each vector its {symbol}, in the same "
            f"order{hint}"
        )


def check_merge(
    target: Source,
    terms: Sequence[Term[Source]],
    prior: Source | None,
    precision: Precision,
    untie: bool | None = False,
    writes: bool = True,
) -> CheckedMerge:
    """Open target and vectors and fit them together by their headers. Raise an error for all that does not fit."""
    checkpoint = load_checkpoint(target.folder)
    check_companions(checkpoint.folder, copied_files(checkpoint.folder))
    if target.tokenizer:
        check_companions(target.tokenizer.folder, tokenizer_files(target.tokenizer.folder))
    folders = [term.with_vector(term.vector.folder) for term in terms]
    start = load_checkpoint(prior.folder) if prior else None
    checked = check_headers(checkpoint, folders, start, precision, untie, writes)
    tuned = [load_checkpoint(vector.folder) for vector in checked.vectors if not vector.is_adapter]
    for model in (checkpoint, *([start] if start else []), *tuned):
        for path in unnamed_shards(model):
            logger.warning("%s: no part of the model, and not read: %s does not name it", path, INDEX_FILE)
    return checked


def check_headers(
    target: Checkpoint,
    terms: Sequence[Term[Path | Checkpoint]],
    prior: Checkpoint | None,
    precision: Precision = Precision(),
    untie: bool | None = False,
    writes: bool = True,
) -> CheckedMerge:
    """Fit vectors to a target by headers; a vector is the folder of an adapter or checkpoint, or a checkpoint.

    untie: give a tied target a head of its own, so that embedding and head change apart; None: where that is possible.
    writes: whether the target's weights will be written, in its own form where that is one of codes.
    """
    codes, plain = target, dequantised(target)
    target = settled(plain)
    check_mergeable(target)
    if prior:
        check_head(prior := dequantised(prior))
    models = {"target": target, **({"prior": prior} if prior else {})}
    forms = {name: form for name, model in models.items() if (form := describe_forms(model))}
    fault = None if untie is False else untie_fault(target)
    if fault and untie:
        raise fault
    is_untied, is_apart = untie is not False and fault is None, target is not plain
    if is_untied:
        target = untied(target)
    vectors = tuple(term.with_vector(load_vector(term.vector, target, prior)) for term in terms)
    forms |= {term.name: term.vector.form for term in vectors if term.vector.form}
    names = token_names(target) if ties_head(target) else None
    copies = {names[1]: names[0]} if names and {*names} <= target.tensors.keys() else {}
    checked = CheckedMerge(target, vectors, precision, is_untied, forms, is_apart, copies)
    if checked.keeps_codes and writes:
        checked = _keep_codes(checked, codes)
    faults = [
        f"{name}: stored as {target.tensors[name].dtype}, which is not a plain float"
        for name in checked.touched
        if not target.tensors[name].is_float
    ]
    if faults:
        raise FormatError(join_faults(f"{target.folder}: tensors that a vector changes cannot be merged:", faults))
    return checked


def _keep_codes(checked: CheckedMerge, codes: Checkpoint) -> CheckedMerge:
    """Return a merge whose target is seen as its files hold it, to be stored in the same form.

    codes: the target as it is stored. Raise FormatError for forms that no update can be stored in.
    """
    faults = [
        f"{name}: {entry.form.label}"
        for name, entry in packed_weights(checked.target).items()
        if name in checked.touched and not isinstance(entry.form, Scaled | Turned)
    ]
    if faults:
        raise FormatError(
            join_faults(
                f"{codes.folder}: the target is stored in {checked.forms['target']}, in which no update can be stored. "
                "--dtype bfloat16 reads its weights by dequantising and writes a plain model; --as adapter writes the "
                "update alone, for the target as it is:",
                faults,
            )
        )
    stored = dequantised(codes, stored=True)
    turns = [name for name, entry in packed_weights(checked.target).items() if isinstance(entry.form, Turned)]
    shapes = {name: checked.target.tensors[name].shape for name in turns}
    terms = []
    for term in checked.terms:
        deltas = {n: turned(d, shapes[n]) if n in shapes else d for n, d in term.vector.deltas.items()}
        terms.append(term.with_vector(replace(term.vector, deltas=deltas)))
    return replace(checked, target=untied(stored) if checked.is_untied else settled(stored), terms=tuple(terms))


def check_mergeable(target: Checkpoint) -> None:
    """Raise FormatError for a target whose codes could not be read as weights, or whose head is missing.

    Raise as `check_names`, too.
    """
    check_names(target)
    method = target.config.get("quantization_config")
    if method:
        kind = str(method.get("quant_method", "unknown") if isinstance(method, dict) else method)[:80]
        raise FormatError(
            f"{target.folder}: the target is quantised in a form that is not read here (quantization_config: {kind}); "
            "merge into the unquantised checkpoint and quantise the result. If there is none left, "
            "AutoModelForCausalLM.from_pretrained(…).dequantize() and save_pretrained() make one"
        )
    check_head(target)
