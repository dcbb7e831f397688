"""Ctrl-C outside of verbs, and at moments when Python ignores the KeyboardInterrupt that it raises."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, signal, time, weakref
from iaprof.cli import main, start

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Lasting:
    pass

class Dying:
    __del__ = interrupt

def run():
    {moment}

main.main = run
start.main()
"""


def started(moment: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `iaprof` with this code in place of the command."""
    program = before + PROGRAM.format(moment=moment)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("moment", ["Dying()", "watching = weakref.ref(Lasting(), interrupt)", "interrupt()"])
def test_ctrl_c_in_a_destructor_or_a_callback_or_outside_a_verb_ends_it(moment: str) -> None:
    done = started(f"{moment}; time.sleep(100)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_it_ends() -> None:
    done = started("atexit.register(interrupt)")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("moment", ["interrupt()", "atexit.register(interrupt)"])
def test_a_background_command_of_a_shell_ignores_ctrl_c(moment: str) -> None:
    done = started(f"{moment}; print('went on')", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_other_errors_in_a_destructor_are_still_printed() -> None:
    done = started("Dying.__del__ = lambda self: 1 / 0; Dying()")
    assert (done.returncode, done.stdout) == (0, "")
    assert "ZeroDivisionError" in done.stderr
