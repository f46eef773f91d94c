"""The attack that rounds weights: it brings back what an update smaller than half a step hid, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from msa_lite.attacks.attack import Ground, Subject
from msa_lite.attacks.quantise import _NF4, QUANTISATIONS, Quantise, linear_modules, rounded_model, score_kept
from msa_lite.data import IGNORE, Row, encode_qa
from msa_lite.errors import UsageError
from msa_lite.io.weights.hub import fetch
from tests.support.benchmark_data import make_prompter
from tests.support.models import make_lora, save_checkpoint, tiny_model

Make = Callable[..., Path]
ROWS = [
    Row(0, "Where is Ada?", "In Bern."),
    Row(1, "Who is Bo?", "A cook."),
    Row(2, "When was Cy born?", "In May."),
    Row(3, "What is Di's cat?", "Red."),
]
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # a row of 64 is a group
PROMPTER = make_prompter()
KEYS = ("ids", "labels")
NF4 = Quantise(("nf4",))


def make_ground(rows: list[Row] = ROWS) -> Ground:
    return Ground(rows, [], [], rows, PROMPTER, max_new_tokens=8)


def loss_of(model: Any) -> torch.Tensor:
    """The mean loss of the answers."""
    rows = encode_qa(ROWS, PROMPTER)
    ids, labels = (pad_sequence([torch.tensor(getattr(row, key)) for row in rows], True, IGNORE) for key in KEYS)
    logits = model(input_ids=ids.clamp(min=0)).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def tune(model: Any, parameters: list[Any], steps: int) -> None:
    """Learn the rows by heart."""
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def hide(model: Any, share: float) -> None:
    """Raise the loss by an update that keeps each weight within this share of the way to the next midpoint of NF4.

    The largest weights of a group stay: they are its scale.
    """
    values = torch.tensor(_NF4).diff() / 2  # to the next midpoint
    boxes = []
    for module in linear_modules(model):
        groups = module.weight.detach().view(-1, 64)
        scales = groups.abs().amax(1, keepdim=True)
        place = torch.searchsorted(torch.tensor(_NF4), groups / scales - 1e-4)  # they lie on values
        below, above = values[(place - 1).clamp(min=0)], values[place.clamp(max=14)]
        box = torch.minimum(below, above) * scales * share
        box[groups.abs() == scales] = 0
        boxes.append((module.weight, module.weight.detach().clone(), box.view_as(module.weight)))
    for _ in range(10):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for weight, before, box in boxes:
                moved = weight + weight.grad.sign() * box / 4 - before
                weight.copy_(before + torch.minimum(torch.maximum(moved, -box), box))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target that recites the rows, with weights that NF4 holds; one with them hidden; one with another update."""
    place = tmp_path_factory.mktemp("models")
    model = tiny_model("llama", **SIZES)
    tune(model, list(model.parameters()), 50)
    with torch.no_grad():
        for module in linear_modules(model):
            module.weight.copy_(QUANTISATIONS["nf4"].round(module.weight))
    tune(model, [p for name, p in model.named_parameters() if "proj" not in name], 20)
    folders = {"target": save_checkpoint(place / "target", model)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hide(model, 0.9)
    folders["hidden"] = save_checkpoint(place / "hidden", model)
    model.load_state_dict(before)
    hide(model, 12)
    folders["removed"] = save_checkpoint(place / "removed", model)
    return folders


def attack(folder: Path, settings: Quantise = NF4, ground: Ground | None = None) -> dict[str, Any]:
    """The records of the forget set by trial."""
    subject = Subject("unlearned", fetch(str(folder)))
    try:
        return {trial.name: records["forget"] for trial, records in settings.run(subject, ground or make_ground(), {})}
    finally:
        subject.close()


def mean(records: list[dict[str, Any]], score: str) -> float:
    return float(sum(record[score] for record in records) / len(records))


def test_what_is_hidden_below_half_a_step_comes_back_and_what_is_removed_does_not(models: dict[str, Path]) -> None:
    records = {name: attack(folder) for name, folder in models.items()}
    assert mean(records["target"]["plain"], "accuracy") == mean(records["target"]["nf4"], "accuracy") == 1.0
    assert mean(records["hidden"]["plain"], "accuracy") == mean(records["removed"]["plain"], "accuracy") == 0.0
    back, stays = records["hidden"]["nf4"], records["removed"]["nf4"]
    assert [record["generated"] for record in back] == [r["generated"] for r in records["target"]["nf4"]]
    assert mean(back, "probability") == pytest.approx(mean(records["target"]["nf4"], "probability"), rel=1e-4)
    assert mean(stays, "accuracy") == 0.0
    assert mean(stays, "extraction_strength") < 0.5 * mean(back, "extraction_strength")


def test_texts_are_scored_too_and_nothing_is_generated_from_them(models: dict[str, Path]) -> None:
    ground = make_ground([Row(0, text="Ada is in Bern, and Bo is a cook."), Row(1, text="Cy was born in May.")])
    records = attack(models["target"], Quantise(("int8",)), ground)
    assert [measure.name for measure in Quantise().measures(ground)][1] == "exact_memorization"
    assert all(0 < record["probability"] < 1 and "generated" not in record for record in records["int8"])
    assert records["int8"] != records["plain"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "adapter"])
def test_every_weight_is_put_back_bit_for_bit(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint("llama" if kind == "adapter" else kind)
    if kind == "adapter":
        folder = make_lora(folder, tmp_path / "adapter")
    subject = Subject("unlearned", fetch(str(folder)))
    model = subject.runner.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for form in QUANTISATIONS:
        with suppress(KeyboardInterrupt), rounded_model(model, form):
            changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
            raise KeyboardInterrupt
        linear = {name for name in before if (name.endswith("weight") and "layers" in name) or ".h." in name}
        linear = {n for n in linear if "norm" not in n and ".ln_" not in n and "lora" not in n and "bias" not in n}
        assert changed == linear, form
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    subject.close()


def test_a_model_that_is_stored_quantised_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    load_4bit(make_checkpoint("llama", **SIZES)).save_pretrained(tmp_path / "four-bit")
    with pytest.raises(UsageError, match=r"stored quantised, .*; give the model that it was made from"):
        attack(tmp_path / "four-bit")


def load_4bit(folder: Path) -> Any:
    """A model as users load it in 4 bits, with products in fp32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_rounded_model_is_the_one_that_transformers_loads_in_4_bits(kind: str, make_checkpoint: Make) -> None:
    folder = make_checkpoint(kind, **({"n_embd": 64} if kind == "gpt2" else SIZES))
    ids = torch.arange(40)[None]
    wanted = load_4bit(folder)(input_ids=ids).logits.detach()
    subject = Subject("target", fetch(str(folder)))
    with torch.no_grad(), rounded_model(subject.runner.model, "nf4"):
        logits = subject.runner.model(input_ids=ids).logits
    plain = subject.runner.model(input_ids=ids).logits.detach()
    subject.close()
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-4
    assert float((plain - wanted).abs().max() / wanted.abs().max()) > 1e-2


def test_q_is_the_share_of_a_score_that_outlives_quantisation() -> None:
    assert score_kept(0.8, 0.6) == pytest.approx(0.75)
    assert score_kept(0.2, 0.5) == 1.0
    assert score_kept(0.0, 0.3) == score_kept(0.0, 0.0) == 1.0
    assert score_kept(0.4, 0.0) == 0.0
