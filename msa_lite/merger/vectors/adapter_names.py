"""Open an adapter under the names of the target's files, where transformers holds the model in another form.

Factors that PEFT keeps for all experts of a layer are spread over the tensors in which the target stores these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msa_lite.errors import MismatchError, MsaError, join_faults
from msa_lite.io.models.loading import empty_model
from msa_lite.io.weights.adapter import Adapter, inner_depth
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry
from msa_lite.io.weights.factors import BareParameter, ExpertShare, LowRank
from msa_lite.io.weights.matching import find_name, match_names
from msa_lite.io.weights.patterns import Patterns
from msa_lite.io.weights.vocabulary import token_tensors

if TYPE_CHECKING:
    from msa_lite.io.models.places import Place


def match_adapter(adapter: Adapter, target: Checkpoint, uses: Mapping[str, TensorEntry] | None = None) -> Adapter:
    """Return an adapter under the target's tensor names. Raise as `match_names` and `spread_experts` do.

    uses: further names of the target's tensors, such as that of a tied head, with a row for each token.
    """
    others = dict(uses or {})
    adapter = _with_stored_names(adapter, target)
    matched = match_names(adapter, others | target.tensors, others | token_tensors(target))
    return spread_experts(matched, target)


def _with_stored_names(adapter: Adapter, target: Checkpoint) -> Adapter:
    """Return the adapter with its modules under the names in the target's files, where the two differ.

    transformers 5 renames modules of some families while it loads them (Mixtral's router). Names that it does not know
    either stay as they are; a later check refuses them.
    """
    unknown = [module for module in adapter.modules if find_name(f"{module}.weight", target.tensors) is None]
    if not unknown:
        return adapter
    try:
        from msa_lite.io.models.places import module_paths

        paths = module_paths(empty_model(target), target.tensors)
    except (ImportError, MsaError):
        return adapter
    stored = {path: name.removesuffix(".weight") for name, path in paths.items()}
    known = {module: stored[path] for module in unknown if (path := find_name(module, stored))}
    return replace(adapter, modules={known.get(module, module): low for module, low in adapter.modules.items()})


def spread_experts(adapter: Adapter, target: Checkpoint) -> Adapter:
    """Return the adapter with its factors on bare parameters as `modules` and `stacks`, by the target's tensor names.

    PEFT keeps A (experts · r, in) and B (out, r · experts) for all experts of a layer; expert e has the rows
    [e r, (e + 1) r) of A and every column k · experts + e of B. The target's files may hold experts one by one, gates
    and ups apart. Source: `ParamWrapper` of PEFT 0.21.

    Raise MismatchError for factors that fit no parameter of the model, or whose place in the files is not known.
    """
    if not adapter.bare:
        return adapter
    from msa_lite.io.models.places import find_places

    model = empty_model(target)
    faults: list[str] = []
    low_ranks: dict[str, LowRank] = {}
    for module, parameter, pair in _parameters(adapter, model, faults):
        low, path = _low_rank(adapter, model, module, parameter, pair), f"{module}.{parameter.name}"
        if isinstance(low, str):
            faults.append(f"{path}: {low}")
        else:
            low_ranks[path] = low
    counts = {path: low.share.count if low.share else 0 for path, low in low_ranks.items()}
    modules, stacks = dict(adapter.modules), dict(adapter.stacks)
    left = {path: float(max(1, count)) for path, count in counts.items()}
    for name, (places, is_stack) in find_places(model, counts, target.tensors).items():
        parts = tuple(_part(low_ranks[place.parameter], place) for place in places)
        for place in places:
            left[place.parameter] -= place.rows[1] - place.rows[0]
        shape = (len(parts), *parts[0].shape) if is_stack else parts[0].shape
        if name in modules:
            faults.append(f"{name}: changed in two ways at once")
        elif shape != target.tensors[name].shape:
            faults.append(f"{name}: the delta is {shape}, the target's tensor is {target.tensors[name].shape}")
        elif is_stack:
            stacks[name] = parts
        else:
            modules[name] = parts[0]
    faults += [f"{path}: the target's files hold it in a form that is not known" for path in left if left[path]]
    if faults:
        raise MismatchError(join_faults(f"{adapter.folder}: does not fit the target's experts:", sorted(faults)))
    return replace(adapter, modules=modules, stacks=stacks)


def _parameters(
    adapter: Adapter, model: Any, faults: list[str]
) -> Iterator[tuple[str, BareParameter, Mapping[str, TensorEntry]]]:
    """Yield the module, the parameter and the factors of each adapted parameter; gather faults."""
    wanted = [str(name) for name in adapter.config["target_parameters"]]
    modules = dict(model.named_modules())
    wrapped: dict[str, dict[int, Mapping[str, TensorEntry]]] = {}
    for name, pair in adapter.bare.items():
        module, depth = inner_depth(name)
        wrapped.setdefault(module, {})[depth] = pair
    for name, pairs in wrapped.items():
        path = find_name(name, modules)
        own = [n for n, _ in modules[path].named_parameters(recurse=False)] if path is not None else []
        adapted = [
            BareParameter(parameter, place)
            for place, parameter in enumerate(own)
            if any(f".{path}.{parameter}".endswith(f".{end}") for end in wanted)
        ]
        if path is None or len(adapted) != len(pairs) or set(pairs) != set(range(len(pairs))):
            faults.append(f"{name}: {len(pairs)} pairs of factors, for {len(adapted)} parameters of the model")
            continue
        yield from ((path, parameter, pairs[depth]) for depth, parameter in enumerate(reversed(adapted)))


def _low_rank(
    adapter: Adapter, model: Any, module: str, parameter: BareParameter, pair: Mapping[str, TensorEntry]
) -> LowRank | str:
    """Return a parameter's factors as PEFT has them, or their fault; `transposed` tells how the model holds it."""
    config, owner, path = adapter.config, model.get_submodule(module), f"{module}.{parameter.name}"
    *count, rows, columns = getattr(owner, parameter.name).shape
    experts = count[0] if count else 1
    is_turned = bool(count) and bool(getattr(owner, "is_transposed", False))
    out, into = (columns, rows) if is_turned else (rows, columns)
    rank = Patterns(config.get("rank_pattern")).first([path], config["r"])
    a, b = pair["A"], pair["B"]
    if a.shape != (rank * experts, into) or b.shape != (out, rank * experts):
        return f"A is {a.shape}, B is {b.shape}, expected {(rank * experts, into)} and {(out, rank * experts)}"
    lora_alpha = Patterns(config.get("alpha_pattern")).first([path], config["lora_alpha"])
    scale = lora_alpha / (rank**0.5 if config.get("use_rslora") else rank)
    share = ExpertShare(0, experts, (0, out)) if count else None
    return LowRank(module, a, b, scale, is_turned, parameter=parameter, share=share)


def _part(low: LowRank, place: Place) -> LowRank:
    """Return the factors of what the target stores at a place. Parts of a matrix are parts of its outputs."""
    transposed = low.transposed != place.is_turned
    if low.share is None:
        return replace(low, transposed=transposed)
    start, stop = (round(low.share.outputs[1] * share) for share in place.rows)
    return replace(low, transposed=transposed, share=replace(low.share, expert=place.number, outputs=(start, stop)))
