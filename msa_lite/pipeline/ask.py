"""Ask the models of a run a question, side by side: target, unlearned model and, where there is one, the ideal.

Nothing is written. Models of one question are loaded one after the other. For several questions all of them stay in
memory if they fit; if not, each is loaded anew for each question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.data import Prompter
from msa_lite.errors import MismatchError, MsaError, OutputError, UsageError
from msa_lite.evals.benchmark import benchmark_class
from msa_lite.evals.generate import Decoding, generate
from msa_lite.evals.models import Runner, checkpoint_folder, load_model, load_tokenizer
from msa_lite.evals.qa import Qa
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.finished.seal import MANIFEST, load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer, has_tokenizer
from msa_lite.io.weights.quantised import dequantised
from msa_lite.pipeline.prepare.models import WRITTEN_OUT
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.pipeline.run.folder import RunFolder, open_run
from msa_lite.recipe import Recipe
from msa_lite.report.provenance import PURGED_FILE, RECIPE_FILE

_ROOM = 0.8  # the share of free memory that weights may take; the rest is for the computation
_UNLEARNED = "unlearned"


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
    continues: bool
    """True for a run over texts alone: what the user writes is continued, without a prompt around it."""
    stays: bool
    """True to keep models in memory between questions."""
    _loaded: dict[str, Runner] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """Return the names of the models that answer."""
        return list(self.sources)

    def answer(self, name: str, question: str, progress: Progress = silent) -> str:
        """Return the greedy answer of one model. Raise UsageError for a question that is empty or too long.

        A model that cannot be loaded raises FormatError, MismatchError or StageError.
        """
        question = question.encode("utf-8", "replace").decode()  # bytes that are no UTF-8 come as surrogates
        if not question.strip():
            raise UsageError("the question is empty")
        prompter = self.prompter
        ids = list(prompter.tokenizer(question)["input_ids"]) if self.continues else prompter.prompt(question)
        runner = self._runner(name, progress)
        try:
            if runner.window is not None and len(ids) >= runner.window:
                raise UsageError(
                    f"the question has {len(ids)} tokens with its prompt, and the {name} model has room for "
                    f"{runner.window}; ask a shorter one"
                )
            decoding = Decoding(self.run.recipe.max_new_tokens)
            batches = generate(runner, prompter.tokenizer, [ids], decoding, end=prompter.end)
            return next(texts for batch in batches for _, texts in batch)[0]
        finally:
            if not self.stays:
                self._loaded.pop(name).close()

    def answers(self, question: str, progress: Progress = silent) -> Answers:
        """Return the answers of all models. Raise as `answer`."""
        return Answers(question, {name: self.answer(name, question, progress) for name in self.sources}, self.missing)

    def _runner(self, name: str, progress: Progress) -> Runner:
        """Return a model, loaded now unless it is in memory."""
        if name not in self._loaded:
            progress(f"loading {name}", 0, 1)
            self._loaded[name] = Runner(load_model(self.sources[name].folder))
            progress(f"loading {name}", 1, 1)
        return self._loaded[name]


def ask(folder: str | Path, question: str, progress: Progress = silent) -> Answers:
    """Return the greedy answers of a run's target, unlearned model and ideal to a question, in the run's prompt.

    Raise UsageError for a folder that is no run and for a question that is empty or too long, OutputError for a run
    without an unlearned model. A target or ideal that is not there is left out, with the reason.
    """
    return open_panel(folder).answers(question, progress)


def open_panel(folder: str | Path, several: bool = False) -> Panel:
    """Find the models of a run, and the prompt in which it asks. Raise as `ask`.

    several: for more than one question.
    """
    require("train")
    run = open_run(folder)
    if load_manifest(run.result) is None:
        if (run.result / MANIFEST).exists():
            raise MismatchError(f"{run.result}: its {MANIFEST} is damaged; see `msa-lite verify {run.folder}`")
        raise OutputError(
            f"{run.folder}: there is no unlearned model to ask yet; finish the run first (the command is in the first "
            f"line of {run.folder / RECIPE_FILE})"
        )
    unlearned = fetch(str(run.result), by_content=False)
    purged = " (the run was purged)" if (run.folder / PURGED_FILE).exists() else ""
    sources: dict[str, Source] = {}
    missing: dict[str, str] = {}
    for name, place in _places(run).items():
        try:
            sources[name] = unlearned if name == _UNLEARNED else fetch(place, by_content=False)
        except MsaError as error:
            missing[name] = f"{error}{purged}"
    stays = several and _fit_together(sources)
    if several and not stays:
        notices.info("the models do not fit into memory together: each one is loaded anew for each question")
    prompter = find_prompter(run.recipe, _tokenizer(run, unlearned))
    return Panel(run, sources, missing, prompter, not _asks_questions(run.recipe), stays)


def _places(run: RunFolder) -> dict[str, str]:
    """Return where the run's models are, by name."""
    whole = run.home / WRITTEN_OUT[0]  # an adapter merged into its base, or dequantised
    places = {"target": str(whole) if load_manifest(whole) else run.recipe.target, _UNLEARNED: str(run.result)}
    evaluate = run.recipe.evaluate
    return places | ({"ideal": evaluate.ideal} if evaluate and evaluate.ideal else {})


def _tokenizer(run: RunFolder, unlearned: Source) -> Any:
    """Return the tokenizer of the run, which the merge gives to the unlearned model, if not always to an adapter."""
    if not has_tokenizer(unlearned.folder) and run.recipe.tokenizer is not None:
        return load_tokenizer(fetch_tokenizer(run.recipe.tokenizer))
    return load_tokenizer(unlearned)


def _asks_questions(recipe: Recipe) -> bool:
    """Check whether any rows of a run, or its benchmark's, are questions in the recipe's prompt."""
    kind = benchmark_class(recipe.evaluate.benchmark) if recipe.evaluate else Qa
    return any(data.format == "qa" for data in recipe.data_sets.values()) or (kind is not Qa and kind.prompted)


def _fit_together(sources: Mapping[str, Source]) -> bool:
    """Check whether the weights of all models fit into free memory: stored as they are on a GPU, in fp32 on a CPU."""
    import torch
    from accelerate.utils import get_max_memory

    on_gpu = torch.cuda.is_available()
    free = get_max_memory()[0 if on_gpu else "cpu"]
    needed = 0
    for source in sources.values():
        checkpoint = load_checkpoint(checkpoint_folder(source.folder))
        entries = (checkpoint if on_gpu else dequantised(checkpoint)).tensors.values()
        needed += sum(entry.nbytes if on_gpu else 4 * math.prod(entry.shape) for entry in entries)
    return needed <= _ROOM * free
