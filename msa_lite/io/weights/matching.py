"""Read adapters and checkpoints under the target's tensor names: by exact name, then by the renames listed here alone.

What transformers renames or ignores on loading is no difference. Names and shapes alone decide, so that a merge needs
neither torch nor transformers.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msa_lite.errors import FormatError, MismatchError, at_most, join_faults
from msa_lite.io.weights.adapter import WRAPPERS, ZERO_3, Adapter, unwrapped
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, text_part
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.patterns import endings
from msa_lite.io.weights.vocabulary import HEADS

logger = logging.getLogger(__name__)

BASE_PREFIXES = ("transformer", "model", "gpt_neox", "backbone", "rwkv", "biogpt")
"""The base_model_prefix of causal language models. A model saved without its head leaves it out, as the Hub's GPT-2."""
# How the adapter's names may begin, and what the target's files have instead. A model saved without its head leaves out
# the base_model_prefix of its class: h.0… is the module transformer.h.0…. (Multi-modal models store some parts so as
# well, model.visual… as visual….) And transformers 5 swaps language_model and model.
_RENAMES = [
    *((f"{prefix}.", "") for prefix in BASE_PREFIXES),
    ("model.language_model.", "language_model.model."), ("language_model.model.", "model.language_model."),
    ("model.language_model.", "model."), ("model.", "model.language_model."),
    ("language_model.", ""), ("", "language_model."),
]  # fmt: skip
_NUMBER = re.compile(r"\.(\d+)\.")
_TASK_HEADS = {"classifier", "score", "qa_outputs"}  # PEFT adds them to modules_to_save by the task, even where missing

_MASK = re.compile(r"(^|\.)(attn|attention|self_attn|crossattention)\.(bias|causal_mask)$")  # (1, 1, n, n)
_TABLE = re.compile(r"(^|\.)((original_)?inv_freq|position_ids|(attn|attention)\.masked_bias)$")
_PREDICTION = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")  # of the text model


def find_name(name: str, target: Container[str]) -> str | None:
    """Return the target's name of a tensor that an adapter calls `name`: the same, or a known rename of it; or None."""
    plain = unwrapped(name)
    renamed = (new + plain[len(old) :] for old, new in _RENAMES if plain.startswith(old))
    return next((n for n in (name, plain, *renamed) if n in target), None)  # a model's own part may be called `module`


def check_names(checkpoint: Checkpoint) -> None:
    """Raise FormatError for names with the parts of a wrapper in them. transformers would take random weights instead.

    A part called `module` counts where all names begin with it.
    """
    own = [part for part in WRAPPERS if part != "module"]
    added = [part for part in own if any(part in name.split(".") for name in checkpoint.tensors)]
    bare = (".".join(part for part in name.split(".") if part not in own) for name in checkpoint.tensors)
    added += ["module"] if all(name.startswith("module.") for name in bare) else []
    name = next((name for name in checkpoint.tensors if {*added} & {*name.split(".")}), None)
    if name is None:
        return
    rename = (
        "import pathlib, re, shutil, sys, safetensors.torch as s; n = lambda k: re.sub(r'(^|[.\\x22])(?:(?:"
        f"{'|'.join(added)})\\.)+', r'\\1', k); p, o = map(pathlib.Path, sys.argv[1:]); shutil.copytree(p, o, "
        "ignore=shutil.ignore_patterns('*.safetensors')); [s.save_file({n(k): v for k, v in s.load_file(f).items()}, "
        "o / f.name, {'format': 'pt'}) for f in p.glob('*.safetensors')] or sys.exit('no weights there'); "
        "[f.write_text(n(f.read_text())) for f in o.glob('*.index.json')]"
    )
    here = shlex.quote(str(checkpoint.folder)) if checkpoint.shards else "FOLDER"
    fetched = "" if checkpoint.shards else f"download it (hf download {checkpoint.folder} --local-dir FOLDER) and "
    raise FormatError(
        f"{checkpoint.folder}: its tensors are named as {', '.join(WRAPPERS[part] for part in added)} leaves them "
        f"({name}), so transformers would take random weights in their place. Save the model inside the wrapper, or "
        f'{fetched}rename them: python -c "{rename}" {here} NEW'
    )


def is_buffer(entry: TensorEntry, name: str) -> bool:
    """Check whether a tensor is a causal mask or a table of positions: older files hold them, no training changes them.

    A weight may be called `attention.bias`, too; only a mask has four dimensions.
    """
    if _MASK.search(name):
        return len(entry.shape) == 4 and entry.shape[:2] == (1, 1) and entry.shape[2] == entry.shape[3]
    return bool(_TABLE.search(name)) and len(entry.shape) <= 2


def predicts_ahead(checkpoint: Checkpoint, name: str) -> bool:
    """Check whether a tensor is of multi-token prediction, which transformers neither loads nor saves.

    It is called mtp, or is a layer beyond those that the config counts.
    """
    if _PREDICTION.search(name):
        return True
    count = {**text_part(checkpoint.config), **checkpoint.config}.get("num_hidden_layers")
    layer = _LAYER.match(name)
    return type(count) is int and layer is not None and int(layer[1]) >= count


def find_names(checkpoint: Checkpoint, target: Container[str]) -> dict[str, str]:
    """Return the target's name of each tensor that it calls by another name than a checkpoint does.

    Where two tensors could be one of the target's, neither is renamed.
    """
    names: dict[str, str] = {}
    taken: dict[str, int] = {}
    for name in checkpoint.tensors:
        if name in target:
            continue
        new = next((n for n in _candidates(name, target) if n in target and n not in checkpoint.tensors), None)
        if new is not None:
            names[name] = new
            taken[new] = taken.get(new, 0) + 1
    return {name: new for name, new in names.items() if taken[new] == 1}


def _candidates(name: str, target: Container[str]) -> Iterator[str]:
    """Yield the names that a target may have for a tensor, the likeliest first."""
    if known := find_name(name, target):
        yield known
    for prefix in BASE_PREFIXES:
        yield f"{prefix}.{name}"
    for head, other in (HEADS[:2], HEADS[1::-1]):
        if name.startswith(head):
            yield other + name.removeprefix(head)


def aligned(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its tensors under the target's names; its files stay as they are."""
    names = find_names(checkpoint, target.tensors)
    if not names:
        return checkpoint
    return replace(checkpoint, tensors={names.get(name, name): entry for name, entry in checkpoint.tensors.items()})


def match_names(adapter: Adapter, target: Mapping[str, TensorEntry], by_token: Container[str] = frozenset()) -> Adapter:
    """Return the adapter with all parts under the target's tensor names; module `m` becomes `m.weight`.

    Weights stored as (in, out) are known by their shape. A square one follows the target's other weights with a bias,
    whose length is (out,); without such, the adapter's other weights, since PEFT goes by the kind of each layer and
    saves the setting of the last one. Where all are square, the config decides. by_token: names of the target's tensors
    with a row for each token, of which an adapter may have more or fewer.

    Raise MismatchError with the first ten parts that have no tensor of their shape in the target. Warn of modules
    that the config names but the file does not hold.
    """
    faults: list[str] = []
    taken: dict[str, str] = {}

    def renamed(parts: Mapping[str, Any], shape: Any, kind: str = "") -> dict[str, Any]:
        """Return parts under the target's names, and gather the faults of those that do not fit."""
        fitting = {}
        for old, item in parts.items():
            name = find_name(old, target)
            if name is None:
                faults.append(f"{old}: the target has no such tensor")
            elif not _fits(shape(item), target[name].shape, name in by_token):
                faults.append(f"{old}: {shape(item)} in the adapter, {target[name].shape} in the target")
            elif taken.setdefault(kind + name, old) != old:
                faults.append(f"{old}: the target's {name}, as is {taken[kind + name]}")
            else:
                fitting[name] = item
        return fitting

    matched = replace(
        adapter,
        modules=renamed({f"{module}.weight": low for module, low in adapter.modules.items()}, lambda low: None),
        values=renamed(adapter.values, lambda entry: entry.shape),
        shifts=renamed(adapter.shifts, lambda item: item[0].shape),
        tokens=renamed(adapter.tokens, lambda item: None),
        copies=renamed(adapter.copies, lambda entry: entry.shape, "copy of "),
    )
    for name, (entry, numbers) in matched.tokens.items():
        rows, *columns = target[name].shape
        if list(entry.shape[1:]) != columns or (numbers and not 0 <= min(numbers) <= max(numbers) < rows):
            faults.append(f"{name}: rows of {entry.shape[1:]} for tokens {numbers}, the target's is {(rows, *columns)}")
    faults += _orient(matched.modules, target, by_token)
    if faults:
        headline = f"{adapter.folder}: does not fit the target (is it an adapter for another model?)"
        lows = matched.modules
        if len(lows) == len(adapter.modules) > 0 and all(
            _fits(low.shape, target[name].shape, name in by_token) for name, low in lows.items()
        ):  # every layer is the target's, so the model is the right one
            headline = f"{adapter.folder}: parts of this adapter cannot be merged into the target:"
        raise MismatchError(join_faults(headline, faults))
    if not (matched.modules or matched.values or matched.shifts or matched.tokens or matched.bare):
        raise MismatchError(f"{adapter.folder}: holds no LoRA factors at all, so it would change nothing. {ZERO_3}")
    _warn_of_missing(adapter, target)
    return matched


def _fits(shape: tuple[int, ...] | None, goal: tuple[int, ...], by_token: bool) -> bool:
    """Check whether a shape, if it is known, is the goal; with `by_token`, the number of rows may differ."""
    return shape is None or shape == goal or (by_token and len(shape) == len(goal) and shape[1:] == goal[1:])


def _warn_of_missing(adapter: Adapter, target: Collection[str]) -> None:
    """Warn of modules that the config names but the file does not hold: that part of the vector is lost.

    Of target_modules, only names of the target's own modules count, in full or by their end; none, where other fields
    choose among them. Experts do not count: they may be stored one by one where PEFT saw a single module.
    """
    lists = {key: adapter.config.get(key) for key in ("modules_to_save", "target_modules")}
    names = {key: [str(name) for name in value] for key, value in lists.items() if isinstance(value, list)}
    held = [unwrapped(name) for name in (*(f"{module}.weight" for module in adapter.modules), *adapter.values)]
    weights = {f"{unwrapped(name)}.weight" for name in names.get("target_modules", [])}
    ends, there = _endings_among(weights, held), _endings_among(weights, (n for n in target if ".experts." not in n))
    chosen = any(adapter.config.get(key) not in (None, []) for key in ("exclude_modules", "layers_to_transform"))

    def is_lost(key: str, name: str) -> bool:
        """Check whether the file holds nothing of a module."""
        if key == "modules_to_save":  # PEFT takes modules whose name ends with these letters, with all inside them
            return name not in _TASK_HEADS and not any(f"{name}." in tensor for tensor in held)
        weight = f"{name}.weight"
        return weight not in ends and not chosen and bool(find_name(weight, target) or weight in there)

    for key, modules in names.items():  # or a regular expression, or "all-linear"
        if lost := [name for name in modules if is_lost(key, unwrapped(name))]:
            listed = ", ".join(at_most(lost, 10))
            logger.warning("%s: %s: the file holds no tensors of %s", adapter.folder, key, listed)
    if not chosen:
        _warn_of_half(adapter, {weight for weight in ends if not _NUMBER.search(f".{weight}")}, target)


def _warn_of_half(adapter: Adapter, weights: Collection[str], target: Collection[str]) -> None:
    """Warn of layers without factors where other layers of their list have them: what a cut-off file looks like.

    weights: the ends of the names of what PEFT adapted in every layer. A layer of multi-token prediction does not
    count: PEFT has never seen it.
    """
    held: dict[str, set[str]] = {}
    for name in (find_name(f"{module}.weight", target) for module in adapter.modules):
        if name and _endings_among(weights, [name]):
            held.setdefault(_NUMBER.sub(".#.", name, count=1), set()).add(name)
    lacking: dict[str, list[str]] = {}
    for name in target:
        pattern, number = _NUMBER.sub(".#.", name, count=1), _NUMBER.search(name)
        if number and name not in held.get(pattern, {name}) and f"{name[: number.end()]}enorm.weight" not in target:
            lacking.setdefault(pattern, []).append(number[1])
    for pattern, numbers in [*lacking.items()][:10]:
        layers = ", ".join(sorted(numbers, key=int)[:10]) + (", …" if len(numbers) > 10 else "")
        logger.warning(
            "%s: half an adapter? The file holds no factors of %s in %d of %d layers: %s",
            adapter.folder, pattern.removesuffix(".weight"), len(numbers), len(numbers) + len(held[pattern]), layers,
        )  # fmt: skip


def _endings_among(choices: Container[str], names: Iterable[str]) -> set[str]:
    """Return the choices that some name ends with, as a whole or after a dot."""
    return {ending for name in names for ending in endings(name) if ending in choices}


def _orient(
    modules: dict[str, LowRank], target: Mapping[str, TensorEntry], by_token: Container[str] = frozenset()
) -> list[str]:
    """Set `transposed` of every module by the target's shapes, in place; return the faults."""
    faults: list[str] = []
    square: list[str] = []
    orientations: set[bool] = set()
    for name, low in modules.items():
        turned = low if low.is_embedding else replace(low, transposed=not low.transposed)
        shape = target[name].shape
        fitting = [way for way in (low, turned) if _fits(way.shape, shape, name in by_token)]
        if not fitting:
            faults.append(f"{low.module}: the delta is {low.shape}, the target's tensor is {shape}")
            continue
        modules[name] = fitting[0]
        if low.is_embedding or fitting[0].shape != shape:
            continue
        if low.shape == turned.shape:
            square.append(name)
        else:
            orientations.add(modules[name].transposed)
    if len(decided := _biased_orientations(target)) != 1:
        decided = orientations
    faults += _exchanged(modules, target, decided if len(decided) == 1 else set())
    if len(decided) > 1:
        ambiguous = "square, among both (in, out) and (out, in) weights: ambiguous"
        faults += [f"{modules[name].module}: {ambiguous}" for name in square]
    elif decided:
        modules.update({name: replace(modules[name], transposed=True in decided) for name in square})
    for low in modules.values():
        if low.magnitude is not None and low.transposed:
            faults.append(f"{low.module}: DoRA on a weight stored as (in, out), which would need whole columns at once")
    return faults


def _exchanged(modules: Mapping[str, LowRank], target: Mapping[str, TensorEntry], decided: set[bool]) -> Iterator[str]:
    """Yield the faults of weights in layers that lie otherwise than those of the same name in the other layers.

    A header whose two sides are exchanged looks so, and transformers would not load it. decided: the one way in which
    the weights of this model lie, where their biases tell it.
    """
    ways: dict[str, dict[bool, list[str]]] = {}
    for name, low in modules.items():
        shape = target[name].shape
        if not low.is_embedding and _NUMBER.search(name) and len(shape) == 2 and shape[0] != shape[1]:
            ways.setdefault(_NUMBER.sub(".#.", name), {}).setdefault(low.transposed, []).append(name)
    for by_way in ways.values():
        usual = decided or {max(by_way, key=lambda way: (len(by_way[way]), not way))}
        for way in by_way.keys() - usual:
            for name in by_way[way]:
                shape = target[name].shape
                yield (
                    f"{name}: {shape}, where the model's other weights make it {shape[::-1]}; its header may be "
                    "damaged, so download it again"
                )


def _biased_orientations(target: Mapping[str, TensorEntry]) -> set[bool]:
    """Return whether the target's matrices with a bias (out,) are stored as (in, out); both, if it has both kinds.

    Square matrices cannot tell.
    """
    ways = set()
    for name, entry in target.items():
        bias = target.get(f"{name.removesuffix('.weight')}.bias")
        if bias is not None and len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
            ways |= {bool(number) for number, size in enumerate(entry.shape) if bias.shape == (size,)}
    return ways
