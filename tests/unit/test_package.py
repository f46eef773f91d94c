"""What a stranger gets from a package index: the sdist, the wheel that it builds, and the page made of README.md."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.tools.blocks.links import links_of

ROOT = Path(__file__).parents[2]


def build(source: Path, target: str, out: Path) -> Path:
    """Build an sdist or a wheel as an installer does; return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(build(ROOT, "sdist", folder / "dist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, "wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def files(folder: Path) -> set[str]:
    """Return the files below a folder by their paths in it, without what Python compiles."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix() for path in paths}


def test_the_sdist_holds_tests_docs_and_checks(source: Path) -> None:
    names = {".ci/run", ".github/CONTRIBUTING.md", "docs/index.md", "examples/README.md", "mkdocs.yml", "Dockerfile"}
    assert {*names, "tests/conftest.py", "CHANGELOG.md", "LICENSE"} <= files(source)


def test_the_wheel_that_the_sdist_builds_has_the_package_with_its_recipes_and_nothing_else(
    wheel: zipfile.ZipFile,
) -> None:
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    recipes = {f"msa_lite/shipped_recipes/{name}" for name in files(ROOT / "recipes")}
    assert there == {f"msa_lite/{name}" for name in files(ROOT / "msa_lite")} | recipes
    assert len(recipes) >= 30


def test_links_and_pictures_of_the_page_lead_into_the_repository_at_the_tag(metadata: Message, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(str(metadata.get_payload(decode=False)), "utf-8")
    links = [link.to for link in links_of(tmp_path / "page.md")]
    assert [to for to in links if not to.startswith("https://")] == []
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    path, tag = urls["Source"].removeprefix("https://github.com/"), f"v{metadata['Version']}"
    raw, pages = f"https://raw.githubusercontent.com/{path}/{tag}/", f"{urls['Source']}/blob/{tag}/"
    assert {urls[name] for name in ("Homepage", "Source")} == {urls["Source"]}
    assert all(urls[name].startswith(f"{urls['Source']}/") for name in ("Changelog", "Issues"))
    ours = [to.partition("#")[0].removeprefix(place) for place in (raw, pages) for to in links if to.startswith(place)]
    assert len(ours) >= 30
    assert [to for to in ours if not (ROOT / to).is_file()] == []
    pictures = {to for to in links if to.endswith((".svg", ".png"))}
    assert pictures == {to for to in links if to.startswith(raw)} != set()
