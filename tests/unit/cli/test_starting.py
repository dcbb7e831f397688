"""Ctrl-C at moments when Python ignores the KeyboardInterrupt that it raises."""

from __future__ import annotations

import subprocess
import sys

import pytest

VERB = """
import os, signal, time, weakref
from iaprof.cli import main, start

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Lasting:
    pass

class Dying:
    __del__ = interrupt

def verb():
    lasting = Lasting()
    watched = weakref.ref(lasting, interrupt)
    try:
        {moment}
        time.sleep(100)
    except KeyboardInterrupt:
        print("interrupted")

main.main = verb
start.main()
"""


@pytest.mark.parametrize("moment", ["Dying()", "del lasting"])
def test_ctrl_c_in_a_destructor_or_a_callback_is_not_lost(moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VERB.format(moment=moment)], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_other_errors_in_a_destructor_are_still_printed() -> None:
    verb = VERB.replace("__del__ = interrupt", "def __del__(self): raise ValueError('of a destructor')")
    verb = verb.replace("time.sleep(100)", "pass").format(moment="Dying()")
    done = subprocess.run([sys.executable, "-c", verb], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "")
    assert "ValueError: of a destructor" in done.stderr
