"""Runs the interactive view without a terminal, and returns what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from iaprof.cli.interactive.contents import Contents
from iaprof.cli.interactive.view import View

SCROLL_BARS = " ▁▂▃▄▅▆▇█"  # which end lines, besides spaces
PAUSE_S = 0.05  # between two looks at the screen


def screen(contents: Contents, *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    """The lines of the screen after some keys, without trailing spaces and scroll bars."""
    return after(View(contents), lambda view: None, *keys, size=size)


def after(view: View, do: Callable[[View], object], *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    """The lines of the screen after some keys, and then a call."""

    async def run() -> list[str]:
        async with view.run_test(size=size) as pilot:
            await pilot.press(*keys)
            do(view)
            before: list[str] = []
            while True:  # until it stays as it is, and the keys at its foot are there
                await pilot.pause(PAUSE_S)
                strips = view.screen._compositor.render_strips()
                lines = ["".join(segment.text for segment in strip).rstrip(SCROLL_BARS) for strip in strips]
                if lines == before and lines[-1]:
                    return lines
                before = lines

    return asyncio.run(run())
