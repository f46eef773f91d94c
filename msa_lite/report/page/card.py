"""Write the card (README.md) of a model or adapter folder from its manifest, so that a copied folder keeps its story.

The card is a function of the manifest alone, and holds no path of this machine, no row and no name of the data. It
names a model only if that is a repository of the Hub; what is published passes a manifest that names fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msa_lite.catalogue import BENCHMARKS, OWN
from msa_lite.errors import FormatError
from msa_lite.io.files.reading import YAML_LIMIT, parse_yaml, read_text
from msa_lite.io.finished.seal import CARD_FILE
from msa_lite.report.run.choice import value_text
from msa_lite.report.tables.formats import escape_markdown, markdown
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import Metric, Report, reports_table

PAPER_TITLE = "Revisiting the Past: Data Unlearning with Model State History"
AUTHORS = ("Keivan Rezaei", "Mehrdad Saberi", "Abhilasha Ravichander", "Soheil Feizi")
PAPER_URL = "https://arxiv.org/abs/2506.20941"
PAPER = f"{', '.join(AUTHORS)}: {PAPER_TITLE}. arXiv 2506.20941"
SWITCH = (
    "This adapter is a switch, not a removal: without it, everybody has the former model. Its factors also hold what "
    "was learnt from the data, and can put it back."
)
UNDO = (
    "This is a vector or a tuned model: it holds what a model learns from certain data. **Whoever has it can put that "
    "data back** into a model that it was removed from, or find out about it."
)
_UNSCORED = "No scores are stored with this model, so this card cannot say how much was forgotten and what was kept."
_EDITED = "The weights were edited, not trained again without the data."
_LIMITS = (
    "The scores are evidence, no proof that the data has no influence left.",
    "Other prompts, further fine-tuning and 4-bit quantisation may bring some of it back. No score on this card "
    "tests that.",
    "Only the questions and texts behind the scores were tested, in their own words and language.",
    "Whoever has the model before and this one has their difference. Membership of removed rows has been read from "
    "unlearned models with up to 99 % accuracy (FUMA, EMNLP 2025).",
)
_TAGS = ("machine-unlearning", "llm-unlearning", "unlearn")
_TASK = "text-generation"
_SYMBOLS = {"forget": "θ_1", "retain": "θ_2"}
_LONGEST_CARD = 4 << 20  # bytes
_BLOCK = re.compile(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_WORD = re.compile(r"[\w.+-]{1,60}")
_LINK = re.compile(r"https?://[\w.-]+/[^\s\"'<>\\]{0,300}|(?:LICENSE|NOTICE)[\w.-]{0,40}")


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


def model_card(manifest: Mapping[str, Any], place: str | None = None) -> str:
    """Return the README.md of a model or adapter folder (or of a vector's) from its manifest.

    place: the repository to load the model from, in the card's example. Before the run ends the manifest has no
    `outcome`; the card then says that nothing was scored.
    """
    outcome = manifest.get("outcome") or {}
    if manifest["kind"] == "vector":
        rank = manifest["inputs"].get("settings", {}).get("lora_rank")
        what = f"A LoRA adapter of rank {rank}, fitted on a checkpoint" if rank else "A whole checkpoint"
        title, parts = "vector", ["# Vector of msa-lite", UNDO, f"{what}. Made with {_versions(manifest)}."]
    else:
        is_adapter, target = manifest["kind"] == "adapter", hub_name(manifest, "target")
        title = f"{target[0].rpartition('/')[2]}, unlearned" if target else "Unlearned model"
        title += " (adapter)" if is_adapter else ""
        sections = {
            "What this is": _about(manifest),
            "What was removed": _removed(manifest, outcome),
            "Scores": _scores(outcome),
            "How the strengths were chosen": _choice(outcome),
            "How much of the update is in the weights": _fidelity(manifest),
            "Limits": [_bullets([*([] if is_adapter else [_EDITED]), *_LIMITS])],
            "How to load it": [_loading(manifest, place or "PATH/TO/THIS/FOLDER")],
            "Where it comes from": _provenance(manifest),
        }
        parts = [f"# {title}", *_lead(manifest, outcome)]
        for heading, paragraphs in sections.items():
            parts += [f"## {heading}", *paragraphs] if paragraphs else []
    return _front_matter(manifest, title) + "\n" + "\n\n".join(parts) + "\n"


def _front_matter(manifest: Mapping[str, Any], title: str) -> str:
    """Return the YAML between two lines of dashes, which the Hub reads.

    The base model is named where the manifest names a repository, the licence where the target's own card has one.
    """
    from huggingface_hub.repocard_data import EvalResult, ModelCardData

    outcome, target = manifest.get("outcome") or {}, hub_name(manifest, "target")
    lora = manifest["kind"] == "vector" and manifest["inputs"].get("settings", {}).get("mode") != "full"
    is_adapter = manifest["kind"] == "adapter" or lora
    values = {name: models.get("unlearned", {}).get("value") for name, models in _main_metrics(outcome).items()}
    dataset, _, revision = outcome.get("dataset", "").partition("@")
    results = [
        EvalResult(
            task_type=_TASK,
            dataset_type=dataset or str(outcome.get("benchmark")),
            dataset_name=_benchmark_title(outcome),
            dataset_split=outcome.get("split"),
            dataset_revision=revision or None,
            metric_type=name,
            metric_name=metric_kind(name).heading,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in values.items()
        if value is not None
    ]
    facts: dict[str, Any] = {"pipeline_tag": _TASK} | dict(manifest.get("target_card", {}))
    if target:
        facts |= {"base_model": target[0], "base_model_relation": "adapter" if is_adapter else "finetune"}
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        tags=[*_TAGS, *(["model-state-arithmetic"] if outcome.get("method") in (None, "msa") else [])],
        eval_results=results or None,
        model_name=title if results else None,
        **facts,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _benchmark_title(outcome: Mapping[str, Any]) -> str:
    """Return the name of an outcome's benchmark for people."""
    benchmark = str(outcome.get("benchmark"))
    if benchmark == OWN:
        return "own questions and texts"
    return BENCHMARKS[benchmark].summary.partition(",")[0] if benchmark in BENCHMARKS else benchmark


def _main_metrics(outcome: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metrics that matter most, by name and model; all where the outcome does not say which."""
    metrics = outcome.get("metrics", {})
    return {name: metrics[name] for name in outcome.get("main", ()) if name in metrics} or dict(metrics)


def _lead(manifest: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
    """Return the first paragraphs: the outcome in a sentence, and what speaks against it."""
    lines = [_plain(outcome["sentence"])] if outcome else [_UNSCORED]
    if outcome.get("verdict"):
        lines.append(f"Verdict: **{_plain(outcome['verdict'])}**. {_plain(outcome.get('basis') or '')}".rstrip())
    if reasons := outcome.get("reasons"):
        lines.append(_bullets(f"{_capital(_plain(reason))}." for reason in reasons))
    return [*lines, SWITCH] if manifest["kind"] == "adapter" else lines


def _about(manifest: Mapping[str, Any]) -> list[str]:
    """Return what was done, with the formula and its numbers."""
    method, terms = (manifest.get("outcome") or {}).get("method"), manifest["terms"]
    if "checkpoint" in manifest["inputs"]:
        return [
            f"Another method, {_plain(method)}, was to remove the influence of some training data from "
            f"{_shown(manifest, 'target')}. This is its result. It was not made by msa-lite, which saw the finished "
            "checkpoint alone and was told nothing of its training."
        ]
    is_adapter, names = manifest["kind"] == "adapter", [term["name"] for term in terms]
    is_msa = all(side_of(term) in _SYMBOLS for term in terms) and method in (None, "msa")
    if is_msa:
        how = "Model State Arithmetic: no training of this model, only arithmetic on weights"
    elif method == "task_vector":
        how = "Task Vector: arithmetic on weights, with what further training changed in a copy of it"
    else:
        how = f"the baseline {method or ' and '.join(names)}"
    what = "an update, as one LoRA adapter, of" if is_adapter else "an edited copy of"
    lines = [
        f"This is {what} {_shown(manifest, 'target')}. The influence of some training data was to be removed from it "
        f"by {how}."
    ]
    if not terms:
        return [*lines, "No vector was applied: the weights are those of the model before."]
    plain = set(names) <= _SYMBOLS.keys()
    symbols = [_SYMBOLS[name] if plain else f"θ_{i + 1}" for i, name in enumerate(names)]
    start = "θ_D" if method == "task_vector" else "θ_0"  # a task vector is its own prior
    legend = ["θ_D is the model before" + ("" if start == "θ_D" else ", θ_0 the checkpoint that tuning started from")]
    formula, filters = "θ_u = θ_D", set()
    for symbol, term in zip(symbols, terms, strict=True):
        formula += f" {'−' if term['weight'] < 0 else '+'} {abs(term['weight']):g} · ({symbol} − {start})"
        if "filter" in term:
            formula += " F"
            filters.add(f"{term['filter']:g}")
        legend.append(f"{symbol} the same after tuning on {_tuned_on(term)}")
    if filters:
        legend.append(
            "F a filter of each linear layer, s C_f (C_f + λ C_r)⁻¹ by the second moments of its inputs on data to "
            f"remove and to keep, s one number for all layers, λ = {' and '.join(sorted(filters))}"
        )
    result = "θ_u is the model before with this adapter on it" if is_adapter else "θ_u is this model"
    source = [f"The method is from [{PAPER}]({PAPER_URL})."] if is_msa else []
    return [*lines, f"```text\n{formula}\n```", f"{', '.join(legend)}. {result}.", *source]


def side_of(term: Mapping[str, Any]) -> str:
    """Return "forget" or "retain", also for one of several vectors on a side; else the name of a baseline."""
    return str(term["name"]).partition(" ")[0]


def _tuned_on(term: Mapping[str, Any]) -> str:
    sides = {"forget": "data to remove", "retain": "data to keep"}
    number = term["name"].partition(" ")[2]
    text = sides.get(side_of(term), f"the objective of {_plain(term['name'])}")
    return f"{text} ({side_of(term)} set {number})" if number else text


def _removed(manifest: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
    """Return what was removed, in counts alone, and how the vectors were fitted."""
    rows, fits = outcome.get("rows", {}), outcome.get("fits", {})
    counts = {"forget": "to remove", "retain": "to keep, of which the retain vector was made"}
    lines = [f"{rows[name]} rows {what}." for name, what in counts.items() if rows.get(name) is not None]
    others = sum(side_of(term) == "forget" for term in manifest["terms"]) - 1
    if others > 0 and outcome:
        requests = "an earlier request" if others == 1 else f"{others} earlier requests"
        lines.append(f"The rows of {requests}, removed by the same merge; they are not among these counts and scores.")
    if again := outcome.get("earlier"):
        lines.append(_plain(again))
    for name, fit in fits.items():
        size = f"LoRA of rank {fit['lora_rank']}" if fit.get("lora_rank") else "all weights"
        epochs, rate = f"{fit['epochs']:g} epochs", f"learning rate {fit['learning_rate']:g}"
        lines.append(f"{_capital(name)} vector: {size}, {epochs}, {rate}.")
    apart = "The data itself is not part of this card, nor are its names."
    return [_bullets([*lines, apart])] if lines else []


def _scores(outcome: Mapping[str, Any]) -> list[str]:
    """Return the table of the main metrics: before, unlearned, ideal."""
    metrics, reports = _main_metrics(outcome), {}
    for model, heading in {"target": "before", "unlearned": "unlearned", "ideal": "ideal"}.items():
        if values := {name: Metric(**models[model]) for name, models in metrics.items() if model in models}:
            reports[heading] = Report(outcome["benchmark"], outcome["split"], values)
    if not reports:
        return []
    ideal = "No ideal (a model that never saw the data) was given, so there is no aim for the forget scores."
    if "ideal" in reports:
        ideal = "*Ideal* is a model that never saw the data."
    rows = f"{_capital(_benchmark_title(outcome))}, {_plain(outcome['split'])} rows."
    table = markdown(reports_table(reports)).rstrip("\n")
    return [f"{rows} *Before* is the model that was edited. {ideal}", table]


def _choice(outcome: Mapping[str, Any]) -> list[str]:
    """Return how the strengths were chosen."""
    sweep, chosen = outcome.get("sweep"), outcome.get("chosen", {})
    values = ", ".join(f"{_plain(key)} = {_plain(value_text(value))}" for key, value in chosen.items())
    text = f"They were set by hand: {values}."
    if sweep:
        text = (
            f"By the rule {_plain(sweep['rule'])}, among {len(sweep['points'])} points, on {_plain(sweep['split'])} "
            f"rows, which are not among those of the scores above. Chosen: {values}."
        )
    return [text] if values else []


def _fidelity(manifest: Mapping[str, Any]) -> list[str]:
    """Return how much of the update is in the stored weights, and how alike several vectors are."""
    change, lines = manifest.get("change", {}), []
    touched = change.get("weights_touched")
    if manifest["kind"] == "adapter":
        lost = change.get("truncation_loss", 0.0)
        cut = f"truncation lost {lost:.2%} of it" if lost else "nothing of it was cut"
        lines.append(
            f"One LoRA adapter in float32 on {change.get('modules')} modules, rank {change.get('rank')}; {cut}."
        )
    elif touched:
        share, tensors = change["weights_changed"] / touched, change.get("tensors_touched")
        lines.append(f"{share:.2%} of {touched:,} weights in {tensors} tensors changed.")
        texts = {  # the loss is not known of a merge by mergekit
            "rounding_loss": "Rounding to the stored precision lost {:.2%} of the update.",
            "relative_size": "The update's norm is {:.2%} of the norm of these weights.",
            "update_cosine": "Cosine of the wanted and the stored update: {:.4f}.",
        }
        lines += [text.format(change[key]) for key, text in texts.items() if change.get(key) is not None]
    for pair in manifest.get("interference") or ():
        if pair.get("cosine") is not None:
            lines.append(f"{_plain(pair['one'])} and {_plain(pair['other'])}: cosine {pair['cosine']:.3f}.")
    return [_bullets(lines)] if lines else []


def _loading(manifest: Mapping[str, Any], place: str) -> str:
    """Return Python that loads the model."""
    if manifest["kind"] != "adapter":
        return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "{place}"
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
```"""
    target = hub_name(manifest, "target")
    name = f'"{target[0]}", revision="{target[1]}"' if target else '"PATH/TO/THE/MODEL/BEFORE"'
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

before = AutoModelForCausalLM.from_pretrained({name}, dtype="auto")
model = PeftModel.from_pretrained(before, "{place}")
```"""


def _provenance(manifest: Mapping[str, Any]) -> list[str]:
    """Return models, vectors and tools with their revisions, and the licence."""
    inputs, sources = manifest["inputs"], manifest.get("sources", {})
    roles = {"target": "model before (θ_D)", "prior": "earlier checkpoint (θ_0)", "checkpoint": "this model, as given"}
    if (inputs.get("prior"), sources.get("prior")) == (inputs.get("target"), sources.get("target")):
        del roles["prior"]
    rows = [(what, _shown(manifest, role), role) for role, what in roles.items() if role in inputs]
    rows += [(f"{_plain(term['name'])} vector", "not part of this", term["name"]) for term in manifest["terms"]]
    lines = [
        f"| {what} | {shown} | `{_short(inputs.get(key, {}).get('revision', '–'))}` |" for what, shown, key in rows
    ]
    licence = manifest.get("target_card", {}).get("license")
    named = " and ".join(licence) if isinstance(licence, list) else licence
    owner = "Licence: unknown, because the card of the model before names none; ask its owner."
    return [
        "\n".join(["| | | revision |", "|---|---|---|", *lines]),
        f"Licence: that of the model before, {_plain(named)}." if named else owner,
        f"Made with {_versions(manifest)}.",
    ]


def hub_name(manifest: Mapping[str, Any], role: str) -> tuple[str, str] | None:
    """Return (repository, commit) of a model that a merge used, "target" or "prior".

    None for a folder of this machine, and where the manifest does not name the repository.
    """
    name, revision = manifest.get("sources", {}).get(role), manifest["inputs"].get(role, {}).get("revision", "")
    return (name.partition("@")[0], revision) if name and not is_local(revision) else None


def is_local(revision: str) -> bool:
    """Check whether a revision is of a folder's content, no commit of a repository."""
    return revision.startswith(("sha256:", "files:"))


def _shown(manifest: Mapping[str, Any], role: str) -> str:
    """Return a model's name with a link, or words in the place of one that is not to be told."""
    if name := hub_name(manifest, role):
        return f"[{name[0]}](https://huggingface.co/{name[0]})"
    local = is_local(manifest["inputs"].get(role, {}).get("revision", ""))
    return "a local model" if local else "a model whose name is not given"


def _short(revision: str) -> str:
    kind, colon, value = revision.rpartition(":")
    return f"{kind}{colon}{value[:12]}" if colon else value


def _versions(manifest: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _plain(text: Any) -> str:
    """Return text in one line, whose signs mean nothing to Markdown."""
    line = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return escape_markdown(" ".join(line.split()))
