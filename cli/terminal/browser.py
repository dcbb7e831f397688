"""Opens the user's browser."""

from __future__ import annotations

import os

from iaprof.cli.terminal.summary import say
from iaprof.sandbox.memory import lift_limit


def open_in_browser(address: str) -> None:
    """Opens an address in the browser, or prints why the user has to."""
    import webbrowser  # here, as other verbs do not need it

    if os.geteuid() == 0:
        say(f"iaprof: a browser is not started as root: open {address}")
        return
    lift_limit()  # the browser would inherit it
    if not webbrowser.open(address):
        say(f"iaprof: no browser was found here: open {address}")
