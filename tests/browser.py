"""Headless Chromium for tests: pages and pictures as their readers see them."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

from waiting import LONGEST_WAIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, for the tests of one file: starting it takes a second or two."""
    with sync_playwright() as playwright:
        # Root has no sandbox in Chromium; what it opens here is our own.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * LONGEST_WAIT_S
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """A file in a fresh page without network.

    Raises:
        AssertionError: at the end, if the page wrote an error to the console, threw one, or asked for another file.
    """
    scheme: Literal["dark", "light"] = "dark" if dark else "light"
    context: BrowserContext = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(1000 * LONGEST_WAIT_S)
    problems: list[str] = []
    page = context.new_page()

    def only_itself(route: Route) -> None:
        if route.request.url.split("#")[0] == path.as_uri() or route.request.url.startswith(("data:", "blob:")):
            route.continue_()
        else:
            problems.append(f"asked for {route.request.url}")
            route.abort()

    context.route("**/*", only_itself)
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    try:
        page.goto(path.as_uri())
        yield page
        assert problems == []
    finally:
        context.close()


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
