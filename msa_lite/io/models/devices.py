"""The devices of this machine, the memory on them, and bounds on the time and memory of strangers' code."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import FrameType

from msa_lite.errors import UsageError, causes
from msa_lite.io.console.libraries import EXTRAS, package_versions, readiness

logger = logging.getLogger(__name__)


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
        isinstance(cause, MemoryError) or (isinstance(cause, RuntimeError) and _WORDS.search(str(cause)))
        for cause in causes(error)
    )


def memory_fault(error: BaseException) -> str:
    """Return what went wrong, in a line, by an error that `is_out_of_memory` knows."""
    cause = next((cause for cause in causes(error) if _WORDS.search(str(cause))), error)
    line = (str(cause).splitlines() or [""])[0].partition(". GPU ")[0]
    return line[:_LONGEST].rstrip(". ") or "out of memory"


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

    used, limit = psutil.Process().memory_info().rss, host_memory()
    free = psutil.virtual_memory().available
    if limit is not None:
        free = min(free, max(0, limit - used))  # a container's limit shows in no number of the host
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


_OWN = 1 << 30  # bytes that a process without tensors takes, at most: CUDA's context and libraries
_WORTH = 0.05  # part of a GPU in the hands of others that is worth a word
_GB = 1e9


@cache  # of one process there is one answer, and one line
def check_device() -> None:
    """Warn of a GPU that is left unused, or shared with others. Raise UsageError for one that does not work.

    It is the first use of CUDA in a process, so the allocator is set up before.
    """
    import torch

    avoid_fragments()
    if not torch.cuda.is_available():
        if reason := why_unused():
            logger.warning("this machine has an NVIDIA GPU, but the CPU is used: %s", reason)
        return
    number, name = own_gpu(), "the GPU"
    try:
        name = torch.cuda.get_device_name(number)
        torch.ones(1, device=f"cuda:{number}").add(1).item()  # a kernel: a torch may have none for this GPU
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{name} does not work ({reason}). nvidia-smi shows who uses it; CUDA_VISIBLE_DEVICES=1 takes another one, "
            "and CUDA_VISIBLE_DEVICES= the CPU"
        ) from error
    if others := bytes_of_others():
        total = torch.cuda.mem_get_info(number)[1]
        logger.warning(
            "%s: other processes use %.1f of its %.1f GB, so %.1f GB are left; nvidia-smi shows who does, and "
            "CUDA_VISIBLE_DEVICES=1 takes another GPU",
            name, others / _GB, total / _GB, (total - others) / _GB,
        )  # fmt: skip


def bytes_of_others() -> int:
    """Return the bytes of the GPU that other processes hold, as far as this one's own share can be told.

    0 without a GPU, and for a few per cent.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    number = own_gpu()
    free, total = torch.cuda.mem_get_info(number)
    others = int(total - free - torch.cuda.memory_reserved(number) - _OWN)
    return others if others > _WORTH * total else 0


def own_gpu() -> int:
    """Return the number of this process's GPU, also where a launcher started several processes."""
    import torch

    return int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())


def why_unused() -> str | None:
    """Return why torch does not use an NVIDIA GPU of this machine; None where there is none, or torch is for AMD."""
    import torch

    has_gpu = any(Path("/proc/driver/nvidia/gpus").glob("*")) or shutil.which("nvidia-smi") is not None
    if not has_gpu or torch.version.hip:
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it"
    if torch.version.cuda is None:
        return "the installed torch is made for CPUs alone; install the one for CUDA (pytorch.org tells how)"
    return (
        f"its driver does not work with the installed torch, which is made for CUDA {torch.version.cuda}; update the "
        "driver, or install a torch for an older CUDA"
    )


_BROKEN = "cannot be loaded"


def describe_machine() -> dict[str, str]:
    """Return by topic what a bug report needs: versions, devices, memory, and what is missing for what.

    Nothing here raises: a topic that fails says why. The home folder is written as ~.
    """
    topics: dict[str, Callable[[], str]] = {
        "msa-lite": lambda: metadata.version("msa-lite"),
        "python": lambda: f"{platform.python_version()}, {platform.platform()}",
        "packages": lambda: ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        "torch": _torch,
        "nvidia-smi": _nvidia,
        "cores": lambda: str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": lambda: f"{total / _GB:.1f} GB" if (total := host_memory()) else "the system does not say",
        "disk": lambda: f"{shutil.disk_usage('.').free / _GB:.1f} GB free in the working folder",
        "merge": _merge,
        **{name: partial(readiness, name) for name in EXTRAS},
    }
    texts = {}
    for topic, tell in topics.items():
        try:
            texts[topic] = tell()
            if "torch" in EXTRAS.get(topic, ("", ()))[1] and texts["torch"].startswith(_BROKEN):
                texts[topic] = f"torch {_BROKEN}"
        except BaseException as error:  # a broken package raises anything, even SystemExit
            if isinstance(error, KeyboardInterrupt):
                raise
            texts[topic] = f"{_BROKEN} ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]})"
    home = os.path.expanduser("~")
    return {topic: text.replace(home, "~") if len(home) > 1 else text for topic, text in texts.items()}


def _merge() -> str:
    """Load what a merge needs; it is no extra."""
    for name in ("huggingface_hub", "ml_dtypes", "numpy", "pydantic", "safetensors.numpy"):
        importlib.import_module(name)
    return "ready, as are verify, compare, mergekit and publish"


def _torch() -> str:
    """Return torch's version and the devices that it uses."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    built = f"{torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}"
    devices = [
        f"{torch.cuda.get_device_name(number)}, {torch.cuda.get_device_properties(number).total_memory / _GB:.1f} GB"
        for number in range(torch.cuda.device_count())
    ]
    others = [f"{name} is not used" for name in ("mps", "xpu") if getattr(torch, name).is_available()]
    return f"{built}; {'; '.join(devices or ['the CPU is used', *filter(None, [why_unused()]), *others])}"


def _nvidia() -> str:
    """Return the NVIDIA GPUs as their driver tells them."""
    if shutil.which("nvidia-smi") is None:
        return "not installed"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return "; ".join((done.stdout or done.stderr).strip().splitlines())


SECONDS = 1.0  # of processor time, which other work on the machine does not use up
_MEMORY = 256 << 20  # bytes beyond those that the process has


class OverrunError(Exception):
    """Raised where code under `limited` took too long."""


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raise OverrunError where the block takes more processor time, MemoryError where it takes 256 MB more memory.

    Python can interrupt itself only in the main thread; in others nothing is bounded. Memory is bounded on Linux.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    end = time.thread_time() + seconds

    def check(number: int, frame: FrameType | None) -> None:
        if time.thread_time() > end:  # the signal counts what other threads use as well
            raise OverrunError(f"took more than {seconds:g} s")

    handler = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds / 4, seconds / 4)
    bound = _bound_memory()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        if bound is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, bound)


def _bound_memory() -> tuple[int, int] | None:
    """Bound the memory of the process; return the bound from before, or None where nothing was changed."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + _MEMORY
        if any(0 <= bound < limit for bound in (soft, hard)):
            return None
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):  # no Linux
        return None
    return before
