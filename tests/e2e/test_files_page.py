"""docs/reference/files.md describes the folder of a run: every file, what holds the data, every manifest key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path

from msa_lite.io.finished.seal import LOCK, MANIFEST
from msa_lite.pipeline.purge.purge import purge
from tests.tools.pages.files import FACTS, KEYS, RUN

# Kinds of files that this run does not make, and why.
ABSENT = {
    "record.json.sig": "nobody signed it",
    "moments/*": "merge.filter",
    "vectors/start/*": "vector.start: retain",
    "vectors/*-filter-*/*": "merge.filter",
    "prompt.json": "prompt: auto",
    "purged.json": "msa-lite purge",
    "evaluation/{target,prior,ideal,unlearned}/judge_prompts.yaml": "evaluate.judge.prompts",
    "epochs/*/**/report.json": "baseline.start: prior",
    "epochs/**/*.jsonl": "baseline.start: prior",
    "evaluation/earlier/*/report.json": "earlier",
    "evaluation/earlier/*/*.jsonl": "earlier",
    "adapter/*": "merge.as: adapter",
    "history/": "demo",
    "{target,prior}/": "an adapter as target",
    "tracking/": "track",
    "baselines/METHOD/": "msa-lite baseline",
    "attacks/": "msa-lite attack",
}


def expanded(pattern: str) -> Iterator[str]:
    """The patterns without {a,b}; a folder stands for all that is in it, METHOD for any name."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        yield pattern.replace("METHOD", "*") + ("*" if pattern.endswith("/") else "")
        return
    for choice in match[1].split(","):
        yield from expanded(pattern[: match.start()] + choice + pattern[match.end() :])


def describe(path: str) -> bool | None:
    """Whether a file holds the data, by the page; None for one that the page does not have."""
    found = [holds for pattern, (holds, _) in RUN.items() for p in expanded(pattern) if re.match(translate(p), path)]
    return any(found) if found else None


def files(run: Path) -> list[str]:
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    return [name.replace("_validation/", "/") for name in names if Path(name).name not in (LOCK, MANIFEST)]


def test_the_page_has_every_file_of_a_run_and_says_which_ones_hold_the_data(finished: Path) -> None:
    names = files(finished)
    assert len(names) > 20
    assert [name for name in names if describe(name) is None] == []
    survey = purge(finished)
    inside = [item.name for item in survey.holdings if not item.name.startswith("/")]  # the others are caches
    held = [name.replace("_validation", "").rstrip("/") for name in inside]
    assert [name for name in held if not any(describe(f) for f in names if f.startswith(name))] == []
    kept = [name for name in names if not any(name == h or name.startswith(f"{h}/") for h in held)]
    assert [name for name in kept if describe(name) and not name.startswith("baselines/")] == []


def test_the_page_has_no_pattern_that_nothing_matches(finished: Path) -> None:
    names = files(finished)
    idle = [p for p in RUN if not any(re.match(translate(e), name) for e in expanded(p) for name in names)]
    assert "report.html" not in idle
    assert [pattern for pattern in idle if pattern not in ABSENT] == []


def test_the_page_has_every_key_of_the_manifests(finished: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in finished.rglob(MANIFEST)]
    assert {manifest["kind"] for manifest in manifests} >= {"model", "vector", "evaluation"}
    assert [key for manifest in manifests for key in KEYS if key not in manifest] == []
    extra = {(m["kind"], key) for m in manifests for key in m if key not in KEYS and key not in FACTS}
    assert extra == set()


def test_a_file_that_the_page_does_not_have_is_noticed() -> None:
    assert describe("vectors/forget/rows.jsonl") is True
    assert describe("report.html") is False
    assert describe("notes.txt") is None
