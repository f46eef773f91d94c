"""The page of results of examples/real_model: claims flip with the numbers, and what is missing or failed is named."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import claims
import measures
import pytest
from claims import answer_claims
from collect import Point, Scores, collect
from results import write_results
from rules import NO, PARTLY, UNCLEAR, UNKNOWN, YES, Claim, further, matches
from tables import not_best

from msa_lite.attack_names import ATTACKS
from msa_lite.errors import FormatError, MsaError
from tests.support.real_model import GOOD, GROUPS, IDEAL, SIGNS, TARGET, Folder

ROOT = Path(__file__).parents[2]
FEW = {name: GOOD[name] for name in ("msa-lora", "npo", "bf16")}


def answers(out: Path, **changes: object) -> dict[str, str]:
    """Return the answer to each claim of a folder that is made with these changes."""
    return answers_of(Folder(out, **{"seeds": (0, 1), **changes}).write())


def answers_of(out: Path) -> dict[str, str]:
    """Return the answer to each claim of a folder."""
    return {claim.number: claim.answer for claim in answer_claims(collect(out))}


def claim_of(out: Path, number: str) -> Claim:
    """Return one claim of a folder."""
    return next(one for one in answer_claims(collect(out)) if one.number == number)


def test_every_claim_holds_in_a_folder_where_all_scores_say_so(tmp_path: Path) -> None:
    assert set(answers(tmp_path).values()) == {YES}


@pytest.mark.parametrize(
    ("number", "scores"),
    [
        ("1a", {"undial-full": IDEAL}),
        ("1b", {"rmu": IDEAL}),
        ("2", {"text-after": (0.32, 0.84), "text-before": (0.8, 0.84)}),
        ("3", {"task_vector": IDEAL, "task_vector-full": IDEAL}),
        ("4", {"prior-text-a": (0.31, 0.5), "prior-base": (0.31, 0.5), "msa-lora": (0.9, 0.3)}),
        ("5", {"again-before": (0.9, 0.84)}),
        ("6", dict.fromkeys(GROUPS["checkpoints"], IDEAL)),
        ("7", dict.fromkeys(claims.LORA, (0.5, 0.7))),
        ("8", {"qlora": (0.5, 0.7)}),
        ("9", {"bf16": (0.9, 0.9)}),
        ("11", {"msa-lora": (0.5, 0.7)}),
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
        ("5", {"again-late": (0.31, 0.845)}),
        ("6", {"npo-prior": IDEAL}),
        ("7", {"msa-lora": (0.5, 0.7)}),  # other ranks match
    ],
)
def test_a_claim_of_which_a_part_holds_is_answered_partly(
    number: str, scores: dict[str, tuple[float, float]], tmp_path: Path
) -> None:
    assert answers(tmp_path, scores=GOOD | scores)[number] == PARTLY


def test_the_retain_vector_helps_only_where_the_grid_shows_it(tmp_path: Path) -> None:
    grid = {(1.0, 0.0): (0.31, 0.85), (1.0, 0.5): (0.4, 0.8)}
    assert answers(tmp_path, grid=grid)["10"] == NO


@pytest.mark.parametrize(
    ("signs", "answer"), [(SIGNS, YES), (SIGNS[:1], PARTLY), ((*SIGNS, "msa-lora"), PARTLY), ((), NO)]
)
def test_the_probe_is_judged_by_the_runs_that_fail(signs: tuple[str, ...], answer: str, tmp_path: Path) -> None:
    assert answers(tmp_path, signs=signs)["12"] == answer


def test_nothing_is_said_of_the_probe_if_no_run_fails(tmp_path: Path) -> None:
    assert answers(tmp_path, scores=dict.fromkeys(GOOD, (0.32, 0.84)))["12"] == UNKNOWN


def test_a_difference_that_another_seed_turns_round_is_not_sure(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write()
    path = tmp_path / "seed-2/runs/text-after/report.json"
    report = json.loads(path.read_text())
    for metric in report["metrics"].values():
        metric["models"]["unlearned"]["value"] = metric["models"]["ideal"]["value"]
    path.write_text(json.dumps(report))
    claim = claim_of(tmp_path, "2")
    difference = claim.parts[0].difference
    assert claim.answer == PARTLY
    assert difference is not None
    assert difference.low < 0 < difference.mean < difference.high
    assert difference.source == "seeds"


def test_one_seed_has_intervals_over_its_rows(tmp_path: Path) -> None:
    out = Folder(tmp_path, seeds=(0,), rows=True).write()
    difference = claim_of(out, "2").parts[0].difference
    assert difference is not None
    assert difference.source == "rows"
    assert 0 < difference.low < difference.mean < difference.high
    for path in out.glob("seed-0/runs/*/evaluation/unlearned/*.jsonl"):
        path.unlink()
    assert answers_of(out)["2"] == PARTLY, "without rows there is no interval, and so no yes"


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


def test_what_beats_msa_and_lora_is_told(tmp_path: Path) -> None:
    good = not_best(collect(Folder(tmp_path / "good").write()))
    scores = GOOD | {"rmu": IDEAL, "lora-r8": (0.3, 0.85), "undial-full": IDEAL}
    out = Folder(tmp_path / "bad", scores=scores).write()
    bad = not_best(collect(out))
    assert not any("against" in line for line in good)
    assert any(line.startswith("text-after does not work in 3 of 3 seeds") for line in good)
    assert any(re.match(r"Distance, better than MSA \(LoRA\): RMU 0\.\d+ against 0\.017(;|$)", line) for line in bad)
    assert any(line.startswith("Distance, better than MSA (full): UNDIAL (full)") for line in bad)
    assert "nearer than MSA (full) in every seed: UNDIAL (full)" in claim_of(out, "1a").numbers
    assert any(re.match(r"Variants nearer to the ideal: lora-r8 0\.\d+ against 0\.017", line) for line in bad)


def test_methods_are_compared_on_the_histories_that_both_have(tmp_path: Path) -> None:
    write_results(Folder(tmp_path / "one", (0,), GOOD | {"rmu": IDEAL}).write(), tmp_path / "page")
    others = {name: of for name, of in GOOD.items() if name != "rmu"}
    page = write_results(Folder(tmp_path / "two", (1,), others).write(), tmp_path / "page").read_text()
    assert re.search(r"- Distance, better than MSA \(LoRA\): RMU 0\.\d+ against 0\.015 \(seed 0\)\.\n", page)


def test_the_same_folder_gives_the_same_bytes_and_every_figure_is_linked(tmp_path: Path) -> None:
    out = Folder(tmp_path / "out").write()
    before = sorted(path for path in out.rglob("*"))
    first, second = (write_results(out, tmp_path / name).parent for name in ("one", "two"))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    figures = ["figures/frontier.svg", "figures/grid.svg", "figures/prior.svg"]
    scores = ["scores/plan.json", *(f"scores/seed-{seed}.jsonl" for seed in range(3))]
    assert [path.as_posix() for path in files] == ["RESULTS.md", *figures, *scores]
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
    links = re.findall(r"\]\((figures/[^)]+)\)", (first / "RESULTS.md").read_text())
    assert sorted(links) == figures
    assert sorted(path for path in out.rglob("*")) == before, "nothing is written into the folder of the experiments"


def test_runs_of_another_folder_are_added_to_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page"
    attacked = {"npo": (0.34, 0.16, 0.54)}
    all_runs = Folder(tmp_path / "all", (0, 1), FEW, rows=True, attacked=attacked).write()
    whole = write_results(all_runs, tmp_path / "whole").read_text()
    write_results(Folder(tmp_path / "one", (0,), {"msa-lora": FEW["msa-lora"]}, rows=True).write(), page)
    late = {name: FEW[name] for name in ("npo", "bf16")}
    write_results(Folder(tmp_path / "two", (0,), late, rows=True, attacked=attacked, grid={}).write(), page)
    again = write_results(Folder(tmp_path / "three", (1,), FEW, rows=True, attacked=attacked).write(), page)
    assert again.read_text() == whole


def test_one_seed_that_was_kept_has_intervals_over_its_rows(tmp_path: Path) -> None:
    write_results(Folder(tmp_path / "one", (0,), FEW, rows=True).write(), tmp_path / "page")
    page = write_results(Folder(tmp_path / "two", (0,), {}, grid={}).write(), tmp_path / "page").read_text()
    assert "(rows)" in page
    kept = (tmp_path / "page/scores/seed-0.jsonl").read_text()
    assert "forget 0?" not in kept, "texts stay where they are"


def test_an_experiment_keeps_the_time_when_it_was_first_fixed(tmp_path: Path) -> None:
    write_results(Folder(tmp_path / "one", (0,), FEW).write(), tmp_path / "page")
    plan = json.loads((Folder(tmp_path / "two", (0,), FEW).write() / "plan.json").read_text())
    entries = [*plan["experiments"], plan["experiments"][0] | {"name": "new", "fixed": "2026-03-01T00:00:00"}]
    (tmp_path / "two/plan.json").write_text(
        json.dumps(plan | {"fixed": "2026-03-01T00:00:00", "commit": "dddd", "experiments": entries})
    )
    page = write_results(tmp_path / "two", tmp_path / "page").read_text()
    assert "The present one was fixed at 2026-01-01T00:00:00" in page
    assert "Fixed later: new (2026-03-01T00:00:00)." in page


def test_an_experiment_of_one_seed_lacks_no_other(tmp_path: Path) -> None:
    out = Folder(tmp_path, seeds=(0, 1), rows=True).write()
    plan = json.loads((out / "plan.json").read_text())
    for entry in plan["experiments"]:
        entry["once"] = entry["name"] == "bf16"
    (out / "plan.json").write_text(json.dumps(plan))
    state = json.loads((out / "seed-1/state.json").read_text())
    del state["experiments"]["bf16"]
    (out / "seed-1/state.json").write_text(json.dumps(state))
    page = write_results(out, tmp_path / "page").read_text()
    assert "no run yet" not in page
    assert "so far" not in page
    assert "## Storage in bf16\n\nSeed 0 alone, also for what stands beside.\n" in page
    assert re.search(r"\| 9\. .* \| \*\*yes, one seed\*\* \|", page)
    assert re.search(r"\| 9 \|.*\(rows\)", page)


def test_damaged_scores_are_named(tmp_path: Path) -> None:
    out = Folder(tmp_path / "out", (0,), FEW).write()
    write_results(out, tmp_path / "page")
    for file in ("seed-0.jsonl", "plan.json"):
        path = tmp_path / "page/scores" / file
        kept = path.read_text()
        for text in ("{", "{}", '{"experiments": [0]}'):
            path.write_text(text)
            with pytest.raises(FormatError, match=re.escape(file)):
                write_results(out, tmp_path / "page")
        path.write_text(kept)


def test_a_page_can_be_made_before_anything_has_run(tmp_path: Path) -> None:
    out = Folder(tmp_path / "out", seeds=(0,), scores={}, grid={}).write()
    page = write_results(out, tmp_path / "page").read_text()
    assert "13 × not enough data" in page
    assert "No run has scores yet." in page
    assert "no sweep over the grid yet" in page
    with pytest.raises(MsaError, match=r"plan\.json"):
        write_results(tmp_path / "nothing", tmp_path / "page")


def test_what_was_fixed_later_is_told(tmp_path: Path) -> None:
    out = Folder(tmp_path / "out", seeds=(0,), scores={"qlora": (0.3, 0.8), "bf16": (0.3, 0.8)}).write()
    plan = json.loads((out / "plan.json").read_text())
    for entry in plan["experiments"]:
        entry["fixed"] = "2026-02-01T00:00:00" if entry["name"] == "qlora" else plan["fixed"]
    (out / "plan.json").write_text(json.dumps(plan))
    page = write_results(out, tmp_path / "page").read_text()
    assert "Fixed later: qlora (2026-02-01T00:00:00)." in page
    assert "Runs that ended before they were fixed: seed 0 qlora." in page


def test_a_grid_that_failed_is_told_in_one_line(tmp_path: Path) -> None:
    out = Folder(tmp_path, seeds=(0,), scores={"msa-lora": (0.3, 0.8)}, grid={}).write()
    path = out / "seed-0/state.json"
    state = json.loads(path.read_text())
    state["experiments"]["hindsight"] = {"error": "the target knows nothing\n  question: who?"}
    path.write_text(json.dumps(state))
    assert "seed 0, hindsight: failed: the target knows nothing" in collect(out).problems


def test_rows_of_the_grid_are_paired_by_their_question(tmp_path: Path) -> None:
    out = Folder(tmp_path, seeds=(0,), rows=True).write()
    before = claim_of(out, "11").parts[0].difference
    for path in (out / "seed-0/hindsight").rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()][1:]  # a row less, and numbered anew
        path.write_text("".join(json.dumps(row | {"index": i}) + "\n" for i, row in enumerate(records)))
    after = claim_of(out, "11").parts[0].difference
    assert before is not None
    assert after is not None
    assert before.low is not None
    assert after.low is not None
    assert after.mean == pytest.approx(before.mean, rel=0.05), "over the rows that are left"
    for path in (out / "seed-0/hindsight").rglob("*.jsonl"):
        path.write_text(path.read_text().replace("?", " and why?"))
    other = claim_of(out, "11").parts[0].difference
    assert other is not None
    assert other.low is None, "no row is shared"


def test_two_points_are_compared_on_the_rows_that_both_have() -> None:
    def scores(*rows: float) -> Scores:
        values = {name: {str(row): (value,) * 4 for row, value in enumerate(rows)} for name in ("forget", "retain")}
        means = dict.fromkeys((*measures.FORGET, *measures.RETAIN), sum(rows) / len(rows))
        return Scores(means, values)

    first = Point(scores(0.9, 0.5, 0.1), scores(1, 1, 1), scores(0, 0, 0))
    second = Point(scores(0.8, 0.6), scores(1, 1), scores(0, 0))
    own, other = measures.on_shared_rows(first, second)
    assert measures.measure(first, "distance") == pytest.approx(0.5)
    assert measures.measure(own, "distance") == pytest.approx(0.7)
    assert measures.measure(other, "distance") == pytest.approx(0.7)
    bare = Point(Scores({"rouge_l_f": 1.0}))
    assert measures.on_shared_rows(bare, second) == (bare, second), "without records, points stay as they are"


def test_a_grid_on_other_rows_is_told(tmp_path: Path) -> None:
    out = Folder(tmp_path, seeds=(0,)).write()
    assert not collect(out).problems
    path = out / "seed-0/hindsight/sweep/target/report.json"
    report = json.loads(path.read_text())
    report["metrics"]["rouge_l_f"]["value"] = 0.5
    path.write_text(json.dumps(report))
    assert "other rows than the run msa-lora: the target's rouge_l_f differ" in collect(out).problems[0]


def test_the_script_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Folder(tmp_path / "out", (0,), {"msa-lora": (0.3, 0.8)}).write()
    script = str(ROOT / "examples/real_model/results.py")
    monkeypatch.setattr(sys, "argv", [script, str(out), str(tmp_path / "page")])
    runpy.run_path(script, run_name="__main__")
    assert Path(capsys.readouterr().out.strip()).is_file()


def test_the_page_of_the_documentation_is_made_of_the_scores_that_are_kept(tmp_path: Path) -> None:
    kept, published = ROOT / "examples/real_model/scores", ROOT / "docs/explanation/results-smollm2.md"
    shutil.copytree(kept, tmp_path / "scores")
    page = write_results(kept, tmp_path, tmp_path / "site/page.md")
    assert page.read_text("utf-8") == published.read_text("utf-8")
    assert [file.name for file in sorted((page.parent / "figures").iterdir())] == [
        file.name for file in sorted((published.parent / "figures").iterdir())
    ]


def test_what_attacks_bring_back_is_told_beside_target_and_ideal(tmp_path: Path) -> None:
    attacked = {"msa-lora": (0.34, 0.16, 0.54), "npo": (0.02, 0.0, 0.12)}
    out = Folder(tmp_path, (0,), FEW, attacked=attacked).write()
    page = write_results(out, out).read_text("utf-8").partition("## Under attack")[2]
    assert page.count("**34 % (16 % to 54 %)**") == len(ATTACKS)  # it leaks
    assert page.count("| 2 % (0 % to 12 %) ") == len(ATTACKS)
    assert "| 0.900 ± 0.020 |" in next(line for line in page.splitlines() if line.startswith("| target"))
    assert "| 0.340 ± 0.020 |" in page
    for name in ("relearn-part", "relearn-retain"):
        drawn = (out / "figures" / f"{name}.svg").read_text("utf-8")
        assert all(f">{model}</text>" in drawn for model in ("target", "ideal", "MSA (LoRA)", "NPO"))


def test_attacks_over_several_seeds_have_their_spread(tmp_path: Path) -> None:
    out = Folder(tmp_path, (0, 1), FEW, attacked={"npo": (0.1, 0.0, 0.2)}).write()
    edited = out / "seed-1/runs/npo/attacks/report.json"
    edited.write_text(edited.read_text().replace('"share": 0.1', '"share": 0.3'))
    page = write_results(out, out).read_text("utf-8").partition("## Under attack")[2]
    assert page.count("| 20 % ± 14 % ") == len(ATTACKS)


def test_each_run_has_the_present_verdict_beside_the_one_of_its_time(tmp_path: Path) -> None:
    page = write_results(Folder(tmp_path / "out", (0,), FEW, rows=True).write(), tmp_path / "page").read_text()
    section = page.partition("## The verdicts, then and now")[2].partition("\n## ")[0]
    assert "× PASS → " in section
    assert re.search(r"The ideal itself, in the place of an unlearned model: PARTLY \(undecided: too few rows", section)
    cells = [line.split("|")[3:6] for line in section.splitlines() if line.startswith("| MSA (LoRA) |")]
    assert cells == [[" PASS ", " PARTLY ", cells[0][2]]]
    assert re.fullmatch(r" \d of 6 ", cells[0][2])
