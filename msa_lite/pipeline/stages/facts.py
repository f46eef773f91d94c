"""The facts that a plan is made of, without weights: sizes of models from headers, lengths of rows from the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from msa_lite.budget.shape import Shape, published_shape, read_shape, shape_of_config
from msa_lite.catalogue import OWN
from msa_lite.choose.validation import FEWEST
from msa_lite.data import DataSource, Example, Row, is_remote_data, open_tokenizer
from msa_lite.errors import DataError, Faults, MsaError, UsageError, join_faults
from msa_lite.io.console.progress import muted
from msa_lite.io.files.reading import local_path, read_yaml
from msa_lite.io.models.window import read_window
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import fetch_headers, is_remote, split_name
from msa_lite.io.weights.matching import check_names
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.io.weights.quantised import dequantised, hides_shapes
from msa_lite.pipeline.prepare.division import count_scored, separate_sets
from msa_lite.pipeline.prepare.lengths import FILTER, LEARNT, find_filter_rows, fit_rows, is_filtered
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, demo_config, find_tokenizer, written_out_as
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.pipeline.prepare.questions import data_place, limits_of_evidence, load_set
from msa_lite.recipe import SETS, Recipe
from msa_lite.report.run.provenance import RECIPE_FILE

_QUESTION = 60  # tokens of a question with its answer, where rows cannot be read
_DEMO_QUESTION = 28  # the same of a demo, beside what all rows begin with: that runs once for a step
_PUBLISHED = 400  # questions of each of the four sets of a published benchmark, where the recipe sets no limit
_PERSON = 6  # rows of a person of the demo
_AS_LONG = "; they are taken to be as long as max_length allows"


@dataclass(frozen=True)
class RowFacts:
    """The rows of a fit, or the questions of a stage."""

    count: int
    """0 where they are not known."""
    longest: int
    """Tokens of the longest row."""
    tokens: int
    """Tokens of all rows."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> RowFacts:
        """Return the facts of rows as token ids."""
        lengths = [len(example.ids) for example in examples]
        return cls(len(lengths), max(lengths, default=0), sum(lengths))


@dataclass(frozen=True)
class Facts:
    """The inputs of a plan."""

    shapes: Mapping[str, Shape]
    """The models by name: target, prior, perhaps ideal."""
    rows: Mapping[str, RowFacts]
    """The rows by vector, where they could be read."""
    download: int = 0
    """Bytes of weights that are not on this machine yet."""
    notes: list[str] = field(default_factory=list)
    """The inputs that could not be read."""
    missing: tuple[str, ...] = ()
    """The models whose headers could not be read: target, prior, ideal."""
    heads: Mapping[str, Checkpoint] = field(default_factory=dict)
    """The models whose headers could be read."""
    written_out: int = 0
    """Bytes of models that the run first writes out whole, in its folder (`written_out_as`)."""
    questions: Mapping[str, int] = field(default_factory=dict)
    """About how many questions of each set models are scored on; empty where nothing is scored."""
    window: int | None = None
    """The smallest window of the models, as far as it is known."""

    def rows_of(self, name: str, most: int) -> RowFacts:
        """Return the rows of a fit, of `most` tokens each at most; 0 rows of that length where they are not known."""
        most = min(most, self.window or most)
        rows = self.rows.get(name, RowFacts(0, most, 0))
        return replace(rows, longest=min(rows.longest, most))

    def asked(self, count: float) -> RowFacts:
        """Return so many questions, with their answers as long as the rows to forget."""
        return RowFacts(round(count), _QUESTION, round(count * (self._mean("forget") or _QUESTION)))

    @property
    def retain_ratio(self) -> float:
        """Return the tokens of a retain row for each token of a forget row; 1 where they are not known."""
        forget, retain = self._mean("forget"), self._mean("retain")
        return retain / forget if forget and retain else 1.0

    def _mean(self, name: str) -> float:
        """Return the tokens of a row of a set; 0 where they are not known."""
        rows = self.rows.get(name)
        return rows.tokens / rows.count if rows and rows.count else 0.0


def find_facts(recipe: Recipe, samples: bool = True, removed: Collection[str] = ()) -> Facts:
    """Find models and rows of a recipe. samples: as of `fit_rows`. removed: as of `separate_sets`.

    A model that is not here yet has the published sizes of its family, or those of the other model; a note says so.
    Raise UsageError where no model's sizes are known.
    """
    if recipe.demo is not None and not has_history(recipe):
        return _demo_facts(recipe)
    names = {"target": recipe.target} | ({"prior": recipe.prior_checkpoint} if recipe.has_prior else {})
    if recipe.evaluate and recipe.evaluate.ideal:
        names["ideal"] = recipe.evaluate.ideal
    is_far = any(map(is_remote, names.values()))
    is_far = is_far or any(is_remote_data(DataSource(data.path)) for data in recipe.data_sets.values())
    with offline_where_unreachable() if is_far else nullcontext():
        models = find_model_facts(names)
        shapes = {**models.shapes, "prior": models.shapes.get("prior", models.shapes["target"])}
        roles = [role for role in WRITTEN_OUT if role in names and not (recipe.folder / role).is_dir()]
        written_out = sum(shapes[role].stored for role in roles if written_out_as(names[role]))
        sources, rows = _load_rows(recipe, models.notes, samples, removed)
        examples = _encode_rows(recipe, sources, rows, models, samples)
    facts = {name: RowFacts.of(set_examples) for name, set_examples in examples.items()}
    questions = count_questions(recipe, {place: len(set_rows) for place, set_rows in rows.items()})
    return replace(models, shapes=shapes, rows=facts, written_out=written_out, questions=questions)


def find_model_facts(names: Mapping[str, str]) -> Facts:
    """Return the sizes of models by their roles, without any rows; notes tell whose sizes are borrowed.

    names: models by role, "target" or another one first. Raise UsageError where no size is known.
    """
    heads = {role: head for role, name in names.items() if (head := find_headers(name))}
    shapes = {role: read_shape(head, names[role]) for role, head in heads.items()}
    far = [head for head in heads.values() if not head.shards]
    missing, borrowed = [role for role in names if role not in heads], dict[str, list[str]]()
    for role in missing:
        if published := published_shape(names[role]):
            shapes[role], family = published
            borrowed.setdefault(f"the published ones of {family}", []).append(f"{role} {names[role]}")
    if not shapes:
        absence = {True: "not on this machine, and the Hub gives no headers", False: "no such folder"}
        lines = [f"{role} {names[role]}: {absence[is_remote(names[role])]}" for role in missing]
        reason = offline_reason()
        remedy = f"offline ({reason}); name folders" if reason else "log in with `hf auth login`, or name folders"
        headline = f"the sizes of no model can be read, so there is nothing to plan with; {remedy}:"
        raise UsageError(join_faults(headline, lines))
    lender = next(iter(shapes))
    for role in missing:
        if role not in shapes:
            shapes[role] = shapes[lender]
            borrowed.setdefault(f"those of the {lender}", []).append(f"{role} {names[role]}")
    away = "not on this machine yet, or not given by the Hub; its sizes are"
    notes = [f"{', '.join(models)}: {away} {whose}" for whose, models in borrowed.items()]
    download = sum(entry.nbytes for head in far for entry in head.tensors.values())
    return Facts(shapes, {}, download, notes, tuple(missing), heads, window=read_window(heads.values()))


def has_history(recipe: Recipe) -> bool:
    """Check whether the models of a demo are made, with the recipe's own settings as far as recipe.yaml tells."""
    values, former = recipe.model_dump(mode="json", include={"demo", "seed"}), None
    with suppress(MsaError):
        former = read_yaml(recipe.folder / RECIPE_FILE)
    is_same = not isinstance(former, dict) or all(former.get(key) == value for key, value in values.items())
    return is_same and (recipe.folder / "history" / "target").is_dir()


def find_headers(name: str) -> Checkpoint | None:
    """Return a checkpoint by its headers, from a folder, the Hub's cache, or the Hub; None where there are none.

    For an adapter, return that of the model below it. Codes are seen as the weights that they stand for. Raise as
    `check_names`.
    """
    folder = local_path(name)
    if not folder.is_dir() and is_remote(name):
        from huggingface_hub import try_to_load_from_cache

        try:
            repo, revision = split_name(name)
            cached = try_to_load_from_cache(repo, "config.json", revision=revision)
            if isinstance(cached, str):
                with suppress(MsaError):  # only a part of it is in the cache
                    return _loadable(load_checkpoint(Path(cached).parent))
            head = fetch_headers(name)
            return _loadable(head) if head and not hides_shapes(head) else None
        except UsageError:  # a branch by its number, and no network to look it up
            return None
    if not folder.is_dir():
        return None
    return find_headers(base_name(folder)) if is_bare_adapter(folder) else _loadable(load_checkpoint(folder))


def _loadable(checkpoint: Checkpoint) -> Checkpoint:
    check_names(checkpoint)
    return dequantised(checkpoint)


def _load_rows(
    recipe: Recipe, notes: list[str], samples: bool, removed: Collection[str]
) -> tuple[dict[str, DataSource], dict[str, list[Row]]]:
    """Return sources and rows of the data sets by place, as a run takes them. Add notes on those that cannot be read.

    Notes also say which rows a run leaves out, and what its data cannot show. Raise DataError as `separate_sets`, and
    for data that is there and cannot be used.
    """
    sources, rows, absent = dict[str, DataSource](), dict[str, list[Row]](), dict[str, list[str]]()
    faults = Faults()
    for place, data in recipe.data_sets.items():
        try:
            sources[place], rows[place] = load_set(data, recipe.columns)
        except DataError as error:
            faults.append(DataError(f"{data_place(place)}: {error}"))
        except (MsaError, ImportError) as error:
            reason = str(error).splitlines()[0].replace("OfflineModeIsEnabled", "no connection")
            absent.setdefault(reason, []).append(place)
    faults.check()
    for reason, places in absent.items():
        notes.append(f"{' and '.join(places)} rows could not be read ({reason}){'' if '.' in places[0] else _AS_LONG}")
    rows, left_out = separate_sets(rows, removed)
    notes += left_out
    if not absent:
        notes += limits_of_evidence(recipe, rows, samples)
    return sources, rows


def _encode_rows(
    recipe: Recipe,
    sources: Mapping[str, DataSource],
    rows: Mapping[str, list[Row]],
    models: Facts,
    samples: bool,
) -> Mapping[str, list[Example]]:
    """Return the rows that vectors learn, and those that a filter leaves as they are, as token ids.

    Add notes of what is cut. Return none, with a note, where there is no tokenizer.
    """
    if not (learnt := [name for name in rows if name in LEARNT]):
        return {}
    try:
        place = find_tokenizer(recipe)
        prompter = find_prompter(recipe, open_tokenizer(place.folder, place.name, to_count=True))
        prompter = replace(prompter, window=models.window)
    except (MsaError, ImportError) as error:
        reason, missing = str(error).splitlines()[0], " and ".join(learnt)
        models.notes.append(f"{missing} rows could not be read ({reason}){_AS_LONG}")
        return {}
    with muted():
        fitted = fit_rows(recipe, sources, rows, prompter, samples)
        spared = find_filter_rows(recipe, fitted, prompter)
    models.notes.extend([*fitted.notes, *(spared.notes if is_filtered(recipe, samples) else [])])
    return {**fitted.examples, FILTER: spared.examples} if spared.examples else fitted.examples


def count_questions(recipe: Recipe, counts: Mapping[str, int]) -> dict[str, int]:
    """Return about how many questions of each set models are scored on. counts: rows by place."""
    evaluate = recipe.evaluate
    if evaluate is None:
        return {}
    if evaluate.benchmark != OWN:
        return {"questions": 4 * min(evaluate.limit or _PUBLISHED, _PUBLISHED)}
    left = counts.get("retain", 0) - counts.get("forget", 0)
    if recipe.retain and recipe.retain.data.sample and left >= FEWEST:  # as `divide_retain` does
        counts = {**counts, "retain": count_scored(left)}
    sizes = {name: counts.get(f"evaluate.{name}", counts.get(name, 0)) for name in SETS}
    return {name: min(count, evaluate.limit or count) for name, count in sizes.items() if count}


def _match_forget(recipe: Recipe, rows: dict[str, RowFacts]) -> dict[str, RowFacts]:
    """Return the rows with a retain set that is sampled to the size of the forget set, where the recipe says so."""
    if recipe.retain and recipe.retain.data.sample == "match_forget" and {"forget", "retain"} <= rows.keys():
        count, whole = rows["forget"].count, rows["retain"]
        if count < whole.count:
            rows["retain"] = RowFacts(count, whole.longest, whole.tokens * count // whole.count)
    return rows


def _demo_facts(recipe: Recipe) -> Facts:
    """Return the inputs of a demo whose history is not made yet."""
    demo = recipe.demo
    assert demo is not None, "checked"
    shapes = dict.fromkeys(("target", "prior", "ideal"), shape_of_config(demo_config(demo), "the demo's model"))
    rows = _match_forget(recipe, {name: demo_rows(count) for name, count in demo.people.items() if name in LEARNT})
    questions = count_questions(recipe, {name: _PERSON * people for name, people in demo.people.items()})
    unscored = _PERSON * demo.people["retain"] - questions.get("retain", 0)
    spare = max(rows["retain"].count, unscored) + questions.get("holdout", 0)
    rows[FILTER] = RowFacts(spare, _QUESTION, _DEMO_QUESTION * spare)
    return Facts(shapes, rows, notes=["the demo makes its models first"], questions=questions)


def demo_rows(people: int) -> RowFacts:
    """Return the rows of so many people of a demo, as far as they are known before they are made."""
    count = _PERSON * people
    return RowFacts(count, _QUESTION, _DEMO_QUESTION * count)
