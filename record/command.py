"""The command that is recorded: started, told the signals that are meant for it, waited for."""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Mapping

from iaprof.basics.errors import IaprofError
from iaprof.record.signals import StopSignals

PATIENCE_S = 3.0  # from the signal that ends a recording to the end of a command that has its own way with it
WAIT_S = 1.0  # from SIGTERM on


class Command:
    """A started command."""

    def __init__(
        self, words: tuple[str, ...], signals: StopSignals, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it; it has our standard input and output.

        Args:
            words: the program and its arguments.
            signals: those that came for it are forwarded.
            environment: that it has instead of ours.

        Raises:
            IaprofError: it cannot be started.
        """
        self._signals = signals
        signals.take_for_command()
        try:
            self._process = subprocess.Popen(words, env=environment)
        except OSError as error:
            raise IaprofError(f"{words[0]} cannot be started: {error.strerror}") from error

    @property
    def runs(self) -> bool:
        """Whether it did not end yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """Its exit code, 128 and the signal's number if one ended it, 0 while it runs."""
        status = self._process.returncode
        return 128 - status if status is not None and status < 0 else status or 0

    def forward(self) -> None:
        """Sends it the signals that came for it."""
        for number in self._signals.to_forward():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self) -> None:
        """Asks it to end, and waits a moment."""
        if self.runs:
            self._process.terminate()  # as perf does when it is interrupted
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_S)

    def wait(self) -> None:
        """Lets it go on to its end though its recording could not; until a signal comes."""
        while self.runs and not self._signals.count:
            select.select([self._signals], [], [], 1.0)
            self._signals.clear()
            self.forward()
