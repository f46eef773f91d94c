"""The rows of a step and the layers of a model, dealt to several processes."""

from __future__ import annotations

import pytest

from msa_lite.train.processes.fit import check_batch, epoch_order
from msa_lite.train.processes.shards import deal, decoder_layers
from tests.support.models import tiny_model

LENGTHS = [5, 9, 2, 7, 7, 3, 8, 1, 6, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_every_row_of_a_step_is_run_once_in_equally_many_passes(rows: int, count: int) -> None:
    passes = deal(LENGTHS[:rows], count, budget=18)
    assert sorted(row for own in passes for part in own for row in part) == [*range(rows)]
    assert len({len(own) for own in passes}) == 1
    assert all(len(part) * max(LENGTHS[row] for row in part) <= 18 for own in passes for part in own if part)


def test_the_work_is_about_equal() -> None:
    work = [sum(LENGTHS[row] for part in own for row in part) for own in deal(LENGTHS, 2, budget=100)]
    assert sum(work) == sum(LENGTHS)
    assert max(work) - min(work) <= max(LENGTHS)


def test_an_epoch_has_the_order_of_a_single_process() -> None:
    assert sorted(epoch_order(10, 0, 0)) == list(range(10))
    assert epoch_order(10, 0, 0) == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]  # as a Trainer with this seed had it
    assert epoch_order(10, 0, 0) != epoch_order(10, 0, 1) != epoch_order(10, 1, 1)


def test_a_batch_that_cannot_be_divided_is_told_with_the_nearest_ones() -> None:
    assert check_batch(32, 4) is None
    assert "use 30 or 33," in str(check_batch(32, 3))
    assert "use 4," in str(check_batch(2, 4))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "olmo2", "gpt2"])
def test_the_layers_of_a_model_are_known(kind: str) -> None:
    model = tiny_model(kind)
    layers = decoder_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert 0 < inside < sum(parameter.numel() for parameter in model.parameters())
