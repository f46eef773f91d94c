"""Run a mergekit recipe with mergekit itself, for the methods that are not ours: TIES, DARE, SLERP.

mergekit passes over tensors that do not fit each other, and writes its output's index even after an error. So headers
are compared first, the output is built beside its place and checked afterwards, and nothing of a failed merge stays.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from msa_lite.errors import FormatError, MismatchError, MsaError, StageError, UsageError, discarded, join_faults
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.reading import printable
from msa_lite.io.files.writing import check_space, digest, write_text
from msa_lite.io.finished.seal import MERGEKIT_FILE
from msa_lite.io.weights.blocks import Files, Scratch, read_rows
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.quantised import name_form
from msa_lite.merger.block import LoadedUpdate, RowBlock, merge_rows
from msa_lite.merger.bounds import blocks_of
from msa_lite.merger.checked import CheckedMerge, Precision, check_merge
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.inputs import Inputs, find_inputs
from msa_lite.merger.mergekit_reader import read_recipe
from msa_lite.merger.vectors import compare_checkpoints, load_vector

logger = logging.getLogger(__name__)

_SAMPLE = 8  # tensors that are merged again by our own arithmetic


@dataclass(frozen=True)
class MergedByMergekit:
    """The result of a merge that mergekit made."""

    folder: Path
    """The merged model."""
    method: str
    """mergekit's name of the method."""
    weights_touched: int
    """The number of weights in tensors of which any changed."""
    weights_changed: int
    """The number of weights whose stored value differs from the target's."""
    tensors_touched: int
    """The number of tensors of which any weight changed."""
    relative_size: float | None
    """‖result − target‖ / ‖target‖ over these tensors."""
    difference: float | None
    """The largest difference of a sample of weights from msa-lite's own result in fp64; None for methods that are not
    ours."""
    json_keys: ClassVar = {"out": "folder", "**": "change"}

    @property
    def change(self) -> dict[str, Any]:
        """Return the figures for the manifest."""
        return {key: value for key, value in vars(self).items() if key != "folder"}

    def describe(self) -> str:
        """Say in a few lines how the weights changed."""
        share = self.weights_changed / self.weights_touched if self.weights_touched else 0.0
        lines = [f"{share:.2%} of {self.weights_touched} weights in {self.tensors_touched} tensors changed"]
        if self.relative_size is not None:
            lines.append(f"{self.method}: the change is {self.relative_size:.2e} of the weights' norm")
        if self.difference is not None:
            lines.append(f"at most {self.difference:.1e} from msa-lite's own result, in {_SAMPLE} tensors or fewer")
        return "\n".join(lines)


def merge_with_mergekit(
    recipe: Path, out: str | Path, seed: int = 0, replace: bool = False, progress: Progress = silent
) -> MergedByMergekit:
    """Run a recipe through mergekit's Python API and write the result to `out`, with a manifest as all merges have.

    seed: of DARE and other methods that draw numbers. The models are known by the manifest as target (the base, or the
    first model) and vectors, those of negative weight as forget. Raise before anything is written: UsageError without
    mergekit, or for a recipe that it refuses; MismatchError or FormatError for models that do not fit each other, or
    that are stored as codes. Raise StageError where mergekit fails, and MismatchError for a result that lacks tensors
    or holds NaN; then nothing stays.
    """
    text = _read(recipe)
    config = _parse(recipe, text)
    target, terms, prior, is_ours = _roles(recipe, config)
    options = {"with": "mergekit", "recipe": digest(text), "seed": seed, "version": metadata.version("mergekit")}
    inputs = find_inputs(out, "model", target, terms, prior, options, replace)
    if manifest := inputs.finished:
        return MergedByMergekit(inputs.out, **manifest["change"])
    checkpoint = _check_fit(inputs)
    ours = check_merge(inputs.target, inputs.terms, inputs.prior, Precision(exact=True)) if is_ours else None
    check_space(inputs.out, checkpoint.nbytes)
    with inputs.stage(checkpoint.nbytes) as (partial, facts, _):
        progress("merge", 0, 1)
        try:
            _run(config, partial, seed)
            merged = _measure(checkpoint, load_checkpoint(partial), inputs.out, config.merge_method, ours)
        except MsaError as error:
            raise discarded(error) from None
        write_text(partial / MERGEKIT_FILE, text)
        facts |= {"mergekit": True, "change": merged.change}
        progress("merge", 1, 1)
    return merged


def _read(recipe: Path) -> str:
    try:
        import mergekit  # noqa: F401
    except ImportError as error:
        raise UsageError("--with mergekit: mergekit is not installed; pip install 'msa-lite[mergekit]'") from error
    try:
        return recipe.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{printable(recipe)}: cannot be read ({error})") from error


def _parse(recipe: Path, text: str) -> Any:
    """Return mergekit's form of a recipe. Raise UsageError with its words where it refuses it."""
    import yaml
    from mergekit.config import MergeConfiguration

    try:
        config = MergeConfiguration.model_validate(yaml.safe_load(text))
    except Exception as error:  # pydantic's, YAML's, and its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic" not in line]
        raise UsageError(join_faults(f"{recipe}: mergekit refuses this recipe:", lines)) from error
    if not config.referenced_models():
        raise UsageError(f"{recipe}: names no models")
    return config


def _roles(recipe: Path, config: Any) -> tuple[str, list[Term[str]], str | None, bool]:
    """Return target, vectors and prior of a recipe, and True where msa-lite could do the same merge."""
    try:
        request = read_recipe(recipe)
    except UsageError:
        listed = [*(config.models or ()), *(s for part in config.slices or () for s in part.sources)]
        base = config.base_model or listed[0].model
        weights: dict[str, float] = {}
        for item in listed:
            if item.model != base:
                weight = (item.parameters or {}).get("weight", 1.0)
                weights[str(item.model.lora or item.model.model)] = float(weight) if _is_number(weight) else 1.0
        terms = [Term("forget" if weight < 0 else "retain", name, weight) for name, weight in weights.items()]
        return str(base.model), number_terms([term for term in terms if term.weight]), None, False
    names = [term.with_vector(str(term.vector)) for term in request.terms]
    return str(request.target), names, str(request.prior) if request.prior else None, True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_fit(inputs: Inputs) -> Checkpoint:
    """Return the target by its headers. Raise for models of which mergekit would pass over a part."""
    target, faults = load_checkpoint(inputs.target.folder), []
    others = {name: source.folder for name, source in inputs.sources.items() if name != "target"}
    models = {"target": target}
    for name, folder in others.items():
        if (folder / "adapter_config.json").is_file():
            load_vector(folder, target, target)  # raises where it does not fit
        else:
            models[name] = load_checkpoint(folder)
            faults += compare_checkpoints(target, models[name], ("target", name))
    for name, model in models.items():
        if form := name_form(model) or (model.config.get("quantization_config") and "a quantised form"):
            raise FormatError(
                f"{name} {model.folder}: is stored in {form}, whose codes mergekit would take for weights"
            )
    if faults:
        raise MismatchError(
            join_faults("models that do not fit each other, of which mergekit would skip parts:", faults)
        )
    return target


def _run(config: Any, partial: Path, seed: int) -> None:
    """Let mergekit write the result. Raise StageError with its words where it fails."""
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    with tempfile.TemporaryDirectory(dir=partial.parent, prefix=f"{partial.name}.lora-") as cache:
        options = MergeOptions(
            lora_merge_cache=cache, lora_merge_dtype="float32", random_seed=seed, quiet=True, write_model_card=False,
            trust_remote_code=False, safe_serialization=True,
        )  # fmt: skip
        try:
            run_merge(config, str(partial), options)
        except Exception as error:  # it raises whatever torch and its own code do
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            raise StageError(f"mergekit failed: {reason}") from error


def _measure(
    target: Checkpoint, result: Checkpoint, out: Path, method: str, ours: CheckedMerge | None
) -> MergedByMergekit:
    """Return the figures of a result. Raise MismatchError where tensors are missing, of another shape or not finite."""
    if faults := compare_checkpoints(target, result, ("target", "result"), ()):
        raise MismatchError(join_faults(f"{out}: mergekit's result is not a whole model:", faults))
    files, touched, changed, tensors, moved, whole = Files(), 0, 0, 0, 0.0, 0.0
    for name, entry in target.tensors.items():
        other, count, norms = result.tensors.get(name), 0, np.zeros(2)
        if other is None or not (entry.is_float and other.is_float) or other.shape != entry.shape:
            continue
        for start, stop in blocks_of(entry):
            before, after = (read_rows(files, e, start, stop).astype(np.float64) for e in (entry, other))
            if not np.isfinite(after).all():
                raise MismatchError(f"{out}: {name}: mergekit's result holds NaN or infinities")
            count += int(np.count_nonzero(before != after))
            norms += np.square(after - before).sum(), np.square(before).sum()
        if count:
            touched, changed, tensors = touched + before.shape[1] * entry.matrix_shape[0], changed + count, tensors + 1
            moved, whole = moved + norms[0], whole + norms[1]
    if not changed and ours is None:
        raise MismatchError(f"{out}: mergekit changed no weight of the target; is every weight of the recipe 0?")
    size = float(np.sqrt(moved / whole)) if whole else None
    difference = max(_differences(ours, result), default=None) if ours else None
    return MergedByMergekit(out, method, touched, changed, tensors, size, difference)


def _differences(ours: CheckedMerge, result: Checkpoint) -> Iterator[float]:
    """Yield the largest difference of each of a few tensors from the same merge in our own fp64 arithmetic."""
    files, names = Files(), [name for name in ours.touched if name in result.tensors]
    for name in names[:: max(1, len(names) // _SAMPLE)][:_SAMPLE]:
        entry, scratch = ours.target.tensors[name], [Scratch() for _ in range(len(ours.terms) + 1)]
        terms = tuple(term.with_vector(term.vector.load(files, np.float64)) for term in ours.deltas(name))
        for rows in blocks_of(entry):
            merged = merge_rows(ours, files, RowBlock(entry, rows, LoadedUpdate(terms=terms)), scratch).merged
            if merged is not None and result.tensors[name].shape == entry.shape:
                theirs = read_rows(files, result.tensors[name], *rows).astype(np.float64)
                yield float(np.abs(theirs - merged).max())
