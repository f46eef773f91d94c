"""A case: files, a command, and what to look at afterwards; and the verdict on what the command did."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.fuzz.child import Outcome, run
from tests.tools.fuzz.tree import Tree, lay, snapshot

MEMORY = 600 << 20
_OURS = {"home", ".stdout", ".stderr"}
_UNEXPECTED = re.compile(r"Traceback \(most recent call last\)|this was not expected|Fatal Python error|Segmentation")
_HIDDEN = "ran"  # a file that code in a case's files would write

Check = Callable[[Path, Outcome], Sequence[str]]


@dataclass
class Case:
    """A command over files."""

    area: str
    tree: Tree
    arguments: list[str]
    check: Check | None = None
    """Returns what is wrong with what an accepted command wrote."""
    edits: list[str] = field(default_factory=list)
    """The edits of sound input, in words."""
    statuses: Sequence[int] = (0, 2, 3)
    """Exit statuses of the contract that this case may end with."""
    excused: str = ""
    """Words of a message with which status 4 is right as well."""
    outs: Sequence[str] = ("out",)
    """Folders that the command may write."""
    checked: Sequence[int] = (0,)
    """Exit statuses after which `check` looks."""
    act: Callable[[Path], tuple[Outcome, list[str]]] | None = None
    """Plays the case in the place of a command."""
    memory: int = MEMORY
    seconds: float = 10.0


def play(case: Case, root: Path) -> tuple[Outcome, list[str]]:
    """Lay a case out in an empty folder and run it; return the outcome and each breach of the contract."""
    if case.act:
        return case.act(root)
    shutil.rmtree(root, ignore_errors=True)
    (root / "home").mkdir(parents=True)
    lay(case.tree, root)
    before = snapshot(root, _OURS)
    outcome = run(case.arguments, root, case.seconds)
    after = snapshot(root, _OURS)
    return outcome, [*_breaches(case, outcome, before, after, root), *_checked(case, outcome, root)]


def _breaches(
    case: Case, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str], root: Path
) -> list[str]:
    found = []
    if outcome.hung:
        found.append(f"hang: more than {case.seconds:g} s")
    elif outcome.status < 0:
        found.append(f"crash: ended by signal {-outcome.status}")
    elif outcome.status not in case.statuses and not (case.excused and case.excused in outcome.err):
        found.append(f"status: {outcome.status}, expected one of {', '.join(map(str, case.statuses))}")
    if _UNEXPECTED.search(outcome.err + outcome.out):
        found.append(f"traceback: {outcome.err.strip().splitlines()[-1][:300]}")
    if outcome.grown > case.memory:
        found.append(f"memory: {outcome.grown / 1e6:.0f} MB")
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    allowed = (
        tuple(f"{out}{end}" for out in case.outs for end in ("", ".partial", ".previous"))
        if outcome.status == 0
        else ()
    )
    parents = {str(place) for out in case.outs for place in Path(out).parents} if outcome.status == 0 else set()
    changed = [name for name in changed if name not in parents]
    outside = [name for name in changed if not any(name == a or name.startswith(f"{a}/") for a in allowed)]
    if outside and not outcome.hung and outcome.status in (0, 2, 3):
        found.append(f"escape: {sorted(outside)[:4]}")
    if any(path.name == _HIDDEN for path in root.rglob(_HIDDEN)):
        found.append("escape: code of an input ran")
    if outcome.status in (2, 3) and "rror" not in outcome.err and not outcome.out.startswith("{"):
        found.append("silent: refused without a word")
    return found


def _checked(case: Case, outcome: Outcome, root: Path) -> list[str]:
    if outcome.status not in case.checked or case.check is None:
        return []
    if any((root / f"{out}.partial").exists() for out in case.outs):
        return ["leftover: a partial folder beside a finished one"]
    try:
        return [f"number: {fault}" for fault in case.check(root, outcome)]
    except Exception as error:  # the oracle reads with other libraries; what they refuse was not to be accepted
        return [f"oracle: {type(error).__name__}: {error}"]
