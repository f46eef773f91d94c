"""Ask the models of a run a question, side by side: target, unlearned model and, where there is one, the ideal.

Nothing is written. Models of one question are loaded one after the other. For several questions all of them stay in
memory if they fit; if not, each is loaded anew for each question. At other strengths than the run's, the unlearned
model is the target in memory with the weights that the merge would write; it takes the place of the stored one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.catalogue import OWN
from msa_lite.data import Prompter, Row, decode_answer, encode_start
from msa_lite.errors import MismatchError, MsaError, UsageError
from msa_lite.evals.benchmarks.benchmark import find_benchmark
from msa_lite.evals.benchmarks.qa import row_of
from msa_lite.evals.engine.generate import Decoding, end_tokens, generate
from msa_lite.evals.engine.models import Runner, checkpoint_folder, load_model, load_tokenizer
from msa_lite.evals.scores.records import read_records
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.finished.seal import MANIFEST, in_use, load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch, has_tokenizer
from msa_lite.io.weights.quantised import dequantised
from msa_lite.pipeline.prepare.earlier import EarlierRun, is_merged_at, open_earlier, strengths_of
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, find_tokenizer
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.pipeline.run.folder import RunFolder, open_run
from msa_lite.pipeline.run.merge import LoadedTarget, Terms, merge_precision, point_terms
from msa_lite.recipe import Recipe
from msa_lite.report.run.provenance import PURGED_FILE, RECIPE_FILE, read_run, recorded_method
from msa_lite.report.tables.reports import reading
from msa_lite.strengths import Strengths

Watch = Callable[[str], None]
"""Called with an answer as far as it has come; an exception that it raises stops the answer."""
_ROOM = 0.8  # the share of free memory that weights may take; the rest is for the computation
_UNLEARNED = "unlearned"
_MERGED = "unlearned, merged in memory"


@dataclass(frozen=True)
class MergedPoints:
    """A run of MSA whose strengths can be changed."""

    run: RunFolder
    chosen: Strengths
    """The strengths of the model that the run wrote."""
    filters: tuple[float, ...]
    """The λ whose forget vectors are there; 0 for the vector as it was fitted."""
    has_retain: bool
    """True if there is a retain vector to add, so that β may be above 0."""
    _earlier: Sequence[EarlierRun]
    _loaded: LoadedTarget

    def check(self, strengths: Strengths) -> None:
        """Raise UsageError for strengths that the run has no vectors for."""
        if strengths.filter not in self.filters:
            there = ", ".join(f"{value:g}" for value in self.filters)
            raise UsageError(f"λ = {strengths.filter:g}: the run has no such vector, only λ = {there}")
        if strengths.beta and not self.has_retain:
            raise UsageError("beta: the run adds no retain vector, so beta can only be 0")

    def model(self, strengths: Strengths) -> Any:
        """Return the model at these strengths; it is good until the next call. Raise as `check`.

        Raise MismatchError where the loaded target cannot be rewritten.
        """
        self.check(strengths)
        return self._loaded.merged(point_terms(self.run.folder, self.run.recipe, self._earlier, strengths))

    def close(self) -> None:
        """Free the memory of the target; the next call of `model` loads it again."""
        self._loaded.close()


@dataclass(frozen=True)
class Question:
    """A question, perhaps one that goes on with a conversation."""

    text: str
    system: str = ""
    """The system message, in the place of the run's; empty for that one."""
    earlier: tuple[tuple[str, str], ...] = ()
    """The earlier turns: what was asked, and what the model answered."""
    tokens: int | None = None
    """The most tokens of the answer; None for as many as the run's scores allow."""
    strengths: Strengths | None = None
    """Those of the unlearned model, in the place of the run's own."""


@dataclass(frozen=True)
class Answers:
    """The answers of a run's models to one question."""

    json_keys: ClassVar = {"question": "question", "answers": "answers", "missing?": "missing"}

    question: str
    """The question, as it was asked."""
    answers: Mapping[str, str]
    """The answer of each model: "target", "unlearned", "ideal"."""
    missing: Mapping[str, str]
    """The models that could not be asked, each with the reason."""


@dataclass(frozen=True)
class Panel:
    """The models of a run, ready to be asked."""

    run: RunFolder
    sources: Mapping[str, Source]
    """The models by name, in the order of their answers."""
    missing: Mapping[str, str]
    """The models that are not there, each with the reason."""
    prompter: Prompter
    """Renders a question as the run did."""
    scored: Mapping[str, Row]
    """The scored rows with a system message, earlier turns or tools, by question: a question of theirs is asked so."""
    continues: bool
    """True for a run over texts alone: what the user writes is continued, without a prompt around it."""
    stays: bool
    """True to keep models in memory between questions."""
    points: MergedPoints | None
    """The strengths of the unlearned model, where they can be changed."""
    fixed: str
    """The reason why they cannot; empty where they can."""
    _loaded: dict[str, Runner] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """Return the names of the models that answer."""
        return list(self.sources)

    def answer(self, name: str, question: Question, progress: Progress = silent, watch: Watch | None = None) -> str:
        """Return the greedy answer of one model.

        watch: is told of each token. Raise UsageError for a question that is empty or too long, and for a system
        message or earlier turns that the prompt has no place for. A model that cannot be loaded raises FormatError,
        MismatchError or StageError.
        """
        ids, prompter = self._prompt(question), self.prompter
        try:  # `progress` may raise once a model is loaded
            runner = self._runner(name, progress, question.strengths if name == _UNLEARNED else None)
            if runner.window is not None and len(ids) >= runner.window:
                raise UsageError(
                    f"the question has {len(ids)} tokens with its prompt, and the {name} model has room for "
                    f"{runner.window}; ask a shorter one"
                )
            decoding = Decoding(question.tokens or self.run.recipe.max_new_tokens)
            told = watch and self._as_text(runner, watch)
            batches = generate(runner, prompter.tokenizer, [ids], decoding, end=prompter.end, watch=told)
            return prompter.reply(next(texts for batch in batches for _, texts in batch)[0])
        finally:
            if not self.stays:
                self.close()

    def _prompt(self, question: Question) -> list[int]:
        """Return the ids of a question in the run's prompt. Raise as `answer`."""
        text = question.text.encode("utf-8", "replace").decode()  # bytes that are no UTF-8 come as surrogates
        if not text.strip():
            raise UsageError("the question is empty")
        if self.continues and (question.earlier or question.system):
            raise UsageError("this run is over texts, without system message and earlier turns")
        if self.continues:
            return encode_start(self.prompter.tokenizer, text)
        if question.system and not self.prompter.takes_system:
            raise UsageError("the target's chat template takes no system message")
        row = self.scored.get((question.earlier[0][0] if question.earlier else text).strip()) or Row(0)
        tools = replace(row.tools, steps="", call="") if question.earlier else row.tools  # those of the first question
        earlier, system = (*row.earlier, *question.earlier), question.system or row.system
        return self.prompter.prompt(replace(row, question=text, earlier=earlier, system=system, tools=tools))

    def answers(self, question: str, progress: Progress = silent) -> Answers:
        """Return the answers of all models. Raise as `answer`."""
        asked = Question(question)
        return Answers(question, {name: self.answer(name, asked, progress) for name in self.sources}, self.missing)

    def close(self) -> None:
        """Free the memory of all models; the next question loads them again."""
        while self._loaded:
            self._loaded.popitem()[1].close()
        if self.points is not None:
            self.points.close()

    def _as_text(self, runner: Runner, watch: Watch) -> Callable[[int], None]:
        """Return a function of tokens that tells `watch` the text so far; half a sign waits for its other half."""
        tokenizer, tokens = self.prompter.tokenizer, list[int]()
        ends = end_tokens(runner, tokenizer, self.prompter.end)

        def tell(token: int) -> None:
            if token not in ends:
                tokens.append(token)
            watch(self.prompter.reply(decode_answer(tokenizer, tokens).strip()).rstrip("\ufffd"))

        return tell

    def _runner(self, name: str, progress: Progress, strengths: Strengths | None = None) -> Runner:
        """Return a model, loaded now unless it is in memory. strengths: for the merge in memory."""
        if strengths is not None:
            if self.points is None:
                raise UsageError(f"the strengths cannot be changed: {self.fixed}")
            progress(f"merging {name}", 0, 1)
            model = self.points.model(strengths)
            progress(f"merging {name}", 1, 1)
            return self._loaded.setdefault(_MERGED, Runner(model))
        if name not in self._loaded:
            progress(f"loading {name}", 0, 1)
            self._loaded[name] = Runner(load_model(self.sources[name].folder))
            progress(f"loading {name}", 1, 1)
        return self._loaded[name]


def ask(folder: str | Path, question: str, progress: Progress = silent) -> Answers:
    """Return the greedy answers of a run's target, unlearned model and ideal to a question, in the run's prompt.

    Leave out a missing target or ideal, with the reason. Raise UsageError for a folder that is no run and for a
    question that is empty or too long, OutputError for a run without an unlearned model or
    under a purge.
    """
    with in_use(Path(folder)):
        return open_panel(folder).answers(question, progress)


def open_panel(folder: str | Path, several: bool = False) -> Panel:
    """Find the models of a run, and the prompt in which it asks. Raise as `ask`.

    several: for more than one question.
    """
    require("train")
    run = open_run(folder)
    if load_manifest(run.result) is None and (run.result / MANIFEST).exists():
        raise MismatchError(f"{run.result}: its {MANIFEST} is damaged; see `msa-lite verify {run.folder}`")
    run.check_result("ask")
    unlearned = fetch(str(run.result), by_content=False)
    purged = " (the run was purged)" if (run.folder / PURGED_FILE).exists() else ""
    sources: dict[str, Source] = {}
    missing: dict[str, str] = {}
    for name, place in _places(run).items():
        try:
            sources[name] = unlearned if name == _UNLEARNED else fetch(place, by_content=False)
        except MsaError as error:
            missing[name] = f"{error}{purged}"
    sizes, free = _leave_out_large(sources, missing)
    for name, reason in missing.items():
        notices.info("no %s: %s", name, reason)
    points, fixed = None, ""
    if several:
        try:
            points = _open_merged_points(run, sources.get("target"))
        except MsaError as error:
            fixed = str(error)
    stays = several and sum(sizes.values()) + (sizes["target"] if points else 0) <= _ROOM * free
    if several and not stays:
        notices.info("the models do not fit into memory together: each one is loaded anew for each question")
    # The merge gives the tokenizer to the unlearned model, if not always to an adapter.
    reader = unlearned if has_tokenizer(unlearned.folder) else find_tokenizer(run.recipe)
    prompter = find_prompter(run.recipe, load_tokenizer(reader))
    continues = not _asks_questions(run.recipe)
    return Panel(run, sources, missing, prompter, _scored_rows(run), continues, stays, points, fixed)


def _scored_rows(run: RunFolder) -> dict[str, Row]:
    """Return the rows of a run's records that are more than a question, by question; the first of each."""
    rows: dict[str, Row] = {}
    for path in sorted(run.folder.glob(f"evaluation/{_UNLEARNED}/*.jsonl")):
        with reading(path):
            for record in read_records(path):
                if record.keys() & {"earlier", "system", "tools"}:
                    rows.setdefault(record["question"].strip(), row_of(0, record))
    return rows


def _places(run: RunFolder) -> dict[str, str]:
    """Return where the run's models are, by name."""
    whole = run.home / WRITTEN_OUT[0]  # an adapter merged into its base, or dequantised
    places = {"target": str(whole) if load_manifest(whole) else run.recipe.target, _UNLEARNED: str(run.result)}
    evaluate = run.recipe.evaluate
    return places | ({"ideal": evaluate.ideal} if evaluate and evaluate.ideal else {})


def _asks_questions(recipe: Recipe) -> bool:
    """Check whether any rows of a run, or its benchmark's, are questions in the recipe's prompt."""
    name = recipe.evaluate.benchmark if recipe.evaluate else OWN
    return any(data.format == "qa" for data in recipe.data_sets.values()) or (
        name != OWN and find_benchmark(name).prompted
    )


def _open_merged_points(run: RunFolder, target: Source | None) -> MergedPoints:
    """Open the vectors of a run. Raise UsageError, or MismatchError for damaged ones, with why there are none."""
    recipe, folder = run.recipe, run.folder
    if target is None:
        raise UsageError("the target is not there")
    if method := recorded_method(read_run(folder))[0]:
        raise UsageError(f"this is a run of {method}, which has no α and β")
    chosen = strengths_of(recipe, folder)
    if chosen is None:
        raise UsageError(f"the run has not chosen its strengths yet; `msa-lite {folder / RECIPE_FILE}` goes on")
    there = [0.0, *(strength for strength in recipe.filters if strength)]
    filters = tuple(s for s in there if _is_there(Strengths(0.0, filter=s).vector_folder(folder, "forget")))
    if not filters:
        raise UsageError(
            f"its vectors {'were purged' if (folder / PURGED_FILE).exists() else 'are not there any more'}"
        )
    inputs = (load_manifest(run.result) or {"inputs": {}})["inputs"]
    if not is_merged_at(inputs, recipe.weights(chosen), chosen.vector_folder(folder, "forget")):
        raise UsageError(
            f"the run stopped after its strengths changed to {chosen}, and its model has former ones; "
            f"`msa-lite {folder / RECIPE_FILE}` goes on"
        )
    adds_retain = "retain" in recipe.vector_names and not recipe.starts_at_retain
    has_retain = adds_retain and _is_there(folder / "vectors" / "retain")
    if recipe.prior is None:
        raise UsageError("the run has no prior")
    prior = fetch(recipe.prior, by_content=False)
    loaded = LoadedTarget(target, prior, merge_precision(recipe), _refuse)
    return MergedPoints(run, chosen, filters, has_retain, open_earlier(recipe), loaded)


def _is_there(vector: Path) -> bool:
    return load_manifest(vector) is not None


def _refuse(terms: Terms) -> Any:
    """Refuse a target that is stored in another form than it is loaded: a run merges each point to the disk then."""
    raise MismatchError("the loaded target cannot be merged in memory, so its strengths cannot be changed here")


def _leave_out_large(sources: dict[str, Source], missing: dict[str, str]) -> tuple[dict[str, int], int]:
    """Move models that alone are too large for a CPU's memory to the missing ones; on a GPU, layers stream.

    Return the bytes of the others by name, and those that are free. Raise MismatchError if the unlearned model is too
    large.
    """
    import torch
    from accelerate.utils import get_max_memory

    on_gpu = torch.cuda.is_available()
    free = get_max_memory()[0 if on_gpu else "cpu"]
    sizes = {name: _loaded_bytes(source, on_gpu) for name, source in sources.items()}
    for name in [name for name, size in sizes.items() if size > free and not on_gpu]:
        reason = f"needs {sizes.pop(name) / 1e9:.1f} GB of memory in fp32, and {free / 1e9:.1f} GB are free; use a GPU"
        if name == _UNLEARNED:
            raise MismatchError(f"{sources[name].name}: the model {reason}, or a machine with more memory")
        del sources[name]
        missing[name] = reason
    return sizes, free


def _loaded_bytes(source: Source, on_gpu: bool) -> int:
    """Return the bytes of a model's weights in memory: stored as they are on a GPU, in fp32 on a CPU."""
    checkpoint = load_checkpoint(checkpoint_folder(source.folder))
    entries = (checkpoint if on_gpu else dequantised(checkpoint)).tensors.values()
    return sum(entry.nbytes if on_gpu else 4 * math.prod(entry.shape) for entry in entries)
