"""The table of methods and the settings that a user may give; passes through a model and its reference; the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_lite.baselines import methods, objective
from msa_lite.baselines.losses import check_layer, layer_activations
from msa_lite.baselines.methods import METHODS, Method, Value, check_method, settings_grid
from msa_lite.baselines.objective import reference_log_probs
from msa_lite.data import IGNORE
from msa_lite.errors import UsageError
from msa_lite.io.models import heads
from msa_lite.io.models.heads import split_model
from msa_lite.train.objectives.reference import Batch, FitReference, answer_logits, freeze_copy, make_batch
from tests.support.fits import PAD, VOCABULARY, ragged_rows, with_adapter
from tests.support.models import tiny_model
from tests.unit.test_baseline_objective import (
    FORGET,
    ROWS,
    assert_alike,
    each_mode,
    gradients,
    objective_of,
    point,
    to_train,
)

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


# The memory of a baseline's step stays below what a fit has tried; the log-probabilities of its reference.


@each_mode
@pytest.mark.parametrize("name", ["grad_diff", "npo", "dpo", "rmu", "undial"])  # one for each kind of pass
def test_no_pass_holds_more_tokens_than_a_micro_batch_of_the_longest_rows(name: str, full: bool) -> None:
    made, model = objective_of(point(name), name, full), to_train(full)
    made.prepare(model)
    held: list[Tensor] = []
    body = (model if full else model.get_base_model()).base_model
    body.register_forward_pre_hook(lambda *args: held.append(args[2]["input_ids"]), with_kwargs=True)
    passes: dict[int, list[Tensor]] = {4: [], 1: []}
    for micro, values in passes.items():
        held.clear()
        made.step(model, ROWS, 0, micro, values.append)
        assert max(ids.numel() for ids in held) <= micro * made.longest
    assert len(passes[4]) < len(passes[1])


@pytest.mark.parametrize(("name", "retain_loss"), [("npo", "nll"), ("dpo", "kl"), ("satimp", "nll"), ("undial", "kl")])
def test_logits_are_made_a_block_at_a_time(name: str, retain_loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = objective_of(point(name, retain_loss), name, False), to_train(False)
    made.prepare(model)
    wanted = made.step(model, ROWS, 0, 4, lambda loss: loss.backward())
    gradient = gradients(model)
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    for rows in (1000, 3):
        sizes.clear()
        monkeypatch.setattr(heads, "_BLOCK_BYTES", 4 * VOCABULARY * rows)
        assert float(made.step(model, ROWS, 0, 4, lambda loss: loss.backward())) == pytest.approx(float(wanted))
        assert_alike(gradients(model), gradient)
        assert max(sizes) == 3 if rows == 3 else max(sizes) > 3


def test_long_alternatives_count_as_well_as_short_answers() -> None:
    long = [replace(row, ids=[5] * 60, labels=[IGNORE, *[5] * 59]) for row in FORGET]
    made, model = objective_of(point("dpo"), "dpo", False, alternatives=long), to_train(False)
    made.prepare(model)
    made._reference_scores = {"forget": [0.0] * 8, "alternatives": [0.0] * 8}
    sizes: list[int] = []
    body = model.get_base_model().base_model
    body.register_forward_pre_hook(lambda *args: sizes.append(args[2]["input_ids"].numel()), with_kwargs=True)
    tokens: list[int] = []  # of each pass with its backward pass: of both answers, or of retain rows

    def backward(loss: Tensor) -> None:
        tokens.append(sum(sizes))
        sizes.clear()

    made.step(model, ROWS, 0, 4, backward)
    assert max(tokens) <= 4 * made.longest == 240


# The reference's log-probabilities: those of a plain loop, of as many rows at a time as fit into memory


SETS = {"forget": ragged_rows(11), "other": ragged_rows(3, 1)}


def test_values_are_those_of_a_plain_loop() -> None:
    model = tiny("llama", attention_dropout=0.5).train()  # which is off in both
    found = reference_log_probs(model, SETS, PAD)
    assert model.training
    assert found.keys() == SETS.keys()
    for name, rows in SETS.items():
        for row, value in zip(rows, found[name], strict=True):
            with torch.no_grad():
                chances = model.eval()(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
            pairs = pairwise(range(len(row.ids)))
            wanted = sum(float(chances[i, row.ids[j]]) for i, j in pairs if row.labels[j] != IGNORE)
            assert value == pytest.approx(wanted, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("most", [2, 1, 0])
def test_values_are_made_of_fewer_rows_at_a_time_when_memory_runs_out(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reference_log_probs(tiny("llama"), SETS, PAD)
    make = objective.make_batch

    def small(rows: Any, *more: Any) -> Any:
        if len(rows) > most:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return make(rows, *more)

    monkeypatch.setattr(objective, "make_batch", small)
    if not most:
        with pytest.raises(RuntimeError, match="ALLOC_FAILED"):  # the fit then steps down
            reference_log_probs(tiny("llama"), SETS, PAD)
        return
    found = reference_log_probs(tiny("llama"), SETS, PAD)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-4)


def test_a_trial_step_and_the_fit_after_it_score_the_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    score, calls = objective.reference_log_probs, list[Any]()
    monkeypatch.setattr(objective, "reference_log_probs", lambda *given: (calls.append(given), score(*given))[1])
    made, model = objective_of(point("npo"), "npo", False), to_train(False)
    for _ in range(2):
        made.prepare(model)
        made.release()
    assert len(calls) == 1
