"""Choose what runs a model that is scored: vLLM only once a sample shows that it makes there what transformers makes.

vLLM makes greedy answers, and teacher-forced scores from the log-probability and the rank of each token. What needs the
whole distribution (z of Min-K%++), hidden tokens (`compat.mask_eq_pad`) or a model's own sampling settings stays with
transformers, in the same evaluation. So do LoRA adapters.

transformers runs the sample first, and leaves the GPU before vLLM starts: there are never two models on it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from msa_lite.data import Example, sample_rows
from msa_lite.errors import MismatchError, UsageError
from msa_lite.evals.alone import check_batches, decode_alone
from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.forward import TokenScores, score_bundles
from msa_lite.evals.generate import end_tokens
from msa_lite.evals.models import Runner, checkpoint_folder, load_model
from msa_lite.evals.together import PromptBatch, decode_together
from msa_lite.evals.vllm_model import VllmModel, first_line, load_vllm, takes_prompts, takes_texts
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import write_json
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.weights.adapter import is_adapter
from msa_lite.io.weights.hub import Source

logger = logging.getLogger(__name__)

Engine = Literal["transformers", "vllm"]
"""What runs a model that is scored."""
ENGINES: tuple[Engine, ...] = get_args(Engine)
TRANSFORMERS, VLLM = ENGINES
ENGINE_FILE = "engine.json"  # in an evaluation's folder: what vLLM ran, and how its sample compared

_SAMPLE = 8  # texts and prompts of the check; the longest of each is among them
_ANSWER = 64  # tokens of an answer of the check


@dataclass(frozen=True)
class Tolerance:
    """Limits of the difference between two engines that both round rightly."""

    largest: float
    """The most that a token's log-probability may differ by, in nats."""
    mean: float
    """The most that they may differ by on average, without their signs."""
    tie: float
    """A token that leads by no more nats than that is a near-tie: either engine may take the second."""
    ranks: float
    """The part of a text's tokens that may be the likeliest by one engine alone."""


# SmolLM2-135M on texts of TOFU: in fp32, vLLM and transformers differ by 5e-5 at most, 5e-6 on average. Rounding to
# bf16 alone, by transformers alone, moves log-probabilities by up to 0.6, 0.03 on average, and logits are 0.125 apart;
# of 641 tokens, 3 are the likeliest by one engine alone.
_FINE = Tolerance(largest=1e-3, mean=2e-4, tie=1e-3, ranks=0.01)
_COARSE = Tolerance(largest=1.0, mean=0.1, tie=0.25, ranks=0.05)


def check_engine(engine: Engine) -> None:
    """Raise UsageError where vLLM is wanted and cannot work here. vLLM is imported, no model is loaded."""
    if engine != VLLM:
        return
    advice = "or leave the engine at transformers"
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"engine vllm: vLLM is not installed: pip install vllm, {advice}")
    if Ranks.current().count > 1:
        raise UsageError(f"engine vllm: it runs in one process; start it without accelerate launch, {advice}")
    platform = load_vllm("vllm.platforms").current_platform
    if not (platform.is_cuda_alike() or platform.is_cpu()):
        raise UsageError(f"engine vllm: vLLM finds no GPU here; use a machine with one, {advice}")


def check_architecture(engine: Engine, source: Source) -> None:
    """Raise MismatchError where vLLM is wanted and does not know a model's architecture, by its config."""
    if engine != VLLM or is_adapter(source.folder):
        return
    names = read_object(checkpoint_folder(source.folder) / "config.json").get("architectures") or ["no architecture"]
    if not set(names) & set(load_vllm().ModelRegistry.get_supported_archs()):
        raise MismatchError(
            f"{source.name}: vLLM does not know {', '.join(map(str, names))}; leave the engine at transformers"
        )


def why_not(source: Source, benchmark: Benchmark) -> str | None:
    """Return why transformers runs all of a model's items in the place of vLLM; None where vLLM can run some."""
    if is_adapter(source.folder):
        return "it is a LoRA adapter, not merged into its model"
    if source.added:
        return "its embedding gets rows for added tokens when it is loaded"
    if "mask_eq_pad" in benchmark.compat:
        return "compat mask_eq_pad hides tokens from others"
    if not any(takes_texts(part) or takes_prompts(part) for part in benchmark.sets.values()):
        return f"{benchmark.name} has only sampled answers, or texts with Min-K%++, which vLLM does not give"
    return None


def engine_of(engine: Engine, source: Source, benchmark: Benchmark) -> Engine:
    """Return the engine that an evaluation counts as, in its manifest: vllm only where vLLM can run some of it."""
    return VLLM if engine == VLLM and why_not(source, benchmark) is None else TRANSFORMERS


def settle_engine(engine: Engine, source: Source, benchmark: Benchmark) -> Engine:
    """Return the engine that an evaluation counts as; warn where it is not the one asked for."""
    if engine == VLLM and (reason := why_not(source, benchmark)):
        logger.warning("%s: %s, so transformers runs it, not %s", source.name, reason, engine)
    return engine_of(engine, source, benchmark)


def made_by(folder: Path) -> str | None:
    """Return what has run an evaluation that asked for vLLM: None, nothing yet; the reason in its place; or "vllm"."""
    path = folder / ENGINE_FILE
    return str(read_object(path).get("why_not") or VLLM) if path.is_file() else None


@contextmanager
def open_vllm(source: Source, benchmark: Benchmark, folder: Path) -> Iterator[VllmModel | None]:
    """Load a model into vLLM, if a sample shows that it makes there what transformers makes of it; otherwise warn.

    Yield None where transformers is to run everything: the sample differs, vLLM fails, or either was so before a stop,
    by `ENGINE_FILE` in the evaluation's folder, which is written here. At the end, vLLM's processes end too.
    """
    earlier, model = made_by(folder), None
    why = None if earlier in (None, VLLM) else earlier
    with ExitStack() as stack:
        if why is None:
            facts: dict[str, Any] = {"version": load_vllm().__version__}
            reference = _run_reference(source, benchmark)
            try:
                model = _start(source, benchmark, reference)
                stack.callback(model.stop)
                agreement = _compare(reference, model)
                why, facts["sample"] = agreement.fault, asdict(agreement)
            except Exception as error:
                why = f"vLLM fails: {first_line(error)}"
            _write(folder, benchmark, facts | {"dtype": reference.dtype}, why)
        if why is None:
            yield model
            return
    logger.warning("%s: %s. So transformers runs all items, which is slower", source.name, why)
    yield None


def _write(folder: Path, benchmark: Benchmark, facts: Mapping[str, Any], why: str | None) -> None:
    sets = {} if why else benchmark.sets
    ran = {
        "answers": [name for name, part in sets.items() if takes_prompts(part)],
        "texts": [name for name, part in sets.items() if takes_texts(part)],
    }
    write_json(folder / ENGINE_FILE, {"engine": VLLM, **facts, "ran": ran, "why_not": why})


def _start(source: Source, benchmark: Benchmark, reference: _Reference) -> VllmModel:
    """Start vLLM with room for the longest item."""
    items = [(item, part.decoding) for part in benchmark.sets.values() for item in part.items]
    texts = [len(text.ids) + 1 for item, _ in items for group in item.texts.values() for text in group]
    prompts = [len(item.prompt) + decoding.max_new_tokens for item, decoding in items if item.prompt and decoding]
    most = min(max([2, *texts, *prompts]), reference.window or 1 << 60)
    return VllmModel.start(source.folder, reference.dtype, reference.ends, reference.window, most)


@dataclass(frozen=True)
class _Reference:
    """The results of transformers on a sample, and all that vLLM has to know of the model."""

    texts: Sequence[Example]
    scores: Sequence[TokenScores]
    """Of each text."""
    prompts: Sequence[list[int]]
    room: Sequence[int]
    """The most tokens of each answer."""
    answers: Sequence[list[int]]
    """The tokens of each answer, without the end token."""
    gaps: Mapping[tuple[int, int], float]
    """(prompt, position) → the logit of the token that was taken minus that of the second."""
    ends: Sequence[int]
    """The tokens that end answers."""
    window: int | None
    """The most tokens that the model was made for."""
    dtype: str
    """torch's name of the model's dtype."""


def _run_reference(source: Source, benchmark: Benchmark) -> _Reference:
    """Run a sample by transformers. Rows that do not fit into the model's window are left out."""
    runner = Runner(load_model(source.folder))
    try:
        source.check_unchanged()
        window = runner.window or 1 << 60
        texts = [text for text in _draw_texts(benchmark) if len(text.ids) < window]
        prompts = [prompt for prompt in _draw_prompts(benchmark) if len(prompt[0]) < window]
        scores: dict[int, TokenScores] = {}
        for batch in score_bundles(runner, [[text] for text in texts]):
            scores.update((at, score) for at, [score] in batch)
        ids = [prompt for prompt, _ in prompts]
        room = [min(most, window - len(prompt)) for prompt, most in prompts]
        ends = end_tokens(runner, benchmark.tokenizer, benchmark.prompter.end)
        answers, gaps = _answer(runner, benchmark.tokenizer, ids, room, ends)
        dtype = str(runner.model.dtype).removeprefix("torch.")
        in_order = [scores[at] for at in range(len(texts))]
        return _Reference(texts, in_order, ids, room, answers, gaps, ends, runner.window, dtype)
    finally:
        runner.close()


def _answer(
    runner: Runner, tokenizer: Any, prompts: Sequence[list[int]], room: Sequence[int], ends: Sequence[int]
) -> tuple[list[list[int]], dict[tuple[int, int], float]]:
    """Return greedy answers, and by how much each of their tokens leads."""
    check_batches(runner, tokenizer, prompts)
    decode = decode_alone if runner.batched is False else decode_together
    count = max(1, runner.cache_budget // max([1, *(len(prompt) + _ANSWER for prompt in prompts)]))
    answers: list[list[int]] = []
    gaps: dict[tuple[int, int], float] = {}
    for start in range(0, len(prompts), count):

        def choose(logits: Any, rows: Any, step: int, start: int = start) -> Any:
            first, second = logits.topk(2, dim=-1).values.T.tolist()
            for row, most, next_most in zip(rows.tolist(), first, second, strict=True):
                gaps[start + row, step] = most - next_most
            return logits.argmax(-1)

        part = slice(start, start + count)
        answers += decode(runner, PromptBatch(tokenizer, prompts[part], room[part], (), ends), choose)
    return answers, gaps


def _draw_texts(benchmark: Benchmark) -> list[Example]:
    """Return a seeded sample of the texts that vLLM can score."""
    items = [item for part in benchmark.sets.values() if takes_texts(part) for item in part.scored]
    return _few([text for item in items for group in item.texts.values() for text in group], lambda text: len(text.ids))


def _draw_prompts(benchmark: Benchmark) -> list[tuple[list[int], int]]:
    """Return a seeded sample of the prompts that vLLM can answer, with the most tokens of their answers."""
    pairs = [
        (item.prompt or [], min(_ANSWER, part.decoding.max_new_tokens))
        for part in benchmark.sets.values()
        if part.decoding is not None and takes_prompts(part)
        for item in part.answered
    ]
    return _few(pairs, lambda pair: len(pair[0]))


def _few(rows: Sequence[Any], length: Callable[[Any], int]) -> list[Any]:
    """Return at most `_SAMPLE` rows: the longest, which shows what goes wrong with long rows alone, and others."""
    in_order = sorted(rows, key=length, reverse=True)
    return [*in_order[:1], *sample_rows(in_order[1:], _SAMPLE - 1, 0)]


@dataclass(frozen=True)
class SampleAgreement:
    """A comparison of vLLM's results on a sample with those of transformers."""

    allowed: Tolerance
    """The limits for the model's dtype."""
    texts: int
    tokens: int
    """The tokens of these texts that were scored."""
    largest: float
    """The largest difference of a log-probability, in nats."""
    mean: float
    """The mean of these differences, without their signs."""
    ranks: int
    """The tokens that only one of the two engines has as the likeliest."""
    prompts: int
    ties: int
    """The answers that differ from a near-tie on."""
    fault: str | None
    """What differs by more than the tolerance allows; None if nothing does."""


def _compare(reference: _Reference, model: VllmModel) -> SampleAgreement:
    """Run a sample by vLLM, and compare its results with transformers'."""
    scores, answers = model.score(reference.texts), model.extend(reference.prompts, reference.room)
    pairs = list(zip(reference.scores, scores, strict=True))
    apart = np.concatenate([np.zeros(1), *(np.abs(one.log_probs - other.log_probs) for one, other in pairs)])[1:]
    ranks = sum(int((one.matches != other.matches).sum()) for one, other in pairs)
    largest, mean = (float(apart.max()), float(apart.mean())) if len(apart) else (0.0, 0.0)
    allowed = _FINE if reference.dtype in ("float32", "float64") else _COARSE
    faults, ties = [], 0
    if not (largest <= allowed.largest and mean <= allowed.mean):
        faults.append(
            f"vLLM's log-probabilities differ from those of transformers by up to {largest:.2g} nats, on average by "
            f"{mean:.2g}; {allowed.largest:g} and {allowed.mean:g} are allowed in {reference.dtype}"
        )
    if ranks > allowed.ranks * len(apart):
        faults.append(f"{ranks} of {len(apart)} tokens are the likeliest by one of vLLM and transformers alone")
    for at, (one, other) in enumerate(zip(reference.answers, answers, strict=True)):
        if one == other:
            continue
        place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        gap = reference.gaps.get((at, place), float("inf"))
        if gap <= allowed.tie:
            ties += 1
        elif len(faults) < 3:
            faults.append(
                f"a greedy answer by vLLM differs from token {place + 1} on, where transformers' likeliest token "
                f"leads by {gap:.2g} nats"
            )
    fault = "; ".join(faults) or None
    return SampleAgreement(allowed, len(scores), len(apart), largest, mean, ranks, len(answers), ties, fault)
