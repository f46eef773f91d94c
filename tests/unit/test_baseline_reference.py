"""The reference's log-probabilities on disk: made once, of as many rows at a time as fit, for one model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.baselines.objective import ReferenceCache
from msa_lite.data import IGNORE, Example
from msa_lite.errors import MismatchError
from msa_lite.io.weights.hub import Source
from tests.support.fits import PAD, VOCABULARY, ragged_rows
from tests.unit.test_baseline_methods import tiny


class Untouchable:
    """A model that nobody may run."""

    training = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was asked for {name}")


@pytest.fixture
def cache(tmp_path: Path) -> ReferenceCache:
    source = Source("some/model", tmp_path / "model", "a" * 40)
    return ReferenceCache(
        tmp_path / "reference", source, False, {"forget": ragged_rows(11), "other": ragged_rows(3, 1)}
    )


def test_kept_values_are_those_of_a_plain_loop(cache: ReferenceCache) -> None:
    model = tiny("llama", attention_dropout=0.5).train()  # which is off in both
    found = cache.values(model, PAD)
    assert model.training
    assert found.keys() == cache.sets.keys()
    for name, rows in cache.sets.items():
        for row, value in zip(rows, found[name], strict=True):
            with torch.no_grad():
                chances = model.eval()(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
            pairs = pairwise(range(len(row.ids)))
            wanted = sum(float(chances[i, row.ids[j]]) for i, j in pairs if row.labels[j] != IGNORE)
            assert value == pytest.approx(wanted, abs=1e-4, rel=1e-4)


def test_values_are_worked_out_once(cache: ReferenceCache) -> None:
    first = cache.values(tiny("llama"), PAD)
    cache.check()
    assert cache.values(Untouchable(), PAD) == first
    elsewhere = replace(cache, model=replace(cache.model, name="the same by another name"))
    elsewhere.check()
    assert elsewhere.values(Untouchable(), PAD) == first


@pytest.mark.parametrize("most", [2, 1, 0])
def test_values_are_made_of_fewer_rows_at_a_time_when_memory_runs_out(
    most: int, cache: ReferenceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msa_lite.baselines import objective as reference

    wanted = replace(cache, folder=cache.folder.with_name("wanted")).values(tiny("llama"), PAD)
    make = reference.make_batch

    def small(rows: Any, *more: Any) -> Any:
        if len(rows) > most:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return make(rows, *more)

    monkeypatch.setattr(reference, "make_batch", small)
    if not most:
        with pytest.raises(RuntimeError, match="ALLOC_FAILED"):  # the fit then steps down
            cache.values(tiny("llama"), PAD)
        return
    found = cache.values(tiny("llama"), PAD)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-4)


def test_values_of_other_rows_are_made_anew(cache: ReferenceCache) -> None:
    cache.values(tiny("llama"), PAD)
    row = cache.sets["other"][0]
    for changed in (replace(row, ids=[5, *row.ids[1:]]), replace(row, labels=[IGNORE, IGNORE, *row.labels[2:]])):
        other = replace(cache, sets={**cache.sets, "other": [changed]})
        other.check()
        with pytest.raises(AssertionError, match="the model was asked"):
            other.values(Untouchable(), PAD)
        assert len(other.values(tiny("llama"), PAD)["other"]) == 1


def test_values_of_another_model_are_refused(cache: ReferenceCache) -> None:
    cache.check()  # nothing there yet
    cache.values(tiny("llama"), PAD)
    other = replace(cache, model=Source("my/model", cache.model.folder, "b" * 40))
    with pytest.raises(MismatchError, match=r"a{40}.* my/model .*b{40}.*remove that folder"):
        other.check()


def test_values_of_a_quantised_model_are_told_apart(cache: ReferenceCache) -> None:
    cache.values(tiny("llama"), PAD)
    quantised = replace(cache, quantised=True)
    with pytest.raises(MismatchError, match=r"another reference model \(a{40}\) than some/model \(a{40}, in 4 bits\)"):
        quantised.check()


def test_a_pass_that_fails_leaves_no_values(cache: ReferenceCache) -> None:
    model = tiny("llama").train()
    bad: Example = replace(cache.sets["other"][0], ids=[VOCABULARY + 1] * 4, labels=[IGNORE, 3, 4, 5])
    with pytest.raises(IndexError):
        replace(cache, sets={"forget": cache.sets["forget"], "bad": [bad]}).values(model, PAD)
    assert not cache.folder.exists()
    assert cache.values(model, PAD).keys() == cache.sets.keys()
