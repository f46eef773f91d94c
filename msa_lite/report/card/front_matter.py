"""Make the front matter of a model card, which the Hub reads; and read that of the model that was edited."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.benchmarks import BENCHMARKS, OWN
from msa_lite.errors import FormatError
from msa_lite.io.files.reading import YAML_LIMIT, parse_yaml, read_text
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.report.tables.metrics import metric_kind

TAGS = ("machine-unlearning", "llm-unlearning", "unlearn")
MSA_TAG = "model-state-arithmetic"
MERGEKIT_TAGS = ("merge", "mergekit")
_LONGEST_CARD = 4 << 20  # bytes
_BLOCK = re.compile(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_WORD = re.compile(r"[\w.+-]{1,60}")
_LINK = re.compile(r"https?://[\w.-]+/[^\s\"'<>\\]{0,300}|(?:LICENSE|NOTICE)[\w.-]{0,40}")
_TASK = "text-generation"


@dataclass(frozen=True)
class CardOptions:
    """The user's wishes for a card, beside what the manifest says."""

    place: str | None = None
    """The repository or folder to load the model from, in the card's example."""
    datasets: Sequence[str] = ()
    """Public data sets to name, by their Hub names."""


def read_target_card(folder: Path) -> dict[str, Any]:
    """Return licence, languages and pipeline tag that a model's own card names; nothing where it has no card.

    The card is a stranger's file: values of another form than the Hub's are left out.
    """
    values = _card_values(folder)
    checks = {
        "license": _are_words,
        "license_name": _is_line,
        "license_link": lambda value: isinstance(value, str) and _LINK.fullmatch(value) is not None,
        "language": _are_words,
        "pipeline_tag": is_word,
    }
    return {key: values[key] for key, check in checks.items() if check(values.get(key))}


def read_base_model(folder: Path) -> str | None:
    """Return the one model that a model's own card names as its `base_model`; None where it names none, or several."""
    base = _card_values(folder).get("base_model")
    base = base[0] if isinstance(base, list) and len(base) == 1 else base
    return base if isinstance(base, str) and _is_line(base) else None


def _card_values(folder: Path) -> dict[str, Any]:
    """Return the front matter of a model's own card; nothing where it has none."""
    try:
        block = _BLOCK.match(read_text(folder / CARD_FILE, _LONGEST_CARD))
        values = parse_yaml(block[1], CARD_FILE) if block and len(block[1]) <= YAML_LIMIT else {}
    except FormatError:
        return {}
    return values if isinstance(values, dict) else {}


def is_word(value: Any) -> bool:
    """Check for a text of the form that the Hub's licences and languages have."""
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def _are_words(value: Any) -> bool:
    return is_word(value) or (isinstance(value, list) and 0 < len(value) <= 200 and all(map(is_word, value)))


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


def hub_name(manifest: Mapping[str, Any], role: str) -> tuple[str, str] | None:
    """Return (repository, commit) of a model that a merge used, "target" or "prior".

    None for a folder of this machine, and where the manifest does not name the repository.
    """
    name, revision = manifest.get("sources", {}).get(role), manifest["inputs"].get(role, {}).get("revision", "")
    if not name or is_local(revision):
        return None
    return name.partition("@")[0], revision


def is_local(revision: str) -> bool:
    """Check whether a revision is of a folder's content, no commit of a repository."""
    return revision.startswith(("sha256:", "files:"))


def front_matter(manifest: Mapping[str, Any], name: str, options: CardOptions) -> str:
    """Return the YAML between two lines of dashes, from the manifest of a model, an adapter or a vector.

    name: of the model, for the scores. The base model is named where the manifest names a repository, and the licence
    where the target's own card has one.
    """
    from huggingface_hub.repocard_data import ModelCardData

    theirs, target = manifest.get("target_card", {}), hub_name(manifest, "target")
    lora = manifest["kind"] == "vector" and manifest["inputs"].get("settings", {}).get("mode") != "full"
    is_adapter = manifest["kind"] == "adapter" or lora
    outcome = manifest.get("outcome") or {}
    results, method = _results(outcome), outcome.get("method")
    more: dict[str, Any] = {"base_model_relation": "adapter" if is_adapter else "finetune"} if target else {}
    data = ModelCardData(
        base_model=target[0] if target else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=theirs.get("pipeline_tag", _TASK),
        license=theirs.get("license"),
        license_name=theirs.get("license_name"),
        license_link=theirs.get("license_link"),
        language=theirs.get("language"),
        datasets=list(options.datasets) or None,
        tags=[
            *TAGS,
            *([MSA_TAG] if method in (None, "msa") else []),
            *(MERGEKIT_TAGS if manifest.get("mergekit") else []),
        ],
        eval_results=results or None,
        model_name=name if results else None,
        **more,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _results(outcome: Mapping[str, Any]) -> list[Any]:
    """Return the unlearned model's main metrics as the Hub's model-index has them."""
    from huggingface_hub.repocard_data import EvalResult

    benchmark, metrics = outcome.get("benchmark"), main_metrics(outcome)
    values = {name: models.get("unlearned", {}).get("value") for name, models in metrics.items()}
    return [
        EvalResult(
            task_type=_TASK,
            dataset_type=str(benchmark),
            dataset_name=benchmark_title(outcome),
            dataset_split=outcome.get("split"),
            metric_type=name,
            metric_name=metric_kind(name).heading,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in values.items()
        if value is not None
    ]


def benchmark_title(outcome: Mapping[str, Any]) -> str:
    """Return the name of an outcome's benchmark for people."""
    benchmark = str(outcome.get("benchmark"))
    if benchmark == OWN:
        return "own questions and texts"
    return BENCHMARKS[benchmark].summary.partition(",")[0] if benchmark in BENCHMARKS else benchmark


def main_metrics(outcome: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metrics that matter most, by name and model; all where the outcome does not say which."""
    metrics = outcome.get("metrics", {})
    chosen = {name: metrics[name] for name in outcome.get("main", ()) if name in metrics}
    return chosen or dict(metrics)
