"""report.html as text: its order, its numbers, its markup, and what a run may not put into it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from msa_lite.report.page.charts import Chart, draw
from msa_lite.report.page.run_files import make_page
from msa_lite.report.run.attacks import AttackedModel, AttackFacts, AttackResult, Gain, TrialResult
from msa_lite.report.run.rows import ListedRow, RowList
from msa_lite.report.tables.reports import number
from msa_lite.report.verdict.figures import Bound, EarlierFacts, Forgotten, Kept
from msa_lite.report.verdict.verdict import NoVerdict, make_verdict, write_verdict
from tests.support.records import around, make_forgotten, make_kept
from tests.support.stories import HOSTILE, STORIES, full, page_of, unfinished

_EMPTY = {"meta", "link", "br", "img", "hr", "input"}


class _Outline(HTMLParser):
    """The elements of a page, and where they are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.faults: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "title"):
            self.text.append(data)

    def values(self, name: str) -> list[str]:
        """Return every value of an attribute."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The page of every story."""
    return {name: page_of(name) for name in STORIES}


@pytest.mark.parametrize("name", STORIES)
def test_the_markup_is_whole_and_refers_to_nothing_outside(name: str, pages: dict[str, str]) -> None:
    outline = _Outline(pages[name])
    assert outline.faults == []
    assert [tag for tag, _ in outline.elements if tag in ("script", "img", "iframe", "object", "base")] == []
    ids = outline.values("id")
    assert [one for one, count in Counter(ids).items() if count > 1] == []
    links = [*outline.values("href"), *outline.values("xlink:href"), *outline.values("src")]
    assert [link for link in links if not link.startswith(("#", "data:,"))] == []
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    named = re.findall(r"url\(#([^)]*)\)", " ".join(outline.values("style") + outline.values("clip-path")))
    assert set(named) <= set(ids)
    assert [name for _, attributes in outline.elements for name in attributes if name.startswith("on")] == []


@pytest.mark.parametrize("name", STORIES)
def test_people_who_hear_the_page_get_its_order_and_its_numbers(name: str, pages: dict[str, str]) -> None:
    outline = _Outline(pages[name])
    assert outline.values("lang") == ["en"]
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all("scope" in attributes for tag, attributes in outline.elements if tag == "th")
    pictures = [attributes for tag, attributes in outline.elements if tag == "svg"]
    assert all(one["role"] == "img" and re.search(r"\d", one["aria-label"]) for one in pictures)


def test_the_outcome_comes_first_then_sentence_and_table_then_the_rest(pages: dict[str, str]) -> None:
    ids = [one for one in _Outline(pages["full"]).values("id") if re.fullmatch("[a-z]+", one)]
    assert ids == [
        "result", "verdict", "scores", "method", "choice", "training", "update", "evidence", "probe", "interference",
        "examples", "provenance", "limits",
    ]  # fmt: skip
    page = pages["full"]
    firsts = (">PASS<", "still answers 1 of the 48", "<table", "What may remain", "<svg")
    assert [*firsts] == sorted(firsts, key=page.index)


def lines_of_the_first_table(page: str) -> list[list[str]]:
    """The cells of each row, without small print but "decides"."""
    table = re.sub(r'<span class="meaning">.*?</span>', "", page[page.index("<tbody>") : page.index("</tbody>")])
    rows = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table, re.S)]
    return [[re.sub(r"<[^>]+>", "", cell).replace("−", "-") for cell in row] for row in rows]


KEPT, MET = make_kept(rows=120), "✓ met, "
RISEN = {"left": {"extraction_strength": around(-0.3), "probability": around(0.65)}}
NOTHING = {"left": {}, "recited": {"target": 1, "unlearned": 0, "ideal": 1}}
DECIDED: dict[str, tuple[dict[str, Any], Kept | None, str]] = {
    "all at their limits": ({"excess": Bound(0.1, 0.1, 0.1)}, replace(KEPT, share=Bound(0.85, 0.85, 0.9)), MET * 4),
    "a bound just beyond": ({"excess": Bound(0.02, -0.06, 0.1004)}, KEPT, f"? too few to say decides, {MET * 3}"),
    "estimates beyond": (RISEN, make_kept(0.8), MET * 2 + "✗ missed decides, " * 2),
    "surely recited": ({"excess": Bound(0.5, 0.4, 0.6)}, make_kept(0.8), f"✗ missed decides, {MET * 2}✗ missed"),
    "surely lost": ({}, make_kept(0.5), f"{MET * 3}✗ missed decides"),
    "learnt rows": ({}, replace(KEPT, fitted=True), f"{MET * 4}✗ missed decides"),
    "nothing changed": ({"changed": 0}, KEPT, f"✗ missed decides, {MET * 4}"),
    "nothing known": (NOTHING, KEPT, f"✗ missed decides, {MET * 2}"),
    "no control": ({"excess": None, "control": None, "left": {}}, None, "– not measured decides, " * 2),
}


@pytest.mark.parametrize("case", DECIDED)
def test_the_first_table_has_the_figures_of_verdict_json_and_marks_what_decided(case: str, tmp_path: Path) -> None:
    changes, kept, results = DECIDED[case]
    verdict = make_verdict(make_forgotten(**changes), kept)
    write_verdict(verdict, tmp_path)
    values = json.loads((tmp_path / "verdict.json").read_text())
    page = make_page(replace(full(), verdict=verdict), drawn=False)
    lines = lines_of_the_first_table(page)
    assert [line[-1] for line in lines] == results.removesuffix(", ").split(", ")
    assert ("is still there" in page) == (case == "nothing changed")
    told, margins = values["forgotten"], values["margins"]
    figures = {"recite": (told["excess"], margins["recited"]), "know the rest": (None, margins["kept"])}
    words = {"extraction_strength": "complete", "probability": "find the data likely"}
    figures |= {words[name]: (gap, margins["left"]) for name, gap in told["left"].items()}
    figures |= {"know the rest": (values["kept"]["share"], margins["kept"])} if kept else {}
    for word, (figure, margin) in figures.items():
        ((_, measured, surely, limit, _),) = [line for line in lines if word in line[0]]
        sign, side = (1, "low") if limit.startswith("at least") else (-1, "high")
        assert float(limit.split()[2]) == pytest.approx(100 * margin)
        assert (measured == surely == "–") == (figure is None)
        if figure:
            assert abs(float(measured.split()[0]) - 100 * figure["value"]) < 0.0501
            rounded_away = sign * (100 * figure[side] - float(surely.split()[2]))
            assert surely.split()[:2] == limit.split()[:2]
            assert -1e-6 <= rounded_away < 0.1, "a bound never looks better than it is"


def test_every_score_is_there_with_its_error(pages: dict[str, str]) -> None:
    text = re.sub(r"\s+", " ", " ".join(_Outline(pages["full"]).text))
    for report in full().reports.values():
        for metric in report.metrics.values():
            assert f"{number(metric.value)} ± {metric.stderr:.3f}" in text
    assert "share of generated answers that contain the whole right answer" in text


def test_parts_that_a_run_lacks_leave_no_gap(pages: dict[str, str]) -> None:
    page = pages["unfinished"]
    ids = [one for one in _Outline(page).values("id") if re.fullmatch("[a-z]+", one)]
    assert ids == ["method", "training", "provenance", "limits"]
    assert "model: the unlearned model is not merged yet" in page
    page = pages["without_choice"]
    assert 'id="choice"' not in page
    assert "No ideal model was given" in page
    assert "◆" not in page
    assert "Where was Fenin born?" in pages["full"]
    assert not [word for word in ("Fenin", "examples") if word in page], "they are shown only if the story holds them"


def test_texts_of_a_run_stay_texts(pages: dict[str, str]) -> None:
    page = pages["hostile"]
    outline = _Outline(page)
    assert "<script" not in page
    assert "<img" not in page
    assert HOSTILE in " ".join(outline.text)  # {{ 7*7 }} stays what it is, too
    assert len(outline.elements) < 2000


def test_the_same_story_gives_the_same_bytes_and_a_small_file(pages: dict[str, str]) -> None:
    assert make_page(full()) == pages["full"]
    assert len(pages["huge"].encode()) < 500_000


def test_a_failure_says_why(pages: dict[str, str]) -> None:
    page = pages["failed"]
    assert '<span class="badge fail">FAIL</span>' in page
    assert "30 of 48 questions are still recited" in page
    assert "Rounding to bfloat16 lost 41 % of the update." in page
    page = make_page(replace(unfinished(), verdict=NoVerdict("nothing was scored")))
    assert ('<span class="badge none">NO VERDICT</span>' in page, "What decides" in page) == (True, False)


def test_parts_that_few_runs_have_are_on_the_page() -> None:
    found = TrialResult("step", "tuning", 0.5, (0.3, 0.7), 20, gain=Gain(0.4, (0.2, 0.6)))
    models = {"unlearned": AttackedModel((found,), {"R": 0.5})}
    attacks = AttackFacts((AttackResult("relearn", "train", "a paper", "ideal", 20, models),), {"depth": "no room"})
    again = Forgotten(20, {"target": 19, "unlearned": 2, "holdout": 1}, "holdout", 10)
    row = ListedRow(3, "Where?", "Here", "", {"unlearned": "Here"}, {"unlearned": True}, {})
    lost = [replace(row, index=5, answers={"unlearned": "There"}, failed={"target": False, "unlearned": True})]
    whole = full()
    loss = {"prior": 3.0, "target": 0.5, "tuned": 1.0}
    page = make_page(
        replace(
            whole,
            attacks=attacks,
            verdict=replace(whole.verdict, earlier=EarlierFacts(1, 40, again, {"runs/a": 1})),
            fits={name: replace(fit, loss=loss) for name, fit in whole.fits.items()},
            forget_rows=RowList([row], retain=lost, learnt=1),
        ),
        drawn=False,
    )
    text = " ".join(" ".join(_Outline(page).text).split())
    for part in ("went 80 % of the way", "this model 2 of 20 10 %", "rows that no model saw 1 of 10",
                 "50 % (30 % to 70 %)", "40 % (20 % to 60 %)", "R 0.5", "Not made: depth: no room", "Row 3: Where?",
                 "recited: Here", "lost: 1 of 1.", "1 of all 1;", "Row 5: Where?", "lost: There"):  # fmt: skip
        assert part in text, part


def test_a_chart_takes_the_pages_colours_and_leaves_the_callers_matplotlib_alone() -> None:
    import matplotlib

    matplotlib.rcParams["font.size"] = 23.0
    try:
        chart = draw("one", 'a "quoted" <word>', 100, lambda figure: figure.add_subplot().set_title("$x_1$ <b>"))
        assert matplotlib.rcParams["font.size"] == 23.0
    finally:
        matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]
    assert isinstance(chart, Chart)
    assert "fill: var(--ink)" in chart.svg
    assert "#01010" not in chart.svg
    assert "$x_1$ &lt;b&gt;" in chart.svg
    assert 'aria-label="a &quot;quoted&quot; &lt;word&gt;"' in chart.svg
    assert "<style" not in chart.svg
    assert "font-family" not in chart.svg
    other = draw("two", "", 100, lambda figure: figure.add_subplot().set_title("$x_1$ <b>"))
    ids = [set(re.findall(r' id="([^"]*)"', one.svg)) for one in (chart, other)]
    assert ids[0] & ids[1] == set()
    assert all(one.startswith("one-") for one in ids[0])


def test_a_baseline_has_a_page(pages: dict[str, str]) -> None:
    labels = _Outline(pages["baseline"]).values("aria-label")
    assert [label.split()[0] for label in labels if "chart" in label] == ["Dot", "Dot", "Line"]
    text = " ".join(_Outline(pages["baseline"]).text)
    assert "How the settings were chosen" in text
    assert "score (tofu) ↑" in text
    assert "The method is npo." in text
    assert "Lost by truncation" in text
