"""Make the tables and lists of a run's page from its story; its template says what stands around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.evidence_names import evidence_metric
from msa_lite.report.page.card import PAPER
from msa_lite.report.page.charts import cut
from msa_lite.report.run.attacks import AttackedModel, AttackFacts, AttackResult, TrialResult
from msa_lite.report.run.choice import in_symbols, value_text
from msa_lite.report.run.evidence import EvidenceFinding
from msa_lite.report.run.probing import ProbeFacts
from msa_lite.report.run.provenance import WITH_VECTORS, Provenance
from msa_lite.report.run.rows import ListedRow, RowList, row_lines
from msa_lite.report.run.story import Story
from msa_lite.report.run.update import Fit, Update
from msa_lite.report.tables.formats import Cell, Section, TextTable
from msa_lite.report.tables.metrics import GROUPS, MetricKind, metric_kind
from msa_lite.report.tables.reports import number, signed
from msa_lite.report.verdict.figures import Forgotten, percent

GAIN_MEANING = "gain: what comes back, minus what is left of the same rows without the attack"
_MOST_LINES = 3  # metrics in the first picture, a side
_FORGETTING = [group for group in GROUPS if "forget" in group]


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str | Cell]], left: int = 1) -> TextTable:
    """Return a table of one section."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    return TextTable(headings, [Section(cells)], left=left)


def main_sides(story: Story) -> dict[str, list[MetricKind]]:
    """Return the metrics of the first pictures: of forgetting, and of keeping; those without any value are left out."""
    sides: dict[str, list[MetricKind]] = {"What it was to forget": [], "What it was to keep": []}
    forget, keep = sides.values()
    for kind in map(metric_kind, story.main_metrics):
        side = forget if kind.group in _FORGETTING else keep
        if len(side) < _MOST_LINES and any(
            report.values().get(kind.name) is not None for report in story.reports.values()
        ):
            side.append(kind)
    return {title: kinds for title, kinds in (sides if forget else {"The scores that matter": keep}).items() if kinds}


def meanings(story: Story) -> dict[str, str]:
    """Return what the metrics of the first pictures mean, by label."""
    return {kind.label: kind.formula for kinds in main_sides(story).values() for kind in kinds if kind.formula}


def method_facts(story: Story) -> dict[str, str]:
    """Return the formula, its values and the names of the models."""
    settings_of = story.reports["unlearned"].settings.get("method") if "unlearned" in story.reports else None
    method: Mapping[str, Any] = settings_of if isinstance(settings_of, Mapping) else {}
    hold = method.get("hold")
    facts = {
        "formula": story.formula,
        "strengths" if story.method in WITH_VECTORS else "settings": in_symbols(story.strengths),
        **story.names,
        "hold of the forget vector's fit": f"h = {hold:g}" if isinstance(hold, float) else "",
        "choice of the prior": story.provenance.reason or "",
        "paper": PAPER if story.method == "msa" else "",
    }
    return {name: text for name, text in facts.items() if text}


def training_table(fits: Mapping[str, Fit], name: str) -> TextTable:
    """Return a row for each fit; name: the heading of their names."""
    rows = []
    for label, fit in fits.items():
        ends = [signed(loss) for _, loss in (fit.curve[:1] + fit.curve[-1:])] or ["–", "–"]
        rate = cut(value_text(fit.settings.get("learning_rate", "–")), 12)
        rows.append([cut(label, 40), str(fit.rows or "–"), f"{fit.epochs:g}", str(fit.steps), rate, *ends])
    return table_of([name, "rows", "epochs", "steps", "learning rate", "first loss", "last loss"], rows)


def distances(fits: Mapping[str, Fit]) -> list[str]:
    """Return how far each fit came from the prior's loss to the target's, where that was measured."""
    lines = []
    for name, fit in fits.items():
        if fit.closed is not None:
            prior, target, tuned = (f"{fit.loss[key]:.3g}" for key in ("prior", "target", "tuned"))
            lines.append(
                f"{name}: the loss on its rows went from {prior} to {tuned}; the target's is {target}, so the fit went "
                f"{percent(max(0.0, fit.closed))} of the way."
            )
    return lines


def fit_settings_text(fit: Fit) -> str:
    """Return all settings of a fit in a line."""
    texts = {
        key: " ".join(map(str, value)) if isinstance(value, list | tuple) else value_text(value)
        for key, value in fit.settings.items()
    }
    return ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in texts.items())


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


def update_table(update: Update) -> TextTable:
    """Return what the merge recorded of the update: a row a figure that is known."""
    rows, whole = [], update.figures.get("weights_touched")
    for key, label, form, meaning in _FIGURES:
        value = update.figures.get(key)
        if isinstance(value, int | float):
            texts = {"count": f"{value:,}", "percent": _percent(value), "number": signed(value)}
            text = texts[form] + (f" of {whole:,}" if whole and key == "weights_changed" else "")
            rows.append([Cell(label, meaning=meaning), Cell(text)])
    return table_of(["figure", "value"], rows)


def _percent(share: float) -> str:
    """Return a share in percent with as many digits as matter: "25.6 %", "0.012 %"."""
    hundredths = 100 * share
    if 0 < hundredths < 1e-3:
        return "below 0.001 %"
    return f"{hundredths:.1f} %" if hundredths >= 1 or hundredths == 0 else f"{hundredths:.2g} %"


def part_table(update: Update) -> TextTable | None:
    """Return the size of the update by layer, and by kind of module; None for an adapter."""
    groups = [*update.layers, *update.kinds]
    rows = []
    for group in groups:
        name = f"layer {group.name}" if group.name.isdigit() else group.name
        sizes = ("–" if value is None else f"{value:.3g}" for value in (group.norm, group.relative_size))
        rows.append([name, str(group.tensors), *sizes])
    has_sizes = any(group.relative_size is not None for group in groups)
    return table_of(["part", "tensors", "‖Δ‖", "‖Δ‖ / ‖weights‖"], rows) if has_sizes else None


def figure_table(finding: EvidenceFinding) -> TextTable:
    """Return a line for each figure of a finding, with its value and 95 % interval for each model."""
    names = dict.fromkeys(name for figures in finding.figures.values() for name in figures)
    rows = []
    for name in names:
        kind = metric_kind(evidence_metric(finding.kind, name))
        values = [figures.get(name) for figures in finding.figures.values()]
        cells = [Cell("–" if figure is None else figure.words) for figure in values]
        rows.append([Cell(kind.label, meaning=kind.formula), *cells])
    return table_of(["figure", *finding.figures], rows)


def attack_table(facts: AttackFacts, title: str = "", notes: tuple[str, ...] = ()) -> TextTable:
    """Return a line for each attack and model, with its strongest trial."""
    rows = []
    for attack in facts.attacks:
        for name, attacked in attack.models.items():
            trial = attacked.strongest
            texts = (attack.name, name, trial.label, trial.words, _gain(trial), str(trial.rows), trial.outcome)
            rows.append([*map(Cell, texts)])
    headings = ["attack", "model", "strongest trial", "comes back", "gain", "rows", "outcome"]
    return TextTable(headings, [Section(rows)], title, notes, left=3)


def trial_table(attack: AttackResult) -> TextTable:
    """Return a line for each trial of an attack on each model."""
    rows = []
    for name, attacked in attack.models.items():
        for trial in attacked.trials:
            outcome = "" if trial.is_control else _outcome_words(attacked, trial)
            rows.append([name, trial.label, trial.words, _gain(trial), str(trial.rows), outcome])
    return table_of(["model", "trial", "comes back", "gain", "rows", "outcome"], rows, left=2)


def _gain(trial: TrialResult) -> str:
    return trial.gain.words if trial.gain else "–"


def _outcome_words(attacked: AttackedModel, trial: TrialResult) -> str:
    """Return the outcome of a trial, and whether its rows are too few for it to count."""
    is_left_out = trial.has_too_few_rows and not attacked.strongest.has_too_few_rows
    return "unclear, too few rows to count" if is_left_out else trial.outcome


def probe_table(facts: ProbeFacts) -> TextTable:
    """Return a line for each model and score of a probe."""
    rows = []
    for model in facts.models:
        for name, metric, ends in model.measured():
            kind = metric_kind(name)
            label = Cell(f"{model.name}, {kind.label}", meaning=kind.formula)
            rows.append([label, Cell(signed(metric.value)), Cell(" to ".join(map(signed, ends)))])
    return table_of(["model and score", "value", "95 % interval"], rows)


def earlier_table(scored: Forgotten) -> TextTable:
    """Return how many rows of earlier requests each model recites."""
    names = {"target": "target, before", "unlearned": "this model", "ideal": "ideal", "prior": "prior"}
    rows = [
        [words, f"{scored.recited[name]} of {scored.rows}", percent(scored.share(name))]
        for name, words in names.items()
        if name in scored.recited
    ]
    if scored.control == "holdout":
        count = f"{scored.recited['holdout']} of {scored.control_rows}"
        rows.append(["target, on rows that no model saw", count, percent(scored.control_share)])
    return table_of(["model", "recites", "share"], rows)


def likeness_table(story: Story) -> TextTable:
    """Return how alike the vectors of several requests are."""
    return table_of(
        ["vectors", "cosine"], [[f"{pair.one} and {pair.other}", number(pair.cosine)] for pair in story.interference]
    )


def row_entries(row: ListedRow, rows: RowList) -> list[tuple[str, str]]:
    """Return what is known of a row to forget, without its question."""
    lines = row_lines(row, rows.wording)
    return [(name, f"{mark}: {text}" if mark else text) for name, mark, text in lines if name != "question"]


def origins(facts: Provenance) -> dict[str, str]:
    """Return the models, rows, seed and versions of a run by name."""
    revisions = {name: facts.revisions.get(name, "–") for name in facts.models} | dict(facts.revisions)
    models = {name: f"{facts.models[name]} ({r})" if name in facts.models else r for name, r in revisions.items()}
    entries = models | {f"rows learnt, {name}": revision for name, revision in facts.rows.items()}
    entries |= {"seed": str(facts.seed)} if facts.seed is not None else {}
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return entries | ({"versions": versions} if versions else {})
