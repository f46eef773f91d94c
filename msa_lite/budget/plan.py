"""The plan of a run: what each stage needs, whether it fits, what would make it fit; and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from msa_lite.budget.needs import Need
from msa_lite.budget.speed import Device
from msa_lite.io.console.progress import about, readable
from msa_lite.report.tables.formats import Cell, Section, TextTable, html_table

CHECKS = "the checks"  # the name of all checks of a run
MARGIN = 0.05  # the error of a prediction that a refusal allows for
_CERTAIN = ("weights", "adapters", "gradients", "optimizer")  # the parts that follow from headers alone


@dataclass(frozen=True)
class StageCost:
    """The needs of one stage."""

    json_keys: ClassVar = {
        "stage": "name", "kind": "kind", "on": "place", "how": "how", "memory": "need", "seconds": "seconds",
    }  # fmt: skip

    name: str
    """"the fit of the forget vector", "the sweep", …"""
    kind: str
    """"fit", "merge", "scores", "checks", …"""
    need: Need
    """Memory at the peak: of the host for a filter or merge, else of the device."""
    seconds: float | None = None
    """About how long it takes; None where the rows are not known."""
    how: str = ""
    """The way it runs at this peak: "4 rows at a time, with checkpointing"."""
    waiting: int = 0
    """Bytes of weights that stream from RAM, since the GPU is too small for all of them."""
    disk: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it writes, by what they hold."""
    while_running: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it writes and removes at its end."""
    place: Literal["device", "host"] = "device"
    """The place where it runs."""

    @property
    def on_device(self) -> bool:
        """Check whether its memory on the device counts: a check takes no more than scores, and is no reason against a
        run without any.
        """
        return self.place == "device" and self.name != CHECKS


def sum_seconds(*seconds: float | None) -> float | None:
    """Return the sum of times; None where one of them is not known."""
    known = [each for each in seconds if each is not None]
    return math.fsum(known) if len(known) == len(seconds) else None


def combine_costs(costs: Iterable[StageCost]) -> list[StageCost]:
    """Return the costs with those of one name as one: times and disk in sum, the highest need of memory."""
    combined: dict[str, StageCost] = {}
    for cost in costs:
        known = combined.setdefault(cost.name, cost)
        if known is not cost:
            largest = max(known, cost, key=lambda each: each.need.nbytes)
            disk = {key: known.disk.get(key, 0) + cost.disk.get(key, 0) for key in {**known.disk, **cost.disk}}
            combined[cost.name] = replace(largest, seconds=sum_seconds(known.seconds, cost.seconds), disk=disk)
    return list(combined.values())


def disk_of(costs: Iterable[StageCost]) -> dict[str, int]:
    """Return the bytes that stages write, by what they hold; of what is removed again, the most at a time."""
    disk: dict[str, int] = {}
    for cost in costs:
        for key, size in cost.disk.items():
            disk[key] = disk.get(key, 0) + size
        for key, size in cost.while_running.items():
            disk[key] = max(disk.get(key, 0), size)
    return disk


@dataclass(frozen=True)
class Remedy:
    """A change of the recipe, and what it makes of the peak."""

    overrides: tuple[str, ...]
    """As they are typed behind the recipe: "vector.mode=qlora"."""
    harm: str
    """The harm that it does."""
    peak: int
    """Bytes of the highest peak of all stages on the device."""
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a device."""

    json_keys: ClassVar = {
        "fits": "fits", "verdict": "verdict", "device": "device", "peak": "highest", "stages": "stages", "disk": "disk",
        "disk_free": "free", "host_memory": "host", "seconds": "seconds", "remedies": "remedies", "notes": "notes",
    }  # fmt: skip

    device: Device
    stages: Sequence[StageCost]
    """In the order in which they run."""
    host: int | None
    """Bytes of the host's memory, where they are known."""
    disk: Mapping[str, int]
    """Bytes that the run writes, by what they hold, and those it downloads."""
    free: int
    """Bytes that are free on the disk of the run's folder."""
    notes: Sequence[str] = ()
    """Remarks on figures that are rough or not known, one line each."""
    remedies: Sequence[Remedy] = field(default=())
    """Changes that lower the peak, by harm, if it does not fit."""

    @property
    def peak(self) -> StageCost:
        """Return the stage with the highest need of the device."""
        return max((stage for stage in self.stages if stage.on_device), key=lambda stage: stage.need.nbytes)

    @property
    def fits(self) -> bool:
        """Check whether all stages fit into the device's memory."""
        return self.peak.need.nbytes <= self.device.nbytes

    @property
    def is_hopeless(self) -> bool:
        """Check whether it cannot fit, whatever the error of a prediction and the parts that are known only roughly."""
        least = max((self._least(stage.need) for stage in self.stages if stage.on_device), default=0.0)
        return least > self.device.nbytes

    def _least(self, need: Need) -> float:
        """Return the bytes that a stage takes at least. On a CPU, activations may be swapped out."""
        is_known = need.rough is None and self.device.is_gpu
        return (1 - MARGIN) * (need.nbytes if is_known else sum(need.parts.get(part, 0) for part in _CERTAIN))

    @property
    def _highest(self) -> str:
        about = "about " if self.peak.need.rough else ""
        return f"peak {about}{gigabytes(self.peak.need.nbytes)} in {self.peak.name}"

    @property
    def verdict(self) -> str:
        """Return one line: does it fit, the highest peak, and the remedy that costs least if it does not."""
        answer = "yes" if self.fits else "no"
        line = f"Fits on {self.device}: {answer}, {self._highest}"
        return line if self.fits else f"{line}. {self._advice}"

    @property
    def refusal(self) -> str:
        """Return the same for a run that is not started."""
        return f"the run does not fit on {self.device}: {self._highest}. {self._advice}"

    @property
    def _advice(self) -> str:
        change = next((change for change in self.remedies if change.fits), None)
        if change is None:
            return "No change of the recipe makes it fit: take a larger GPU, or a smaller model"
        return f"What changes least and fits: {' '.join(change.overrides)} ({gigabytes(change.peak)}; {change.harm})"

    @property
    def seconds(self) -> float | None:
        """Return the time of all stages; None where one is not known."""
        return sum_seconds(*(stage.seconds for stage in self.stages))

    @property
    def highest(self) -> dict[str, Any]:
        """Return the stage with the highest need of the device, and its bytes."""
        return {"stage": self.peak.name, "bytes": self.peak.need.nbytes}

    def _repr_html_(self) -> str:
        return html_table(replace(plan_table(self), notes=[*plan_lines(self), *self.notes]))


def gigabytes(nbytes: float) -> str:
    """Return bytes as tables show them: "6.8 GB"."""
    return f"{nbytes / 1e9:.1f} GB"


_COLUMNS = {
    "weights": ("weights", "adapters", "reference"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries", "cache"),
    "logits": ("logits",),
    "other": ("context", "process", "buffers", "gathered", "masks"),
}


def plan_table(plan: Plan) -> TextTable:
    """Return the memory of each stage, part by part, in GB."""
    headings = ["stage", "how", *_COLUMNS, "peak", "time"]
    rows = [_row(stage, stage is plan.peak) for stage in plan.stages]
    title = f"GB at the peak of each stage, on {plan.device}"
    return TextTable(headings, [Section(rows)], title, plan.notes, left=2)


def _row(stage: StageCost, bold: bool) -> list[Cell]:
    name = stage.name.removeprefix("the ")
    cells = [Cell(name, bold), Cell(stage.how)]
    for parts in _COLUMNS.values():
        size = sum(stage.need.parts.get(part, 0) for part in parts)
        cells.append(Cell(f"{size / 1e9:.1f}" if size else "–"))
    return [*cells, Cell(f"{stage.need.nbytes / 1e9:.1f}", bold), Cell(about(stage.seconds))]


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines below the table: disk, time, changes and the verdict."""
    parts = ", ".join(f"{name} {readable(size)}" for name, size in plan.disk.items())
    yield f"disk:    {parts}; {readable(plan.free)} are free"
    yield f"time:    {about(plan.seconds)}"
    for change in plan.remedies:
        yield f"change:  {' '.join(change.overrides)} → {gigabytes(change.peak)}{' (fits)' if change.fits else ''}"
    yield plan.verdict
