"""Where a report goes: a file, stdout, or a browser."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.cli.terminal.stdout import open_output
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


@dataclass
class Destination:
    """Where a report goes.

    Attributes:
        output: the file; None: stdout, or with one of the next two a browser alone.
        is_opened: a browser opens the report.
        is_served: browsers of this machine get it until Ctrl-C.
        content_type: of a report that browsers show.
        name: of the file that is made for a browser.
        mode: of the files.
    """

    output: Path | None = None
    is_opened: bool = False
    is_served: bool = False
    content_type: str = ""
    name: str = ""
    mode: int = 0o600
    _page: str = ""

    @contextlib.contextmanager
    def opened(self, binary: bool) -> Iterator[IO[Any]]:
        """Yields what the report is written to; a file gets its name when it is complete.

        Raises:
            IaprofError: it cannot be written.
        """
        if self.output is None and (self.is_opened or self.is_served):
            page = io.StringIO()
            yield page
            self._page = page.getvalue()
            return
        with open_output(self.output, binary, self.mode) as out, show_writing(self.output):
            yield out

    def show(self) -> None:
        """Shows the report in a browser, if that is asked for.

        Raises:
            IaprofError: there is no room for a temporary file.
        """
        if self.is_served:
            self._serve()
        elif self.is_opened:
            open_in_browser((self._kept() if self.output is None else self.output).absolute().as_uri())

    def _serve(self) -> None:
        from iaprof.cli.terminal.serving import Server  # here, as other reports do not need it

        server = Server(self._page.encode(), self.content_type)

        def begun() -> None:
            say(f"iaprof: serving {server.address} until Ctrl-C")

        with opened_secretly(server.address) if self.is_opened else contextlib.nullcontext():
            server.run(begun)

    def _kept(self) -> Path:
        """Writes the page to a temporary file, which stays, as nobody knows when the browser is done with it."""
        import tempfile

        try:
            folder = Path(tempfile.mkdtemp(prefix="iaprof-"))
        except OSError as error:
            raise IaprofError(
                f"there is no room for temporary files ({error.strerror}): name a file with -o"
            ) from error
        try:
            with open_output(folder / self.name, mode=0o600) as out:
                out.write(self._page)
        except BaseException:
            folder.rmdir()
            raise
        return folder / self.name


@contextlib.contextmanager
def show_writing(output: Path | None) -> Iterator[None]:
    """Shows on a terminal that a file is being written, unless the output goes to stdout."""
    if output is None or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"writing {clean(output.name)}")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
