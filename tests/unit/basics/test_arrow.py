"""Ctrl-C while Arrow looks for pandas; test_whole_path.py has that no process of a recording or a report imports it."""

from __future__ import annotations

import subprocess
import sys

LOOKS = """
import os, signal, sys
import pyarrow as pa
from iaprof.basics.libraries import hide_pandas, look_for_pandas

def look(event, arguments):
    if event == "import" and arguments[0] == "pandas":
        print("looks")
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(look)
hide_pandas()
try:
    look_for_pandas()
except KeyboardInterrupt:
    print("interrupted")
pa.array([0]).to_numpy()
pa.array([0.5, None]).to_pylist()
"""


def test_ctrl_c_while_arrow_looks_for_pandas_comes_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    *looks, last = done.stdout.split()
    assert set(looks) == {"looks"}
    assert last == "interrupted"
