"""The entry point of `iaprof`: Ctrl-C during the slow imports ends it without a traceback."""

from __future__ import annotations

import signal

from iaprof.basics.threads import use_one_thread


def main() -> None:
    """Imports the command and runs it."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    use_one_thread()
    from iaprof.cli.main import main as run

    signal.signal(signal.SIGINT, interrupt)
    run()
