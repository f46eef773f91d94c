"""msa-lite web: try the models of a run in a page of the browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from msa_lite.cli.help import Command, takes_json, takes_run
from msa_lite.cli.output import quieten_libraries


@click.command(cls=Command)
@takes_run
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port of this machine; 0 takes a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@takes_json
@click.pass_obj
def web_command(verbose: bool, run: Path, port: int, opens: bool, as_json: bool) -> None:
    """Ask the models of RUN in a page of the browser.

    The page shows the answers of target, unlearned model and ideal as they come, and the rows to forget with their
    answers. In the picture of the choice, a click on a point asks the model at these strengths; sliders set any others.

    Only this machine can reach the page, at an address with a secret token. It loads nothing from the network, and
    nothing is written. Ctrl-C ends it. To reach it from another machine, give --port PORT here, and run
    `ssh -L PORT:127.0.0.1:PORT THIS_MACHINE` there.

    \b
    msa-lite web runs/quickstart --open
    msa-lite web runs/quickstart/baselines/npo --port 8123
    """
    from msa_lite.web import open_page

    quieten_libraries(verbose)
    page = open_page(run, port)
    for name, reason in page.panel.missing.items():
        click.echo(f"no {name}: {reason}", err=True)
    click.echo("Open this address; Ctrl-C ends it:", err=True)
    click.echo(json.dumps({"address": page.address}) if as_json else page.address)
    with _opened_in_browser(page.address) if opens else nullcontext():
        page.serve()


@contextmanager
def _opened_in_browser(address: str) -> Iterator[None]:
    """Open an address through a file of this user: everybody on the machine can see the arguments of a browser."""
    import tempfile
    import webbrowser

    with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="msa-lite-", delete=False) as file:  # its mode is 0600
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
    try:
        webbrowser.open(Path(file.name).as_uri())
        yield
    finally:
        Path(file.name).unlink(missing_ok=True)
