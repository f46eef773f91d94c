"""The pictures of a choice: drawn with it, or afterwards where matplotlib was not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from msa_lite.choose.pictures import FORGET_RETAIN_FILE, HEAT_MAP_FILE, can_draw, write_pictures
from msa_lite.choose.table import Sweep
from msa_lite.io.seal import add_files, load_manifest

logger = logging.getLogger(__name__)

DRAWN = "pictures"  # in a sweep's manifest: whether there are all that it has anything to draw for


def draw_pictures(sweep: Sweep, folder: Path) -> bool:
    """Draw a sweep into its folder; return whether that could be done, with a warning where it could not."""
    if not can_draw():
        logger.warning("no pictures of the sweep: pip install matplotlib, and the next run draws them")
        return False
    write_pictures(sweep, folder)
    return True


def draw_missing(out: Path, load: Callable[[Path], Sweep]) -> None:
    """Draw a finished sweep that was made without matplotlib, and enter the pictures into its manifest."""
    manifest = load_manifest(out) or {}
    there = not {HEAT_MAP_FILE, FORGET_RETAIN_FILE}.isdisjoint(manifest["files"])
    if not manifest.get(DRAWN, there) and draw_pictures(load(out), out):
        files = [name for name in (HEAT_MAP_FILE, FORGET_RETAIN_FILE) if (out / name).is_file()]
        add_files(out, files, {DRAWN: True})
