"""Let the weights of layers wait in the host's memory and pass through two buffers on the device.

A layer's weights are copied into one buffer while the layer before it computes from the other. A forward pass meets
the layers upwards and a backward pass downwards, so the next layer is known. The arithmetic is that of a model whose
weights are all on the device: the same kernels get the same bits. The memory that they wait in is locked RAM, or a file
where RAM is too small.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError
from msa_lite.io.console.progress import readable

logger = logging.getLogger(__name__)

RAM_SHARE = 0.9
"""Of the free RAM, for weights that wait; the rest of the machine needs some."""
_IN_RAM = ("tmpfs", "ramfs")  # file systems whose files take RAM
_ALIGNED = 256  # bytes; a tensor begins at a multiple of them, as CUDA's own allocations do
_STATES = ("absmax", "code", "offset")  # the tensors of bitsandbytes' quantisation state


@dataclass(frozen=True)
class Weight:
    """A tensor of a layer: a parameter's data, or a part of the state of its quantisation."""

    holder: Any
    name: str
    """The attribute of the holder."""
    start: int
    """The byte of a buffer that it begins at."""

    @property
    def tensor(self) -> Any:
        """Return the tensor that the layer computes with."""
        return getattr(self.holder, self.name)

    def put(self, tensor: Any) -> None:
        """Have the layer compute with another tensor."""
        setattr(self.holder, self.name, tensor)

    def view(self, buffer: Any) -> Any:
        """Return its place in a buffer of bytes, in its dtype and shape."""
        tensor = self.tensor
        end = self.start + tensor.numel() * tensor.element_size()
        return buffer[self.start : end].view(tensor.dtype).view(tensor.shape)


def weights_of(layer: Any, is_fit: bool) -> tuple[list[Weight], int]:
    """Return the tensors of a layer that wait in the host's memory, and the bytes of a buffer that holds them.

    is_fit: leave out the weights that are trained.
    """
    weights, start = dict[tuple[int, str], Weight](), 0
    for parameter in layer.parameters():
        if is_fit and parameter.requires_grad:
            continue
        state = getattr(parameter, "quant_state", None)
        levels = [level for level in (state, getattr(state, "state2", None)) if level is not None]
        places = [(parameter, "data"), *((level, name) for level in levels for name in _STATES)]
        for holder, name in places:
            tensor = getattr(holder, name)
            if tensor is not None and (id(holder), name) not in weights:
                weights[id(holder), name] = Weight(holder, name, start)
                start += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return [*weights.values()], start


class Transit:
    """Layers of a model that pass through a device.

    In a fit, a layer's weights are views of its buffer for good. What they hold is right while the layer computes,
    forward or backward, and nothing else may read them. Elsewhere weights are in the host's memory between forward
    passes, where they can be read, set and given adapters like any others; there are no backward passes.
    """

    def __init__(self, layers: Sequence[Any], device: Any, *, is_fit: bool, ram: int, folder: Path) -> None:
        """Move the layers' weights to the host's memory, and hook on to their passes. layers: in their order.

        ram: free bytes of it; what finds no room there waits in files in a folder, which end with the process. Raise
        StageError as `check_room`.
        """
        import torch

        self._layers, self._device, self._is_fit = list(layers), torch.device(device), is_fit
        self._weights = [weights_of(layer, is_fit)[0] for layer in layers]
        self._homes: list[list[Any]] = []
        self._buffers: list[Any] = [None, None]
        self._held: list[int | None] = [None, None]  # the layer whose weights each buffer has, or is about to have
        self._ready: list[Any] = [None, None]  # the event that ends the copy into each buffer
        self._last, self._direction = 0, 1
        self._beside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._settle(ram, folder)
        for number, layer in enumerate(self._layers):
            self._hook(number, layer)

    def _settle(self, ram: int, folder: Path) -> None:
        """Move the weights to the host's memory, layer by layer; in a fit, make the buffers that they are views of."""
        sizes = [weights_of(layer, self._is_fit)[1] for layer in self._layers]
        in_file, locked = check_room(sum(sizes), ram, folder), []
        for weights, nbytes in zip(self._weights, sizes, strict=True):
            if in_file > 0:
                in_file -= nbytes
                home = file_memory(nbytes, folder)
            else:
                home = empty_bytes(nbytes)
                locked.append(home)
            self._homes.append([weight.view(home) for weight in weights])
            for weight, view in zip(weights, self._homes[-1], strict=True):
                weight.put(view.copy_(weight.tensor))
        if self._beside is not None:
            weakref.finalize(self, unpin, pin(locked))
        if self._is_fit:
            self._buffers = [empty_bytes(max(sizes), self._device) for _ in range(2)]
            for number, weights in enumerate(self._weights):
                for weight, view in zip(weights, self._views(number), strict=True):
                    weight.put(view)

    def _hook(self, number: int, layer: Any) -> None:
        """Have a layer's weights come when it computes."""
        import torch

        for tensor in (*layer.buffers(), *(p for p in layer.parameters() if self._is_fit and p.requires_grad)):
            tensor.data = tensor.data.to(self._device)

        def watch(_layer: Any, _inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._enter(number))  # as a backward pass gets there

        layer.register_forward_pre_hook(lambda _layer, _inputs: self._enter(number))
        if self._is_fit:
            layer.register_forward_hook(watch)
        else:  # also where memory runs out
            layer.register_forward_hook(lambda _layer, _inputs, output: self._leave(number, output), always_call=True)

    def _enter(self, number: int) -> None:
        """Have a layer's weights in its buffer before what is computed next; begin to copy those of the layer after."""
        import torch

        slot = number % 2
        if number == 0 and not self._is_fit:
            self._held = [None, None]  # weights may have been set since
        if self._held[slot] != number:
            self._copy(number)
        if self._beside is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready[slot])
        following = number + self._way(number)
        if 0 <= following < len(self._layers) and self._held[following % 2] != following:
            self._copy(following)
        if not self._is_fit:
            for weight, view in zip(self._weights[number], self._views(number), strict=True):
                weight.put(view)

    def _way(self, number: int) -> int:
        """Return 1 where the layers are met upwards, -1 where downwards."""
        if number == 0 or not self._is_fit:
            self._direction = 1
        elif number != self._last:
            self._direction = 1 if number > self._last else -1
        self._last = number
        return self._direction

    def _copy(self, number: int) -> None:
        """Copy a layer's weights into its buffer, beside computing, once nothing needs what the buffer had."""
        if not self._is_fit:
            self._look_up(number)
        slot = number % 2
        with self._aside():
            for home, view in zip(self._homes[number], self._views(number), strict=True):
                view.copy_(home, non_blocking=True)
            if self._beside is not None:
                self._ready[slot] = self._beside.record_event()
        self._held[slot] = number

    def _look_up(self, number: int) -> None:
        """Note a layer's weights as they are now: they may have been set, and adapters put beside them."""
        import torch

        self._weights[number], nbytes = weights_of(self._layers[number], False)
        self._homes[number] = [weight.tensor for weight in self._weights[number]]
        slot = number % 2
        if self._buffers[slot] is None or len(self._buffers[slot]) < nbytes:
            self._buffers[slot] = None  # before the next one is made
            with torch.inference_mode(False):  # whose tensors could not be a weight's own
                self._buffers[slot] = empty_bytes(nbytes, self._device)

    def _views(self, number: int) -> list[Any]:
        """Return the places of a layer's weights in its buffer."""
        import torch

        with torch.inference_mode(False):
            return [weight.view(self._buffers[number % 2]) for weight in self._weights[number]]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run copies on a stream of their own, which waits for all that the device has been asked to compute so far."""
        import torch

        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            yield

    def _leave(self, number: int, output: Any) -> None:
        """Have a layer's weights in the host's memory again. output: None if the layer failed."""
        for weight, home in zip(self._weights[number], self._homes[number], strict=True):
            weight.put(home)
        self._held[number % 2] = None
        if output is None:
            self._held = [None, None]


def check_room(nbytes: int, ram: int, folder: Path) -> int:
    """Return how many of so many bytes find no room in RAM, and so wait in a file in a folder.

    ram: free bytes of it. Raise StageError where the folder's disk has no room for them either.
    """
    rest = nbytes - int(RAM_SHARE * ram)
    if rest <= 0:
        return 0
    facts = f"layers of {readable(nbytes)} would wait in RAM, of which {readable(ram)} are free"
    ways = "end other programs, or take a machine with more RAM or a smaller model"
    if _file_system(folder) in _IN_RAM:
        raise StageError(f"{facts}, and the files of {folder} take RAM, too: set TMPDIR to a folder on a disk; {ways}")
    if rest > (free := shutil.disk_usage(folder).free):
        raise StageError(f"{facts}, and the disk of {folder} has no more than {readable(free)} for the rest; {ways}")
    return rest


def _file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on; "" where that cannot be told."""
    import psutil

    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    places = [mounts[place] for place in (folder.resolve(), *folder.resolve().parents) if place in mounts]
    return places[0] if places else ""


def empty_bytes(nbytes: int, device: Any = "cpu") -> Any:
    """Return so many bytes of RAM, or of a device's memory."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def file_memory(nbytes: int, folder: Path) -> Any:
    """Return bytes that are a file's, whose name is gone at once. Raise StageError where the disk is full."""
    import torch

    number, path = tempfile.mkstemp(".tmp", dir=folder)  # which a rerun removes where a kill leaves it
    try:
        if hasattr(os, "posix_fallocate"):  # writing to a sparse file would end the process where the disk fills up
            os.posix_fallocate(number, 0, max(1, nbytes))
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except OSError as error:
        raise StageError(f"{folder}: no room for layers that find none in RAM ({error.strerror})") from error
    finally:
        os.close(number)
        os.unlink(path)


def pin(buffers: Sequence[Any]) -> list[Any]:
    """Lock memory, so that copies of it run beside computing. Return the buffers that are locked: all, or the first.

    torch's own locked memory takes a power of two for each tensor.
    """
    import torch

    runtime = torch.cuda.cudart()
    for count, buffer in enumerate(buffers):
        if int(runtime.cudaHostRegister(buffer.data_ptr(), len(buffer), 0)):
            logger.warning("%d of %d layers cannot be locked in RAM, so they are copied more slowly",
                           len(buffers) - count, len(buffers))  # fmt: skip
            return list(buffers[:count])
    return list(buffers)


def unpin(buffers: Sequence[Any]) -> None:
    """Release locked memory before it is freed."""
    import torch

    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
