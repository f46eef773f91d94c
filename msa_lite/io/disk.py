"""A full disk, recognised in what libraries make of it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the system says, as safetensors (an error of Rust), pyarrow and others repeat it; and what torch's zip writer
# says, which drops the system's reason.
_SAID = re.compile(
    r"no space left on device|disk quota exceeded|file too large|(os error|errno) (28|122|27)\b"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.*(unexpected pos|write failed)",
    re.IGNORECASE,
)


def disk_fault(error: BaseException) -> str | None:
    """Return what was said where an error, or one it was raised from, means a full disk or quota; else None."""
    for part in _chain(error):
        if (isinstance(part, OSError) and part.errno in _FULL) or _SAID.search(str(part)):
            return " ".join(str(part).split())
    return None


def is_disk_full(error: BaseException) -> bool:
    """Check whether an error, or one that it was raised from, means that the disk or a quota is full."""
    return disk_fault(error) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
