"""The page of the files of a run, of a training and of a manifest. Names stand here as the code defines them.

`tests/e2e/test_report.py` compares both tables with the folder of a finished run.
"""

from __future__ import annotations

from msa_lite.evals.scores.evaluation import PROMPTS_FILE
from msa_lite.evals.scores.records import ANSWERS_FILE
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, MERGEKIT_FILE
from msa_lite.io.weights.adapter import ADAPTER_CONFIG
from msa_lite.pipeline.prepare.models import WRITTEN_OUT
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.run.folder import BASELINES, HISTORY, TRACKING
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE
from msa_lite.report.run.attacks import ATTACKS_FOLDER
from msa_lite.report.run.choice import CHOICE_FILE, CHOICE_TABLE
from msa_lite.report.run.evidence import EVIDENCE_FOLDER
from msa_lite.report.run.provenance import PAGE_FILE, PURGED_FILE, RECIPE_FILE
from msa_lite.report.run.stages import STAGES_FILE
from msa_lite.report.tables.reports import REPORT_FILE
from msa_lite.report.verdict.verdict import VERDICT_FILE
from msa_lite.train.fit.loop import LOG
from msa_lite.train.fit.until import COURSE
from tests.tools.arrows import ROOT
from tests.tools.pages.tables import code, table

_EVALUATIONS = "evaluation/{target,prior,ideal,unlearned}"
_EARLIER = "evaluation/earlier/*"
# Pattern of a path in the run's folder, in the way of fnmatch with {a,b} → (whether it holds the data, its content).
RUN: dict[str, tuple[bool, str]] = {
    PAGE_FILE: (False, "The report, for a browser"),
    REPORT_FILE: (False, "The same for programs; [its keys](report.md)"),
    VERDICT_FILE: (False, "PASS, PARTLY or FAIL, with the sentence, the criteria and the counts"),
    RECORD_FILE: (False, "The [removal record](removal-record.md)"),
    KEY_FILE: (False, "The key of the hashed rows in the record. With it, guesses about the rows can be "
    "confirmed: only for an auditor whom you trust"),
    SIGNATURE_FILE: (False, "Your signature of the record, if you signed it"),
    RECIPE_FILE: (False, "The recipe as resolved: defaults filled in, revisions pinned"),
    STAGES_FILE: (False, "The list of the stages, and where each lies"),
    PROMPT_FILE: (True, "With `prompt: auto`: the target's score in each form"),
    ANSWERS_FILE: (True, "What models answered and how they scored texts, so that all runs of the recipe ask it "
    "once"),
    "moments/*": (True, "With `merge.filter`, until the vectors are filtered: roots of the second moments of the "
    "inputs of the target's layers, on forget and retain rows, in fp32"),
    "vectors/start/*": (True, "With `vector.start: retain` and an adapter: prior and retain vector merged"),
    "vectors/*-filter-*/*": (True, "With `merge.filter`: the forget vector, or a baseline's chosen change, filtered "
    "with this λ"),
    "vectors/{forget,retain}/*": (True, "A vector: a PEFT adapter (`adapter_model.safetensors`, "
    f"`{ADAPTER_CONFIG}`), or with `vector.mode: full` a checkpoint. `{LOG}`: loss and learning rate "
    f"of each step. `{COURSE}`: losses while the fit decided when to end. `rows.jsonl`: hashes of the rows that "
    "were learnt"),
    "model/*": (False, "The unlearned model: the target's files under the same names"),
    f"model/{CARD_FILE}": (False, "Its card for the Hub"),
    f"model/{MERGEKIT_FILE}": (False, "The same merge as a recipe for mergekit"),
    "adapter/*": (False, "With `merge.as: adapter`: the update as one adapter, in place of `model/`. Whoever has it "
    "can reverse it"),
    f"sweep/{CHOICE_FILE}": (False, "The chosen point, the rule and the doubts"),
    f"sweep/{CHOICE_TABLE}": (False, "All points with their metrics"),
    f"sweep/*/{REPORT_FILE}": (False, "The metrics of a point, on the rows that decide; in `target`, `prior` and "
    "`ideal`, those of that model"),
    f"epochs/*/**/{REPORT_FILE}": (False, "For a baseline with `start: prior`: the metrics of each epoch of a setting; "
    "not all weights stay"),
    "epochs/**/*.jsonl": (True, "The records of these rows"),
    "sweep/*/*.jsonl": (True, "The records of these rows, one a line"),
    f"{_EVALUATIONS}/{REPORT_FILE}": (False, "The metrics of a model on the rows that give the final scores. Folders "
    "that end in `_validation` have those of the rows that decide"),
    f"evaluation/knowledge/*/{REPORT_FILE}": (False, "The check before the fits: how well target and prior know the "
    "rows. After a refusal, only `evaluation/knowledge/` stays"),
    "evaluation/knowledge/*/*.jsonl": (True, "The records of that check"),
    f"{_EARLIER}/{REPORT_FILE}": (False, "With `earlier`: the metrics of a model on rows of earlier requests"),
    f"{_EARLIER}/*.jsonl": (True, "The records of these rows; they belong to other runs"),
    f"{_EVALUATIONS}/*.jsonl": (True, "The records of these rows: question, answer, generated answer, scores, the "
    "judge's letters and its candidates"),
    f"{_EVALUATIONS}/{PROMPTS_FILE}": (True, "With `evaluate.judge.prompts`: a copy of that file"),
    f"{EVIDENCE_FOLDER}/*/{REPORT_FILE}": (False, "The figures of each kind of evidence"),
    f"{EVIDENCE_FOLDER}/*/*.jsonl": (True, "The evidence for each row, without its text"),
    f"probe/**/{REPORT_FILE}": (False, "Whether a model has seen the forget set before"),
    "probe/**/*.jsonl": (True, "The records of the probe"),
    f"{BASELINES}/METHOD/": (True, "The run of `msa-lite baseline METHOD`; a folder like this one"),
    f"{ATTACKS_FOLDER}/": (True, "With `msa-lite attack`: each attack's report, its answers, and rows in other words"),
    f"{HISTORY}/": (True, "With `demo:`: the models and rows that the run made first"),
    f"{{{','.join(WRITTEN_OUT)}}}/": (True, "A target or prior that was a LoRA adapter, merged into its base"),
    f"{TRACKING}/": (False, "The files of `track: tensorboard` and `mlflow`"),
    PURGED_FILE: (False, "The files that `msa-lite purge` removed, and when"),
}  # fmt: skip
# Key of a manifest → its content. The first ones stand in every manifest.
KEYS = {
    "made_by": "`msa-lite`",
    "kind": "The kind of folder: `model`, `adapter`, `vector`, `evaluation`, …",
    "inputs": "Everything that decides the content: revisions or hashes of models, a hash of the rows, settings, α and "
    "β. A rerun does a stage again if one of them differs",
    "files": "SHA-256 and size of every file; `msa-lite verify` compares them",
    "versions": "The versions of msa-lite and of the packages that decide the numbers",
    "format": "The version of the manifest's format",
    "manifest_sha256": "The hash of the manifest itself, with this value empty",
}
FACTS = {
    "sources": "The names of the models as the recipe has them",
    "terms": "model, adapter: each vector with its weight in the sum",
    "change": "model: how many weights changed, and how much of the update the rounding lost",
    "fidelity": "model: the loss by rounding, in total and for each tensor",
    "forms": "model: the stored form of each model that is stored as codes and scales (target, prior, forget, …)",
    "mergekit": "model: whether mergekit can do the same merge (`mergekit_config.yml`)",
    "target_card": "model, adapter: licence and languages from the target's card",
    "outcome": "model, adapter: the sentence, scores and counts of the run, for the card",
    "layers": "moments: the measured layers, each with the layer or the experts whose roots it uses",
    "filter": "vector: λ, the number of filtered layers, and the scalar s by which they were multiplied",
    "rows": "vector: the number of rows that were learnt",
    "micro_batch_size": "vector: the number of rows in one forward pass",
    "fit": "vector: with `epochs: auto`, how the fit went: epochs, rates tried, losses, why it ended",
}
_PAGE = ROOT / "docs/reference/files.md"
_TABLES = "<!-- files: by python -m tests.tools.pages -->\n"  # the tables below it are the end of the page
_MANIFEST = f"""
## manifest.json

Every stage's folder has a `{MANIFEST}`, and so does each model that `msa-lite merge` writes.

"""
_TRAINING = """
## Files of a training

`msa-lite train` writes each stage's model, with a manifest, into `NUMBER-NAME/`. These models hold the data.
`history.yaml` beside them lists the checkpoints as a `history:` for the recipe of a run.
"""


def files_page() -> str:
    """Return the page of the files of a run and of the manifest."""
    run = [(code(pattern), content, "yes" if holds else "no") for pattern, (holds, content) in RUN.items()]
    keys = [(code(key), content) for key, content in (KEYS | FACTS).items()]
    return (
        _PAGE.read_text().split(_TABLES)[0]
        + _TABLES
        + "\n"
        + table(("file", "content", "holds the data"), run)
        + _MANIFEST
        + table(("key", "content"), keys)
        + _TRAINING
    )
