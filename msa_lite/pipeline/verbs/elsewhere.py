"""Read what a training by another tool leaves: models, data, columns and settings for a first recipe.

It reads configurations of axolotl and LLaMA-Factory, and folders that transformers' Trainer wrote. No pickle
(`training_args.bin`) is loaded. What a recipe does not take over is named in a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.errors import Faults, UsageError, nearest
from msa_lite.io.files.reading import YAML_LIMIT, local_path, parse_yaml, read_object, read_text, read_yaml
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.settings import DataSource

_IN_CARD = re.compile(r"See axolotl config.*?```yaml\n(.*?)\n```", re.DOTALL)  # axolotl writes it there
_COLUMNS = {
    "field_instruction": "question", "field_output": "answer", "field_input": "input", "field_system": "system",
    "field_messages": "messages", "field_tools": "tools", "field": "text", "prompt": "question", "response": "answer",
    "query": "input", "system": "system", "messages": "messages", "tools": "tools", "history": "history",
}  # fmt: skip
"""The names of columns in axolotl and LLaMA-Factory → the keys of `columns`."""
_READ = {"path", "type", "name", "split", "revision", "data_files", "ds_type", "message_property_mappings", *_COLUMNS}
_READ_INFO = {"file_name", "hf_hub_url", "columns", "formatting", "ranking", "subset", "split", "revision"}
_MODELS = {
    "prior": ("base_model", "model_name_or_path"),
    "target": ("export_dir", "output_dir", "adapter_name_or_path"),
}
_BEGUN = ("lora_model_dir", "adapter_name_or_path")  # beside output_dir: the adapter that a training began with
_SETS = {"retain": ("datasets", "dataset"), "holdout": ("test_datasets", "eval_dataset")}
_INSTEAD = "give rows to keep with --retain"
_DIFFERENT = {
    ("chat_template", "template"): "a run takes the target's own (msa-lite recipes validate FILE --show-prompt)",
    ("load_in_4bit", "quantization_bit"): "vector.mode: qlora takes a 4-bit prior, too",
    ("train_on_inputs", "train_on_prompt"): "a run learns answers alone",
}
"""What a run does otherwise, by keys of a training."""


@dataclass
class OtherTraining:
    """A training by another tool, as its files describe it."""

    models: dict[str, str] = field(default_factory=dict)
    """The model that it wrote ("target") and the one that it began with ("prior")."""
    sets: dict[str, DataSource] = field(default_factory=dict)
    """The rows that it learnt ("retain") and those that it only scored ("holdout"), the first set of each."""
    origins: dict[str, str] = field(default_factory=dict)
    """The place of each of these, for messages."""
    vector: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe's `vector`."""
    prompt: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe's `prompt`."""
    notes: list[str] = field(default_factory=list)
    """What a recipe does not take over, in sentences."""


def read_training(name: str, faults: Faults, given: Collection[str]) -> OtherTraining:
    """Read a configuration or a Trainer's folder; keep what is wrong in it in `faults`.

    given: the models and sets that the user names instead ("prior", "retain", …). Raise UsageError for what is neither.
    """
    path = local_path(name)
    if not path.is_dir():
        return _Config(name, read_yaml(path, UsageError), path.parent).read(faults, given)
    card = path / CARD_FILE
    if card.is_file() and (shown := _IN_CARD.search(read_text(card, YAML_LIMIT, UsageError))):
        training = _Config(str(card), parse_yaml(shown[1], str(card), UsageError), path).read(faults, given)
    else:
        training = _read_folder(path)
    training.models["target"], training.origins["target"] = name, f"{name}: "
    return training


def _read_folder(path: Path) -> OtherTraining:
    """Read the files of a Trainer. A prior that adapter_config.json or the card names is left to `init`."""
    config, adapter = (
        read_object(path / file, kind=UsageError) if (path / file).is_file() else {}
        for file in ("config.json", "adapter_config.json")
    )
    if not config and not adapter:
        raise UsageError(f"{path}: has neither config.json nor adapter_config.json, so no Trainer wrote it")
    training = OtherTraining(vector=_vector(adapter), notes=[f"The folder does not name the data: {_INSTEAD}."])
    before = config.get("_name_or_path")
    if isinstance(before, str) and before and not adapter and local_path(before).resolve() != path.resolve():
        training.models["prior"], training.origins["prior"] = before, f"{path / 'config.json'}: _name_or_path "
    if (path / "training_args.bin").exists():
        training.notes.append("training_args.bin was not read: it is a pickle, which may run code.")
    return training


class _Config:
    """A configuration that is being read."""

    def __init__(self, name: str, values: Any, folder: Path) -> None:
        if not isinstance(values, dict) or not values.keys() & {*_MODELS["prior"]}:
            known = "axolotl (base_model) or LLaMA-Factory (model_name_or_path)"
            raise UsageError(f"{name}: is no configuration of {known}, and no folder of a model")
        self.name, self.folder, self.training = name, folder, OtherTraining()
        self.rest = {key: value for key, value in values.items() if value not in (None, False, "", [])}
        """The keys that nothing has been made of yet."""
        self.is_factory = "base_model" not in values

    def read(self, faults: Faults, given: Collection[str]) -> OtherTraining:
        """Return the training; keep faults."""
        training, rest = self.training, self.rest
        is_merge = "export_dir" in rest
        for name, keys in _MODELS.items():
            with faults.gathered(f"{self.name}: "):
                self._take_model(name, keys, name in given)
        if not is_merge and "prior" not in given and (begun := next((key for key in _BEGUN if key in rest), None)):
            why = "the training began with this adapter, so its base is no prior; give --prior: the base with it"
            faults.append(UsageError(f"{self.name}: {begun} {rest[begun]}: {why}"))
        is_learnt = "rl" not in rest and rest.pop("stage", "sft") in ("sft", "pt")
        if not is_learnt and "retain" not in given:
            faults.append(UsageError(f"{self.name}: it learnt preferences, not answers; {_INSTEAD}"))
        for role, keys in _SETS.items():
            for key in keys if is_learnt and role not in given else ():
                self._take_sets(role, key, faults)
        rest.pop("dataset_dir", None)
        if system := rest.pop("default_system", None):
            training.prompt["system"] = system
        kind = rest.pop("adapter", None) or rest.pop("finetuning_type", "lora" if self.is_factory else "full")
        training.vector = _vector(rest, kind in ("lora", "qlora"), self.is_factory)
        if kind not in ("lora", "qlora"):
            training.notes.append(f"It was no training of LoRA adapters ({kind}); vector.mode: full fits all weights.")
        for key, text in [(key, text) for keys, text in _DIFFERENT.items() for key in keys if key in rest]:
            training.notes.append(f"{key}: {rest.pop(key)}: {text}.")
        if rest:
            training.notes.append(f"Not taken over: {', '.join(map(str, rest))}.")
        return training

    def _take_model(self, name: str, keys: Iterable[str], is_given: bool) -> None:
        if (key := next((key for key in keys if key in self.rest), None)) is None:
            return
        model = self.rest.pop(key)
        if is_given:
            return
        if not isinstance(model, str):
            raise UsageError(f"{key}: one model is wanted, got {model!r:.200}; name it with --{name}")
        model = self._place(model)
        if name == "target" and Path(model, "merged/config.json").is_file():  # axolotl merge-lora
            model = str(Path(model, "merged"))
        self.training.models[name], self.training.origins[name] = model, f"{self.name}: {key} "

    def _take_sets(self, role: str, key: str, faults: Faults) -> None:
        entries = self.rest.pop(key, [])
        entries = re.split(r"\s*,\s*", entries) if isinstance(entries, str) else entries
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            with faults.gathered(f"{self.name}: {key}.{number}: "):
                source = self._listed_set(entry) if isinstance(entry, dict) else self._named_set(str(entry))
                self._add_set(role, f"{key}.{number}", source)

    def _add_set(self, role: str, where: str, source: DataSource) -> None:
        if role in self.training.sets:
            self.training.notes.append(f"{where} ({source.path}): `{role}` takes one set; join it with the first.")
        else:
            self.training.sets[role], self.training.origins[role] = source, f"{self.name}: {where} "

    def _listed_set(self, entry: Mapping[str, Any]) -> DataSource:
        """Return a data set of axolotl."""
        path, files, kind = entry.get("path"), entry.get("data_files"), entry.get("type")
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        if not isinstance(path, str) or not isinstance(files, str | None):
            raise UsageError(f"one path is wanted, got {files or path!r:.200}; {_INSTEAD}")
        if files and path not in ("json", "csv", "parquet", "text"):
            files = f"{path}/{files}"
        head = re.split(r"[.:]", kind)[0] if isinstance(kind, str) else ""
        if head.removesuffix("_w_system") not in ("", "alpaca", "chat_template", "completion", "sharegpt"):
            raise UsageError(f"type {kind} is not known here; {_INSTEAD}, and name columns with --columns")
        if isinstance(kind, dict) or head.startswith("alpaca"):
            self.training.prompt["kind"] = "auto"  # which tries Alpaca's, too
        form = str(kind.get("no_input_format") or kind.get("format")) if isinstance(kind, dict) else ""
        if "{instruction}" in form and "{input}" not in form:
            plain = {"prompt": form.replace("{instruction}", "{question}"), "answer": "{answer}"}
            self.training.prompt |= {"kind": "plain", **plain}
        names = {"field": entry.get("field", "text")} if head == "completion" else {**entry, "field": None}
        if isinstance(kind, dict):
            names = {"field_instruction": "instruction", "field_output": "output", **kind}
        self._note_unread(path, entry.keys() - _READ)
        return _source(self._place(files or path), names, entry)

    def _named_set(self, name: str) -> DataSource:
        """Return a data set of LLaMA-Factory, by its entry in dataset_info.json."""
        folder = self._place(str(self.rest.get("dataset_dir", "data")))
        entries = read_object(Path(folder, "dataset_info.json"), YAML_LIMIT, UsageError)
        if not isinstance(entry := entries.get(name), dict):
            raise UsageError(f"{name} is not in {folder}/dataset_info.json{nearest(name, entries)}")
        columns, file = entry.get("columns") or {}, entry.get("file_name")
        if not isinstance(columns, dict):
            raise UsageError(f"{name}: columns are a mapping, got {columns!r:.200}")
        path = entry.get("hf_hub_url") or (file and os.path.join(folder, str(file)))
        if entry.get("ranking") or columns.keys() - _COLUMNS.keys() or not isinstance(path, str):
            raise UsageError(f"{name}: holds more than questions and answers, or is no file; {_INSTEAD}")
        names = columns
        if columns and entry.get("formatting", "alpaca") == "alpaca" and not columns.get("response"):
            names = {"field": columns.get("prompt")}
        self._note_unread(path, entry.keys() - _READ_INFO)
        return _source(path, names, {**entry, "name": entry.get("subset")})

    def _note_unread(self, path: str, keys: Collection[Any]) -> None:
        if keys:
            self.training.notes.append(f"Not taken over of {path}: {', '.join(sorted(map(str, keys)))}.")

    def _place(self, name: str) -> str:
        """Return a path as it leads from the working folder: as it stands, else from the configuration's folder."""
        beside = self.folder / name
        return os.path.relpath(beside) if beside.exists() and not local_path(name).exists() else name


def _source(path: str, names: Mapping[str, Any], place: Mapping[str, Any]) -> DataSource:
    """Return a data set without the columns that are known by their names."""
    columns = {ours: str(names[theirs]) for theirs, ours in _COLUMNS.items() if names.get(theirs)}
    if (columns.get("question"), columns.get("answer"), columns.get("input", "input")) == (
        "instruction",
        "output",
        "input",
    ):
        columns = {key: name for key, name in columns.items() if key not in ("question", "answer", "input")}
    if columns.get("messages") in ("messages", "conversations"):
        del columns["messages"]
    places: dict[str, Any] = {key: str(place[key]) for key in ("name", "split", "revision") if place.get(key)}
    return DataSource(path, **{"format": "text" if "text" in columns else "qa", **places, **columns})


def _vector(values: dict[str, Any], is_adapter: bool = True, twice: bool = False) -> dict[str, Any]:
    """Take the keys of `vector` out of a training's values. The rate and shape of adapters fit no full training.

    twice: lora_alpha is twice the rank where it is not given, as in LLaMA-Factory.
    """
    vector: dict[str, Any] = {}
    lora: dict[str, Any] = {}
    for key in ("sequence_len", "cutoff_len"):
        vector |= {"max_length": values.pop(key)} if key in values else {}
    if is_adapter:
        vector |= {"learning_rate": values.pop("learning_rate")} if "learning_rate" in values else {}
        key = next((key for key in ("r", "lora_r", "lora_rank") if key in values), "r")
        rank = values.get(key)
        alpha = values.get("lora_alpha", 2 * rank if twice and isinstance(rank, int) else None)
        if rank and alpha:
            lora = {"rank": values.pop(key), "alpha": alpha}
            values.pop("lora_alpha", None)
        for key in ("lora_target_modules", "lora_target", "target_modules"):
            names = values.pop(key, None)
            names = re.split(r"\s*,\s*", names) if isinstance(names, str) and "," in names else names
            lora |= {"targets": names} if names and names not in ("all", "all-linear") else {}
    return {**vector, "lora": lora} if lora else vector
