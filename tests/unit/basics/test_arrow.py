"""Arrow in our processes: without documentation, and Ctrl-C while it looks for pandas.

test_whole_path.py has that no process of a recording or a report imports pandas.
"""

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


COMPUTES = """
from iaprof.basics.libraries import restrict_libraries

restrict_libraries()
import pyarrow as pa, pyarrow.compute as pc

print(pc.add(pa.array([1]), 2).to_pylist(), pc.sum(pa.array([1, None]), skip_nulls=False), pc.round(2.718, ndigits=1))
"""


def test_functions_of_arrow_work_without_their_documentation() -> None:
    done = subprocess.run([sys.executable, "-Werror", "-c", COMPUTES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[3] None 2.7\n")


MASKS = """
import sys
from iaprof.basics.libraries import look_for_pandas

look_for_pandas()
import numpy as np, pyarrow as pa

before = pa.array(np.arange(2)).to_pylist(), "numpy.ma" in sys.modules
masked = np.ma.masked_array([1, 2], mask=[False, True])
print(*before, pa.array(masked).to_pylist(), isinstance(masked, np.ma.MaskedArray), np.ma is sys.modules["numpy.ma"])
"""


def test_masked_arrays_are_imported_by_who_makes_some_and_are_known_then() -> None:
    done = subprocess.run([sys.executable, "-Werror", "-c", MASKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[0, 1] False [1, None] True True\n")
