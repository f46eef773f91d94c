"""What a run needs, found, loaded and checked before the first write: models by their headers, data by its rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import (
    DataSource,
    Example,
    Prompter,
    Row,
    check_vocabulary,
    encode,
    load_rows,
    open_tokenizer,
    pin_source,
    sample_rows,
    shorten,
)
from msa_lite.errors import Faults, UsageError, join_faults, nearest
from msa_lite.evals.benchmark import Benchmark, benchmark_class
from msa_lite.evals.dataset import pinned_data
from msa_lite.evals.judge import JudgeSettings, open_judge
from msa_lite.evals.models import check_source
from msa_lite.evals.qa import Qa
from msa_lite.io.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.disk import check_space
from msa_lite.io.hub import Source
from msa_lite.io.loading import pattern_fault
from msa_lite.io.progress import Progress, silent
from msa_lite.io.vocabulary import token_tensors, vocabulary_size
from msa_lite.pipeline.prepare_models import check_apart, check_readings, open_models
from msa_lite.pipeline.prepare_prompt import resolve_prompt
from msa_lite.pipeline.prepare_questions import SETS, Questions, WhenToChoose, load_questions
from msa_lite.recipe import Data, Recipe
from msa_lite.train import check_mode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlan:
    """What of a recipe is to be done.

    method: "msa", or the name of a baseline. folder: of the run. start: the model that is tuned. choice: whether there
    is something to choose on validation rows; "if possible": where there are questions to choose by. vectors: names of
    what is fitted; in full mode each leaves so many fp32 `checkpoints`. sample: whether the retain set is sampled as
    the recipe says.
    """

    method: str
    folder: Path
    start: Literal["prior", "target"]
    choice: WhenToChoose
    vectors: Sequence[str]
    checkpoints: int = 1
    sample: bool = True


@dataclass(frozen=True)
class Run:
    """A recipe with its inputs. sources: models by name; "prior" is the one that is tuned. rows: what vectors learn,
    examples: the same as ids, both by vector name ("forget", "retain"). alternatives: the answers given for dpo.
    """

    recipe: Recipe
    plan: RunPlan
    sources: Mapping[str, Source]
    data: Mapping[str, DataSource]
    prompter: Prompter
    rows: Mapping[str, list[Row]]
    examples: Mapping[str, list[Example]]
    questions: Questions
    alternatives: list[str]
    prompt_search: dict[str, Any] | None = None
    """The outcome of `prompt: auto` in detail; the recipe has the prompt itself."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.plan.folder

    @property
    def renders(self) -> bool:
        """Check whether there are questions to put into a prompt."""
        published = self.test is not None and self.test.prompted and not isinstance(self.test, Qa)
        return published or any(source.format == "qa" for source in self.data.values())

    @property
    def validation(self) -> Benchmark | None:
        """What a choice is made by; None where there is none to make."""
        return self.questions.validation

    @property
    def test(self) -> Benchmark | None:
        """What the models are scored on; None where nothing is."""
        return self.questions.test

    @property
    def judge(self) -> JudgeSettings:
        """How the test questions are judged."""
        return _judge_settings(self.recipe)

    @property
    def vector_names(self) -> list[str]:
        """The vectors that the recipe's points use; where a strength is searched, its vector."""
        strengths = {"forget": self.recipe.alphas, "retain": self.recipe.betas}
        return [name for name, values in strengths.items() if values is None or any(values)]

    def vector_folder(self, name: str) -> Path:
        """Where the forget or retain vector goes."""
        return self.folder / "vectors" / name


def prepare(recipe: Recipe, plan: RunPlan, progress: Progress = silent) -> Run:
    """Find and check every input of what is planned; nothing is written but a target that comes as an adapter, merged.

    Raises MismatchError with the tensors on which target and prior differ, and whatever the parts raise.
    """
    recipe = _pin_benchmark(recipe)
    check_mode(recipe.vector.mode)
    if recipe.merge.form == "adapter" and recipe.vector.mode == "full":
        raise UsageError("merge.as: what vector.mode full makes is no adapter; choose model, or vector.mode lora")
    open_judge(_judge_settings(recipe))  # it may lack a key
    sources = open_models(recipe, plan.start, progress)
    if plan.start == "prior":
        check_apart(sources["target"], sources["prior"])
    target = load_checkpoint(sources["target"].folder)
    _check_lora_targets(recipe, target)
    _check_same_rows(recipe, target, sources["prior"])
    check_space(plan.folder, _bytes_needed(target, recipe, plan))

    tokenizer = open_tokenizer(sources["target"].tokenizer_folder, recipe.target)
    check_vocabulary(tokenizer, vocabulary_size(target), recipe.target)
    data, loaded = load_data(recipe, plan.method)
    folders = (plan.folder, Path(recipe.output).expanduser())
    recipe, prompter, search = resolve_prompt(recipe, sources["target"], tokenizer, loaded, folders)
    loaded = {name: shorten(found, prompter, recipe.vector.max_length) for name, found in loaded.items()}
    rows = {name: found for name, found in loaded.items() if "." not in name}
    if recipe.retain and recipe.retain.data.sample == "match_forget" and plan.sample:
        rows["retain"] = sample_rows(rows["retain"], len(rows["forget"]), recipe.seed)
    check_readings(sources, tokenizer, rows["forget"])
    questions = load_questions(recipe, data, plan.choice, prompter, loaded)
    examples = {name: encode(rows[name], data[name], prompter, recipe.vector.max_length) for name in rows}
    _check_ids(sources, examples, questions)
    return Run(
        recipe=recipe,
        plan=plan,
        sources=sources,
        data=data,
        prompter=prompter,
        rows=rows,
        examples=examples,
        questions=questions,
        alternatives=_alternatives(loaded.get("baseline.alternatives", ())),
        prompt_search=search,
    )


def _check_ids(sources: Mapping[str, Source], examples: Mapping[str, list[Example]], questions: Questions) -> None:
    """Raise MismatchError where a model would be given a token that its embedding has no row for."""
    ids = set[int]().union(*(example.ids for rows in examples.values() for example in rows))
    for benchmark in (questions.validation, questions.test):
        ids |= benchmark.ids() if benchmark else set()
    for source in sources.values():
        check_source(source, ids)


def _pin_benchmark(recipe: Recipe) -> Recipe:
    """The recipe with its benchmark's data named and pinned to a commit where it comes from the Hub."""
    asked = recipe.evaluate
    home = asked and (asked.data or benchmark_class(asked.benchmark).home)
    if not asked or not home:
        return recipe
    return recipe.model_copy(update={"evaluate": asked.model_copy(update={"data": pinned_data(home)})})


def _judge_settings(recipe: Recipe) -> JudgeSettings:
    return JudgeSettings(**recipe.evaluate.judge.model_dump()) if recipe.evaluate else JudgeSettings()


def load_data(recipe: Recipe, method: str = "msa") -> tuple[dict[str, DataSource], dict[str, list[Row]]]:
    """Return every data set of the recipe, pinned, and its rows, by its place in the recipe ("evaluate.holdout").

    Raises all that is wrong with any of them in one error.
    """
    given: dict[str, Data | None] = {
        "forget": recipe.forget.data,
        "retain": recipe.retain.data if recipe.retain else None,
        "probe.against": recipe.probe.against,
    }
    if method == "dpo":
        given["baseline.alternatives"] = recipe.baseline.alternatives
    if recipe.evaluate:
        given |= {f"evaluate.{name}": getattr(recipe.evaluate, name) for name in SETS}
    faults, sources, rows = Faults(), {}, {}
    for name, data in given.items():
        if data is None:
            continue
        with faults.gathered(f"{name if '.' in name else f'{name}.data'}: "):
            if name == "baseline.alternatives" and data.format != "text":
                raise UsageError("format: 'text' is wanted, one answer a line")
            sources[name] = pin_source(DataSource(**data.flat(recipe.columns)))
            rows[name] = load_rows(sources[name])
    faults.check()
    return sources, rows


def _alternatives(rows: Sequence[Row]) -> list[str]:
    """The lines of a set of texts."""
    return [line.strip() for row in rows for line in row.text.splitlines() if line.strip()]


def _check_lora_targets(recipe: Recipe, target: Checkpoint) -> None:
    """Raise UsageError for modules that the target has not, or whose adapters the merge could not fold in."""
    wanted = recipe.vector.lora.targets
    if recipe.vector.mode == "full" or (isinstance(wanted, str) and wanted.lower() == "all-linear"):
        return
    modules = [name.removesuffix(".weight") for name, entry in target.tensors.items() if len(entry.shape) == 2]
    if isinstance(wanted, str):  # PEFT takes it for a regular expression over whole names
        if fault := pattern_fault([wanted], modules):
            raise UsageError(f"vector.lora.targets: {fault}")
        if not any(re.fullmatch(wanted, module) for module in modules):
            raise UsageError(f"vector.lora.targets: {wanted}: the target has no module of which this is the whole name")
        return
    faults = []
    for name in wanted:
        matched = [module for module in modules if module == name or module.endswith(f".{name}")]
        embeds = any("embed" in module or module.endswith("wte") for module in matched)
        if target.config.get("tie_word_embeddings") and (name == "lm_head" or embeds):
            faults.append(f"{name}: the target ties embedding and head, and an adapter would change one of the two")
        elif not matched:
            leaves = {module.rpartition(".")[2] for module in modules}
            faults.append(f"{name}: the target has no such module{nearest(name, leaves)}")
    if faults:
        raise UsageError(join_faults("vector.lora.targets:", faults))


def _check_same_rows(recipe: Recipe, target: Checkpoint, prior: Source) -> None:
    """Raise UsageError where adapters on the embedding would have to be loaded beside a target of other tokens."""
    theirs, own = token_tensors(target), token_tensors(load_checkpoint(prior.folder))
    names = [name for name in theirs if name in own and theirs[name].shape != own[name].shape]
    wanted = recipe.vector.lora.targets
    if recipe.vector.mode == "full" or isinstance(wanted, str) or not names:
        return
    tuned = [part for part in wanted if any(f".{name}".endswith(f".{part}.weight") for name in names)]
    keys = {"merge.as: adapter": recipe.merge.form == "adapter", "select.four_bit": recipe.select.four_bit}
    for key in (key for key, is_set in keys.items() if is_set and tuned):
        raise UsageError(
            f"vector.lora.targets: {', '.join(tuned)}: target and prior differ in the number of tokens, so such an "
            f"adapter cannot be put on the target ({key}); leave them out, or merge to a model"
        )


def _bytes_needed(target: Checkpoint, recipe: Recipe, plan: RunPlan) -> int:
    """Disk space that a run still needs: the merged model; in full mode, the fp32 checkpoints of each vector, and three
    saves with AdamW's state and a new best epoch beside the old one while one is fitted. Stages that are there already
    need none.
    """
    folder = plan.folder
    count = sum(entry.nbytes // {"F64": 8, "F32": 4}.get(entry.dtype, 2) for entry in target.tensors.values())
    size = 0
    if recipe.merge.form == "model" and not (folder / "model").exists():
        size += {"same": target.nbytes, "float32": 4 * count}.get(recipe.merge.dtype, 2 * count)
    if recipe.vector.mode == "full":
        missing = [name for name in plan.vectors if not (folder / "vectors" / name).exists()]
        size += (4 * plan.checkpoints * len(missing) + (4 + 3 * 12 if missing else 0)) * count
    return size
