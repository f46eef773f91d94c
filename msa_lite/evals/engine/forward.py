"""Score texts teacher-forced: one forward pass over a text yields all that any metric needs of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example, Prompter, Row, encode_start
from msa_lite.errors import StageError
from msa_lite.evals.engine.models import Runner, check_numbers

MAX_TOKENS = 2048  # of a text behind its prompt; longer texts are cut


def completion(tokenizer: Any, index: int, prompt: str, text: str, most: int = MAX_TOKENS) -> tuple[Example, ...]:
    """Return a text behind its prompt, read as one string. The labels are the text's first `most` tokens.

    The first ids, as many as the prompt has by itself, are no labels, even where the tokenizer merges across the
    boundary (as in open-unlearning). The very first id never is one, since nothing comes before it: the
    beginning-of-sequence token or, for tokenizers without one, the text's first. No end token is added. Return nothing
    where no label is left.
    """
    count = len(encode_start(tokenizer, prompt))
    ids = encode_start(tokenizer, prompt + text, count + most)
    first = max(1, count)
    if not text.strip() or len(ids) <= first:
        return ()
    return (Example(index, ids, [IGNORE] * first + ids[first:]),)


def answer_texts(prompter: Prompter, index: int, question: str, answers: Sequence[str | None]) -> tuple[Example, ...]:
    """Return the question with each of the answers, without empty ones and those that add no token of their own."""
    texts = []
    for answer in answers:
        if answer is None or not str(answer).strip():
            continue
        text = prompter.example(Row(index, question, str(answer)))
        if len(text.ids) - len(text.prompt_ids) > (text.ids[-1] == prompter.end):
            texts.append(text)
    return tuple(texts)


WORTH_SHARING = 8  # tokens; for less, a second pass costs more than it saves
_ALIKE = 0.75  # a bundle joins a group if it shares at least this part of the tokens that the first one shares
_BATCHES = 8  # times the budget: the texts of a group, from which batches of similar length are made
_LEAST_VARIANCE = 1e-6  # of log-probabilities under the model, as in open-unlearning's Min-K++


@dataclass(frozen=True)
class TokenScores:
    """Teacher-forced results of one text over its n labelled tokens."""

    log_probs: np.ndarray
    """(n,) log p(x_t | x_<t), fp32 log-softmax."""
    matches: np.ndarray
    """(n,) True where the argmax is the token."""
    z: np.ndarray | None = None
    """(n,) (log p − μ) / σ with mean and deviation of log p(v | x_<t) under the model's own distribution over the
    vocabulary (Zhang et al., 2024); None unless `with_z`."""


@dataclass(frozen=True)
class _Bundle:
    """The texts of item `index`; the first `shared` tokens of each are equal and hold no scored position."""

    index: int
    texts: tuple[Example, ...]
    shared: int

    @cached_property
    def tokens(self) -> int:
        """Count the tokens of all texts, except the last of each, which is only predicted."""
        return sum(len(text.ids) - 1 for text in self.texts)


@dataclass(frozen=True)
class _Past:
    """The tokens of each row of a batch that have run through the model."""

    cache: Any
    """The key-value cache."""
    mask: Any
    """(rows, tokens) 1 where later tokens may attend."""

    def rows(self, chosen: Any) -> _Past:
        """Return the past of the chosen rows, which may repeat; this one stays as it is."""
        cache = copy(self.cache)
        cache.layers = [copy(layer) for layer in cache.layers]
        cache.batch_select_indices(chosen)
        return _Past(cache, self.mask[chosen])


def known_beginning(prompt: Sequence[int], text: Example, scores: TokenScores) -> list[int]:
    """Return the first tokens that the model itself would say after a prompt, as the scores of a text tell.

    They are the text's tokens behind the prompt, up to the first one that is not the likeliest. Nothing is known where
    the text does not begin with the prompt, or tokens right behind it are not scored.
    """
    start = len(prompt)
    behind = text.labels[start:]
    if not start or text.ids[:start] != list(prompt) or IGNORE in behind:
        return []
    before = sum(label != IGNORE for label in text.labels[1:start])
    return [token for token, _ in takewhile(lambda pair: pair[1], zip(behind, scores.matches[before:], strict=True))]


Within = Callable[[Sequence[Example], int], AbstractContextManager[Any]]
"""A function (texts, start) that returns the context in which a batch of texts runs from position `start` on."""


def score_bundles(
    runner: Runner,
    bundles: Sequence[Sequence[Example]],
    *,
    with_z: bool = False,
    hidden: int | None = None,
    within: Within = lambda texts, start: nullcontext(),
) -> Iterator[list[tuple[int, list[TokenScores]]]]:
    """Yield (index of the bundle, scores of each of its texts), a batch at a time, in no particular order.

    A text without labels gets empty scores. with_z: compute z for Min-K++. hidden: a token id that no position may
    attend to, wherever it stands (`compat.mask_eq_pad`); None for the right mask, which comes from lengths. within:
    hooks for a batch of texts, whose rows are in their order. What texts share, up to `start`, runs outside of it.
    Raises StageError when memory is too small for a single bundle.
    """
    scored = {index: tuple(filter(_is_scored, texts)) for index, texts in enumerate(bundles)}
    of_all = _count_shared([text for texts in scored.values() for text in texts])  # a system message, say
    todo = [_Bundle(index, texts, _count_shared(texts) or of_all) for index, texts in scored.items() if texts]
    if empty := [index for index, texts in scored.items() if not texts]:
        yield [(index, [_nothing(with_z) for _ in bundles[index]]) for index in empty]
    # Bundles that share about as much run together; the longest come first, so that memory runs out early.
    todo.sort(key=lambda b: (-b.shared, -max(len(text.ids) for text in b.texts), b.index))
    while todo:
        count = _fitting(todo, runner.budget)
        group = todo[:count]
        try:
            results = _score(runner, group, with_z, hidden, within)
        except (RuntimeError, MemoryError) as error:
            longest = max(len(text.ids) - 1 for b in group for text in b.texts)
            if not runner.lower_budget(error, min(runner.budget, longest * sum(len(b.texts) for b in group))):
                raise
            if count == 1 and runner.budget < longest:
                raise StageError(
                    f"out of memory with a single item of {len(group[0].texts)} texts and {group[0].tokens} tokens; "
                    "use a GPU with more memory, or a 4-bit or smaller model"
                ) from error
            continue
        todo = todo[count:]
        yield [(b.index, _in_place(bundles[b.index], r, with_z)) for b, r in zip(group, results, strict=True)]


def _nothing(with_z: bool) -> TokenScores:
    empty = np.zeros(0, np.float32)
    return TokenScores(empty, np.zeros(0, bool), empty if with_z else None)


def _in_place(texts: Sequence[Example], results: list[TokenScores], with_z: bool) -> list[TokenScores]:
    """Return scores in the order of all texts, including those without labels."""
    scores = iter(results)
    return [next(scores) if _is_scored(text) else _nothing(with_z) for text in texts]


def _is_scored(text: Example) -> bool:
    """Check whether a text has a label after its first token."""
    return any(label != IGNORE for label in text.labels[1:])


def _count_shared(texts: Sequence[Example]) -> int:
    """Count the tokens that texts have in common at their beginning and that predict no answer; 0 for a few."""
    if len(texts) < 2:
        return 0
    # The last token before an answer predicts its first one, so it belongs to the texts.
    common = min([common_start([text.ids for text in texts]), *(len(text.prompt_ids) - 1 for text in texts)])
    return common if common >= WORTH_SHARING else 0


def common_start(rows: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all rows have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False)))


def _fitting(todo: Sequence[_Bundle], budget: int) -> int:
    """Return how many of the first bundles run together: at least one; their shared tokens are within the budget."""
    most, tokens = todo[0].shared, 0
    for count, bundle in enumerate(todo):
        tokens += bundle.tokens
        alike = bundle.shared >= _ALIKE * most
        if count and not (alike and most * (count + 1) <= budget and tokens <= _BATCHES * budget):
            return count
    return len(todo)


def _score(
    runner: Runner, group: Sequence[_Bundle], with_z: bool, hidden: int | None, within: Within
) -> list[list[TokenScores]]:
    """Score each bundle's texts, in batches of texts of similar length from any bundles."""
    import torch

    shared = min(bundle.shared for bundle in group)
    texts = [text for bundle in group for text in bundle.texts]
    owners = [row for row, bundle in enumerate(group) for _ in bundle.texts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    scores: dict[int, TokenScores] = {}
    with torch.inference_mode():
        past = _run_shared(runner, [bundle.texts[0].ids[:shared] for bundle in group], hidden) if shared else None
        shared = shared if past else 0
        while order:
            count = max(1, runner.budget // (len(texts[order[0]].ids) - 1))
            batch, order = order[:count], order[count:]
            own = past.rows(torch.tensor([owners[i] for i in batch], device=runner.device)) if past else None
            with within([texts[i] for i in batch], shared):
                states, _ = _run(runner, [texts[i].ids[shared:-1] for i in batch], own, hidden, keep=False)
            labels = [texts[i].labels[shared + 1 :] for i in batch]
            scores |= zip(batch, _reduce(runner, states, labels, with_z), strict=True)
    ordered = (scores[i] for i in range(len(texts)))
    return [[next(ordered) for _ in bundle.texts] for bundle in group]


def _run_shared(runner: Runner, rows: Sequence[list[int]], hidden: int | None) -> _Past | None:
    """Run rows of equal length, their common beginning (a system message, say) once, and return their past.

    None if the model keeps no cache that texts can go on from.
    """
    import torch

    from msa_lite.evals.engine.key_values import can_divide

    common = common_start(rows)
    once = len(rows) > 1 and common >= WORTH_SHARING
    _, first = _run(runner, [rows[0][:common]] if once else rows, None, hidden)
    if not can_divide(first.cache):
        return None
    if not once:
        return first
    past = first.rows(torch.zeros(len(rows), dtype=torch.long, device=runner.device))
    rest = [row[common:] for row in rows]
    return _run(runner, rest, past, hidden)[1] if rest[0] else past


def _run(
    runner: Runner, rows: Sequence[list[int]], past: _Past | None, hidden: int | None, keep: bool = True
) -> tuple[Any, _Past]:
    """Run rows that continue their past; return (rows, width, ·) states, and the past that includes them.

    Shorter rows are padded on the right, so only rows of equal length can be continued. keep: True to continue them.
    """
    import torch

    def tensor(values: list[list[int]]) -> Any:
        return torch.tensor(values, device=runner.device)

    width = max(map(len, rows))
    ids = tensor([row + [0] * (width - len(row)) for row in rows])
    mask = tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    if hidden is not None:
        mask = mask * (ids != hidden)
    mask = torch.cat([past.mask, mask], dim=1) if past else mask
    # Without positions: the model's own start with the first token, or with another number, as RoBERTa's.
    states, cache = runner.halves.run(
        past.cache if past else None,
        input_ids=ids,
        attention_mask=mask,
        use_cache=keep or past is not None,
    )
    return states, _Past(cache, mask)


def _reduce(runner: Runner, states: Any, labels: Sequence[list[int]], with_z: bool) -> Iterator[TokenScores]:
    """Score each row of (rows, width, ·) states; all sums over the vocabulary are in fp32."""
    import torch

    places = [(row, t) for row, ids in enumerate(labels) for t, label in enumerate(ids) if label != IGNORE]
    tokens = torch.tensor([labels[row][t] for row, t in places], device=runner.device)
    row_of, position = torch.tensor(places, device=runner.device).T
    columns: list[list[Any]] = [[], [], []] if with_z else [[], []]
    for part, logits in runner.blocks(states[row_of, position]):
        log_probs = torch.log_softmax(logits, dim=-1)
        own = log_probs.gather(-1, tokens[part][:, None])[:, 0]
        columns[0].append(own)
        columns[1].append(logits.argmax(-1) == tokens[part])
        if with_z:
            probabilities = log_probs.exp()
            mean = (probabilities * log_probs).sum(-1)
            # Not E[x²] − E[x]²: for nearly uniform predictions, that difference has no exact digit left.
            variance = (probabilities * (log_probs - mean[:, None]).square()).sum(-1)
            columns[2].append((own - mean) / variance.clamp_min(_LEAST_VARIANCE).sqrt())
    check_numbers(torch.cat(columns[0]))
    cuts = np.cumsum(np.bincount([row for row, _ in places], minlength=len(labels)))[:-1]
    arrays = [np.split(torch.cat(parts).cpu().numpy(), cuts) for parts in columns]
    return (TokenScores(*values) for values in zip(*arrays, strict=True))


def mean_losses(runner: Runner, texts: Sequence[Example]) -> Iterator[tuple[int, float]]:
    """Yield (index of a text, mean −log p of its labels), in any order.

    Texts without labels do not come, nor do those that are longer than the model's window.
    """
    window = runner.window or 1 << 60
    places = [at for at, text in enumerate(texts) if len(text.ids) - 1 <= window]
    for batch in score_bundles(runner, [[texts[at]] for at in places]):
        for at, (scores,) in batch:
            if len(scores.log_probs):
                yield places[at], -float(np.mean(scores.log_probs, dtype=np.float64))
