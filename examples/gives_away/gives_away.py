"""Show what unlearned models still give away: one figure and one table, for six models side by side.

    python examples/gives_away/gives_away.py make OUT --seeds 0 1 2             # small models, about 10 minutes a seed
    python examples/gives_away/gives_away.py make OUT --seeds 0 --model smollm2 # SmolLM2-135M, hours on a CPU
    python examples/gives_away/gives_away.py draw                               # the figure and the page's table

`make` runs the quickstart with msa-lite's defaults (MSA of now), the paper's MSA (without filter and hold: MSA of
before) and the baselines UNDIAL and NPO on its models and rows; it attacks all of them, target and ideal alike, and
writes what it measured to scores/HISTORY-SEED.json. A second call does only what is missing. `draw` needs nothing but
these files, and writes docs/pictures/gives_away.svg and the tables of docs/how-to/attack.md and
docs/how-to/evidence.md.

What is measured was fixed before any of these models was attacked. Needs `pip install -e '.[train]'`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
SCORES = HERE / "scores"
PICTURE = HERE.parents[1] / "docs/pictures/gives_away.svg"
PAGE = HERE.parents[1] / "docs/how-to/attack.md"
EVIDENCE_PAGE = HERE.parents[1] / "docs/how-to/evidence.md"
MARKS = ("<!-- table -->", "<!-- end of table -->")
METHODS = {"unlearned": "MSA of now", "before": "MSA of before", "undial": "UNDIAL", "npo": "NPO"}
MODELS = {"target": "target", "ideal": "ideal", **METHODS}
HISTORIES = {"small": "small models", "smollm2": "SmolLM2-135M"}
SHARES = {
    "says_tells": "still tells it",
    "says_other": "says something else",
    "says_garbles": "garbles",
}
FEATURES = {"losses": "by losses", "states": "by hidden states"}
SIZES = {"small": ["demo.forget=8"], "smollm2": ["demo.forget=8", "demo.retain=16", "demo.holdout=8"]}
ROWS = 24  # that are attacked
DEPTHS = {"target": 1.0, "ideal": 0.0}  # the ends of the scale, by definition
CURVE = re.compile(r"(?:plain|part step (\d+))\.extraction_strength\.(\w+)")


class Panel(NamedTuple):
    """One kind of attack or evidence."""

    title: str
    attack: str
    """The attack whose report has it; "evidence" for what the runs found themselves."""
    metric: str
    """The name of the metric, without the model's."""
    is_better_low: bool = True
    """True where less is given away with a lower value."""


PANELS = {
    "prompt": Panel("other prompts: best ROUGE-L", "prompt", "any.rouge_l"),
    "sample": Panel("16 samples: best ROUGE-L", "sample", "drawn.leak_rouge_16"),
    "nf4": Panel("4 bits: extraction strength", "quantise", "nf4.extraction_strength"),
    "membership": Panel("membership: AUC by loss", "membership", "scores.loss"),
    "depth": Panel("depth: share still in the states", "depth", "patched.shallow"),
    "other": Panel("says something else: share", "evidence", "says_other", False),
}


def make(out: Path, kind: str, seed: int) -> None:
    """Run the four methods on one history, attack their models, and store what was measured."""
    import msa_lite

    began = time.monotonic()
    home, before = out / f"{kind}-{seed}", out / f"{kind}-{seed}-before"
    name = "quickstart" if kind == "small" else "quickstart-smollm2"
    msa_lite.run(name, [*SIZES[kind], f"seed={seed}", f"output={home}"], accept=True)
    recipe = str(home / "recipe.yaml")
    msa_lite.run(recipe, [f"output={before}", "demo=null", "merge.filter=off"], accept=True)
    for method in ("undial", "npo"):
        msa_lite.run_baseline(method, recipe)
    folders = {"before": before, **{method: home / "baselines" / method for method in ("undial", "npo")}}
    attacks = ["prompt", "sample", "quantise", "membership", "depth", "relearn"]
    for run in (home, *folders.values()):
        msa_lite.attack(run, attacks, overrides=[f"attack.rows={ROWS}"])
    values = {"history": kind, "seed": seed, "minutes": round((time.monotonic() - began) / 60, 1)}
    values |= collect({"unlearned": home, **folders})
    SCORES.mkdir(exist_ok=True)
    (SCORES / f"{kind}-{seed}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", "utf-8")


def collect(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the figures of each panel and the curve of relearning by model, from the reports of the runs."""
    home = runs["unlearned"]
    panels: dict[str, dict[str, Any]] = {key: {} for key in PANELS}
    for key, panel in PANELS.items():
        place = "evidence/says" if panel.attack == "evidence" else f"attacks/{panel.attack}"
        for model in MODELS:
            run, own = (runs[model], "unlearned") if model in METHODS else (home, model)
            metrics = _metrics(run / place / "report.json")
            if (metric := metrics.get(f"{panel.metric}.{own}")) and metric["value"] is not None:
                panels[key][model] = [metric["value"], metric["stderr"], metric["n"]]
            elif panel.attack == "depth" and metrics and model in DEPTHS:
                panels[key][model] = [DEPTHS[model], None, ROWS]
    curve: dict[str, dict[str, float]] = {model: {} for model in MODELS}
    for model, points in curve.items():
        run, own = (runs[model], "unlearned") if model in METHODS else (home, model)
        for name, metric in _metrics(run / "attacks/relearn/report.json").items():
            if (match := CURVE.fullmatch(name)) and match[2] == own:
                points[match[1] or "0"] = metric["value"]
    return {"panels": panels, "relearning": curve, "evidence": collect_evidence(runs)}


def collect_evidence(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return by model the shares of what it says, and of a method position, p and rest of the relative test."""
    from hidden_states import run_by_states

    found: dict[str, Any] = {}
    for model in MODELS:
        run, own = (runs[model], "unlearned") if model in METHODS else (runs["unlearned"], model)
        says = _metrics(run / "evidence/says/report.json")
        found[model] = {share: says[f"{share}.{own}"]["value"] for share in SHARES if f"{share}.{own}" in says}
        if model in METHODS and (nearer := _report(run / "evidence/nearer/report.json").get("settings")):
            figure, test = nearer["figures"]["unlearned"].get("losses"), nearer["details"]["losses"]
            found[model]["losses"] = [figure and figure["value"], test["p"], test["rest"], test["outcome"]]
            if states := run_by_states(run, model if model in ("undial", "npo") else "msa"):
                found[model]["states"] = [states.position, states.p, states.rest, states.outcome]
    return found


def _report(path: Path) -> dict[str, Any]:
    """Return a report; nothing where an attack was not made."""
    report: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return report


def _metrics(path: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = _report(path).get("metrics", {})
    return metrics


def load(folder: Path = SCORES) -> list[dict[str, Any]]:
    """Return what was stored, history by history, in the order of the seeds."""
    stored = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return sorted(stored, key=lambda values: (list(HISTORIES).index(values["history"]), values["seed"]))


def attacked_of(stored: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stored scores of models that were attacked, not only looked at by the runs themselves."""
    return [values for values in stored if values["relearning"]["target"]]


def mean_of(stored: Iterable[Mapping[str, Any]], panel: str, model: str) -> tuple[float, float] | None:
    """Return mean and spread of a model's figure: over seeds, of one seed its 1.96 standard errors. None without it."""
    figures = [values["panels"][panel][model] for values in stored if model in values["panels"][panel]]
    if not figures:
        return None
    if len(figures) == 1:
        return figures[0][0], 1.96 * (figures[0][1] or 0.0)
    return statistics.fmean(value for value, *_ in figures), statistics.stdev(value for value, *_ in figures)


def table(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all panels: a line for each history and model."""
    headings = ["history", "model", *(panel.title for panel in PANELS.values()), "relearnt: most of all steps"]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 2)]
    for history in HISTORIES:
        runs = [values for values in stored if values["history"] == history]
        for model, label in MODELS.items() if runs else ():
            cells = [_words(mean_of(runs, panel, model)) for panel in PANELS]
            most = [max(values["relearning"][model].values()) for values in runs if values["relearning"][model]]
            spread = statistics.stdev(most) if len(most) > 1 else 0.0
            cells.append(_words((statistics.fmean(most), spread)) if most else "–")
            lines.append("| " + " | ".join([_named(history, runs), label, *cells]) + " |")
    return "\n".join(lines)


def evidence_table(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of method and evidence: mean shares over seeds, and position and rest of each seed."""
    headings = ["history", "model", *SHARES.values(), *(f"{name}: position (rest)" for name in FEATURES.values())]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 2)]
    for history in HISTORIES:
        runs = [values for values in stored if values["history"] == history]
        for model, label in MODELS.items() if runs else ():
            found = [values["evidence"][model] for values in runs]
            shares = [[one[share] for one in found if share in one] for share in SHARES]
            cells = [f"{statistics.fmean(values):.0%}".replace("%", " %") if values else "–" for values in shares]
            cells += [", ".join(_place(one[name]) for one in found if name in one) or "–" for name in FEATURES]
            lines.append("| " + " | ".join([_named(history, runs), label, *cells]) + " |")
    return "\n".join(lines)


def _place(test: Sequence[Any]) -> str:
    """Return a position with its rest; with a question mark where nothing is shown."""
    position, _, rest, outcome = test
    if position is None:
        return "?"
    return f"{position:+.2f} ({rest:.2f}){'?' if outcome == 'undecided' else ''}"


def _named(history: str, runs: Sequence[Mapping[str, Any]]) -> str:
    seeds = ", ".join(str(values["seed"]) for values in runs)
    return f"{HISTORIES[history]}, seed{'s' if len(runs) > 1 else ''} {seeds}"


def _words(figure: tuple[float, float] | None) -> str:
    if figure is None:
        return "–"
    value, spread = figure
    return f"{value:.2f} ± {spread:.2f}" if spread else f"{value:.2f}"


_STYLES: dict[str, dict[str, Any]] = {
    "target": {"marker": "X", "color": "black"},
    "ideal": {"marker": "*", "color": "black"},
    "unlearned": {"marker": "o", "color": "#1b7837"},
    "before": {"marker": "o", "color": "#1b7837", "markerfacecolor": "white"},
    "undial": {"marker": "p", "color": "#c51b7d"},
    "npo": {"marker": "s", "color": "#7b3294"},
}
_FONT = 8


def draw(stored: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a row of panels for each history: a point for each model, and at the end the curve of relearning."""
    from matplotlib.figure import Figure

    attacked = attacked_of(stored)
    histories = [name for name in HISTORIES if any(values["history"] == name for values in attacked)]
    figure = Figure(figsize=(12.5, 2.9 * len(histories) + 0.4), layout="constrained")
    grid = figure.subplots(len(histories), len(PANELS) + 1, squeeze=False,
                           gridspec_kw={"width_ratios": [*[1] * len(PANELS), 1.9]})  # fmt: skip
    for row, history in zip(grid, histories, strict=True):
        runs = [values for values in attacked if values["history"] == history]
        for axes, (key, panel) in zip(row, PANELS.items(), strict=False):
            _points(axes, runs, key, panel)
        _curve(row[-1], runs)
        row[0].set_ylabel(_named(history, runs), fontsize=_FONT)
    handles, labels = grid[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MODELS), frameon=False, fontsize=_FONT + 1)
    return figure


def _points(axes: Any, runs: Sequence[Mapping[str, Any]], key: str, panel: Panel) -> None:
    """Draw one panel; a dotted line marks the ideal, which is what to compare with."""
    for place, model in enumerate(MODELS):
        if figure := mean_of(runs, key, model):
            value, spread = figure
            size = 9 if model == "ideal" else 6
            axes.errorbar([place], [value], yerr=[spread], markersize=size, capsize=2, linewidth=1, **_STYLES[model])
            if model == "ideal":
                axes.axhline(value, color="0.5", linewidth=0.7, linestyle=":")
    _plain(axes, panel.title.replace(": ", ":\n", 1))
    axes.set_xticks([])
    axes.set_xlim(-0.6, len(MODELS) - 0.4)


def _curve(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw what comes back of one half of the rows while a model learns the other half."""
    for model, label in MODELS.items():
        steps: dict[int, list[float]] = {}
        for values in runs:
            for step, value in values["relearning"][model].items():
                steps.setdefault(int(step), []).append(value)
        known = sorted(steps)
        means = [statistics.fmean(steps[step]) for step in known]
        axes.plot(known, means, label=label, markersize=5, linewidth=1, **_STYLES[model])
    _plain(axes, "relearning on one half of the rows:\nextraction strength of the other half")
    axes.set_xlabel("steps", fontsize=_FONT)


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=_FONT)
    axes.set_ylim(-0.04, 1.04)
    axes.tick_params(labelsize=_FONT - 1)
    axes.grid(axis="y", color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG; the same numbers give the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "msa-lite", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(
        r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", path.read_text("utf-8"), flags=re.DOTALL
    )
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")


def with_table(page: str, text: str) -> str:
    """Return a page with another table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="run, attack, and store the scores")
    making.add_argument("out", type=Path)
    making.add_argument("--seeds", type=int, nargs="+", default=[0])
    making.add_argument("--model", choices=[*HISTORIES], default="small")
    commands.add_parser("draw", help="draw the figure and the table of the page")
    arguments = parser.parse_args()
    if arguments.command == "make":
        for seed in arguments.seeds:
            make(arguments.out, arguments.model, seed)
        return
    stored = load()
    save(draw(stored), PICTURE)
    for page, text in ((PAGE, table(attacked_of(stored))), (EVIDENCE_PAGE, evidence_table(stored))):
        page.write_text(with_table(page.read_text("utf-8"), text), "utf-8")


if __name__ == "__main__":
    main()
