"""Check the signature of a record with OpenSSH. The user signs with `ssh-keygen -Y sign`, and their own key.

No key or passphrase passes through msa-lite: ssh-keygen also asks an agent or a hardware key.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.reading import local_path
from msa_lite.record.store import RECORD_FILE, SIGNATURE_FILE

NAMESPACE = "msa-lite"
_SECONDS = 60


def signing_command(folder: Path) -> str:
    """Return the command by which a user signs the record of a run."""
    return f"ssh-keygen -Y sign -n {NAMESPACE} -f ~/.ssh/id_ed25519 {shlex.quote(str(folder / RECORD_FILE))}"


def check_signature(folder: Path, allowed_signers: str | Path | None = None) -> str:
    """Check record.json.sig against record.json; return a sentence on the signer.

    allowed_signers: a file in OpenSSH's form (`alice@example.org ssh-ed25519 AAAA…` in a line) with those whose
    signature counts. Without it, only the signature itself is checked, and who signed is left open.

    Raise MismatchError for a signature that does not fit the record, or is of nobody in that file; UsageError without
    ssh-keygen, or such a file.
    """
    signature, record = folder / SIGNATURE_FILE, folder / RECORD_FILE
    if allowed_signers is None:
        answer = _call(record, "check-novalidate", "-s", signature)
        return f"{answer}; --allowed-signers FILE checks whose key that is"
    signers = local_path(allowed_signers)
    if not signers.is_file():
        raise UsageError(f"{signers}: no such file of allowed signers (a line: alice@example.org ssh-ed25519 AAAA…)")
    names = _call(record, "find-principals", "-s", signature, "-f", signers)
    signer = names.splitlines()[0].split(",")[0]  # a line of the file may name several
    return _call(record, "verify", "-f", signers, "-I", signer, "-s", signature)


def _call(record: Path, action: str, *arguments: str | Path) -> str:
    """Call `ssh-keygen -Y ACTION` with the record on its standard input; return what it prints."""
    options = () if action == "find-principals" else ("-n", NAMESPACE)
    command = ["ssh-keygen", "-Y", action, *options, *map(_argument, arguments)]
    try:
        with open(record, "rb") as stream:
            done = subprocess.run(command, stdin=stream, capture_output=True, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise UsageError("the signature cannot be checked without ssh-keygen: install OpenSSH 8.1 or later") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"ssh-keygen gave no answer within {_SECONDS} seconds") from error
    message = (done.stdout + done.stderr).decode(errors="replace").strip()
    if done.returncode:
        raise MismatchError(_refusal(action, message))
    return done.stdout.decode(errors="replace").strip()


def _argument(value: str | Path) -> str:
    """Return an argument; of a path the full one, which cannot be taken for an option."""
    return str(value.absolute()) if isinstance(value, Path) else value


def _refusal(action: str, message: str) -> str:
    """Return the message that a signature is not good."""
    reason = f" (ssh-keygen: {message.splitlines()[0]})" if message else ""
    if action == "find-principals":
        return f"made with no key of the allowed signers, or no signature{reason}"
    return f"does not fit {RECORD_FILE} (changed since it was signed?), or is no signature{reason}"
