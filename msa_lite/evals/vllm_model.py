"""A model in vLLM's offline engine: greedy answers, and teacher-forced scores of the tokens of a text."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.data import IGNORE, Example
from msa_lite.errors import StageError, UsageError
from msa_lite.evals.benchmark import Benchmark, Item, ItemSet
from msa_lite.evals.forward import TokenScores, score_bundles
from msa_lite.evals.generate import Decoding, finish_answer, generate
from msa_lite.evals.models import Runner, no_numbers
from msa_lite.io.models.devices import free_bytes, free_ram, total_bytes

_BATCH = 512  # items handed to vLLM at a time, and written at a time
_STEP = 32  # tokens between two looks for a stop string, which vLLM cannot find without a tokenizer
_GPU_SHARE = 0.9  # of the GPU's memory that is free
_CPU_CACHE = 4 << 30  # bytes of the key-value cache on a CPU, at most
# For its environment, unless the user has set it.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing about a request to delete data leaves the machine
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # results go to stdout
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # CUDA and OpenMP do not survive a fork
}
# A process of its own that outlives ours: after a kill, nobody else would end vLLM's, which keep the GPU's memory.
_WATCH = """
import os, select, sys, psutil

ours, others = psutil.Process(int(sys.argv[1])), {os.getpid(), *map(int, sys.argv[2:])}
started = {}
while not select.select([sys.stdin], [], [], 1)[0]:
    try:
        started.update((p.pid, p) for p in ours.children(recursive=True) if p.pid not in others)
    except psutil.Error:
        pass
for process in started.values() if sys.stdin.read() != "done" else ():
    try:
        if "resource_tracker" not in " ".join(process.cmdline()):  # it cleans up, and ends by itself
            process.kill()
    except psutil.Error:
        pass
"""


def load_vllm(name: str = "vllm") -> Any:
    """Import a module of vLLM. Raise UsageError where the installed one cannot be loaded."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module(name)
    except Exception as error:  # built for another torch or CUDA, it fails in many ways
        raise UsageError(f"engine vllm: the vLLM that is installed cannot be loaded: {first_line(error)}") from error


def _start_watch() -> subprocess.Popen[str]:
    import psutil

    others = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    command = [sys.executable, "-c", _WATCH, str(os.getpid()), *others]
    # In a session of its own, since Ctrl-C is for those that work.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )


def first_line(error: BaseException) -> str:
    """Return an error of a library in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def takes_texts(part: ItemSet) -> bool:
    """Check whether vLLM can score the texts of a set: it gives no z, which needs the whole distribution."""
    return bool(part.scored) and not part.with_z


def takes_prompts(part: ItemSet) -> bool:
    """Check whether vLLM answers the prompts of a set: it leaves samples by a model's own settings to transformers."""
    return bool(part.answered) and part.decoding is not None and not part.decoding.samples


@dataclass(frozen=True)
class VllmModel:
    """A model in vLLM's engine."""

    llm: Any
    """vLLM's `LLM`, without a tokenizer."""
    ends: Sequence[int]
    """The tokens that end answers."""
    window: int | None
    """The most tokens that the model was made for; None if its config does not say."""
    most: int
    """The most tokens of a text with the one that vLLM adds, or of a prompt with its answer."""
    watch: subprocess.Popen[str]
    """Ends vLLM's processes if this one is killed."""

    @classmethod
    def start(cls, folder: Path, dtype: str, ends: Sequence[int], window: int | None, most: int) -> VllmModel:
        """Start vLLM's processes with a checkpoint. dtype: torch's name. Raise whatever vLLM raises."""
        free = free_bytes()
        memory: dict[str, Any] = (
            {"kv_cache_memory_bytes": min(_CPU_CACHE, free_ram() // 4)}
            if free is None
            else {"gpu_memory_utilization": _GPU_SHARE * min(1.0, free / total_bytes())}
        )
        kind, watch = load_vllm().LLM, _start_watch()
        try:
            llm = kind(
                model=str(folder),
                skip_tokenizer_init=True,
                load_format="safetensors",  # never a pickle
                generation_config="vllm",  # none of the settings that a model comes with
                dtype=dtype,
                max_model_len=most,
                enable_prefix_caching=True,
                enforce_eager=True,  # to compile takes longer than a benchmark's answers
                use_tqdm_on_load=False,
                **memory,
            )
        except BaseException:
            watch.communicate("done")
            raise
        return cls(llm, ends, window, most, watch)

    def stop(self) -> None:
        """End vLLM's processes, which gives its memory back."""
        try:
            self.llm.llm_engine.engine_core.shutdown(timeout=60)
        finally:
            self.watch.communicate("done")

    def takes_text(self, part: ItemSet, item: Item) -> bool:
        """Check whether it can score the texts of an item."""
        fits = all(len(text.ids) < self.most for group in item.texts.values() for text in group)
        return takes_texts(part) and fits

    def takes_prompt(self, part: ItemSet, item: Item) -> bool:
        """Check whether it can answer the prompt of an item."""
        return takes_prompts(part) and len(item.prompt or ()) < self.most

    def score_bundles(self, bundles: Sequence[Sequence[Example]]) -> Iterator[list[tuple[int, list[TokenScores]]]]:
        """Yield (index of the bundle, scores of each of its texts), a batch at a time. Raise as `score`."""
        for start in range(0, len(bundles), _BATCH):
            batch = bundles[start : start + _BATCH]
            scores = iter(self.score([text for bundle in batch for text in bundle]))
            yield [(start + at, [next(scores) for _ in bundle]) for at, bundle in enumerate(batch)]

    def score(self, texts: Sequence[Example]) -> list[TokenScores]:
        """Score texts teacher-forced. Raise NotFiniteError for NaN.

        vLLM leaves its prefix cache aside here, since it keeps no log-probabilities. A match is rank 1 among the
        likeliest; of tokens with equal logits, one alone has it.
        """
        outputs = self._run([text.ids for text in texts], [{"max_tokens": 1, "prompt_logprobs": 1}] * len(texts))
        scores = []
        for text, output in zip(texts, outputs, strict=True):
            pairs = list(zip(text.labels, output.prompt_logprobs, strict=True))[1:]
            entries = [entry[label] for label, entry in pairs if label != IGNORE]
            log_probs = np.array([entry.logprob for entry in entries], np.float32)
            if np.isnan(log_probs).any():
                raise no_numbers()
            scores.append(TokenScores(log_probs, np.array([entry.rank == 1 for entry in entries], bool)))
        return scores

    def generate(
        self, tokenizer: Any, prompts: Sequence[list[int]], decoding: Decoding
    ) -> Iterator[list[tuple[int, list[str]]]]:
        """Yield (index of the prompt, [its greedy answer]), a batch at a time, as `generate` does."""
        for start in range(0, len(prompts), _BATCH):
            answers = self._answer(tokenizer, prompts[start : start + _BATCH], decoding)
            texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            yield [(start + at, [finish_answer(text, decoding.stop)]) for at, text in enumerate(texts)]

    def _answer(self, tokenizer: Any, prompts: Sequence[list[int]], decoding: Decoding) -> list[list[int]]:
        """Return the tokens of each answer, up to its end or, by steps, a stop string."""
        room = [min(decoding.max_new_tokens, (self.window or 1 << 60) - len(prompt)) for prompt in prompts]
        step = _STEP if decoding.stop else decoding.max_new_tokens
        answers: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        while going:
            most = {i: min(step, room[i] - len(answers[i])) for i in going}
            added = self.extend([prompts[i] + answers[i] for i in going], [*most.values()])
            for i, tokens in zip(going, added, strict=True):
                answers[i] += tokens
                text = tokenizer.decode(answers[i], skip_special_tokens=True) if decoding.stop else ""
                if len(tokens) < most[i] or len(answers[i]) == room[i] or any(word in text for word in decoding.stop):
                    del most[i]
            going = [*most]
        return answers

    def extend(self, prompts: Sequence[list[int]], room: Sequence[int]) -> list[list[int]]:
        """Return the likeliest next tokens of each prompt, at most `room` of them, without the end token."""
        outputs = self._run(prompts, [{"max_tokens": most, "stop_token_ids": [*self.ends]} for most in room])
        return [list(takewhile(lambda token: token not in self.ends, out.outputs[0].token_ids)) for out in outputs]

    def _run(self, prompts: Sequence[list[int]], settings: Sequence[dict[str, Any]]) -> list[Any]:
        """Run prompts greedily; return vLLM's outputs. Raise StageError where it stops."""
        kind = load_vllm().SamplingParams
        # ignore_eos: the ends are ours, not those that vLLM reads from the folder.
        params = [kind(temperature=0.0, ignore_eos=True, detokenize=False, **values) for values in settings]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        try:
            return list(self.llm.generate(inputs, params, use_tqdm=False))
        except Exception as error:
            raise StageError(
                f"vLLM stopped: {first_line(error)}; finished items stay; the same command continues with the others"
            ) from error


def score_with(
    model: Runner | VllmModel, bundles: Sequence[Sequence[Example]], with_z: bool, hidden: int | None
) -> Iterator[list[tuple[int, list[TokenScores]]]]:
    """Score bundles by either engine; see `score_bundles`."""
    if isinstance(model, VllmModel):
        assert not (bundles and with_z), "vLLM gives no z"
        return model.score_bundles(bundles)
    return score_bundles(model, bundles, with_z=with_z, hidden=hidden)


def answer_with(
    model: Runner | VllmModel,
    benchmark: Benchmark,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    known: Sequence[list[int]],
    hidden: int | None,
) -> Iterator[list[tuple[int, list[str]]]]:
    """Answer prompts by either engine; see `generate`. vLLM makes little use of what is known, and gets none of it."""
    if isinstance(model, VllmModel):
        assert not decoding.samples, "vLLM gets no prompts to sample from"
        return model.generate(benchmark.tokenizer, prompts, decoding)
    return generate(
        model, benchmark.tokenizer, prompts, decoding, known=known, hidden=hidden, end=benchmark.prompter.end
    )
