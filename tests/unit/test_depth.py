"""The Unlearning Depth Score against its definition, and on models whose knowledge lies in a layer that is known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.attacks import attack
from msa_lite.attacks.attack import Ground, Subject
from msa_lite.attacks.depth import Depth, depth_score
from msa_lite.data import IGNORE, Row
from msa_lite.errors import MismatchError
from msa_lite.evals.engine import hidden_states
from msa_lite.evals.engine.models import Runner
from msa_lite.io.models.heads import find_layers
from msa_lite.io.weights.hub import Source, fetch
from tests.support.benchmark_data import make_prompter
from tests.support.models import tiny_model
from tests.support.plain import KINDS, SPECIAL, WIDE, Crowded, wide_model
from tests.support.records import differences

ROWS = [
    Row(0, "Where is it?", "It is over there."),
    Row(3, "Who was it that stood over there when nobody looked?", "Nobody"),
    Row(5, "Where?", "It is not there, it is over here."),
    Row(6, text="There was a cat over there, and it was there."),
]
LAYERS, FACT = 4, 2  # of the models below, and the layer that holds what they know


def ground(rows: Sequence[Row] = ROWS) -> Ground:
    return Ground(rows, [], [], rows, make_prompter())


def subject(name: str, model: Any, budget: int = 0) -> Subject:
    return Subject(name, Source(name, Path(name), name), _runner=Runner(model, budget))


def attacked(
    model: Any, target: Any, ideal: Any, rows: Sequence[Row] = ROWS, name: str = "unlearned", budget: int = 0
) -> list[dict[str, Any]]:
    """The records of a model, the target or the ideal under their names."""
    subjects = {"target": subject("target", target, budget), "ideal": subject("ideal", ideal, budget)}
    one = subjects.get(name) or subject(name, model, budget)
    subjects["ideal"].close = subjects["target"].close = one.close = lambda: None  # type: ignore[method-assign]
    ((trial, records),) = Depth().run(one, ground(rows), subjects)
    assert trial == Depth().trials(ground())[0]
    assert list(records) == ["forget"]
    return [dict(record) for record in records["forget"]]


@cache
def models() -> dict[str, Any]:
    """An ideal; a target that learnt the rows by one matrix of layer FACT; the same with a head that masks answers."""
    ideal = tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False, **WIDE).eval()
    target = copy.deepcopy(ideal)
    weight = target.model.layers[FACT].mlp.down_proj.weight
    target.requires_grad_(False)
    weight.requires_grad_(True)
    optimizer = torch.optim.Adam([weight], lr=0.05)
    texts = [next(iter(item.texts.values()))[0] for item in ground().benchmark(("forget",)).sets["forget"].items]
    for _ in range(30):
        for text in texts:
            ids, labels = torch.tensor([text.ids]), torch.tensor([text.labels])
            target(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weight.requires_grad_(False)
    masked = copy.deepcopy(target)
    masked.lm_head.weight.data = masked.lm_head.weight.data.roll(1, dims=0)
    return {"ideal": ideal, "target": target, "masked": masked}


def attack_one(name: str) -> list[dict[str, Any]]:
    made = models()
    return attacked(made[name], made["target"], made["ideal"], name=name)


# Against the definition.


def test_the_score_of_a_row_by_hand() -> None:
    # Layer 0 encodes nothing; layers 1 and 2 lost half of what they lose with the ideal, and all of it: .25 + 1.5 of 2.
    assert depth_score([0.02, 0.5, 1.5], [9.0, 0.25, 3.0], 0.05) == pytest.approx(0.875)
    assert depth_score([0.5, 1.5], [-1.0, 0.75], 0.05) == pytest.approx(0.375)  # a gain counts as no loss
    assert depth_score([0.05, -3.0], [1.0, 1.0], 0.05) is None  # the threshold has to be exceeded


def plain_losses(target: Any, source: Any, text: Any, labels: Sequence[int]) -> list[float]:
    """Δ_l in float64, a text and a layer at a time, without a cache."""

    def output_of(module_output: Any) -> Any:
        return module_output[0] if isinstance(module_output, tuple) else module_output

    def log_prob(layer: int | None) -> float:
        def patch(_module: Any, _inputs: Any, output: Any) -> Any:
            states = output_of(output).clone()
            for label in labels:
                states[0, label - 1] = own[layer][0, label - 1]
            return (states, *output[1:]) if isinstance(output, tuple) else states

        handle = None if layer is None else find_layers(target)[layer].register_forward_hook(patch)
        logits = target(input_ids=ids, use_cache=False).logits[0]
        if handle:
            handle.remove()
        return float(sum(logits[at - 1].log_softmax(-1)[text.ids[at]] for at in labels) / len(labels))

    ids, own = torch.tensor([text.ids]), {}
    for i, layer in enumerate(find_layers(source)):
        layer.register_forward_hook(lambda m, a, output, i=i: own.__setitem__(i, output_of(output).clone()))
    source(input_ids=ids, use_cache=False)
    base = log_prob(None)
    return [base - log_prob(layer) for layer in range(len(find_layers(target)))]


def plain_records(model: Any, target: Any, ideal: Any) -> list[dict[str, Any]]:
    model, target, ideal = (copy.deepcopy(one).double() for one in (model, target, ideal))
    records = []
    for item in ground().benchmark(("forget",)).sets["forget"].items:
        (text,) = next(iter(item.texts.values()))
        ids = torch.tensor([text.ids])
        scores = [one(input_ids=ids).logits[0].log_softmax(-1) for one in (target, ideal)]
        answer = [at for at, label in enumerate(text.labels) if at and label != IGNORE][:-1]
        known = [at for at in answer if scores[0][at - 1, text.ids[at]] - scores[1][at - 1, text.ids[at]] > 0.05]
        copies = [copy.deepcopy(one) for one in (ideal, model)]
        losses = [plain_losses(copy.deepcopy(target), one, text, known) if known else [] for one in copies]
        layers = [at for at, loss in enumerate(losses[0]) if loss > 0.05]
        parts = [losses[0][at] * min(max(losses[1][at] / losses[0][at], 0), 1) for at in layers]
        uds = sum(parts) / sum(losses[0][at] for at in layers) if layers else None
        losses[1] = [loss if at in layers else 0.0 for at, loss in enumerate(losses[1])]
        records.append({"uds": uds, "layers": layers, "ideal": losses[0], "own": losses[1], "count": len(known)})
    return records


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_records_equal_a_plain_computation_in_float64(kind: str) -> None:
    target = wide_model(kind)
    ideal, unlearned = (moved(target, seed) for seed in (1, 2))
    with torch.no_grad():
        wanted = plain_records(unlearned, target, ideal)
    records = attacked(unlearned, target, ideal)
    assert any(record["uds"] not in (None, 0.0, 1.0) for record in records)
    for record, plain in zip(records, wanted, strict=True):
        assert record["layers"] == plain["layers"]
        assert len(record["tokens"]) == plain["count"]
        assert record["losses_ideal"] == pytest.approx(plain["ideal"], rel=1e-4, abs=1e-4)
        assert record["losses"] == pytest.approx(plain["own"], rel=1e-4, abs=1e-4)
        scores, uds = [record["uds"], record["shallow"]], plain["uds"]
        assert scores == ([None] * 2 if uds is None else pytest.approx([uds, 1 - uds], abs=1e-3, rel=1e-3))


def moved(model: Any, seed: int) -> Any:
    """A copy with other weights, near enough for some of the model's predictions to be the same."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0.0)
    return other


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_batches_and_other_rows_do_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = wide_model(kind)
    ideal, unlearned = (moved(target, seed) for seed in (1, 2))
    wanted = attacked(unlearned, target, ideal)
    for budget, positions in ((1, 512), (40, 512), (10**6, 1), (10**6, 20)):
        monkeypatch.setattr(hidden_states, "_POSITIONS", positions)
        assert differences(attacked(unlearned, target, ideal, budget=budget), wanted, 1e-4) == set()
    alone = [record for row in ROWS[:3] for record in attacked(unlearned, target, ideal, [row])]
    assert differences(alone, wanted[:3], 1e-4) == set()
    assert differences(attacked(unlearned, target, ideal, ROWS[::-1])[::-1], wanted, 1e-4) == set()


def test_a_batch_too_large_for_the_memory_is_halved() -> None:
    target = wide_model("llama")
    ideal, unlearned = (moved(target, seed) for seed in (1, 2))
    wanted = attacked(unlearned, target, ideal)
    with Crowded(target, 100) as crowd, Crowded(unlearned, 60):
        assert differences(attacked(unlearned, target, ideal), wanted, 1e-4) == set()
    assert any(rows * width > 100 for rows, width in crowd.shapes)


# On models whose knowledge lies in a layer that is known.


def test_the_layers_from_the_fact_on_encode_it_and_the_ideal_scores_1_and_the_target_0() -> None:
    for record in attack_one("ideal"):
        assert record["layers"] == [FACT, LAYERS - 1]
        assert record["losses_ideal"][:FACT] == pytest.approx([0] * FACT, abs=1e-5, rel=1e-3)
        assert min(record["losses_ideal"][FACT:]) > 0.5
        assert record["losses"] == record["losses_ideal"]
        assert record["tokens"]
        assert record["uds"] == 1.0
    assert [record["uds"] for record in attack_one("target")] == pytest.approx([0.0] * len(ROWS), abs=1e-4, rel=1e-3)


def test_a_model_that_is_only_masked_still_knows() -> None:
    made = models()
    text = next(iter(ground().benchmark(("forget",)).sets["forget"].items)).texts["answer"][0]
    ids, labels = torch.tensor([text.ids]), torch.tensor([text.labels])
    with torch.no_grad():
        losses = {name: float(model(input_ids=ids, labels=labels).loss) for name, model in made.items()}
    assert losses["masked"] > losses["ideal"] > losses["target"] + 1  # it says nothing of the row any more
    assert [record["shallow"] for record in attack_one("masked")] == pytest.approx(
        [1.0] * len(ROWS), abs=1e-4, rel=1e-3
    )


def test_rows_that_the_target_does_not_know_are_skipped() -> None:
    model = models()["target"]
    for record in attacked(model, model, copy.deepcopy(model)):
        assert (record["uds"], record["shallow"], record["tokens"], record["layers"]) == (None, None, [], [])
        assert record["skipped"] == "the target does not know it better than the ideal"
    assert all("skipped" not in record for record in attack_one("ideal"))


# Memory, and models that cannot be patched.


def test_two_models_at_a_time_and_the_first_stage_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, most, loads = models() | {"older": models()["masked"]}, [0], list[str]()
    subjects = {name: Subject(name, Source(name, tmp_path / name, name)) for name in made}

    def load(folder: Path, added: Any = None) -> Any:
        loads.append(folder.name)
        most[0] = max(most[0], 1 + sum(one._runner is not None for one in subjects.values()))
        return copy.deepcopy(made[folder.name])

    monkeypatch.setattr(attack, "load_model", load)
    others = {name: subjects[name] for name in ("target", "ideal")}
    stages: list[tuple[str, int, int]] = []
    for name in ("masked", "ideal", "older"):
        assert subjects[name].runner  # other attacks have run on it
        list(Depth().run(subjects[name], ground(), others, lambda *args: stages.append(args)))
        subjects[name].close()
    assert most == [2]
    assert loads == ["masked", "target", "ideal", "masked", "ideal", "older"]
    rows = len(ground().forget)
    assert [total for _, done, total in stages if done == 0] == [2 * rows, rows]  # both stages, and later the second
    assert {label for label, _, _ in stages} == {"depth"}
    list(Depth(0.2).run(subjects["masked"], ground(), others))
    list(Depth().run(subjects["masked"], ground(ROWS[:2]), others))
    assert len(others["ideal"].results) == 3


def test_states_of_another_form_are_refused_and_no_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ideal = copy.deepcopy(wide_model("llama")), moved(wide_model("llama"), 1)
    layer = target.model.layers[0]
    forward = layer.forward
    stacked = Runner(target)
    layer.register_forward_hook(lambda module, inputs, output: output[None])
    target.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0][0], *inputs[1:]))
    assert stacked
    with pytest.raises(MismatchError, match=r"its layers give states of shape \(1, "):
        attacked(target, target, ideal, name="target")
    assert layer.forward == forward
    assert [len(one._forward_hooks) for one in target.model.layers] == [1, 0]
    assert [len(one._forward_hooks) for one in ideal.model.layers] == [0, 0]


def test_a_model_of_another_shape_is_refused_by_its_headers(make_checkpoint: Callable[..., Path]) -> None:
    folders = {"target": make_checkpoint("llama"), "ideal": make_checkpoint("llama", 1), "older": make_checkpoint(
        "llama", num_hidden_layers=3)}  # fmt: skip
    models = {name: fetch(str(folder)) for name, folder in folders.items()}
    with pytest.raises(MismatchError, match=r"the target has 2 layers of width .*, the older 3 of width"):
        Depth().fit_to(models)
    del models["older"]
    assert Depth().fit_to(models) == Depth()
