"""Find the models of a recipe, write adapters out whole, make those of a demo, and check that they fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import COMPARED_ROWS, Row, check_same_ids, check_vocabulary, open_tokenizer
from msa_lite.demo import REAL, SMOLLM2_CONFIG, HistorySettings, make_groups, make_history
from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults, nearest
from msa_lite.evals.engine.models import check_source
from msa_lite.evals.scores.suite import check_same_tokens
from msa_lite.io.console.progress import Progress, notices
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.models.guards import pattern_fault
from msa_lite.io.models.loading import open_config
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.blocks import Files, read_part
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.companions import check_companions, copied_files
from msa_lite.io.weights.hub import (
    Source,
    fetch,
    fetch_headers,
    fetch_tokenizer,
    has_tokenizer,
    hash_content,
    hash_tokenizer,
    is_remote,
    is_remote_adapter,
    local_path,
    tokenizer_files,
)
from msa_lite.io.weights.matching import aligned, is_buffer
from msa_lite.io.weights.quantised import name_form
from msa_lite.io.weights.tied_head import as_used, tie_fault, ties_head
from msa_lite.io.weights.vocabulary import find_added_rows, token_tensors, vocabulary_size
from msa_lite.merger import Precision, Term, check_mergeable, merge_terms
from msa_lite.merger.checks.inputs import ModelLike, whole_model_first
from msa_lite.merger.vectors.vector import adapter_vector, compare_checkpoints
from msa_lite.recipe import Demo, Recipe
from msa_lite.train import FitSettings
from msa_lite.train.memory.model import planned_adapter

# An adapter, or a model that is stored as codes, under one of these keys is written out to this folder of the run.
WRITTEN_OUT = ("target", "prior")
_BLOCK = 1 << 22  # bytes compared at a time
_INERT = re.compile(
    r"_name_or_path|architectures|vocab_size|tie_word_embeddings|output_.*|"
    r".*(dtype|version|cache|token_id|drop|initializer|loss).*"
)
"""Keys of a config that change nothing of what the weights compute, or that the weights themselves are compared for."""


def find_models(recipe: Recipe, start: str, checkpoint: str | None = None) -> dict[str, Source]:
    """Find the recipe's models by name: "target", "prior" (the one that is tuned) and, where there is one, "ideal".

    start: "prior", or "target" to tune the target itself. checkpoint: the name of another method's result, the model
    "checkpoint". Raise UsageError for a model that is not there.
    """
    names = {"target": recipe.target}
    if start == "prior":
        names["prior"] = recipe.prior_checkpoint
    if recipe.evaluate and recipe.evaluate.ideal:
        names["ideal"] = recipe.evaluate.ideal
    names |= {"checkpoint": checkpoint} if checkpoint else {}
    return {key: fetch(name) for key, name in names.items()}


def open_models(recipe: Recipe, found: Mapping[str, Source], progress: Progress) -> dict[str, Source]:
    """Return the models of `find_models`, ready to be tuned, merged and scored, once they are checked.

    A target or prior that is a LoRA adapter, or is stored as codes (4 bits, fp8), is first written out whole, in a
    folder of the run. The prior, which is the target itself where none was found, comes with rows for the tokens that
    only the target has. Raise MismatchError with the tensors on which target and prior differ, and for two that are the
    same; FormatError where neither has a tokenizer; what `check_lora_targets` and `check_fit` raise.
    """
    sources = dict(found)
    for key in WRITTEN_OUT:
        if key in sources and written_out_as(str(sources[key].folder)):
            sources[key] = write_out(key, sources[key], recipe.folder, progress)
    target = load_checkpoint(sources["target"].folder)
    check_mergeable(target)
    sources["target"] = _with_tokenizer(recipe, sources)
    if "prior" in sources:
        sources["prior"] = fit_prior(sources["target"], sources["prior"])
        check_apart(sources["target"], sources["prior"])
    else:
        sources["prior"] = sources["target"]
    for source in sources.values():
        check_source(source)
    if "ideal" in sources:
        check_same_tokens(sources["target"], sources["ideal"])
    if "checkpoint" in sources:
        _check_entered(sources["target"], sources["checkpoint"])
    prior = load_checkpoint(sources["prior"].folder)
    check_lora_targets(recipe, target, prior)
    check_fit(recipe, target, prior)
    return sources


def written_out_as(name: str) -> str | None:
    """Say what a model is that a run first writes out whole, in its folder: "an adapter", or the form of its codes.

    name: a folder, or a repository. Return None for a plain checkpoint, which a run uses where it is.
    """
    folder = local_path(name)
    if is_bare_adapter(folder) or is_remote_adapter(name):
        return "an adapter"
    if is_remote(name):
        with suppress(UsageError):  # a branch by its number, and no network; fetching it will say so
            return name_form(head) if (head := fetch_headers(name)) else None
        return None
    return name_form(load_checkpoint(folder)) if folder.is_dir() else None


def whole_target(recipe: Recipe) -> str:
    """Return the name of the recipe's target as a plain checkpoint: perhaps the folder that it is written out to."""
    return str(recipe.folder / "target") if written_out_as(recipe.target) else recipe.target


def write_out(key: str, model: Source, run: Path, progress: Progress) -> Source:
    """Write a model whole, in plain floats, to the folder `key` of a run: an adapter is merged into its base.

    Codes are dequantised, to bfloat16. What was made from the same models before is kept. If an adapter's folder has a
    tokenizer and a chat template, they replace the base's. Raise UsageError if the base cannot be found, and what
    `merge` raises for an adapter that it cannot take exactly.
    """
    from filelock import FileLock

    out, base, terms = run / key, model, list[Term[ModelLike]]()
    if is_bare_adapter(model.folder):
        base, terms = _find_base(key, model), [Term("adapter", model, 1.0)]
        notices.info("%s: %s is a LoRA adapter on %s; it is merged into %s, which the run uses", key, model.name,
                    base.name, out)  # fmt: skip
    form = name_form(load_checkpoint(base.folder))
    if form:
        notices.info("%s: %s is stored in %s; the run uses its weights in bfloat16, in %s", key, base.name, form, out)
    run.mkdir(parents=True, exist_ok=True)
    precision = Precision("bfloat16") if form else Precision()
    try:
        with FileLock(run / f".{key}.lock"):  # processes that share a run take turns
            merge_terms(base, out, terms, base, precision, replace=True, progress=progress)
    except (MismatchError, FormatError) as error:
        if not terms:
            raise
        raise type(error)(
            f"{key} {model.name}: this adapter cannot be merged into its base {base.name}. With PEFT, "
            "merge_and_unload() and save_pretrained() may make a whole model of it; then name that folder. "
            f"{error}"
        ) from error
    return Source(model.pinned(), out, hash_content(out))


def _find_base(key: str, adapter: Source) -> Source:
    """Find the model below an adapter, with the adapter's tokenizer where it has one. Raise as `write_out`."""
    try:
        base = fetch(base_name(adapter.folder), by_content=False)
    except UsageError as error:
        raise UsageError(f"{key} {adapter.name}: is a LoRA adapter, and its base cannot be found: {error}") from error
    if tokenizer_files(adapter.folder):
        base = replace(base, tokenizer=Source(adapter.name, adapter.folder, hash_tokenizer(adapter.folder)))
    return base


def _with_tokenizer(recipe: Recipe, sources: dict[str, Source]) -> Source:
    """Return the target with a tokenizer: its own, or the prior's with a notice if it was saved without one."""
    target = sources["target"]
    if has_tokenizer(target.folder):
        return target
    place = str(sources["prior"].folder) if "prior" in sources else recipe.prior_checkpoint
    try:
        tokenizer = replace(fetch_tokenizer(place), name=recipe.prior_checkpoint)
    except UsageError as error:
        raise FormatError(
            f"target {target.name}: was saved without a tokenizer, and so was the prior; copy the files of its "
            "tokenizer into its folder"
        ) from error
    notices.warning("target %s: was saved without a tokenizer; the prior's is taken, %s", target.name, tokenizer.name)
    return replace(target, tokenizer=tokenizer)


def find_tokenizer(recipe: Recipe) -> Source:
    """Return the tokenizer of a recipe's target without any weights: its own, its adapter's base's, or the prior's.

    Raise UsageError where none of them has one.
    """
    names, folder = [recipe.target], local_path(recipe.target)
    if is_bare_adapter(folder) and not has_tokenizer(folder):
        names = [base_name(folder)]
    if folder.is_dir() and not has_tokenizer(local_path(names[0])):
        names.append(recipe.prior_checkpoint)
    return fetch_tokenizer(names[-1])


def open_reader(source: Source, name: str) -> Any:
    """Return a model's tokenizer. Raise MismatchError if it has more tokens than the model. name: for messages."""
    tokenizer = open_tokenizer(source.tokenizer_folder, name)
    check_vocabulary(tokenizer, vocabulary_size(load_checkpoint(source.folder)), name)
    return tokenizer


def fit_prior(target: Source, prior: Source, what: str = "prior") -> Source:
    """Return the prior with rows for tokens that only the target has. what: the name of the prior in messages.

    Raise MismatchError with all differences if the two differ in more than tokens.
    """
    goal = load_checkpoint(target.folder)
    checkpoints = goal, aligned(load_checkpoint(prior.folder), goal)
    if faults := compare_checkpoints(*checkpoints, ("target", what)):
        headline = f"target {target.name} and {what} {prior.name} do not fit, so it cannot be its prior:"
        raise MismatchError(join_faults(headline, faults))
    used = None
    if has_tokenizer(target.tokenizer_folder) and has_tokenizer(prior.folder):
        sizes = [len(open_tokenizer(s.tokenizer_folder, s.name)) for s in (target, prior)]
        used = sizes[1] if sizes[0] > sizes[1] else None
    added = find_added_rows(*checkpoints, used)
    if added:
        notices.info(
            "%s %s knows %d tokens, the target %d: it is tuned and scored with the target's embedding of the others",
            what, prior.name, added.start, added.stop,
        )  # fmt: skip
    return replace(prior, added=added)


def _check_entered(target: Source, checkpoint: Source) -> None:
    """Raise, by headers alone, where another method's result is no model of the target's form.

    UsageError for an adapter and for codes, MismatchError for tensors of other names or shapes, another vocabulary, or
    a config that computes something else.
    """
    if is_bare_adapter(checkpoint.folder):
        raise UsageError(f"{whole_model_first(checkpoint.name, checkpoint.folder)}, then --model WHOLE")
    goal, model = load_checkpoint(target.folder), load_checkpoint(checkpoint.folder)
    if form := name_form(model):
        raise UsageError(
            f"{checkpoint.name}: is stored in {form}; AutoModelForCausalLM.from_pretrained(…).dequantize() and "
            "save_pretrained() write its weights as floats"
        )
    faults = compare_checkpoints(goal, model, ("target", "checkpoint"), ())
    if faults := [*faults, *_compare_configs(*(open_config(s.folder).to_dict() for s in (target, checkpoint)))]:
        headline = f"checkpoint {checkpoint.name} is no result of unlearning from the target {target.name}:"
        raise MismatchError(join_faults(headline, faults))
    check_same_tokens(target, checkpoint)
    check_companions(checkpoint.folder, copied_files(checkpoint.folder))
    if model.dtype_name != goal.dtype_name:
        notices.info("%s: stored in %s, the target in %s", checkpoint.name, model.dtype_name, goal.dtype_name)


def _compare_configs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys by which two configs, as transformers has them, let the same weights compute otherwise."""
    for key in sorted(first.keys() & second.keys()):
        if key.endswith("_config") and isinstance(first[key], dict) and isinstance(second[key], dict):
            yield from (f"{key}.{fault}" for fault in _compare_configs(first[key], second[key]))
        elif first[key] != second[key] and not _INERT.fullmatch(key):
            yield f"{key}: {first[key]} in the target's config, {second[key]} in the checkpoint's"


def check_apart(target: Source, prior: Source) -> None:
    """Raise MismatchError if target and prior are the same model, by name, content or weights."""
    if target.revision == prior.revision or target.folder.resolve() == prior.folder.resolve():
        what = "are the same model"
    elif same_weights(load_checkpoint(target.folder), load_checkpoint(prior.folder)):
        what = "have the same weights"
    else:
        return
    raise MismatchError(
        f"target {target.name} and prior {prior.name} {what}. The prior must not have seen the forget set: a model "
        "that knows the rows already learns nothing from them, so there is no vector to subtract. Give the model from "
        "before your fine-tuning as `prior`. (To try it with the target's own vector, run `msa-lite baseline "
        "task_vector`.)"
    )


def same_weights(first: Checkpoint, second: Checkpoint) -> bool:
    """Check whether two checkpoints hold tensors of the same form, and in floats the same bytes, small ones first."""
    second = aligned(second, first)
    if tie_fault(first, second, ""):
        return False
    second = as_used(second, first)
    forms = [
        {name: (entry.dtype, entry.shape) for name, entry in model.tensors.items() if not is_buffer(entry, name)}
        for model in (first, second)
    ]
    if forms[0] != forms[1]:
        return False
    floats = sorted((first.tensors[name] for name in forms[0] if first.tensors[name].is_float), key=lambda e: e.nbytes)
    files = Files()
    blocks = ((entry, at, min(_BLOCK, entry.nbytes - at)) for entry in floats for at in range(0, entry.nbytes, _BLOCK))
    return all(
        np.array_equal(read_part(files, entry, at, size), read_part(files, second.tensors[entry.name], at, size))
        for entry, at, size in blocks
    )


def check_readings(sources: dict[str, Source], tokenizer: Any, rows: Iterable[Row]) -> None:
    """Raise MismatchError if the prior has a tokenizer that reads rows differently from the target's."""
    target, prior = sources["target"], sources["prior"]
    if target.folder == prior.folder or not has_tokenizer(prior.folder):
        return
    first = [row for _, row in zip(range(COMPARED_ROWS), rows, strict=False)]
    check_same_ids(first, tokenizer, open_tokenizer(prior.folder, prior.name), (target.name, prior.name))


def check_lora_targets(recipe: Recipe, target: Checkpoint, prior: Checkpoint) -> None:
    """Raise UsageError for modules that the target lacks, or whose adapters cannot be merged or put on the target."""
    targets = recipe.vector.lora.targets
    if recipe.vector.mode == "full" or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    modules = [name.removesuffix(".weight") for name, entry in target.tensors.items() if len(entry.shape) == 2]
    if isinstance(targets, str):  # PEFT takes it for a regular expression over whole names
        fault = pattern_fault([targets], modules)
        if not fault and not any(re.fullmatch(targets, module) for module in modules):
            fault = f"{targets}: the target has no module of which this is the whole name"
        if fault:
            raise UsageError(f"vector.lora.targets: {fault}")
        return
    faults, is_tied = [], ties_head(target)
    for name in targets:
        matched = [module for module in modules if module == name or module.endswith(f".{name}")]
        embeds = any("embed" in module or module.endswith("wte") for module in matched)
        if is_tied and (name == "lm_head" or embeds):
            faults.append(f"{name}: the target ties embedding and head, and an adapter would change one of the two")
        elif not matched:
            leaves = {module.rpartition(".")[2] for module in modules}
            faults.append(f"{name}: the target has no such module{nearest(name, leaves)}")
    if faults:
        raise UsageError(join_faults("vector.lora.targets:", faults))
    sizes = [{name: entry.shape for name, entry in token_tensors(model).items()} for model in (target, prior)]
    resized = [name for name in sizes[0].keys() & sizes[1].keys() if sizes[0][name] != sizes[1][name]]
    tuned = [module for module in targets if any(f".{name}".endswith(f".{module}.weight") for name in resized)]
    if tuned and recipe.merge.form == "adapter":
        raise UsageError(
            f"vector.lora.targets: {', '.join(tuned)}: target and prior differ in the number of tokens, so such an "
            "adapter cannot be put on the target (merge.as: adapter); leave them out, or merge to a model"
        )


def check_fit(recipe: Recipe, target: Checkpoint, prior: Checkpoint) -> None:
    """Raise MismatchError or UsageError for vectors that a fit would write and no merge could take, before the fit.

    By headers and configs alone: a model without weights tells which modules and parameters PEFT would adapt.
    """
    lora = recipe.vector.lora
    if recipe.vector.mode == "full":
        if fault := tie_fault(target, prior, "prior"):
            raise MismatchError(f"vector.mode: full, but {fault}. `vector.mode: lora` changes neither of them")
        return
    targets = lora.targets if isinstance(lora.targets, str) else tuple(lora.targets)
    settings = FitSettings(mode="lora", lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=targets)
    adapter_vector(planned_adapter(prior, settings), target, prior)


def check_fit_ahead(recipe: Recipe, heads: Mapping[str, Checkpoint]) -> None:
    """Check what `check_fit` checks of models whose headers are known by role; raise as it does.

    What this machine cannot tell (a family that its transformers does not know, no PEFT) is left to the run.
    """
    target = heads.get("target")
    prior = heads.get("prior") if recipe.has_prior else target
    if target and prior and not _is_fitted(recipe) and find_spec("peft"):
        with suppress(FormatError):
            check_fit(recipe, target, prior)


def _is_fitted(recipe: Recipe) -> bool:
    """Check whether the run has an adapter of the recipe's form already; its fit was checked, which takes PEFT."""
    folder, lora = recipe.folder / "vectors/forget", recipe.vector.lora
    if recipe.vector.mode == "full" or (manifest := load_manifest(folder)) is None:
        return False
    form = {"mode": recipe.vector.mode, "lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_targets": lora.targets}
    return form.items() <= dict(manifest["inputs"].get("settings") or {}).items()


def make_demo(demo: Demo, folder: Path, seed: int, progress: Progress) -> None:
    """Make the history of a demo in a folder. A finished one costs nothing."""
    settings = replace(REAL if demo.model else HistorySettings(), seed=seed)
    make_history(folder, make_groups(demo.people, seed), settings, progress, real=demo.model is not None)


def demo_config(demo: Demo) -> dict[str, Any]:
    """Return the sizes of a demo's models, in the words of transformers."""
    return dict(SMOLLM2_CONFIG) if demo.model else HistorySettings().config | {"vocab_size": HistorySettings.vocabulary}
