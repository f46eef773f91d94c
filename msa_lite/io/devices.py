"""Look at the GPU before any work: is it used, does it answer, and how much of it do other processes hold?"""

from __future__ import annotations

import logging
import os
import shutil
from functools import cache
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.io.memory import avoid_fragments

logger = logging.getLogger(__name__)

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
