"""Activation patching: run a model with hidden states of another one in the place of its own.

A text runs as one copy for each layer to patch, all in one batch. The copies share the prompt's key-value cache, which
the patches leave as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example
from msa_lite.errors import MismatchError
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.models import Runner
from msa_lite.io.layers import find_layers

_POSITIONS = 512  # whose states of all layers are in memory at a time: 134 MB for 32 layers 4096 wide in bf16


@dataclass(frozen=True)
class _Copy(Example):
    """A text that runs with the output of a layer replaced at the positions that predict its labels."""

    layer: int | None = None
    """None: nothing is replaced."""
    states: Any = None
    """(labels, width) what takes the place of the layer's output."""


def measure_losses(
    target: Runner, source: Runner, texts: Sequence[Example], layers: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[float]]]:
    """Yield (index of a text, the mean log-probability that its labels lose by a patch of each of its layers).

    Nats a token. At the positions that predict a label, the output of the target's layer is replaced by the source's.
    layers: those to patch, for each text. Texts come in any order; those without labels or layers do not come.
    Memory beside the two models: a batch of the target, and the source's states at up to 512 labels and all layers.
    """
    check_layers(target.model, source.model)
    todo = [i for i, text in enumerate(texts) if layers[i] and _places(text)]
    for part in _parts([len(_places(texts[i])) for i in todo]):
        chosen = todo[part]
        states = _read_states(source, [texts[i] for i in chosen])
        bundles = [
            [_Copy(i, texts[i].ids, texts[i].labels), *(_copy(texts[i], layer, own[layer]) for layer in layers[i])]
            for i, own in zip(chosen, states, strict=True)
        ]
        for batch in score_bundles(target, bundles, within=partial(_patched, target.halves.model)):
            for at, (plain, *patched) in batch:
                yield chosen[at], [float(np.mean(plain.log_probs - p.log_probs, dtype=np.float64)) for p in patched]


def check_layers(target: Any, other: Any, name: str = "other model") -> None:
    """Raise MismatchError unless both models have as many layers of the same width. They need no weights."""
    sizes = [(len(find_layers(m)), int(m.get_input_embeddings().weight.shape[1])) for m in (target, other)]
    if sizes[0] != sizes[1]:
        (count, width), (other_count, other_width) = sizes
        raise MismatchError(
            f"the target has {count} layers of width {width}, the {name} {other_count} of width {other_width}; "
            "hidden states can only be exchanged between models of one shape, so leave the attack depth out"
        )


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive texts with `_POSITIONS` labels at most, and at least one text."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > _POSITIONS:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _places(text: Example) -> list[int]:
    """Return the positions that predict a label."""
    return [i - 1 for i, label in enumerate(text.labels) if i and label != IGNORE]


def _copy(text: Example, layer: int, states: Any) -> _Copy:
    return _Copy(text.index, text.ids, text.labels, layer, states)


def _read_states(source: Runner, texts: Sequence[Example]) -> list[list[Any]]:
    """Return for each text, layer by layer, the (labels, width) outputs at the positions that predict its labels."""
    states: list[list[Any]] = [[] for _ in texts]
    copies = [_Copy(i, text.ids, text.labels) for i, text in enumerate(texts)]
    for _ in score_bundles(source, [[copy] for copy in copies], within=partial(_read, source.halves.model, states)):
        pass
    return states


@contextmanager
def _read(model: Any, states: list[list[Any]], texts: Sequence[Example], start: int) -> Iterator[None]:
    """Keep what the layers give in `states`, by the index of the text."""
    for text in texts:
        states[text.index] = []  # of a batch that ran out of memory, some may be there

    def keep(layer: int, output: Any) -> None:
        for row, text in enumerate(texts):
            states[text.index].append(output[row, [place - start for place in _places(text)]])

    with _hooked(model, len(texts), keep):
        yield


@contextmanager
def _patched(model: Any, texts: Sequence[_Copy], start: int) -> Iterator[None]:
    """Replace in each text the output of its layer."""

    def patch(layer: int, output: Any) -> Any:
        rows = [(row, text) for row, text in enumerate(texts) if text.layer == layer]
        if not rows:
            return None
        output = output.clone()
        for row, text in rows:
            output[row, [place - start for place in _places(text)]] = text.states.to(output.device, output.dtype)
        return output

    with _hooked(model, len(texts), patch):
        yield


@contextmanager
def _hooked(model: Any, rows: int, function: Callable[[int, Any], Any]) -> Iterator[None]:
    """Call function(layer, output) with the (rows, positions, width) output of each layer; use what it returns."""

    def hook(layer: int, _module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        if states.ndim != 3 or len(states) != rows:
            raise MismatchError(
                f"{type(model).__name__}: its layers give states of shape {tuple(states.shape)}, not "
                "(rows, positions, width), so they cannot be exchanged; leave the attack depth out"
            )
        changed = function(layer, states)
        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with ExitStack() as stack:
        for index, layer in enumerate(find_layers(model)):
            handle = layer.register_forward_hook(partial(hook, index))
            stack.callback(handle.remove)
        yield
