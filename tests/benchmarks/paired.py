"""Sides of a comparison that take turns, each in a fresh process: what all benchmarks here share.

A script calls itself with `--side NAME`; that process measures itself with `Meter` and prints a line of JSON. CPU
seconds, user and system, are disturbed less by other processes than wall seconds are. Peak is the most memory that the
process held from the meter's start (VmHWM; Linux only), Python and torch included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each side measured in each round."""


class Meter:
    """What this process uses from here on: {"wall", "cpu"} in seconds, {"peak", "written"} in MB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        written = int(Path("/proc/self/io").read_text().partition("wchar:")[2].split()[0])
        return time.perf_counter(), used.ru_utime + used.ru_stime, written / 1e6

    def read(self) -> dict[str, float]:
        """Return the figures so far."""
        figures = zip(("wall", "cpu", "written"), self._now(), self.before, strict=True)
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
        return {name: now - before for name, now, before in figures} | {"peak": peak}


def take_turns(sides: Sequence[str], rounds: int, words: Sequence[Any] = ()) -> dict[str, list[dict[str, Any]]]:
    """Run every side of this script in each round, the order turned round each time. Returns what they printed."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else [*sides][::-1]:
            command = [sys.executable, sys.argv[0], *sys.argv[1:], *words, "--side", side]
            done = subprocess.run([*map(str, command)], env=environment, stdout=subprocess.PIPE, text=True, check=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number}: {side}; load average {os.getloadavg()[0]:.2f}", file=sys.stderr, flush=True)
    return runs


def ratio(runs: Runs, side: str, reference: str, figure: str) -> float:
    """Return the median over rounds of a side's figure ÷ the reference's in the same round."""
    return median(own[figure] / other[figure] for own, other in zip(runs[side], runs[reference], strict=True))


def print_table(
    runs: Runs, reference: str, figure: str = "cpu", figures: Sequence[str] = ("wall", "cpu", "peak", "written")
) -> None:
    """Print medians, a line a side, and the ratio of one figure to the reference's."""
    print("| side | " + " | ".join(figures) + f" | {figure} ÷ {reference} |")
    print("|---|" + "---:|" * (len(figures) + 1))
    for side, results in runs.items():
        cells = [f"{median(result[name] for result in results):.4g}" for name in figures]
        print(f"| {side} | " + " | ".join(cells) + f" | {ratio(runs, side, reference, figure):.2f} |")


def machine() -> str:
    """Return the CPU's name, the cores and the load."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or "unknown CPU"
    return f"{cpu}, {os.cpu_count()} cores; load average {os.getloadavg()[0]:.2f}"
