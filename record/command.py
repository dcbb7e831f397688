"""The recorded command: starting it, forwarding signals to it, and waiting for its end."""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Mapping

from iaprof.basics.errors import IaprofError
from iaprof.record.signals import StopSignals

PATIENCE_S = 3.0  # how long a command that handles the ending signal itself may go on running
WAIT_S = 1.0  # how long `end` waits for the command after SIGTERM


class Command:
    """The recorded command, from its start on."""

    def __init__(self, words: tuple[str, ...], signals: StopSignals, environment: Mapping[str, str]) -> None:
        """Starts the command with our standard input and output.

        Args:
            words: the program and its arguments.
            signals: forwards those meant for the command.
            environment: of the command.

        Raises:
            IaprofError: the command cannot be started.
        """
        self._signals = signals
        signals.take_for_command()
        try:
            self._process = subprocess.Popen(words, env=environment)
        except OSError as error:
            raise IaprofError(f"{words[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the command has not ended yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """The command's exit code, 128 + signal number if a signal ended it; 0 while it runs."""
        status = self._process.returncode
        return 128 - status if status is not None and status < 0 else status or 0

    def forward(self) -> None:
        """Sends the command the signals that came for it."""
        for number in self._signals.to_forward():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self) -> None:
        """Sends SIGTERM, and waits WAIT_S for the command's end."""
        if self.runs:
            self._process.terminate()  # as perf does when it is interrupted
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_S)

    def wait(self) -> None:
        """Waits until the command ends or a signal comes, though its recording has failed."""
        while self.runs and not self._signals.count:
            select.select([self._signals], [], [], 1.0)
            self._signals.clear()
            self.forward()
