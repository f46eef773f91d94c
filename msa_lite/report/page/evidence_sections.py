"""The sections that let a reader check a report: attacks, the probe, rows with answers, where it comes from."""

from __future__ import annotations

from typing import Any

from msa_lite.evidence_names import evidence_metric
from msa_lite.io.files.writing import json_form
from msa_lite.report.page.blocks import (
    Article,
    Block,
    Entries,
    Fold,
    Grid,
    Heading,
    Items,
    Listing,
    Prose,
    ReportSection,
)
from msa_lite.report.run.attacks import AttackedModel, AttackFacts, AttackResult, TrialResult
from msa_lite.report.run.evidence import EvidenceFinding
from msa_lite.report.run.rows import ListedRow, RowList, SideBySide, row_lines
from msa_lite.report.run.story import Story
from msa_lite.report.tables.formats import Cell, Section, TextTable
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import signed

GAIN_MEANING = "gain: what comes back, minus what is left of the same rows without the attack"
_CARE = "These texts are the data itself: hand them on with care."


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
            rows.append([*map(Cell, (name, trial.label, trial.words, _gain(trial), str(trial.rows), outcome))])
    return TextTable(["model", "trial", "comes back", "gain", "rows", "outcome"], [Section(rows)], left=2)


def _gain(trial: TrialResult) -> str:
    return trial.gain.words if trial.gain else "–"


def _outcome_words(attacked: AttackedModel, trial: TrialResult) -> str:
    """Return the outcome of a trial, and whether its rows are too few for it to count."""
    is_left_out = trial.has_too_few_rows and not attacked.strongest.has_too_few_rows
    return "unclear, too few rows to count" if is_left_out else trial.outcome


def attack_section(story: Story) -> ReportSection:
    """Return what attacks brought back, attack by attack, with the trials of each."""
    title, facts = "Does it stay forgotten?", story.attacks
    values = {"attacks": json_form(facts)}
    if facts is None:
        return ReportSection("attacks", title, (), values)
    models = " and the ideal" if facts.control == "ideal" else ""
    blocks: list[Block] = [
        Prose(
            "Somebody may try to get the rows back. The unlearned model was attacked in the same way as the target"
            f"{models}. What comes back is {facts.meaning}. {GAIN_MEANING.capitalize()}."
        ),
        *(Prose(facts.headline(name)) for name in facts.models),
        Grid(attack_table(facts), "Attacks"),
    ]
    for attack in facts.attacks:
        trials: list[Block] = [Prose(f"Source: {attack.source}.", small=True)]
        trials.append(Grid(trial_table(attack), f"Trials of {attack.name}", "wide"))
        for name, attacked in attack.models.items():
            if attacked.figures:
                figures = ", ".join(f"{key} {value:.3g}" for key, value in attacked.figures.items())
                trials.append(Prose(f"{name}: {figures}."))
        blocks.append(Fold(f"{attack.name}: {attack.summary}", trials))
    blocks += [Prose(f"Not made: {name}: {reason}.", small=True) for name, reason in facts.left_out.items()]
    return ReportSection("attacks", title, blocks, values)


def beside_section(story: Story) -> ReportSection:
    """Return the findings beside the scores: what it says instead, and what it is nearer to."""
    title, values = "Beside the scores", {"evidence": json_form(story.evidence)}
    blocks: list[Block] = []
    for finding in story.evidence:
        blocks += [Heading(finding.question), Prose(finding.sentence)]
        if finding.figures:
            blocks.append(Grid(figure_table(finding), finding.question))
        blocks.append(Prose(f"Source: {finding.source}.", small=True))
    return ReportSection("evidence", title, blocks, values)


def figure_table(finding: EvidenceFinding) -> TextTable:
    """Return a line for each figure of a finding, with its value and 95 % interval for each model."""
    names = dict.fromkeys(name for figures in finding.figures.values() for name in figures)
    rows = []
    for name in names:
        kind = metric_kind(evidence_metric(finding.kind, name))
        values = [figures.get(name) for figures in finding.figures.values()]
        cells = [Cell("–" if figure is None else figure.words) for figure in values]
        rows.append([Cell(kind.label, meaning=kind.formula), *cells])
    return TextTable(["figure", *finding.figures], [Section(rows)])


def probe_section(story: Story) -> ReportSection:
    """Return whether the prior, or another model, had seen the data before."""
    title, facts = "Had the prior seen the data?", story.probe
    values = {"probe": json_form(facts)}
    if facts is None:
        return ReportSection("probe", title, (), values)
    rows = []
    for model in facts.models:
        for name, metric in model.metrics.items():
            kind = metric_kind(name)
            ends = " to ".join(map(signed, model.intervals.get(name, ()))) or "–"
            label = Cell(f"{model.name}, {kind.label}", meaning=kind.formula)
            rows.append([label, Cell(signed(metric.value)), Cell(ends)])
    counts = " and ".join(f"{count} {name} rows" for name, count in facts.rows.items())
    blocks: list[Block] = [
        Prose(
            f"The method needs a prior that has not seen the forget set. This probe compares its loss on {counts}: 0.5 "
            "means that it cannot tell them apart, 1 that it knows every forget row better."
        ),
        Grid(TextTable(["model and score", "value", "95 % interval"], [Section(rows)]), "Probe", "stack one wide"),
        Items([f"{model.name}: {model.explanation}." for model in facts.models]),
    ]
    if not facts.thorough:
        blocks.append(Prose("This is the short probe of a run. `msa-lite probe` makes a thorough one.", True))
    return ReportSection("probe", title, blocks, values)


def example_section(story: Story) -> ReportSection:
    """Return a few questions with the models' answers; they are there only if somebody wants them."""
    values = {"examples": json_form(story.examples)}
    opening = Prose(f"Some questions side by side, answered by each model. {_CARE}")
    blocks = [opening, *map(_example, story.examples)] if story.examples else []
    return ReportSection("examples", "Questions and answers", blocks, values)


def _example(example: SideBySide) -> Article:
    answers = [(name, answer or "(nothing)") for name, answer in example.answers.items()]
    entries = [("set", example.set_name), ("expected", example.expected), *answers]
    return Article(example.question, entries)


def rows_section(story: Story) -> ReportSection:
    """Return every row to forget with the models' answers; they are there only if somebody wants them."""
    rows, values = story.forget_rows, {"forget_rows": json_form(story.forget_rows)}
    if rows is None:
        return ReportSection("rows", "The rows to forget", (), values)
    opening = Prose(" ".join([rows.headline, *rows.remarks, _CARE]))
    blocks = [opening, *(_row(row, rows) for row in rows.rows)]
    return ReportSection("rows", "The rows to forget", blocks, values)


def _row(row: ListedRow, rows: RowList) -> Article:
    lines = row_lines(row, rows.wording)
    entries = [(name, f"{mark}: {text}" if mark else text) for name, mark, text in lines if name != "question"]
    title = f"Row {row.index}: {row.question}" if row.question else f"Row {row.index}"
    return Article(title, entries)


def provenance_section(story: Story) -> ReportSection:
    """Return the models, data, hashes, versions and the recipe."""
    facts = story.provenance
    revisions = {name: facts.revisions.get(name, "–") for name in facts.models} | dict(facts.revisions)
    models = {name: f"{facts.models[name]} ({r})" if name in facts.models else r for name, r in revisions.items()}
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    entries = models | {f"rows learnt, {name}": revision for name, revision in facts.rows.items()}
    entries |= {"seed": str(facts.seed)} if facts.seed is not None else {}
    entries |= {"versions": versions} if versions else {}
    blocks: list[Block] = [
        Prose(
            "With these names, hashes and the recipe, somebody who has the same models and data can repeat the run and "
            "compare."
        ),
        Entries(entries, hashes=True),
    ]
    if facts.files:
        files = Entries({name: f"sha256:{value}" for name, value in facts.files.items()}, hashes=True)
        blocks.append(Fold("SHA-256 of the unlearned model's files", [files], on_paper=True))
    recipe = [Listing(facts.recipe, "yaml")]
    blocks.append(Fold("The recipe as the run resolved it, without empty keys", recipe, on_paper=True))
    values: dict[str, Any] = {key: value for key, value in json_form(facts).items() if key not in ("values", "given")}
    return ReportSection("provenance", "Where it comes from", blocks, {"provenance": values})


def limit_section(story: Story) -> ReportSection:
    """Return what the scores do not show."""
    blocks = [Prose("What these scores do not show:"), Items(story.limits)]
    return ReportSection("limits", "Limits", blocks, {"limits": list(story.limits)})
