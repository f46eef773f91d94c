"""Points on one loaded target against the merged models that `merge` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waited
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from msa_lite import merge
from msa_lite.choose.rules import LeastExtraction
from msa_lite.data import Prompter, Template
from msa_lite.evals.engine.models import load_model
from msa_lite.io.models.streaming import is_streamed
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import OnDevice, OpenMerge, Precision, Term, as_tensor, open_merge
from msa_lite.pipeline.prepare.questions import Questions
from msa_lite.pipeline.prepare.run import Run, Scope
from msa_lite.pipeline.run import merge as loaded
from msa_lite.pipeline.run.merge import LoadedTarget
from msa_lite.recipe import Recipe
from msa_lite.strengths import Strengths
from tests.support.models import tiny_tokenizer
from tests.support.plain import set_small_gpu

Make = Callable[..., Path]
# In no order, twice the same, either strength 0, both 0, and above 1.
POINTS = [(0.75, 0.5), (0.0, 1.0), (1.5, 0.0), (0.0, 0.0), (0.75, 0.5), (0.25, 2.0)]
IDS = torch.arange(40)[None]


def make_job(target: Path, prior: Path, folder: Path, **merge_options: Any) -> Run:
    """What the loaded target asks of a job: models, how they are merged, and where."""
    given = {"target": str(target), "prior": str(prior), "forget": {"data": {"path": "none.jsonl"}}, "seed": 3}
    recipe = Recipe.model_validate(given | {"merge": merge_options, "output": str(folder)})
    return Run(
        recipe=recipe,
        scope=Scope("msa", folder, "prior", True, ("forget", "retain")),
        sources={"target": fetch(str(target)), "prior": fetch(str(prior))},
        data={},
        prompter=Prompter.build(tiny_tokenizer(), "plain", Template()),
        rows={},
        examples={},
        questions=Questions(LeastExtraction(0.95)),
    )


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS.to(model.device)).logits.clone()


def merged_logits(job: Run, vectors: Mapping[str, Path], point: tuple[float, float], out: Path) -> torch.Tensor:
    """Those of the model that `merge` writes, loaded again."""
    alpha, beta = point
    settings, retain = job.recipe.merge, vectors.get("retain")
    merge(
        job.sources["target"], out, forget=str(vectors["forget"]), alpha=alpha, retain=str(retain) if retain else None,
        beta=beta if retain else 0.0, prior=job.sources["prior"], dtype=settings.dtype, rounding=settings.rounding,
        seed=job.recipe.seed, replace=True,
    )  # fmt: skip
    return logits(load_model(out))


def terms(vectors: Mapping[str, Path], point: tuple[float, float]) -> list[Term[Path]]:
    return [Term(name, folder, Strengths(*point).weights[name]) for name, folder in vectors.items()]


def assert_points_are_merges(job: Run, vectors: Mapping[str, Path], scratch: Path) -> None:
    """Every point's logits are the merged model's, bit for bit, and afterwards the target is as it was."""
    target = LoadedTarget.of(job)
    found = [logits(target.merged(terms(vectors, point))) for point in POINTS]
    model = target.merged(terms(vectors, (0.0, 0.0)))
    merged = {point: merged_logits(job, vectors, point, scratch) for point in POINTS}
    for point, ours in zip(POINTS, found, strict=True):
        assert torch.equal(ours, merged[point]), point
    assert len({tuple(ours.flatten().tolist()) for ours in found}) == len(set(POINTS))  # each of them does something
    if job.recipe.merge.dtype == "same":
        before = load_model(job.sources["target"].folder).state_dict()
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["olmo2", "gpt2"])
def test_points_of_adapters_are_the_merged_models(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, kind: str
) -> None:
    job = make_job(make_checkpoint(kind), make_checkpoint(kind, 1), tmp_path)
    adapters = {"forget": make_adapter(kind, 1), "retain": make_adapter(kind, 2, r=3)}
    assert_points_are_merges(job, adapters, tmp_path / "out")


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_points_of_full_checkpoints_are_the_merged_models(make_checkpoint: Make, tmp_path: Path, kind: str) -> None:
    job = make_job(make_checkpoint(kind), make_checkpoint(kind, 1), tmp_path)
    tuned = {"forget": make_checkpoint(kind, 2), "retain": make_checkpoint(kind, 3)}
    assert_points_are_merges(job, tuned, tmp_path / "out")


def test_points_on_a_target_larger_than_the_gpu_are_set_in_ram(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_checkpoint("llama")
    job = make_job(target, make_checkpoint("llama", 1), tmp_path)
    monkeypatch.setattr(loaded, "merge_candidate", None)  # none is written
    set_small_gpu(monkeypatch, target)
    assert is_streamed(LoadedTarget.of(job).merged(terms({"forget": make_adapter("llama", 1)}, (0.5, 0.0))))
    adapters = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2, r=3)}
    assert_points_are_merges(job, adapters, tmp_path / "out")


@pytest.mark.parametrize(
    ("stored", "options", "full"),
    [
        ("bfloat16", {}, False),
        ("bfloat16", {"rounding": "stochastic"}, True),
        ("bfloat16", {"dtype": "float32"}, False),
        ("float32", {"dtype": "bfloat16"}, True),
        ("float32", {"dtype": "float16", "rounding": "stochastic"}, False),
    ],
)
def test_points_are_rounded_as_the_merge_rounds(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, stored: str, options: dict[str, str], full: bool
) -> None:
    job = make_job(make_checkpoint("llama", 0, stored), make_checkpoint("llama", 1, stored), tmp_path, **options)
    vectors = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2)}
    if full:
        vectors = {"forget": make_checkpoint("llama", 2), "retain": make_checkpoint("llama", 3)}
    assert_points_are_merges(job, vectors, tmp_path / "out")


def test_vectors_may_come_and_go(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    """As a baseline's do: other vectors at every call, that touch other tensors."""
    job = make_job(make_checkpoint("llama"), make_checkpoint("llama", 1), tmp_path)
    first = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2)}
    second = {"forget": make_adapter("llama", 3, target_modules=["q_proj"])}
    target = LoadedTarget.of(job)
    for vectors in (first, second, first, {"forget": make_checkpoint("llama", 2)}, second):
        ours = logits(target.merged(terms(vectors, (0.5, 0.25))))
        assert torch.equal(ours, merged_logits(job, vectors, (0.5, 0.25), tmp_path / "out"))


@pytest.fixture
def mixtral(make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, dict[str, Path]]:
    """A model whose places in memory are not known, as of a few families, and its forget vector."""
    monkeypatch.setattr(loaded, "find_places", lambda *_: {})
    target, prior, forget = (make_checkpoint("mixtral", seed) for seed in range(3))
    return make_job(target, prior, tmp_path / "run"), {"forget": forget}


EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "granitemoe", "phimoe"]


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_set_in_the_tensor_that_memory_holds_them_in(
    kind: str, make_checkpoint: Make, make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "merge_candidate", None)  # none is written
    job = make_job(make_checkpoint(kind), make_checkpoint(kind, 1), tmp_path)
    parameters = {"target_parameters": ["gate_up_proj", "down_proj"]}
    adapters = {"forget": make_adapter(kind, 1, **parameters), "retain": make_adapter(kind, 2, r=3, **parameters)}
    assert_points_are_merges(job, adapters, tmp_path / "out")
    tuned = {"forget": make_checkpoint(kind, 2), "retain": make_checkpoint(kind, 3)}
    assert_points_are_merges(job, tuned, tmp_path / "out")


def test_a_model_that_lies_otherwise_in_memory_is_tried_by_way_of_the_disk(
    mixtral: tuple[Run, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    read: list[Path] = []
    monkeypatch.setattr(loaded.logger, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(loaded, "load_model", lambda folder, **how: read.append(folder) or load_model(folder, **how))
    job, vectors = mixtral
    target = LoadedTarget.of(job)
    for alpha in (0.5, 0.0, 1.0):
        ours = logits(target.merged(terms(vectors, (alpha, 0.0))))
        assert torch.equal(ours, merged_logits(job, vectors, (alpha, 0.0), tmp_path / "out"))
        assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert len([folder for folder in read if folder.name != "candidate"]) == len(told) == 1
    assert "in another form than its file" in told[0]


def test_processes_that_try_points_by_way_of_the_disk_take_turns(
    mixtral: tuple[Run, dict[str, Path]], tmp_path: Path
) -> None:
    job, vectors = mixtral
    theirs = tmp_path / "run/candidate/model.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("what another process is loading")
    with ThreadPoolExecutor(1) as thread:
        with FileLock(tmp_path / "run/.candidate.lock"):
            ours = thread.submit(LoadedTarget.of(job).merged, terms(vectors, (0.5, 0.0)))
            with pytest.raises(Waited):
                ours.result(timeout=1)
            assert theirs.is_file()
        assert ours.result(timeout=600) is not None
    assert not theirs.parent.exists()


# Points set on a device of torch against the CPU's own: the same bits, whatever the vectors and the rounding.


WEIGHTS = [{"forget": -0.75, "retain": 0.5}, {"forget": -1.3, "retain": 0.0}, {"forget": 0.0, "retain": 0.0}]
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def opened(target: Path, prior: Path, vectors: Mapping[str, Path], precision: Precision) -> OpenMerge:
    sources = {name: fetch(str(folder)) for name, folder in vectors.items()}
    return open_merge(fetch(str(target)), sources, fetch(str(prior)), precision)


def filled(merge: OpenMerge, weights: Mapping[str, float], device: OnDevice | None) -> tuple[dict[Any, Any], int]:
    """The rows of every tensor, by tensor and first row, and how many blocks the device made."""
    rows: dict[Any, Any] = {}
    made = 0

    def put(name: str, part: slice, values: Any) -> None:
        nonlocal made
        made += isinstance(values, torch.Tensor)
        rows[name, part.start] = (as_tensor(values) if isinstance(values, np.ndarray) else values).clone()

    merge.fill(weights, put, device)
    return rows, made


def compare(merge: OpenMerge, device: OnDevice) -> list[int]:
    """Assert that every point has the same bits both ways; return how many blocks the device made of each."""
    counts = []
    for weights in WEIGHTS:
        (here, none), (there, made) = filled(merge, weights, None), filled(merge, weights, device)
        assert none == 0
        assert here.keys() == there.keys()
        for key, values in here.items():
            assert values.dtype == there[key].dtype
            assert torch.equal(values.view(torch.uint8), there[key].view(torch.uint8)), key
        counts.append(made)
    return counts


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("bfloat16", "same"),
        ("float32", "same"),
        ("float16", "same"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
    ],
)
@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_points_on_a_device_have_the_bits_of_the_merge(
    make_checkpoint: Make, make_adapter: Make, stored: str, dtype: str, full: bool
) -> None:
    target, prior = (make_checkpoint("llama", seed, stored, **SHAPE) for seed in (0, 1))
    vectors = {"forget": make_adapter("llama", 1, model=SHAPE), "retain": make_adapter("llama", 2, r=3, model=SHAPE)}
    if full:
        vectors = {name: make_checkpoint("llama", seed, **SHAPE) for seed, name in enumerate(vectors, 2)}
    merge = opened(target, prior, vectors, Precision(dtype))
    assert all(compare(merge, OnDevice(torch.device("cpu"))))


@pytest.mark.parametrize("precision", [Precision(rounding="stochastic", seed=3), Precision(exact=True)])
def test_what_a_device_would_round_otherwise_is_left_to_the_cpu(
    make_checkpoint: Make, make_adapter: Make, precision: Precision
) -> None:
    target = make_checkpoint("llama", 0, "bfloat16")
    vectors = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2)}
    merge = opened(target, make_checkpoint("llama", 1), vectors, precision)
    assert compare(merge, OnDevice(torch.device("cpu"))) == [0] * len(WEIGHTS)


def test_a_device_that_adds_up_products_in_another_order_makes_none(
    make_checkpoint: Make, make_adapter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of such a device, products are summed in fp64."""
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a.double(), b.double()).float())
    target = make_checkpoint("llama", 0, **SHAPE)
    vectors = {"forget": make_adapter("llama", 1, model=SHAPE), "retain": make_adapter("llama", 2, model=SHAPE)}
    device = OnDevice(torch.device("cpu"))
    assert not device.agrees(64, 16, 64)
    assert compare(opened(target, target, vectors, Precision()), device)[0] == 0
