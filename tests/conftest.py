"""Settings of all tests, and the fixtures that any of them may use."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml

from tests.support.drawing import Drawing
from tests.support.vary import WORLD, in_other_order, other_listings
from tests.support.walls import raise_walls

_BEGAN_IN = Path.cwd()
_OWNS_WALLS = "PYTEST_XDIST_WORKER" not in os.environ
_WALLS = raise_walls()  # before a library reads where its cache is
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in workers, and behind a shell's `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no test that interrupts would ever end
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl when another process holds a core

hypothesis.settings.register_profile("any machine", deadline=None)  # no test depends on the speed of the machine
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests otherwise where that is asked for (`tests/support/vary.py`)."""
    if WORLD:
        items[:] = in_other_order(items)


@pytest.fixture(scope="session", autouse=True)
def _listings() -> Iterator[None]:
    """List folders in another order where that is asked for."""
    with other_listings() if WORLD else nullcontext():
        yield


def pytest_collection_finish() -> None:
    """Leave the folder that the tests were started in, and begin to watch."""
    os.chdir(_WALLS.working_folder)
    _WALLS.watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a test that used what belongs to whoever runs it, or left its files in the working folder."""
    yield
    os.chdir(_WALLS.working_folder)
    left = sorted(os.listdir())
    for name in left:
        shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.remove(name)
    used = _WALLS.notes.read_text(encoding="utf-8").splitlines() if _WALLS.notes.exists() else []
    _WALLS.notes.unlink(missing_ok=True)
    if used or left:
        pytest.fail(f"beyond the walls of tests/support/walls.py: {used[:5]}; left in the working folder: {left[:5]}")


def pytest_unconfigure() -> None:
    """Go back, and remove what the tests had in the place of home and caches."""
    os.chdir(_BEGAN_IN)
    if _OWNS_WALLS:
        shutil.rmtree(_WALLS.place, ignore_errors=True)


yaml.SafeDumper.ignore_aliases = lambda dumper, data: True  # what two recipes share is written out; aliases are refused


@pytest.fixture(autouse=True, scope="session")
def _outputs_open() -> Iterator[None]:
    """Open every safetensors file that a merge writes with the library that others read it with."""
    from safetensors import safe_open

    from msa_lite.io.weights.writer import Sink

    class Checked(Sink):
        def __init__(self, path: Path, *rest: Any, **options: Any) -> None:
            super().__init__(path, *rest, **options)
            self.path = path

        def close(self) -> str:
            sha256 = super().close()
            if self.path.suffix == ".safetensors":
                with safe_open(self.path, "numpy") as file:
                    assert all(file.get_slice(name).get_shape() is not None for name in file.keys())  # noqa: SIM118
            return sha256

    with pytest.MonkeyPatch.context() as patch:
        for module in ("msa_lite.merger.stream.stream", "msa_lite.merger.adapters.output"):
            patch.setattr(f"{module}.Sink", Checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_the_disk() -> Iterator[None]:
    """Leave files to the system's cache: a run syncs hundreds of them, and no test outlives a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda handle: None, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[Drawing]:
    """Draw pictures inside `with drawing():`, nowhere else: it takes longer than the rest of a tiny run."""
    from msa_lite.pipeline.run import report as reporting
    from msa_lite.report.page.run_files import make_page

    @contextmanager
    def drawn() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reporting, "make_page", make_page)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "make_page", partial(make_page, drawn=False))
        yield drawn


@pytest.fixture(autouse=True)
def _drawing_where_marked(request: pytest.FixtureRequest, drawing: Drawing) -> Iterator[None]:
    """Tests that are about pictures and pages are marked."""
    with drawing() if "pictures" in request.keywords else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _log_stays() -> Iterator[None]:
    """Put the log back as it was: a command in this process keeps it to itself."""
    logger = logging.getLogger("msa_lite")
    handlers, propagate, level = [*logger.handlers], logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Leave what earlier modules have made out of garbage collections: a fit has several, and the heap only grows."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def quick_fits() -> Iterator[None]:
    """For tests that fit: leave what the imports have made out of garbage collections, of which a fit has several."""
    for name in ("peft", "transformers.trainer", "datasets"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint(kind, seed=0, dtype="float32", shard="5GB", chat=False, **config changes) → folder, cached."""
    from tests.support.models import save_checkpoint, tiny_model

    made: dict[str, Path] = {}

    def make(
        kind: str, seed: int = 0, dtype: str = "float32", shard: str = "5GB", chat: bool = False, **changes: Any
    ) -> Path:
        key = repr((kind, seed, dtype, shard, chat, sorted(changes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{seed}")
            made[key] = save_checkpoint(folder, tiny_model(kind, seed, **changes), dtype, shard, chat)
        return made[key]

    return make


@pytest.fixture(scope="session")
def prior(make_checkpoint: Callable[..., Path]) -> Path:
    """The folder of a tiny prior, which no test changes."""
    return make_checkpoint("llama")


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_adapter(kind, seed=1, model={}, **LoraConfig changes) → folder, cached; fits make_checkpoint(kind, **model).

    What it holds beside factors is relative to that checkpoint of seed 0, which is its prior.
    """
    from tests.support.models import save_adapter, tiny_model

    made: dict[str, Path] = {}

    def make(kind: str, seed: int = 1, scale: float = 0.05, model: dict[str, Any] | None = None, **config: Any) -> Path:
        key = repr((kind, seed, scale, sorted((model or {}).items()), sorted(config.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-adapter-{seed}")
            made[key] = save_adapter(folder, tiny_model(kind, **(model or {})), seed, scale, **config)
        return made[key]

    return make


@pytest.fixture
def adapter_warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reading adapters warned of; not by caplog, since a command that ran before keeps the log to itself."""
    from msa_lite.io.weights import matching

    told: list[str] = []
    monkeypatch.setattr(matching.logger, "warning", lambda text, *values: told.append(text % values))
    return told
