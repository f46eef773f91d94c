"""Faults of an upload: what the user reads, what is on the server afterwards, and what a rerun sends.

`python -m tests.tools.upload_faults` prints them as a table. Every case starts with an earlier model on main, if
`earlier`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import MsaError
from tests.support.hub import READER, STRANGER, WRITER, Fault, HubServer
from tests.support.hub_clients import CARD, REPO, SHARD, client_of, make_upload, publish, wanted

MAIN = f"POST /api/models/{REPO}/commit/main"

NOTE = "notes.md"
ONLY_THE_REST, LOGIN = "the same command sends only the rest", "`hf auth login`"


@dataclass(frozen=True)
class Case:
    """A fault, and what is to come of it."""

    name: str
    """Its name for people."""
    message: str = ""
    """A part of what the user reads; "": the upload ends well."""
    status: int = 0
    """The exit status."""
    fault: Callable[[HubServer], Fault] | None = None
    """Makes the fault of the server."""
    setup: Callable[[HubServer], None] = lambda hub: None
    """Prepares the server."""
    token: str = WRITER
    """The token of the user."""
    card: str = CARD
    """The model's card."""
    rerun: int = 2
    """The number of shards that the same command sends once the fault is gone."""
    for_good: bool = False
    """True if a rerun is refused as well."""
    earlier: bool = True
    """True if an earlier model is on main."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    message: str
    status: int
    main: str
    """"old", "new", "empty", "none" (no such repository), or "HALF"."""
    sent: int
    """The bytes of large files that the server received, broken transfers included."""
    rerun: int | None
    """The bytes that a rerun sent; None where it was refused."""
    waits: tuple[float, ...]
    """How long the client waited, in seconds."""


def _make_other(hub: HubServer) -> None:
    hub.make(REPO, {"model.safetensors": b"of somebody else"})


def _make_dataset(hub: HubServer) -> None:
    hub.commit(f"datasets/{REPO}", {"rows.jsonl": "{}"})


def _make_public(hub: HubServer) -> None:
    hub.private[REPO] = False


def _add_note(hub: HubServer) -> None:
    """Commit a file to main, as the owner may do in the browser."""
    hub.commit(f"models/{REPO}", {**hub.find(f"models/{REPO}", "main")[1], NOTE: "mind the gap"})


def _add_shard(hub: HubServer) -> None:
    """Commit a shard to main, as another upload would."""
    hub.commit(f"models/{REPO}", {**hub.find(f"models/{REPO}", "main")[1], "model-00009-of-00009.safetensors": "x"})


CASES = [
    Case("none", earlier=False, rerun=0),
    Case("none, over an earlier model", rerun=0),
    Case("connection dropped once in the middle of a file", fault=lambda hub: Fault("PUT /lfs"), rerun=0),
    Case("connection drops in the middle of each file", ONLY_THE_REST, 4, lambda hub: Fault("PUT /lfs", times=99),
         earlier=False),
    Case("connection drops at each file but the first", ONLY_THE_REST, 4,
         lambda hub: Fault("PUT /lfs", after=1, times=99), rerun=1),
    Case("answer to the commit on main is lost", fault=lambda hub: Fault(MAIN, done=True), rerun=0),
    Case("token is not valid (401)", LOGIN, 2, token="hf_NobodyKnowsThisToken", for_good=True),
    Case("token may only read", "may only read; `hf auth login`", 2, token=READER, for_good=True),
    Case("account may not write there (403)", LOGIN, 2, token=STRANGER, for_good=True, earlier=False),
    Case("403 when the repository is made", "nothing was sent", 2, lambda hub: Fault("/api/repos/create", 403),
         earlier=False),
    Case("403 after the first file", ONLY_THE_REST, 4, lambda hub: Fault("objects/batch", 403, after=1, times=9),
         rerun=1),
    Case("401 after the first file", LOGIN, 4, lambda hub: Fault("preupload/main", 401, after=1), rerun=1),
    Case("409 once at the commit on main", fault=lambda hub: Fault(MAIN, 409), rerun=0),
    Case("409 at every commit on main", "409", 4, lambda hub: Fault(MAIN, 409, times=99), rerun=0),
    Case("another commit comes first (412)", fault=lambda hub: Fault(MAIN, act=lambda: _add_note(hub)), rerun=0),
    Case("another upload comes first (412)", fault=lambda hub: Fault(MAIN, act=lambda: _add_shard(hub)), rerun=0),
    Case("429 once, Retry-After 7", fault=lambda hub: Fault(MAIN, 429, headers={"Retry-After": "7"}), rerun=0),
    Case("429, Retry-After 3600", "try again in 3600 s", 4,
         lambda hub: Fault(MAIN, 429, headers={"Retry-After": "3600"}), rerun=0),
    Case("500 once", fault=lambda hub: Fault(MAIN, 500), rerun=0),
    Case("500 at every commit", "500", 4, lambda hub: Fault("/commit/", 500, times=99), rerun=0),
    Case("503 before anything is sent", "nothing was sent", 4, lambda hub: Fault("whoami", 503, times=99)),
    Case("repository holds other content", "holds files that msa-lite did not put there", 3, setup=_make_other,
         for_good=True, earlier=False),
    Case("a data set has the name", "is a dataset", 3, setup=_make_dataset, for_good=True, earlier=False),
    Case("a space has the name", "is a space", 3, setup=lambda hub: hub.spaces.add(REPO), for_good=True,
         earlier=False),
    Case("repository is public, private is wanted", "is public already", 3, setup=_make_public, for_good=True),
    Case("the Hub does not take the card", '"license" must be a string', 3, card="---\nlicense: 3\n---\n",
         for_good=True, earlier=False),
]  # fmt: skip


def run_case(case: Case, folder: Path) -> Outcome:
    """Upload under a fault, look at the server, and upload again once the fault is gone."""
    with HubServer() as hub:
        if case.earlier:
            with client_of(hub):
                publish(make_upload(folder / "earlier", seed=1, shards=3))
        case.setup(hub)
        before = hub.on(REPO) if "main" in hub.branch_names(REPO) else {}
        contents = make_upload(folder / "model", card=case.card)
        hub.faults[:] = [case.fault(hub)] if case.fault else []
        hub.received.clear()
        message, status, waits = _try(hub, case, contents)
        sent, hub.faults[:] = hub.received[REPO], []
        main = _state_of_main(hub, before, wanted(contents))
        hub.received.clear()
        again = _try(hub, case, contents)[1]
        rerun = hub.received[REPO] if again == 0 else None
        assert again or _state_of_main(hub, {}, wanted(contents)) == "new"
        assert again or hub.branch_names(REPO) == ["main"]
    return Outcome(message, status, main, sent, rerun, waits)


def _try(hub: HubServer, case: Case, contents: object) -> tuple[str, int, tuple[float, ...]]:
    with client_of(hub, case.token) as waits:
        try:
            publish(contents)  # type: ignore[arg-type]
        except MsaError as error:
            return str(error), error.exit_code, tuple(waits)
    return "", 0, tuple(waits)


def _state_of_main(hub: HubServer, before: dict[str, bytes], after: dict[str, bytes]) -> str:
    if "main" not in hub.branch_names(REPO):
        return "none"
    now = hub.on(REPO)
    if not now:
        return "empty"
    now.pop(NOTE, None)
    return "new" if now == after else "old" if now == before else "HALF"


def main() -> None:
    """Print the table."""
    lines = ["| fault | exit | what the user reads | main | sent | rerun sends |\n|---|---|---|---|---|---|"]
    for case in CASES:
        folder = Path(tempfile.mkdtemp())
        try:
            outcome = run_case(case, folder)
        finally:
            shutil.rmtree(folder)
        rerun = "refused too" if outcome.rerun is None else f"{outcome.rerun / SHARD:g} shards"
        message = outcome.message.replace("|", "\\|").replace("\n", " ") or "(done)"
        cells = (case.name, outcome.status, message, outcome.main, f"{outcome.sent / SHARD:g} shards", rerun)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
