"""Weights, gradients and optimiser states divided among processes by FSDP2, and how these processes agree."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msa_lite.errors import MismatchError, MsaError, StageError, UsageError, join_faults
from msa_lite.io.files.writing import digest, write_json
from msa_lite.io.models.devices import is_out_of_memory
from msa_lite.io.models.heads import choose_precision, note_precision, split_model
from msa_lite.io.models.loading import check_model, load_whole
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.vocabulary import extend
from msa_lite.train.loop import SAVED_WHOLE, whole_saves
from msa_lite.train.rungs import checkpoint_layers

if TYPE_CHECKING:
    from msa_lite.train.settings import FitSettings


T = TypeVar("T")

_LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket timeout", "tcpstore")


@dataclass(frozen=True)
class Peers:
    """This process among those of a fit.

    Tensors go over the default group of torch.distributed. What one process decides goes over a group of its own on the
    CPU. There the others may wait for hours, and notice at once when a process dies.
    """

    rank: int
    """Its number, from 0. The first one writes the files."""
    count: int
    """The number of processes."""
    device: Any
    """The torch.device of its share of the model."""
    talk: Any
    """The group on the CPU."""

    @classmethod
    def join(cls) -> Peers:
        """Return the peers of this process; all of them call it. torch.distributed must be initialised."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        device = torch.device("cpu")
        if "cuda:nccl" in dist.get_backend_config():
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
        # Long: the first process may measure a large target, or write a large model.
        talk = dist.new_group(backend="gloo", timeout=timedelta(days=2))
        return cls(dist.get_rank(), dist.get_world_size(), device, talk)

    def leave(self) -> None:
        """Give the CPU's group up."""
        import torch.distributed as dist

        dist.destroy_process_group(self.talk)

    @property
    def first(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0

    def share(self, value: Any = None) -> Any:
        """Return the value that the first process has, in all of them."""
        import torch.distributed as dist

        box = [value if self.first else None]
        dist.broadcast_object_list(box, 0, group=self.talk)
        return box[0]

    def in_first(self, work: Callable[[], T]) -> T:
        """Run the work in the first process; return its result, or raise its MsaError, in all of them."""
        result: Any = None
        error: MsaError | None = None
        if self.first:
            try:
                result = work()
            except MsaError as failure:
                error = failure
        result, error = self.share((result, error))
        if error is not None:
            raise error
        return result

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        import torch.distributed as dist

        values = [None] * self.count
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def sum(self, value: Any) -> Any:
        """Return the sum of a tensor over all processes."""
        import torch.distributed as dist

        dist.all_reduce(value)
        return value

    def check_same(self, inputs: Mapping[str, Any]) -> None:
        """Raise MismatchError, in all processes, where their inputs differ."""
        hashes = self.collect({name: digest(value) for name, value in inputs.items()})
        faults = [
            f"{name}: not the same in process {rank} as in process 0"
            for rank, of_rank in enumerate(hashes)
            for name in sorted(hashes[0].keys() | of_rank.keys())
            if hashes[0].get(name) != of_rank.get(name)
        ]
        if faults:
            raise MismatchError(
                join_faults(
                    "the processes of this fit have different inputs; give each machine the same recipe and files:",
                    faults,
                )
            )


@contextmanager
def told_of_losses(label: str) -> Iterator[None]:
    """Raise StageError in the place of the errors that follow the death of another process."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):  # NCCL's words for it name NCCL, too
            raise
        if not (isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _LOST)):
            raise
        raise StageError(
            f"{label}: another process of this fit has stopped, so this one stops too; its own message says why. Run "
            f"the same command again to go on after the last save ({' '.join(str(error).split())[:200]})"
        ) from error


MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, for each weight
_STATE = "state.json"
_KIND, _KEPT = "step", 2  # of saves


def load_shards(source: Source, settings: FitSettings, peers: Peers) -> tuple[Any, bool]:
    """Load the prior, divided among the processes, ready to train; seed the random numbers.

    Return it, and whether its logits can be made apart from the model.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import set_seed

    set_seed(settings.seed)
    loaded: list[Any] = []  # in the first process alone
    peers.in_first(lambda: loaded.append(_load_on_host(source)))
    whole = loaded[0] if loaded else None
    model = _bare_model(source)
    precision = choose_precision(settings.compute)
    options: dict[str, Any] = {"mesh": init_device_mesh(peers.device.type, (peers.count,))}
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if peers.device.type == "cuda":
        checkpoint_layers(model)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device=peers.device)
    model.tie_weights()
    _fill(model, whole, peers)
    source.check_unchanged()
    return note_precision(model, precision), peers.share(whole is not None and _is_split(whole))


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


def _is_split(whole: Any) -> bool:
    """Check whether a model's logits can be made apart from it; not if a router adds a loss of its own."""
    has_router_loss = getattr(whole.config, "output_router_logits", False)
    return not has_router_loss and split_model(note_precision(whole, "fp32")).body is not None


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
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _told_of_faults(folder):
        dcp.save(dict(_states(model, optimizer)), storage_writer=writer, process_group=peers.talk)
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
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish_save(folder: Path, epoch: int, step: int) -> None:
    """Mark a save as whole, and remove the older ones."""
    write_json(folder / _STATE, {"epoch": epoch, "step": step})
    (folder / SAVED_WHOLE).touch()
    for old in whole_saves(folder.parent, _KIND)[:-_KEPT]:
        (old / SAVED_WHOLE).unlink()  # first: a kill in between must not leave half of one that counts
        shutil.rmtree(old)


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
