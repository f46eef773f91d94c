"""Show a plan as a table and a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from msa_lite.budget.plan import Plan, StagePlan, gigabytes
from msa_lite.io.progress import duration, readable
from msa_lite.report.formats import Cell, Section, TextTable

_COLUMNS = {
    "weights": ("weights", "adapters"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries", "cache"),
    "logits": ("logits",),
    "other": ("context", "process", "buffers", "gathered"),
}


def plan_table(plan: Plan) -> TextTable:
    """Return the memory of each stage, part by part, in GB."""
    has_measured = any(stage.measured for stage in plan.stages)
    headings = ["stage", "how", *_COLUMNS, "peak", *["measured"] * has_measured, "time"]
    rows = [_row(stage, stage is plan.peak, has_measured) for stage in plan.stages]
    title = f"GB at the peak of each stage, on {plan.device}"
    return TextTable(headings, [Section(rows)], title, plan.notes, left=2)


def _row(stage: StagePlan, bold: bool, has_measured: bool) -> list[Cell]:
    name = stage.name.removeprefix("the ")
    cells = [Cell(name, bold), Cell(stage.how)]
    for parts in _COLUMNS.values():
        size = sum(stage.need.parts.get(part, 0) for part in parts)
        cells.append(Cell(f"{size / 1e9:.1f}" if size else "–"))
    cells.append(Cell(f"{stage.need.nbytes / 1e9:.1f}", bold))
    if has_measured:
        cells.append(Cell(f"{stage.measured / 1e9:.1f}" if stage.measured else "–"))
    return [*cells, Cell(time_span(stage.seconds))]


def time_span(seconds: tuple[float, float] | None) -> str:
    """Return a shortest and a longest time in words; a question mark for None."""
    if seconds is None:
        return "?"
    low, high = (duration(value) for value in seconds)
    return low if low == high else f"{low} to {high}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines below the table: disk, time, price, changes and the verdict."""
    parts = ", ".join(f"{name} {readable(size)}" for name, size in plan.disk.items())
    yield f"disk:    {parts}; {readable(plan.free)} are free"
    yield f"time:    {time_span(plan.seconds)}"
    if plan.price:
        low, high = plan.price
        yield f"price:   {low:.2f} to {high:.2f}" if round(low, 2) != round(high, 2) else f"price:   {low:.2f}"
    for change in plan.remedies:
        yield f"change:  {' '.join(change.overrides)} → {gigabytes(change.peak)}{' (fits)' if change.fits else ''}"
    yield plan.verdict
