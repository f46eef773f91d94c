"""The form of record.json, as a closed schema.

It holds no text of a row, no path, and no hash of a row that could be guessed: those have a key, which stays in the
run's folder. The text below a field is its description in the JSON schema (schema.json, beside this file).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from msa_lite.closed import Closed

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Revision = Annotated[str, Field(pattern=r"^(sha256:)?[0-9a-f]{40,64}$")]
SEAL = "record_sha256"
INTERVAL = (
    "value ± 1.96 standard errors over the n scored items (normal approximation), not cut to the metric's range. Where "
    "all items score 0, or all 1, the half width is that of Wilson's interval; where they score alike otherwise, 0."
)


class FileHash(Closed):
    """A file."""

    sha256: Sha256
    """SHA-256 of its content."""
    bytes: int = Field(ge=0)
    """Its size."""


class Weights(Closed):
    """A model or vector, by its content."""

    name: str
    """Of a model: repo@commit, or "local folder". Of a vector: forget, retain, or the baseline that trained it."""
    revision: Revision
    """The commit of a Hub repository. Of a local folder: sha256: and the SHA-256 of the JSON object with the hashes of
    its files by name, with sorted keys and no blanks."""
    files: dict[str, FileHash]
    """Weights, config, tokenizer and the like, by name."""


class ModelWeights(Weights):
    """A model that the run read."""

    tokenizer: str | None = None
    """The revision of the tokenizer, where it is not the model's own."""


class VectorWeights(Weights):
    """A vector that was merged into the target."""

    weight: float
    """Its factor in the merge: −α of a forget vector, β of a retain vector, the scale of a baseline's."""


class ResultWeights(Weights):
    """The unlearned model, or the adapter that makes it of the target."""

    name: Literal["model", "adapter"]
    """model: a whole checkpoint. adapter: the update alone."""


class KeyedRows(Closed):
    """Keyed hashes of the rows that were to be forgotten: HMAC-SHA256 of a text, sorted, each once.

    Texts are in Unicode's form NFC, every run of white space is one blank, and none is at the ends. Signs that show
    nothing are left out: U+00AD, U+200B, U+200E, U+200F, U+202A to U+202E, U+2060 to U+2064, U+2066 to U+2069 and
    U+FEFF, at the ends also U+200C and U+200D. The HMAC's message is the UTF-8 of these lines, with a line feed between
    them and none at the end:

        row, the question, the answer       (a question with its answer; earlier turns of a conversation do not count)
        text, the text                      (a document)
        question, the question              (a question, whatever its answer)
        check                               (the key itself: shows whether a key is the right one)
    """

    algorithm: Literal["HMAC-SHA256"] = "HMAC-SHA256"
    """The function; its key has 32 random bytes and stays in record.key of the run's folder."""
    check: Sha256
    """The hash of the message `check`: a key with another one is not the record's."""
    rows: list[Sha256]
    """The hashes of whole rows: of `row` or `text`."""
    questions: list[Sha256]
    """The hashes of `question`."""


class RecordedMetric(Closed):
    """A metric of one model."""

    value: float | None
    """None where it cannot be given."""
    n: int
    """The scored items."""
    stderr: float | None
    """The standard error of the value."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval, made as `interval` of the scores says."""
    higher_is_better: bool | None
    """None where neither way is better."""


class RecordedScores(Closed):
    """The metrics on the rows that nothing was chosen by."""

    benchmark: str
    """The benchmark; qa: the run's own rows."""
    split: str
    """The rows that were scored."""
    interval: str
    """The way in which the intervals are made."""
    models: dict[str, dict[str, RecordedMetric]]
    """The metrics by model: target, ideal (a model that never saw the rows), unlearned."""


class RecordedBound(Closed):
    """A measured share."""

    value: float
    """The estimate."""
    low: float
    """Its lower one-sided 95 % bound."""
    high: float
    """Its upper one-sided 95 % bound."""


class RecordedEarlier(Closed):
    """The rows of earlier requests, asked again: a sample of at most 60, spread over all requests."""

    rows: int = Field(ge=0)
    """The rows that were asked."""
    total: int = Field(ge=0)
    """The rows that the earlier requests removed, as far as that is known."""
    requests: int = Field(ge=0)
    """The earlier requests."""
    unscored: int = Field(ge=0)
    """The requests of which rows could not be asked, since their data is gone or has changed."""
    control: Literal["ideal", "holdout", "prior"] | None
    """As of the verdict."""
    recited: dict[str, int]
    """Rows that each model recites; "holdout": holdout rows that the target recites."""
    excess: RecordedBound | None
    """The share of recited rows above the control's."""
    back: int = Field(ge=0)
    """Rows that come back: forgotten by the model of their own request, recited by this one, and not by a control that
    was asked the same rows."""


class Judgement(Closed):
    """The verdict on the run."""

    outcome: Literal["PASS", "PARTLY", "FAIL"] | None
    """None where there is no verdict."""
    sentence: str
    """The verdict on what was forgotten and kept, or the reason why there is none."""
    criteria: str = ""
    """The rule for the outcome."""
    reasons: list[str] = []
    """Reasons against PASS, and cautions."""
    control: Literal["ideal", "holdout", "prior"] | None = None
    """What the forget rows are held against: a model that never saw them, rows that no model saw, or the prior."""
    recited: dict[str, int] = {}
    """Forget rows that each model recites; "holdout": holdout rows that the target recites."""
    excess: RecordedBound | None = None
    """The share of recited forget rows above the control's."""
    left: dict[str, RecordedBound] = {}
    """By score: the part of the gap between target and control that is left."""
    kept: RecordedBound | None = None
    """The share that is kept of what the target knew of the retain rows, beyond unseen rows."""
    earlier: RecordedEarlier | None = None
    """What became of the rows of earlier requests; None without such requests, or where nothing is scored."""


class RecordedAttack(Closed):
    """An attack on the unlearned model (`msa-lite attack`)."""

    name: str
    """Its name: membership, prompt, sample, quantise, relearn, depth."""
    control: Literal["ideal", "holdout"]
    """What the result is beyond: the same attack on the ideal, or on rows that no model saw."""
    trial: str
    """The strongest of its trials."""
    share: float | None
    """What came back beyond the control, of what the target shows beyond it; below 0 where the attack overshoots. None
    where the target shows no more."""
    interval: tuple[float, float] | None
    """The 95 % interval of `share`, by a bootstrap over rows."""
    rows: int = Field(ge=0)
    """The rows that it rests on."""
    outcome: Literal["leaks", "overshoots", "no sure gain", "unclear", "holds", "silent"]
    """leaks: more than 20 %, the interval lies above 5 %, and that of the gain over what is left without the attack
    above 0. no sure gain: as much, but the gain is not surely above 0. overshoots: as much below the control, where the
    rows look less known than they should. holds: the interval ends at 20 % or below. silent: nothing could be told.
    unclear: all else."""


class RecordedEvidence(Closed):
    """A finding on the unlearned model beside its scores."""

    kind: str
    """says: what it says in the place of a forgotten answer. nearer: whether it is nearer to a model that never saw the
    rows, or to the target. weights: whether the weights changed that hold the rows."""
    outcome: str
    """The answer in a few words; undecided where the data could not tell."""
    sentence: str
    """The answer in a sentence."""
    control: str | None
    """The model that the unlearned one is held against: ideal or prior; None without any."""
    rows: int = Field(ge=0)
    """The forget rows that it rests on."""
    figures: dict[str, float]
    """Its figures of the unlearned model, by the names of docs/reference/metrics.md."""


class EarlierRecord(Closed):
    """An earlier request whose vectors are part of the result."""

    request: str | None
    """Its id."""
    record_sha256: Sha256 | None
    """SHA-256 of its record.json. None where it has none: an earlier version of msa-lite made the run."""


class Removal(Closed):
    """The removal record of one run of msa-lite: what was to be forgotten, what came out, and how to check it."""

    format: Literal[1] = 1
    """The version of this form."""
    made_by: Literal["msa-lite"] = "msa-lite"
    """The program."""
    request: str | None
    """The id of the request, from the recipe's key `request`."""
    method: str
    """msa, or the name of a baseline."""
    formula: str
    """The merge in one line. θ_D: target. θ_0: prior. θ_1 and θ_2: the prior tuned on forget and retain set."""
    strengths: dict[str, float | int | str | bool]
    """alpha and beta of this request; of a baseline all that was chosen."""
    started: Time
    """The time (UTC) at which the run began, or its first stage was done, if that is earlier."""
    finished: Time
    """The time at which its last stage was done."""
    stages: dict[str, Time]
    """The time at which each stage was done, by its folder; from its files."""
    models: dict[str, ModelWeights]
    """target, prior (not where the target itself was tuned) and ideal (where there is one)."""
    vectors: list[VectorWeights]
    """The vectors of the merge, in the manifest's order."""
    result: ResultWeights
    """The unlearned model."""
    row_counts: dict[str, int]
    """The rows that each vector learnt: forget, retain."""
    forget_rows: KeyedRows
    """The rows to forget."""
    verdict: Judgement
    """The verdict."""
    scores: RecordedScores | None
    """The metrics; None where nothing was scored."""
    attacks: list[RecordedAttack] | None = None
    """The attacks on the unlearned model; None where none was made."""
    evidence: list[RecordedEvidence] = []
    """What was found beside the scores."""
    versions: dict[str, str]
    """The versions of the software that made the result."""
    earlier: list[EarlierRecord]
    """Earlier requests whose vectors are part of the result, in the recipe's order."""
    previous_sha256: Sha256 | None
    """SHA-256 of the record.json of the last of these; None for the first request."""
    record_sha256: str = Field("", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of this file with this value empty: shows a change of the file. A signature shows a forged one."""


def removal_schema() -> dict[str, Any]:
    """Return the JSON schema of record.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Removal.model_json_schema()}
