"""Read answers out of stored moments, with nothing but the target beside them.

    python -m tests.tools.moments_attack MODEL [--rows 4]

At the first layer, a position's input is its token's normed embedding (models without embeddings of positions). So a
row of a root that is one position's input is found by one look-up by cosine. The script measures moments of invented
answers, once as X and once as they are stored, and prints what each gives back: answers word by word, rows that are
single tokens, and the bag of tokens, as a test of each token of the vocabulary against the row space finds it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import load_file

from msa_lite.data import IGNORE, Example
from msa_lite.demo.history import make_people
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.merger.moments import load_moments
from msa_lite.train import moments

_SINGLE = 0.9  # cosine of a row that is one token
_IN_SPAN = 1e-3  # of a token's norm, at most, outside the row space
_RANK = 1e-5  # of the largest singular value


class _Taken(Exception):
    """The inputs of the first layer are known."""


def inputs_of_tokens(model: Any, layer: str) -> np.ndarray:
    """Return the inputs (tokens, in) that a layer gets for each token of the vocabulary, as a row of its own."""
    taken = list[Any]()

    def take(_layer: Any, inputs: tuple[Any, ...]) -> None:
        taken.append(inputs[0][:, 0].float())
        raise _Taken

    hook = model.get_submodule(layer).register_forward_pre_hook(take)
    for ids in torch.arange(len(model.get_input_embeddings().weight))[:, None].split(4096):
        try:
            with torch.no_grad():
                model(ids)
        except _Taken:
            pass
    hook.remove()
    return torch.cat(taken).double().numpy()


def spelled(root: np.ndarray, tokens: np.ndarray, answers: Sequence[Sequence[int]]) -> int:
    """Return how many answers come back in order, one look-up by cosine a row."""
    nearest = [int(at) for at in np.abs(_units(root) @ _units(tokens).T).argmax(axis=1)]
    text = f" {' '.join(map(str, nearest))} "
    return sum(f" {' '.join(map(str, answer))} " in text for answer in answers)


def single_rows(root: np.ndarray, tokens: np.ndarray) -> int:
    """Return how many rows of a root are one token."""
    return int((np.abs(_units(root) @ _units(tokens).T).max(axis=1) > _SINGLE).sum())


def bag(root: np.ndarray, tokens: np.ndarray) -> set[int]:
    """Return the tokens whose inputs lie in the row space of a root."""
    _, sizes, rows = np.linalg.svd(root, full_matrices=False)
    rows, units = rows[sizes > _RANK * sizes[0]], _units(tokens)
    return {*np.flatnonzero(np.linalg.norm(units - units @ rows.T @ rows, axis=1) < _IN_SPAN).tolist()}


def stored_root(model: Any, folder: Path, out: Path, rows: Mapping[str, Sequence[Example]], mix: bool) -> np.ndarray:
    """Measure the moments of a model in `folder`; return the first layer's root on the forget rows. mix: as it is."""
    names, plain = load_checkpoint(folder).tensors, mock.patch.object(moments, "mixed", lambda rows: rows.numpy())
    with mock.patch.dict({}) if mix else plain:
        moments.write_moments(out, {"target": {"revision": "-"}}, lambda: model, names, rows, pad=0)
    first = next(iter(load_moments(out).layers.values())).roots[0]
    files = {name: value for path in out.glob("*.safetensors") for name, value in load_file(path).items()}
    return files[f"forget.{first}"].astype(np.float64)


def first_layer(model: Any, folder: Path) -> str:
    """Return the path of the first linear layer."""
    return next(iter(moments.linear_layers(model, load_checkpoint(folder).tensors).values()))


def answer_inputs(examples: Sequence[Example]) -> list[list[int]]:
    """Return the tokens of each example at the positions that are measured: one before the answer's, none first."""
    return [[e.ids[at - 1] for at, label in enumerate(e.labels) if at > 1 and label != IGNORE] for e in examples]


def _units(rows: np.ndarray) -> np.ndarray:
    units: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return units


def _invented(tokenizer: Any, count: int, seed: int) -> list[Example]:
    """Return questions about invented people with their answers as labels."""
    facts = [fact for person in make_people(count, seed).values() for fact in person[:1]]
    pairs = [(tokenizer(q).input_ids, tokenizer(f" {a}", add_special_tokens=False).input_ids) for q, a in facts]
    return [Example(n, [*q, *a], [IGNORE] * len(q) + a) for n, (q, a) in enumerate(pairs)]


def main() -> None:
    """Attack a model's moments before and after mixing; print what comes back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    rows = {"forget": _invented(tokenizer, options.rows, 1), "retain": _invented(tokenizer, 2 * options.rows, 2)}
    answers, tokens = answer_inputs(rows["forget"]), inputs_of_tokens(model, first_layer(model, options.model))
    words = {token for answer in answers for token in answer}
    for mix in (False, True):
        with tempfile.TemporaryDirectory() as place:
            root = stored_root(model, options.model, Path(place) / "moments", rows, mix)
        _, sizes, directions = np.linalg.svd(root, full_matrices=False)
        directions, found = directions[sizes > _RANK * sizes[0]], bag(root, tokens)
        print(
            f"{'stored, mixed' if mix else 'X itself'} {root.shape}: {spelled(root, tokens, answers)} of "
            f"{len(answers)} answers in order; {single_rows(root, tokens)} rows and {single_rows(directions, tokens)} "
            f"of {len(directions)} principal directions are single tokens; bag of {len(words)} tokens: {len(found)} "
            f"found, {len(found & words)} of them right"
        )


if __name__ == "__main__":
    main()
