"""Keep the plan, fixed before the first run, and the state of each seed."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from experiments import EXPERIMENTS, HINDSIGHT, Checkpoint, Experiment, Size
from history import STAGES, Models

from msa_lite.errors import MsaError, UsageError, join_faults
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import digest, write_json
from msa_lite.io.finished.manifest import software_versions

logger = logging.getLogger(__name__)

_FREE = ("what", "once")  # keys of an experiment that may change, since no run depends on them


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def revision(folder: Path) -> str:
    """Return the commit of the repository, with a + where files differ from it; "unknown" outside of one."""
    try:
        lines = [
            subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return lines[0] + ("+" if lines[1] else "")


def fix_plan(
    out: Path, name: str, size: Size, seeds: Sequence[int], experiments: Sequence[Experiment], model: str
) -> None:
    """Write plan.json, or add what is new to it: each experiment stands there with the time when it was fixed.

    model: the name of the pretrained model, for the page.

    Raise UsageError if an experiment, or the size, differs from what was fixed before; only its words and the number of
    its seeds may. Raise FormatError if plan.json is damaged.
    """
    file = out / "plan.json"
    plan = read_object(file) if file.is_file() else {"size": name, "settings": asdict(size)}
    known = {entry["name"]: entry for entry in plan.get("experiments", [])}
    stamp = {"fixed": now(), "commit": revision(Path(__file__).parent)}
    entries = []
    faults = [] if plan.get("settings") == asdict(size) else [f"size {name}"]
    for experiment in experiments:
        entry = json.loads(json.dumps(asdict(experiment)))
        before = known.get(experiment.name)
        if before and any(before[key] != value for key, value in entry.items() if key not in _FREE):
            faults.append(experiment.name)
        entries.append((before or stamp) | entry)
    if faults:
        raise UsageError(join_faults(f"{file}: these were fixed otherwise; choose another --out:", faults))
    plan |= {"experiments": entries, "seeds": sorted({*plan.get("seeds", []), *seeds})}
    plan |= {"hindsight": HINDSIGHT, "hardware": hardware(), "versions": software_versions(), "model": model}
    plan.setdefault("fixed", stamp["fixed"])
    plan.setdefault("commit", stamp["commit"])
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, plan)


def hardware() -> dict[str, Any]:
    """Return what the runs are made on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


class State:
    """The finished experiments of a seed, in a file that is written after each of them.

    Raise FormatError if the file is damaged.
    """

    def __init__(self, file: Path, commit: str) -> None:
        self._file, self._commit = file, commit
        self._values: dict[str, Any] = {"experiments": {}} | (read_object(file) if file.is_file() else {})

    def is_done(self, name: str, recipe: Path) -> bool:
        """Check whether an experiment has ended without an error, by this recipe."""
        entry = self._values["experiments"].get(name)
        return bool(entry) and entry["error"] is None and entry["recipe"] == digest(recipe.read_text("utf-8"))

    def error_of(self, name: str) -> str | None:
        """Return the error with which an experiment ended; None if there was none."""
        return self._values["experiments"].get(name, {}).get("error")

    @contextmanager
    def timed(self, name: str, recipe: Path, command: str, folder: Path) -> Iterator[None]:
        """Note an experiment when it has ended, with its time, or with its error, which goes no further."""
        began, error = time.monotonic(), None
        try:
            yield
        except MsaError as fault:
            error = str(fault)
        except Exception as fault:  # a bug in one experiment; hours of others wait behind it
            logger.exception("%s", name)
            error = f"{type(fault).__name__}: {fault}"
        before = self._values["experiments"].get(name, {})
        text = digest(recipe.read_text("utf-8"))
        spent = before.get("seconds", 0.0) if before.get("recipe") == text else 0.0
        self._values["experiments"][name] = {
            "folder": str(folder.relative_to(self._file.parent)),
            "command": command,
            "recipe": text,
            "seconds": round(spent + time.monotonic() - began, 1),
            "commit": self._commit,
            "date": now(),
            "error": error,
        }
        write_json(self._file, self._values)

    def left(self, experiments: Sequence[Experiment], minutes: float) -> float:
        """Return the seconds that experiments will take, by those that are done, or by a seed's minutes.

        By their median, since one of them may have been paused for hours.
        """
        done = [entry["seconds"] for entry in self._values["experiments"].values()]
        each = statistics.median(done) if done else 60 * minutes / len(EXPERIMENTS)
        return each * sum(e.name not in self._values["experiments"] for e in experiments)

    def note_models(self, models: Models, seconds: float) -> None:
        """Note the time of the histories, and each prior's distance from the target."""
        if "distances" in self._values:
            return
        priors: tuple[Checkpoint, ...] = ("base", *STAGES[:2])
        self._values["models"] = {"seconds": round(seconds, 1), "commit": self._commit, "date": now()}
        self._values["distances"] = {name: distance(models.target("tofu"), models.target(name)) for name in priors}
        write_json(self._file, self._values)


def distance(target: str, prior: str) -> float:
    """Return ‖θ_D − θ_0‖ / ‖θ_D‖ over all weights, in fp32."""
    from safetensors.numpy import load_file

    from msa_lite.io.weights.hub import fetch

    sums = np.zeros(2)
    theirs = {
        name: t for file in sorted(fetch(prior).folder.glob("*.safetensors")) for name, t in load_file(file).items()
    }
    for file in sorted(Path(target).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            own = tensor.astype(np.float32)
            sums += [np.sum((own - theirs[name].astype(np.float32)) ** 2), np.sum(own**2)]
    return float(np.sqrt(sums[0] / sums[1]))
