"""Opens the user's browser."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def opened_secretly(address: str) -> Iterator[None]:
    """Opens an address that other users must not see in the browser, which may take as long as the block.

    A command line is what everybody can read: so the browser gets a file instead, which only this user can read, and
    which leads to the address. It is removed after the block.
    """
    if os.geteuid() == 0:
        open_in_browser(address)  # which only says it
        yield
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="iaprof-", ignore_cleanup_errors=True)
        page = Path(folder.name, "open.html")
        page.touch(0o600)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={address}">\n')
    except OSError as error:
        say(f"iaprof: the browser was not started ({error.strerror}): open {address}")
        yield
        return
    with folder:
        # In a thread, as some browsers are waited for until the user closes them.
        threading.Thread(target=open_in_browser, args=(page.as_uri(),), daemon=True).start()
        yield
