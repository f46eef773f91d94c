"""Load a benchmark by name, and score any model on one, without a recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.catalogue import BENCHMARKS, OWN, published
from msa_lite.data import (
    DataSource,
    Prompter,
    PromptSettings,
    Row,
    Template,
    load_rows,
    make_prompter,
    sample_rows,
    shorten,
)
from msa_lite.errors import Faults, MismatchError, UsageError, join_faults, nearest
from msa_lite.evals.benchmarks.aggregates import resolve_compat
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, find_benchmark, judged_rows
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.models import can_read, check_source, checkpoint_folder, load_tokenizer, smallest_window
from msa_lite.evals.engine.prompt_search import choose_prompt, prompt_forms, rank_prompts
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.base import check_prompts
from msa_lite.evals.judge.server import check_consent, find_server
from msa_lite.evals.scores.evaluation import NO_JUDGE, Ideal, evaluate_benchmark
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, silent
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import check_writable, output_path
from msa_lite.io.launch.crew import Ranks
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch, fetch_tokenizer
from msa_lite.io.weights.vocabulary import vocabulary_size
from msa_lite.report import Report, load_report
from msa_lite.report.tables.reports import REPORT_FILE
from msa_lite.settings import JudgeSettings

logger = logging.getLogger(__name__)

PROMPT_KINDS = ("default", "chat", "plain", "auto")
_TRAILING_BLANK = Template("Question: {question}\nAnswer: ", "{answer}")


def load_benchmark(name: str, prompter: Prompter, settings: BenchmarkSettings) -> Benchmark:
    """Load a published benchmark; see `Benchmark.load`.

    Switches of `compat` change the prompt here, for scores alone: vectors and baselines learn without them. Where
    `second_end` changes nothing (Llama 3), it is left out, so that scores from before there was one stay valid.
    """
    if "trailing_blank" in settings.compat:
        prompter = replace(prompter, template=_TRAILING_BLANK)
    if "second_end" in settings.compat:
        longer = replace(prompter, second_end=True)
        row = Row(0, "a", "b")
        if longer.full(row) == prompter.full(row):
            settings = replace(settings, compat=settings.compat - {"second_end"})
        else:
            prompter = longer
    load = find_benchmark(name).load
    assert load is not None, "a published benchmark has data"
    return load(prompter, settings)


@dataclass(frozen=True)
class OwnQuestions:
    """Your own questions or texts, to score a model on."""

    forget: DataSource | None = None
    """Rows about the forget set."""
    retain: DataSource | None = None
    """Rows about the retain set."""
    holdout: DataSource | None = None
    """Rows that no model was trained on."""
    max_new_tokens: int = 200
    """The most tokens of an answer."""
    benchmark: ClassVar[str] = OWN

    @property
    def sets(self) -> dict[str, DataSource]:
        """Return the rows by set."""
        named = {"forget": self.forget, "retain": self.retain, "holdout": self.holdout}
        return {name: source for name, source in named.items() if source is not None}


@dataclass(frozen=True)
class PublishedBenchmark:
    """A benchmark by its name, to score a model on."""

    benchmark: str
    """tofu, restor or muse, or one that you have added."""
    split: str | None = None
    """The part of its data; None for the default one."""
    data: str | None = None
    """A folder, or Hub id[@revision]; None for the published data."""
    compat: Iterable[str] = ()
    """Deviations of published code to repeat, such as open-unlearning."""


Asked = OwnQuestions | PublishedBenchmark
"""What a model is scored on."""


def evaluate(
    model: str,
    out: str | Path,
    questions: Asked,
    *,
    ideal: str | None = None,
    limit: int | None = None,
    prompt: PromptSettings | str = "default",
    judge: JudgeSettings = NO_JUDGE,
    tokenizer: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Report]:
    """Score a model. Return reports by name: "model" and, where there is one, "ideal".

    ideal: a model, which is then scored too, or the report.json (or its folder) of an earlier evaluation.
    limit: the most rows of each set, a seeded sample.
    prompt: the form of questions (`PromptSettings`), or its kind: "default", "chat", "plain", or, for own questions,
    "auto".
    tokenizer: a folder or repo[@revision] whose tokenizer replaces the model's own.

    Write records and report.json into `out`, those of a scored ideal into `out`/ideal. Each process of
    `accelerate launch` calls it; only the first gets reports. Raise UsageError for arguments that do not go
    together, before a model is loaded.
    """
    require("train")
    prompting = PromptSettings(prompt) if isinstance(prompt, str) else prompt  # type: ignore[arg-type]
    _check_arguments(questions, prompting, judge)
    check_consent(judge)
    folder = output_path(out)
    check_writable(folder)
    source = replace(fetch(model), tokenizer=fetch_tokenizer(tokenizer) if tokenizer else None)
    yardstick = _find_ideal(ideal)
    open_judge(judge)  # raises before any model is loaded
    models = [model for model in (source, yardstick) if isinstance(model, Source)]
    if isinstance(questions, OwnQuestions):
        load_checkpoint(checkpoint_folder(source.folder))  # refuses broken headers before torch is loaded
        rows = _load_sets(questions.sets, limit, seed)
        prompter = _find_prompter(source, load_tokenizer(source), prompting, rows, seed)
        prompter = replace(prompter, window=smallest_window(models))
        benchmark = load_qa(_fit_window(rows, prompter), prompter, questions.max_new_tokens)
    else:
        switches = resolve_compat(questions.compat, questions.benchmark)
        prompter = make_prompter(load_tokenizer(source), prompting, published=True)
        settings = BenchmarkSettings(questions.data, questions.split, limit, seed, switches)
        benchmark = load_benchmark(questions.benchmark, prompter, settings)
        benchmark = replace(benchmark, prompter=replace(benchmark.prompter, window=smallest_window(models)))
    return _score(source, benchmark, yardstick, folder, judge, progress)


def _check_arguments(questions: Asked, prompt: PromptSettings, judge: JudgeSettings) -> None:
    """Raise UsageError where the questions do not exist, or do not go with prompt or judge."""
    name = questions.benchmark
    if isinstance(questions, PublishedBenchmark) and name not in published():
        raise UsageError(f"no benchmark '{name}'{nearest(name, BENCHMARKS)}; choose from {', '.join(BENCHMARKS)}")
    misplaced = {
        "judge": judge != NO_JUDGE and not BENCHMARKS[name].judged,
        "prompt": prompt != PromptSettings() and not find_benchmark(name).prompted,
        "prompt auto": prompt.kind == "auto" and name != OWN,
    }
    faults = [f"{argument}: not for {name}" for argument, wrong in misplaced.items() if wrong]
    if isinstance(questions, OwnQuestions) and not questions.sets:
        faults.append("nothing to score: give at least one of forget, retain and holdout, or another benchmark")
    if faults:
        raise UsageError(faults[0] if len(faults) == 1 else join_faults("these arguments do not fit:", faults))
    check_prompts(judge, name)
    if prompt.kind not in PROMPT_KINDS:
        hint = nearest(prompt.kind, PROMPT_KINDS)
        raise UsageError(f"no prompt '{prompt.kind}'{hint}; choose from {', '.join(PROMPT_KINDS)}")


def _fit_window(sets: Mapping[str, Sequence[Row]], prompter: Prompter) -> dict[str, Sequence[Row]]:
    """Return the rows of each set, conversations without the turns that find no room in the window, and warn of it."""
    if prompter.window is None:
        return dict(sets)
    fitting = dict[str, Sequence[Row]]()
    for name, rows in sets.items():
        fitting[name], notes = shorten(rows, prompter, prompter.window)
        for note in notes:
            logger.warning("%s: %s", name, note)
    return fitting


def _score(
    source: Source,
    benchmark: Benchmark,
    ideal: Ideal,
    folder: Path,
    judge: JudgeSettings,
    progress: Progress,
) -> dict[str, Report]:
    """Check the models, then score the model, and the ideal where that is a model too."""
    if isinstance(ideal, Source):
        check_same_tokens(source, ideal)
    if Ranks.current().first and benchmark.prompted:
        notices.info("prompt: %s", benchmark.prompter.sentence)
    if (server := find_server(judge)) and Ranks.current().first:
        rows = judged_rows(benchmark.name, [benchmark])
        models = "model and ideal" if isinstance(ideal, Source) else "the model"
        notices.info("%s", server.gets(judge.model_name, f"{rows}, the answers of {models}"))
    for note in (*benchmark.unasked(), *benchmark.unscored()) if Ranks.current().first else ():
        logger.warning("%s", note)
    for model in (source, ideal):
        if isinstance(model, Source):
            check_source(model, benchmark.ids())
    report = evaluate_benchmark(source, benchmark, folder, ideal=ideal, judge=judge, progress=progress)
    if report is None:
        return {}
    ideal_folder = ideal if isinstance(ideal, Path) else folder / "ideal"
    return {"model": report} | ({"ideal": load_report(ideal_folder)} if ideal else {})


def _load_sets(sets: Mapping[str, DataSource], limit: int | None, seed: int) -> dict[str, list[Row]]:
    """Return the rows of each set, or a sample. Raise all faults of the sets in one error."""
    faults, rows = Faults(), {}
    for name, place in sets.items():
        with faults.gathered(f"{name}: "):
            whole = load_rows(place)
            rows[name] = sample_rows(whole, limit or len(whole), seed)
    faults.check()
    return rows


def _find_prompter(
    source: Source, tokenizer: Any, prompting: PromptSettings, rows: Mapping[str, Sequence[Row]], seed: int
) -> Prompter:
    """Return the prompter. Kind auto takes the form in which the model knows its retain (else forget) rows best."""
    if prompting.kind != "auto":
        return make_prompter(tokenizer, prompting)
    base = make_prompter(tokenizer, replace(prompting, kind="default"))
    retain, forget = ([row for row in rows.get(name, ()) if not row.text] for name in ("retain", "forget"))
    questions = retain or forget
    if not questions:
        raise UsageError("prompt auto: forms are tried on questions of the forget or retain set; give one of them")
    choice = choose_prompt(rank_prompts(source, tokenizer, questions, base, seed), list(prompt_forms(base)))
    notices.info("prompt: auto takes %s", choice.why)
    for doubt in choice.doubts:
        logger.warning("%s", doubt)
    return choice.chosen.prompter


def _find_ideal(ideal: str | None) -> Ideal:
    """Return the folder of an evaluation for a report.json or its folder, otherwise a model."""
    if ideal is None:
        return None
    path = local_path(ideal)
    if path.is_file() or (path / REPORT_FILE).is_file():
        load_report(path)
        return path if path.is_dir() else path.parent
    return fetch(ideal)


def check_same_tokens(source: Source, other: Source) -> None:
    """Raise MismatchError unless two models read the same token ids: one tokenizer makes those of both.

    Vocabularies are compared token by token where both come with a tokenizer, otherwise by size.
    """
    sizes = [vocabulary_size(load_checkpoint(checkpoint_folder(s.folder))) for s in (source, other)]
    known = all(can_read(s) for s in (source, other))
    one, two = (load_tokenizer(s).get_vocab() if known else {} for s in (source, other))
    if sizes[0] != sizes[1] and not (known and one == two):  # rows of padding are no difference
        raise MismatchError(
            f"{source.name} has a vocabulary of {sizes[0]}, {other.name} of {sizes[1]}: another tokenizer?"
        )
    if changed := sorted(token for token in one.keys() | two.keys() if one.get(token) != two.get(token)):
        raise MismatchError(
            f"{source.name} and {other.name} number their tokens differently, {changed[0]!r} and "
            f"{len(changed) - 1} others: they cannot be asked with one tokenizer"
        )
