"""Run a mergekit recipe with mergekit itself, for the methods that are not ours: TIES, DARE, SLERP.

mergekit passes over tensors that do not fit each other, writes its output's index even after an error, and copies but a
few of the files beside the weights. So every model of the recipe is found, pinned and compared by its headers first;
the output is built beside its place, gets the target's other files, and is checked; nothing of a failed merge stays.
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, MismatchError, StageError, UsageError, clip, join_faults
from msa_lite.io.console.libraries import require, without_bars
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.files.addresses import check_secrets
from msa_lite.io.files.reading import YAML_LIMIT, read_text
from msa_lite.io.files.writing import check_space, digest, indented_json, output_path, write_text
from msa_lite.io.finished.manifest import check_free
from msa_lite.io.finished.seal import MERGEKIT_FILE
from msa_lite.io.weights.adapter import is_adapter
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.companions import (
    check_companions,
    copied_files,
    copy_into,
    name_in,
    tell_companions,
)
from msa_lite.io.weights.hub import Source, fetch, has_tokenizer, tokenizer_files
from msa_lite.io.weights.quantised import name_form
from msa_lite.io.weights.tied_head import settled, stores_alike
from msa_lite.merger.checks.inputs import Inputs, find_inputs
from msa_lite.merger.checks.interference import measure_model
from msa_lite.merger.fidelity import Merged, total
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.merger.mergekit.recipes import MergeRequest, Reference
from msa_lite.merger.vectors.vector import compare_checkpoints, load_vector

logger = logging.getLogger(__name__)

_SHOWN = 300  # characters of a list of tensors


def merge_with_mergekit(
    recipe: Path, out: str | Path, seed: int = 0, replace: bool = False, progress: Progress = silent
) -> Merged:
    """Run a recipe through mergekit's Python API and write the result to `out`, with a manifest as all merges have.

    seed: of DARE and other methods that draw numbers. The models are known by the manifest as target (the base, or the
    first model), vectors (those of negative weight as forget) and prior (the model under adapters). mergekit reads them
    from the folders that were checked, repositories at the commit that is recorded.

    Raise before anything is written: UsageError without mergekit, or for a recipe that it refuses or that has models in
    other roles; MismatchError or FormatError for models that do not fit each other, or that are stored as codes. Raise
    StageError where mergekit fails, and MismatchError for a result that lacks tensors or holds NaN; then nothing stays.
    """
    text, config = parse_recipe(recipe)
    roles = find_roles(recipe, config)
    check_free(output_path(out), "model")  # before anything is fetched
    sources = {name: fetch(name, by_content=False) for name in model_names(config)}
    options = {"with": "mergekit", "recipe": digest(text), "seed": seed, "version": metadata.version("mergekit")}
    terms = [term.with_vector(sources[str(term.vector)]) for term in roles.terms]
    prior = sources[str(roles.prior)] if roles.prior else None
    inputs = find_inputs(out, "model", sources[str(roles.target)], terms, prior, options, replace)
    if manifest := inputs.finished:
        return Merged.recorded(inputs.out, manifest)
    checkpoint = _check_fit(inputs)
    needed = _needed_bytes(config, checkpoint)
    check_space(inputs.out, needed)
    for line in tell_companions(checkpoint):
        notices.info("%s", line)
    with inputs.stage(needed) as (partial, facts, _):
        progress("merge", 0, 1)
        _run(_pinned(config, sources), partial, seed)
        _add_companions(config, checkpoint, partial)
        merged = _measure(checkpoint, load_checkpoint(partial), inputs.out, config.merge_method)
        write_text(partial / MERGEKIT_FILE, text)
        facts |= {"mergekit": True, "change": merged.change}
        progress("merge", 1, 1)
    return merged


def _check_fit(inputs: Inputs) -> Checkpoint:
    """Return the target by its headers. Raise for models of which mergekit would pass over a part."""
    models = {n: load_checkpoint(s.folder) for n, s in inputs.sources.items() if not is_adapter(s.folder)}
    target, faults = models["target"], []
    check_companions(target.folder, copied_files(target.folder))
    for name, model in models.items():
        check_companions(model.folder, tokenizer_files(model.folder))  # the recipe may take it from there
        faults += compare_checkpoints(target, model, ("target", name)) if name != "target" else []
        if not stores_alike(target, model):
            faults.append(f"{name}: it and the target do not store the same of embedding and head; save both alike")
        if form := name_form(model) or (model.config.get("quantization_config") and "a quantised form"):
            raise FormatError(
                f"{name} {model.folder}: is stored in {form}, whose codes mergekit would take for weights"
            )
    if faults:
        raise MismatchError(
            join_faults("models that do not fit each other, of which mergekit would skip parts:", faults)
        )
    for name, source in inputs.sources.items():
        if name not in models:
            load_vector(source.folder, target, models.get("prior", target))  # raises where it does not fit
    return target


def _needed_bytes(config: Any, target: Checkpoint) -> int:
    """Return the bytes of the result and of the fp32 model that mergekit writes for each adapter meanwhile."""
    numbers = sum(math.prod(entry.shape) for entry in target.tensors.values())
    size = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(config.out_dtype or config.dtype or "")
    adapters = {(str(model.model), str(model.lora)) for model in config.referenced_models() if model.lora}
    return (numbers * size if size else target.nbytes) + 4 * numbers * len(adapters)


def _run(config: Any, partial: Path, seed: int) -> None:
    """Let mergekit write the result. Raise StageError with its words where it fails."""
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    with quiet(), tempfile.TemporaryDirectory(dir=partial, prefix=".adapters-") as cache:
        options = MergeOptions(
            lora_merge_cache=cache, lora_merge_dtype="float32", random_seed=seed, quiet=True, write_model_card=False,
            trust_remote_code=False, safe_serialization=True,
        )  # fmt: skip
        try:
            run_merge(config, str(partial), options)
        except Exception as error:  # it raises whatever torch and its own code do
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            raise StageError(f"mergekit failed: {reason}") from error


def _add_companions(config: Any, target: Checkpoint, partial: Path) -> None:
    """Copy the target's files that mergekit has not written; no tokenizer's, where the recipe asks for another.

    Raise StageError where there is no tokenizer then: mergekit only logs that it could not make one.
    """
    folder, has_own = target.folder, config.tokenizer or config.tokenizer_source or config.chat_template
    tokens = {name_in(folder, path) for path in tokenizer_files(folder)} if has_own else set()
    for path in copied_files(folder):
        name = name_in(folder, path)
        if name not in tokens and not (partial / name).exists():
            copy_into(partial, folder, path)
    if (model := load_checkpoint(partial)) is not (known := settled(model)):
        logger.warning("mergekit merged embedding and head apart, so the result's config.json does not tie them")
        write_text(partial / "config.json", indented_json(known.config))
    if has_tokenizer(folder) and not has_tokenizer(partial):
        raise StageError("mergekit failed: it wrote no tokenizer; look at the recipe's tokenizer and chat_template")


def _measure(target: Checkpoint, result: Checkpoint, out: Path, method: str) -> Merged:
    """Return the figures of a result. Raise MismatchError where tensors are missing, of another shape or not finite."""
    if faults := compare_checkpoints(target, result, ("target", "result"), ()):
        raise MismatchError(join_faults(f"{out}: mergekit's result is not a whole model:", faults))
    theirs = result.tensors
    if lost := sorted(target.tensors.keys() - theirs.keys()):
        logger.warning("not in mergekit's result, and not needed by transformers: %s", clip(", ".join(lost), _SHOWN))
    both = [(name, entry.shape, theirs[name].shape) for name, entry in target.tensors.items() if name in theirs]
    if resized := [f"{name} {before} → {after}" for name, before, after in both if before != after]:
        told = clip(", ".join(resized), _SHOWN)
        logger.warning("by the recipe's tokenizer, mergekit changed the rows for tokens: %s", told)
    changes = measure_model(target, result, f"{out}: mergekit's result")
    if not changes:
        raise MismatchError(f"{out}: mergekit changed no weight of the target; is every weight of the recipe 0?")
    whole = total(changes.values())
    return Merged(out, len(changes), whole.weights, whole.changed, relative_size=whole.relative_size, method=method)


# The models of a recipe of any method, in the roles that a manifest knows


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, logs and bars of mergekit and of the libraries underneath from the terminal."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), without_bars():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


def parse_recipe(recipe: Path) -> tuple[str, Any]:
    """Return a recipe's text, and mergekit's form of it.

    Raise UsageError where mergekit is not installed, the file cannot be read, or mergekit refuses it.
    """
    import yaml

    require("mergekit")
    with quiet():  # what mergekit loads has something to say
        from mergekit.config import MergeConfiguration

    text = read_text(recipe, YAML_LIMIT, UsageError)
    try:
        document = yaml.safe_load(text)
        check_secrets(document)
        config = MergeConfiguration.model_validate(document)
    except Exception as error:  # pydantic's, YAML's, and its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic" not in line]
        raise UsageError(join_faults(f"{recipe}: mergekit refuses this recipe:", lines)) from error
    if not config.referenced_models():
        raise UsageError(f"{recipe}: names no models")
    if unknown := sorted({*map(str, document)} - {*MergeConfiguration.model_fields, "name", "msa"}):
        logger.warning("%s: mergekit does not know %s, and passes over it", recipe, ", ".join(unknown))
    return text, config


def replace_paths(value: Any, new_path: Callable[[Any], Any]) -> Any:
    """Return mergekit's form of a recipe, or a part of it, with each model and adapter (ModelPath) replaced."""
    from mergekit.common import ModelPath
    from pydantic import BaseModel

    def replaced(part: Any) -> Any:
        if isinstance(part, ModelPath):
            return new_path(part)
        if isinstance(part, BaseModel):
            return part.model_copy(update={name: replaced(getattr(part, name)) for name in type(part).model_fields})
        if isinstance(part, Mapping):
            return {key: replaced(item) for key, item in part.items()}
        return type(part)(map(replaced, part)) if isinstance(part, list | tuple) else part

    return replaced(value)


def model_names(config: Any) -> list[str]:
    """Return the models and adapters that a recipe names, wherever it does."""
    names: dict[str, None] = {}

    def note(path: Any) -> Any:
        names[str(path)] = None
        return path

    replace_paths(config, note)
    return list(names)


def _pinned(config: Any, sources: Mapping[str, Source]) -> Any:
    """Return a recipe that names the folders of its models, in the place of repositories."""
    folders = {name: {"path": str(source.folder.absolute())} for name, source in sources.items()}
    return replace_paths(config, lambda path: type(path).model_validate(folders[str(path)]))


def _listed(config: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the models that a recipe lists, each with the parameters that hold for it, of whatever level."""
    for part in (config, *(config.modules or {}).values()):
        of_part = {**(config.parameters or {}), **(part.parameters or {})}
        for item in part.models or ():
            yield item, {**of_part, **(item.parameters or {})}
        for piece in part.slices or ():
            for item in piece.sources:
                yield item, {**of_part, **(piece.parameters or {}), **(item.parameters or {})}


def find_roles(recipe: Path, config: Any) -> MergeRequest:
    """Return a recipe's models in the roles that a manifest knows. Raise UsageError for models that have none.

    The base, or the first model, is the target, whose configuration and tokenizer the result gets. The prior is the
    model under the adapters, where it is not the target.
    """
    listed = [*_listed(config)]
    base = config.base_model or listed[0][0].model
    faults = [f"base_model {base}: has an adapter; merge that first (msa-lite merge)"] if base.lora else []
    target, under = str(base.model), {str(item.model.model) for item, _ in listed if item.model.lora}
    try:
        roles = read_recipe(recipe)
    except UsageError:
        weights: dict[str, float] = {}
        for item, settings in listed:
            if item.model != base:
                weights.setdefault(str(item.model.lora or item.model.model), _weight(settings.get("weight", 1.0)))
        faults += [f"{name}: has weight 0; leave it out" for name, weight in weights.items() if not weight]
        vectors = [Term("forget" if w < 0 else "retain", Reference(name), w) for name, w in weights.items() if w]
        prior = next(iter(sorted(under - {target})), None)
        roles = MergeRequest(Reference(target), number_terms(vectors), Reference(prior) if prior else None)
        faults += [] if vectors else ["names no model besides its base, so that nothing would change"]
    known = {str(name) for name in (roles.target, roles.prior, *(term.vector for term in roles.terms)) if name}
    if strange := [name for name in model_names(config) if name not in known and not faults]:
        faults.append(
            f"{', '.join(strange)}: neither the base, nor merged, nor the one model under the adapters; leave it out, "
            "or run the recipe with mergekit-yaml"
        )
    if faults:
        raise UsageError(join_faults(f"{recipe}: no merge for --with mergekit:", faults))
    return roles


def _weight(value: Any) -> float:
    """Return the weight that a manifest records: a number as it is; of gradients and filters, the mean of theirs."""
    if isinstance(value, list):
        return math.fsum(map(_weight, value)) / max(1, len(value))
    try:
        return float(getattr(value, "value", value))
    except (TypeError, ValueError):
        return _weight(value.value) if hasattr(value, "value") else 1.0
