"""The `lm-eval` benchmark: general ability, by tasks of EleutherAI's harness or the user's own."""

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

from msa_lite.errors import DataError, StageError, UsageError, allowed_by, join_faults, nearest
from msa_lite.evals.models import check_source, load_model, load_tokenizer, model_identity
from msa_lite.evals.records import write_records
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.reading import read_text
from msa_lite.io.files.writing import digest, hash_file, write_json
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import list_files
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.models.devices import free_memory
from msa_lite.io.weights.hub import Source, explain
from msa_lite.report import Metric, Report, load_report, write_report

_PLAIN = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value", "binary", "set")


def check_no_code(folder: Path) -> None:
    """Raise UsageError, with every place, if task files of a folder name Python code, or files outside of it."""
    todo, seen, faults = sorted(folder.rglob("*.yaml")), set[Path](), list[str]()
    while todo:
        path = todo.pop(0)
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        if not path.resolve().is_relative_to(folder.resolve()):
            faults.append(f"{name}: lies outside of the folder")
            continue
        root = _compose(path)
        faults += [f"{name}: {tag}" for tag in dict.fromkeys(_code(root))]
        todo += [path.parent / included for included in _includes(root)]
    if faults:
        headline = f"{folder}: these tasks would run code; read it, and then allow it with --allow-code:"
        raise allowed_by(UsageError(join_faults(headline, faults)), "--allow-code")


@contextmanager
def sandboxed() -> Iterator[None]:
    """Make the harness render templates in Jinja's sandbox, which keeps them away from Python."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    own = utils.env
    utils.env = SandboxedEnvironment(loader=own.loader, undefined=own.undefined, keep_trailing_newline=True)
    utils.env.filters.update(own.filters)
    try:
        yield
    finally:
        utils.env = own


def _compose(path: Path) -> Any:
    import yaml

    try:
        return yaml.compose(read_text(path, kind=UsageError), yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())})") from error


def _code(root: Any) -> Iterator[str]:
    """Yield the tags of values that are not plain, with the value of a scalar."""
    import yaml

    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:  # an alias is the same node
            continue
        seen.add(id(node))
        if node.tag.removeprefix(_PLAIN) not in _KINDS:
            yield f"{node.tag} {node.value}" if isinstance(node, yaml.ScalarNode) else str(node.tag)
        if isinstance(node, yaml.MappingNode):
            todo += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _includes(root: Any) -> Iterator[str]:
    import yaml

    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "include":
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from (str(part.value) for part in parts if isinstance(part, yaml.ScalarNode))


RESULTS_FILE = "results.json"
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_CPU_BATCH = 4  # rows; the harness keeps the logits of every position of a batch in memory


def check_tasks(tasks: Sequence[str], task_folder: Path | None = None, allow_code: bool = False) -> None:
    """Raise UsageError unless each name is a task, group or tag of the harness or of the YAML files in a folder.

    Without `allow_code`, also refuse tasks of the folder that would run Python. Load no data.
    """
    require("lm-eval")
    if not tasks:
        raise UsageError("no tasks: name some, as in hellaswag,arc_easy")
    if task_folder is not None and not task_folder.is_dir():
        raise UsageError(f"{task_folder}: no such folder of tasks")
    if task_folder is not None and not allow_code:
        check_no_code(task_folder)
    index = _index_tasks(tasks, task_folder).task_index
    faults = [f"{name}{nearest(name, index)}" for name in tasks if name not in index]
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
    """Score a model by tasks of the harness.

    Write `samples_TASK.jsonl`, results.json (the harness's own results), report.json and a manifest into `out`.

    tasks: names of tasks, groups or tags. limit: the first rows of each task to use. task_folder: YAML files of the
    user's own tasks, which replace the harness's of the same name. few_shot: examples in each prompt, unless a task
    insists on none; None for the number that each task names. seed: for choosing examples and for tasks that sample;
    the harness's own command line chooses examples with 1234. allow_code: run the Python that tasks of the folder name.

    Metrics are named TASK/METRIC, or TASK/METRIC,FILTER for answers that a filter extracted from the text; groups come
    before their members. A folder made from the same inputs is read instead; changes of data outside `task_folder` are
    not noticed. Raise UsageError as `check_tasks` does, DataError when a task's data cannot be loaded and StageError
    when the harness itself fails.
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
        _hushed(progress) as audible,
        nullcontext() if allow_code or task_folder is None else sandboxed(),
    ):
        manager = _index_tasks(tasks, task_folder)
        loaded = _load_tasks(manager, tasks, audible)
        results = _plain(_run(source, manager, loaded, settings, audible))
        report = Report(
            "lm-eval", ",".join(tasks), aggregate(results, tasks), settings | {"tasks": results["versions"]}
        )
        for name, samples in results.pop("samples").items():
            write_records(partial / f"samples_{_file_name(name)}.jsonl", samples)
        write_json(partial / RESULTS_FILE, results)
        write_report(report, partial)
    return report


def aggregate(results: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Metric]:
    """Make metrics from results of the harness with samples: first of `tasks`, then of their members, level by level.

    A group's direction is that of its tasks, or None if they differ.
    """
    members: Mapping[str, list[str]] = results["group_subtasks"]
    names = list(tasks)
    for name in names:
        names += members.get(name, [])
    metrics = {}
    for name in dict.fromkeys([*names, *results["results"]]):  # a tag's tasks are members of nothing
        scores = results["results"].get(name, {})
        for key, value in scores.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            label = f"{name}/{metric}" if filter_name == "none" else f"{name}/{key}"
            n = _count(results, name, metric, filter_name)
            error = scores.get(f"{metric}_stderr,{filter_name}")
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
    """Return the tasks of a group at any depth; for a task, itself."""
    members = results["group_subtasks"].get(name)
    return [name] if members is None else [leaf for member in members for leaf in _leaves(results, member)]


def _count(results: Mapping[str, Any], name: str, metric: str, filter_name: str) -> int:
    """Count the rows behind a metric with a filter: a task may leave some out."""
    rows = [row for leaf in _leaves(results, name) for row in results["samples"][leaf]]
    return sum(row["filter"] == filter_name and metric in row["metrics"] for row in rows)


def _direction(results: Mapping[str, Any], name: str, metric: str) -> bool | None:
    directions = {results["higher_is_better"][leaf].get(metric) for leaf in _leaves(results, name)}
    return directions.pop() if len(directions) == 1 else None


def _index_tasks(tasks: Sequence[str], task_folder: Path | None) -> Any:
    """Make the harness's TaskManager for the tasks of a folder, and for its own tasks if the folder lacks some.

    The harness takes some seconds to read its own thousands of files.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_folder, include_defaults=False)
    if not _suffices(manager.task_index, tasks):
        for name, entry in _shipped_tasks().items():
            manager.task_index.setdefault(name, entry)
    return manager


def _suffices(index: Mapping[str, Any], tasks: Sequence[str]) -> bool:
    """Check whether an index has all of the tasks, and the members of groups among them."""
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
    """Return a digest of the files in a folder of tasks, without Python's caches."""
    if task_folder is None:
        return None
    files = [path for path in list_files(task_folder) if "__pycache__" not in path.parts]
    return digest({str(path.relative_to(task_folder)): hash_file(path) for path in files})


def _load_tasks(manager: Any, tasks: Sequence[str], progress: Progress) -> list[Any]:
    """Load tasks and groups of the harness with their data. Raise DataError when that fails."""
    loaded: list[Any] = []
    for number, name in enumerate(tasks):
        progress("lm-eval: tasks", number, len(tasks))
        try:
            parts = manager.load(name)
        except Exception as error:  # of the Hub, of `datasets`, of a task's own Python
            raise DataError(f"{name}: lm_eval cannot load the task or its data ({explain(error)})") from error
        unsafe = [task for task, value in parts["tasks"].items() if getattr(value, "UNSAFE_CODE", False)]
        if unsafe:
            raise UsageError(f"{', '.join(unsafe)}: would run programs that the model writes; leave them out")
        loaded += [parts["groups"][name]] if name in parts["groups"] else list(parts["tasks"].values())
    progress("lm-eval: tasks", len(tasks), len(tasks))
    try:
        manager.load(loaded)
    except ValueError as error:
        raise UsageError(f"{','.join(tasks)}: {error}") from error
    return loaded


def _run(
    source: Source, manager: Any, loaded: list[Any], settings: Mapping[str, Any], progress: Progress
) -> Mapping[str, Any]:
    """Run `lm_eval.simple_evaluate` on a model. Raise StageError when it fails."""
    from lm_eval import simple_evaluate

    model = _wrap(source, progress)

    try:
        return simple_evaluate(
            model=model,
            tasks=loaded,
            task_manager=manager,
            num_fewshot=settings["few_shot"],
            limit=settings["limit"],
            **dict.fromkeys(_SEEDS, settings["seed"]),
        )
    except Exception as error:
        raise StageError(f"{source.name}: lm_eval failed ({explain(error)}); nothing was kept") from error
    finally:
        del model
        free_memory()


def _wrap(source: Source, progress: Progress) -> Any:
    """Wrap a model for the harness, with our progress in place of the harness's own bars."""
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
    """Stand in for the harness's cache of answers, to count each answer that the harness adds."""

    progress: Progress
    label: str
    total: int
    done: int = 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self.done += 1
        self.progress(self.label, self.done, self.total)


@contextmanager
def _hushed(progress: Progress) -> Iterator[Progress]:
    """Keep the harness from printing on stdout; yield a `progress` that still may."""
    stdout = sys.stdout

    def audible(label: str, done: int, total: int) -> None:
        with redirect_stdout(stdout):
            progress(label, done, total)

    with redirect_stdout(io.StringIO()):
        yield audible


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON types: numpy's numbers become Python's, and unknown types become text."""
    from lm_eval.utils import handle_non_serializable

    return json.loads(json.dumps(value, default=handle_non_serializable))


def _file_name(task: str) -> str:
    from lm_eval.utils import sanitize_task_name

    return str(sanitize_task_name(task))
