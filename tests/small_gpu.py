"""A GPU that is too small for a model, played by the CPU: the layers stream, from the CPU to the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msa_lite.evals import models
from msa_lite.io.models.streaming import read_sizes


def set_small_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, layers: int = 1) -> None:
    """Leave room for so many layers of a model beside the one that passes through."""
    sizes = read_sizes(folder, torch.float32)
    assert sizes is not None
    room = sum(sizes.others.values()) + (layers + 1) * max(sizes.layers.values())
    monkeypatch.setattr(models, "free_bytes", lambda: int(room / 0.75) + 1)
