"""Every link of README, docs and CONTRIBUTING leads somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from tests.tools.arrows import ROOT
from tests.tools.blocks.links import Link, anchors, broken, links_of
from tests.tools.blocks.read import pages

CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
# Hosts that pages name. A new one is a decision: a reader's browser asks it as soon as they click.
HOSTS = {"arxiv.org", "github.com", "huggingface.co", "www.edpb.europa.eu"}


def all_links() -> list[Link]:
    return [link for page in [*pages(), CONTRIBUTING, ROOT / "SECURITY.md"] for link in links_of(page)]


def test_no_link_leads_nowhere() -> None:
    links = all_links()
    assert len(links) >= 30
    faults = [(link, broken(link)) for link in links]
    assert [f"{x.page.relative_to(ROOT)}:{x.line}: {x.to}: {fault}" for x, fault in faults if fault] == []


def test_every_table_begins_with_its_head() -> None:
    for page in [*pages(), CONTRIBUTING]:
        lines = ["", *page.read_text(encoding="utf-8").splitlines()]
        starts = [at for at in range(1, len(lines)) if lines[at].startswith("|") and not lines[at - 1].startswith("|")]
        loose = [at for at in starts if not (lines[at + 1].startswith("|--") or lines[at + 1].startswith("| --"))]
        assert loose == [], f"{page.relative_to(ROOT)}: rows that stand apart from their table"


def test_links_out_of_the_repository_lead_to_hosts_that_we_know() -> None:
    hosts = {urlsplit(link.to).netloc for link in all_links() if link.is_external}
    assert hosts <= HOSTS, "add a host that readers may be sent to"


PAGE = """# A page

## How it `works`, and *why*

## Twice
## Twice

<a id="here"></a>
[file](other.md) [part](other.md#one) [own](#how-it-works-and-why) ![picture](no.png)
`[code](nowhere.md)` [second](#twice_1) [bad](#nothing) [web](https://arxiv.org/abs/1) [plain](http://x.org) [id](#here)

```bash
[block](nowhere.md)
```
"""


def test_broken_links_and_anchors_are_found_with_their_line(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text(PAGE)
    other.write_text("# Other\n## Two\n")
    faults = {link.to: (link.line, broken(link)) for link in links_of(page)}
    assert {to: fault for to, fault in faults.items() if fault[1]} == {
        "other.md#one": (9, "no such heading"),
        "no.png": (9, "no such file"),
        "#nothing": (10, "no such heading"),
        "http://x.org": (10, "write an address that begins with https://"),
    }
    assert "nowhere.md" not in faults
    assert anchors(page) == {"a-page", "how-it-works-and-why", "twice", "twice_1", "here"}
