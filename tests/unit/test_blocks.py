"""Every block of code in README and docs is possible: commands, options, recipes and Python exist. The slow tests run
them; see `tests/e2e/test_blocks_run.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.tools.arrows import ROOT
from tests.tools.blocks.check import check_page, commands, logical_lines
from tests.tools.blocks.folder import REQUEST
from tests.tools.blocks.read import RUN, loose_commands, pages, read_blocks

LEAST = 85  # blocks that are run or written; raise it as pages grow
MOST_MARKS = 0.3  # of all blocks that could be run


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_are_possible(page: Path, tmp_path: Path) -> None:
    (tmp_path / "my-request.yaml").write_text(REQUEST)
    text, name = page.read_text(), str(page.relative_to(ROOT))
    assert check_page(read_blocks(text, name), tmp_path) + loose_commands(text, name) == []


def test_most_blocks_are_run() -> None:
    blocks = [block for page in pages() for block in read_blocks(page.read_text(), page.name)]
    counts = Counter(block.language for block in blocks if block.is_run)
    calls = sum(len(commands(block.text)) for block in blocks if block.language == "bash")
    print(f"{counts.total()} blocks run ({dict(counts)}), {calls} calls of msa-lite")  # noqa: T201
    assert counts.total() >= LEAST
    reference = {"commands.md"}  # the examples of the help
    marked = [block for block in blocks if block.language in RUN and block.mark and block.page not in reference]
    assert len(marked) <= MOST_MARKS * (len(marked) + counts.total())


def faults(text: str, folder: Path) -> list[str]:
    return check_page(read_blocks(text, "page.md"), folder)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```bash\nmsa-lite merge --tarjet T\n```\n", "page.md:1: `msa-lite merge --tarjet T`: No such option"),
        ("```bash\nmsa-lite evaluate M --benchmark tufo --out o\n```\n", "'tufo' is not one of"),
        ("```bash\nmsa-lite tofu/forget10 forget.alfa=1\n```\n", "forget.alfa: unknown key (did you mean 'alpha'?)"),
        ("```bash\naccelerate launch -m msa_lite evaluate M --uot o\n```\n", "No such option"),
        ("<!-- not run: no GPU -->\n```bash\nmsa-lite run --no-option R\n```\n", "page.md:2:"),
        ("```yaml\n# bad.yaml\ntarget: T\nprior: P\nforgt: {}\noutput: o\n```\n", "forgt: unknown key"),
        ("<!-- not run: a part -->\n```yaml\nselect: {keep: often}\n```\n", "select.keep"),
        ("```python\nmsa_lite.rum()\n```\n", "msa_lite has no rum"),
        ("```console\n$ ls\n```\n", "a block of 'console'; choose from bash, python, yaml, text, json, mermaid"),
        ("<!-- not run -->\n```bash\nls\n```\n", "the mark gives no reason"),
        ("<!-- not run: why -->\n```text\nx\n```\n", "is never run; take the mark away"),
        ("```bash\nls\n", "the block has no end"),
    ],
)
def test_an_impossible_block_is_named_with_page_and_line(text: str, fault: str, tmp_path: Path) -> None:
    found = faults(text, tmp_path)
    assert len(found) == 1
    assert found[0].startswith("page.md:")
    assert fault in found[0]


def test_a_command_without_a_fence_is_named() -> None:
    text = "Do this:\n\n    msa-lite verify R\n\n- and\n\n  ```bash\n      msa-lite verify R\n  ```\n"
    assert loose_commands(text, "page.md") == ["page.md:3: a command outside of a ```bash block"]


GOOD = """
```yaml
# mine.yaml
target: T
prior: P
forget:
  data: {path: delete.jsonl}
output: runs/mine
```

- In a list:

  ```bash
  # a comment with msa-lite nonsense
  msa-lite mine.yaml forget.alpha=1.25 \\
      output=runs/stronger   # continued
  HF_HUB_OFFLINE=1 msa-lite verify runs/mine | head
  msa-lite mergekit mine.yaml > out.yml; msa-lite recipes schema
  cat > written.yaml <<'END'
  msa-lite nonsense
  END
  msa-lite written.yaml
  msa-lite --version
  ```

<!-- not run: a part of a recipe -->
```yaml
history:
  checkpoints:
    - {checkpoint: A@tokens=3B}
  exposure: 4B
```

```python
import msa_lite
msa_lite.run("mine.yaml")
```

```json
{"question": "Where?", "answer": "There."}
{"question": "When?", "answer": "Then."}
```
"""


def test_what_is_possible_has_no_faults(tmp_path: Path) -> None:
    blocks = read_blocks(GOOD, "page.md")
    assert check_page(blocks, tmp_path) == []
    assert [(block.line, block.language, block.mark) for block in blocks] == [
        (2, "yaml", None), (13, "bash", None), (27, "yaml", "a part of a recipe"), (34, "python", None),
        (39, "json", None),
    ]  # fmt: skip
    calls = commands(blocks[1].text)
    assert calls[0] == ["mine.yaml", "forget.alpha=1.25", "output=runs/stronger"]
    assert ["mergekit", "mine.yaml"] in calls
    assert len(calls) == 6
    assert not any("nonsense" in line for line in logical_lines(blocks[1].text))
