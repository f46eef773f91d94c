"""Publish a folder in one call: look where it goes, choose what may be sent, send it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msa_lite.io.progress import Progress, silent
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.publish.destination import find_destination
from msa_lite.publish.upload import Published, push

_PLAIN = PublishOptions()


def push_folder(
    folder: str | Path, repo: str, options: PublishOptions = _PLAIN, progress: Progress = silent
) -> Published:
    """Send a model or adapter, or that of a run, to a repository of the Hub. Nobody is asked.

    repo: ACCOUNT/NAME, or NAME for the account of the token. It is private unless `options.public`. Raise as
    `find_destination`, `make_contents` and `push`, which this calls in turn.
    """
    from huggingface_hub.utils import disable_progress_bars

    to = find_destination(repo, private=not options.public)  # first: the files of a large model take minutes to check
    contents = make_contents(Path(folder), replace(options, repo=to.repo))
    with disable_progress_bars():
        return push(contents, to, gated=options.gated, progress=progress)
