"""The page of results of examples/real_model: claims flip with the numbers, and what is missing or failed is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import measures
import pytest
from claims import answer_claims
from collect import Point, Scores, collect
from results import write_results
from rules import NO, PARTLY, UNCLEAR, YES, further, matches

from tests.support.real_model import GOOD, GROUPS, IDEAL, TARGET, Folder

ROOT = Path(__file__).parents[2]
FEW = {name: GOOD[name] for name in ("msa-lora", "npo", "bf16")}


def answers(out: Path, **changes: object) -> dict[str, str]:
    """Return the answer to each claim of a folder that is made with these changes."""
    return answers_of(Folder(out, **{"seeds": (0, 1), **changes}).write())


def answers_of(out: Path) -> dict[str, str]:
    """Return the answer to each claim of a folder."""
    return {claim.number: claim.answer for claim in answer_claims(collect(out))}


def test_every_claim_holds_in_a_folder_where_all_scores_say_so(tmp_path: Path) -> None:
    assert set(answers(tmp_path).values()) == {YES}


@pytest.mark.parametrize(
    ("number", "scores"),
    [
        ("1b", {"rmu": IDEAL}),
        ("2", {"text-after": (0.32, 0.84), "text-before": (0.8, 0.84)}),
        ("3", {"task_vector": IDEAL, "task_vector-full": IDEAL}),
        ("4", {"prior-text-a": (0.31, 0.5), "prior-base": (0.31, 0.5), "msa-lora": (0.9, 0.3)}),
        ("5", {"again-before": (0.9, 0.84)}),
        ("6", dict.fromkeys(GROUPS["checkpoints"], IDEAL)),
        ("8", {"qlora": (0.5, 0.7)}),
        ("9", {"bf16": (0.9, 0.9)}),
    ],
)
def test_a_claim_turns_to_no_when_the_numbers_turn(
    number: str, scores: dict[str, tuple[float, float]], tmp_path: Path
) -> None:
    assert answers(tmp_path, scores=GOOD | scores)[number] == NO


@pytest.mark.parametrize(
    ("number", "scores"),
    [
        ("1b", {"msa-lora": (0.3, 0.8)}),  # nearest, and keeps less than 90 %
        ("4", {"prior-base": (0.8, 0.8)}),  # worse, and does not work
        ("6", {"npo-prior": IDEAL}),
        ("7", {"msa-lora": (0.5, 0.7)}),  # other ranks match
    ],
)
def test_a_claim_of_which_a_part_holds_is_answered_partly(
    number: str, scores: dict[str, tuple[float, float]], tmp_path: Path
) -> None:
    assert answers(tmp_path, scores=GOOD | scores)[number] == PARTLY


def test_the_interval_over_seeds_is_students() -> None:
    def points(*forget: float) -> dict[int, Point]:
        names = [*measures.FORGET, *measures.RETAIN]
        ideal = Scores(dict.fromkeys(names, 0.0))
        return {seed: Point(Scores(dict.fromkeys(names, value)), ideal, ideal) for seed, value in enumerate(forget)}

    difference = measures.paired("a − b", points(0.11, 0.12, 0.13), points(0.1, 0.1, 0.1))
    half = 4.302652729 * 0.01 / 3**0.5  # t of 2 degrees of freedom, standard deviation 0.01
    assert difference.mean == pytest.approx(0.02)
    assert (difference.low, difference.high) == pytest.approx((0.02 - half, 0.02 + half))
    assert further(difference) == PARTLY
    assert further(difference.turned()) == UNCLEAR, "the interval holds 0"
    assert matches(difference) == PARTLY
    wide = measures.paired("a − b", points(0.2, 0.1, 0.3), points(0.1, 0.1, 0.1))
    assert matches(wide) == UNCLEAR
    assert matches(wide.turned()) == PARTLY


def test_distances_are_those_of_the_definition(tmp_path: Path) -> None:
    run = collect(Folder(tmp_path, seeds=(0,), scores={"msa-lora": (0.2, 0.7)}).write()).seeds[0].runs["msa-lora"]
    assert measures.measure(run, "forget_distance") == pytest.approx(0.1)
    assert measures.measure(run, "forget_side") == pytest.approx(-0.1)
    assert measures.measure(run, "retain_distance") == pytest.approx(0.15)
    assert measures.measure(run, "distance") == pytest.approx(0.125)
    assert measures.measure(run, "kept") == pytest.approx(0.7 / 0.9)
    assert measures.measure(measures.reference(run, "target"), "forget_side") == pytest.approx(TARGET[0] - IDEAL[0])


def test_the_page_names_what_failed_what_lacks_and_what_is_of_another_commit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    scores = {name: of for name, of in GOOD.items() if name != "simnpo"}
    errors = {"rmu": f"no layer 40, see {out}/rmu.yaml"}
    Folder(out, scores=scores, errors=errors, commits={"npo": "cccc2222", "satimp": "aaaa1111+"}).write()
    (out / "seed-0/runs/undial/report.json").write_text("{")
    (out / "seed-1/runs/bf16/report.json").unlink()
    (out / "seed-2/state.json").unlink()
    page = write_results(out, tmp_path / "page").read_text()
    missing = page.partition("## Failures")[2].partition("\n## ")[0]
    assert "seed 0: no run yet of simnpo" in missing
    assert "seed 0, rmu: failed: no layer 40, see OUT/rmu.yaml" in missing
    assert "seed 0, undial:" in missing
    assert "seed 1, bf16:" in missing
    assert "seed 2: not begun" in missing
    assert "NPO † (2 of 3 seeds)" in page
    assert "cccc2222: seed 0 npo, seed 1 npo" in page
    assert re.search(r"aaaa1111\\?\+: seed 0 satimp", page), "files were changed since that commit"
    assert "missing: simnpo, rmu |" in page
    assert "| **yes so far** |" in page
    assert str(tmp_path) not in page
    assert "Under attack" not in page
    assert "## The verdicts, then and now" not in page, "without rows there are none"


def test_the_page_is_made_of_the_scores_that_are_kept(tmp_path: Path) -> None:
    kept, published = ROOT / "examples/real_model/scores", ROOT / "examples/real_model/RESULTS.md"
    shutil.copytree(kept, tmp_path / "scores")
    page = write_results(kept, tmp_path)
    assert page.read_text("utf-8") == published.read_text("utf-8")
    assert [file.name for file in sorted((page.parent / "figures").iterdir())] == [
        file.name for file in sorted((published.parent / "figures").iterdir())
    ]


def test_each_run_has_the_present_verdict_beside_the_one_of_its_time(tmp_path: Path) -> None:
    page = write_results(Folder(tmp_path / "out", (0,), FEW, rows=True).write(), tmp_path / "page").read_text()
    section = page.partition("## The verdicts, then and now")[2].partition("\n## ")[0]
    assert "× PASS → " in section
    assert re.search(r"The ideal itself, in the place of an unlearned model: PARTLY \(undecided: too few rows", section)
    cells = [line.split("|")[3:6] for line in section.splitlines() if line.startswith("| MSA (LoRA) |")]
    assert cells == [[" PASS ", " PARTLY ", cells[0][2]]]
    assert re.fullmatch(r" \d of 6 ", cells[0][2])
