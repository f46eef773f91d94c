"""The facts that a plan is made of, without weights: sizes of models from headers, lengths of rows from the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from msa_lite.benchmark_names import OWN
from msa_lite.budget.shape import Shape, published_shape, read_shape, shape_of_config
from msa_lite.data import DataSource, Example, Prompter, Row, encode, open_tokenizer
from msa_lite.errors import MsaError, UsageError, join_faults
from msa_lite.io.console.progress import muted
from msa_lite.io.files.reading import local_path
from msa_lite.io.weights.adapter import base_name, is_bare_adapter
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import (
    fetch_headers,
    is_remote,
    split_name,
)
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.io.weights.quantised import dequantised, hides_shapes
from msa_lite.pipeline.prepare.earlier import EARLIER_ROWS, forget_list, read_hashes
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, demo_config, find_tokenizer, written_out_as
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.pipeline.prepare.questions import WhenToChoose, limits_of_evidence, load_set, separate_sets
from msa_lite.recipe import SETS, Recipe
from msa_lite.train.settings import MOST_BATCH, auto_batch

_QUESTION, _ANSWER = 60, 15  # tokens of a question with its answer, and of the answer, where rows cannot be read
_DEMO_QUESTION = 28  # the same of a demo, beside what all rows begin with: that runs once for a step
_PUBLISHED = 400  # questions of each of the four sets of a published benchmark, where the recipe sets no limit
_LEARNT = ("forget", "retain")  # the places of rows that vectors learn
_PERSON = 6  # rows of a person of the demo


@dataclass(frozen=True)
class RowFacts:
    """The rows of a fit, or the questions of a set."""

    count: int
    longest: int
    """Tokens of the longest row."""
    tokens: int
    """Tokens of all rows; of questions, with those of the prompts that are answered."""
    answers: int = 0
    """Tokens of all right answers that a model is to give; 0 of texts."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> RowFacts:
        """Return the facts of rows as token ids."""
        lengths = [len(example.ids) for example in examples]
        return cls(len(lengths), max(lengths, default=0), sum(lengths))

    @classmethod
    def rough(cls, count: int, tokens: int = 0) -> RowFacts:
        """Return the facts of so many questions. tokens: of one with its answer, if known."""
        return cls(count, _QUESTION, 2 * (tokens or _QUESTION) * count, _ANSWER * count)

    def part(self, count: float) -> RowFacts:
        """Return the facts of so many of the rows; they need not be whole, as an average."""
        share = count / self.count if self.count else 0.0
        return RowFacts(round(count), self.longest, round(self.tokens * share), round(self.answers * share))


AskedSets = Mapping[str, Mapping[str, RowFacts]]
"""The questions by part ("validation", "test", "earlier") and set."""


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
    asked: AskedSets = field(default_factory=dict)
    """The questions that models are scored on; empty where they are not known."""


def find_facts(recipe: Recipe, choice: WhenToChoose | None = None) -> Facts:
    """Find models and rows of a recipe. Raise UsageError where no model's sizes are known.

    choice: True if something is chosen on validation rows; None: as the recipe says.

    A model that is not here yet has the published sizes of its family, or those of the other model; a note says so.
    """
    if recipe.demo is not None and not has_history(recipe):
        return _demo_facts(recipe)
    notes: list[str] = []
    names = {"target": recipe.target} | ({"prior": recipe.prior_checkpoint} if recipe.has_prior else {})
    if recipe.evaluate and recipe.evaluate.ideal:
        names["ideal"] = recipe.evaluate.ideal
    is_far = any(map(is_remote, [*names.values(), *(data.path for data in recipe.data_sets.values())]))
    with offline_where_unreachable() if is_far else nullcontext():
        heads = read_heads(names)
        shapes, download, missing = find_shapes(names, heads, notes)
        shapes.setdefault("prior", shapes["target"])
        roles = [role for role in WRITTEN_OUT if role in names and not (recipe.folder / role).is_dir()]
        written_out = sum(shapes[role].stored for role in roles if written_out_as(names[role]))
        sets = _load_rows(recipe, notes)
        prompter = _find_prompter(recipe, sets, notes)
    examples = _encode_rows(recipe, sets, prompter) if prompter else {}
    rows = match_forget(recipe, {name: RowFacts.of(set_examples) for name, set_examples in examples.items()})
    counts = {place: len(set_rows) for place, (_, set_rows) in sets.items()}
    tokens = rows["forget"].tokens // rows["forget"].count if "forget" in rows else 0
    asked = _asked_sets(recipe, counts, recipe.has_choice if choice is None else choice, tokens)
    return Facts(shapes, rows, download, notes, missing, heads, written_out, asked)


def read_heads(names: Mapping[str, str]) -> dict[str, Checkpoint]:
    """Return the models whose headers can be read, by role."""
    found = {role: find_headers(name) for role, name in names.items()}
    return {role: checkpoint for role, checkpoint in found.items() if checkpoint}


def find_shapes(
    names: Mapping[str, str], heads: Mapping[str, Checkpoint], notes: list[str]
) -> tuple[dict[str, Shape], int, tuple[str, ...]]:
    """Return the sizes of models by their roles, the bytes of weights to download, and the roles of missing models.

    names: models by role, "target" or another one first. heads: those whose headers can be read. Raise UsageError
    where no size is known.
    """
    shapes, download, missing, borrowed = dict[str, Shape](), 0, list[str](), dict[str, list[str]]()
    for role, name in names.items():
        if checkpoint := heads.get(role):
            shapes[role] = read_shape(checkpoint, name)
            download += 0 if checkpoint.shards else sum(entry.nbytes for entry in checkpoint.tensors.values())
        else:
            missing.append(role)
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
    for role in missing:
        if role not in shapes:
            lender = next(iter(shapes))
            shapes[role] = shapes[lender]
            borrowed.setdefault(f"those of the {lender}", []).append(f"{role} {names[role]}")
    for lender, models in borrowed.items():
        notes.append(f"{', '.join(models)}: not on this machine yet, or not given by the Hub; its sizes are {lender}")
    return shapes, download, tuple(missing)


def has_history(recipe: Recipe) -> bool:
    """Check whether the models of a demo are made."""
    return (recipe.folder / "history" / "target").is_dir()


def find_headers(name: str) -> Checkpoint | None:
    """Return a checkpoint by its headers, from a folder, the Hub's cache, or the Hub; None where there are none.

    For an adapter, return that of the model below it. Codes are seen as the weights that they stand for.
    """
    folder = local_path(name)
    if not folder.is_dir() and is_remote(name):
        from huggingface_hub import try_to_load_from_cache

        try:
            repo, revision = split_name(name)
            cached = try_to_load_from_cache(repo, "config.json", revision=revision)
            if isinstance(cached, str):
                with suppress(MsaError):  # only a part of it is in the cache
                    return dequantised(load_checkpoint(Path(cached).parent))
            head = fetch_headers(name)
            return dequantised(head) if head and not hides_shapes(head) else None
        except UsageError:  # a branch by its number, and no network to look it up
            return None
    if not folder.is_dir():
        return None
    return find_headers(base_name(folder)) if is_bare_adapter(folder) else dequantised(load_checkpoint(folder))


def _load_rows(recipe: Recipe, notes: list[str]) -> dict[str, tuple[DataSource, list[Row]]]:
    """Return source and rows of the data sets by place, as a run takes them. Add notes on those that cannot be read.

    Notes also say which rows a run leaves out, and what its data cannot show. Raise DataError as `separate_sets`.
    """
    sources, rows, faults = dict[str, DataSource](), dict[str, list[Row]](), dict[str, list[str]]()
    for place, data in recipe.data_sets.items():
        try:
            sources[place], rows[place] = load_set(data, recipe.columns)
        except (MsaError, ImportError) as error:
            reason = str(error).splitlines()[0].replace("OfflineModeIsEnabled", "no connection")
            faults.setdefault(reason, []).append(place)
    for reason, places in faults.items():
        lengths = "" if "." in places[0] else "; they are taken to be as long as max_length allows"
        notes.append(f"{' and '.join(places)} rows could not be read ({reason}){lengths}")
    rows, left_out = separate_sets(rows)
    notes += left_out
    if not faults:
        notes += limits_of_evidence(recipe, rows)
    return {place: (sources[place], set_rows) for place, set_rows in rows.items()}


SetRows = Mapping[str, tuple[DataSource, list[Row]]]


def _find_prompter(recipe: Recipe, sets: SetRows, notes: list[str]) -> Prompter | None:
    """Return what renders the rows; None, with a note, where there is no tokenizer or no rows to render."""
    if not (learnt := [name for name in sets if name in _LEARNT]):
        return None
    try:
        place = find_tokenizer(recipe)
        return find_prompter(recipe, open_tokenizer(place.folder, place.name, to_count=True))
    except (MsaError, ImportError) as error:
        reason, missing = str(error).splitlines()[0], " and ".join(learnt)
        notes.append(f"{missing} rows could not be read ({reason}); they are taken to be as long as max_length allows")
        return None


def _encode_rows(recipe: Recipe, sets: SetRows, prompter: Prompter) -> dict[str, Sequence[Example]]:
    """Return the rows that vectors learn, and those that a filter leaves as they are, as token ids."""
    places = [place for place in (*_LEARNT, recipe.filter_place) if place is not None and place in sets]
    with muted():
        return {place: encode(sets[place][1], sets[place][0], prompter, recipe.vector.max_length) for place in places}


def _count_earlier(recipe: Recipe) -> int:
    """Return the rows of earlier requests that are asked again, as far as their runs list them."""
    count = 0
    for folder in map(local_path, recipe.earlier):
        with suppress(MsaError, OSError):
            count += len(read_hashes(forget_list(folder)))
    return min(EARLIER_ROWS, count)


def _asked_sets(recipe: Recipe, counts: Mapping[str, int], choice: WhenToChoose, tokens: int) -> AskedSets:
    """Return about the questions that models are scored on. counts: rows by place. tokens: see `RowFacts.rough`."""
    if recipe.evaluate is None:
        return {}
    limit = recipe.evaluate.limit or _PUBLISHED
    sizes = {"questions": 4 * min(limit, _PUBLISHED)}
    if recipe.evaluate.benchmark == OWN:
        if recipe.retain and recipe.retain.data.sample:  # the rows that the sample leaves are scored
            counts = {**counts, "retain": max(0, counts.get("retain", 0) - counts.get("forget", 0))}
        sizes = {name: counts.get(f"evaluate.{name}", counts.get(name, 0)) for name in SETS}
        sizes = {name: min(count, recipe.evaluate.limit or count) for name, count in sizes.items() if count}
    test = {name: RowFacts.rough(count, tokens) for name, count in sizes.items()}
    earlier = {"earlier": {"forget": RowFacts.rough(_count_earlier(recipe))}} if recipe.earlier else {}
    if not choice:
        return {"test": test, **earlier}
    divided = {name: size for name, size in test.items() if name not in ("forget", "holdout")}
    chosen = {name: size.part(recipe.validation * size.count) for name, size in divided.items()}
    left = {name: size.part((1 - recipe.validation) * size.count) for name, size in divided.items()}
    return {"validation": {**test, **chosen}, "test": {**test, **left}, **earlier}


def match_forget(recipe: Recipe, rows: dict[str, RowFacts]) -> dict[str, RowFacts]:
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
    shape = shape_of_config(demo_config(demo), "the demo's model")
    rows = {name: demo_rows(count) for name, count in demo.people.items() if name in _LEARNT}
    counts = {name: _PERSON * people for name, people in demo.people.items()}
    asked = _asked_sets(recipe, counts, recipe.has_choice, _DEMO_QUESTION)
    shapes = dict.fromkeys(("target", "prior", "ideal"), shape)
    notes = ["the demo makes its models first"]
    return Facts(shapes, match_forget(recipe, rows), 0, notes, asked=asked)


def demo_rows(people: int) -> RowFacts:
    """Return the rows of so many people of a demo, as far as they are known before they are made."""
    count = _PERSON * people
    return RowFacts(count, _QUESTION, _DEMO_QUESTION * count)


def trained_weights(recipe: Recipe, prior: Shape) -> int:
    """Return the number of weights that a fit trains: of its adapters, or all."""
    spec = recipe.vector
    if spec.mode == "full":
        return prior.weights
    return sum(linear.adapter(spec.lora.rank) for linear in prior.adapted(spec.lora.targets))


def batch_size(recipe: Recipe, name: str, rows: RowFacts | None) -> int:
    """Return the rows of an optimiser step in the fit of a vector."""
    batch = recipe.vector_of(name).batch_size
    if batch != "auto":
        return batch
    return auto_batch(rows.count) if rows else MOST_BATCH
