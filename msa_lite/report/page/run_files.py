"""Write a run's report from one list of sections: report.json, and report.html, which needs no network.

The page's layout is in `templates/report.html.jinja`, which escapes all that comes from the run. The same story gives
the same bytes.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import json_form, write_text
from msa_lite.report.page.charts import can_draw
from msa_lite.report.page.sections import run_sections
from msa_lite.report.run.story import Story
from msa_lite.report.tables.reports import RUN_REPORT

logger = logging.getLogger(__name__)

PAGE_FILE = "report.html"
_TEMPLATE = "report.html.jinja"


def run_json(story: Story) -> dict[str, Any]:
    """Return the JSON-able form of a story; docs/reference/report.md tells its keys."""
    head = {
        "kind": RUN_REPORT,
        "sentence": story.sentence,
        "basis": story.basis,
        "outcome": story.outcome,
        "verdict": json_form(story.verdict),
        "missing": list(story.missing),
        "warnings": list(story.warnings),
    }
    return head | {key: value for section in run_sections(story) for key, value in section.values.items()}


def write_page(story: Story, path: Path) -> None:
    """Write a run's page, whole or not at all."""
    write_text(path, make_page(story))


def make_page(story: Story, drawn: bool = True) -> str:
    """Return a run's page as HTML. drawn: False to leave out its pictures, which take seconds."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("msa_lite.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose, "capital": lambda text: f"{text[:1].upper()}{text[1:]}"}
    if drawn and not can_draw():
        logger.warning("no pictures on the page: pip install matplotlib, then write the report again")
    sections = [section for section in run_sections(story) if section.blocks]
    page = environment.get_template(_TEMPLATE).render(story=story, sections=sections, drawn=drawn and can_draw())
    return page.rstrip() + "\n"


def _prose(text: str) -> Any:
    """Return text as HTML: θ_0 with a lowered 0, `code`, coloured marks; percent signs stay with their numbers."""
    from markupsafe import Markup, escape

    marked = str(escape(re.sub(r"(?<=\d) %", "\u00a0%", text)))
    marked = re.sub(r"θ_(\w)", r"θ<sub>\1</sub>", marked)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", marked)
    for sign, role in {"■": "target", "●": "unlearned", "◆": "ideal"}.items():
        marked = marked.replace(sign, f'<span class="mark {role}" aria-hidden="true">{sign}</span>')
    return Markup(marked)
