"""The table of methods and the settings that a user may give; passes through a model and its reference; the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from msa_lite.baselines import methods
from msa_lite.baselines.losses import check_layer, layer_activations
from msa_lite.baselines.methods import METHODS, Method, Value, check_method, settings_grid
from msa_lite.data import IGNORE
from msa_lite.errors import UsageError
from msa_lite.io.models.heads import split_model
from msa_lite.train.objectives.reference import Batch, FitReference, answer_logits, freeze_copy, make_batch
from tests.support.fits import PAD, VOCABULARY, ragged_rows, with_adapter
from tests.support.models import tiny_model

KINDS = ["llama", "qwen2", "olmo2", "gpt2"]

RETAIN: dict[str, Value] = {"forget_weight": 1.0, "retain_weight": 1.0, "retain_loss": "nll"}
# As in open-unlearning's configurations (Dorna et al., 2025).
DEFAULTS: dict[str, dict[str, Value]] = {
    "grad_ascent": {"forget_weight": 1.0},
    "grad_diff": RETAIN,
    "npo": {**RETAIN, "beta": 0.1},
    "simnpo": {**RETAIN, "beta": 4.5, "delta": 0.0, "forget_weight": 0.125},
    "dpo": {**RETAIN, "beta": 0.1},
    "rmu": {"layer": 7, "steering": 2.0, "forget_weight": 1.0, "retain_weight": 1.0},
    "satimp": {**RETAIN, "beta1": 5.0, "beta2": 1.0, "forget_weight": 0.1},
    "wga": {**RETAIN, "beta": 1.0},
    "undial": {**RETAIN, "beta": 10.0, "retain_weight": 0.0},
}


def tiny(kind: str, **changes: Any) -> Any:
    """A model of three layers."""
    layers = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 3}
    return tiny_model(kind, vocab_size=VOCABULARY, **layers, **changes).eval()


def dense(model: Any, batch: Batch, positions: Any = None) -> tuple[Any, Any]:
    """All logits of `answer_logits`, 0 where none is made, and the labels."""
    chosen, labels = answer_logits(split_model(model), batch, positions)
    whole = torch.zeros(chosen.shape)
    whole[chosen.mask] = chosen.halves.logits(chosen.states)
    return whole, labels


def blocks_of(model: Any) -> Any:
    """The layers of a tiny model, or of one under an adapter."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.transformer.h if hasattr(inner, "transformer") else inner.model.layers


def final_norm(model: Any) -> Any:
    return model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm


# The table and its settings


def test_every_method_has_the_defaults_of_open_unlearning() -> None:
    assert {name: settings_grid(name, {}) for name in METHODS} == {name: [own] for name, own in DEFAULTS.items()}


def test_lists_are_tried_in_all_combinations_the_last_changing_fastest() -> None:
    grid = settings_grid("npo", {"retain_weight": [2, 4], "beta": 0.5, "learning_rate": [1e-5, 2e-5]})
    assert [(p["retain_weight"], p["learning_rate"]) for p in grid] == [(2, 1e-5), (2, 2e-5), (4, 1e-5), (4, 2e-5)]
    assert all(p["beta"] == 0.5 and p["retain_loss"] == "nll" for p in grid)
    assert settings_grid("grad_diff", {"retain_loss": ("nll", "kl")}) == [RETAIN, RETAIN | {"retain_loss": "kl"}]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("npo", {"betta": 0.1}, r"betta: not a parameter of npo \(did you mean 'beta'\?\)\. npo takes beta, "),
        ("grad_ascent", {"retain_weight": 1}, r"it is one of grad_diff, npo, simnpo, dpo, rmu, satimp, wga, undial\."),
        ("rmu", {"layer": 7.0}, r"layer: expected a whole number, got 7\.0"),
        ("rmu", {"layer": -1}, "layer: expected no less than 0, got -1"),
        ("npo", {"beta": 0.0}, r"beta: expected more than 0, got 0\.0"),
        ("npo", {"beta": float("nan")}, "beta: expected a number, got nan"),
        ("npo", {"beta": [0.1, float("inf")]}, "beta: expected a number, got inf"),
        ("npo", {"beta": "high"}, "beta: expected a number, got 'high'"),
        ("npo", {"beta": [[0.1, 0.2]]}, r"beta: expected a number, got \[0\.1, 0\.2\]"),
        ("npo", {"beta": []}, "beta: an empty list"),
        ("npo", {"beta": [1, 0.5, 1.0]}, "beta: a value stands twice"),
        ("npo", {"retain_weight": -1}, "retain_weight: expected no less than 0, got -1"),
        ("npo", {"retain_loss": "ce"}, "retain_loss: expected one of nll, kl, got 'ce'"),
    ],
)
def test_what_a_method_cannot_take_is_refused(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        settings_grid(name, given)
    assert str(caught.value).startswith(f"baseline.methods.{name}:")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        settings_grid("simnpo", {"beta": [0, -1], "layer": 3, "delta": "x", "gamma": 1})
    lines = [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert lines == ["beta", "beta", "layer", "delta", "gamma"]


def test_an_unknown_method_names_the_nearest_and_all() -> None:
    with pytest.raises(
        UsageError, match=r"no method 'simpno' \(did you mean 'simnpo'\?\); choose from grad_ascent, .*"
    ):
        check_method("simpno")
    with pytest.raises(UsageError, match=r"choose from .*undial, task_vector$"):
        check_method("qqqq")
    for name in (*METHODS, "task_vector"):
        check_method(name)


def test_a_method_added_to_the_table_is_known_with_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def margin(logits: Any, labels: Any, *, width: float = 3.0) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(methods.METHODS, "margin", Method(margin, "labels", retain_weight=2.0))
    check_method("margin")
    wanted = {"width": 5.0, "forget_weight": 1.0, "retain_weight": 2.0, "retain_loss": "nll"}
    assert settings_grid("margin", {"width": 5.0}) == [wanted]
    with pytest.raises(UsageError, match="width: not a parameter of npo; it is one of margin"):
        settings_grid("npo", {"width": 1})


# Passes


@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_logits_are_those_of_the_whole_pass(kind: str, adapted: bool) -> None:
    model = with_adapter(tiny(kind), moved=True).eval() if adapted else tiny(kind)
    rows = ragged_rows(5)
    batch = make_batch(rows, PAD, model.device)
    with torch.no_grad():
        logits, labels = dense(model, batch)
        assert logits.dtype == torch.float32
        assert logits.shape[:2] == labels.shape
        for i, row in enumerate(rows):  # each alone, unpadded: what a row says does not depend on its neighbours
            alone = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1]
            known = torch.tensor(row.labels[1:]) != IGNORE
            assert torch.allclose(logits[i][labels[i] != IGNORE], alone[known], atol=1e-5)
            assert labels[i][labels[i] != IGNORE].tolist() == [t for t in row.labels[1:] if t != IGNORE]


def test_other_positions_may_be_wanted() -> None:
    model, batch = tiny("llama"), make_batch(ragged_rows(3), PAD, "cpu")
    with torch.no_grad():
        logits, labels = dense(model, batch, batch.mask[:, 1:] == 1)
        whole = model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1]
    told = batch.mask[:, 1:] == 1
    assert torch.allclose(logits[told], whole[told], atol=1e-6)
    assert not logits[~told].any()
    assert labels.equal(batch.labels[:, 1:])


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_activations_are_the_outputs_of_that_layer(kind: str, layer: int) -> None:
    model, batch = tiny(kind), make_batch(ragged_rows(4), PAD, "cpu")
    with torch.no_grad():
        found = layer_activations(model, batch, layer)
        states = model(input_ids=batch.ids, attention_mask=batch.mask, output_hidden_states=True).hidden_states
        if layer == 2:  # of the last layer, the model tells what its norm makes
            found = final_norm(model)(found)
    here = batch.mask == 1
    assert torch.allclose(found[here], states[layer + 1][here], atol=1e-5)  # states[0] are the embeddings
    assert not torch.allclose(found[here], states[layer][here], atol=1e-2)


def count_runs(model: Any) -> list[int]:
    """How often each layer runs from here on."""
    runs = [0] * len(blocks_of(model))

    def counter(index: int) -> Callable[..., None]:
        def count(*args: Any) -> None:
            runs[index] += 1

        return count

    for index, block in enumerate(blocks_of(model)):
        block.register_forward_pre_hook(counter(index))
    return runs


@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_above_neither_run_nor_get_gradients(kind: str, adapted: bool) -> None:
    model = with_adapter(tiny(kind), moved=True) if adapted else tiny(kind)
    runs, batch = count_runs(model), make_batch(ragged_rows(4), PAD, "cpu")
    layer_activations(model, batch, 1).sum().backward()
    assert runs == [1, 1, 0]
    reached = [any(p.grad is not None and p.grad.any() for p in block.parameters()) for block in blocks_of(model)]
    assert reached == [True, True, False]
    with torch.no_grad():
        model(input_ids=batch.ids)
    assert runs == [2, 2, 1]  # whole again


def test_a_model_is_whole_again_after_an_error() -> None:
    model = tiny("llama")
    before, names = list(blocks_of(model)), list(model.state_dict())
    broken = Batch(torch.full((1, 3), VOCABULARY + 5), torch.ones(1, 3, dtype=torch.long), torch.zeros(1, 3))
    with pytest.raises(IndexError):
        layer_activations(model, broken, 0)
    assert [a is b for a, b in zip(blocks_of(model), before, strict=True)] == [True] * 3
    assert list(model.state_dict()) == names
    assert not blocks_of(model)[0]._forward_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_copy_of_the_first_layers_says_the_same_and_stays(kind: str) -> None:
    model, batch = tiny(kind).train(), make_batch(ragged_rows(4), PAD, "cpu")
    copy = freeze_copy(model, 2)
    assert (len(blocks_of(copy)), len(blocks_of(model))) == (2, 3)
    assert not copy.training
    assert not any(p.requires_grad for p in copy.parameters())
    assert all(p.requires_grad for p in model.parameters())
    model.eval()
    with torch.no_grad():
        before = layer_activations(model, batch, 1)
        assert layer_activations(copy, batch, 1).equal(before)
        for parameter in model.parameters():
            parameter.add_(0.1)
        assert layer_activations(copy, batch, 1).equal(before)
        assert not torch.allclose(layer_activations(model, batch, 1), before, atol=1e-2)


def test_a_whole_frozen_copy_keeps_every_layer() -> None:
    model, batch = tiny("llama"), make_batch(ragged_rows(2), PAD, "cpu")
    with torch.no_grad():
        assert dense(freeze_copy(model), batch)[0].equal(dense(model, batch)[0])


@pytest.mark.parametrize("training", [True, False])
def test_the_reference_is_the_model_with_its_adapter_off(training: bool) -> None:
    batch = make_batch(ragged_rows(4), PAD, "cpu")
    with torch.no_grad():
        before = dense(tiny("llama"), batch)[0]
    model = with_adapter(tiny("llama"), moved=True).train(training)
    asked = {name: p.requires_grad for name, p in model.named_parameters()}
    with FitReference(model, None, None).running() as reference:
        assert dense(reference, batch)[0].equal(before)
        assert not torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), FitReference(model, None, None).running():
        raise ZeroDivisionError
    assert model.training is training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == asked
    assert torch.is_grad_enabled()
    assert not torch.allclose(dense(model, batch)[0], before, atol=1e-2)


def test_dropout_is_off_in_the_reference() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
    model, batch = (
        get_peft_model(tiny_model("gpt2", vocab_size=VOCABULARY), config).train(),
        make_batch(ragged_rows(2), PAD, "cpu"),
    )
    with FitReference(model, None, None).running() as reference:
        first, second = (dense(reference, batch)[0] for _ in range(2))
    assert first.equal(second)


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 4}, {"n_layer": 4}, {"n_layers": 4}, {"text_config": {"num_hidden_layers": 4}}]
)
def test_a_layer_that_the_model_has_not_is_refused(config: dict[str, Any]) -> None:
    for layer in (0, 3):
        check_layer("some/model", config, layer)
    with pytest.raises(UsageError, match=r"rmu\.layer: 4, but some/model has 4 layers, 0 to 3"):
        check_layer("some/model", config, 4)
