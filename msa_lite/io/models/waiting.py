"""Memory of the host for weights that wait to be copied to a device: locked RAM, or a file where RAM is too small."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError
from msa_lite.io.console.progress import readable

logger = logging.getLogger(__name__)

RAM_SHARE = 0.9
"""Of the free RAM, for weights that wait; the rest of the machine needs some."""
_IN_RAM = ("tmpfs", "ramfs")  # file systems whose files take RAM


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

    number, path = tempfile.mkstemp(dir=folder)
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
