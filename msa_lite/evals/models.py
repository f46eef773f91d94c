"""A model that is ready to be scored: loaded, and taken apart into what runs over the tokens and what makes logits.

A vocabulary of 128k makes logits far larger than everything else, so they are made block by block from the hidden
states of just those positions that are scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msa_lite.data import open_tokenizer
from msa_lite.errors import MismatchError, NotFiniteError, NoTokenizerError
from msa_lite.io.adapter import base_name, is_adapter
from msa_lite.io.hub import Source, fetch
from msa_lite.io.loading import attach_adapter, check_loads, load_whole
from msa_lite.io.quiet import without_bars
from msa_lite.io.tokenizer import has_tokenizer
from msa_lite.io.vocabulary import AddedRows

_BLOCK_BYTES = 64 << 20  # fp32 logits held at a time
_START_TOKENS = {"cpu": 2048, "cuda": 65536}  # of one batch; halved on a GPU until it fits
_CACHED = {"cpu": 4, "cuda": 1}  # times as many may lie in a cache; on a CPU, a step costs little less for few rows


def _model_below(folder: Path) -> Source | None:
    """The model that a PEFT adapter lies on, fetched; None for a folder that holds a checkpoint."""
    return fetch(base_name(folder)) if is_adapter(folder) else None


def checkpoint_folder(folder: Path) -> Path:
    """The folder itself where it holds a checkpoint; for a PEFT adapter, the model that it lies on (fetched)."""
    below = _model_below(folder)
    return below.folder if below else Path(folder)


def model_identity(source: Source) -> dict[str, Any]:
    """What a manifest records of a model that was scored; for an adapter, the model below it as well."""
    below = _model_below(source.folder)
    return source.identity() | ({"below": below.identity()} if below else {})


def check_source(source: Source, ids: Iterable[int] = ()) -> None:
    """Check by headers and configs that a model loads whole, and has a row for each of these token ids.

    Raises FormatError or MismatchError; no weight is read.
    """
    rows = check_loads(Path(source.folder), checkpoint_folder(source.folder))
    highest = max(ids, default=0)
    if rows is not None and highest >= (source.added.rows if source.added else rows):
        raise MismatchError(
            f"{source.name}: the tokenizer makes token {highest}, but the model's embedding has {rows} rows; give the "
            "tokenizer that belongs to the model"
        )


def load_tokenizer(source: Source) -> Any:
    """A model's tokenizer; that of the model below for an adapter that came without one.

    Raises NoTokenizerError where there is none.
    """
    try:
        return open_tokenizer(_tokenizer_folder(source), source.name)
    except NoTokenizerError as error:
        raise NoTokenizerError(f"{error}; --tokenizer MODEL takes that of another folder or repository") from error


def can_read(source: Source) -> bool:
    """Whether `load_tokenizer` finds one."""
    return has_tokenizer(_tokenizer_folder(source))


def _tokenizer_folder(source: Source) -> Path:
    place = source.tokenizer_folder
    return place if has_tokenizer(place) else checkpoint_folder(place)


def check_numbers(values: Any) -> None:
    """Raise NotFiniteError where a model's outputs are no numbers: a metric made of them would look like any other."""
    if values.isnan().any():
        raise no_numbers()


def no_numbers() -> NotFiniteError:
    """The error for a model whose outputs are NaN."""
    return NotFiniteError(
        "the model's outputs are no numbers (NaN): its weights are broken, or too large for its dtype; a smaller "
        "alpha, or --dtype float32 for the merge, may help"
    )


def load_model(folder: Path, four_bit: bool = False, dtype: str | None = None, added: AddedRows | None = None) -> Any:
    """A causal language model ready to score: on the GPU in the stored dtype, on a CPU in fp32, or in NF4 (`four_bit`).

    folder: a checkpoint, or a PEFT adapter, whose model is then loaded below it. dtype: name of torch's to have on the
    GPU in the place of the stored one. added: rows for tokens that the model lacks. Each process of
    `accelerate launch` gets a GPU of its own.
    """
    import torch
    from accelerate import PartialState

    below = checkpoint_folder(folder)
    # Straight to the GPU: several processes would otherwise each hold the model in the machine's memory for a while.
    stored = getattr(torch, dtype) if dtype else "auto"
    gpu = {"dtype": stored, "device_map": {"": PartialState().device}} if torch.cuda.is_available() else {}
    from msa_lite.io.added_rows import extend

    if four_bit:
        from msa_lite.io.precision import nf4

        gpu = {"device_map": {"": PartialState().device}, "quantization_config": nf4()}
    if below != Path(folder):
        check_loads(Path(folder), below)
    with without_bars():
        model = load_whole(below, **({"dtype": torch.float32} | gpu))
        if added:
            extend(model, added)
        if below != Path(folder):
            model = attach_adapter(model, folder)
    return model.eval()


def can_divide(cache: Any) -> bool:
    """Whether rows can be taken out of a key-value cache: not where layers keep a state instead, as Mamba's do."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


@dataclass
class Runner:
    """A loaded model, and how many tokens of it fit into one batch (`budget`, lowered when memory runs out)."""

    model: Any
    budget: int = 0

    def __post_init__(self) -> None:
        if not self.budget:
            self.budget = _START_TOKENS["cuda" if self.device.type == "cuda" else "cpu"]
            if self._parts is None:  # whole logits, so that their size counts
                self.budget = min(self.budget, max(1, 4 * self.block_rows))

    @property
    def device(self) -> Any:
        """Where inputs have to be."""
        return self.model.device

    @cached_property
    def vocabulary(self) -> int:
        """Logits of one position."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def cache_budget(self) -> int:
        """Tokens of a batch that are held in the key-value cache while answers are generated."""
        return self.budget * _CACHED["cuda" if self.device.type == "cuda" else "cpu"]

    @property
    def block_rows(self) -> int:
        """Positions whose fp32 logits are held at a time."""
        return max(1, _BLOCK_BYTES // (4 * self.vocabulary))

    @property
    def window(self) -> int | None:
        """The most tokens that the model was made for, where its config says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @cached_property
    def _parts(self) -> tuple[Any, Any] | None:
        """(body, head), or None for a model that does more with its logits than its head does.

        Soft caps and scales come after the head, each family in its own way; whether there are any is asked of the
        model itself, once, with a few tokens.
        """
        import torch

        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            return None
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        body, head = inner.base_model, inner.get_output_embeddings()
        if body is inner:
            return None
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        with torch.inference_mode():
            whole = self.model(input_ids=ids, use_cache=False).logits
            parts = head(body(input_ids=ids, use_cache=False).last_hidden_state)
        # Compared in fp32: a model that is being trained gives its own logits in that dtype.
        return (body, head) if torch.equal(whole.float(), parts.float()) else None

    def states(self, **inputs: Any) -> tuple[Any, Any]:
        """(states, key-value cache) of a forward pass; states: (batch, positions, ·), which `logits` takes."""
        if self._parts is None:
            output = self.model(**inputs)
            return output.logits, output.past_key_values
        output = self._parts[0](**inputs)
        return output.last_hidden_state, output.past_key_values

    def logits(self, states: Any) -> Any:
        """(…, vocabulary) logits in fp32 of states. Models return them in bf16 otherwise, too coarse for a softmax."""
        return states.float() if self._parts is None else self._parts[1](states).float()

    def blocks(self, states: Any) -> Iterator[tuple[slice, Any]]:
        """(slice, fp32 logits) over (n, ·) states, so many at a time that the logits stay small."""
        for start in range(0, len(states), self.block_rows):
            part = slice(start, start + self.block_rows)
            yield part, self.logits(states[part])

    def lower_budget(self, error: BaseException, tokens: int) -> bool:
        """Whether an error means that memory ran out on a batch of so many tokens; the next is to be half as large."""
        import torch
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        if not (isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)):
            return False
        clear_device_cache(garbage_collection=True)
        self.budget = max(1, min(self.budget, tokens) // 2)
        return True
