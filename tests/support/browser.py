"""Look at a page in a real browser, headless: faults, requests, overflow, contrast, print."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip
_WIDE = """
const width = document.documentElement.clientWidth, found = [];
const scrolls = element => {
  for (let e = element.parentElement; e && e !== document.body; e = e.parentElement)
    if (getComputedStyle(e).overflowX !== 'visible') return true;
  return false;
};
if (document.scrollingElement.scrollWidth > width) found.push('page ' + document.scrollingElement.scrollWidth);
for (const element of document.body.querySelectorAll('*')) {
  const box = element.getBoundingClientRect();
  if (box.width && (box.right > width + 1 || box.left < -1) && !scrolls(element))
    found.push(element.tagName + ' ' + Math.round(box.right) + ' ' + (element.textContent || '').trim().slice(0, 40));
}
for (const text of document.querySelectorAll('svg text')) {
  const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
  if (box.left < svg.left - 1 || box.right > svg.right + 1 || box.top < svg.top - 1 || box.bottom > svg.bottom + 1)
    found.push('cut off: ' + text.textContent);
}
return found;
"""
_FAINT = """
const parse = colour => {
  const parts = colour.match(/[\\d.]+/g).map(Number);
  return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
};
const over = (top, alpha, below) => top.map((part, i) => alpha * part + (1 - alpha) * below[i]);
const light = rgb => rgb.map(part => part / 255).map(s => s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const {rgb, alpha} = parse(getComputedStyle(e).backgroundColor);
    layers.push([rgb, alpha]);
  }
  return layers.reverse().reduce((below, [rgb, alpha]) => over(rgb, alpha, below), [255, 255, 255]);
};
const cells = svg => [...svg.querySelectorAll('path')].map(path => [path, getComputedStyle(path)])
  .filter(([_, style]) => style.fill.startsWith('rgb'))
  .map(([path, style]) => [path.getBoundingClientRect(), parse(style.fill).rgb, style.fillOpacity * style.opacity]);
const faint = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const maps = new Map([...document.querySelectorAll('svg')].map(svg => [svg, cells(svg)]));
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
  const box = element.getBoundingClientRect();
  if (!text || !box.width || ['STYLE', 'SCRIPT'].includes(element.tagName)) continue;
  const svg = element.ownerSVGElement, style = getComputedStyle(element);
  let back = behind(svg || element);
  const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
  for (const [cell, rgb, alpha] of svg ? maps.get(svg) : [])
    if (cell.left <= x && x <= cell.right && cell.top <= y && y <= cell.bottom) back = over(rgb, alpha, back);
  const front = parse(svg ? style.fill : style.color);
  const [a, b] = [light(over(front.rgb, front.alpha, back)), light(back)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) faint.push(contrast.toFixed(2) + ' ' + text.slice(0, 40));
}
return faint;
"""

ANSWERED = "document.querySelector('.entry') && document.getElementById('stop').disabled"
"""True in the page of `msa-lite web` once every model has answered."""
_BROKEN = """
const broken = [], range = document.createRange();
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode;
  if (text.parentElement.closest('svg, pre, .hash') || !text.parentElement.checkVisibility()) continue;
  for (const word of text.data.matchAll(/(?<![^\\s(])\\p{L}+(?![^\\s.,:;)])/gu)) {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(word[0]);
  }
}
return broken;
"""

_LAST = "the last of the messages"


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Try a condition until it holds. Return whether it did within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def has_browser() -> bool:
    """Check whether chromium and its driver are installed."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """A headless chromium without any network of its own."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int = 1400, scheme: str = "light", media: str = "") -> None:
        """Load the page in a file at a width in pixels, with a colour scheme, on the screen or as for print."""
        self.open_address(page.as_uri(), width, scheme, media)

    def open_address(self, address: str, width: int = 1400, scheme: str = "light", media: str = "") -> None:
        """Load the page at an address, as `open` does that in a file."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self._driver.get_log("browser")
        self._driver.get_log("performance")
        self._driver.get(address)

    def faults(self) -> list[str]:
        """Return the console's messages since the page was opened.

        They come late: one of ours behind them shows that all are there.
        """
        self.run(f"console.error('{_LAST}')")
        messages = list[str]()

        def complete() -> bool:
            messages.extend(entry["message"] for entry in self._driver.get_log("browser"))
            return any(_LAST in message for message in messages)

        if not _comes_true(complete, 60):
            raise TimeoutError(f"the browser keeps its console to itself; so far: {messages}")
        return [message for message in messages if _LAST not in message]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened, without data: and the browser's own."""
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith(("data:", "chrome:"))]

    def overflow(self) -> list[str]:
        """Return what sticks out of the page or, in a picture, is cut off."""
        return list(self._driver.execute_script(_WIDE))

    def broken(self) -> list[str]:
        """Return the words, of letters alone, that stand on two lines; paths, hashes and the like may."""
        return list(self._driver.execute_script(_BROKEN))

    def faint(self) -> list[str]:
        """Return the texts whose contrast is below 4.5, each with it."""
        return list(self._driver.execute_script(_FAINT))

    def colours(self) -> tuple[str, str]:
        """Return the computed colours of the page's background and text."""
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        back, front = self._driver.execute_script(style)
        return back, front

    def run(self, script: str) -> Any:
        """Return what a script in the page returns."""
        return self._driver.execute_script(script)

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true in the page. Raise TimeoutError, with the page's text, if it never is."""
        if not _comes_true(lambda: bool(self.run(f"return Boolean({condition})")), seconds):
            raise TimeoutError(f"{condition}: not in {self.run('return document.body.innerText')}")

    def keys(self, selector: str, *keys: str) -> None:
        """Type keys into the element of a selector."""
        self._driver.find_element("css selector", selector).send_keys(*keys)

    def click(self, selector: str) -> None:
        """Click on the element of a selector."""
        self._driver.find_element("css selector", selector).click()

    def picture(self) -> bytes:
        """Return what the screen shows, a PNG."""
        return bytes(self._driver.get_screenshot_as_png())

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        printed = self._driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
        return base64.b64decode(printed["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser with an empty profile in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
