"""Decide what of a folder may be published: the files of a model or adapter, with a card and without private names.

What must not leave the machine is refused here, all reasons in one message: vectors, checkpoints that were tuned on
the data, records, logs, files with paths. Nothing is sent from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import Faults, FormatError, MismatchError, UsageError, allowed_by, at_most, join_faults
from msa_lite.io.files.reading import read_object
from msa_lite.io.finished.seal import (
    CARD_FILE,
    MANIFEST,
    MERGEKIT_FILE,
    NOT_OURS,
    STRANGE,
    folder_faults,
    load_manifest,
    manifest_text,
)
from msa_lite.io.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from msa_lite.io.weights.checkpoint import INDEX_FILE
from msa_lite.io.weights.companions import CODE, LOADED, TEMPLATES, find_files, name_in
from msa_lite.publish.private import (
    Secrets,
    clean_config,
    find_secrets,
    has_path,
    is_public,
    public_manifest,
    text_faults,
    weight_faults,
)
from msa_lite.report.page.card import SWITCH, UNDO, is_local, is_word, model_card, side_of
from msa_lite.report.verdict.verdict import VERDICT_FILE

FORMS = ("model", "adapter")
_MODEL_FILES = ("*.safetensors", INDEX_FILE, *LOADED)
_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
_CONFIGS = ("*config.json", "special_tokens_map.json", INDEX_FILE)  # vocabularies may hold any text
_TEXTS = ("LICENSE*", "NOTICE*", "chat_template*", TEMPLATES, CODE)
_NEVER_SENT = {CARD_FILE, MERGEKIT_FILE, "rows.jsonl", "train_log.jsonl", "course.json"}


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


@dataclass(frozen=True)
class SentFile:
    """One file to send."""

    name: str
    """Its path in the repository."""
    content: Path | bytes
    """The file that goes as it is, or the content that is made for publishing."""
    sha256: str
    """The SHA-256 of the content."""
    nbytes: int
    """The size of the content."""

    def read(self) -> bytes:
        """Return the content."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(frozen=True)
class Contents:
    """All that may be sent of a folder."""

    folder: Path
    """The folder of the model or adapter."""
    kind: Literal["model", "adapter"]
    """The kind of the folder; an adapter needs another model."""
    files: tuple[SentFile, ...]
    """The files by name, then the card and the manifest."""
    card: str
    """The card, which is one of the files."""
    cautions: tuple[str, ...]
    """Warnings for the user before sending, one sentence each."""


def make_contents(folder: Path, options: PublishOptions, ask: Callable[[str], bool] = is_public) -> Contents:
    """Return what may be sent of a folder: a model or adapter, or a run that has one. Nothing is written or sent.

    ask: says whether a repository of the Hub is public, so that the card may name it. Raise UsageError for a folder of
    another kind and for missing consents, MismatchError for files that are not as they were written, or that hold a
    path or a name that must not be told; all reasons in one message.
    """
    folder = _find_folder(folder, options.form)
    manifest = load_manifest(folder)
    if manifest is None:
        raise MismatchError(f"{folder}: differs from its manifest: {MANIFEST}: {NOT_OURS}")
    _check_kind(folder, manifest, options)
    kind: Literal["model", "adapter"] = "adapter" if (folder / ADAPTER_CONFIG).is_file() else "model"
    is_vector = manifest["kind"] == "vector"
    faults, cautions = Faults(), [UNDO.replace("**", "")] if is_vector else list[str]()
    if not is_vector:
        _check_outcome(folder, manifest, options, faults, cautions)
    if kind == "adapter" and not is_vector:
        cautions.append(SWITCH)
    manifest = _with_licence(folder, manifest, options, faults, cautions)
    _check_files(folder, faults, cautions)
    faults.check()
    told = _told(manifest, ask, cautions)
    secrets = find_secrets(manifest, told)
    files = _files(folder, kind, manifest, secrets, faults, cautions)
    manifest = manifest if is_vector else public_manifest(manifest, secrets)
    files.sort(key=attrgetter("name"))
    card = model_card(manifest, options.repo)
    made = [_made(CARD_FILE, card)]
    if not is_vector:
        known = {item.name: {"sha256": item.sha256, "bytes": item.nbytes} for item in (*made, *files)}
        made.append(_made(MANIFEST, manifest_text({**manifest, "files": known})))
    for item in made:
        if has_path(item.read().decode()):
            faults.append(MismatchError(f"{folder}: the {item.name} to send would hold a path of a machine"))
    faults.check()
    return Contents(folder, kind, (*files, *made), card, tuple(cautions))


def _find_folder(folder: Path, form: str | None) -> Path:
    """Return the folder of the model or adapter; that of a run, where a run is named. Raise UsageError."""
    if (folder / MANIFEST).exists():
        kind = (load_manifest(folder) or {}).get("kind")
        if form and kind in FORMS and kind != form:
            raise UsageError(f"{folder}: holds the {kind}, not the {form}; leave out --as, or give the run's folder")
        return folder
    present = [folder / name for name in ([form] if form else FORMS) if (folder / name / MANIFEST).exists()]
    if len(present) > 1:
        raise UsageError(f"{folder}: has both a model and an adapter; say which one with --as model or --as adapter")
    if not present:
        what = f"no {form}" if form else "neither model nor adapter"
        raise UsageError(f"{folder}: {what} of msa-lite in there; give what `msa-lite merge` or a run wrote")
    return present[0]


def _check_kind(folder: Path, manifest: dict[str, Any], options: PublishOptions) -> None:
    """Raise UsageError for what is no unlearned model, or a vector without consent."""
    kind = str(manifest["kind"])
    if kind not in (*FORMS, "vector"):
        raise UsageError(f"{folder}: is of the kind {kind}; only an unlearned model or an adapter can be published")
    consent = "to send it all the same: --i-know-this-can-undo-the-removal"
    if options.can_undo:
        return
    if kind == "vector":
        raise UsageError(
            f"{folder}: is a vector, or a model that was tuned on the data: whoever has it can put the data "
            f"back into the unlearned model, or find out about the data. Publish the model itself; {consent}"
        )
    is_made = "checkpoint" in manifest["inputs"] and manifest["change"]["weights_changed"] > 0  # by another method
    if not is_made and all(term["weight"] >= 0 and side_of(term) in ("forget", "retain") for term in manifest["terms"]):
        raise UsageError(
            f"{folder}: nothing was subtracted here (alpha is 0, or another method changed no weight), so this is the "
            f"target, or a model that was tuned on data; {consent}"
        )


def _check_outcome(
    folder: Path, manifest: dict[str, Any], options: PublishOptions, faults: Faults, cautions: list[str]
) -> None:
    """Gather what the scores say against publishing; those of a stopped run stand in its verdict.json."""
    outcome = manifest.get("outcome")
    if not outcome:
        try:
            stored = read_object(folder.parent / VERDICT_FILE)
            outcome = {"verdict": stored.get("outcome"), "sentence": str(stored.get("sentence") or "")}
        except FormatError:
            outcome = {}
    verdict = outcome.get("verdict")
    if verdict == "FAIL" and not options.accept:
        error = UsageError(f"{folder}: its verdict is FAIL. {outcome['sentence']} --accept sends it all the same")
        faults.append(allowed_by(error, "--accept"))
    elif verdict != "PASS":
        why = outcome.get("sentence") or "nothing was scored, so nobody knows what was forgotten"
        cautions.append(f"{f'its verdict is {verdict}' if verdict else 'it has no verdict'}: {why}")


def _with_licence(
    folder: Path, manifest: dict[str, Any], options: PublishOptions, faults: Faults, cautions: list[str]
) -> dict[str, Any]:
    """Return the manifest with the licence of the target's card, or the user's. A public model needs one."""
    theirs = dict(manifest.get("target_card", {}))
    licence, wanted = theirs.get("license"), options.license
    if wanted and not is_word(wanted):
        faults.append(UsageError(f"--license {wanted}: no licence of the Hub; as in: apache-2.0, mit, llama3.2"))
    elif wanted and licence and wanted != licence:
        faults.append(UsageError(f"--license {wanted}: the target has {licence}, which holds for this model too"))
    elif wanted:
        theirs["license"] = wanted
    elif not licence and options.public:
        faults.append(UsageError("the card of the target names no licence; give the one that holds with --license ID"))
    elif not licence:
        cautions.append("the card names no licence, since that of the target names none (--license ID)")
    link = theirs.get("license_link", "")
    if link and not link.startswith("http") and not (folder / link).is_file():
        del theirs["license_link"]
    return {**manifest, "target_card": theirs}


def _check_files(folder: Path, faults: Faults, cautions: list[str]) -> None:
    """Gather what differs from the manifest. Files beside those that msa-lite wrote are not sent."""
    differing = folder_faults(folder)
    strange = [name for name, fault in differing.items() if fault == STRANGE]
    broken = [f"{name}: {fault}" for name, fault in differing.items() if name not in (CARD_FILE, *strange)]
    if CARD_FILE in differing:
        cautions.append(f"the card is written anew; changes that you made in {CARD_FILE} do not go along")
    if broken:
        faults.append(MismatchError(join_faults(f"{folder}: differs from its manifest:", broken)))
    if strange:
        cautions.append(f"not sent, since msa-lite did not write them: {_listed(strange)}")


def _told(manifest: dict[str, Any], ask: Callable[[str], bool], cautions: list[str]) -> dict[str, str]:
    """Return the models, by role, that the card may name, because the Hub says that they are public."""
    told = {}
    for role in ("target", "prior"):
        name, revision = manifest.get("sources", {}).get(role), manifest["inputs"].get(role, {}).get("revision")
        if not name or not revision or is_local(revision):
            continue
        repo = name.partition("@")[0]
        if ask(repo):
            told[role] = name
        else:
            cautions.append(f"the card does not name the {role}: the Hub does not say that {repo} is public")
    return told


def _files(
    folder: Path, kind: str, manifest: dict[str, Any], secrets: Secrets, faults: Faults, cautions: list[str]
) -> list[SentFile]:
    """Return the files to send, without what is private; files that cannot go without it are gathered in `faults`."""
    patterns = _ADAPTER_FILES if kind == "adapter" else _MODEL_FILES
    sent = {name_in(folder, path) for path in find_files(folder, patterns)}
    items, left, notes = list[SentFile](), list[str](), list[str]()
    for name, entry in manifest["files"].items():
        if name not in sent:
            left.append(name)
            continue
        path, content, remains = folder / name, None, list[str]()
        if name.endswith(".safetensors"):
            remains, noted = weight_faults(path, secrets)
            notes += [note for note in noted if note not in notes]
        elif _fits(name, _CONFIGS):
            content, remains = clean_config(path, secrets)
        elif _fits(name, _TEXTS):
            remains = text_faults(path, secrets)
        faults.extend(map(MismatchError, remains))
        items.append(_made(name, content) if content else SentFile(name, path, entry["sha256"], entry["bytes"]))
    if not any(item.name.endswith(".safetensors") for item in items):
        faults.append(UsageError(f"{folder}: holds no weights of a model or adapter"))
    if changed := [item.name for item in items if isinstance(item.content, bytes)]:
        cautions.append(f"goes without the names of private models and folders in it: {_listed(changed)}")
    if notes:
        cautions.append(f"notes in the header of the weights go along: {_listed(notes)}")
    if code := [item.name for item in items if fnmatch(item.name, CODE)]:
        cautions.append(f"Python code goes along, which trust_remote_code would run: {_listed(code)}")
    if others := sorted(set(left) - _NEVER_SENT):
        cautions.append(f"not sent, since loading the model does not need them: {_listed(others)}")
    return items


def changed_when_sent(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of configs as they are sent by a user who names no model; none of those that stay as they are.

    names: files of the folder.
    """
    private = Secrets({}, frozenset())
    texts = {name: clean_config(folder / name, private)[0] for name in names if _fits(name, _CONFIGS)}
    return {name: _made(name, text).sha256 for name, text in texts.items() if text}


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _made(name: str, text: str) -> SentFile:
    content = text.encode()
    return SentFile(name, content, hashlib.sha256(content).hexdigest(), len(content))


def _listed(names: list[str]) -> str:
    return ", ".join(at_most(names, 5))
