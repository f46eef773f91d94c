"""The blocks of README and docs do what they say: every page is run from its first block to its last.

`pytest -m slow tests/e2e/test_blocks_run.py -k deletion` runs one page. `tests/unit/test_blocks.py` checks in a moment
whether blocks are possible at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tools.arrows import ROOT
from tests.tools.blocks.folder import make_folder
from tests.tools.blocks.read import Block, pages, read_blocks
from tests.tools.blocks.run import BlockFailedError, run_page


def runnable_pages() -> dict[str, list[Block]]:
    """The blocks of each page that has any to run, by the page's path."""
    paths = pages() if (ROOT / "docs").is_dir() else []
    blocks = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    read = {name: read_blocks(text, name) for name, text in blocks.items()}
    return {name: found for name, found in read.items() if any(block.is_run for block in found)}


RUNNABLE = runnable_pages()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a page's blocks find, made once."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_folder(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_blocks_of_a_page_run(page: str, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "work", symlinks=True)
    ran = run_page(RUNNABLE[page], tmp_path / "work", tmp_path / "home")
    assert ran == sum(block.is_run for block in RUNNABLE[page])


def block(text: str, language: str = "bash") -> Block:
    return Block("page.md", 7, language, text)


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([block("cat no-such-file\n")], "page.md:7: `cat no-such-file` ended with 1"),
        ([block("msa-lite recipes show nothing\n")], "page.md:7: `msa-lite recipes show nothing` ended with 2"),
        ([block("# r.yaml\nforget: {}\n", "yaml"), block("msa-lite recipes validate r.yaml\n")], "target: is missing"),
        ([block("raise SystemExit('no')\n", "python")], "page.md:7: `this Python` ended with 1"),
        ([block("export A=b\nfalse\ntrue\n")], "ended with 1"),
        pytest.param([block("msa-lite recipes list | grep no-such-line\n")], "ended with 1", marks=pytest.mark.slow),
        pytest.param([block("pip install 'msa-lite[trian]'\n")], "no such extra: trian", marks=pytest.mark.slow),
    ],
)
def test_a_block_that_fails_is_named_with_page_and_line(blocks: list[Block], fault: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(BlockFailedError) as caught:
        run_page(blocks, tmp_path / "work", tmp_path / "home")
    assert fault in str(caught.value)
    assert str(caught.value).startswith("page.md:7: ")
