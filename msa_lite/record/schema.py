"""The form of record.json, as a closed schema.

It holds no text of a row, no path, and no hash of a row that could be guessed: those have a key, which stays in the
run's folder. The text below a field is its description in the JSON schema (schema.json, beside this file).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from msa_lite.io.files.schema import Closed, json_schema

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Revision = Annotated[str, Field(pattern=r"^(sha256:)?[0-9a-f]{40,64}$")]
SEAL = "record_sha256"


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
    files: dict[str, FileHash]
    """Weights, config, tokenizer and the like, by name."""
    published: dict[str, Sha256] = Field(default_factory=dict)
    """SHA-256, by name, of files that `msa-lite publish` changes: it leaves names of private models and folders out."""


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


class Judgement(Closed):
    """The verdict on the run; verdict.json has its figures."""

    outcome: Literal["PASS", "PARTLY", "FAIL"] | None
    """None where there is no verdict."""
    sentence: str
    """The verdict on what was forgotten and kept, or the reason why there is none."""


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
    """The time (UTC) at which the run began; of one that was stopped, at which it went on."""
    finished: Time
    """The time at which the run was done."""
    models: dict[str, ModelWeights]
    """target, prior (not where the target itself was tuned); ideal, checkpoint (another method's), if there is one."""
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
    files: dict[str, Sha256]
    """SHA-256 of the run's own files by name: recipe, verdict, findings of attacks, report, and the manifest of the
    unlearned model. A report that shows rows holds random digits, so that its hash confirms no guess."""
    earlier: list[EarlierRecord]
    """Earlier requests whose vectors are part of the result, in the recipe's order."""
    previous_sha256: Sha256 | None
    """SHA-256 of the record.json of the last of these; None for the first request."""
    record_sha256: str = Field("", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of this file with this value empty: shows a change of the file. A signature shows a forged one."""


def removal_schema() -> dict[str, Any]:
    """Return the JSON schema of record.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema(Removal)}
