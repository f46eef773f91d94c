"""Decide what of a folder may be published: the files of a model or adapter, with a card and without private names.

What must not leave the machine is refused here, all reasons in one message: vectors, checkpoints that were tuned on
the data, records, logs, files with paths. Nothing is sent from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import Faults, FormatError, MismatchError, UsageError, allowed_by, join_faults
from msa_lite.io.files.reading import read_object, read_text
from msa_lite.io.finished.seal import (
    CARD_FILE,
    MANIFEST,
    MERGEKIT_FILE,
    load_manifest,
    manifest_text,
    verify_folder,
)
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from msa_lite.io.weights.checkpoint import INDEX_FILE
from msa_lite.io.weights.companions import CODE, TEMPLATES, name_in
from msa_lite.io.weights.hub import tokenizer_files
from msa_lite.publish.private import (
    Secrets,
    clean_config,
    find_secrets,
    has_path,
    header_notes,
    is_public,
    public_manifest,
    text_faults,
    weight_faults,
)
from msa_lite.report.page.card import SWITCH, UNDO, is_local, is_word, model_card, side_of
from msa_lite.report.verdict.verdict import VERDICT_FILE

FORMS = ("model", "adapter")
_MODEL_FILES = (
    "*.safetensors", INDEX_FILE, "config.json", "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "LICENSE*", "NOTICE*", CODE,
)  # fmt: skip
_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
_CONFIGS = ("*config.json", "special_tokens_map.json", INDEX_FILE)  # vocabularies may hold any text
_TEXTS = ("LICENSE*", "NOTICE*", "chat_template*", TEMPLATES, CODE)
_LAST = ("config.json", ADAPTER_CONFIG, INDEX_FILE, MANIFEST, CARD_FILE)  # without these nothing can be loaded
_RECORDS = ("rows.jsonl", "train_log.jsonl", "course.json")
_STRANGE = ": not in the manifest"
_WHAT = {
    "checkpoint": "a checkpoint that msa-lite trained, no unlearned model",
    "evaluation": "scores, which hold the questions and answers",
    "data": "the data itself",
    "sweep": "the choice of strengths",
}


@dataclass(frozen=True)
class PublishOptions:
    """The user's wishes and consents for publishing."""

    repo: str | None = None
    """The repository that it goes to, for the card's example."""
    form: Literal["model", "adapter"] | None = None
    """The folder of a run to take; None: the one that is there."""
    public: bool = False
    """True if everybody is to see it."""
    accept: bool = False
    """True if it may go although its verdict is FAIL."""
    can_undo: bool = False
    """True if vectors, with which a removal can be undone, may go."""
    license: str | None = None
    """The licence, where the target's card names none."""


_PLAIN = PublishOptions()


@dataclass(frozen=True)
class SentFile:
    """One file to send."""

    name: str
    """Its path in the repository."""
    path: Path | None
    """The file that goes as it is; None where its content is made for publishing."""
    content: bytes | None
    """The content that is made for publishing; None where the file goes as it is."""
    sha256: str
    """The SHA-256 of the content."""
    nbytes: int
    """The size of the content."""

    @property
    def is_weights(self) -> bool:
        """Check whether it is a file of weights, which is too large to be held in memory."""
        return self.name.endswith(".safetensors")

    def read(self) -> bytes:
        """Return the content."""
        if self.content is not None:
            return self.content
        assert self.path is not None, "a file has a path or a content"
        return self.path.read_bytes()


@dataclass(frozen=True)
class Contents:
    """All that may be sent of a folder."""

    folder: Path
    """The folder of the model or adapter."""
    kind: Literal["model", "adapter"]
    """The kind of the folder; an adapter needs another model."""
    files: tuple[SentFile, ...]
    """The files, weights first, then config, index, manifest and card."""
    card: str
    """The card, which is one of the files."""
    cautions: tuple[str, ...]
    """Warnings for the user before sending, one sentence each."""

    @property
    def nbytes(self) -> int:
        """Return the size of all files."""
        return sum(item.nbytes for item in self.files)


def make_contents(folder: Path, options: PublishOptions = _PLAIN, ask: Callable[[str], bool] = is_public) -> Contents:
    """Return what may be sent of a folder: a model or adapter, or a run that has one. Nothing is written or sent.

    ask: says whether a repository of the Hub is public, so that the card may name it. Raise UsageError for a folder of
    another kind and for missing consents, MismatchError for files that are not as they were written, or that hold a
    path or a name that must not be told; all reasons in one message.
    """
    folder = _find_folder(folder, options.form)
    manifest = load_manifest(folder)
    if manifest is None:
        raise MismatchError(join_faults(f"{folder}: differs from its manifest:", verify_folder(folder)))
    choice = _Choice(folder, manifest, options)
    choice.check_kind()
    choice.check_outcome()
    choice.add_licence()
    choice.check_files()
    choice.faults.check()
    secrets = choice.find_secrets(ask)
    files = choice.files(secrets)
    choice.faults.check()
    return choice.contents(files, secrets)


def _find_folder(folder: Path, form: str | None) -> Path:
    """Return the folder of the model or adapter; that of a run, where a run is named. Raise UsageError."""
    if (folder / MANIFEST).exists():
        kind = (load_manifest(folder) or {}).get("kind")
        if form and kind in FORMS and kind != form:
            raise UsageError(f"{folder}: holds the {kind}, not the {form}; leave out --as, or give the run's folder")
        return folder
    places = [folder / name for name in ([form] if form else FORMS)]
    present = [place for place in places if (place / MANIFEST).exists()]
    if len(present) > 1:
        raise UsageError(f"{folder}: has both a model and an adapter; say which one with --as model or --as adapter")
    if not present:
        what = f"no {form}" if form else "neither model nor adapter"
        way = (
            "a run with merge.as: adapter writes one"
            if form == "adapter"
            else "give what `msa-lite merge` or a run wrote"
        )
        raise UsageError(f"{folder}: {what} of msa-lite in there; {way}")
    return present[0]


def _run_verdict(folder: Path) -> dict[str, Any]:
    """Return the verdict of a run that was stopped before its model's manifest had it; nothing where there is none."""
    try:
        verdict = read_object(folder / VERDICT_FILE)
    except FormatError:
        return {}
    return {"verdict": verdict.get("outcome"), "sentence": str(verdict.get("sentence") or "")}


@dataclass
class _Choice:
    """The choice of files, with what speaks against it and what the user should know."""

    folder: Path
    manifest: dict[str, Any]
    options: PublishOptions
    faults: Faults = field(default_factory=Faults)
    cautions: list[str] = field(default_factory=list)
    is_open: bool = False
    """True if all models and vectors of the merge may be named."""

    @property
    def kind(self) -> Literal["model", "adapter"]:
        adapter = (self.folder / ADAPTER_CONFIG).is_file()
        return "adapter" if adapter else "model"

    @property
    def is_vector(self) -> bool:
        return bool(self.manifest["kind"] == "vector")

    def check_kind(self) -> None:
        """Raise UsageError for what is no unlearned model, or a vector without consent."""
        kind = str(self.manifest["kind"])
        if kind not in (*FORMS, "vector"):
            what = _WHAT.get(kind, f"of the kind {kind}")
            raise UsageError(f"{self.folder}: holds {what}; only an unlearned model or an adapter can be published")
        if self.options.can_undo:
            if self.is_vector:
                self.cautions.append(UNDO.replace("**", ""))
            return
        consent = "to send it all the same: --i-know-this-can-undo-the-removal"
        if self.is_vector:
            raise UsageError(
                f"{self.folder}: is a vector, or a model that was tuned on the data: whoever has it can put the data "
                f"back into the unlearned model, or find out about the data. Publish the model itself; {consent}"
            )
        if not any(term["weight"] < 0 or side_of(term) not in ("forget", "retain") for term in self.manifest["terms"]):
            raise UsageError(
                f"{self.folder}: nothing was subtracted here (alpha is 0), so this is the target, or a model that "
                f"was tuned on data; {consent}"
            )

    def check_files(self) -> None:
        """Gather what differs from the manifest. Files beside those that msa-lite wrote are not sent."""
        faults = verify_folder(self.folder)
        if edited := [fault for fault in faults if fault.startswith(f"{CARD_FILE}: ")]:
            self.cautions.append(f"the card is written anew; changes that you made in {CARD_FILE} do not go along")
            faults = [fault for fault in faults if fault not in edited]
        strange = [fault.removesuffix(_STRANGE) for fault in faults if fault.endswith(_STRANGE)]
        if broken := [fault for fault in faults if not fault.endswith(_STRANGE)]:
            self.faults.append(MismatchError(join_faults(f"{self.folder}: differs from its manifest:", broken)))
        if strange:
            self.cautions.append(f"not sent, since msa-lite did not write them: {_listed(strange)}")

    def check_outcome(self) -> None:
        """Gather what the scores say against publishing."""
        if self.is_vector:
            return
        outcome = self.manifest.get("outcome") or _run_verdict(self.folder.parent)
        verdict = outcome.get("verdict")
        if verdict == "FAIL" and not self.options.accept:
            error = UsageError(
                f"{self.folder}: its verdict is FAIL. {outcome['sentence']} --accept sends it all the same"
            )
            self.faults.append(allowed_by(error, "--accept"))
        elif verdict != "PASS":
            why = outcome.get("sentence") or "nothing was scored, so nobody knows what was forgotten"
            self.cautions.append(f"{f'its verdict is {verdict}' if verdict else 'it has no verdict'}: {why}")
        if self.kind == "adapter":
            self.cautions.append(SWITCH)

    def add_licence(self) -> None:
        """Take the licence from the target's card or from the user. A public model needs one."""
        theirs = dict(self.manifest.get("target_card", {}))
        licence, wanted = theirs.get("license"), self.options.license
        if wanted and not is_word(wanted):
            self.faults.append(
                UsageError(f"--license {wanted}: no licence of the Hub; as in: apache-2.0, mit, llama3.2")
            )
        elif wanted and licence and wanted != licence:
            self.faults.append(
                UsageError(f"--license {wanted}: the target has {licence}, which holds for this model too")
            )
        elif wanted:
            theirs["license"] = wanted
        elif not licence and self.options.public:
            self.faults.append(
                UsageError("the card of the target names no licence; give the one that holds with --license ID")
            )
        elif not licence:
            self.cautions.append("the card names no licence, since that of the target names none (--license ID)")
        link = theirs.get("license_link", "")
        if link and not link.startswith("http") and not (self.folder / link).is_file():
            del theirs["license_link"]
        self.manifest = {**self.manifest, "target_card": theirs}

    def find_secrets(self, ask: Callable[[str], bool]) -> Secrets:
        """Return which models may be named, and the names that must not stand in any file."""
        public, told = set(), {}
        for role, name in self.manifest.get("sources", {}).items():
            repo, is_model = name.partition("@")[0], role in ("target", "prior")
            if is_local(self.manifest["inputs"].get(role, {}).get("revision", "sha256:")):
                continue
            if ask(repo):
                public.add(role)
            if is_model and role in public:
                told[role] = name
            elif is_model:
                self.cautions.append(f"the card does not name the {role}: the Hub does not say that {repo} is public")
        self.is_open = self.manifest.get("sources", {}).keys() <= public | told.keys()
        return find_secrets(self.manifest, told)

    def files(self, secrets: Secrets) -> list[SentFile]:
        """Return the files that go as they are, or without what is private; gather what remains of that."""
        patterns = _ADAPTER_FILES if self.kind == "adapter" else _MODEL_FILES
        tokens = (
            set() if self.kind == "adapter" else {name_in(self.folder, path) for path in tokenizer_files(self.folder)}
        )
        items, left = [], []
        notes: dict[str, None] = {}
        for name, entry in self.manifest["files"].items():
            path = self.folder / name
            if name not in tokens and ("/" in name or not any(fnmatch(name, pattern) for pattern in patterns)):
                left.append(name)
                continue
            content, faults = None, []
            if name.endswith(".safetensors"):
                faults = weight_faults(path, secrets)
                notes |= dict.fromkeys(header_notes(path))
            elif any(fnmatch(name, pattern) for pattern in _CONFIGS):
                content, faults = clean_config(path, secrets)
            elif any(fnmatch(name, pattern) for pattern in _TEXTS):
                faults = text_faults(path, secrets)
            self.faults.extend(map(MismatchError, faults))
            whole = SentFile(name, path, None, entry["sha256"], entry["bytes"])
            items.append(whole if content is None else _made(name, content))
        if not any(item.is_weights for item in items):
            self.faults.append(UsageError(f"{self.folder}: holds no weights of a model or adapter"))
        if notes:
            self.cautions.append(f"notes in the header of the weights go along: {_listed([*notes])}")
        if code := _listed([item.name for item in items if fnmatch(item.name, CODE)]):
            self.cautions.append(f"Python code goes along, which trust_remote_code would run: {code}")
        if others := sorted(set(left) - {CARD_FILE, MERGEKIT_FILE, *_RECORDS}):
            self.cautions.append(f"not sent, since loading the model does not need them: {_listed(others)}")
        return items

    def contents(self, files: list[SentFile], secrets: Secrets) -> Contents:
        """Return the files with recipe, manifest and card for the public."""
        manifest = self.manifest
        if not self.is_vector:
            recipe = self._recipe()
            files = [*files, *recipe]
            manifest = public_manifest(manifest, secrets, bool(recipe))
        card = model_card(manifest, self.options.repo)
        files.append(_made(CARD_FILE, card.encode()))
        if not self.is_vector:
            by_name = sorted(files, key=lambda item: item.name)
            known = {item.name: {"sha256": item.sha256, "bytes": item.nbytes} for item in by_name}
            files.append(_made(MANIFEST, manifest_text({**manifest, "files": known}).encode()))
        for item in files:
            if item.name in (CARD_FILE, MANIFEST) and has_path((item.content or b"").decode()):
                self.faults.append(
                    MismatchError(f"{self.folder}: the {item.name} to send would hold a path of a machine")
                )
        self.faults.check()
        return Contents(self.folder, self.kind, tuple(sorted(files, key=_place)), card, tuple(self.cautions))

    def _recipe(self) -> list[SentFile]:
        """Return the recipe for mergekit, where all its models may be named."""
        path = self.folder / MERGEKIT_FILE
        if MERGEKIT_FILE not in self.manifest["files"]:
            return []
        text = read_text(path)
        if all(line.startswith("#") for line in text.splitlines()):
            return []
        if not self.is_open:
            self.cautions.append(f"not sent: {MERGEKIT_FILE}, since it names folders or models that are not public")
            return []
        entry = self.manifest["files"][MERGEKIT_FILE]
        return [SentFile(MERGEKIT_FILE, path, None, entry["sha256"], entry["bytes"])]


def _made(name: str, content: bytes) -> SentFile:
    return SentFile(name, None, content, hashlib.sha256(content).hexdigest(), len(content))


def _place(item: SentFile) -> tuple[int, str]:
    """Return the place of a file in the order: weights, others, config, index, manifest, card."""
    if item.is_weights:
        return -2, item.name
    return _LAST.index(item.name) if item.name in _LAST else -1, item.name


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
