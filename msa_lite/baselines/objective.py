"""The objective of a method, step by step, and its reference: log-probabilities on disk, or a second model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.baselines import losses
from msa_lite.baselines.losses import layer_activations, sequence_log_probs
from msa_lite.baselines.methods import METHODS, Method, Value
from msa_lite.data import IGNORE, Example, hash_ids, pass_tokens
from msa_lite.errors import MismatchError
from msa_lite.io.files.writing import write_json
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.models.devices import free_memory, is_out_of_memory
from msa_lite.io.models.heads import autocast, split_model
from msa_lite.io.weights.hub import Source
from msa_lite.train.reference import (
    Batch,
    ChosenLogits,
    answer_logits,
    in_chunks,
    kl_divergence,
    make_batch,
    reference_of,
)
from msa_lite.train.share import ALONE, StepShare, run_passes, shortest

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


_FILE = "log_probs.json"


@dataclass(frozen=True)
class ReferenceCache:
    """Sequence log-probabilities of sets of rows under one model, kept in a folder."""

    folder: Path
    model: Source
    """The reference."""
    quantised: bool
    """True when the reference is held in 4 bits."""
    sets: Mapping[str, Sequence[Example]]
    """Rows by name."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Return all that the values depend on, for the manifest."""
        rows = {name: hash_ids(examples) for name, examples in self.sets.items()}
        return {"model": self.model.identity(), "quantised": self.quantised, "rows": rows}

    def check(self) -> None:
        """Raise MismatchError where the folder holds values of another model."""
        inputs = (load_manifest(self.folder) or {}).get("inputs", {})
        theirs, ours = (
            f"{(item.get('model') or {}).get('revision')}{', in 4 bits' if item.get('quantised') else ''}"
            for item in (inputs, self.inputs)
        )
        if inputs and theirs != ours:
            raise MismatchError(
                f"{self.folder} holds log-probabilities of another reference model ({theirs}) than {self.model.name} "
                f"({ours}); remove that folder, or choose another output"
            )

    def values(self, model: Any, pad: int, share: StepShare = ALONE) -> dict[str, list[float]]:
        """Return log-probabilities by set, one per row: from the folder, or computed with `model`, the reference.

        Of several processes, each computes them all, since each has only a part of the model; the first one writes.
        """
        import torch

        if not share.in_first(lambda: is_finished(self.folder, self.inputs)):
            training = model.training
            model.eval()
            with torch.no_grad(), autocast(model):
                scores = share.forward(
                    model, lambda: {name: _score(model, examples, pad) for name, examples in self.sets.items()}
                )
            model.train(training)
            share.in_first(lambda: self._write(scores))
        return share.in_first(lambda: json.loads((self.folder / _FILE).read_text("utf-8")))

    def _write(self, scores: Mapping[str, Sequence[float]]) -> None:
        with stage_folder(self.folder, "reference", self.inputs) as partial:
            write_json(partial / _FILE, scores)


def _score(model: Any, examples: Sequence[Example], pad: int) -> list[float]:
    """Return S_i of each row in nats, in batches of rows of similar length, as large as fit into memory."""
    halves = split_model(model)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))

    def run(size: int) -> list[float]:
        values = [0.0] * len(examples)
        for chunk in in_chunks(order, size):
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


Backward = Callable[[Any], None]


@dataclass(frozen=True)
class _Term:
    """A part of an objective: `weight` times the mean of `loss(model, rows)`."""

    examples: Sequence[Example]
    weight: float
    mean_over: str
    """rows, labels or tokens."""
    loss: Callable[[Any, Sequence[int]], Any]
    passes: int = 1
    """The sequences that one row takes up of a micro-batch."""
    beside: Sequence[Sequence[Example]] = ()
    """Other examples of each row, which run in batches of the same rows."""

    def run(
        self, model: Any, rows: Sequence[int], micro: int, longest: int, backward: Backward, share: StepShare = ALONE
    ) -> Any:
        """Run this process's share of `rows`, pass by pass, each with its backward pass; return its detached value.

        longest: the tokens that each of `micro` rows may have.
        """
        counts, size = [self._count(self.examples[i]) for i in rows], max(1, micro // self.passes)
        lengths = [max(len(examples[i].ids) for examples in (self.examples, *self.beside)) for i in rows]
        passes = share.passes(lengths, size * longest, pass_tokens(model.device))

        def loss(chunk: Sequence[int]) -> Any:
            part = sum(counts[i] for i in chunk) / sum(counts)
            return self.weight * part * self.loss(model, [rows[i] for i in chunk])

        spare = shortest([self.examples[i] for i in rows], counts)
        return run_passes(share, model, passes, spare, loss, backward)

    def _count(self, example: Example) -> int:
        if self.mean_over == "labels":
            return sum(label != IGNORE for label in example.labels[1:])
        return len(example.ids) - 1 if self.mean_over == "tokens" else 1


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
    cache: ReferenceCache | None = None
    """For methods that need log-probabilities of a reference."""
    full: bool = False
    """True when all weights are trained, so that the reference must be a second model."""
    _share: StepShare = field(default=ALONE, init=False)
    _model: Any = field(default=None, init=False)
    _frozen: Any = field(default=None, init=False)
    _halves: Any = field(default=None, init=False)
    _reference_halves: Any = field(default=None, init=False)
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

    def prepare(self, model: Any, share: StepShare = ALONE) -> None:
        """Get the reference ready."""
        self._model, self._share = model, share
        if self.method.takes != "activations":
            self._halves = split_model(model)
        if self.cache is not None:
            self._reference_scores = self.cache.values(model, self.pad, share)
        if self.full and self.method.runs_reference(self.parameters):
            self._frozen = share.freeze(model, self._frozen_layers)
        if self._halves is not None:
            self._reference_halves = split_model(self._frozen) if self._frozen is not None else self._halves

    def release(self) -> None:
        """Let go of the models."""
        self._model = self._frozen = self._halves = self._reference_halves = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Backward) -> Any:
        """Run γ · loss of the forget rows, then λ · loss of their retain rows, as `train.Objective` describes."""
        total = self._forget_term.run(model, list(rows), micro, self.longest, backward, self._share)
        if self._retains:
            drawn = self.draw(epoch)[list(rows)].tolist()
            total = total + self._retain_term.run(model, drawn, micro, self.longest, backward, self._share)
        return total

    def draw(self, epoch: int) -> Any:
        """Draw (forget rows,) the retain row of each, uniformly with replacement, from a generator of each epoch's."""
        import numpy as np

        return np.random.default_rng((self.seed, epoch)).integers(len(self.retain), size=len(self.forget))

    @property
    def _forget_term(self) -> _Term:
        run = {"answers": self._answers, "pairs": self._pairs, "activations": self._activations}[self.method.takes]
        # A reference's logits beside the model's own take as much memory as a second row does.
        beside = [self.alternatives] if self.method.takes == "pairs" else []
        twice = bool(beside) or (self.method.reference == "logits")
        weight = float(self.parameters["forget_weight"])
        return _Term(self.forget, weight, self.method.mean_over, run, 1 + twice, beside)

    @property
    def _retain_term(self) -> _Term:
        weight = float(self.parameters["retain_weight"])
        if self.method.takes == "activations":
            return _Term(self.retain, weight, "rows", self._retain_activations)
        if self.parameters["retain_loss"] == "kl":
            return _Term(self.retain, weight, "tokens", self._kl, 2)
        return _Term(self.retain, weight, "labels", self._nll)

    @property
    def _retains(self) -> bool:
        return bool(self.parameters.get("retain_weight"))

    @property
    def _retain_rows(self) -> Sequence[Example]:
        return self.retain if self._retains else ()

    @property
    def _frozen_layers(self) -> int | None:
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
            reference = (self._reference_logits(batch),)
        return self.method.loss(*answer_logits(self._halves, batch), *reference, **self._keywords)

    def _reference_logits(self, batch: Batch, positions: Any = None) -> ChosenLogits:
        context = partial(reference_of, self._model, self._frozen)
        return answer_logits(self._reference_halves, batch, positions, context)[0]

    def _pairs(self, model: Any, rows: Sequence[int]) -> Any:
        # Each in a batch of its own: alternatives are short, and padding them to the answers' length wastes time.
        sets = {"forget": self.forget, "alternatives": self.alternatives}
        gains = [
            losses.sequence_log_probs(*answer_logits(self._halves, self._batch(examples, rows)))
            - self._log_probs(name, rows)
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
        with reference_of(self._model, self._frozen) as reference:
            aim = layer_activations(reference, batch, int(self.parameters["layer"]))
        states = layer_activations(model, batch, int(self.parameters["layer"]))
        return self.method.loss(states, aim, batch.labels != IGNORE, **self._keywords)

    def _nll(self, model: Any, rows: Sequence[int]) -> Any:
        return losses.cross_entropy(*answer_logits(self._halves, self._batch(self.retain, rows)))

    def _kl(self, model: Any, rows: Sequence[int]) -> Any:
        batch = self._batch(self.retain, rows)
        mask = batch.mask[:, 1:] == 1
        reference = self._reference_logits(batch, mask)
        return kl_divergence(answer_logits(self._halves, batch, mask)[0], reference, mask)
