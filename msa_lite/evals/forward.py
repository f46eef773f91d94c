"""Teacher-forced scores: one forward pass over a text yields whatever any metric needs of its tokens.

A bundle is all that is scored of one item: the right answer to a question, say, and five wrong ones. What its texts
have in common at the beginning runs through the model once, and the texts go on from its key-value cache. Bundles are
taken in order of length under a budget of tokens, so results do not depend on file order and padding is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example
from msa_lite.errors import StageError
from msa_lite.evals.models import Runner

_WORTH_SHARING = 8  # tokens; for less, a second pass costs more than it saves
_LEAST_VARIANCE = 1e-6  # of log-probabilities under the model, as in open-unlearning's Min-K++


@dataclass(frozen=True)
class TokenScores:
    """Teacher-forced results of one text over its n labelled tokens.

    log_probs: (n,) log p(x_t | x_<t), fp32 log-softmax. matches: (n,) whether the argmax is the token. z: (n,)
    (log p − μ) / σ with mean and deviation of log p(v | x_<t) under the model's own distribution over the vocabulary
    (Zhang et al., 2024), or None where it was not asked for.
    """

    log_probs: np.ndarray
    matches: np.ndarray
    z: np.ndarray | None = None


@dataclass(frozen=True)
class _Bundle:
    """The texts of item `index`; the first `shared` tokens of each are the same and hold no scored position."""

    index: int
    texts: tuple[Example, ...]

    @cached_property
    def shared(self) -> int:
        if len(self.texts) < 2:
            return 0
        ids = zip(*(text.ids for text in self.texts), strict=False)
        common = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, ids))
        # The last token before an answer predicts its first one, so it belongs to the texts.
        common = min([common, *(len(text.prompt_ids) - 1 for text in self.texts)])
        return common if common >= _WORTH_SHARING else 0

    @cached_property
    def width(self) -> int:
        """Tokens that go through the model behind the shared ones, of the longest text; the last is only predicted."""
        return max(len(text.ids) for text in self.texts) - 1 - self.shared


def score_bundles(
    runner: Runner,
    bundles: Sequence[Sequence[Example]],
    *,
    with_z: bool = False,
    hidden: int | None = None,
) -> Iterator[list[tuple[int, list[TokenScores]]]]:
    """(index of the bundle, scores of each of its texts), a batch at a time, in no particular order.

    A text without labels gets empty scores. with_z: Min-K++ is wanted too. hidden: a token id that no position may
    attend to, wherever it stands (`compat.mask_eq_pad`); None for the right mask, which comes from lengths. Raises
    StageError when memory does not suffice for a single bundle.
    """
    todo = []
    for index, texts in enumerate(bundles):
        scored = tuple(text for text in texts if _is_scored(text))
        if scored:
            todo.append(_Bundle(index, scored))
        else:
            yield [(index, [_nothing(with_z) for _ in texts])]
    # Bundles with and without a shared beginning do not mix; the longest come first, so that memory runs out early.
    todo.sort(key=lambda b: (b.shared > 0, -(b.shared + b.width), b.index))
    while todo:
        count = _fitting(todo, runner.budget)
        batch = todo[:count]
        tokens = _tokens(batch)
        try:
            results = _score(runner, batch, with_z, hidden)
        except RuntimeError as error:
            if not runner.lower_budget(error, tokens):
                raise
            if count == 1:
                raise StageError(
                    f"out of memory with a single item of {len(batch[0].texts)} texts and {tokens} tokens; use a GPU "
                    "with more memory, or a 4-bit or smaller model"
                ) from error
            continue
        todo = todo[count:]
        yield [(b.index, _in_place(bundles[b.index], r, with_z)) for b, r in zip(batch, results, strict=True)]


def _nothing(with_z: bool) -> TokenScores:
    empty = np.zeros(0, np.float32)
    return TokenScores(empty, np.zeros(0, bool), empty if with_z else None)


def _in_place(texts: Sequence[Example], results: list[TokenScores], with_z: bool) -> list[TokenScores]:
    """Scores in the order of all texts, those without labels included."""
    left = iter(results)
    return [next(left) if _is_scored(text) else _nothing(with_z) for text in texts]


def _is_scored(text: Example) -> bool:
    """Whether some token is a label that something comes before."""
    return any(label != IGNORE for label in text.labels[1:])


def _tokens(batch: Sequence[_Bundle]) -> int:
    return sum(len(b.texts) for b in batch) * (max(b.shared for b in batch) + max(b.width for b in batch))


def _fitting(todo: Sequence[_Bundle], budget: int) -> int:
    """How many of the first bundles go into one batch: at least one, all of one kind, rows × width in the budget."""
    rows = shared = width = 0
    for count, bundle in enumerate(todo):
        rows += len(bundle.texts)
        shared, width = max(shared, bundle.shared), max(width, bundle.width)
        if count and (rows * (shared + width) > budget or (bundle.shared > 0) != (todo[0].shared > 0)):
            return count
    return len(todo)


def _score(runner: Runner, batch: Sequence[_Bundle], with_z: bool, hidden: int | None) -> list[list[TokenScores]]:
    import torch

    with torch.inference_mode():
        states = _run(runner, batch, hidden)
        wanted: list[int] = []
        places: list[tuple[int, int]] = []
        rows = [(text, bundle.shared) for bundle in batch for text in bundle.texts]
        for row, (text, shared) in enumerate(rows):
            labels = text.labels[shared + 1 :]
            positions = [t for t, label in enumerate(labels) if label != IGNORE]
            places.extend((row, t) for t in positions)
            wanted.extend(labels[t] for t in positions)
        row_of, position = torch.tensor(places, device=runner.device).T
        scores = _reduce(runner, states[row_of, position], torch.tensor(wanted, device=runner.device), with_z)
    counts = np.bincount(row_of.cpu().numpy(), minlength=len(rows))
    cuts = np.cumsum(counts)[:-1]
    columns = [np.split(values, cuts) for values in scores]
    texts = iter([TokenScores(*values) for values in zip(*columns, strict=True)])
    return [[next(texts) for _ in bundle.texts] for bundle in batch]


def _run(runner: Runner, batch: Sequence[_Bundle], hidden: int | None) -> Any:
    """(rows, width, ·) states of all texts of a batch, behind what each bundle shares."""
    import torch

    def tensor(values: list[list[int]]) -> Any:
        return torch.tensor(values, device=runner.device)

    def visible(ids: Any, mask: Any) -> Any:
        return mask if hidden is None else mask * (ids != hidden)

    cache = mask = None
    most = max(bundle.shared for bundle in batch)
    if most:  # padded on the left, so that the texts follow right behind
        heads = [bundle.texts[0].ids[: bundle.shared] for bundle in batch]
        gaps = [most - len(head) for head in heads]
        ids = tensor([[0] * gap + head for gap, head in zip(gaps, heads, strict=True)])
        mask = visible(ids, tensor([[0] * gap + [1] * len(head) for gap, head in zip(gaps, heads, strict=True)]))
        positions = tensor([[0] * gap + list(range(len(head))) for gap, head in zip(gaps, heads, strict=True)])
        _, cache = runner.states(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        owner = torch.tensor([row for row, b in enumerate(batch) for _ in b.texts], device=runner.device)
        cache.batch_select_indices(owner)
        mask = mask[owner]
    width = max(bundle.width for bundle in batch)
    tails = [(text.ids[bundle.shared : -1], bundle.shared) for bundle in batch for text in bundle.texts]
    ids = tensor([tail + [0] * (width - len(tail)) for tail, _ in tails])
    own = visible(ids, tensor([[1] * len(tail) + [0] * (width - len(tail)) for tail, _ in tails]))
    # Padding repeats the last position: one beyond the model's window must not be looked up.
    positions = tensor([[start + min(t, len(tail) - 1) for t in range(width)] for tail, start in tails])
    states, _ = runner.states(
        input_ids=ids,
        attention_mask=own if mask is None else torch.cat([mask, own], dim=1),
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return states


def _reduce(runner: Runner, states: Any, wanted: Any, with_z: bool) -> list[np.ndarray]:
    """(n,) log-probabilities, matches and, where wanted, z of n positions; all sums over the vocabulary in fp32."""
    import torch

    found: list[list[Any]] = [[], [], []] if with_z else [[], []]
    for part, logits in runner.blocks(states):
        matches = logits.argmax(-1) == wanted[part]
        scores = torch.log_softmax(logits, dim=-1)
        picked = scores.gather(-1, wanted[part][:, None])[:, 0]
        found[0].append(picked)
        found[1].append(matches)
        if with_z:
            chances = scores.exp()
            mean = (chances * scores).sum(-1)
            # Not E[x²] − E[x]²: where predictions are nearly uniform, nothing exact would be left of the difference.
            variance = (chances * (scores - mean[:, None]).square()).sum(-1)
            found[2].append((picked - mean) / variance.clamp_min(_LEAST_VARIANCE).sqrt())
    return [torch.cat(parts).cpu().numpy() for parts in found]
