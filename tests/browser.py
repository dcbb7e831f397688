"""Headless Chromium for tests: pages and pictures as their readers see them."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

from waiting import LONGEST_WAIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Window:
    """A page that shows one file after another: a fresh one costs several times the CPU time of most that it shows."""

    def __init__(self, browser: Browser) -> None:
        self.page = browser.new_context().new_page()
        self.page.context.set_default_timeout(1000 * LONGEST_WAIT_S)
        self.page.context.route("**/*", self._only_itself)
        self.page.on("console", self._printed)
        self.page.on("pageerror", lambda error: self._problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self._problems.append(f"dialog: {dialog.message}"))

    @contextlib.contextmanager
    def shows(self, path: Path, width: int, height: int, scheme: Literal["dark", "light"]) -> Iterator[Page]:
        """Shows a file, and then nothing.

        Raises:
            AssertionError: at the end, if the page wrote an error to the console, threw one, or asked for another file.
        """
        self._path, self._problems = path, list[str]()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(media="null", color_scheme=scheme, reduced_motion="null")
        self.page.goto(path.as_uri())
        yield self.page
        assert self._problems == []
        self.page.goto("about:blank")

    def _only_itself(self, route: Route) -> None:
        asked = route.request.url
        if asked.split("#")[0] == self._path.as_uri() or asked.startswith(("data:", "blob:")):
            route.continue_()
        else:
            self._problems.append(f"asked for {asked}")
            route.abort()

    def _printed(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._problems.append(message.text)


_free: dict[Browser, list[Window]] = {}
"""The windows of each browser that show nothing."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, for the tests of one file: starting it takes a second or two."""
    with sync_playwright() as playwright:
        # Root has no sandbox in Chromium; what it opens here is our own.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * LONGEST_WAIT_S
        )
        _free[browser] = []
        try:
            yield browser
        finally:
            del _free[browser]
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """A file in a page that nobody else has, without network.

    Raises:
        AssertionError: at the end, if the page wrote an error to the console, threw one, or asked for another file.
    """
    window = _free[browser].pop() if _free[browser] else Window(browser)
    try:
        with window.shows(path, width, height, "dark" if dark else "light") as page:
            yield page
    except BaseException:
        window.page.context.close()
        raise
    _free[browser].append(window)


def until(page: Page, expression: str) -> None:
    """Waits until it is true. wait_for_function would have the page ask again, which its policy (no eval) forbids."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(5)


def ready(page: Page) -> Page:
    """Waits until a page of iaprof's can be used: until it has drawn itself."""
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_selector("html[data-ready]")
    drawn(page)
    return page


def drawn(page: Page) -> None:
    """Waits until a page has drawn what changed last: it draws in an animation frame, which may come late."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
