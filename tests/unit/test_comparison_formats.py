"""A comparison in each of its formats, read back; and the command that prints it."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import Plan, StageCost
from msa_lite.budget.speed import Device
from msa_lite.comparison.compare import FORMATS, Comparison, compare
from msa_lite.pipeline.verbs.run import RunResult
from msa_lite.report import load_report
from msa_lite.report.tables.reports import number
from msa_lite.report.verdict.verdict import make_verdict
from tests.support.processes import run_cli
from tests.support.records import GOOD, WEAK, make_forgotten, make_kept, make_run

ODD = '50% of_a|b & <c> {d} \\e ~^ #1 $ *f* [g] `h` "i"'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", msa=GOOD, npo=WEAK)


@pytest.fixture
def comparison(run: Path) -> Comparison:
    return compare([f"{ODD}={run}"], published="tofu-forget10-llama-3.1-8b")


def test_csv_holds_every_number_with_all_its_digits(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))))
    assert [row["model"] for row in rows] == [row.label for row in comparison.rows]
    assert {row["section"] for row in rows} == {"references", "msa", "baselines", "published"}
    ours, npo, paper = rows[2], rows[3], rows[6]
    assert ours["model"] == ODD
    assert [npo[f"extraction_strength{end}"] for end in ("", "_stderr", "_n", "_ratio", "_best")] == [
        "0.28", "0.01", "40", "25.0%", "false",
    ]  # fmt: skip
    assert (float(npo["forget_quality"]), npo["forget_quality_ratio"]) == (1e-5, "")
    assert [paper[f"model_utility{end}"] for end in ("", "_stderr", "_n", "_ratio", "_best")] == [
        "0.78", "", "", "+100%", "true",
    ]  # fmt: skip
    assert (ours["acc_recover"], ours["acc_recover_best"]) == ("", "false")


def test_markdown_has_as_many_cells_in_every_row_and_rules_between_parts(comparison: Comparison) -> None:
    text = FORMATS["md"](comparison)
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    assert {len(row) for row in cells} == {len(comparison.columns) + 1}
    assert cells[1] == ["---", *["---:"] * len(comparison.columns)]
    empty = [i for i, row in enumerate(cells) if not any(row[1:])]
    assert [cells[i][0] for i in empty] == ["", "", "*published: Llama-3.1-8B-Instruct*"]
    assert empty == [4, 6, 8]  # header and rule, two references, MSA, one baseline
    assert cells[5][0] == '50% of_a\\|b & \\<c> {d} \\\\e ~^ #1 $ \\*f\\* \\[g\\] \\`h\\` "i"'
    assert cells[7][4] == "0.280 ± 0.010 (25.0%)"
    assert cells[5][5] == "0.540 ± 0.010 (90.0%)"
    assert cells[7][5] == "**0.600** ± 0.010 (+100%)"
    assert text.count("\n- ") == len(comparison.notes)


def test_latex_has_balanced_braces_and_as_many_columns_as_it_says(comparison: Comparison) -> None:
    text = FORMATS["tex"](comparison)
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert r"% needs \usepackage{booktabs}" in text
    spec = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", lines[0])
    assert spec
    assert lines[-1] == r"\end{tabular}"
    bare = [re.sub(r"\\[{}&%$#_]", "", line) for line in lines]
    assert all(line.count("{") == line.count("}") for line in bare)
    assert all(line.count("$") % 2 == 0 for line in bare)
    assert not re.search(r"(?<!\\)[%#_]|[↑↓→–]", "\n".join(lines))
    for line in bare:
        if line.endswith("\\\\"):
            merged = sum(int(count) - 1 for count in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert line.count("&") + merged + 1 == len(spec[1])
    assert lines.count(r"\midrule") == 4
    assert r"\textbf{0.600} $\pm$ 0.010 & +100\%" in text
    assert r"50\% of\_a\textbar{}b \& \textless{}c\textgreater{} \{d\} \textbackslash{}e" in text
    assert r"\multicolumn{2}{c}{extraction strength $\downarrow$}" in text


def test_latex_gives_no_column_to_ratios_that_a_metric_has_not() -> None:
    text = FORMATS["tex"](compare(published="muse-books-olmo-2-7b", metrics=["privleak"]))
    assert r"\begin{tabular}{lr}" in text
    assert r"\multicolumn{1}{c}{PrivLeak in \% $\to$ 0}" in text
    assert r"RMU & $-$17.83 \\" in text


def test_html_is_one_whole_page(comparison: Comparison) -> None:
    text = FORMATS["html"](comparison)
    without_voids = re.sub(r"<(!doctype|meta)[^>]*>", "", text)  # every other element has to be closed
    page = ElementTree.fromstring(without_voids)
    assert not [name for element in page.iter() for name in element.attrib if name in ("src", "href")]
    rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert text.count("<tbody>") == text.count("</tbody>") == 4
    assert rows[0] == ["model", *(column.heading for column in comparison.columns)]
    assert rows[3][0] == ODD
    assert rows[4][:2] == ["NPO", "0.420 ± 0.010 (50.0%)"]
    assert rows[5] == ["published: Llama-3.1-8B-Instruct"]
    assert {len(row) for row in rows} == {len(comparison.columns) + 1, 1}
    assert "<b>0.600</b>" in text
    assert comparison._repr_html_() in text


def test_what_people_look_at_in_a_notebook_is_a_table_of_the_same_code(run: Path) -> None:
    report = replace(load_report(run / "evaluation/unlearned"), split=ODD)
    verdict = make_verdict(make_forgotten(), make_kept(), [ODD])
    stage = StageCost("the fit", "fit", Need({"weights": 10**9}), how=ODD)
    plan = Plan(Device("GPU", 10**9, True), [stage], None, {}, 0, notes=[ODD])
    merged: Any = None  # which is not shown
    runs = [RunResult(run, "msa", {"alpha": 1.0}, merged, {ODD: report}, verdict)]
    runs.append(replace(runs[0], verdict=None, no_verdict=ODD, reports={}))
    texts = [result._repr_html_() for result in (report, verdict, plan, *runs)]
    for text in texts:
        page = ElementTree.fromstring(f"<div>{text}</div>")  # whole, and what is ours is no command in it
        assert ODD in "".join(page.itertext())
    assert texts[1] in texts[3]
    assert "<b>fit</b>" in texts[2]
    assert "Fits on" in texts[2]
    assert sorted(re.findall(r"<td>(0\.\d+) ", texts[0])) == sorted(map(number, report.values().values()))


def test_the_command_prints_a_table_in_every_format(run: Path) -> None:
    table = run_cli("compare", str(run))
    assert (table.returncode, table.stderr) == (0, "")
    assert [word in table.stdout for word in ("tofu, forget10", "MSA", "0.280 (25.0%)", "± 0.010", "MSA paper")] == [
        True
    ] * 5
    done = run_cli("compare", str(run), "--json", "--metrics", "model_utility, acc_forget")
    found = json.loads(done.stdout)
    assert list(found["rows"][0]["metrics"]) == ["model_utility", "acc_forget"]
    alone = run_cli("compare", "--published", "restor-olmo-2-7b", "--format", "csv")
    assert len(alone.stdout.splitlines()) == 13
