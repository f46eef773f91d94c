"""The cost of stages that ask models questions: checks, scores, the choice among points, evidence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msa_lite.budget.needs import Need, score_need, stream_layers
from msa_lite.budget.plan import StageCost, gigabytes
from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Machine
from msa_lite.pipeline.stages.facts import Facts, RowFacts
from msa_lite.recipe import Recipe

SEARCHED = 10  # points of a search
CHECKS = "the checks"  # the name of checks in a plan
CHECKED_ROWS = 64  # of each set, for the check before a run
_LONGEST = 512  # tokens of a question with its answer
_BATCH = 64  # questions that are answered at a time
_TOKENS = 8192  # of a batch that is scored while layers stream (`evals.engine.models`)
_FORWARD = 1 / 3  # the passes of a step of decoding, which goes forward alone
_LONGER = 1.5  # the length of a model's answers beside right ones: some models know no end

QuestionPart = Literal["check", "others", "validation", "test", "earlier"]
"""The questions of a stage: the check's about forget rows, its others, or those of a part of `Facts.asked`."""


def asking_costs(
    recipe: Recipe,
    what: str,
    model: str,
    part: QuestionPart,
    facts: Facts,
    machine: Machine,
) -> list[StageCost]:
    """Return the cost of asking a model a part of the questions.

    what: the name of such stages in a plan.
    """
    shape = facts.shapes.get(model, facts.shapes["target"])  # the unlearned model is as large as the target
    sets = _sets(facts, part)
    need, streamed = scoring_need(shape, machine)
    if model == "prior":
        sets = {name: size for name, size in sets.items() if name == "forget"}
    seconds = _seconds(recipe, shape, sets.values(), streamed, machine)
    return [StageCost(what, _kind(what), need, seconds, _how(streamed), waiting=streamed)]


def choice_costs(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring all points of a choice on one loaded target."""
    points = len(recipe.points) or SEARCHED
    return candidates_costs(recipe, points, facts, machine)


def candidates_costs(recipe: Recipe, count: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring so many candidates on the validation rows, one after the other in one target."""
    shape = facts.shapes["target"]
    need, streamed = scoring_need(shape, machine)
    sets = [
        size.part(count * size.count) for name, size in facts.asked.get("validation", {}).items() if name != "holdout"
    ]
    seconds = _seconds(recipe, shape, sets, streamed, machine)
    return [StageCost("the sweep", "sweep", need, seconds, _how(streamed), waiting=streamed)]


def evidence_costs(what: str, loads: int, passes: float, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of evidence, or of a probe.

    what: the name of such stages in a plan. loads: the models that it runs. passes: over the forget rows, of all of
    them.
    """
    shape = facts.shapes["target"]
    need, streamed = scoring_need(shape, machine)
    forget = facts.asked.get("test", {}).get("forget", RowFacts(0, 0, 0))
    questions, tokens = passes * forget.count, passes * forget.tokens / 2  # without the prompts of answers
    seconds = ask_seconds(shape, questions, tokens, 0, streamed, machine, loads)
    return [StageCost(what, _kind(what), need, seconds, "of each model", waiting=streamed)]


def _how(streamed: int) -> str:
    return f"slow: {gigabytes(streamed)} of weights stream from RAM" if streamed else "batches grow with free memory"


def _kind(what: str) -> Literal["checks", "scores"]:
    return "checks" if what == CHECKS else "scores"


def scoring_need(shape: Shape, machine: Machine, four_bit: bool = False) -> tuple[Need, int]:
    """Return the need of scoring with the smallest batches, and the bytes of weights that stream from RAM.

    Larger batches take what is free.
    """
    device = machine.device
    width = min(shape.width, 4.0) if device.is_gpu else 4.0
    width = 2.0 if four_bit and device.is_gpu else width
    need = score_need(shape, _LONGEST, width, on_gpu=device.is_gpu, four_bit=four_bit)
    return stream_layers(shape, need, device, four_bit)


def _seconds(recipe: Recipe, shape: Shape, asked: Iterable[RowFacts], streamed: int, machine: Machine) -> float | None:
    """Return the seconds of asking a model some questions; 0 where there are none."""
    sets = list(asked)
    questions = sum(size.count for size in sets)
    answers = sum(min(recipe.max_new_tokens * size.count, _LONGER * size.answers) for size in sets)
    tokens = sum(size.tokens for size in sets)
    return ask_seconds(shape, questions, tokens, answers, streamed, machine) if questions else 0.0


def ask_seconds(
    shape: Shape, questions: float, tokens: float, answers: float, streamed: int, machine: Machine, loads: int = 1
) -> float | None:
    """Return the seconds of scoring questions with so many tokens in all, and of answers with so many in all.

    streamed: bytes of weights that come from RAM in each pass. loads: the models that are asked.
    """
    steps = answers / max(1.0, questions) * -(-questions // _BATCH)  # of decoding: each reads all weights
    width = 2 if shape.stored < 3 * shape.weights else 4
    return machine.seconds(
        shape,
        2 * shape.weights * (tokens + answers),
        memory=steps * width * shape.weights,
        bus=streamed * (-(-tokens // _TOKENS) + steps),
        passes=_FORWARD * steps,
        loads=loads,
    )


def _sets(facts: Facts, part: QuestionPart) -> dict[str, RowFacts]:
    """Return the questions of a part, by set. A set that is whole among the validation rows, too, is asked there."""
    validation, test = (facts.asked.get(name, {}) for name in ("validation", "test"))
    if part in ("check", "others"):  # where nothing is scored, of the rows that vectors learn
        sets = (validation or test or facts.rows).items()
        return {
            name: size.part(min(CHECKED_ROWS, size.count))
            for name, size in sets
            if (name == "forget") == (part == "check")
        }
    before = validation if part == "test" else {}
    return {name: size for name, size in facts.asked.get(part, {}).items() if before.get(name) != size}
