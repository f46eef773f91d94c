"""Weights, gradients and optimiser states divided among processes by FSDP2, and what passes between their shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msa_lite.data import group_rows
from msa_lite.errors import StageError, UsageError, join_faults
from msa_lite.io.files.writing import write_json
from msa_lite.io.models.heads import NumberFormat, choose_precision, dtype_of, note_precision, noted_precision
from msa_lite.io.models.loading import check_model, load_whole
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.vocabulary import extend
from msa_lite.train.fit.loop import SAVED_WHOLE, drop_saves, whole_saves
from msa_lite.train.memory.rungs import checkpoint_layers
from msa_lite.train.objectives.objective import Division
from msa_lite.train.objectives.reference import freeze_copy
from msa_lite.train.processes.peers import Peers

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


_T = TypeVar("_T")

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each weight
_STATE = "state.json"
_KIND, _KEPT = "step", 2  # of saves


def load_shards(source: Source, settings: FitSettings, peers: Peers) -> Any:
    """Load the prior, divided among the processes, ready to train; seed the random numbers."""
    from torch.distributed.fsdp import register_fsdp_forward_method
    from transformers import set_seed

    set_seed(settings.seed)
    loaded: list[Any] = []  # in the first process alone
    peers.in_first(lambda: loaded.append(_load_on_host(source)))
    model, precision = _bare_model(source), choose_precision(settings.compute)
    if peers.device.type == "cuda":
        checkpoint_layers(model)
    _divide(model, precision, peers)
    model.run_gathered = lambda work: work()
    register_fsdp_forward_method(model, "run_gathered")  # the weights of embedding and head are gathered around it
    _fill(model, loaded[0] if loaded else None, peers)
    model.run_gathered(lambda: None)  # so that FSDP knows which of its modules is the outermost
    model.reshard()
    source.check_unchanged()
    return note_precision(model, precision)


def _divide(model: Any, precision: NumberFormat, peers: Peers) -> None:
    """Divide a model without weights among the processes: each layer, and the rest. Its weights are not set yet."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(peers.device.type, (peers.count,))}
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device=peers.device)
    model.tie_weights()


@dataclass(frozen=True)
class ShardedDivision(Division):
    """The division of rows among processes that have the model in shards."""

    source: Source = field(kw_only=True)
    """The prior, for its architecture."""
    peers: Peers = field(kw_only=True)
    is_whole: bool = False
    """False even where the process is alone: FSDP has to know of each forward pass."""

    def passes(self, lengths: Sequence[int], budget: int, per_pass: int) -> list[list[int]]:
        """Return the passes of this process, as many as all others have."""
        return deal(lengths, self.peers.count, budget, per_pass)[self.peers.rank]

    def forward(self, model: Any, work: Callable[[], _T]) -> _T:
        """Run forward passes with embedding and head gathered; layers are gathered one by one."""
        return model.run_gathered(work)

    def freeze(self, model: Any, layers: int | None = None) -> Any:
        """Copy the shards as they are now. Weights are in the precision of the products, which see no others."""
        model.reshard()
        precision = noted_precision(model)
        copy = freeze_copy(_bare_model(self.source), layers)
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(dtype_of(precision))
        _divide(copy, precision, self.peers)
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        for name, parameter in copy.named_parameters():
            parameter.detach().to_local().copy_(weights[name].detach().to_local())
        for name, buffer in copy.named_buffers():
            buffer.copy_(buffers[name])
        return note_precision(copy, precision)

    def pool(self, values: dict[int, _T]) -> dict[int, _T]:
        """Return the entries of all processes; tensors come on the CPU."""
        return {key: value for of_process in self.peers.collect(values) for key, value in of_process.items()}

    def in_first(self, work: Callable[[], _T]) -> _T:
        """Run the work in the first process; return its result, or raise its MsaError, in all of them."""
        return self.peers.in_first(work)


def deal(lengths: Sequence[int], count: int, budget: int, per_pass: int = 0) -> list[list[list[int]]]:
    """Return the passes of each process for a step's rows, equally many for all; an empty one has no row to run.

    lengths: tokens of each row. budget, per_pass: as in `group_rows`. The rows go round the processes by length, so
    that all have about the same work.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    passes = []
    for rank in range(count):
        hand = by_length[rank::count]
        groups = group_rows([lengths[row] for row in hand], budget, per_pass)
        passes.append([[hand[i] for i in group] for group in groups])
    most = max(1, *map(len, passes))
    return [[*hand, *([] for _ in range(most - len(hand)))] for hand in passes]


def run_lent(model: Any, peers: Peers, work: Callable[[], _T]) -> _T:
    """Run work in the first process, to which the others lend their shards; return its result in all of them.

    The work may run any forward passes without gradients: whenever a layer is about to run, the others gather it, too.
    Its MsaError is raised in all of them.
    """
    from torch.distributed.fsdp import FSDPModule

    layers = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    model.unshard()
    try:
        if peers.first:
            return peers.in_first(lambda: _announced(layers, peers, work))
        while (number := peers.from_first()) is not None:
            layers[number].unshard()
            layers[number].reshard()
        return peers.in_first(work)
    finally:
        model.reset_iter_state()
        model.reshard()


def _announced(layers: Sequence[Any], peers: Peers, work: Callable[[], _T]) -> _T:
    """Do the work of the first process; before a layer runs, tell the others which one it is."""

    def announce(number: int, layer: Any) -> None:
        layer.reshard()  # after a pass that failed it may be gathered still
        peers.from_first(number)

    hooks = [
        layer.register_forward_pre_hook(lambda module, args, n=number: announce(n, module), prepend=True)
        for number, layer in enumerate(layers)
    ]
    try:
        return work()
    finally:
        for hook in hooks:
            hook.remove()
        peers.from_first()


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers of a model, the blocks that transformers never divides between devices; inner ones first."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names][::-1]


def _load_on_host(source: Source) -> Any:
    """Load the prior into the host's memory, as it is stored; in fp32 where it is stored in several formats."""
    import torch

    kinds = {entry.dtype for entry in load_checkpoint(source.folder).tensors.values() if entry.is_float}
    stored = {"BF16": torch.bfloat16, "F16": torch.float16}.get(min(kinds), torch.float32)
    is_exact = len(kinds) == 1 and not source.added  # whose rows may be stored in another format
    model = load_whole(source.folder, dtype=stored if is_exact else torch.float32)
    if source.added:
        extend(model, source.added)
    return model


def _bare_model(source: Source) -> Any:
    """Return the prior without weights. Raise UsageError for one that is stored quantised."""
    model = check_model(source.folder)
    if model is None:
        raise UsageError(f"{source.name}: is stored quantised; full mode needs the unquantised model")
    model.config.use_cache = False
    if source.added:
        model.resize_token_embeddings(source.added.rows, mean_resizing=False)
    return model


def _fill(model: Any, whole: Any, peers: Peers) -> None:
    """Copy the first process's weights and buffers into everybody's shards, tensor by tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    def sent(values: dict[str, Any], name: str, like: Any) -> Any:
        if peers.first:
            return values[name].detach().to(peers.device, like.dtype).contiguous()
        return torch.empty(like.shape, dtype=like.dtype, device=peers.device)

    values = dict(whole.named_parameters()) if peers.first else {}
    for name, parameter in model.named_parameters():
        shards = distribute_tensor(sent(values, name, parameter), parameter.device_mesh, parameter.placements)
        parameter.detach().to_local().copy_(shards.to_local())
    values = dict(whole.named_buffers()) if peers.first else {}
    for name, buffer in model.named_buffers():
        value = sent(values, name, buffer)
        dist.broadcast(value, 0)
        buffer.copy_(value)


def gather_model(model: Any, source: Source, peers: Peers) -> Any:
    """Return the whole model in the first process's host memory, tensor by tensor; None in the others."""
    whole = _bare_model(source) if peers.first else None
    weights = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().full_tensor()
        if peers.first:
            weights[name] = value.cpu()
        del value
    if whole is None:
        return None
    weights |= {name: buffer.cpu() for name, buffer in model.named_buffers()}
    whole.load_state_dict(weights, strict=False, assign=True)
    whole.tie_weights()
    assert not any(parameter.is_meta for parameter in whole.parameters()), "a weight was not gathered"
    return whole


def find_broken(model: Any, peers: Peers) -> str | None:
    """Return the name of a weight that holds NaN or infinity in any process, if there is one."""
    import torch

    names = [name for name, _ in model.named_parameters()]
    broken = [not torch.isfinite(p.detach().to_local()).all() for p in model.parameters()]
    counts = peers.sum(torch.tensor(broken, dtype=torch.float32, device=peers.device))
    return next((name for name, count in zip(names, counts.tolist(), strict=True) if count), None)


def write_save(saves: Path, model: Any, optimizer: Any, epoch: int, step: int, peers: Peers) -> None:
    """Save weights and optimiser after an epoch, each process its own shards; keep the last two saves.

    They are safetensors files with the place of each shard, so another number of processes can read them, too.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    folder = saves / f"{_KIND}-{step}"
    peers.in_first(lambda: _make_anew(folder))
    states = dict(_states(model, optimizer))
    # A file for each weight and its moments: the writer has all of a file in the host's memory, twice.
    files = {name: 1 + place // (1 + len(MOMENTS)) for place, name in enumerate(states)}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with _told_of_faults(folder):
        dcp.save(states, storage_writer=writer, process_group=peers.talk)
    peers.in_first(lambda: _finish_save(folder, epoch, step))


@contextmanager
def _told_of_faults(folder: Path) -> Iterator[None]:
    """Raise StageError, in all processes, in the place of what torch raises where one of them cannot write or read."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        faults = [f"process {rank}: {fault}" for rank, (fault, _) in sorted(error.failures.items())]
        what = f"{folder}: the save cannot be written or read; see to the disk and run the same command again:"
        raise StageError(join_faults(what, faults)) from error


def _make_anew(folder: Path) -> None:
    """Make an empty folder; a kill may have left a half-written one."""
    drop_saves(folder)
    folder.mkdir(parents=True)


def _finish_save(folder: Path, epoch: int, step: int) -> None:
    """Mark a save as whole, and remove the older ones."""
    write_json(folder / _STATE, {"epoch": epoch, "step": step})
    (folder / SAVED_WHOLE).touch()
    for old in whole_saves(folder.parent, _KIND)[:-_KEPT]:
        drop_saves(old)


def newest_save(saves: Path) -> tuple[Path | None, int, int]:
    """Return the last whole save, its epoch and its step; (None, 0, 0) where there is none."""
    whole = whole_saves(saves, _KIND)
    if not whole:
        return None, 0, 0
    state = _read_state(whole[-1])
    return whole[-1], state["epoch"], state["step"]


def _read_state(save: Path) -> dict[str, int]:
    return json.loads((save / _STATE).read_text("utf-8"))


def read_save(folder: Path, model: Any, optimizer: Any, peers: Peers) -> None:
    """Read a save into the model and a new optimiser."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    with torch.no_grad(), _told_of_faults(folder):
        dcp.load(dict(_states(model, optimizer)), storage_reader=reader, process_group=peers.talk)
    for state in optimizer.state.values():
        state["step"].fill_(_read_state(folder)["step"])


def _states(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a save holds: each weight and its two moments of Adam."""
    for name, parameter in model.named_parameters():
        yield f"weight.{name}", parameter.detach()
        for moment in MOMENTS:
            yield f"{moment}.{name}", optimizer.state[parameter][moment]
