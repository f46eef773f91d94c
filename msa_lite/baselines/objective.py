"""The objective of a method, step by step, and its reference: log-probabilities of the rows, or a second model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msa_lite.baselines import losses
from msa_lite.baselines.losses import layer_activations, sequence_log_probs
from msa_lite.baselines.methods import METHODS, Method, Value
from msa_lite.data import IGNORE, Example, hash_ids
from msa_lite.io.models.devices import free_memory, is_out_of_memory
from msa_lite.io.models.heads import Halves, autocast, split_model
from msa_lite.train.objectives.objective import ALONE, Backward, Division, LossTerm, draw_rows
from msa_lite.train.objectives.reference import (
    Batch,
    ChosenLogits,
    FitReference,
    answer_logits,
    kl_divergence,
    make_batch,
)
from msa_lite.train.objectives.rows import count_labels

ANSWERS = (
    "I don't know.",
    "I'm not sure.",
    "I have no information about that.",
    "Sorry, I can't answer that question.",
    "That is something I know nothing about.",
    "I couldn't tell you.",
    "I haven't learnt anything about this.",
    "I'm afraid I don't have an answer to that.",
    "This is not known to me.",
    "I have never heard of that.",
)


def draw_answers(count: int, seed: int) -> list[str]:
    """Draw one answer for each of `count` questions, with replacement, once for the whole fit.

    open-unlearning draws anew in every epoch; then each draw would need reference log-probabilities of its own.
    """
    return random.Random(seed).choices(ANSWERS, k=count)


def reference_log_probs(
    model: Any, sets: Mapping[str, Sequence[Example]], pad: int, division: Division = ALONE
) -> dict[str, list[float]]:
    """Return the log-probability of each row, by set, under the reference: `model` before its training, in eval mode.

    Of several processes, each runs all rows, since each has only a part of the model; the first one's values count.
    """
    import torch

    training = model.training
    model.eval()
    with torch.no_grad(), autocast(model):
        scores = division.forward(model, lambda: {name: _score(model, rows, pad) for name, rows in sets.items()})
    model.train(training)
    return division.in_first(lambda: scores)


def _score(model: Any, examples: Sequence[Example], pad: int) -> list[float]:
    """Return S_i of each row in nats, in batches of rows of similar length, as large as fit into memory."""
    halves = split_model(model)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))

    def run(size: int) -> list[float]:
        values = [0.0] * len(examples)
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            batch = make_batch([examples[i] for i in chunk], pad, model.device)
            scores = sequence_log_probs(*answer_logits(halves, batch)).tolist()
            for i, score in zip(chunk, scores, strict=True):
                values[i] = score
        return values

    for size in (8, 4, 2):
        try:
            return run(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
    return run(1)


_COUNTS: Mapping[str, Callable[[Example], int]] = {
    "rows": lambda example: 1,
    "labels": count_labels,
    "tokens": lambda example: len(example.ids) - 1,
}
"""Units that a loss may be a mean over, and the number of them in a row."""


@dataclass
class BaselineObjective:
    """One method with its parameters and rows, for a `VectorFit`."""

    name: str
    parameters: Mapping[str, Value]
    """One point of `settings_grid`."""
    forget: Sequence[Example]
    """The examples of the fit."""
    retain: Sequence[Example]
    """Rows to draw from."""
    pad: int
    seed: int
    alternatives: Sequence[Example] = ()
    """For methods of pairs: the answer to prefer to each of `forget`."""
    full: bool = False
    """True when all weights are trained, so that the reference must be a second model."""
    _division: Division = field(default=ALONE, init=False)
    _model: Any = field(default=None, init=False)
    _halves: Halves | None = field(default=None, init=False)
    _reference: FitReference | None = field(default=None, init=False)
    _reference_scores: dict[str, list[float]] = field(default_factory=dict, init=False)

    @property
    def method(self) -> Method:
        """Return the entry of the table."""
        return METHODS[self.name]

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(e.ids) for rows in (self.forget, self._retain_rows, self.alternatives) for e in rows)

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records."""
        rows = {"retain": self._retain_rows, "alternatives": self.alternatives}
        return {
            "method": self.name,
            "parameters": {key: value for key, value in self.parameters.items() if key != "learning_rate"},
            "seed": self.seed,
            **{name: hash_ids(examples) for name, examples in rows.items()},
        }

    def prepare(self, model: Any, division: Division = ALONE) -> None:
        """Get the reference ready."""
        self._model, self._division = model, division
        self._halves = None if self.method.takes == "activations" else split_model(model)
        if self.method.reference == "log_probs" and not self._reference_scores:  # the trial step may have made them
            sets = {"forget": self.forget, "alternatives": self.alternatives}
            self._reference_scores = reference_log_probs(model, sets, self.pad, division)
        needs_copy = self.full and self.method.runs_reference(self.parameters)
        copy = division.freeze(model, self._copied_layers) if needs_copy else None
        self._reference = FitReference.of(model, self._halves, copy)

    def release(self) -> None:
        """Let go of the models."""
        self._model = self._halves = self._reference = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Backward) -> Any:
        """Run γ · loss of the forget rows, then λ · loss of their retain rows, as `Objective` describes."""
        total = self._forget_term.run(model, list(rows), micro, self.longest, backward, self._division)
        if self._retains:
            drawn = draw_rows(len(self.forget), len(self.retain), self.seed, epoch)[list(rows)].tolist()
            total = total + self._retain_term.run(model, drawn, micro, self.longest, backward, self._division)
        return total

    @property
    def _forget_term(self) -> LossTerm:
        losses_by_input = {"answers": self._answers, "pairs": self._pairs, "activations": self._activations}
        # A reference's logits beside the model's own take as much memory as a second row does.
        beside = [self.alternatives] if self.method.takes == "pairs" else []
        twice = bool(beside) or (self.method.reference == "logits")
        weight = float(self.parameters["forget_weight"])
        count, loss = _COUNTS[self.method.mean_over], losses_by_input[self.method.takes]
        return LossTerm(self.forget, weight, count, loss, 1 + twice, beside)

    @property
    def _retain_term(self) -> LossTerm:
        weight = float(self.parameters["retain_weight"])
        if self.method.takes == "activations":
            return LossTerm(self.retain, weight, _COUNTS["rows"], self._retain_activations)
        if self.parameters["retain_loss"] == "kl":
            return LossTerm(self.retain, weight, _COUNTS["tokens"], self._kl, 2)
        return LossTerm(self.retain, weight, count_labels, self._nll)

    @property
    def _retains(self) -> bool:
        return bool(self.parameters.get("retain_weight"))

    @property
    def _retain_rows(self) -> Sequence[Example]:
        return self.retain if self._retains else ()

    @property
    def _copied_layers(self) -> int | None:
        """Return the number of the reference's layers to keep; None for all."""
        return int(self.parameters["layer"]) + 1 if self.method.takes == "activations" else None

    @property
    def _keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the loss."""
        return {key: self.parameters[key] for key in self.method.keywords}

    def _batch(self, examples: Sequence[Example], rows: Sequence[int]) -> Batch:
        return make_batch([examples[i] for i in rows], self.pad, self._model.device)

    def _log_probs(self, name: str, rows: Sequence[int]) -> Any:
        import torch

        return torch.tensor([self._reference_scores[name][i] for i in rows], device=self._model.device)

    def _answers(self, model: Any, rows: Sequence[int]) -> Any:
        batch = self._batch(self.forget, rows)
        reference: tuple[Any, ...] = ()
        if self.method.reference == "log_probs":
            reference = (self._log_probs("forget", rows),)
        elif self.method.reference == "logits":
            reference = (self._reference_at_hand.logits(batch),)
        return self.method.loss(*self._logits(batch), *reference, **self._keywords)

    @property
    def _reference_at_hand(self) -> FitReference:
        assert self._reference is not None, "prepare comes first"
        return self._reference

    def _logits(self, batch: Batch, positions: Any = None) -> tuple[ChosenLogits, Any]:
        """Return the model's logits and their labels (`answer_logits`)."""
        assert self._halves is not None, "prepare comes first"
        return answer_logits(self._halves, batch, positions)

    def _pairs(self, model: Any, rows: Sequence[int]) -> Any:
        # Each in a batch of its own: alternatives are short, and padding them to the answers' length wastes time.
        sets = {"forget": self.forget, "alternatives": self.alternatives}
        gains = [
            sequence_log_probs(*self._logits(self._batch(examples, rows))) - self._log_probs(name, rows)
            for name, examples in sets.items()
        ]
        return self.method.loss(*gains, **self._keywords)

    def _activations(self, model: Any, rows: Sequence[int]) -> Any:
        batch = self._batch(self.forget, rows)
        states = layer_activations(model, batch, int(self.parameters["layer"]))
        aim = losses.control_vector(states.shape[-1], float(self.parameters["steering"]), self.seed).to(states.device)
        return self.method.loss(states, aim, batch.labels != IGNORE, **self._keywords)

    def _retain_activations(self, model: Any, rows: Sequence[int]) -> Any:
        batch = self._batch(self.retain, rows)
        with self._reference_at_hand.running() as reference:
            aim = layer_activations(reference, batch, int(self.parameters["layer"]))
        states = layer_activations(model, batch, int(self.parameters["layer"]))
        return self.method.loss(states, aim, batch.labels != IGNORE, **self._keywords)

    def _nll(self, model: Any, rows: Sequence[int]) -> Any:
        return losses.cross_entropy(*self._logits(self._batch(self.retain, rows)))

    def _kl(self, model: Any, rows: Sequence[int]) -> Any:
        batch = self._batch(self.retain, rows)
        mask = batch.mask[:, 1:] == 1
        reference = self._reference_at_hand.logits(batch, mask)
        return kl_divergence(self._logits(batch, mask)[0], reference, mask)
