"""Read what the runs say of each request, and write it down: a line for each, and RESULTS.md."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msa_lite

NAMES = {"msa": "MSA", "npo": "NPO, sequential", "grad_diff": "GradDiff, sequential"}
FILE = "requests.jsonl"
_WINDOW = 10  # requests that the first and the last figures are a mean of


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


def read_request(folder: Path, method: str, number: int, rows: int, cost: dict[str, float]) -> Request:
    """Read a finished run. cost: as `run.Cost`."""
    report = json.loads((folder / "report.json").read_text("utf-8"))
    scores = json.loads((folder / "evaluation/unlearned/report.json").read_text("utf-8"))["metrics"]
    again = (report["earlier_rows"] or {}).get("scored") or {"rows": 0, "recited": {}}
    return Request(
        method=method,
        number=number,
        rows=rows,
        recited=round(scores["accuracy_f"]["value"] * scores["accuracy_f"]["n"]),
        earlier_scored=again["rows"],
        earlier_recited=again["recited"].get("unlearned", 0),
        earlier_ideal=again["recited"].get("ideal", 0),
        back=sum((report["earlier_rows"] or {"back": {}})["back"].values()),
        kept=scores["accuracy_r"]["value"],
        kept_rouge=scores["rouge_l_r"]["value"],
        strengths={
            key: report["strengths"][key] for key in ("alpha", "beta", "filter", "epoch") if key in report["strengths"]
        },
        **{key: round(value, 2) for key, value in cost.items()},
    )


def write_results(world: Any, handled: Sequence[Request], folder: Path) -> None:
    """Write the lines of all requests, and RESULTS.md.

    world: a `World`; the last model of each method is asked the rows of all requests.
    """
    (folder / FILE).write_text("".join(json.dumps(asdict(request)) + "\n" for request in handled), "utf-8")
    by_method = {name: [request for request in handled if request.method == name] for name in NAMES}
    by_method = {name: requests for name, requests in by_method.items() if requests}
    last = {name: _score_all(world, name, len(requests)) for name, requests in by_method.items()}
    (folder / "RESULTS.md").write_text("\n\n".join(_paragraphs(world, by_method, last)) + "\n", "utf-8")


def _score_all(world: Any, method: str, number: int) -> tuple[float, int]:
    """Return the share of the rows of all requests that the last model recites, and their number."""
    from world import run_folder

    rows = msa_lite.DataSource(str(world.folder / "rows/all.jsonl"))
    out = world.folder / "last" / method
    questions = msa_lite.OwnQuestions(forget=rows, max_new_tokens=4 if world.small else 30)
    metric = msa_lite.evaluate(str(run_folder(world, method, number) / "model"), out, questions)["model"].metrics
    return metric["accuracy_f"].value or 0.0, metric["accuracy_f"].n


def _paragraphs(world: Any, by_method: dict[str, list[Request]], last: dict[str, tuple[float, int]]) -> list[str]:
    count = max(len(requests) for requests in by_method.values())
    rows = sum(len(request) for request in world.requests)
    ends = f"first {min(_WINDOW, count)} → last {min(_WINDOW, count)}"
    return [
        "# Many requests, one after the other",
        "<!-- Written by examples/fifty_requests/run.py. Do not edit. -->",
        f"{count} requests of 1 to 5 rows ({rows} rows), each about one invented person, on a Llama of "
        f"{'32' if world.small else '256'} hidden units that learnt them. Seed {world.seed}. Settings were fixed "
        "before any score was seen: MSA with the quickstart's (α, β and the filter by the default search), the others "
        "with the same adapters and 10 epochs, of which the default rule chooses one. MSA merges the vectors of all "
        "requests into the first target; NPO and GradDiff train on from the model of the request before.",
        "![Scores and cost of each request](requests.svg)",
        "Recited: the whole right answer stands in the greedy answer. Earlier rows: the sample of at most 60 that each "
        "run asks again. Came back: forgotten by the model of its own request, recited by a later one, not by the "
        "ideal. Kept: right answers on 40 rows to keep that no vector and no baseline learns.",
        _table(
            [
                "method",
                "own rows recited",
                "earlier rows recited, last request",
                "rows of all requests, last model",
                "came back, in all reports",
                f"kept, {ends}",
            ],
            [
                [
                    NAMES[name],
                    _share(sum(r.recited for r in requests), sum(r.rows for r in requests)),
                    _share(requests[-1].earlier_recited, requests[-1].earlier_scored),
                    f"{last[name][0]:.3f} of {last[name][1]}",
                    str(sum(r.back for r in requests)),
                    _ends(requests, lambda r: r.kept, "{:.3f}"),
                ]
                for name, requests in by_method.items()
            ],
        ),
        f"## Cost of a request\n\nMeans, {ends}; growth: the slope of a straight line over all but the first request, "
        "in percent of the mean for each further request, ± its standard error.",
        _table(
            ["method", "CPU seconds", "growth", "peak MB", "growth", "disk MB", "growth"],
            [
                [
                    NAMES[name],
                    *(
                        text
                        for key in ("cpu_seconds", "peak_mb", "disk_mb")
                        for text in (
                            _ends(requests, lambda r, key=key: getattr(r, key), "{:.1f}"),
                            _growth(requests, key),
                        )
                    ),
                ]
                for name, requests in by_method.items()
            ],
        ),
        f"Measured on {platform.machine()}, Python {platform.python_version()}, one core (`OMP_NUM_THREADS=1`) of a "
        "machine that others used as well, so that CPU seconds say more than seconds. Each request is a process of its "
        "own; its peak holds about 600 MB of libraries. `requests.jsonl` has a line for each request.",
    ]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _ends(requests: Sequence[Request], value: Callable[..., float], form: str) -> str:
    values = [value(request) for request in requests]
    return " → ".join(form.format(statistics.fmean(part)) for part in (values[:_WINDOW], values[-_WINDOW:]))


def _growth(requests: Sequence[Request], key: str) -> str:
    """Return the slope of a cost over the number of the request, in percent of its mean, with its standard error."""
    points = [(request.number, getattr(request, key)) for request in requests[1:]]
    if len(points) < 3:
        return "–"
    xs, ys = zip(*points, strict=True)
    slope, start = statistics.linear_regression(xs, ys)
    mean, centre = statistics.fmean(ys), statistics.fmean(xs)
    rest = sum((y - start - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    error = (rest / sum((x - centre) ** 2 for x in xs)) ** 0.5
    return f"{100 * slope / mean:+.2f} ± {100 * error / mean:.2f} %"
