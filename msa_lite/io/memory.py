"""Memory: how much is free on the GPU and the host, how it is given back, and the errors for too little of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # versions 2 and 1
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Of torch (GPU and CPU), the CUDA runtime, cuBLAS, cuDNN and bitsandbytes: most have no class of their own. cuDNN says
# "not supported" where its workspace found no room.
_WORDS = re.compile(
    r"out of memory|_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_SUPPORTED\.|cudaErrorMemoryAllocation"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|Devmem Allocation failed|hipErrorOutOfMemory",
    re.IGNORECASE,
)
_LONGEST = 120  # characters of a library's message in a line of ours


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error, or one that it was raised from, means that the device's memory ran out."""
    return any(
        isinstance(part, MemoryError) or (isinstance(part, RuntimeError) and _WORDS.search(str(part)))
        for part in _chain(error)
    )


def memory_fault(error: BaseException) -> str:
    """Return what went wrong, in a line, by an error that `is_out_of_memory` knows."""
    parts = [part for part in _chain(error) if _WORDS.search(str(part))] or [error]
    line = (str(parts[0]).splitlines() or [""])[0].partition(". GPU ")[0]
    return line[:_LONGEST].rstrip(". ") or "out of memory"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from on purpose."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def free_bytes() -> int | None:
    """Return the bytes that this process can still take on its GPU; None without one, where nobody can tell."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def total_bytes() -> int:
    """Return the memory of the GPU."""
    import torch

    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0


def host_memory() -> int | None:
    """Return the bytes that this process may use of the host's memory, or None where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
    for path in _CGROUPS:
        try:
            total = min(total, int(Path(path).read_text("ascii")))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def free_ram() -> int:
    """Return the bytes of the host's memory that this process can still take; processes of a launcher share them."""
    import psutil

    own, limit = psutil.Process().memory_info().rss, host_memory()
    free = psutil.virtual_memory().available
    if limit is not None:
        free = min(free, max(0, limit - own))  # a container's limit shows in no number of the host
    return int(free) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_memory() -> None:
    """Give the memory of dead objects back, in cycles of references too, and what the allocator keeps."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def avoid_fragments() -> None:
    """Let CUDA's allocator grow its segments, unless the user has set it up; call it before CUDA starts.

    Rows of uneven length otherwise leave gaps that no later tensor fits into.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in (_ALLOCATOR, *_OLD_ALLOCATORS)):
        os.environ[_ALLOCATOR] = "expandable_segments:True"
