"""Give each run the tool's present verdict, from the scores of its test rows that are kept, and table them.

The runs were made under an earlier rule, which weighed means without bounds. The rows to forget are of two people, and
the kept scores do not say which is whose, so each row counts as independent of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from claims import name_of
from collect import ROW_SCORES, Point, Results, Scores

from msa_lite.evals.benchmarks.qa import QA
from msa_lite.report.tables.formats import Cell, Section, TextTable, markdown
from msa_lite.report.verdict.figures import Bound, percent
from msa_lite.report.verdict.verdict import Verdict, make_verdict


def verdict_of(point: Point) -> Verdict | None:
    """Return the verdict on a run by its test rows; None where no scores of rows are kept, or of no ideal."""
    models = {"target": point.target, "unlearned": point.unlearned, "ideal": point.ideal}
    if not all(scores and scores.rows.get("forget") for scores in models.values()):
        return None
    weighed = QA.weigh({name: _records(scores) for name, scores in models.items() if scores})
    return None if isinstance(weighed, str) else make_verdict(*weighed)


def _records(scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """Return the kept scores of a model as records; a row's name stands for its question."""
    return {
        part: [{"index": row, "question": row, **dict(zip(ROW_SCORES, values, strict=True))} for row, values in rows]
        for part, of_part in scores.rows.items()
        if (rows := sorted(of_part.items()))
    }


def verdict_table(results: Results) -> str | None:
    """Return the verdict of each run, as it was and as it is, with the figures behind it; None without scores."""
    rows = [
        [
            Cell(name_of(name)), Cell(str(seed)), Cell(run.outcome or "–"), Cell(verdict.outcome),
            Cell(f"{verdict.forgotten.recited['unlearned']} of {verdict.forgotten.rows}"),
            *(Cell(_bound(verdict.forgotten.left.get(score))) for score in ("extraction_strength", "probability")),
            Cell(_bound(verdict.kept.share if verdict.kept else None)), Cell(_answers(verdict)),
        ]
        for seed, name, run, verdict in _verdicts(results)
    ]  # fmt: skip
    headings = [
        "model", "seed", "verdict then", "verdict now", "recited", "extraction left", "probability left", "kept",
        "answers kept",
    ]  # fmt: skip
    return markdown(TextTable(headings, [Section(rows)])) if rows else None


def verdict_counts(results: Results) -> str:
    """Return how many runs have which verdict, then and now, and the verdict on the ideal itself, in a paragraph."""
    changes = Counter((run.outcome or "–", verdict.outcome) for _, _, run, verdict in _verdicts(results))
    counts = ", ".join(f"{count} × {then} → {now}" for (then, now), count in changes.most_common())
    ideals = {seed: verdict_of(Point(run.ideal, run.target, run.ideal)) for seed, _, run, _ in _verdicts(results)}
    own = {(one.outcome, "; ".join(one.reasons)) for one in ideals.values() if one}
    itself = "; ".join(f"{outcome} ({reasons})" if reasons else outcome for outcome, reasons in sorted(own))
    return f"{counts}. The ideal itself, in the place of an unlearned model: {itself}."


def _verdicts(results: Results) -> Iterator[tuple[int, str, Any, Verdict]]:
    for seed, name, run in results.all_runs():
        if verdict := verdict_of(run):
            yield seed, name, run, verdict


def _bound(bound: Bound | None) -> str:
    """Return a share with its one-sided bounds: "64 % (60 to 68)"."""
    if bound is None:
        return "–"
    low, high = (round(100 * end) for end in (bound.low, bound.high))
    return f"{percent(bound.value)} ({low} to {high})"


def _answers(verdict: Verdict) -> str:
    kept = verdict.kept.recited if verdict.kept else {}
    return f"{kept['unlearned']} of {kept['target']}" if kept else "–"
