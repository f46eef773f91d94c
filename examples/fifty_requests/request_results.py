"""Read what the runs say of each request, and write it down: a line for each, and RESULTS.md."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msa_lite

NAMES = {"msa": "MSA", "npo": "NPO, sequential", "grad_diff": "GradDiff, sequential"}
FILE = "requests.jsonl"
LAST = "last.json"
_CHOSEN = ("alpha", "beta", "filter", "epoch")
_WINDOW = 10  # requests that the first and the last figures are a mean of
_SPENT = 5  # requests in a row that keep nothing, after which a method ends
_COSTS = {"cpu_seconds": "CPU seconds", "peak_mb": "peak MB", "disk_mb": "disk MB"}


@dataclass(frozen=True)
class Request:
    """One request, as one method has handled it."""

    method: str
    number: int
    rows: int
    """Rows to forget."""
    recited: int
    """Rows of these that the new model recites."""
    earlier_scored: int
    """Rows of earlier requests that the run asked its models again."""
    earlier_recited: int
    """Rows of these that the new model recites."""
    earlier_ideal: int
    """Rows of these that the ideal recites, which saw none."""
    back: int
    """Rows of these that come back."""
    kept: float
    """The share of the rows to keep that the new model answers right."""
    kept_rouge: float
    """ROUGE-L recall on the rows to keep."""
    kept_rows: int
    """Rows to keep that were scored, without those that α, β or the epoch was chosen by."""
    seconds: float
    cpu_seconds: float
    peak_mb: float
    disk_mb: float
    strengths: dict[str, Any]
    """What was chosen: α, β and the filter's λ, or a baseline's epoch."""

    @property
    def line(self) -> str:
        """Return the request in a line."""
        return (
            f"{self.method} {self.number:2}: {self.recited} of {self.rows} recited, earlier {self.earlier_recited} of "
            f"{self.earlier_scored} ({self.back} came back), kept {self.kept:.3f}; {self.seconds:.1f} s "
            f"({self.cpu_seconds:.1f} s of CPU), {self.peak_mb:.0f} MB, {self.disk_mb:.1f} MB on disk"
        )


@dataclass(frozen=True)
class Last:
    """The last model of a method on the rows of all requests, which its reports ask a sample of."""

    recited: int
    rows: int


def read_request(folder: Path, method: str, number: int, rows: int, cost: Mapping[str, float]) -> Request:
    """Read a finished run. cost: as `run.Cost`."""
    report = json.loads((folder / "report.json").read_text("utf-8"))
    scores = json.loads((folder / "evaluation/unlearned/report.json").read_text("utf-8"))["metrics"]
    again = report["earlier_rows"] or {"scored": None, "back": {}}
    scored = again["scored"] or {"rows": 0, "recited": {}}
    return Request(
        method=method,
        number=number,
        rows=rows,
        recited=round(scores["accuracy_f"]["value"] * scores["accuracy_f"]["n"]),
        earlier_scored=scored["rows"],
        earlier_recited=scored["recited"].get("unlearned", 0),
        earlier_ideal=scored["recited"].get("ideal", 0),
        back=sum(again["back"].values()),
        kept=scores["accuracy_r"]["value"],
        kept_rouge=scores["rouge_l_r"]["value"],
        kept_rows=scores["accuracy_r"]["n"],
        strengths={key: value for key, value in report["strengths"].items() if key in _CHOSEN},
        **{key: round(value, 2) for key, value in cost.items()},
    )


def is_spent(handled: Sequence[Request]) -> bool:
    """Check whether the last models of a method keep nothing, so that there is nothing to go on with."""
    last = handled[-_SPENT:]
    return len(last) == _SPENT and not any(request.kept for request in last)


def score_all(model: Path, rows: Path, out: Path, max_new_tokens: int) -> Last:
    """Ask a model the rows of all requests."""
    questions = msa_lite.OwnQuestions(forget=msa_lite.DataSource(str(rows)), max_new_tokens=max_new_tokens)
    metric = msa_lite.evaluate(str(model), out, questions)["model"].metrics["accuracy_f"]
    return Last(round((metric.value or 0.0) * metric.n), metric.n)


def write_results(handled: Sequence[Request], last: Mapping[str, Last], folder: Path, machine: str) -> None:
    """Write the lines of all requests, and RESULTS.md. last: by method. machine: what they were measured on."""
    (folder / FILE).write_text("".join(json.dumps(asdict(request)) + "\n" for request in handled), "utf-8")
    (folder / LAST).write_text(json.dumps({name: asdict(one) for name, one in last.items()}) + "\n", "utf-8")
    scores, costs = tables_of(handled, last)
    count, rows = max(request.number for request in handled), max((one.rows for one in last.values()), default=0)
    ends = _ends_label(handled)
    text = [
        "# Many requests, one after the other",
        "<!-- Written by examples/fifty_requests/run.py. Do not edit. -->",
        f"{count} requests of 1 to 5 rows ({rows} rows), each about one invented person, on a Llama of two layers that "
        "learnt them. MSA has the quickstart's settings (α, β and the filter by the default search), the others the "
        "same adapters and 10 epochs, of which the default rule chooses one. MSA merges the vectors of all requests "
        "into the first target; NPO and GradDiff train on from the model of the request before. One seed, nothing else "
        "was tried. The 10 epochs were set after a look at two requests of each with 20, which took too long; that a "
        "method ends after five requests in a row that keep nothing, once NPO had kept nothing in seven.",
        "![Scores and cost of each request](requests.svg)",
        "Recited: the whole right answer stands in the greedy answer. Earlier rows: the sample of at most 60 that each "
        "run asks again. Came back: forgotten by the model of its own request, recited by a later one, not by the "
        f"ideal. Kept: right answers on {handled[0].kept_rows} rows to keep that no vector and no baseline learns and "
        f"nothing was chosen by, {ends}.",
        scores,
        f"## Cost of a request\n\nMeans, {ends}. Growth: the slope of a straight line, in percent of the mean for each "
        "further request, ± its standard error, over the requests that ask a full sample of earlier rows; until the "
        "sample is full, each request asks a few rows more than the one before.",
        costs,
        f"Measured on {machine}, Python {platform.python_version()}. Where others use the machine, seconds say little, "
        "and CPU seconds rise, too. Each request is a process of its own; its peak holds about 600 MB of libraries. "
        "`requests.jsonl` has a line for each request.",
    ]
    (folder / "RESULTS.md").write_text("\n\n".join(text) + "\n", "utf-8")


def read_results(folder: Path) -> tuple[list[Request], dict[str, Last]]:
    """Read what `write_results` wrote."""
    lines = (folder / FILE).read_text("utf-8").splitlines()
    last = json.loads((folder / LAST).read_text("utf-8"))
    return [Request(**json.loads(line)) for line in lines], {name: Last(**one) for name, one in last.items()}


def tables_of(handled: Sequence[Request], last: Mapping[str, Last]) -> tuple[str, str]:
    """Return the tables of RESULTS.md: scores, and costs."""
    by_method = {name: [request for request in handled if request.method == name] for name in NAMES}
    by_method = {name: requests for name, requests in by_method.items() if requests}
    heads = [
        "method",
        "requests",
        "own rows recited",
        "earlier rows recited, last request",
        "rows of all requests, last model",
    ]
    scores = [
        [
            NAMES[name],
            str(len(requests)),
            _share(sum(r.recited for r in requests), sum(r.rows for r in requests)),
            _share(requests[-1].earlier_recited, requests[-1].earlier_scored),
            _share(last[name].recited, last[name].rows) if name in last else "–",
            str(max(r.back for r in requests)),
            _ends(requests, "kept", "{:.3f}"),
        ]
        for name, requests in by_method.items()
    ]
    costs = [
        [
            NAMES[name],
            *(text for key in _COSTS for text in (_ends(requests, key, "{:.1f}"), _growth(requests, key))),
        ]
        for name, requests in by_method.items()
    ]
    cost_heads = [head for name in _COSTS.values() for head in (name, "growth")]
    return _table([*heads, "most that came back", "kept"], scores), _table(["method", *cost_heads], costs)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _ends_label(requests: Sequence[Request]) -> str:
    count = min(_WINDOW, max(request.number for request in requests))
    return f"the first {count} requests → the last {count}"


def _ends(requests: Sequence[Request], key: str, form: str) -> str:
    values = [getattr(request, key) for request in requests]
    mean: Callable[[Sequence[float]], float] = statistics.fmean
    return " → ".join(form.format(mean(part)) for part in (values[:_WINDOW], values[-_WINDOW:]))


def _growth(requests: Sequence[Request], key: str) -> str:
    """Return the slope of a cost over the number of the request, in percent of its mean, with its standard error."""
    most = max(request.earlier_scored for request in requests)
    points = [(request.number, getattr(request, key)) for request in requests if request.earlier_scored == most]
    if len(points) < _WINDOW:
        return "–"
    xs, ys = zip(*points, strict=True)
    slope, start = statistics.linear_regression(xs, ys)
    mean, centre = statistics.fmean(ys), statistics.fmean(xs)
    rest = sum((y - start - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    error = (rest / sum((x - centre) ** 2 for x in xs)) ** 0.5
    return f"{100 * slope / mean:+.2f} ± {100 * error / mean:.2f} %"
