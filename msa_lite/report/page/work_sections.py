"""The sections on what a run did: how its vectors were trained, how the weights changed, the earlier requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msa_lite.io.files.writing import json_form
from msa_lite.report.page.blocks import Block, Entries, Fold, Grid, Items, Pictures, Prose, ReportSection
from msa_lite.report.page.charts import cut, loss_chart
from msa_lite.report.run.choice import in_symbols, value_text
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.report.run.story import Story
from msa_lite.report.run.update import GroupUpdate, Update
from msa_lite.report.tables.formats import Cell, Section, TextTable
from msa_lite.report.tables.reports import number, signed
from msa_lite.report.verdict.figures import percent


def training_section(story: Story) -> ReportSection:
    """Return how each vector, or each setting of a baseline, was trained."""
    values = {"fits": {name: {**asdict(fit), "closed": fit.closed} for name, fit in story.fits.items()}}
    if not story.fits:
        return ReportSection("training", "Training", (), values)
    is_vector = story.method in WITH_VECTORS
    rows, closed = [], []
    for name, fit in story.fits.items():
        ends = [signed(loss) for _, loss in (fit.curve[:1] + fit.curve[-1:])] or ["–", "–"]
        rate = value_text(fit.settings.get("learning_rate", "–"))
        count = "–" if fit.rows is None else str(fit.rows)
        rows.append([*map(Cell, (cut(name, 40), count, f"{fit.epochs:g}", str(fit.steps), cut(rate, 12), *ends))])
        if fit.closed is not None:
            prior, target, tuned = (f"{fit.loss[key]:.3g}" for key in ("prior", "target", "tuned"))
            closed.append(
                f"{name}: the loss on its rows went from {prior} to {tuned}; the target's is {target}, so the fit went "
                f"{percent(max(0.0, fit.closed))} of the way."
            )
    headings = [
        "vector" if is_vector else "setting",
        "rows",
        "epochs",
        "steps",
        "learning rate",
        "first loss",
        "last loss",
    ]
    opening = (
        "Each vector is the result of a short training run. Its loss should fall and then level off: the model has "
        "learnt its rows."
        if is_vector
        else "The baseline trained the model with an objective of its own, and the curve shows the loss by it."
    )
    settings = {
        name: ", ".join(f"{key.replace('_', ' ')} {_setting(value)}" for key, value in fit.settings.items())
        for name, fit in story.fits.items()
    }
    blocks: list[Block] = [
        Prose(opening),
        Pictures({"": lambda: loss_chart(story.fits)}),
        Grid(TextTable(headings, [Section(rows)]), "Settings of the training"),
        *([Items(closed)] if closed else []),
        Fold("All settings of the training", [Entries(settings)], on_paper=True),
    ]
    return ReportSection("training", "Training", blocks, values)


def _setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value_text(value)


def update_section(story: Story) -> ReportSection:
    """Return how the weights changed, and how much of the change the stored numbers hold."""
    title, update = "What changed in the model", story.update
    if update is None:
        return ReportSection("update", title, (), {"update": None})
    blocks: list[Block] = [
        Prose(
            "The update changes stored numbers, the weights. The table says how large it is and how exactly the "
            f"{update.form} holds it."
        )
    ]
    if rows := _figures(update):
        blocks.append(Grid(TextTable(["figure", "value"], [Section(rows)]), "Figures of the update", "stack one wide"))
    groups = [*update.by_layer(), *update.by_kind()]
    if any(group.relative_size is not None for group in groups):
        table = TextTable(["part", "tensors", "‖Δ‖", "‖Δ‖ / ‖weights‖"], [Section(list(map(_group_row, groups)))])
        blocks.append(Fold("The update by layer, and by kind of module", [Grid(table, "Parts of the update")]))
    values = {
        "form": update.form,
        "figures": dict(update.figures),
        "notes": list(update.notes),
        "layers": json_form(update.by_layer()),
        "kinds": json_form(update.by_kind()),
        "tensors": json_form(update.tensors),
    }
    return ReportSection("update", title, blocks, {"update": values})


def _group_row(group: GroupUpdate) -> list[Cell]:
    sizes = ("–" if value is None else f"{value:.3g}" for value in (group.norm, group.relative_size))
    name = f"layer {group.name}" if group.name.isdigit() else group.name
    return [*map(Cell, (name, str(group.tensors), *sizes))]


def _percent(share: float | None) -> str:
    """Return a share in percent with as many digits as matter: "25.6 %", "0.012 %"."""
    if share is None:
        return "–"
    hundredths = 100 * share
    if 0 < hundredths < 1e-3:
        return "below 0.001 %"
    return f"{hundredths:.1f} %" if hundredths >= 1 or hundredths == 0 else f"{hundredths:.2g} %"


_FIGURES = (
    ("weights_changed", "Weights changed", "count", "The number of stored numbers that differ from the target's."),
    ("tensors_touched", "Tensors touched", "count", "The weight matrices that the update reaches."),
    ("modules", "Modules", "count", "The weight matrices that the adapter reaches."),
    ("rank", "Rank of the adapter", "count", "Higher ranks hold more detail and take more space."),
    (
        "relative_size", "Size of the update", "percent",
        "Its norm as a share of the norm of the weights that it changes.",
    ),
    (
        "rounding_loss", "Lost by rounding", "percent",
        "The share of the update that the stored number format could not hold. Above 10 % is a concern.",
    ),
    (
        "truncation_loss", "Lost by truncation", "percent",
        "The share of the update that the adapter's rank could not hold.",
    ),
    (
        "update_cosine", "Direction kept", "number",
        "The cosine between the wanted and the stored update. 1: exactly the wanted direction.",
    ),
    (
        "vector_cosine", "Forget against retain vector", "number",
        "The cosine between the two vectors. 0: they do not touch; near 1: forgetting and keeping pull the same way.",
    ),
)  # fmt: skip


def _figures(update: Update) -> list[list[Cell]]:
    """Return what the merge recorded of the update: a row a figure that is known."""
    rows, whole = [], update.figures.get("weights_touched")
    for key, label, form, meaning in _FIGURES:
        value = update.figures.get(key)
        if isinstance(value, int | float):
            texts = {"count": f"{value:,}", "percent": _percent(value), "number": signed(value)}
            text = texts[form] + (f" of {whole:,}" if whole and key == "weights_changed" else "")
            rows.append([Cell(label, meaning=meaning), Cell(text)])
    return rows


def interference_section(story: Story) -> ReportSection:
    """Return the earlier requests in the same merge, and how alike the vectors are."""
    blocks: list[Block] = []
    if story.earlier or story.interference:
        blocks.append(
            Prose(
                "Several requests were removed from the same target, in one merge of all their vectors. A vector that "
                "several requests share counts once, with the sum of its strengths."
            )
        )
    if story.earlier:
        blocks.append(Entries({run: in_symbols(strengths) for run, strengths in story.earlier.items()}))
    if story.interference:
        blocks.append(Prose("How alike two vectors are: with a cosine near 0, one request does not disturb another."))
        rows = [[Cell(f"{pair.one} and {pair.other}"), Cell(number(pair.cosine))] for pair in story.interference]
        table = TextTable(["vectors", "cosine"], [Section(rows)])
        blocks.append(Grid(table, "Interference of vectors", "stack wide"))
    values = {"earlier_rows": json_form(story.earlier_rows), "interference": json_form(story.interference)}
    return ReportSection("interference", "Earlier requests", [*_again(story), *blocks], values)


def _again(story: Story) -> list[Block]:
    """Return whether the rows of earlier requests stay forgotten."""
    facts = story.earlier_rows
    if facts is None:
        return []
    blocks: list[Block] = [Prose(facts.headline)]
    if scored := facts.scored:
        counts = {"target": "target, before", "unlearned": "this model", "ideal": "ideal", "prior": "prior"}
        rows = [
            [Cell(words), Cell(f"{scored.recited[name]} of {scored.rows}"), Cell(percent(scored.share(name)))]
            for name, words in counts.items()
            if name in scored.recited
        ]
        if scored.control == "holdout":
            count = f"{scored.recited['holdout']} of {scored.control_rows}"
            rows.append([Cell("target, on rows that no model saw"), Cell(count), Cell(percent(scored.control_share))])
        table = TextTable(["model", "recites", "share"], [Section(rows)])
        blocks.append(Grid(table, "Rows of earlier requests", "stack one wide"))
        blocks.append(Prose(f"{warning}." if (warning := facts.warning) else "No row comes back."))
    return [*blocks, Items([f"{note}." for note in facts.notes])] if facts.notes else blocks
