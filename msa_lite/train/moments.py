"""Measure the second moments of the inputs of a model's linear layers, over the labelled positions of rows.

A second moment XᵀX is kept as a root: Q X for a random orthogonal Q, or Q R for the triangle R of a QR decomposition
once there are more positions than inputs. So nothing is larger than (in, in), a root loses nothing to squaring, and no
row of it is a position's: those of X spell the answers word by word (`tests/tools/moments_attack.py`). All this runs in
fp64 on the CPU, also where there is a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from msa_lite.data import Example, group_rows, pass_tokens, to_batch
from msa_lite.errors import MismatchError, NotFiniteError
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.models.devices import free_memory, free_ram
from msa_lite.io.models.heads import autocast, split_model
from msa_lite.io.weights.matching import find_name
from msa_lite.train.experts import Stack, expert_inputs, expert_stacks
from msa_lite.train.objectives.rows import Beginning, label_places, run_rows

logger = logging.getLogger(__name__)

HELD = 1 << 30  # bytes of roots in memory at a time, or a quarter of what is free; more take further passes
MOST_LABELS = 4096
"""The labelled positions of a set that are measured, about; of more, evenly drawn ones. They bound the roots' size."""
_FEW = 32  # labelled positions; a moment of fewer says little about a layer's inputs
_TOKENS = 2048  # of a forward pass, padding included
_FULL = 2  # times its columns: rows of a root before its triangle takes their place

_Layers: TypeAlias = dict[str, tuple[str | list[str], bool]]
"""By tensor: the names of its roots, one a slice where it holds several experts, and whether it is (in, out)."""


class Onlooker(Protocol):
    """Looks at the inputs of some layers while they are measured (`merger.unseen`)."""

    @property
    def facts(self) -> dict[str, Any]: ...
    def choose(self, names: Collection[str]) -> Collection[str]: ...
    def add(self, layers: Sequence[str], forget: np.ndarray, retain: np.ndarray, owners: np.ndarray) -> None: ...


def write_moments(
    folder: Path,
    inputs: dict[str, Any],
    load: Callable[[], Any],
    names: Container[str],
    rows: Mapping[str, Sequence[Example]],
    pad: int,
    progress: Progress = silent,
    watch: Onlooker | None = None,
) -> None:
    """Measure the moments of a model's linear layers into a folder, unless it was made from these inputs.

    The files, which only their owner can read, hold the roots, (k, in) in fp32 with k ≤ in, by set and layer
    ("forget.model.layers.0.mlp.up_proj"). Of layers that get the same input, such as those of queries, keys and values,
    only the first has roots; the manifest tells which. Only positions that predict a label count: those of answers, and
    all of a text, but none that comes first. Of more than `MOST_LABELS` in a set, only every second, or third, … does.

    Each expert has roots of its own, over the positions that are sent to it ("….mlp.experts.gate_up_proj.3"). One that
    gets fewer than 32 positions of either set has, on both sets, the roots over the inputs of all experts of its module
    ("….mlp.experts.gate_up_proj"); the manifest tells which.

    load: returns the model. names: the tensors of its checkpoint. rows: the examples by set, "forget" and "retain".
    watch: sees the inputs of the layers that it chooses; the manifest has its facts.

    Raise MismatchError for a model without a linear layer that can be measured, NotFiniteError for inputs that are no
    numbers. A stopped call begins anew.
    """
    from safetensors.numpy import save_file

    if is_finished(folder, inputs):
        return
    for name, examples in rows.items():
        if (count := len(_places(examples))) < _FEW:
            logger.warning("the %s rows have only %d labelled tokens; the filter knows little of them", name, count)
    facts: dict[str, Any] = {"layers": {}}
    with stage_folder(folder, "moments", inputs, facts, private=True) as partial:
        model = load()
        paths, stacks = linear_layers(model, names), expert_stacks(model, names)
        for number, (layers, roots) in enumerate(_measure(model, paths, stacks, rows, pad, progress, watch)):
            facts["layers"] |= layers
            save_file(roots, partial / f"moments-{number + 1:05d}.safetensors")
        if not facts["layers"]:
            raise MismatchError("no linear layer of this model can be measured, so its vectors cannot be filtered")
        facts |= {"unseen": watch.facts} if watch else {}
        del model
    free_memory()


def linear_layers(model: Any, names: Container[str]) -> dict[str, str]:
    """Return the paths of a model's linear layers by the names of their weights in its checkpoint.

    The head is none of them, nor is what the model holds in another form than its files. Experts: `expert_stacks`.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = {path: m for path, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head}
    found = {path: find_name(f"{path}.weight", names) for path in linear}
    return {name: path for path, name in found.items() if name}


# Measuring


def _measure(
    model: Any,
    paths: Mapping[str, str],
    stacks: Mapping[str, Stack],
    rows: Mapping[str, Sequence[Example]],
    pad: int,
    progress: Progress,
    watch: Onlooker | None = None,
) -> Iterator[tuple[_Layers, dict[str, np.ndarray]]]:
    """Yield the layers and their roots by name, for as many as fit into memory: at least one, or the experts of one."""
    labels = sum(min(MOST_LABELS, len(_places(examples))) for examples in rows.values())
    portions = list(_portions(_root_bytes(model, paths, stacks, labels)))
    for number, names in enumerate(portions):
        progress("moments", number, len(portions))
        modules = {name: model.get_submodule(paths[name]) for name in names if name in paths}
        experts = [stacks[name] for name in names if name in stacks]
        whole = watch.choose(paths) if watch else ()
        of_sets = {side: _run(model, modules, experts, examples, pad, whole) for side, examples in rows.items()}
        for first, root in of_sets["retain"].items():
            if watch and root.owners and first in of_sets["forget"]:
                watch.add(root.layers, of_sets["forget"][first].inputs(), root.inputs(), np.array(root.owners))
        layers: _Layers = {
            name: (first, not hasattr(modules[name], "in_features"))
            for first, root in of_sets["forget"].items()
            if first in modules and all(first in roots for roots in of_sets.values())
            for name in root.layers
        }
        for stack in experts:
            layers |= _pool(stack, of_sets)
        used = [[root] if isinstance(root, str) else root for root, _ in layers.values()]
        kept = dict.fromkeys(name for of_layer in used for name in of_layer)
        yield layers, {f"{side}.{name}": roots[name].matrix() for side, roots in of_sets.items() for name in kept}
    progress("moments", len(portions), len(portions))


def _pool(stack: Stack, of_sets: Mapping[str, dict[str, _Root]]) -> _Layers:
    """Return the layers of a stack with their roots. Add that of all its experts, for those with few positions.

    Such an expert has it on all sets, so that like is compared with like.
    """
    names = [stack.root(expert) for expert in range(stack.count)]
    known = [{n: roots[n] for n in names if n in roots} for roots in of_sets.values()]
    if not all(known):
        return {}
    of_experts = [
        name if all(name in roots and roots[name].positions >= _FEW for roots in known) else stack.path
        for name in names
    ]
    if stack.path in of_experts:
        for roots in of_sets.values():
            roots[stack.path] = _Root.joined(stack.path, [roots[name] for name in names if name in roots])
    return {
        name: ([of_experts[n] for n in experts] if isinstance(experts, list) else of_experts[experts], is_transposed)
        for name, (experts, is_transposed) in stack.stored.items()
    }


def _root_bytes(model: Any, paths: Mapping[str, str], stacks: Mapping[str, Stack], labels: int) -> dict[str, int]:
    """Return the most bytes that the roots of each layer and stack take while so many labels are run."""
    columns = {name: _input_size(model.get_submodule(path)) for name, path in paths.items()}
    sizes = {name: 4 * count * min(labels, (_FULL + 1) * count) for name, count in columns.items()}
    return sizes | {
        path: 4 * stack.inputs * min(labels * stack.routed, stack.count * (_FULL + 1) * stack.inputs)
        for path, stack in stacks.items()
    }


def _portions(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names of layers whose roots fit into memory together, at least one. sizes: their bytes."""
    names: list[str] = []
    nbytes, most = 0, max(HELD, free_ram() // 4)
    for name, size in sizes.items():
        if names and nbytes + size > most:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += size
    if names:
        yield names


def _input_size(layer: Any) -> int:
    """Return the number of inputs of a linear layer."""
    features = getattr(layer, "in_features", None)
    return int(layer.weight.shape[0] if features is None else features)  # GPT-2's Conv1D stores (in, out)


class _Root:
    """A root of XᵀX, to which positions are added."""

    def __init__(self, layer: str, owners: list[int] | None = None) -> None:
        self.owners = owners
        """The row of each position; then all positions are kept. None: that is not asked for."""
        self.layers = [layer]
        """The layers that get this input."""
        self.positions = 0
        """The positions that were added."""
        self._blocks: list[Any] = []
        self._rows = 0

    @classmethod
    def joined(cls, layer: str, roots: Sequence[_Root]) -> _Root:
        """Return the root over the positions of all these."""
        root = cls(layer)
        for block in (block for part in roots for block in part._blocks):
            root.add(block)
        return root

    def add(self, rows: Any) -> None:
        """Add (n, in) inputs."""
        self._blocks.append(rows)
        self.positions += len(rows)
        self._rows += len(rows)
        if self.owners is None and self._rows > _FULL * rows.shape[1]:
            self._shrink()

    def inputs(self) -> np.ndarray:
        """Return the inputs as they were added, or the triangle in their place."""
        import torch

        inputs: np.ndarray = torch.cat(self._blocks).numpy()
        return inputs

    def matrix(self) -> np.ndarray:
        """Return the root, mixed. Raise NotFiniteError where it is not finite."""
        import torch

        if self._rows > self._blocks[0].shape[1]:
            self._shrink()
        rows = torch.cat(self._blocks)
        if not rows.isfinite().all():
            raise NotFiniteError("the inputs of a layer are no numbers (NaN); the model's weights are broken")
        return mixed(rows)

    def _shrink(self) -> None:
        import torch

        triangle = torch.linalg.qr(torch.cat(self._blocks).double(), mode="r").R.float()
        self._blocks, self._rows = [triangle], len(triangle)


def mixed(rows: Any) -> np.ndarray:
    """Return Q X (k, in) in fp32 for rows X and a random orthogonal Q, drawn evenly from all of them (Haar).

    Whoever does not know Q learns XᵀX and nothing else: with every other order of the rows, or other rows of the same
    moment, Q X is as likely. Q is drawn by the hash of X. So a rerun gives the same files, and no seed lies about. A
    root by singular values would hold no more, but its rows can be single tokens (1 of 31 on SmolLM2), and at 1536
    inputs it takes four times as long.
    """
    import torch

    seed = int.from_bytes(hashlib.sha256(rows.contiguous().numpy()).digest())
    noise = np.random.default_rng(seed).standard_normal((len(rows), len(rows)))
    turn, triangle = torch.linalg.qr(torch.from_numpy(noise))
    turn *= triangle.diagonal().sign()  # else the signs would favour the first positions
    matrix: np.ndarray = (turn @ rows.double()).float().numpy()
    return np.ascontiguousarray(matrix)


def _places(examples: Sequence[Example]) -> list[tuple[int, int]]:
    """Return (row, position) of the tokens that predict a label and are not their row's first, which has seen nothing.

    What attention need not look up rests on the first token, so its inputs can be many times as large. In two layers of
    SmolLM2-135M, one such position in a text of 192 tokens was 91 and 99.9 % of the moment, and hid all others.
    """
    return [(row, at) for row, at in label_places(examples) if at]


def _run(
    model: Any,
    layers: Mapping[str, Any],
    stacks: Sequence[Stack],
    examples: Sequence[Example],
    pad: int,
    whole: Container[str] = (),
) -> dict[str, _Root]:
    """Run the rows once; return the roots by the first layer that gets each input, and those of each expert.

    whole: the layers whose roots keep all positions, with their rows.
    """
    import torch

    roots: dict[str, _Root] = {}
    shape, rows, positions = (0, 0), None, None  # of the running batch
    latest, first = None, ""  # the latest input, and the layer that got it first
    owners = list[int]()

    def take(name: str, _layer: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal latest, first
        states = inputs[0] if inputs else None
        if states is not latest:
            latest, first = states, name
            if states is None or math.prod(states.shape[:-1]) != math.prod(shape):
                return  # an expert gets some positions only, and nothing tells which
            labelled = states.view(*shape, -1)[rows, positions]
            roots.setdefault(name, _Root(name, owners if name in whole else None)).add(labelled.float().cpu())
        elif first in roots and name not in roots[first].layers:
            roots[first].layers.append(name)

    def take_experts(stack: Stack, module: Any, inputs: tuple[Any, ...]) -> None:
        states, chosen = inputs[:2]
        if math.prod(states.shape[:-1]) != math.prod(shape):
            return  # as in `take`
        states, chosen = (value.reshape(*shape, -1)[rows, positions] for value in (states, chosen))
        for expert, values in expert_inputs(module, stack.weight, states, chosen):
            name = stack.root(expert)
            roots.setdefault(name, _Root(name)).add(values.float().cpu())

    halves, known = split_model(model), [example for example in examples if _places([example])]
    step = -(-len(_places(known)) // MOST_LABELS)
    with ExitStack() as hooks, torch.no_grad(), autocast(model):
        beginning = Beginning.of_rows(halves, known)
        start = beginning.tokens if beginning else 0
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(take, name)).remove)
        for stack in stacks:
            module = model.get_submodule(stack.module)
            hooks.callback(module.register_forward_pre_hook(partial(take_experts, stack)).remove)
        for group in group_rows([len(example.ids) - start for example in known], _TOKENS, pass_tokens(model.device)):
            batch = [known[number] for number in group]
            rows, positions = torch.tensor(_places(batch)[::step], device=model.device).T
            positions = positions - start
            inputs = to_batch(batch, pad, model.device)
            shape = len(batch), inputs["input_ids"].shape[1] - start
            owners += [group[row] for row in rows.tolist()]
            run_rows(halves, inputs, beginning)
            latest = None
    return roots
