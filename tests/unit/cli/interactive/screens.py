"""Runs the interactive view without a terminal, and returns what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from iaprof.cli.interactive.contents import Contents
from iaprof.cli.interactive.view import View


def screen(contents: Contents, *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    """The lines of the screen after some keys, without trailing spaces."""
    return after(View(contents), lambda view: None, *keys, size=size)


def after(view: View, do: Callable[[View], object], *keys: str, size: tuple[int, int] = (80, 24)) -> list[str]:
    """The lines of the screen after some keys, and then a call."""

    async def run() -> list[str]:
        async with view.run_test(size=size) as pilot:
            await pilot.press(*keys)
            do(view)
            await pilot.pause()
            strips = view.screen._compositor.render_strips()
            return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    return asyncio.run(run())
