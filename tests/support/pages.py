"""The text of a run's page, as a reader sees it."""

from __future__ import annotations

import html
import re
from pathlib import Path


def page_text(folder: Path) -> str:
    """Return the text of report.html: a line a paragraph or row, cells apart by " | ", `code` and θ_0 in ASCII."""
    text = (folder / "report.html").read_text()
    text = re.sub(r"<(style|svg|script|title)\b.*?</\1>", "", text, flags=re.S)
    text = re.sub(r"<sub>(\w+)</sub>", r"_\1", text)
    text = re.sub(r"</?code>", "`", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</(p|li|tr|h\d|dd|summary|figcaption)>", "\n", text)
    text = re.sub(r"</(td|th|dt)>", " | ", text)
    text = re.sub(r"<[^>]+>", "", text)
    return "\n".join(" ".join(line.split()) for line in html.unescape(text).splitlines())
