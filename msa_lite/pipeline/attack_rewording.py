"""Have a judge reword the questions of the attacked rows, and keep its rewordings beside the results of the attacks.

All models are then asked in the same words. A question is reworded once, also for the runs of baselines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from msa_lite.attacks.attack import Ground
from msa_lite.errors import StageError, UsageError
from msa_lite.evals.judge import JudgeSettings, open_judge
from msa_lite.evals.judge.cache import CACHE_FILE
from msa_lite.evals.judge.prompts import REWORDINGS, reword_ask, rewording_version
from msa_lite.evals.records import read_records, write_records
from msa_lite.io.files import digest
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.progress import Progress, notices, under
from msa_lite.io.seal import load_manifest
from msa_lite.report.attacks import ATTACKS_FOLDER

logger = logging.getLogger(__name__)

_NAME = "rewordings"  # of folder, stage and progress
_FILE = "rewordings.jsonl"


@dataclass(frozen=True)
class Rewording:
    """A judge that rewords questions, and the folder of what it wrote."""

    folder: Path
    judge: JudgeSettings

    def known(self, ground: Ground) -> Ground:
        """Return the ground with the rewordings that are there.

        In the place of those that are still to be written stand the questions, for estimates of time.
        """
        return self._with(ground, self._read())

    def missing(self, ground: Ground) -> list[str]:
        """Return the questions that are still to be reworded."""
        known = self._read()
        return [question for question in dict.fromkeys(row.question for row in ground.forget) if question not in known]

    def make(self, ground: Ground, progress: Progress) -> Ground:
        """Have the missing questions reworded; return the ground with all rewordings.

        A question that the judge did not reword has "". Raise StageError where that are all, or the judge fails; a
        rerun asks only for the rest.
        """
        known, todo = self._read(), self.missing(ground)
        if todo:
            asks = [reword_ask(question, way) for question in todo for way in REWORDINGS]
            inputs = self._settings() | {"questions": digest([*known, *todo])}
            with stage_folder(self.folder, _NAME, inputs, resumable=True) as partial:
                judge = open_judge(self.judge, partial)
                assert judge is not None
                rulings = iter(judge.ask(asks, under(progress, _NAME))[0])
                for question in todo:
                    written = {way: next(rulings) for way in REWORDINGS}
                    known[question] = {way: one.reply if one.valid else "" for way, one in written.items()}
                self._check(known, todo)
                write_records(partial / _FILE, [{"question": text, **ways} for text, ways in known.items()])
                (partial / CACHE_FILE).unlink()
        return self._with(ground, known)

    def _check(self, known: Mapping[str, Mapping[str, str]], todo: list[str]) -> None:
        lacking = sum(not text for question in todo for text in known[question].values())
        total = len(todo) * len(REWORDINGS)
        if lacking == total:
            raise StageError(
                f"attack.prompt.judge: {self.judge.model_name} reworded no question; take a model that follows "
                "instructions"
            )
        question = next(question for question in todo if any(known[question].values()))
        text = next(filter(None, known[question].values()))
        notices.info("rewordings: for example, '%s' became '%s'", question, shorten(text, 200))
        if lacking:
            logger.warning("%s gave no rewording in %d of %d cases", self.judge.model_name, lacking, total)

    def _settings(self) -> dict[str, Any]:
        """Return what decides the rewording of a question."""
        judge = self.judge.describe()
        parts = {key: judge[key] for key in ("kind", "model", "base_url", "revision") if key in judge}
        return {"judge": parts, "prompts": rewording_version()}

    def _read(self) -> dict[str, dict[str, str]]:
        """Return what the judge has written, by question."""
        inputs = (load_manifest(self.folder) or {}).get("inputs", {})
        if {key: inputs.get(key) for key in ("judge", "prompts")} != self._settings():
            return {}
        if not is_finished(self.folder, inputs):
            return {}
        return {record.pop("question"): record for record in read_records(self.folder / _FILE)}

    def _with(self, ground: Ground, known: Mapping[str, Mapping[str, str]]) -> Ground:
        model = re.sub(r"[^A-Za-z0-9 -]+", "-", Path(self.judge.model_name).name)
        rewordings = {
            f"by {model} {way}": [
                known[row.question][way] if row.question in known else row.question for row in ground.forget
            ]
            for way in REWORDINGS
        }
        return replace(ground, rewordings={**ground.rewordings, **rewordings})


def open_rewording(home: Path, judge: JudgeSettings, ground: Ground, is_asked: bool) -> Rewording | None:
    """Return the judge that rewords; None for kind "none".

    home: the folder of the recipe. is_asked: False where only what it wrote before is read. Raise UsageError for rows
    that have no other wording, and, for a judge that is asked, as `open_judge`.
    """
    if judge.kind == "none":
        return None
    if is_asked:
        open_judge(judge)
    if any(row.text for row in ground.forget):
        raise UsageError("attack.prompt.judge: the forget rows are texts, which have no other wording; leave it out")
    return Rewording(home / ATTACKS_FOLDER / _NAME, judge)
