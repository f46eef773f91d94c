"""Steps that are timed for a plan: at the rung of the fit, and without a trace in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Example
from msa_lite.errors import StageError
from msa_lite.io.weights.hub import fetch
from msa_lite.train import rungs as timing
from msa_lite.train.rungs import Rung, StepProbe, time_steps
from msa_lite.train.settings import FitSettings
from tests.support.models import save_checkpoint, tiny_model


def rows(count: int, tokens: int) -> list[Example]:
    return [Example(i, [3 + i] * tokens, [3 + i] * tokens) for i in range(count)]


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_few_steps_are_timed_and_leave_the_weights_alone(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    models: list[tuple[Any, dict[str, Any]]] = []

    def load(*args: Any) -> Any:
        model = load_trainable(*args)
        models.append((model, {name: value.clone() for name, value in model.state_dict().items()}))
        return model

    load_trainable = timing.load_trainable
    monkeypatch.setattr(timing, "load_trainable", load)
    source = fetch(str(save_checkpoint(tmp_path / "prior", tiny_model("llama"))))
    settings = FitSettings(mode=mode, batch_size=4, lora_rank=2)
    times = time_steps(
        source, {"forget": rows(6, 9), "retain": rows(3, 5)}, dict.fromkeys(["forget", "retain"], settings), 0
    )
    assert times.keys() == {"forget", "retain"}
    for one in times.values():
        assert (one.steps, one.rung, one.peak) == (4, Rung(4), None)
        assert min(one.token, one.load) > 0
    ((model, before),) = models
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_steps_go_down_the_rungs_and_never_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(probe: StepProbe, model: Any, micro: int) -> str | None:
        is_light = all(getattr(module, "gradient_checkpointing", True) for module in model.modules())
        tokens = micro * probe.objective.longest
        return None if tokens <= 20 or (is_light and tokens <= 40) else "out of memory"

    monkeypatch.setattr(StepProbe, "fault", fault)
    source = fetch(str(save_checkpoint(tmp_path / "prior", tiny_model("llama"))))
    settings = dict.fromkeys(["long", "short", "longer"], FitSettings(batch_size=4, lora_rank=2))
    sets = {"long": rows(4, 10), "short": rows(4, 5), "longer": rows(4, 20)}
    times = time_steps(source, sets, settings, 0)
    assert {name: one.rung for name, one in times.items()} == {
        "short": Rung(4),
        "long": Rung(4, checkpointing=True),
        "longer": Rung(2, checkpointing=True),
    }
    with pytest.raises(StageError, match="no step of the fit is possible: out of memory"):
        time_steps(source, {"long": rows(4, 50)}, settings, 0)
