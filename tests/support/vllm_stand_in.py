"""A stand-in for vLLM 0.32: the part of its offline interface that msa-lite uses, answered by transformers.

Each prompt runs alone, without a cache. What vLLM refuses is refused here too: unknown arguments, stop strings without
a tokenizer, prompts beyond `max_model_len`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    detokenize: bool = True


@dataclass
class StandIn:
    """The module, as a test sees it."""

    kwargs: list[dict[str, Any]] = field(default_factory=list)
    """The arguments of each `LLM` that was started."""
    running: int = 0
    """The engines that have not been shut down."""
    params: list[SamplingParams] = field(default_factory=list)
    """The parameters of each prompt that was run."""
    change: Callable[[Any], None] = lambda model: None
    """Changes a model that was loaded."""
    fails_at: int | None = None
    """The number of prompts after which `generate` raises; 0: `LLM` raises."""
    device: str = "cpu"

    def module(self) -> ModuleType:
        module = ModuleType("vllm")
        module.__spec__ = ModuleSpec("vllm", None)
        stand_in = self

        class LLM(_LLM):
            own = stand_in

        names = {"LLM": LLM, "SamplingParams": SamplingParams, "__version__": "0.32.0"}
        registry = SimpleNamespace(get_supported_archs=lambda: {"LlamaForCausalLM"})
        vars(module).update(names, ModelRegistry=registry)
        return module


class _LLM:
    own: StandIn

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        kv_cache_memory_bytes: int | None = None,
        load_format: str = "auto",
        generation_config: str = "auto",
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        use_tqdm_on_load: bool = True,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        settings = dict(locals())
        self.own.kwargs.append({name: settings[name] for name in ("model", "dtype", "max_model_len", "load_format")})
        if self.own.fails_at == 0:
            raise RuntimeError("Engine core initialization failed.\nSee root cause above.")
        assert skip_tokenizer_init, "the stand-in reads no tokenizer"
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.own.change(self._model)
        window = self._model.config.max_position_embeddings
        if (max_model_len or window) > window:
            raise ValueError(f"User-specified max_model_len ({max_model_len}) is greater than the derived one")
        self._most = max_model_len or window
        self.own.running += 1
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))

    def _shutdown(self, timeout: float | None = None) -> None:
        self.own.running -= 1
        self._model = None

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[Any]:
        return [
            self._run(prompt["prompt_token_ids"], params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _run(self, ids: list[int], params: SamplingParams) -> Any:
        import torch

        if len(self.own.params) == self.own.fails_at:
            raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        self.own.params.append(params)
        assert not params.stop, "stop strings are only supported when detokenize is True"
        if len(ids) >= self._most:
            raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than the maximum of {self._most}")
        with torch.inference_mode():
            entries = self._prompt_logprobs(ids) if params.prompt_logprobs is not None else None
            tokens: list[int] = []
            while len(tokens) < min(params.max_tokens or self._most, self._most - len(ids)):
                logits = self._model(input_ids=torch.tensor([ids + tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
                if tokens[-1] in (params.stop_token_ids or []):
                    break
        return SimpleNamespace(prompt_logprobs=entries, outputs=[SimpleNamespace(token_ids=tokens)])

    def _prompt_logprobs(self, ids: list[int]) -> list[dict[int, Logprob] | None]:
        import torch

        log_probs = self._model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        entries: list[dict[int, Logprob] | None] = [None]
        for token, row in zip(ids[1:], log_probs, strict=False):
            top = int(row.argmax())
            rank = int((row >= row[token]).sum())
            entries.append({token: Logprob(float(row[token]), rank)} | {top: Logprob(float(row[top]), 1)})
        return entries


def install(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Put a stand-in in the place of vLLM for a test."""
    stand_in = StandIn()
    platform = SimpleNamespace(is_cpu=lambda: stand_in.device == "cpu", is_cuda_alike=lambda: stand_in.device == "cuda")
    platforms = ModuleType("vllm.platforms")
    vars(platforms)["current_platform"] = platform
    monkeypatch.setitem(sys.modules, "vllm", stand_in.module())
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return stand_in
