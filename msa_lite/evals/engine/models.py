"""Load models to score, and run them in batches as large as fit into memory."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from msa_lite.data import open_tokenizer
from msa_lite.errors import MismatchError, NotFiniteError, NoTokenizerError
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.models.devices import free_bytes, free_memory, is_out_of_memory
from msa_lite.io.models.heads import Halves, has_bf16, nf4, split_model
from msa_lite.io.models.loading import attach_adapter, check_loads, load_whole
from msa_lite.io.models.streaming import (
    Placement,
    check_ram,
    fits,
    is_streamed,
    leave_ends,
    load_streamed,
    loaded_bytes,
    place,
    read_sizes,
    stream,
)
from msa_lite.io.models.window import model_window, read_window
from msa_lite.io.weights.adapter import base_name, is_adapter
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch, has_tokenizer
from msa_lite.io.weights.quantised import dequantised
from msa_lite.io.weights.vocabulary import AddedRows

logger = logging.getLogger(__name__)

# Of one batch; halved on a GPU until it fits. Where layers stream, a batch that does not fit has cost minutes.
_START_TOKENS = {"cpu": 2048, "cuda": 65536}
_STREAMED_TOKENS = 8192
_CORE_BYTES = 1 << 20  # of logits that are worked on at a time: a softmax of more waits for memory
_CACHED = {"cpu": 4, "cuda": 1}  # times the budget may be in a cache; on a CPU, a step of few rows costs nearly as much


def _model_below(folder: Path) -> Source | None:
    """Fetch the model below a PEFT adapter; return None for a folder that holds a checkpoint."""
    return fetch(base_name(folder)) if is_adapter(folder) else None


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder itself if it holds a checkpoint; for a PEFT adapter, fetch the model below it."""
    below = _model_below(folder)
    return below.folder if below else Path(folder)


def model_identity(source: Source) -> dict[str, Any]:
    """Return what a manifest records of a scored model; for an adapter, the model below it, too."""
    below = _model_below(source.folder)
    return source.identity() | ({"below": below.identity()} if below else {})


def check_source(source: Source, ids: Iterable[int] = ()) -> None:
    """Check by headers and configs that a model loads whole, and has a row for each of these token ids.

    Read no weights. Raise FormatError or MismatchError.
    """
    rows = check_loads(Path(source.folder), checkpoint_folder(source.folder))
    highest = max(ids, default=0)
    if rows is not None and highest >= (source.added.rows if source.added else rows):
        raise MismatchError(
            f"{source.name}: the tokenizer makes token {highest}, but the model's embedding has {rows} rows; give the "
            "tokenizer that belongs to the model"
        )


def smallest_window(sources: Iterable[Source]) -> int | None:
    """Return the smallest window of some models (`read_window`); None where nothing limits them."""
    return read_window(load_checkpoint(checkpoint_folder(source.folder)) for source in sources)


def load_tokenizer(source: Source) -> Any:
    """Load a model's tokenizer; for an adapter without one, that of the model below it.

    Raise NoTokenizerError if there is none.
    """
    try:
        return open_tokenizer(_tokenizer_folder(source), source.name)
    except NoTokenizerError as error:
        raise NoTokenizerError(
            f"{error}; copy tokenizer.json and tokenizer_config.json of the model it was tuned from into its folder"
        ) from error


def can_read(source: Source) -> bool:
    """Check whether `load_tokenizer` would find a tokenizer."""
    return has_tokenizer(_tokenizer_folder(source))


def _tokenizer_folder(source: Source) -> Path:
    place = source.tokenizer_folder
    return place if has_tokenizer(place) else checkpoint_folder(place)


def check_numbers(values: Any) -> None:
    """Raise NotFiniteError if a model's outputs hold NaN: metrics made of them would look like any others."""
    if values.isnan().any():
        raise no_numbers()


def no_numbers() -> NotFiniteError:
    """Return the error for a model whose outputs are NaN."""
    return NotFiniteError(
        "the model's outputs are no numbers (NaN): its weights are broken, or too large for its dtype; try a smaller "
        "alpha, or --dtype float32 for the merge"
    )


def load_model(folder: Path, four_bit: bool = False, dtype: str | None = None, added: AddedRows | None = None) -> Any:
    """Load a causal language model to score: on a GPU in the stored dtype, on a CPU in fp32, or in NF4 (`four_bit`).

    folder: a checkpoint, or a PEFT adapter, which is then loaded onto its model. dtype: torch's name of a dtype to use
    on the GPU in place of the stored one. added: rows for tokens that the model lacks. Each process of
    `accelerate launch` gets its own GPU. In NF4, what is not quantised (embedding, head, norms) is 16 bits wide on a
    GPU. GPUs without bf16 get fp16 in its place. Layers that find no room on a GPU stream from RAM.
    """
    from accelerate import PartialState

    device = PartialState().device  # chooses this process's GPU
    below = checkpoint_folder(folder)
    how: dict[str, Any] = {"dtype": _scoring_dtype(below, four_bit, dtype)}
    if below != Path(folder):
        check_loads(Path(folder), below)
    free = free_bytes()
    if free is None:
        if four_bit:
            how |= {"device_map": {"": device}, "quantization_config": nf4()}
        return _load(folder, below, how, added)
    how |= {"quantization_config": nf4()} if four_bit else {}
    placement = _place(below, how["dtype"], free, four_bit)
    try:
        return _load(folder, below, how, added, placement, device)
    except (RuntimeError, MemoryError) as error:
        if placement is not None or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold weights
    free_memory()
    # Another process may have taken some.
    placement = _place(below, how["dtype"], free_bytes() or 0, four_bit, anyway=True)
    return _load(folder, below, how, added, placement, device)


def _load(
    folder: Path,
    below: Path,
    how: dict[str, Any],
    added: AddedRows | None,
    placement: Placement | None = None,
    device: Any = None,
) -> Any:
    """Load the checkpoint below a folder, with added rows, and its adapter. device: the GPU, if there is one."""
    from msa_lite.io.weights.vocabulary import extend

    if device is not None and placement is None:
        # Straight to the GPU: otherwise each of several processes would for a while hold the model in host memory.
        how = {**how, "device_map": {"": device}}
    with without_bars():
        if placement is None:
            model = load_whole(below, **how)
        else:
            model = load_streamed(below, placement, device, **how)
            stream(model, placement.streamed, device)
        if added:
            extend(model, added)
        if placement is not None:
            leave_ends(model, placement.ends, device)
        if below != Path(folder):
            model = attach_adapter(model, folder)
    return model.eval()


def streams(source: Source) -> bool:
    """Check by headers whether a model finds no room on the GPU, so that layers would stream from RAM."""
    folder, free = checkpoint_folder(source.folder), free_bytes()
    nbytes = loaded_bytes(load_checkpoint(folder), _scoring_dtype(folder, False, None))
    return free is not None and not fits(nbytes, free)


def count_weights(source: Source) -> int:
    """Return the number of a model's weights, by its headers; those of an adapter are left out."""
    tensors = dequantised(load_checkpoint(checkpoint_folder(source.folder))).tensors.values()
    return sum(math.prod(entry.shape) for entry in tensors)


def _place(folder: Path, dtype: Any, free: int, four_bit: bool, anyway: bool = False) -> Placement | None:
    """Return which layers of a checkpoint stream from RAM; None for a model that the GPU's free memory holds.

    anyway: where layers would fit by their sizes, too. Raise StageError as `place` and `check_ram`.
    """
    nbytes = loaded_bytes(load_checkpoint(folder), dtype)
    if fits(nbytes, free) and not anyway:
        return None
    sizes = read_sizes(folder, dtype, four_bit)
    if sizes is None:  # stored quantised: such weights belong to kernels of the GPU
        return None
    nbytes = sizes.total
    if fits(nbytes, free) and not anyway:
        return None
    placement = place(sizes, free)
    if not placement.streamed:
        return None
    check_ram(placement.waiting)
    _tell(
        f"{folder} does not fit into the GPU's free memory ({nbytes / 1e9:.1f} of {free / 1e9:.1f} GB): "
        f"{len(placement.streamed)} of {placement.layers} layers stream from RAM, which is slower"
    )
    return placement


@cache  # the same model is loaded for each of many candidates
def _tell(line: str) -> None:
    logger.warning("%s", line)


def _scoring_dtype(folder: Path, four_bit: bool, dtype: str | None) -> Any:
    """Return the dtype to load a checkpoint in, as transformers takes it. dtype: torch's name of the one asked for."""
    import torch

    if not torch.cuda.is_available():
        return torch.float32
    if four_bit:
        return torch.bfloat16 if has_bf16() else torch.float16
    stored = {entry.dtype for entry in load_checkpoint(folder).tensors.values()}
    if not has_bf16() and (dtype == "bfloat16" or (dtype is None and "BF16" in stored)):
        return torch.float16
    return getattr(torch, dtype) if dtype else "auto"


@dataclass
class Runner:
    """A loaded model and the size of its batches."""

    model: Any
    budget: int = 0
    """Tokens of one batch; lowered when memory runs out. 0: a default for the device."""
    batched: bool | None = None
    """False: answers are generated one at a time, by transformers' own `generate`. None: not checked yet."""

    def __post_init__(self) -> None:
        if not self.budget:
            self.budget = _START_TOKENS["cuda" if self.device.type == "cuda" else "cpu"]
            if is_streamed(self.model):
                self.budget = min(self.budget, _STREAMED_TOKENS)
            if self.halves.body is None:  # then all logits are in memory, and their size counts
                self.budget = min(self.budget, max(1, 4 * self.halves.block_rows))

    @cached_property
    def halves(self) -> Halves:
        """Return the model's body and head."""
        return split_model(self.model)

    @property
    def device(self) -> Any:
        """Return the device for inputs."""
        return self.model.device

    @property
    def cache_budget(self) -> int:
        """Return the most tokens of a batch in the key-value cache while generating."""
        return self.budget * _CACHED["cuda" if self.device.type == "cuda" else "cpu"]

    @property
    def window(self) -> int | None:
        """Return the most tokens that the model reads (`model_window`)."""
        return model_window(self.model.config)

    def blocks(self, states: Any) -> Iterator[tuple[slice, Any]]:
        """Yield (slice, fp32 logits) over (n, ·) states.

        They are made in blocks small enough for memory, and on a CPU handed out in parts that stay in a core's cache.
        """
        for block in self.halves.blocks(len(states)):
            logits = self.halves.logits(states[block])
            rows = len(logits)
            if self.device.type == "cpu":
                rows = max(1, _CORE_BYTES // (logits.shape[-1] * logits.element_size()))
            for start in range(0, len(logits), rows):
                part = logits[start : start + rows]
                yield slice(block.start + start, block.start + start + len(part)), part

    def close(self) -> None:
        """Free the model's memory now, for the next model. Hooks make it part of reference cycles."""
        self.model = None
        self.__dict__.pop("halves", None)
        free_memory()

    def lower_budget(self, error: BaseException, tokens: int) -> bool:
        """Halve the budget and return True if an error means that memory ran out. tokens: of the batch that failed."""
        if not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the batch that failed
        free_memory()
        self.budget = max(1, min(self.budget, tokens) // 2)
        return True


@contextmanager
def open_runner(source: Source) -> Iterator[Runner]:
    """Load a model whose files have not changed since they were found; free its memory in the end."""
    runner = Runner(load_model(source.folder, added=source.added))
    try:
        source.check_unchanged()
        yield runner
    finally:
        runner.close()
