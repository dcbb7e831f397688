"""Where the `iaprof` command starts: what it imports takes a moment, in which Ctrl-C ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Imports the command and runs it."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from iaprof.cli.main import main as run

    signal.signal(signal.SIGINT, interrupt)
    run()
