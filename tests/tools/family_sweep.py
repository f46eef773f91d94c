"""Merge PEFT's all-linear adapters into a tiny model of every family that transformers has, and compare with PEFT.

    python -m tests.tools.family_sweep [FAMILY ...]      # about ten minutes on two cores; prints a table

For each family: a checkpoint as transformers saves it, two random adapters, the merged model and the merged adapter,
both against what PEFT merges in fp64. "refused" is what msa-lite says before any work; "PEFT" is where PEFT itself
cannot adapt, merge or save the model.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from msa_lite.errors import MsaError
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.vectors.vector import adapter_vector
from msa_lite.train import FitSettings
from msa_lite.train.memory.model import planned_adapter
from tests.support.families import UNFIT, tiny_family

FORGET, RETAIN = 0.75, 0.5
CLOSE = 1e-6  # of a weight: fp32


class PeftError(Exception):
    """PEFT, or saving, fails on a family."""


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's weights in fp64."""
    return {n: t.double() for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def load(folder: Path) -> Any:
    """Load a model as a user would, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reopen(base: Path, out: Path) -> None:
    """Save a checkpoint again, as transformers loads it."""
    try:
        load(base).save_pretrained(out)
    except Exception as error:
        raise PeftError(f"transformers does not open its own checkpoint: {type(error).__name__}") from error


def adapt(base: Path, out: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a random adapter on a checkpoint; return the weights of the model that PEFT merges."""
    from peft import LoraConfig, PeftModel, get_peft_model

    try:
        model = get_peft_model(load(base), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.05 * torch.randn_like(parameter)
        model.save_pretrained(out)
        model.double().merge_and_unload().save_pretrained(out.with_suffix(".merged"))
        again = PeftModel.from_pretrained(load(base), out).double()
        again.merge_and_unload().save_pretrained(out.with_suffix(".again"))
    except Exception as error:
        raise PeftError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    merged, again = (read(out.with_suffix(end)) for end in (".merged", ".again"))
    if farthest(again, merged) > CLOSE:
        raise PeftError("it does not open its own adapter as it was, or transformers does not load its own checkpoint")
    return merged


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight; infinity where names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[name] - value).abs().max()) for name, value in expected.items() if value.numel())


def try_family(kind: str, folder: Path) -> tuple[str, str]:
    """Return "right", "wrong", "refused" or "PEFT" of a family, and a word on it."""
    from peft import PeftModel

    base, vectors = folder / "base", {name: folder / name for name in ("forget", "retain")}
    try:
        tiny_family(kind).save_pretrained(base)
        before = read(base)
        reopen(base, folder / "loaded")  # a padding row, for one, is loaded as zeros
        loaded = read(folder / "loaded")
        merged = {name: adapt(base, out, seed) for seed, (name, out) in enumerate(vectors.items())}
    except PeftError as error:
        return "PEFT", str(error)
    expected = {name: value.clone() for name, value in before.items()}
    for name, weight in (("forget", -FORGET), ("retain", RETAIN)):
        for key, value in expected.items():
            value += weight * (merged[name].get(key, before[key]) - loaded.get(key, before[key]))
    try:
        target = load_checkpoint(base)
        adapter_vector(planned_adapter(target, FitSettings()), target, target)
    except MsaError as error:
        return "refused", " ".join(str(error).replace(str(folder), "").split())[:160]
    options = {name: str(out) for name, out in vectors.items()} | {"alpha": FORGET, "beta": RETAIN}
    merge(str(base), folder / "model", **options)
    merge_adapters(str(base), folder / "adapter", **options)
    model = PeftModel.from_pretrained(load(base), folder / "adapter").double()
    model.merge_and_unload().save_pretrained(folder / "both")
    both = read(folder / "both")  # PEFT does not save every tied name that the checkpoint has
    on_loaded = {name: loaded[name] + expected[name] - before[name] for name in both.keys() & expected.keys()}
    far = [farthest(read(folder / "model"), expected), farthest(both, on_loaded)]
    changed = sum(not expected[name].equal(before[name]) for name in expected)
    verdict = "right" if max(far) <= CLOSE and changed else "wrong"
    return verdict, f"{changed} of {len(expected)} tensors; merge {far[0]:.0e}, adapter {far[1]:.0e}"


def main() -> None:
    """Try the families named, or all, and print the table."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    print("| family | all-linear | |\n|---|---|---|")
    for kind in sys.argv[1:] or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNFIT]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict, word = try_family(kind, Path(folder))
            except Exception as error:  # an error that no check has told before
                verdict, word = "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        counts[verdict] += 1
        print(f"| {kind} | {verdict} | {word} |", flush=True)
    print("\n" + ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main()
