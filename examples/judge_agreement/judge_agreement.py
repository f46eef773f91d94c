"""Hold a judge against a person: draw its verdicts for marking, and say how far both agree.

    python examples/judge_agreement/judge_agreement.py sample runs/judged --n 200 --out judge-sample.csv
    python examples/judge_agreement/judge_agreement.py agree runs/judged judge-sample.csv

`sample` draws verdicts evenly at random from all models of a judged run, or of a folder of `msa-lite evaluate`. Write a
letter into the last column of each row, in a spreadsheet. The CSV holds rows of the data, and `msa-lite purge` does not
know it: delete it yourself. `agree` prints the share of equal verdicts, its 95 % interval and Cohen's kappa, on the
letters and on each metric that follows from them. Quote the kappa of a metric: candidates stand in another order in
each row, so letters hardly agree by chance. Rows without a letter are left out.

The MSA paper marks 200 verdicts (appendix on judging). The sheet is blind: it has neither the judge's letter, nor the
model, nor which candidate is the truth or the ideal's answer. Verdicts are found again in the run's records by an id,
the hash of what the judge was shown.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from msa_lite.errors import DataError, MismatchError, OutputError, UsageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.evals.judge.prompts import NONE, read_letter
from msa_lite.evals.scores.evaluation import EVALUATION_KIND, VERDICTS, finished_inputs
from msa_lite.evals.scores.records import read_records
from msa_lite.io.files.reading import local_path, read_bytes
from msa_lite.io.files.writing import check_writable, digest, write_text
from msa_lite.io.finished.seal import load_manifest
from msa_lite.report.run.rows import clean
from msa_lite.report.tables.formats import csv_lines

SHEET = "judge-sample.csv"
COLUMNS_OF_SHEET = ("id", "question", "answer", "candidates", "choose", "letter")
LETTER = "letter"  # the name of the agreement on letters, beside those on metrics
FEWEST_MARKS = 2  # marked rows, of which agreement can be told
_VALIDATION = "_validation"  # ends the folders of scores that a choice was made by
_Z = 1.96  # of a 95 % interval
_LARGEST = 256 << 20  # bytes of a sheet
_NOT_JUDGED = (
    "no answer here was judged; score with evaluate.judge, or with `msa-lite evaluate --judge`, on tofu or restor"
)


@dataclass(frozen=True)
class JudgeVerdict:
    """One call to the judge, as the records of a run keep it."""

    model: str
    """The folder of the model's scores: "target", "ideal", "unlearned"."""
    set_name: str
    index: int
    question: str
    tested: str
    """The answer under test."""
    shown: Sequence[str]
    """The lettered candidates, or the right answers, a line each."""
    reply: str
    """The judge's letter."""
    scores: Mapping[str, Mapping[str, float]]
    """The scores by metric for each letter that may be replied."""

    @property
    def id(self) -> str:
        """Return a name that tells nothing of the verdict. It begins with a letter, or a spreadsheet may round it."""
        place = [self.model, self.set_name, self.index, self.question, self.tested, [*self.shown], [*self.metrics]]
        return f"v{digest(place)[:15]}"

    @property
    def letters(self) -> str:
        """Return the letters to choose from, besides NONE."""
        return "".join(letter for letter in self.scores if letter != NONE)

    @property
    def metrics(self) -> list[str]:
        """Return the names of the metrics that the verdict decides."""
        return [*self.scores[NONE]]

    @property
    def choices(self) -> str:
        """Return what a person may write: "A to G, or Z for none"."""
        if self.letters == "YN":
            return "Y or N"
        return f"{self.letters[0]} to {self.letters[-1]}, or {NONE} for none" if self.letters[1:] else f"A or {NONE}"


@dataclass(frozen=True)
class Sheet:
    """A sheet that was written for a person to mark."""

    json_keys: ClassVar = {"file": "file", "n": "count", "judged": "available", "models": "models", "seed": "seed"}

    file: Path
    count: int
    """The rows of the sheet."""
    available: int
    """The verdicts that they were drawn from."""
    models: Sequence[str]
    """The models whose answers were judged."""
    seed: int


@dataclass(frozen=True)
class Agreement:
    """The agreement of judge and person on their letters, or on a metric that follows from them."""

    name: str
    """LETTER, or the name of a metric."""
    n: int
    """Verdicts that both gave."""
    share: float
    """The share on which both agree, in [0, 1]."""
    low: float
    """The lower end of its 95 % interval (Wilson, 1927)."""
    high: float
    """The upper end."""
    kappa: float | None
    """Cohen's kappa, in [-1, 1]; None where it is not defined, since both always say one and the same thing."""
    judge: float | None = None
    """The metric by the judge's letters; None for letters."""
    person: float | None = None
    """The metric by the person's."""


@dataclass(frozen=True)
class JudgeAgreement:
    """A marked sheet beside the judge's verdicts."""

    json_keys: ClassVar = ("marked", "unmarked", "agreements")

    marked: int
    unmarked: int
    """Rows without a letter, which are left out."""
    agreements: Sequence[Agreement]
    """On the letters, then on each metric."""


def sample_verdicts(run: str | Path, n: int = 200, seed: int = 0, out: str | Path = SHEET) -> Sheet:
    """Write a sheet of `n` verdicts of a run, drawn evenly at random (or all), for a person to mark.

    run: the folder of a run, for its final scores, or of an evaluation. The sheet holds questions and answers, and
    `purge` does not know it, so it is written outside the run. Raise UsageError for a place inside the run, OutputError
    if the file exists (it may hold marks), MismatchError for a run without judged answers.
    """
    home, path = local_path(run), local_path(out)
    if n < 1:
        raise UsageError(f"n: {n}; it must be at least 1")
    if path.resolve().is_relative_to(home.resolve()):
        raise UsageError(f"{path}: lies in {home}, whose purge would not remove it; name a place outside")
    if path.exists():
        raise OutputError(f"{path}: is there already, and may hold somebody's marks; name another file with --out")
    if not path.parent.exists():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another place")
    check_writable(path)
    verdicts = read_judge_verdicts(home)
    drawn = random.Random(seed).sample(verdicts, min(n, len(verdicts)))
    rows = [(v.id, clean(v.question), clean(v.tested), "\n".join(map(clean, v.shown)), v.choices, "") for v in drawn]
    text = csv_lines([COLUMNS_OF_SHEET, *([_harmless(cell) for cell in row] for row in rows)])
    write_text(path, f"\ufeff{text}")  # a spreadsheet reads UTF-8 by the mark
    return Sheet(path, len(drawn), len(verdicts), list(dict.fromkeys(v.model for v in verdicts)), seed)


def _harmless(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")) else text


def judge_agreement(run: str | Path, file: str | Path) -> JudgeAgreement:
    """Compare the letters that a person wrote into a sheet with the judge's, which are read from the run.

    Raise DataError with all faults of the sheet (ids that the run does not have, letters that no candidate has), and
    where fewer than two rows are marked; MismatchError for a run without judged answers.
    """
    verdicts = {verdict.id: verdict for verdict in read_judge_verdicts(local_path(run))}
    path = local_path(file)
    marks, faults = read_marks(path), []
    letters: dict[str, str] = {}
    for name, mark in marks:
        if not name:
            faults.append(f"'{mark}' stands in a row without an id")
        elif name not in verdicts:
            faults.append(f"{name}: no verdict of {run}; is this the sheet of another run, or was it scored anew?")
        elif name in letters:
            faults.append(f"{name}: stands twice")
        elif mark and read_letter(mark, verdicts[name].letters) is None:
            faults.append(f"{name}: '{mark}' is no choice; write {verdicts[name].choices}")
        else:
            letters[name] = read_letter(mark, verdicts[name].letters) or ""
    if faults:
        raise DataError(join_faults(f"{path}: {len(faults)} of {len(marks)} rows cannot be read:", faults))
    pairs = [(verdicts[name], letter) for name, letter in letters.items() if letter]
    if len(pairs) < FEWEST_MARKS:
        raise DataError(
            f"{path}: {len(pairs)} of {len(marks)} rows marked; write letters into the column '{LETTER}' of "
            f"{FEWEST_MARKS} rows or more"
        )
    return JudgeAgreement(len(pairs), len(letters) - len(pairs), list(_agreements(pairs)))


def _agreements(pairs: Sequence[tuple[JudgeVerdict, str]]) -> Iterator[Agreement]:
    """Yield the agreement on letters, and on each metric."""
    yield compare_marks(LETTER, [(verdict.reply, letter) for verdict, letter in pairs])
    for name in dict.fromkeys(name for verdict, _ in pairs for name in verdict.metrics):
        values = [
            (verdict.scores[verdict.reply][name], verdict.scores[letter][name])
            for verdict, letter in pairs
            if name in verdict.metrics
        ]
        judge, person = (sum(value) / len(values) for value in zip(*values, strict=True))
        yield compare_marks(name, values, judge, person)


def compare_marks(
    name: str, pairs: Sequence[tuple[object, object]], judge: float | None = None, person: float | None = None
) -> Agreement:
    """Return the agreement of pairs (judge's, person's), of which there is at least one."""
    n = len(pairs)
    share = sum(ours == theirs for ours, theirs in pairs) / n
    square = _Z**2 / n
    centre, half = share + square / 2, _Z * math.sqrt(share * (1 - share) / n + square / (4 * n))
    low, high = max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))
    return Agreement(name, n, share, low, high, cohen_kappa(pairs), judge, person)


def cohen_kappa(pairs: Sequence[tuple[object, object]]) -> float | None:
    """Return (p − e) / (1 − e): p is the share of equal pairs, e the share expected by chance (Cohen, 1960).

    e = Σ over labels of the product of both sides' shares. None where e = 1: both gave one label alone.
    """
    n = len(pairs)
    first, second = Counter(ours for ours, _ in pairs), Counter(theirs for _, theirs in pairs)
    by_chance = sum(first[label] * second[label] for label in first)  # times n²
    if by_chance == n * n:
        return None
    return (n * sum(ours == theirs for ours, theirs in pairs) - by_chance) / (n * n - by_chance)


def read_judge_verdicts(run: Path) -> list[JudgeVerdict]:
    """Return all verdicts in the records of a run or an evaluation. Raise MismatchError where there are none."""
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; give that of a run, or of an evaluation")
    verdicts, has_judge = [], False
    for name, folder in _evaluations(run).items():
        inputs = finished_inputs(folder)
        if inputs.get("judge", {}).get("kind", "none") == "none":
            continue
        has_judge = True
        for set_name in inputs["questions"]["sets"]:
            for record in read_records(folder / f"{set_name}.jsonl"):
                verdicts += [_verdict(name, set_name, record, entry) for entry in record.get(VERDICTS, ())]
    if not verdicts:
        reason = _NOT_JUDGED
        if has_judge:
            reason = (
                "its records have no letters of the judge: it gave none, or an earlier msa-lite wrote them; score anew"
            )
        raise MismatchError(f"{run}: {reason}")
    return verdicts


def _evaluations(run: Path) -> dict[str, Path]:
    """Return the folders of finished scores by the model's name."""
    if (load_manifest(run) or {}).get("kind") == EVALUATION_KIND:
        places = {"model": run, "ideal": run / "ideal"}
    else:
        places = {path.name: path for path in sorted((run / "evaluation").glob("*")) if path.is_dir()}
    return {
        name: path
        for name, path in places.items()
        if not name.endswith(_VALIDATION) and (load_manifest(path) or {}).get("kind") == EVALUATION_KIND
    }


def _verdict(model: str, set_name: str, record: Record, entry: Record) -> JudgeVerdict:
    scores = {
        letter: {"accuracy" if name.startswith("correct") else name: value for name, value in values.items()}
        for letter, values in entry["scores"].items()
    }
    place = (model, set_name, record["index"], record["question"])
    return JudgeVerdict(*place, entry["tested"], entry["shown"], entry["reply"], scores)


def read_marks(path: Path) -> list[tuple[str, str]]:
    """Return (id, letter) of every row of a sheet, as a person or a spreadsheet has saved it.

    Commas, semicolons and tabs are read as separators, any line ends, UTF-8 or UTF-16; of other encodings ids and
    letters can still be read, since they are ASCII. Raise DataError for a file without the columns id and letter.
    """
    raw = read_bytes(path, _LARGEST, DataError)
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    text = raw.decode(encoding, errors="replace")
    if text.lower().startswith("sep="):  # a first line for Excel
        text = text.partition("\n")[2]
    try:
        for separator in ",;\t":
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
            names = [name.strip().lower() for name in rows[0]] if rows else []
            if {"id", LETTER} <= {*names}:
                break
        else:
            raise DataError(f"{path}: no sheet of `sample`: its first line lacks the columns id and {LETTER}")
    except csv.Error as error:
        raise DataError(f"{path}: not CSV ({error})") from error
    places = [names.index("id"), names.index(LETTER)]
    filled = [row for row in rows[1:] if any(cell.strip() for cell in row)]
    return [tuple(row[at].strip() if at < len(row) else "" for at in places) for row in filled]  # type: ignore[misc]


def main() -> None:
    """Draw a sheet, or print the agreement on a marked one."""
    parser = argparse.ArgumentParser(description="Hold the verdicts of a judge against those of a person.")
    commands = parser.add_subparsers(dest="command", required=True)
    draws = commands.add_parser("sample", help="write verdicts of a run into a CSV, for a person to mark")
    draws.add_argument("run", help="the folder of a run whose answers were judged, or of `msa-lite evaluate`")
    draws.add_argument("--n", type=int, default=200, help="the number of verdicts")
    draws.add_argument("--seed", type=int, default=0, help="of the draw")
    draws.add_argument("--out", default=SHEET, help="the CSV to write")
    holds = commands.add_parser("agree", help="print how far judge and person agree")
    holds.add_argument("run", help="the same folder")
    holds.add_argument("file", help="the marked CSV")
    given = parser.parse_args()
    if given.command == "sample":
        sheet = sample_verdicts(given.run, given.n, given.seed, given.out)
        print(f"written: {sheet.file}, {sheet.count} of {sheet.available} verdicts ({', '.join(sheet.models)})")
        return
    result = judge_agreement(given.run, given.file)
    print(f"marked: {result.marked} rows; without a letter, and left out: {result.unmarked}")
    for found in result.agreements:
        kappa = "not defined" if found.kappa is None else f"{found.kappa:.3f}"
        print(f"{found.name}: {found.share:.3f} of {found.n} ({found.low:.3f} to {found.high:.3f}), kappa {kappa}")


if __name__ == "__main__":
    main()
