"""The live page in a browser, over servers that were really started: what a reader sees, does and is protected from."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

import minisgl.server
from minisgl.benchmark.serving import Serving, serving
from minisgl.figures.style import STATES
from minisgl.server.live import _FILES
from minisgl.server.security import OPEN_PATHS

FOLDER = Path(minisgl.server.__file__).parent / "page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# No sandbox: where tests run as root there is none to be had. The others keep it from asking for anything by itself.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
KEY = "sesame"
COMMON = ["--device", "cpu", "--admin-port", "0"]
THEMES = [("light", 1400), ("light", 390), ("dark", 1400), ("dark", 390)]
MARKUP = '<img src="x" onerror="document.title=1"><script>document.title=2</script>&amp;'
# Text colour and the nearest ground behind it, of every element that holds text, as far as it can be seen.
COLORS = """() => [...document.querySelectorAll('body *')].filter(e => e.offsetParent !== null &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
        let at = e;
        while (at.parentElement && getComputedStyle(at).backgroundColor === 'rgba(0, 0, 0, 0)') at = at.parentElement;
        return [e.outerHTML.slice(0, 60), getComputedStyle(e).color, getComputedStyle(at).backgroundColor];
    })"""
NAMELESS = """() => [...document.querySelectorAll('input, textarea, button, [role=img], [role=log]')].filter(e =>
    !(e.labels?.length || e.getAttribute('aria-label') || (e.tagName === 'BUTTON' && e.textContent.trim()))
    ).map(e => e.outerHTML)"""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    options = ["--model", "tiny", "--num-pages", "200", "--max-model-len", "512", "--strict", *COMMON]
    with serving(options) as server:
        yield server


@pytest.fixture(scope="module")
def parrot() -> Iterator[Serving]:
    """An echo that takes its time, and wants a key."""
    with serving(["--echo", "--echo-rate", "20", "--in-process", "--api-key", KEY, *COMMON]) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        message = f"the page's tests need {', '.join(BROWSERS[:-1])} or {BROWSERS[-1]}: apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a server's page, with its key typed in. In the end nothing may have been asked of anybody else, and nobody
    may have complained in the console."""
    outside: list[str] = []
    complaints: list[str] = []
    contexts = []

    def open_page(server: Serving, *, key: str = "", theme: str = "light", width: int = 1400) -> Page:
        assert server.admin_url is not None
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})  # type: ignore
        contexts.append(context)

        def route(route: Route) -> None:
            url = route.request.url
            if url.startswith((server.admin_url + "/", "data:")):  # type: ignore[operator]
                route.continue_()
            else:
                outside.append(url)
                route.abort()

        def complain(text: str) -> None:
            if not (key and "401 (Unauthorized)" in text):  # it asks before its key is typed
                complaints.append(text)

        context.route("**/*", route)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: message.type in ("error", "warning") and complain(message.text))
        page.on("pageerror", lambda error: complain(str(error)))
        page.goto(server.admin_url)
        if key:
            page.click("#options summary")
            page.fill("#key", key)
            page.click("#options summary")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not outside and not complaints, (outside, complaints)


def number(page: Page, name: str) -> int:
    """One of the engine's numbers as they are shown."""
    text = page.locator("#numbers div", has=page.locator("dt", has_text=re.compile(f"^{name}$"))).locator("dd")
    return int(text.inner_text().replace(",", ""))


def states(page: Page) -> set[str]:
    """Which kinds of pages are to be seen."""
    return set(page.eval_on_selector_all("#pages i", "cells => cells.map(cell => cell.className)"))


def until(page: Page, is_so: Callable[[], bool]) -> None:
    """Wait until it is so. Playwright's own way to wait for more than an element evaluates strings within the page,
    which the page's policy forbids."""
    deadline = time.monotonic() + 15
    while not is_so():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.mark.browser
def test_an_answer_streams_while_batch_and_pages_change(server: Serving, open_page: Open) -> None:
    page = open_page(server)
    until(page, lambda: page.inner_text("#state") == "live")
    assert page.inner_text("#model") == "tiny" and "Nothing runs." in page.inner_text("#batch")
    assert states(page) == {"free"} and page.locator("#pages i").count() == 199

    body = {"prompt": "Once upon a time " * 9, "max_tokens": 450, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as other:
        assert other.status_code == 200
        page.fill("#text", "What is a page?")
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop:enabled")
        page.wait_for_selector("#batch .mark.decode")
        page.wait_for_selector("#pages .private")
        assert "prompt tokens" in (page.get_attribute("#batch .bar >> nth=0", "aria-label") or "")
        page.wait_for_selector(".turn.assistant .said:not(:empty)")
        page.wait_for_selector(".turn.assistant .note")
        note = page.inner_text(".turn.assistant .note")
        assert re.match(r"\d+ tokens in, \d+ of them cached, \d+ out, first after \d+ ms", note), note
        assert number(page, "running") >= 1
    page.wait_for_selector("#batch .empty")
    page.wait_for_selector("#pages :is(.cached.idle)")
    assert number(page, "pages in use") == 0 and number(page, "tokens out") > 8
    assert "private" not in states(page)
    page.wait_for_selector("#tree li li")

    page.check("#as-text")
    until(page, lambda: "Once upon a time" in page.inner_text("#tree"))
    page.click("#flush")
    page.wait_for_selector("#tree .empty")
    page.wait_for_selector("#pages .evicted")
    until(page, lambda: states(page) == {"free"})


@pytest.mark.browser
def test_text_grows_and_is_never_markup(parrot: Serving, open_page: Open) -> None:
    """What is said comes back, a token at a time, and stands there as it was typed."""
    page = open_page(parrot, key=KEY)
    page.fill("#text", MARKUP)
    page.keyboard.press("Enter")
    said = page.locator(".turn.assistant .said")
    page.wait_for_selector(".turn.assistant .said:not(:empty)")
    lengths = set()
    while page.is_enabled("#stop"):
        lengths.add(len(said.inner_text()))
        page.wait_for_timeout(20)
    assert len(lengths) > 5
    assert MARKUP in said.inner_text() and page.inner_text(".turn.user .said") == MARKUP
    assert page.locator("#log :is(img, script)").count() == 0 and page.title() == "minisgl"


@pytest.mark.browser
def test_stop_ends_the_answer_in_the_engine_too(parrot: Serving, open_page: Open) -> None:
    page = open_page(parrot, key=KEY)
    page.fill("#text", "over and over " * 60)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .said:not(:empty)")
    page.wait_for_selector("#batch .mark.decode")
    page.click("#stop")
    page.wait_for_selector(".turn.assistant .note:text-is('stopped')")
    page.wait_for_selector("#batch .empty")
    assert page.is_enabled("#send") and page.evaluate("document.activeElement.id") == "text"
    page.click("#clear")
    assert page.inner_text("#log") == ""


@pytest.mark.browser
def test_all_of_it_works_from_the_keyboard(parrot: Serving, open_page: Open) -> None:
    page = open_page(parrot, key=KEY)
    visited = []
    for _ in range(7):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", visited
    order = ["log", "text", "send", "clear", "pause", "flush", "as-text"]
    assert visited == order
    page.focus("#text")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert page.inner_text(".turn.user .said") == "one\ntwo"
    page.wait_for_selector(".turn.assistant .note")
    page.focus("#pause")
    page.keyboard.press("Space")
    assert page.get_attribute("#pause", "aria-pressed") == "true" and page.inner_text("#state") == "paused"
    assert page.evaluate(NAMELESS) == []


@pytest.mark.browser
def test_what_the_server_refuses_is_said(parrot: Serving, open_page: Open) -> None:
    page = open_page(parrot, key="wrong")
    page.fill("#text", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .note.bad")
    assert "valid key" in page.inner_text(".turn.assistant .note")
    page.wait_for_selector("#state.bad")
    assert "valid key" in page.inner_text("#state")


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "width"), THEMES)
def test_it_is_readable_in_both_themes_and_widths(parrot: Serving, open_page: Open, theme: str, width: int) -> None:
    page = open_page(parrot, theme=theme, width=width, key=KEY)
    page.click("#options summary")
    page.fill("#text", "w" * 300)
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .said:not(:empty)")
    page.wait_for_selector("#batch .mark.decode")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("log.scrollWidth <= log.clientWidth")
    is_beside = page.evaluate("live.getBoundingClientRect().left >= chat.getBoundingClientRect().right")
    assert is_beside == (width > 1000)
    colors = page.evaluate(COLORS)
    assert len(colors) > 20
    assert [(what, round(ratio, 2)) for what, a, b in colors if (ratio := contrast(a, b)) < 4.5] == []
    (ground,) = {luminance(b) > 0.5 for what, _, b in colors if what.startswith("<h2")}
    assert ground == (theme == "light")
    page.click("#stop")
    page.wait_for_selector(".turn.assistant .note")


def luminance(color: str) -> float:
    """Relative luminance of ``rgb(...)``, by WCAG."""
    parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# ------------------------------------------------------------------------------------------------ its files


def test_the_palette_is_the_books() -> None:
    found = dict(re.findall(r"--sgl-([\w-]+): \"?([^;\"]+)", (FOLDER / "page.css").read_text(encoding="utf-8")))
    want = {}
    for name, state in STATES.items():
        want |= {name: state.color, f"{name}-ink": state.ink, f"{name}-symbol": state.symbol}
    assert found == want


def test_the_files_name_no_other_place_and_hold_no_inline_script() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(name for name, _ in _FILES.values())
    for path in FOLDER.iterdir():
        assert not re.search(r"https?:|//[a-z]|@import|url\(", path.read_text(encoding="utf-8")), path.name
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\son\w+=|<script(?! src=)", html)
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def test_the_files_are_open_and_what_they_show_is_not(parrot: Serving) -> None:
    assert set(_FILES) <= OPEN_PATHS
    for path in _FILES:
        answer = httpx.get(f"{parrot.admin_url}{path}")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert httpx.get(f"{parrot.url}{path}").status_code == 404  # where everybody comes
    assert httpx.get(f"{parrot.admin_url}/live").status_code == 401
    named = httpx.get(f"{parrot.admin_url}/", headers={"host": "evil.example"})
    assert named.status_code == 403
