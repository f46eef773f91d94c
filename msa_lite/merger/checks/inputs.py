"""Find the inputs of a merge, in one order, and compare them by headers and with those of an earlier merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.errors import Faults, MsaError, OutputError, UsageError, discarded
from msa_lite.io.console.progress import notices
from msa_lite.io.files.reading import local_path, printable
from msa_lite.io.files.writing import digest, disk_faults, hash_file, output_path, write_text
from msa_lite.io.finished.manifest import (
    check_free,
    check_place,
    is_finished,
    partial_folder,
    recover,
    software_versions,
    stage_folder,
)
from msa_lite.io.finished.seal import CARD_FILE, check_unchanged, load_manifest
from msa_lite.io.weights.adapter import (
    ADAPTER_FILE,
    base_name,
    deciding_fields,
    is_adapter,
    is_bare_adapter,
    load_adapter,
)
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import Source, check_download_space, fetch, fetch_headers, is_remote, is_remote_adapter
from msa_lite.io.weights.quantised import hides_shapes
from msa_lite.io.weights.statements import check_statements
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_headers
from msa_lite.merger.formula import Term, VectorLike, named_strengths, number_terms
from msa_lite.report.page.card import model_card, read_target_card
from msa_lite.strengths import rounded


def in_order(terms: Sequence[Term[Source]]) -> tuple[list[Term[Source]], dict[str, list[Term[Source]]]]:
    """Return the terms of a merge, none of weight 0, in the one order, named by it; and those that are shared, by name.

    A retain vector that several requests share becomes one term, with the sum of its betas. Raise UsageError for a
    forget vector that is listed twice: subtracting it twice is never meant.
    """
    groups, sums = group_terms(terms), []
    for group in groups:
        weight, names = sum_weights(term.weight for term in group), " and ".join(term.vector.name for term in group)
        if len(group) > 1 and group[0].side == "forget":
            raise UsageError(
                f"the same forget vector is given twice: {names}. Leave one out; to subtract it more strongly, give it "
                "a larger alpha"
            )
        if len(group) > 1:
            notices.info("%s: the same retain vector, so its betas add up: %g", names, weight)
        sums.append(replace(group[0], weight=weight))
    named = number_terms(sums)
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
    """Return the SHA-256 over all that decides a vector; copies have the same, under any name."""
    is_lora = is_adapter(folder)
    files = [folder / ADAPTER_FILE] if is_lora else [shard.path for shard in load_checkpoint(folder).shards]
    hashes = {path.name: hash_file(path) for path in files if path.exists()}
    return digest({"config": deciding_fields(folder) if is_lora else None, "weights": hashes})


ModelLike = str | Source
_PLAIN = Precision()


@dataclass(frozen=True)
class Inputs:
    """The inputs of a merge, on this machine."""

    out: Path
    """The output folder."""
    kind: str
    """The kind of folder that it will be: "model" or "adapter"."""
    target: Source
    """The target."""
    terms: Sequence[Term[Source]]
    """The vectors with their weights, in their order (`in_order`); none of weight 0."""
    prior: Source | None
    """The prior; None where no vector is left, or where it is not needed."""
    record: dict[str, Any]
    """The manifest's inputs: identities, strengths and options."""
    shared: Mapping[str, Sequence[Term[Source]]]
    """By name of a term, the vectors of several requests that are the same, each with its own weight."""
    manifest: dict[str, Any] | None
    """The manifest that the output folder had at the start."""

    @property
    def sources(self) -> dict[str, Source]:
        """Return all sources by name."""
        return by_name(self.target, self.terms, self.prior)

    @property
    def finished(self) -> dict[str, Any] | None:
        """Return the output's manifest, if the output was made from these inputs and is whole."""
        return self.manifest if is_finished(self.out, self.record) else None

    @contextmanager
    def stage(self, nbytes: int, resumable: bool = False) -> Iterator[tuple[Path, dict[str, Any], dict[str, str]]]:
        """Build the output of this many bytes (`stage_folder`); give its partial folder, and facts and hashes to fill.

        Raise FormatError where the output says of itself what its files do not hold, OutputError when another process
        has written the output since the start. At the end, also in the place of another error, raise StageError when a
        source's file has changed.
        """
        facts: dict[str, Any] = {
            "sources": {name: printable(source.pinned()) for name, source in self.sources.items()},
            "terms": [{"name": term.name, "weight": term.weight, **_filter_of(term)} for term in self.terms],
            "target_card": read_target_card(self.target.folder),
        }
        if self.shared:
            facts["shared"] = {
                name: [{"source": printable(term.vector.pinned()), "weight": term.weight} for term in terms]
                for name, terms in self.shared.items()
            }
        hashes: dict[str, str] = {}
        marks = {path: mark for source in self.sources.values() for path, mark in source.marks.items()}
        with (
            disk_faults(self.out, nbytes),
            stage_folder(self.out, self.kind, self.record, facts, resumable, hashes, self._check_output) as partial,
        ):
            try:
                yield partial, facts, hashes
                if self.kind == "model":
                    check_statements(partial, load_checkpoint(self.target.folder))
                else:
                    load_adapter(partial)  # refuses ranks and tensors that its config does not tell
                card = model_card({"kind": self.kind, "inputs": self.record, **facts, "versions": software_versions()})
                write_text(partial / CARD_FILE, card)
            except MsaError as error:  # the inputs are at fault, so a rerun would end the same way
                raise discarded(error) from None
            finally:
                check_unchanged(marks)

    def _check_output(self) -> None:
        if load_manifest(self.out) != self.manifest:
            raise OutputError(f"{self.out}: another msa-lite wrote it meanwhile; look at it, then run this again")


def _filter_of(term: Term[Source]) -> dict[str, float]:
    """Return the strength λ of the filter that a vector went through, as its manifest has it; else nothing."""
    made_by = (load_manifest(term.vector.folder) or {}).get("filter")
    return {"filter": float(made_by["strength"])} if made_by else {}


def find_inputs(
    out: str | Path,
    kind: str,
    target: ModelLike,
    terms: Sequence[Term[ModelLike]],
    prior: ModelLike | None,
    options: Mapping[str, Any],
    replace: bool,
) -> Inputs:
    """Find the inputs of a merge into `out`, a folder of this kind ("model", "adapter").

    A vector of weight 0 is not opened, nor is a prior without vectors. options: further settings that decide the
    result. Inputs on the Hub are compared by their headers before any weights are fetched.

    Raise OutputError when `out` or its partial folder is, holds or lies in one of the inputs, or holds something that
    may not be replaced; UsageError for inputs that cannot be found.
    """
    names = by_name(target, terms, prior)
    empty = [name for name, value in {**names, "out": out}.items() if value == ""]
    if empty:
        raise UsageError(f"{' and '.join(empty)}: an empty name; give a folder or repo[@revision]")
    out = output_path(out)
    check_place(out, kind)
    _check_apart(out, (value.folder if isinstance(value, Source) else local_path(value) for value in names.values()))
    recover(out)
    check_free(out, kind)
    terms_used = [term for term in terms if term.weight]
    prior = prior if terms_used else None
    names = by_name(target, terms_used, prior)
    if any(not isinstance(value, Source) and is_remote(str(value)) for value in names.values()):
        untie = None if kind == "adapter" else bool(options.get("untie"))
        precision = Precision(str(options.get("dtype", "same")))
        checked = peek(target, terms_used, prior, precision, download=True, untie=untie, writes=kind == "model")
        if checked and not any(vector.needs_prior for vector in checked.vectors):
            names.pop("prior", None)  # plain LoRA on plain LoRA: its weights would be fetched for nothing
    sources, faults = dict[str, Source](), Faults()
    for name, value in names.items():
        with faults.gathered():
            sources[name] = value if isinstance(value, Source) else fetch(str(value), by_content=False)
    faults.check()
    folder = sources["target"].folder
    if is_bare_adapter(folder):
        raise _adapter_target(sources["target"].name, folder)
    _check_apart(out, (source.folder for source in sources.values()))
    vectors, shared = in_order([term.with_vector(sources[term.name]) for term in terms_used])
    inputs_by_name = by_name(sources["target"], vectors, sources.get("prior"))
    record = {name: source.identity() for name, source in inputs_by_name.items()}
    record |= named_strengths(vectors or terms) | {**options}
    inputs = Inputs(out, kind, sources["target"], vectors, sources.get("prior"), record, shared, load_manifest(out))
    if inputs.manifest and not replace and not inputs.finished:
        is_same = inputs.manifest.get("inputs") == record
        state = "made from the same inputs, but damaged (`msa-lite verify`)" if is_same else "made from other inputs"
        what = {"adapter": "an adapter"}.get(kind, f"a {kind}")
        raise OutputError(f"{out}: holds {what} {state}; remove it or choose another folder")
    return inputs


def by_name(target: VectorLike, terms: Sequence[Term[VectorLike]], prior: VectorLike | None) -> dict[str, VectorLike]:
    """Return target, vectors and prior by name."""
    models = {"target": target, **{term.name: term.vector for term in terms}}
    return models if prior is None else {**models, "prior": prior}


def _adapter_target(name: str, folder: Path) -> UsageError:
    """Return the error for a target that is an adapter."""
    remedy = "then --target WHOLE. (A recipe takes the adapter as its target and does this itself)"
    return UsageError(f"{whole_model_first(name, folder)}, {remedy}")


def whole_model_first(name: str, folder: Path) -> str:
    """Return what to do with an adapter where a whole model is needed: the merge that writes one."""
    base = base_name(folder)
    return (
        f"{name}: is a LoRA adapter on {base}; a whole model is needed here. Write one first: msa-lite merge --target "
        f"{base} --retain {name} --beta 1 --alpha 0 --prior {base} --out WHOLE"
    )


def _check_apart(out: Path, folders: Iterable[Path]) -> None:
    """Raise OutputError when the output, or the partial folder that it is built in, touches one of these folders."""
    for folder in folders:
        for inside in (out.resolve(), partial_folder(out).resolve()):
            place = folder.resolve()
            if folder.is_dir() and (place == inside or place in inside.parents or inside in place.parents):
                raise OutputError(
                    f"{out}: is one of the inputs, lies in one or around one ({folder}); a merge never overwrites what "
                    "it reads"
                )


def peek(
    target: ModelLike,
    terms: Sequence[Term[ModelLike]],
    prior: ModelLike | None,
    precision: Precision = _PLAIN,
    *,
    download: bool = False,
    untie: bool | None = False,
    writes: bool = True,
) -> CheckedMerge | None:
    """Check a merge by headers alone: only adapters and headers are fetched from the Hub.

    Raise as `check_headers` does when the inputs do not fit, and OutputError when there is no room to `download` them.
    Return None when the Hub gives no headers, since fetching will then say why, or headers that tell too little.
    """
    adapters: dict[str, Path] = {}
    heads: dict[str, Checkpoint] = {}
    for name, value in by_name(target, terms, prior).items():
        folder = value.folder if isinstance(value, Source) else local_path(value)
        is_on_hub = not isinstance(value, Source) and is_remote(str(value))
        if is_remote_adapter(str(value)) if is_on_hub else is_adapter(folder):
            adapters[name] = fetch(str(value)).folder if is_on_hub else folder
        elif head := fetch_headers(str(value)) if is_on_hub else load_checkpoint(folder):
            heads[name] = head
        else:
            return None
    if "target" in adapters:
        raise _adapter_target(str(target), adapters["target"])
    if any(map(hides_shapes, heads.values())):
        return None
    vectors = [term.with_vector(adapters.get(term.name) or heads[term.name]) for term in terms]
    checked = check_headers(heads["target"], vectors, heads.get("prior"), precision, untie=untie, writes=writes)
    if download:
        check_download_space(head for head in heads.values() if not head.shards)
    return checked
