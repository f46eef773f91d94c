"""Tests that need a GPU: marked, skipped with a reason without one, and with a table of what they measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.cases import Measured

HERE = Path(__file__).parent
_rows: list[tuple[str, Measured, int | None]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; `@pytest.mark.parametrize` and the like stay as they are."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            wanted = 2 if item.path.stem == "test_two_gpus" else 1
            if gpus < wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {gpus}"))


@pytest.fixture
def measured() -> Callable[..., None]:
    """measured(name, Measured, predicted bytes or None): a line of the table at the end."""

    def note(name: str, line: Measured, predicted: int | None = None) -> None:
        _rows.append((name, line, predicted))

    return note


@pytest.fixture(autouse=True)
def _whole_gpu() -> Iterator[None]:
    """Give each test the whole memory of the GPU, and nothing that an earlier one left."""
    from msa_lite.io.models.devices import free_memory

    free_memory()
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    free_memory()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    if not _rows:
        return
    terminalreporter.write_sep("=", "memory and speed")
    terminalreporter.write_line(f"{'fit':<34}{'peak GB':>9}{'plan GB':>9}{'tokens/s':>10}  rows of a pass")
    for name, line, predicted in _rows:
        plan = f"{predicted / 1e9:9.2f}" if predicted else f"{'':>9}"
        speed = f"{line.tokens_per_second:10.0f}" if line.tokens_per_second else f"{'':>10}"
        terminalreporter.write_line(f"{name:<34}{line.peak / 1e9:9.2f}{plan}{speed}  {line.micro}")
