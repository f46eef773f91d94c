"""A table of the paper at a size for two cores: the same rows and methods with tiny Llamas, trained on the benchmark.

    python examples/small_table/small_table.py tofu-forget10-llama-3.2-1b TOFU_FOLDER --only "MSA (base),NPO"

The models of the table become models that the table trains: its priors are the stages of one history, on rows that are
not learnt later; targets and ideals go on from them as the table's own trainings do, or with and without the rows to
forget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from small_rows import BENCHMARK, SmallFiles, muse_rows, restor_rows, tofu_rows

import msa_lite
from msa_lite.errors import UsageError
from msa_lite.io.files.writing import write_text
from msa_lite.pipeline.table.rows import moved
from msa_lite.recipe import Recipe, TableRecipe, load_recipe, load_table_recipe, load_training, overrides_of
from msa_lite.recipe.table import TableTraining

_NOTE = "note: tiny models know a small part of the benchmark by heart; published figures are no measure of them"
_HISTORY_RATE = 2e-3
_OTHER_SEED = 1000  # none of a table's own
_FILTERED = {"merge.filter": 4.0, "vector.hold": 1.0}  # the middle one of three λ that a search would try
_MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class _Size:
    """The sizes that suit a benchmark's rows."""

    load: Callable[[str, str | None], SmallFiles]
    """Returns the rows that models learn and those that are asked, of a benchmark's data and split."""
    home: str | None
    """The data where the table names none."""
    prior: int
    """Epochs of the history in all."""
    tuning: int
    """Epochs of target and ideal, and of the vectors."""
    max_length: int
    batch: int
    """Rows of a step."""
    rate: float = 1e-3
    """The learning rate of all fits but that of the history."""


@dataclass(frozen=True)
class Small:
    """A table at small size, and the rows of data that it trains on."""

    table: TableRecipe
    source: str
    """The benchmark's data."""
    split: str | None
    """The split of the data."""
    data: Path
    """The folder that its rows are written into, beside that of the table."""
    size: _Size

    def write(self) -> None:
        """Write the rows, one a line; files that are there stay."""
        files = {self.data / path: text for path, text in self.size.load(self.source, self.split).items()}
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_text(path, text)


def shrink(table: TableRecipe) -> Small:
    """Return a table with the same rows at small size. Raise UsageError where its benchmark has none."""
    base = load_recipe(table.recipe, [*overrides_of(table.set), "output=small"])
    benchmark = base.evaluate.benchmark if base.evaluate else ""
    if benchmark not in _SIZES:
        raise UsageError(f"small_table: for the benchmarks {', '.join(_SIZES)}, not for '{benchmark}'")
    size, models = _SIZES[benchmark], table.folder / "models"
    if (source := table.data or size.home) is None:
        raise UsageError(f"small_table: {benchmark} has no data on the Hub; give its folder")
    trained = {str(load_training(item.recipe, overrides_of(item.set)).folder): item for item in table.train}
    places = {output: str(models / Path(output).name) for output in trained}
    priors = _priors(table, base, [*trained])
    for number, name in enumerate(priors, 1):
        places[name] = str(models / "history" / f"{number}-prior-{number}")
    data = table.folder.with_name(f"{table.folder.name}-data")
    form = "qa" if benchmark == "tofu" else "text"
    trainings = [_history(len(priors), size, data, form, models)]
    ideal = base.evaluate.ideal if base.evaluate else None
    for role, model, groups in (
        ("target", base.target, ["forget", "retain", "prior"]),
        ("ideal", ideal, ["retain", "prior"]),
    ):
        if model and model not in places and not model.startswith(tuple(f"{output}/" for output in trained)):
            places[model] = str(models / role / f"1-{role}")
            trainings.append(_training(places[priors[-1]], [(role, groups)], size, data, form, models / role))
    for output, item in trained.items():
        recipe = load_training(item.recipe, overrides_of(item.set))
        stages = [
            (stage.title, [group for sets in stage.sets for group in _groups(asdict(sets))]) for stage in recipe.stages
        ]
        start = moved(recipe.model, places) if isinstance(recipe.model, str) else places[priors[-1]]
        trainings.append(_training(start, stages, size, data, form, Path(places[output])))
        # In the same order, a vector would be the very change of a target that learnt nothing but the rows to forget.
        trainings[-1]["seed"] = _OTHER_SEED
    values = {
        "train": [TableTraining(recipe=recipe) for recipe in trainings],
        "set": _merged(_settings(base, size, data, form, places), table.set),
        "msa": {label: moved(changes, places) for label, changes in table.msa.items()} | {"MSA (filter)": _FILTERED},
        "methods": [item.model_copy(update={"set": moved(item.set, places)}) for item in table.baselines],
        "data": None,
    }
    split = base.evaluate.split if base.evaluate else None
    return Small(table.model_copy(update=values), source, split, data, size)


def _priors(table: TableRecipe, base: Recipe, trained: Sequence[str]) -> list[str]:
    """Return the priors that no training of the table makes, in the order of its rows, the recipe's own last."""
    changes = [*table.msa.values(), *(item.set for item in table.baselines)]
    names = [change["prior"] for change in changes if "prior" in change]
    own = base.prior_checkpoint
    known = [name for name in [*names, own] if not name.startswith(tuple(f"{output}/" for output in trained))]
    return [name for name in dict.fromkeys(known) if name != own] + [own]


def _merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the size with a user's own above them, both as flat keys."""
    flat = dict(text.partition("=")[::2] for changes in (settings, own) for text in overrides_of(changes))
    return {key: json.loads(text) for key, text in flat.items()}


def _settings(base: Recipe, size: _Size, data: Path, form: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of the recipe that change with the size."""
    ideal = base.evaluate.ideal if base.evaluate else None

    def rows(name: str) -> dict[str, str]:
        return {"path": str(data / f"{name}.jsonl"), "format": form}

    def few(value: Any) -> Any:
        return value[:2] if isinstance(value, list) else value

    methods = {
        name: {key: size.rate if key == "learning_rate" else few(value) for key, value in parameters.items()}
        for name, parameters in base.baseline.methods.items()
    }
    parts, kept = ["forget"], dict[str, Any]()
    if base.retain:
        parts.append("retain")
        kept = {"retain.data": {**rows("retain"), "sample": base.retain.data.sample}, "retain.vector": None}
        kept |= {} if base.retain.beta == 0.0 else {"retain.beta": [0.5, 1.0]}
    nulls = {f"{part}.data.{key}": None for part in parts for key in ("name", "split", "revision")}
    return {
        **nulls, **kept,
        "target": moved(base.target, places), "prior": moved(base.prior_checkpoint, places), "history": None,
        "evaluate.ideal": moved(ideal, places), "evaluate.data": str(data / BENCHMARK), "evaluate.max_new_tokens": 60,
        "forget.data": rows("forget"), "forget.alpha": [0.5, 1.0],
        "prompt": {"kind": "plain", "system": None},
        "vector": {
            "epochs": size.tuning, "learning_rate": size.rate, "batch_size": size.batch, "micro_batch_size": "auto",
            "max_length": size.max_length, "warmup_epochs": 0.2,
        },
        "baseline.epochs": min(5, size.tuning),
        "baseline.methods": {**methods, "rmu": {**methods.get("rmu", {}), "layer": 1}},
        "select.validation": 0.25, "verdict": False,
    }  # fmt: skip


def _history(count: int, size: _Size, data: Path, form: str, models: Path) -> dict[str, Any]:
    stages = [(f"prior-{number}", ["prior"]) for number in range(1, count + 1)]
    recipe = _training("", stages, size, data, form, models / "history")
    recipe["model"] = {"config": {**_MODEL, "max_position_embeddings": 1024}, "tokenizer": {"vocabulary": 1024}}
    recipe["stages"] = [{key: value for key, value in stage.items() if key != "epochs"} for stage in recipe["stages"]]
    recipe["training"] |= {"epochs": max(1, size.prior // count), "learning_rate": _HISTORY_RATE}
    return recipe


def _training(
    model: str, stages: Sequence[tuple[str, Sequence[str]]], size: _Size, data: Path, form: str, output: Path
) -> dict[str, Any]:
    """Return the recipe of a training. stages: (name, groups of rows) of each."""
    listed = []
    for name, groups in stages:
        sets = [{"path": str(data / f"{group}.jsonl"), "format": form} for group in dict.fromkeys(groups)]
        listed.append({"name": name, "data": sets, **({"epochs": 1} if [*groups] == ["prior"] else {})})
    training = {
        "epochs": size.tuning, "learning_rate": size.rate, "warmup_epochs": 0.2, "batch_size": size.batch,
        "max_length": size.max_length, "weight_decay": 0.0,
    }  # fmt: skip
    prompt = {"kind": "plain"}
    return {"model": model, "stages": listed, "training": training, "prompt": prompt, "output": str(output)}


def _groups(data: Mapping[str, Any]) -> list[str]:
    """Return the groups that stand for a data set of a training: by its name, split or path."""
    words = f"{data.get('name') or ''} {data.get('split') or ''} {data['path']}".lower()
    if "c4" in words:
        return ["prior"]
    if "retain" in words:
        return ["retain", "prior"]
    return ["forget", "retain", "prior"] if "full" in words else ["forget"]


# Chosen by target, ideal and prior alone: the target knows the rows to forget, the others do not, and the target's
# weights are not farther from the prior's than half of the prior's own norm. Vectors of larger steps do not add up.
_SIZES = {
    "tofu": _Size(tofu_rows, "locuslab/TOFU", prior=20, tuning=20, max_length=192, batch=16),
    "restor": _Size(restor_rows, None, prior=4, tuning=2, max_length=192, batch=4, rate=3e-4),
    "muse": _Size(muse_rows, "muse-bench/MUSE-Books", prior=6, tuning=4, max_length=192, batch=4, rate=6e-4),
}


def main() -> int:
    """Write the rows and make the table, in FOLDER."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="a table of the paper, or a file")
    parser.add_argument("data", help="the folder of the benchmark's data")
    parser.add_argument("--folder", help="where the table goes; runs/small/NAME without it")
    parser.add_argument("--only", default="", help="labels of rows, with commas between them")
    options = parser.parse_args()
    folder = options.folder or f"runs/small/{Path(options.name).stem}"
    small = shrink(load_table_recipe(options.name, [f"data={options.data}", f"output={folder}"]))
    small.write()
    only = [label for label in options.only.split(",") if label]
    result = msa_lite.table(small.table.model_dump(mode="json"), only=only)
    for name in result.comparisons:
        print((Path(folder) / f"{name}.md").read_text())
    print(_NOTE)
    return 0 if not result.of("failed") else 4


if __name__ == "__main__":
    sys.exit(main())
