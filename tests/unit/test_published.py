"""The figures of the paper's tables: whole, as printed, and named by their source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msa_lite.comparison.published import load_published, published_tables
from msa_lite.errors import UsageError

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "msa-paper.tex"
FIGURE = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])")
ROWS = {
    "muse-books-llama-3.1-8b": 8, "muse-books-olmo-2-7b": 13, "restor-llama-3.1-8b": 9, "restor-olmo-2-7b": 12,
    "tofu-c4-forget10-llama-3.2-1b": 5, "tofu-c4-tofu-forget10-llama-3.2-1b": 7, "tofu-forget01-llama-3.2-1b": 9,
    "tofu-forget05-llama-3.2-1b": 9, "tofu-forget10-llama-3.1-8b": 10, "tofu-forget10-llama-3.2-1b": 10,
    "tofu-forget10-llama-3.2-1b-checkpoints": 19, "tofu-forget10-olmo-2-7b": 13,
}  # fmt: skip
TABLES = published_tables()


def test_all_tables_are_there_and_whole() -> None:
    found = {name: load_published(name) for name in TABLES}
    assert {name: len(table.rows) for name, table in found.items()} == ROWS
    for name, table in found.items():
        columns = 1 if name.startswith("restor") else 6 if name == "tofu-forget10-olmo-2-7b" else 7
        assert len(table.rows["Target"]) == columns
        assert list(table.rows)[:2] == ["Target", "Ideal"]
        assert name.startswith(table.benchmark)
        assert table.split is None or table.split in name
        assert re.search(r"arXiv 2506\.20941\), table tab:\S+$", table.source)
        assert all(list(row) == list(table.rows["Target"]) for row in table.rows.values())
        assert all(figure.metric.value is not None for row in table.rows.values() for figure in row.values())
        assert any(model.startswith("MSA (") for model in table.rows)


def test_an_unknown_table_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UsageError, match="did you mean 'restor-olmo-2-7b'") as told:
        load_published("restor-OLMo2-7b")
    assert all(name in str(told.value) for name in TABLES)


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not on this machine")
@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("restor")])
def test_every_figure_is_that_of_the_paper(name: str) -> None:
    """All numbers of a table in their order, read without regard for its cells."""
    table = load_published(name)
    text = PAPER.read_text()
    body = text[text.index(f"\\label{{{table.source.split()[-1]}}}") :]
    body = body[body.index("Target") : body.index("\\end{tabular}")]
    body = re.sub(r"\\dgap\[[\d.]+\]|\\multicolumn\{2\}|\\cmidrule\(lr\)\{[\d-]+\}|_\{.*?\}\$", " ", body)
    wanted = FIGURE.findall(body.replace("+100", "100"))
    found = []
    for row in table.rows.values():
        for figure in row.values():
            ratio = str(figure.ratio).strip("+%") if figure.ratio else None
            found += [figure.printed, *([ratio] if ratio else [])]
    assert found == wanted


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not on this machine")
def test_every_figure_of_restor_is_that_of_the_paper() -> None:
    text = PAPER.read_text()
    body = text[text.index(r"\label{tab:restor_msa}") :]
    body = body[: body.index(r"\end{tabular}")]
    wanted = [float(figure) for figure in re.findall(r"\b\d\d\.\d\d\b", body)]
    found = []
    for name in ("restor-llama-3.1-8b", "restor-olmo-2-7b"):  # which prints MSA's in a line of their own, the second
        figures = {model: row["accuracy"].printed for model, row in load_published(name).rows.items()}
        others = [printed for model, printed in figures.items() if not model.startswith("MSA")]
        found += others + [printed for model, printed in figures.items() if model.startswith("MSA")]
    assert [round(100 * float(printed), 2) for printed in found] == wanted
