"""What a signal does while the main thread is in a library that does not look for signals."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from iaprof.report.views.sql import interrupting
from unit.builds import no_descriptor_is_lost


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_signal_that_ends_the_verb_interrupts_the_query(number: int, ends: bool) -> None:
    interrupted = threading.Event()
    before = signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with no_descriptor_is_lost(sockets=True), interrupting(interrupted.set):
            os.kill(os.getpid(), number)
            assert interrupted.wait(60 if ends else 0.05) is ends
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(number, before)


def test_in_another_thread_nothing_is_interrupted() -> None:
    ran = []

    def query() -> None:
        with interrupting(lambda: None):
            ran.append(True)

    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    assert ran
