"""Write the card (README.md) of a model or adapter folder from its manifest, so that a copied folder keeps its story.

The card is a function of the manifest alone, and holds no path of this machine, no row and no name of the data. It
names a model only if that is a repository of the Hub; what is published passes a manifest that names fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msa_lite.report.card.citation import PAPER, PAPER_URL
from msa_lite.report.card.front_matter import (
    CardOptions,
    benchmark_title,
    front_matter,
    hub_name,
    is_local,
    main_metrics,
)
from msa_lite.report.run.choice import score_heading, shown_score, value_text
from msa_lite.report.tables.formats import escape_markdown
from msa_lite.report.tables.reports import Metric, Report, markdown_table, number

NO_OPTIONS = CardOptions()
HIDDEN = "a model whose name is not given"
LOCAL = "a local model"
_COLUMNS = {"target": "before", "unlearned": "unlearned", "ideal": "ideal"}
_SYMBOLS = {"forget": "θ_1", "retain": "θ_2"}
SWITCH = (
    "This adapter is a switch, not a removal: without it, everybody has the former model. Its factors also hold what "
    "was learnt from the data, and can put it back."
)
UNDO = (
    "This is a vector or a tuned model: it holds what a model learns from certain data. **Whoever has it can put that "
    "data back** into a model that it was removed from, or find out about it."
)
_UNSCORED = "No scores are stored with this model, so this card cannot say how much was forgotten and what was kept."
_UNMET = "conditions not met"
_EDITED = "The weights were edited, not trained again without the data."
_LIMITS = (
    "The scores are evidence, no proof that the data has no influence left.",
    "Other prompts, further fine-tuning and 4-bit quantisation may bring some of it back. No score on this card "
    "tests that.",
    "Only the questions and texts behind the scores were tested, in their own words and language.",
    "Whoever has the model before and this one has their difference. Membership of removed rows has been read from "
    "unlearned models with up to 99 % accuracy (FUMA, EMNLP 2025).",
)


def model_card(manifest: Mapping[str, Any], options: CardOptions = NO_OPTIONS) -> str:
    """Return the README.md of a model or adapter folder (or of a vector's) from its manifest.

    Before the run ends the manifest has no `outcome`; the card then says that nothing was scored.
    """
    if manifest["kind"] == "vector":
        return _vector_card(manifest, options)
    outcome = manifest.get("outcome") or {}
    parts = [
        f"# {_title(manifest)}",
        *_lead(manifest, outcome),
        *_about(manifest),
        *_removed(manifest, outcome),
        *_scores(outcome),
        *_choice(outcome),
        *_fidelity(manifest),
        *_interference(manifest),
        "## Limits",
        _bullets([*([] if manifest["kind"] == "adapter" else [_EDITED]), *_LIMITS]),
        "## How to load it",
        _loading(manifest, options),
        "## Where it comes from",
        *_provenance(manifest),
    ]
    return front_matter(manifest, _title(manifest), options) + "\n" + "\n\n".join(parts) + "\n"


def _vector_card(manifest: Mapping[str, Any], options: CardOptions) -> str:
    """Return the card of a vector that its owner publishes all the same."""
    settings = manifest["inputs"].get("settings", {})
    facts = [f"made with {_versions(manifest)}"]
    rank = settings.get("lora_rank")
    facts.insert(0, f"a LoRA adapter of rank {rank}, fitted on a checkpoint" if rank else "a whole checkpoint")
    text = ["# Vector of msa-lite", UNDO, _bullets([f"{fact[0].upper()}{fact[1:]}." for fact in facts])]
    return front_matter(manifest, "vector", options) + "\n" + "\n\n".join(text) + "\n"


def _title(manifest: Mapping[str, Any]) -> str:
    target = hub_name(manifest, "target")
    what = f"{target[0].rpartition('/')[2]}, unlearned" if target else "Unlearned model"
    return f"{what} (adapter)" if manifest["kind"] == "adapter" else what


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
    is_msa = all(side_of(term) in _SYMBOLS for term in terms) and method in (None, "msa")
    is_own = method == "task_vector"  # its own prior
    how = "Model State Arithmetic: no training of this model, only arithmetic on weights" if is_msa else (
        "Task Vector: arithmetic on weights, with what further training changed in a copy of it" if is_own else
        f"the baseline {method or ' and '.join(term['name'] for term in terms)}"
    )  # fmt: skip
    start = "θ_D" if is_own else "θ_0"
    what = "an update, as one LoRA adapter, of" if manifest["kind"] == "adapter" else "an edited copy of"
    lines = [
        "## What this is",
        f"This is {what} {_shown(manifest, 'target')}. The influence of some training data was to be removed from it "
        f"by {how}.",
    ]
    if not terms:
        return [*lines, "No vector was applied: the weights are those of the model before."]
    formula = "θ_u = θ_D" + "".join(
        f" {'−' if term['weight'] < 0 else '+'} {abs(term['weight']):g} · ({_symbol(term['name'], terms)} − {start})"
        f"{' F' if 'filter' in term else ''}"
        for term in terms
    )
    legend = ["θ_D is the model before" + ("" if is_own else ", θ_0 the checkpoint that tuning started from")]
    legend += [f"{_symbol(term['name'], terms)} the same after tuning on {_tuned_on(term)}" for term in terms]
    if strengths := sorted({term["filter"] for term in terms if "filter" in term}):
        listed = " and ".join(f"{strength:g}" for strength in strengths)
        legend.append(
            "F a filter of each linear layer, C_f (C_f + λ C_r)⁻¹ by the second moments of its inputs on data to "
            f"remove and to keep, λ = {listed}"
        )
    is_update = manifest["kind"] == "adapter"
    result = "θ_u is the model before with this adapter on it" if is_update else "θ_u is this model"
    source = [f"The method is from [{PAPER}]({PAPER_URL})."] if is_msa else []
    return [*lines, f"```text\n{formula}\n```", f"{', '.join(legend)}. {result}.", *source]


def side_of(term: Mapping[str, Any]) -> str:
    """Return "forget" or "retain", also for one of several vectors on a side; else the name of a baseline."""
    return str(term["name"]).partition(" ")[0]


def _symbol(name: str, terms: list[dict[str, Any]]) -> str:
    names = [term["name"] for term in terms]
    return _SYMBOLS.get(name, "θ_1") if set(names) <= {*_SYMBOLS} else f"θ_{names.index(name) + 1}"


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
    if not lines:
        return []
    return ["## What was removed", _bullets([*lines, "The data itself is not part of this card, nor are its names."])]


def _scores(outcome: Mapping[str, Any]) -> list[str]:
    """Return the table of the main metrics: before, unlearned, ideal."""
    metrics = main_metrics(outcome)
    if not metrics:
        return []
    present = [model for model in _COLUMNS if any(model in models for models in metrics.values())]
    reports = {_COLUMNS[model]: _report(outcome, metrics, model) for model in present}
    ideal = (
        "*Ideal* is a model that never saw the data."
        if "ideal" in present
        else "No ideal (a model that never saw the data) was given, so there is no aim for the forget scores."
    )
    return [
        "## Scores",
        f"{_capital(benchmark_title(outcome))}, {_plain(str(outcome['split']))} rows: mean ± standard error. ↑ higher, "
        f"↓ lower is better. *Before* is the model that was edited. {ideal}",
        markdown_table(reports).rstrip("\n"),
    ]


def _report(outcome: Mapping[str, Any], metrics: Mapping[str, Any], model: str) -> Report:
    values = {name: Metric(**models[model]) for name, models in metrics.items() if model in models}
    return Report(outcome["benchmark"], outcome["split"], values)


def _choice(outcome: Mapping[str, Any]) -> list[str]:
    """Return how the strengths were chosen."""
    sweep, chosen = outcome.get("sweep"), outcome.get("chosen", {})
    values = ", ".join(f"{_plain(key)} = {_plain(value_text(value))}" for key, value in chosen.items())
    if not sweep:
        return ["## How the strengths were chosen", f"They were set by hand: {values}."] if values else []
    rule, points = sweep["rule"], sweep["points"]
    keys = list(dict.fromkeys(key for point in points for key in point["values"]))
    lines = [f"| {' | '.join(map(_plain, keys))} | {_plain(score_heading(rule))} |", "|" + "---:|" * (len(keys) + 1)]
    for point in points:
        bold = "**" if point["values"] == chosen else ""
        cells = [_plain(value_text(point["values"].get(key, ""))) for key in keys]
        score = shown_score(point["score"], point["met"])
        cells.append("broken" if point["score"] is None else _UNMET if score is None else number(score))
        lines.append(f"| {' | '.join(f'{bold}{cell}{bold}' if cell else '' for cell in cells)} |")
    return [
        "## How the strengths were chosen",
        f"By the rule {_plain(rule)}, among {len(points)} points, on {_plain(sweep['split'])} rows, which are "
        f"not among those of the scores above. Chosen: {values}.",
        "\n".join(lines),
    ]


def _fidelity(manifest: Mapping[str, Any]) -> list[str]:
    """Return how much of the update is in the stored weights."""
    change = manifest.get("change", {})
    if manifest["kind"] == "adapter":
        lost = change.get("truncation_loss", 0.0)
        cut = f"truncation lost {lost:.2%} of it" if lost else "nothing of it was cut"
        text = f"One LoRA adapter in float32 on {change.get('modules')} modules, rank {change.get('rank')}; {cut}."
        return ["## How much of the update is in this adapter", text]
    touched, tensors = change.get("weights_touched"), change.get("tensors_touched")
    if not touched:
        return []
    lines = [
        f"{change['weights_changed'] / touched:.2%} of {touched:,} weights in {tensors} tensors changed",
    ]
    if "rounding_loss" in change:  # not known of a merge by mergekit
        lines.append(f"rounding to the stored precision lost {change['rounding_loss']:.2%} of the update")
    if change.get("relative_size") is not None:
        lines.append(f"the update's norm is {change['relative_size']:.2%} of the norm of these weights")
    if change.get("update_cosine") is not None:
        lines.append(f"cosine of the wanted and the stored update: {change['update_cosine']:.4f}")
    return ["## How much of the update the rounding kept", _bullets(f"{_capital(line)}." for line in lines)]


def _interference(manifest: Mapping[str, Any]) -> list[str]:
    """Return how alike the vectors are, where several were merged."""
    pairs = [pair for pair in manifest.get("interference") or () if pair.get("cosine") is not None]
    if not pairs:
        return []
    lines = [f"{_plain(pair['one'])} and {_plain(pair['other'])}: cosine {pair['cosine']:.3f}." for pair in pairs]
    return ["## How alike the vectors are", _bullets(lines)]


def _loading(manifest: Mapping[str, Any], options: CardOptions) -> str:
    """Return Python that loads the model."""
    place = options.place or "PATH/TO/THIS/FOLDER"
    if manifest["kind"] != "adapter":
        return _code(
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f'place = "{place}"', "tokenizer = AutoTokenizer.from_pretrained(place)",
            'model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")',
        )  # fmt: skip
    target = hub_name(manifest, "target")
    name = f'"{target[0]}", revision="{target[1]}"' if target else '"PATH/TO/THE/MODEL/BEFORE"'
    return _code(
        "from peft import PeftModel", "from transformers import AutoModelForCausalLM", "",
        f'before = AutoModelForCausalLM.from_pretrained({name}, dtype="auto")',
        f'model = PeftModel.from_pretrained(before, "{place}")',
    )  # fmt: skip


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _provenance(manifest: Mapping[str, Any]) -> list[str]:
    """Return models, vectors and tools with their revisions, and the licence."""
    inputs, lines = manifest["inputs"], []
    same = [(inputs.get(role), manifest.get("sources", {}).get(role)) for role in ("target", "prior")]
    for role, what in {"target": "model before (θ_D)", "prior": "earlier checkpoint (θ_0)"}.items():
        if role in inputs and (role == "target" or same[0] != same[1]):
            lines.append(f"| {what} | {_shown(manifest, role)} | `{_short(inputs[role].get('revision', '–'))}` |")
    for term in manifest["terms"]:
        revision = inputs.get(term["name"], {}).get("revision", "–")
        lines.append(f"| {_plain(term['name'])} vector | not part of this | `{_short(revision)}` |")
    licence = manifest.get("target_card", {}).get("license")
    named = " and ".join(licence) if isinstance(licence, list) else licence
    return [
        "\n".join(["| | | revision |", "|---|---|---|", *lines]),
        f"Licence: that of the model before, {_plain(named)}."
        if named
        else "Licence: unknown, because the card of the model before names none; ask its owner.",
        f"Made with {_versions(manifest)}.",
    ]


def _shown(manifest: Mapping[str, Any], role: str) -> str:
    """Return a model's name with a link, or words in the place of one that is not to be told."""
    if name := hub_name(manifest, role):
        return f"[{name[0]}](https://huggingface.co/{name[0]})"
    return LOCAL if is_local(manifest["inputs"].get(role, {}).get("revision", "")) else HIDDEN


def _short(revision: str) -> str:
    kind, colon, value = revision.rpartition(":")
    return f"{kind}{colon}{value[:12]}" if colon else value


def _versions(manifest: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())


def _bullets(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _plain(text: str) -> str:
    """Return text in one line, whose signs mean nothing to Markdown."""
    line = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return escape_markdown(" ".join(line.split()))
