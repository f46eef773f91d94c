"""Where an update lies: against float64 arithmetic by hand, in known weights and elsewhere, and what is undecided."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.evals.qa import load_qa
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.location import (
    KnownStage,
    find_stage,
    locate_update,
    rank_changes,
    why_undecided,
)
from msa_lite.evidence.weights import ChangedWeights
from msa_lite.evidence_names import EVIDENCE
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.io.weights.known import KNOWN_FILE, KnownWeights, known_text
from msa_lite.report.evidence import EvidenceFinding

Tensors = Mapping[str, torch.Tensor]
Make = Callable[..., Path]
KNOWN = KnownWeights((r"layers\.0\.mlp\..*",), 0.3, 5)


def mask(name: str, value: torch.Tensor, known: KnownWeights = KNOWN) -> torch.Tensor:
    is_named = bool(known.among([name])) if ".layers.0.mlp." in name else False
    entries = known.entries(name, 0, value.numel()) if is_named else np.zeros(value.numel(), np.bool_)
    return torch.from_numpy(entries).view(value.shape)


def noise(value: torch.Tensor, name: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed + sum(name.encode()))).to(value.dtype)


def changed(folder: Path, out: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: change(name, value).contiguous() for name, value in tensors.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    return out


@pytest.fixture
def before(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama")


@pytest.fixture
def target(before: Path, tmp_path: Path) -> Path:
    """What a stage that changed the known weights makes of it, with its manifest and the file of the known weights."""
    out = tmp_path / "models/2-people"
    with stage_folder(out, "vector", {}, {"sources": {"prior": str(before)}}) as partial:
        made = changed(before, tmp_path / "made", lambda name, x: torch.where(mask(name, x), x + noise(x, name) / 9, x))
        shutil.copytree(made, partial, dirs_exist_ok=True)
        (partial / KNOWN_FILE).write_text(known_text({"2-people": KNOWN}))
    return out


def flat(folder: Path) -> np.ndarray:
    tensors = load_file(folder / "model.safetensors")
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])


def flat_mask(folder: Path) -> np.ndarray:
    tensors = load_file(folder / "model.safetensors")
    return np.concatenate([mask(name, tensors[name]).numpy().ravel() for name in sorted(tensors)])


def locate(target: Path, unlearned: Path) -> Any:
    return locate_update(target, unlearned, find_stage(target))


def test_the_exact_undo_lies_in_the_known_weights_and_takes_all_back(target: Path, before: Path) -> None:
    place, known = locate(target, before), int(flat_mask(before).sum())
    for ranking in (place.everywhere, place.within):
        assert (ranking.known, ranking.changed, ranking.largest) == (known, known, known)
        assert (ranking.precision, ranking.recall, ranking.auc) == (1, 1, 1)
    assert place.everywhere.chance < place.within.chance == pytest.approx(0.3, rel=0.07)
    assert place.energy == 1
    assert (place.cosine, place.cosine_known, place.undone) == pytest.approx((1, 1, 1), rel=1e-12)


def test_an_update_elsewhere_hits_nothing_and_takes_nothing_back(target: Path, tmp_path: Path) -> None:
    other = changed(target, tmp_path / "other", lambda name, x: torch.where(mask(name, x), x, x + noise(x, name)))
    place = locate(target, other)
    for ranking in (place.everywhere, place.within):
        assert (ranking.precision, ranking.recall, ranking.auc) == (0, 0, 0)
    assert (place.energy, place.cosine, place.undone) == (0, 0, 0)
    assert place.cosine_known is None  # nothing of it is there
    apart = changed(target, tmp_path / "apart", lambda name, x: x + noise(x, name) if "layers.1." in name else x)
    place = locate(target, apart)
    assert (place.everywhere.precision, place.everywhere.recall) == (0, 0)
    assert place.everywhere.auc < 0.5
    assert (place.within.precision, place.within.recall, place.within.auc) == (None, 0, 0.5)


def test_a_random_update_of_all_weights_is_at_chance(target: Path, tmp_path: Path) -> None:
    place = locate(target, changed(target, tmp_path / "random", lambda name, x: x + noise(x, name, 9)))
    for ranking in (place.everywhere, place.within):
        width = 4 * (ranking.chance / ranking.known) ** 0.5  # four standard errors
        assert ranking.precision == ranking.recall
        assert abs(ranking.precision - ranking.chance) < width
        assert abs(ranking.auc - 0.5) < 4 * (1 / 12 / ranking.known) ** 0.5
    chance, known = place.everywhere.chance, place.everywhere.known
    assert abs(place.energy - chance) < 8 * (chance / known) ** 0.5
    assert abs(place.cosine_known) < 4 / known**0.5


def test_a_random_update_of_linear_layers_alone_is_at_chance_among_their_weights_only(
    target: Path, tmp_path: Path
) -> None:
    """As of an adapter: right tensors, and any entries of them."""
    update = changed(target, tmp_path / "linear", lambda name, x: x + noise(x, name, 9) if "_proj" in name else x)
    place = locate(target, update)
    assert place.everywhere.auc > 0.6
    assert place.everywhere.precision > 1.2 * place.everywhere.chance
    assert abs(place.within.auc - 0.5) < 4 * (1 / 12 / place.within.known) ** 0.5


def test_a_half_undo_under_noise_is_what_float64_says(target: Path, before: Path, tmp_path: Path) -> None:
    stored = load_file(before / "model.safetensors")

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        return x + (stored[name] - x) / 2 + noise(x, name, 4) * 0.03

    unlearned = changed(target, tmp_path / "half", change)
    place = locate(target, unlearned)
    m, update, undo = flat_mask(before), flat(unlearned) - flat(target), flat(before) - flat(target)
    named = flat(changed(target, tmp_path / "named", lambda name, x: torch.ones_like(x) * (".0.mlp." in name))) > 0
    for ranking, place_of in ((place.everywhere, np.ones_like(m)), (place.within, named)):
        sizes, known = np.abs(update[place_of]), m[place_of]
        largest = np.argsort(-sizes, kind="stable")[: known.sum()]
        assert ranking.weights == len(known)
        assert ranking.precision == ranking.recall == pytest.approx(known[largest].mean(), rel=5e-3)
        assert ranking.auc == pytest.approx((sizes[known][:, None] > sizes[~known][None]).mean(), rel=1e-3)
        assert ranking.chance < ranking.precision < 1
    assert place.energy == pytest.approx((update[m] ** 2).sum() / (update**2).sum(), rel=1e-5)
    assert place.undone == pytest.approx(update @ undo / (undo @ undo), rel=1e-5)
    assert place.cosine == pytest.approx(update @ undo / np.sqrt((update @ update) * (undo @ undo)), rel=1e-5)
    inside = update[m]
    assert place.cosine_known == pytest.approx(inside @ undo[m] / np.sqrt(inside @ inside * (undo @ undo)), rel=1e-5)
    assert 0.4 < place.undone < 0.6


def test_the_target_itself_has_no_update(target: Path) -> None:
    place = locate(target, target)
    assert (place.energy, place.cosine, place.undone) == (None, None, 0)
    for ranking in (place.everywhere, place.within):
        assert (ranking.precision, ranking.recall, ranking.auc) == (None, 0, 0.5)


def test_blocks_and_the_dtype_change_nothing(
    target: Path, before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlearned = changed(target, tmp_path / "random", lambda name, x: x + noise(x, name, 9))
    whole = locate(target, unlearned)
    monkeypatch.setattr("msa_lite.evidence.location._BLOCK", 100)
    in_blocks = locate(target, unlearned)
    assert asdict(in_blocks)["everywhere"] == pytest.approx(asdict(whole)["everywhere"])
    assert in_blocks.undone == pytest.approx(whole.undone)
    rounded = changed(unlearned, tmp_path / "bf16", lambda name, x: x.bfloat16())
    assert locate(target, rounded).everywhere.auc == pytest.approx(whole.everywhere.auc, rel=0.05)


def test_a_ranking_by_hand() -> None:
    # By rising size: 3 others unchanged; one known; two of each; one of each.
    others, known = np.array([3, 0, 2, 1]), np.array([0, 1, 2, 1])
    ranking = rank_changes(others, known)
    assert (ranking.weights, ranking.known, ranking.changed, ranking.largest) == (10, 4, 7, 4)
    assert ranking.hits == pytest.approx(1 + 2 / 4 * 2)  # both of the largest size, and two of the next four
    assert ranking.auc == pytest.approx((1 * 3 + 2 * (3 + 1) + 1 * (5 + 0.5)) / 24)
    few = rank_changes(np.array([6, 0, 0]), np.array([2, 1, 1]))
    assert (few.largest, few.precision, few.recall) == (2, 1, 0.5)
    assert rank_changes(np.zeros(3, int), np.array([1, 0, 2])).auc is None


@pytest.mark.parametrize("gone", ["before", "manifest"])
def test_without_the_models_of_the_stage_the_place_is_known_but_not_the_direction(
    gone: str, target: Path, before: Path, tmp_path: Path
) -> None:
    unlearned, moved = shutil.copytree(before, tmp_path / "unlearned"), tmp_path / "elsewhere/model"
    shutil.copytree(target, moved)
    if gone == "before":
        manifest = json.loads((target / "manifest.json").read_text())
        manifest["sources"]["prior"] = str(tmp_path / "gone")
        (target / "manifest.json").write_text(json.dumps(manifest))
        moved = target
    place = locate(moved, unlearned)
    assert place.everywhere.precision == 1
    assert (place.cosine, place.cosine_known, place.undone) == (None, None, None)


def test_of_a_later_model_the_stage_is_found_beside_it(target: Path, before: Path, tmp_path: Path) -> None:
    later = changed(target, target.parent / "3-later", lambda name, x: x + noise(x, name) / 50)
    stage = find_stage(later)
    assert stage == KnownStage("2-people", KNOWN, before, target)
    update = flat(before) - flat(later)
    undo = flat(before) - flat(target)
    assert locate_update(later, before, stage).undone == pytest.approx(update @ undo / (undo @ undo), rel=1e-5)


def test_a_target_without_known_weights_is_undecided_before_any_work(
    before: Path, target: Path, tmp_path: Path
) -> None:
    for folder in (before, tmp_path / "nowhere"):
        assert why_undecided(folder).startswith("no known weights")
        with pytest.raises(UsageError, match="no known weights"):
            find_stage(folder)
    assert why_undecided(target) is None


def test_of_several_stages_one_is_named(target: Path) -> None:
    (target / KNOWN_FILE).write_text(known_text({"2-people": KNOWN, "3-more": KnownWeights(("norm.weight",))}))
    with pytest.raises(UsageError, match="2-people, 3-more"):
        find_stage(target)
    with pytest.raises(UsageError, match="no stage '4'"):
        find_stage(target, "4")
    assert find_stage(target, "3-more").weights.tensors == ("norm.weight",)


def test_models_that_do_not_fit_are_refused(target: Path, before: Path, tmp_path: Path, make_checkpoint: Make) -> None:
    stage = find_stage(target)
    with pytest.raises(MismatchError, match=r"embed_tokens\.weight: \(\d+, 64\)"):
        locate_update(target, make_checkpoint("llama", hidden_size=64), stage)
    with pytest.raises(UsageError, match="'q' fits no weight"):
        locate_update(target, before, replace(stage, weights=KnownWeights(("q",))))
    with pytest.raises(UsageError, match="no entry"):
        locate_update(target, before, replace(stage, weights=KnownWeights(("norm.weight",), 1e-9)))
    with pytest.raises(MismatchError, match=r"changed \d+ weights that are not the known ones"):
        locate_update(target, before, replace(stage, weights=replace(KNOWN, seed=6)))
    broken = changed(target, tmp_path / "broken", lambda name, x: x / 0 if name.endswith("norm.weight") else x)
    with pytest.raises(FormatError, match="NaN or infinite"):
        locate_update(target, broken, stage)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for rows in (1 << 11, 1 << 13):
        folders = [tmp_path / f"{name}-{rows}" for name in ("before", "target", "unlearned")]
        for number, folder in enumerate(folders):
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            tensor = torch.full((rows, 1 << 10), float(number)).index_fill(1, torch.tensor([3]), 7.0 * number)
            save_file({"layers.0.mlp.x": tensor}, folder / "model.safetensors")
        stage = KnownStage("s", KnownWeights(("x",)), folders[0], folders[1])
        tracemalloc.start()
        assert locate_update(folders[1], folders[2], stage).undone == pytest.approx(-1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0] < 110e6


def wired(target: Path, unlearned: Path) -> EvidenceFinding:
    """What the evidence of a run says of these two models."""
    scene = Scene(load_qa({}, None, 8), {"target": fetch(str(target)), "unlearned": fetch(str(unlearned))})  # type: ignore[arg-type]
    assert ChangedWeights().lacking(scene) == ""
    return ChangedWeights().conclude(ChangedWeights().observe(scene), scene)


def test_a_run_tells_the_undo_from_an_update_elsewhere(target: Path, before: Path, tmp_path: Path) -> None:
    undo = wired(target, before)
    assert undo.outcome == "mostly removed"
    values = {name: figure.value for name, figure in undo.figures["unlearned"].items()}
    assert values == pytest.approx(dict.fromkeys(EVIDENCE["weights"].figures, 1.0))
    away = changed(target, tmp_path / "away", lambda name, x: torch.where(mask(name, x), x, x + noise(x, name)))
    elsewhere = wired(target, away)
    assert elsewhere.outcome == "mostly elsewhere"
    assert elsewhere.figures["unlearned"]["undone"].value == 0


def test_a_run_whose_target_has_no_known_weights_is_undecided_before_work(before: Path) -> None:
    scene = Scene(load_qa({}, None, 8), {"target": fetch(str(before))})  # type: ignore[arg-type]
    assert "no known weights" in ChangedWeights().lacking(scene)
