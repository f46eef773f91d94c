"""Guards around transformers and PEFT: what a config may not ask for, and their errors as ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, MsaError
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.models.devices import OverrunError, is_out_of_memory, limited

_FOREIGN = ("transformers_weights", "fusion_config")  # name files or code that are loaded in the place of the model's
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # with a slash: programs of the Hub
# Numbers of a config that memory grows with before a weight is read. No model has more layers than tensors, and nothing
# in it is wider than its largest tensor. Smaller numbers do no harm.
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks|experts)")
_WIDTHS = re.compile(
    r"(vocab|hidden|intermediate|ffn|embedding|state|moe_intermediate)_size|n_embd|n_inner|d_model|d_inner|d_ff"
    r"|ffn_dim|head_dim|n_positions|n_ctx|num_labels|(num|n)_(\w+_)?heads?"
)
_FEW, _WIDE = 256, 1 << 16


def pattern_fault(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the fault of the first bad regular expression among those that PEFT matches with these names, or None."""
    named = list(names)
    for pattern in patterns:
        try:
            with limited():
                compiled = re.compile(pattern)
                for name in named:
                    compiled.search(name)
                    compiled.fullmatch(name)
        except (re.error, OverflowError, RecursionError) as error:
            return f"{pattern!r} is no regular expression ({error})"
        except (OverrunError, MemoryError):
            return f"{pattern[:80]!r} takes too long to match; write it without repetitions within repetitions"
    return None


def foreign_fields(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a config that would load files or programs other than the model's weights."""
    for key, value in config.items():
        if (key in _FOREIGN and value is not None) or (_KERNELS.fullmatch(key) and "/" in str(value)):
            yield f"{key}: {value!r} would load something in the place of the model's own; leave it out"
    if "auto_map" in config:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in CONFIG_MAPPING_NAMES:
            yield "auto_map: the model needs Python code of its own, which is not run"


def too_large(config: Mapping[str, Any], count: int, widest: int) -> Iterator[str]:
    """Yield the sizes of a config that do not fit so many tensors, the widest of them so wide."""
    sections = [("", config)]
    sections += [(f"{key}.", section) for key, section in config.items() if isinstance(section, dict)]
    for prefix, section in sections:
        for key, value in section.items():
            if not isinstance(value, int | float):
                continue
            if _LAYERS.fullmatch(key) and value > max(_FEW, count, widest if "expert" in key else 0):
                yield f"{prefix}{key}: {value:.10g} for {count} tensors"
            elif _WIDTHS.fullmatch(key) and value > max(_WIDE, widest):
                yield f"{prefix}{key}: {value:.10g}, but no tensor is wider than {widest}"


@contextmanager
def explained(folder: Path, what: str) -> Iterator[None]:
    """Turn any error of a library about a user's files into FormatError; running out of memory stays what it is."""
    try:
        yield
    except (MsaError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error) or "CUDA" in str(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(f"{folder}: {what} cannot be loaded ({reason[:500]})") from error


@contextmanager
def without_reports() -> Iterator[None]:
    """Silence transformers' and PEFT's own tables and warnings of misfits: here a misfit is an error."""
    import warnings

    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), without_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
