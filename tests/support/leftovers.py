"""What a purge must not leave: the rows to forget, in the forms in which they stand in files."""

from __future__ import annotations

import html
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

from msa_lite.pipeline.run.report import report_run


def copy_run(finished: Path, folder: Path) -> Path:
    """Copy a finished run, with its baselines' runs; its reports show examples."""
    shutil.copytree(finished, folder)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace(str(finished), str(folder)))
    report_run(folder, show_examples=True)
    return folder


def forms(history: Path) -> list[bytes]:
    """The questions and answers to forget as they may stand in files."""
    rows = [json.loads(line) for line in (history / "data/forget.jsonl").read_text().splitlines()]
    texts = {text for row in rows for text in (row["question"], row["answer"])}
    ways: tuple[Callable[[str], str], ...] = (str, html.escape, lambda text: json.dumps(text)[1:-1])
    return sorted({way(text).encode() for text in texts for way in ways})


def holding(folder: Path, rows: list[bytes]) -> set[str]:
    """The files below a folder in which a row stands."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files if any(row in path.read_bytes() for row in rows)}


def spellings(text: str) -> dict[str, bytes]:
    """A text as programs write it into files, by the name of the form."""
    quoted = json.dumps(text)[1:-1]
    capitals = re.sub(r"\\u[0-9a-f]{4}", lambda match: "\\u" + match[0][2:].upper(), quoted)
    apart = unicodedata.normalize("NFD", text)
    markup = html.escape(text, quote=False)
    forms = {
        "as it is": text,
        "CR and LF": text.replace("\n", "\r\n"),
        "CR": text.replace("\n", "\r"),
        "accents apart": apart,
        "JSON": quoted,
        "JSON, not in ASCII": json.dumps(text, ensure_ascii=False)[1:-1],
        "JSON of pandas": quoted.replace("/", "\\/"),
        "JSON of Go": quoted.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "JSON in capitals": capitals,
        "JSON of .NET": re.sub("[<>&']|(\\\\\")", lambda match: f"\\u{ord(match[0][-1]):04X}", capitals),
        "JSON in JSON": json.dumps(quoted)[1:-1],
        "JSON with CR and LF": json.dumps(text.replace("\n", "\r\n"))[1:-1],
        "HTML": html.escape(text),
        "HTML of Jinja": markup.replace('"', "&#34;").replace("'", "&#39;"),
        "XML": markup.replace('"', "&quot;").replace("'", "&apos;"),
        "HTML without quotes escaped": markup,
        "CSV": text.replace('"', '""'),
        "YAML": text.replace("'", "''"),
        "Python": repr(text)[1:-1],
    }
    in_utf16 = {f"{name} in {code}": forms[name].encode(code) for name in ("as it is", "CR and LF", "accents apart")
                for code in ("utf-16-le", "utf-16-be")}  # fmt: skip
    return {name: form.encode() for name, form in forms.items()} | in_utf16
