"""The plain loss of a fit: its value and gradients are those of all logits, however its rows are run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from msa_lite.data import IGNORE, Example, group_rows, to_batch
from msa_lite.io.models import heads
from msa_lite.io.models.heads import split_model
from msa_lite.train.fit.until import measure_loss
from msa_lite.train.objectives import plain
from msa_lite.train.objectives import rows as beginnings
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.rows import (
    Beginning,
    Layout,
    can_pack,
    can_share,
    common_beginning,
    run_packed,
    run_rows,
)
from tests.support.fits import PAD, ragged_rows, with_adapter
from tests.support.models import VOCABULARY, tiny_model
from tests.support.plain import KINDS, PLAIN, SPECIAL, wide_model

PACKED = {*KINDS, "granite"}  # the others have a window, or more than plain attention


def rows_behind(common: int, count: int = 7) -> list[Example]:
    """Rows of unlike lengths behind the same tokens; one has no labels."""
    start = [random.Random(3).randrange(3, 150) for _ in range(common)]
    rows = [Example(e.index, start + e.ids, [IGNORE] * common + e.labels) for e in ragged_rows(count, seed=common)]
    rows[2] = Example(2, rows[2].ids, [IGNORE] * len(rows[2].ids))
    return rows


def gradients(model: Any) -> dict[str, torch.Tensor]:
    result = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    size = max(float(value.abs().max()) for value in other.values())
    assert max(float((one[name] - other[name]).abs().max()) for name in other) < 1e-5 * size  # fp32, summed otherwise


def train_wholly(model: Any, rows: list[Example]) -> float:
    """Run rows one by one with all their logits, and the backward pass of their mean; return it."""
    logits = [model(input_ids=torch.tensor([row.ids])).logits[0, :-1] for row in rows]
    labels = torch.cat([torch.tensor(row.labels[1:]) for row in rows])
    loss = cross_entropy(torch.cat(logits), labels, ignore_index=IGNORE)
    loss.backward()
    return float(loss.detach())


def backward(loss: Any) -> None:
    loss.backward()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Note (tokens of the beginning, rows) of each pass."""
    noted: list[tuple[int, int]] = []

    def run(halves: Any, batch: Any, beginning: Any = None) -> Any:
        noted.append((beginning.tokens if beginning else 0, len(batch["input_ids"])))
        return run_rows(halves, batch, beginning)

    def run_one_after_another(halves: Any, ids: Any, beginning: Any = None) -> Any:
        noted.append((beginning.tokens if beginning else 0, len(ids)))
        return run_packed(halves, ids, beginning)

    monkeypatch.setattr(plain, "run_rows", run)
    monkeypatch.setattr(plain, "run_packed", run_one_after_another)
    return noted


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, "lora") for kind in (*KINDS, "gemma2", "granite", "lfm2")]
    + [("llama", "full"), ("gpt2", "full"), ("granite", "full"), ("lfm2", "full"), ("llama", "head"), ("gpt2", "head")],
)
def test_a_step_has_the_loss_and_gradients_of_all_logits(
    kind: str, mode: str, runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind, **PLAIN.get(kind, {})) if kind in KINDS else copy.deepcopy(wide_model(kind))
    model = with_adapter(model, moved=True) if mode == "lora" else model
    if mode == "head":
        model.requires_grad_(False).get_output_embeddings().requires_grad_(True)
    model.train()
    monkeypatch.setattr(heads, "_BLOCK_BYTES", 4 * VOCABULARY * 5)  # blocks of five positions
    for common in (0, 14):
        rows = rows_behind(common)
        wanted, expected = train_wholly(model, rows), gradients(model)
        made = PlainLoss(rows, PAD)
        made.prepare(model)
        assert made._packs == (kind in PACKED)
        for micro, packs in ((7, True), (2, True), (2, False)):
            runs.clear()
            made._packs &= packs
            assert float(made.step(model, range(7), 0, micro, backward)) == pytest.approx(wanted, rel=1e-6)
            assert_alike(gradients(model), expected)
            assert sum(count for _, count in runs) == 6  # the row without labels does not run
            shares = common and kind in (*KINDS, "granite")  # the others do not keep all keys and values in a cache
            # Rows may have a little more in common than was put before them, by chance.
            assert all((tokens >= common) if shares else tokens == 0 for tokens, _ in runs)


def test_a_step_without_labels_changes_nothing() -> None:
    model = tiny_model("llama")
    made = PlainLoss([Example(0, [5, 6, 7], [IGNORE] * 3)], PAD)
    made.prepare(model)
    assert float(made.step(model, [0], 0, 1, backward)) == 0
    assert gradients(model) == {}


def test_the_loss_of_a_router_stays_the_models_own() -> None:
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=0.5))
    rows = ragged_rows(3)
    made = PlainLoss(rows, PAD)
    losses = []
    for with_router in (True, False):
        model.config.output_router_logits = with_router
        made.prepare(model)
        loss = made.step(model, range(3), 0, 3, backward).item()
        batch = to_batch(rows, PAD)
        assert loss == pytest.approx(model(**batch, output_router_logits=with_router).loss.item(), rel=1e-5)
        losses.append(loss)
    assert losses[0] > losses[1] + 0.5


# Rows of a pass do not see each other


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_a_beginning_is_shared_where_its_keys_and_values_are_all_that_later_tokens_need(kind: str) -> None:
    model = tiny_model(kind, **PLAIN.get(kind, {})) if kind in KINDS else wide_model(kind)
    assert can_share(split_model(model)) is (kind not in ("gemma2", "mistral", "lfm2"))
    if kind == "gpt2":
        assert not can_share(split_model(tiny_model(kind)))  # with dropout


def _turn_keys(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys.flip(2)


def _forget(cache: Any) -> None:
    cache.layers.clear()


@pytest.mark.parametrize("harm", [_turn_keys, _forget])
def test_a_beginning_that_changes_states_is_noticed(
    harm: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    halves, make = split_model(wide_model("llama")), Beginning.cache

    def cache(self: Beginning, rows: int) -> Any:
        made = make(self, rows)
        harm(made)
        return made

    monkeypatch.setattr(Beginning, "cache", cache)
    assert not can_share(halves)


def test_rows_that_see_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = split_model(copy.deepcopy(wide_model("llama")))
    assert can_share(halves)
    attention = halves.body.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0] + output[0].flip(0) / 2, *output[1:]))
    assert not can_share(halves)


def test_with_checkpointing_nothing_is_shared(runs: list[tuple[int, int]]) -> None:
    model, rows = tiny_model("llama"), rows_behind(14)
    wanted, expected = train_wholly(model, rows), gradients(model)
    made = PlainLoss(rows, PAD)
    made.prepare(model)
    runs.clear()  # of the check whether beginnings may be shared
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert float(made.step(model, range(7), 0, 4, backward)) == pytest.approx(wanted, rel=1e-6)
    assert_alike(gradients(model), expected)
    assert {tokens for tokens, _ in runs} == {0}


def test_the_beginning_ends_before_the_token_that_predicts_a_label() -> None:
    ids = list(range(3, 23))
    rows = [Example(0, [*ids, 30], [IGNORE] * 15 + ids[15:] + [30]), Example(1, [*ids, 31], [IGNORE] * 20 + [31])]
    assert common_beginning(rows) == 14
    assert common_beginning(rows[1:]) == 0
    assert common_beginning([*rows, Example(2, [4, *ids], [IGNORE, *ids])]) == 0
    short = beginnings._WORTH_SHARING - 1
    cut = [Example(i, [*ids[:short], 40 + i, 50], [IGNORE] * (short + 1) + [50]) for i in range(2)]
    assert common_beginning(cut) == 0


# Logits in blocks


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_a_model_comes_apart_and_is_left_as_it_was(kind: str) -> None:
    model = tiny_model(kind, **PLAIN["gpt2"]) if kind == "gpt2" else copy.deepcopy(wide_model(kind))
    for changed in (model, with_adapter(model, moved=True)):
        for training in (False, True):
            before, random_state = vars(changed.base_model).keys(), torch.random.get_rng_state()
            halves = split_model(changed.train(training))
            assert halves.body is not None
            assert changed.training is training
            assert torch.random.get_rng_state().equal(random_state)
            assert vars(changed.base_model).keys() == before
        ids = torch.tensor([[5, 9, 17, 4]])
        logits = halves.logits(halves.run(input_ids=ids, use_cache=False)[0][0])
        torch.testing.assert_close(logits, changed(input_ids=ids).logits[0])
    assert "forward" not in vars(halves.body)


def test_a_model_whose_body_does_not_tell_its_logits_stays_whole() -> None:
    model = copy.deepcopy(wide_model("llama"))
    forward = model.forward
    model.forward = lambda *args, **keywords: _shifted(forward(*args, **keywords), keywords["input_ids"])
    halves = split_model(model)
    assert (halves.body, halves.head) == (None, None)


def _shifted(output: Any, ids: Any) -> Any:
    """Add to logits what depends on tokens, which states alone do not tell."""
    output.logits = output.logits + ids.unsqueeze(-1) / 100
    return output


def test_no_more_logits_are_made_than_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, sizes = tiny_model("qwen2"), ragged_rows(6), []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    made = PlainLoss(rows, PAD)
    made.prepare(model)
    monkeypatch.setattr(heads, "_BLOCK_BYTES", 4 * VOCABULARY * 3)
    sizes.clear()
    made.step(model, range(6), 0, 6, backward)
    assert max(sizes) == 3
    count = sum(label != IGNORE for row in rows for label in row.labels)
    assert sum(sizes) == count
    sizes.clear()
    measure_loss(model, rows, PAD)
    assert max(sizes[2:]) == 3  # after the two runs over a few tokens that find the head
    assert sum(sizes[2:]) == count


# Rows in groups


def tokens_of(passes: list[list[int]], lengths: list[int], per_pass: int) -> int:
    return sum(per_pass + len(one) * max(lengths[row] for row in one) for one in passes)


def divisions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to cut a list into consecutive parts."""
    for cuts in range(1 << max(0, len(rows) - 1)):
        places = [0, *(i + 1 for i in range(len(rows) - 1) if cuts >> i & 1), len(rows)]
        yield [rows[a:b] for a, b in pairwise(places)]


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 90), st.sampled_from([0, 3, 40]))
def test_groups_hold_every_row_once_within_the_budget_and_pad_least(
    lengths: list[int], budget: int, per_pass: int
) -> None:
    passes = group_rows(lengths, budget, per_pass)
    assert sorted(row for one in passes for row in one) == list(range(len(lengths)))

    def fits(one: list[int]) -> bool:
        return len(one) == 1 or len(one) * max(lengths[i] for i in one) <= budget

    assert all(map(fits, passes))
    assert [max(lengths[i] for i in one) for one in passes] == sorted(
        (max(lengths[i] for i in one) for one in passes), reverse=True
    )
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if lengths:
        least = min(tokens_of(cut, lengths, per_pass) for cut in divisions(order) if all(map(fits, cut)))
        assert tokens_of(passes, lengths, per_pass) == least


# Rows one after another in a sequence: each gets the states and gradients that it gets alone.


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_only_models_of_plain_attention_take_packed_rows(kind: str) -> None:
    model = tiny_model(kind) if kind in KINDS else copy.deepcopy(wide_model(kind))
    assert can_pack(split_model(model)) is (kind not in ("gemma2", "mistral", "lfm2"))
    assert model.config._attn_implementation in ("sdpa", "eager")
    model.config._attn_implementation = "eager"
    assert not can_pack(split_model(model))


def test_packed_rows_that_see_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = split_model(copy.deepcopy(wide_model("llama")))
    assert can_pack(halves)
    attention = halves.body.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0].cumsum(1), *output[1:]))
    assert can_pack(halves) is False


def test_a_beginning_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = split_model(wide_model("llama"))
    assert can_pack(halves, lambda ids: Beginning.run(halves, ids))
    assert not can_pack(halves, lambda ids: Beginning.run(halves, ids[::-1]))
    positions = Layout.positions
    monkeypatch.setattr(Layout, "positions", property(lambda self: positions.fget(self) + self.start))
    assert not can_pack(halves, lambda ids: Beginning.run(halves, ids))


def test_tokens_behind_the_last_label_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
    rows = [Example(0, ids[0], [IGNORE, IGNORE, 5, 6, IGNORE, IGNORE]), Example(1, ids[1], [IGNORE, *ids[1][1:]])]
    noted: list[list[int]] = []

    def run(halves: Any, tokens: list[list[int]], beginning: Any = None) -> Any:
        noted.extend(tokens)
        return run_packed(halves, tokens, beginning)

    monkeypatch.setattr(plain, "run_packed", run)
    loss = PlainLoss(rows, PAD)
    model = tiny_model("llama")
    loss.prepare(model)
    loss.step(model, [0, 1], 0, 2, lambda value: value.backward())
    assert sorted(noted) == [[3, 4, 5], [9, 10, 11]]
