"""The pictures of README and docs with numbers: `python -m tests.tools.site_pictures` draws them into docs/pictures.

With the folder of a finished quickstart, `python -m tests.tools.site_pictures runs/quickstart` also takes report.png of
its report and web.png of its page with chromium. `--answers RUN` draws before_after.svg from a run of
`tests.benchmarks.newcomer`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.merger.formula import Filter
from tests.support.browser import ANSWERED, browser
from tests.tools.arrows import ROOT

PICTURES = ROOT / "docs/pictures"
INK, PALE, LINE = "#24292f", "#57606a", "#d0d7de"
BLUE, RED, GREEN, ORANGE = "#2f5fb3", "#c0392b", "#2e7d43", "#b36b00"
FILLS = {BLUE: "#eaf1fb", RED: "#fbeae8", GREEN: "#e8f5ec", ORANGE: "#fff4e0", PALE: "#f6f8fa"}
_CARD = {"target": (RED, "Before", "the target"), "unlearned": (BLUE, "After", "the unlearned model")}
KNOWN, OTHER = "as in the training data", "something else"
SHOWN = {"forget": 2, "retain": 1}
"""The number of questions of each set in before_after.svg."""


class Drawing:
    """A picture that is put together from boxes, bars and texts, on a light card of its own."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, list[str]()

    def text(self, x: float, y: float, text: str, colour: str = INK, size: int = 14, **style: str) -> None:
        """Write one line of text; x, y: the start of its base line, or its middle with anchor="middle"."""
        anchor, weight = style.get("anchor", "start"), style.get("weight", "normal")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, lines: Sequence[str] = ()) -> None:
        """Draw a box with its lines in the middle, the first one bold."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{FILLS[colour]}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
        top = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            weight, ink, size = ("bold", colour, 14) if number == 0 else ("normal", INK, 12)
            self.text(x + width / 2, top + 18 * number, line, ink, size, anchor="middle", weight=weight)

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Draw a filled rectangle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draw a point."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the picture."""
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff" stroke="{LINE}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def filtered() -> Drawing:
    """Return how much of a layer's change the filter keeps, by the rows that take a direction of its input."""
    picture = Drawing(720, 250, "The filter keeps what only the rows to forget take, and halves what both take")
    forget, retain = (np.diag(np.sqrt(taken)) for taken in ((1.0, 1.0, 0.0, 0.0), (0.0, 1.0, 1.0, 0.0)))
    shares = np.diagonal(next(Filter(forget, retain).apply(np.eye(4), [1.0])))
    picture.text(
        30, 34, "What is left of the forget vector's change of one layer (λ = 1), by direction of input", PALE, 13
    )
    takers = ("rows to forget alone", "both alike", "rows to keep alone", "none of these rows")
    for number, (taker, share, colour) in enumerate(zip(takers, shares, (RED, ORANGE, GREEN, PALE), strict=True)):
        y = 56 + 46 * number
        picture.text(190, y + 20, taker, colour, 13, anchor="end", weight="bold")
        picture.bar(206, y, 420, 28, LINE)
        picture.bar(206, y, 420 * share, 28, colour)
        picture.text(640, y + 20, f"{100 * share:.0f} %", INK, 14)
    picture.text(206, 242, "grey: before the filter", PALE, 12)
    return picture


_SHOWN_METHODS = {
    "held, filter": "MSA, filter and hold (default)", "msa, filter": "MSA, filter", "msa": "MSA as in the paper",
    "task vector, filter": "no prior, filter", "task vector": "Task Vector", "undial": "UNDIAL", "npo": "NPO",
    "grad_diff": "GradDiff", "simnpo": "SimNPO", "sage": "SAGE", "k-fade": "K-FADE", "win-u": "WIN-U",
}  # fmt: skip
_MEASURES = (("distance to the ideal, lower is better", "distance", 0.3), ("kept, of the target's 1", "kept", 1.0))


def methods(table: Path = ROOT / "tests/benchmarks/variants.md") -> Drawing:
    """Return distance and kept of each method in each history, from the page of `tests.benchmarks.variants`."""
    rows = _first_table(table.read_text("utf-8"))
    shown = [(name, label) for name, label in _SHOWN_METHODS.items() if name in rows]
    picture = Drawing(960, 100 + 34 * len(shown), "Distance to the ideal and kept, by method, three histories")
    for panel, (title, measure, most) in enumerate(_MEASURES):
        left, width = (280 + 350 * panel, 310)
        picture.text(left, 32, title, INK, 14, weight="bold")
        for number, (name, label) in enumerate(shown):
            y, colour = 62 + 34 * number, BLUE if "MSA" in label else PALE
            if panel == 0:
                weight = "bold" if "default" in label else "normal"
                picture.text(264, y + 5, label, colour, 13, anchor="end", weight=weight)
            picture.bar(left, y - 1, width, 2, LINE)
            values = [min(float(value), most) for value in rows[name][measure].split(", ") if value != "–"]
            for value in values:
                picture.dot(left + width * value / most, y, colour)
            mean = left + width * sum(values) / len(values) / most
            picture.bar(mean - 1.5, y - 12, 3, 24, colour)
        for at in (0.0, most / 2, most):
            picture.text(left + width * at / most, 72 + 34 * len(shown), f"{at:g}", PALE, 12, anchor="middle")
    picture.text(30, 90 + 34 * len(shown), "points: three histories of SmolLM2-135M; bars: their means", PALE, 12)
    return picture


def _first_table(text: str) -> dict[str, dict[str, str]]:
    """Return the cells of a page's first table, by the first cell of their line and by column."""
    table = "| " + text.partition("\n| ")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return {name: dict(zip(lines[0][1:], cells, strict=True)) for name, *cells in lines[2:]}


def before_after(run: Path) -> Drawing:
    """Return questions with the answers of target and unlearned model, each model a column.

    run: of questions. They are the first test rows of each set, `SHOWN` of them, that the target answers right.
    """
    rows = [(name, *pair) for name, count in SHOWN.items() for pair in _answered(run, name)[:count]]
    width, top, height = 860, 66, 96
    picture = Drawing(width, top + height * len(rows) + 14, "The same questions to the model before and after")
    column, left = 290, 264
    for number, (colour, word, who) in enumerate(_CARD.values()):
        picture.text(left + number * column + 12, 30, word, colour, 17, weight="bold")
        picture.text(left + number * column + 12, 50, who, PALE, 13)
    for number, (name, *answers) in enumerate(rows):
        y = top + height * number
        word, colour = ("to forget", RED) if name == "forget" else ("to keep", GREEN)
        picture.text(20, y + 20, word, colour, 12, weight="bold")
        _lines(picture, 20, y + 40, answers[0]["question"], 35)
        for place, (record, (colour, *_)) in enumerate(zip(answers, _CARD.values(), strict=True)):
            x, is_right = left + place * column, record["accuracy"] == 1
            picture.box(x, y, column - 12, height - 14, colour if is_right else PALE)
            _lines(picture, x + 12, y + 30, record["generated"], 38)
            picture.text(x + 12, y + height - 24, KNOWN if is_right else OTHER, colour if is_right else PALE, 11)
    return picture


def _answered(run: Path, name: str) -> list[tuple[dict[str, Any], ...]]:
    """Return the records of target and unlearned model for the rows of a set that the target answers right."""
    files = [run / "evaluation" / model / f"{name}.jsonl" for model in _CARD]
    records = [list(map(json.loads, file.read_text("utf-8").splitlines())) for file in files]
    return [pair for pair in zip(*records, strict=True) if pair[0]["accuracy"] == 1]


def _lines(picture: Drawing, x: float, y: float, text: str, width: int) -> None:
    """Write a text in at most two lines."""
    for number, line in enumerate(textwrap.wrap(text, width, max_lines=2, placeholder=" …")):
        picture.text(x, y + 18 * number, line, INK, 13)


def draw_diagrams(folder: Path = PICTURES) -> list[Path]:
    """Draw the pictures of numbers that need no run; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for draw in (filtered, methods):
        files.append(folder / f"{draw.__name__}.svg")
        files[-1].write_text(draw().svg(), "utf-8")
    return files


def draw_run(run: Path, folder: Path = PICTURES) -> None:
    """Take report.png of the report of a finished run, and web.png of its page."""
    photograph(run / "report.html", folder / "report.png")
    photograph_web(run, folder / "web.png")


def photograph(page: Path, out: Path, width: int = 1100, height: int = 1250) -> None:
    """Take a picture of a page with chromium."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
    subprocess.run(
        ["chromium", *options, f"--screenshot={out.resolve()}", page.resolve().as_uri()],
        check=True,
        capture_output=True,
    )
    _shrink(out)


def photograph_web(run: Path, out: Path, width: int = 1100) -> None:
    """Take a picture of the page of `msa-lite web`: a row that is asked."""
    command = [sys.executable, "-m", "msa_lite", "web", str(run)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as profile,
        browser(Path(profile)) as window,
    ):
        assert server.stdout is not None
        window.open_address(server.stdout.readline().strip(), width)
        window.wait("document.querySelector('#rows li:nth-child(7) button')")
        window.run("document.querySelector('#rows li:nth-child(7) button').click()")
        window.wait(ANSWERED)
        window.run("scrollTo(0, 0)")
        out.write_bytes(window.picture())
        server.terminate()
    _shrink(out)


def _shrink(picture: Path) -> None:
    """Write a picture with a palette of 64 colours, which keeps the file small."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--answers", type=Path)
    draw_diagrams()
    arguments = parser.parse_args()
    if arguments.run is not None:
        draw_run(arguments.run)
    if arguments.answers is not None:
        (PICTURES / "before_after.svg").write_text(before_after(arguments.answers).svg(), "utf-8")
