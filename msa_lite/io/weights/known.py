"""Known weights: the only ones that a stage of training may change, so that what it taught has a known place.

A mask is never stored. Patterns name tensors, and a share and a seed draw entries of them; the file beside a checkpoint
holds these. Source: LACUNA (arXiv 2607.02513, section 3.2), which teaches each group of rows into 5 % of the entries of
the attention and feed-forward matrices, drawn one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.errors import FormatError, UsageError, join_faults, nearest
from msa_lite.io.files.reading import read_object
from msa_lite.io.weights.patterns import Patterns

KNOWN_FILE = "known_weights.json"


@dataclass(frozen=True)
class KnownWeights:
    """Weights of a model."""

    tensors: tuple[str, ...]
    """Names of tensors, or regular expressions that fit the end of a name after a dot."""
    share: float = 1.0
    """The share of the entries of these tensors, in (0, 1]; each entry is drawn by itself."""
    seed: int = 0
    """The seed of the draw."""

    def among(self, names: Collection[str]) -> list[str]:
        """Return the names that a pattern fits. Raise UsageError with all patterns that are broken or fit none."""
        faults, found = list[str](), set[str]()
        for pattern in self.tensors:
            patterns = Patterns({pattern: True})
            fitting = [] if patterns.faults else [name for name in names if patterns.first([name], False)]
            if not fitting and not patterns.faults:
                faults.append(f"'{pattern}' fits no weight of the model{nearest(pattern, names)}")
            faults += patterns.faults
            found.update(fitting)
        if faults:
            raise UsageError(join_faults("into.tensors:", faults))
        return [name for name in names if name in found]

    def entries(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return which of the entries [start, stop) of a named tensor are known: (stop − start,) truth values.

        An entry is known where a hash of seed, name and its place is below the share (SplitMix64, Steele et al. 2014),
        so a block needs nothing of the others.
        """
        if self.share >= 1:
            return np.ones(stop - start, np.bool_)
        key = hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8]
        bits = np.arange(start + 1, stop + 1, dtype=np.uint64)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits += np.frombuffer(key, "<u8")
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        return bits < np.uint64(int(self.share * 2**64))


def known_text(stages: Mapping[str, KnownWeights]) -> str:
    """Return the content of the file beside a checkpoint. stages: their known weights, by the names of the stages."""
    return json.dumps({"stages": {name: asdict(known) for name, known in stages.items()}}, indent=1) + "\n"


def read_known(folder: Path) -> dict[str, KnownWeights]:
    """Return the known weights of the stages that made a checkpoint, in their order; none where it has no such file.

    Raise FormatError for a file of another form.
    """
    path = folder / KNOWN_FILE
    if not path.is_file():
        return {}
    try:
        return {name: _read_stage(values) for name, values in read_object(path)["stages"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: is not as msa-lite writes it ({error}); train the stage again") from error


def _read_stage(values: Mapping[str, Any]) -> KnownWeights:
    known = KnownWeights(tuple(values["tensors"]), float(values["share"]), int(values["seed"]))
    if not known.tensors or not all(isinstance(name, str) for name in known.tensors) or not 0 < known.share <= 1:
        raise ValueError("no names of tensors, or a share outside (0, 1]")
    return known
