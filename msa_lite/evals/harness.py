"""The `lm-eval` benchmark: general ability, by tasks of EleutherAI's lm-evaluation-harness or of one's own.

The harness makes the prompts, asks the model and scores; its numbers are reported as they are, with its defaults: no
chat template, the number of examples that a task names, log-softmax in the dtype of the model. It is an optional extra.
"""

from __future__ import annotations

import functools
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_lite.errors import DataError, StageError, UsageError, join_faults, nearest
from msa_lite.evals.models import check_source, load_model, load_tokenizer, model_identity
from msa_lite.evals.own_tasks import check_no_code, sandboxed
from msa_lite.evals.records import Ranks, write_records
from msa_lite.io.extras import require
from msa_lite.io.files import digest, hash_file, write_json
from msa_lite.io.hub import Source, explain
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.io.seal import list_files
from msa_lite.report import Metric, Report, load_report, write_report

RESULTS_FILE = "results.json"
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_CPU_BATCH = 4  # rows; the harness holds the logits of every position of a batch


def check_tasks(tasks: Sequence[str], task_folder: Path | None = None, allow_code: bool = False) -> None:
    """Raise UsageError unless each name is a task, group or tag of the harness or of the YAML files in a folder.

    No data is loaded for it. Without `allow_code`, tasks of the folder that would run Python are refused, too.
    """
    require("lm-eval")
    if not tasks:
        raise UsageError("no tasks: name some, as in hellaswag,arc_easy")
    if task_folder is not None and not task_folder.is_dir():
        raise UsageError(f"{task_folder}: no such folder of tasks")
    if task_folder is not None and not allow_code:
        check_no_code(task_folder)
    known = _index_tasks(tasks, task_folder).task_index
    faults = [f"{name}{nearest(name, known)}" for name in tasks if name not in known]
    if faults:
        where = f" nor in a YAML file below {task_folder} that it can read" if task_folder else ""
        raise UsageError(join_faults(f"not among the tasks of lm-evaluation-harness{where}:", faults))


def evaluate_harness(
    source: Source,
    tasks: Sequence[str],
    out: Path,
    *,
    limit: int | None = None,
    task_folder: Path | None = None,
    few_shot: int | None = None,
    seed: int = 0,
    allow_code: bool = False,
    progress: Progress = silent,
) -> Report:
    """Score a model by tasks of the harness; writes `samples_TASK.jsonl`, results.json (the harness's own results),
    report.json and a manifest into `out`.

    tasks: names of tasks, groups or tags. limit: at most so many rows of each task, its first. task_folder: YAML files
    of one's own tasks, which come before the harness's of the same name. few_shot: examples in each prompt where a task
    does not insist on none; None for what each task names. seed: for choosing examples and for tasks that draw; the
    harness's own command line chooses examples with 1234. allow_code: run the Python that tasks of the folder name.

    Metrics are named TASK/METRIC, or TASK/METRIC,FILTER for answers that a filter took out of the text; groups come
    before their members. A folder made from the same inputs is read instead; that data outside of `task_folder` has
    changed is not noticed. Raises UsageError as `check_tasks` does, DataError when a task's data cannot be loaded and
    StageError when the harness fails while it asks or scores.
    """
    if Ranks.current().count > 1:
        raise UsageError("the benchmark lm-eval runs in one process; start it without accelerate launch or torchrun")
    check_tasks(tasks, task_folder, allow_code)
    check_source(source)
    settings: dict[str, Any] = {"tasks": list(tasks), "limit": limit, "few_shot": few_shot, "seed": seed}
    settings["lm_eval"] = metadata.version("lm_eval")
    inputs = {"model": model_identity(source), **settings, "task_files": _identity(task_folder)}
    if is_finished(out, inputs):
        return load_report(out)
    with (
        stage_folder(out, "evaluation", inputs, {"sources": {"model": source.pinned()}}) as partial,
        _hushed(progress) as shown,
        nullcontext() if allow_code or task_folder is None else sandboxed(),
    ):
        manager = _index_tasks(tasks, task_folder)
        given = _load_tasks(manager, tasks, shown)
        results = _plain(_run(source, manager, given, settings, shown))
        report = Report(
            "lm-eval", ",".join(tasks), aggregate(results, tasks), settings | {"tasks": results["versions"]}
        )
        for name, samples in results.pop("samples").items():
            write_records(partial / f"samples_{_file_name(name)}.jsonl", samples)
        write_json(partial / RESULTS_FILE, results)
        write_report(report, partial)
    return report


def aggregate(results: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Metric]:
    """Metrics from results of the harness, samples included: what was asked for first, then its members level by level.

    A group's direction is that of its tasks, None where they differ.
    """
    members: Mapping[str, list[str]] = results["group_subtasks"]
    names = list(tasks)
    for name in names:
        names += members.get(name, [])
    metrics = {}
    for name in dict.fromkeys([*names, *results["results"]]):  # a tag's tasks are members of nothing
        scores = results["results"].get(name, {})
        for key, value in scores.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            label = f"{name}/{metric}" if kept == "none" else f"{name}/{key}"
            n = _count(results, name, metric, kept)
            error = scores.get(f"{metric}_stderr,{kept}")
            note = None if _is_number(value) else f"lm_eval gave {value}"
            metrics[label] = Metric(
                value if note is None else None,
                n,
                error if _is_number(error) else None,
                _direction(results, name, metric),
                scores["sample_len"] - n,
                note,
            )
    return metrics


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _leaves(results: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group at any depth; a task alone is its own."""
    members = results["group_subtasks"].get(name)
    return [name] if members is None else [leaf for member in members for leaf in _leaves(results, member)]


def _count(results: Mapping[str, Any], name: str, metric: str, kept: str) -> int:
    """Rows behind a metric: a task may leave some out."""
    rows = [row for leaf in _leaves(results, name) for row in results["samples"][leaf]]
    return sum(row["filter"] == kept and metric in row["metrics"] for row in rows)


def _direction(results: Mapping[str, Any], name: str, metric: str) -> bool | None:
    found = {results["higher_is_better"][leaf].get(metric) for leaf in _leaves(results, name)}
    return found.pop() if len(found) == 1 else None


def _index_tasks(tasks: Sequence[str], task_folder: Path | None) -> Any:
    """The harness's TaskManager for the tasks of a folder, and for its own unless those suffice.

    To read the thousands of files of its own takes it some seconds.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_folder, include_defaults=False)
    if not _suffices(manager.task_index, tasks):
        for name, entry in _shipped_tasks().items():
            manager.task_index.setdefault(name, entry)
    return manager


def _suffices(index: Mapping[str, Any], tasks: Sequence[str]) -> bool:
    """Whether tasks, and those that groups among them name, are all in an index."""
    names: list[Any] = list(tasks)
    for name in names:
        if not isinstance(name, str) or name not in index:  # a member may also be spelled out in place
            return False
        members = (index[name].cfg or {}).get("task")
        names += members if isinstance(members, list) else []
    return True


@functools.cache
def _shipped_tasks() -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    return TaskManager().task_index


def _identity(task_folder: Path | None) -> str | None:
    """What pins the files of a folder of tasks; Python's caches, which come with use, left out."""
    if task_folder is None:
        return None
    files = [path for path in list_files(task_folder) if "__pycache__" not in path.parts]
    return digest({str(path.relative_to(task_folder)): hash_file(path) for path in files})


def _load_tasks(manager: Any, tasks: Sequence[str], progress: Progress) -> list[Any]:
    """Tasks and groups of the harness with their data. Raises DataError when that cannot be had."""
    given: list[Any] = []
    for number, name in enumerate(tasks):
        progress("lm-eval: tasks", number, len(tasks))
        try:
            found = manager.load(name)
        except Exception as error:  # of the Hub, of `datasets`, of a task's own Python
            raise DataError(f"{name}: lm_eval cannot load the task or its data ({explain(error)})") from error
        unsafe = [task for task, value in found["tasks"].items() if getattr(value, "UNSAFE_CODE", False)]
        if unsafe:
            raise UsageError(f"{', '.join(unsafe)}: would run programs that the model writes; leave them out")
        given += [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    progress("lm-eval: tasks", len(tasks), len(tasks))
    try:
        manager.load(given)
    except ValueError as error:
        raise UsageError(f"{','.join(tasks)}: {error}") from error
    return given


def _run(
    source: Source, manager: Any, given: list[Any], settings: Mapping[str, Any], progress: Progress
) -> Mapping[str, Any]:
    """What `lm_eval.simple_evaluate` returns for a model. Raises StageError when it fails."""
    model = _wrap(source, progress)
    from lm_eval import simple_evaluate

    try:
        return simple_evaluate(
            model=model,
            tasks=given,
            task_manager=manager,
            num_fewshot=settings["few_shot"],
            limit=settings["limit"],
            **dict.fromkeys(_SEEDS, settings["seed"]),
        )
    except Exception as error:
        raise StageError(f"{source.name}: lm_eval failed ({explain(error)}); nothing is kept of it") from error


def _wrap(source: Source, progress: Progress) -> Any:
    """A model as the harness takes it, which tells of each answer in place of the harness's own bars."""
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):
        def _count_answers(self, requests: list[Any], kind: str) -> None:
            self.set_cache_hook(_AnswerCounter(progress, f"lm-eval: {kind}", len(requests)))

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            self._count_answers(requests, "likelihoods")
            return super().loglikelihood(requests, disable_tqdm)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
            self._count_answers(requests, "likelihoods of texts")
            return super().loglikelihood_rolling(requests, disable_tqdm)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            self._count_answers(requests, "answers")
            return super().generate_until(requests, disable_tqdm)

    model = load_model(source.folder)
    source.check_unchanged()
    tokenizer = load_tokenizer(source)
    batch = "auto" if model.device.type == "cuda" else _CPU_BATCH
    return Model(pretrained=model, tokenizer=tokenizer, batch_size=batch)


@dataclass
class _AnswerCounter:
    """Stands where the harness keeps a cache of answers, which hears of each one."""

    progress: Progress
    label: str
    total: int
    done: int = 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.done += 1
        self.progress(self.label, self.done, self.total)


@contextmanager
def _hushed(progress: Progress) -> Iterator[Progress]:
    """Keep what the harness prints off stdout; the callback given back is `progress`, which may print."""
    usual = sys.stdout

    def shown(label: str, done: int, total: int) -> None:
        with redirect_stdout(usual):
            progress(label, done, total)

    with redirect_stdout(io.StringIO()):
        yield shown


def _plain(value: Any) -> Any:
    """A value as JSON holds it; numpy's numbers become Python's, and what JSON has no form for becomes text."""
    from lm_eval.utils import handle_non_serializable

    return json.loads(json.dumps(value, default=handle_non_serializable))


def _file_name(task: str) -> str:
    from lm_eval.utils import sanitize_task_name

    return str(sanitize_task_name(task))
