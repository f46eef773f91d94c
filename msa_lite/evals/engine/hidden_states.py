"""Read what the layers of a model give at the positions that predict a text's labels, and replace it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from msa_lite.data import IGNORE, Example
from msa_lite.errors import MismatchError
from msa_lite.evals.engine.forward import score_bundles
from msa_lite.evals.engine.models import Runner
from msa_lite.io.models.heads import find_layers

_POSITIONS = 512  # whose states of all layers are in memory at a time: 134 MB for 32 layers 4096 wide in bf16


def group_texts(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive texts with `_POSITIONS` labels at most, and at least one text."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > _POSITIONS:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def predicting_places(text: Example) -> list[int]:
    """Return the positions that predict a label."""
    return [i - 1 for i, label in enumerate(text.labels) if i and label != IGNORE]


def read_states(source: Runner, texts: Sequence[Example]) -> list[list[Any]]:
    """Return for each text, layer by layer, the (labels, width) outputs at the positions that predict its labels."""
    states: list[list[Any]] = [[] for _ in texts]
    copies = [[Example(i, text.ids, text.labels)] for i, text in enumerate(texts)]
    for _ in score_bundles(source, copies, within=partial(keep_states, source.halves.model, states)):
        pass
    return states


@contextmanager
def keep_states(model: Any, states: list[list[Any]], texts: Sequence[Example], start: int) -> Iterator[None]:
    """Keep what the layers give in `states`, by the index of the text."""
    for text in texts:
        states[text.index] = []  # of a batch that ran out of memory, some may be there

    def keep(layer: int, output: Any) -> None:
        for row, text in enumerate(texts):
            states[text.index].append(output[row, [place - start for place in predicting_places(text)]])

    with hooked(model, len(texts), keep):
        yield


@contextmanager
def hooked(model: Any, rows: int, function: Callable[[int, Any], Any]) -> Iterator[None]:
    """Call function(layer, output) with the (rows, positions, width) output of each layer; use what it returns."""

    def hook(layer: int, _module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        if states.ndim != 3 or len(states) != rows:
            raise MismatchError(
                f"{type(model).__name__}: its layers give states of shape {tuple(states.shape)}, not "
                "(rows, positions, width), so they cannot be read or exchanged"
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
