"""What libraries may do in our processes: one thread for OpenBLAS; no pandas, documentation or masked arrays.

OpenBLAS, which numpy contains, otherwise starts a thread per core when numpy is imported, though we call nothing of it.
They take CPU time and address space, and keep the privileges that a process gives up.

Arrow looks for pandas once in a process (before version 19, each time), when it first converts a list or an array, and
imports it if it is installed. We need nothing of it; it takes 0.4 s and 35 MB, and with an old one Arrow prints a
warning.

Arrow parses the docstrings of the options of its functions when `pyarrow.compute` is imported, to make docstrings of
its functions. That is half of the time that this import takes, 20 ms in each process. NumPy adds docstrings to its
functions in C when it is imported, in 5 ms.

Arrow asks of each array whether it is one of `numpy.ma`, and so does `numpy.unique`. NumPy imports that when somebody
first asks, in 13 ms.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process that imports numpy."""
_PARSER = "pyarrow.vendored.docscrape"
_DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")  # since NumPy 2
_added: list[str] = []


def use_one_thread() -> None:
    """Makes OpenBLAS use one thread in this process, before it imports numpy, unless the user has chosen a number."""
    _added.extend(name for name in ONE_THREAD if name not in os.environ)
    os.environ.update({name: ONE_THREAD[name] for name in _added})


def users_environment() -> dict[str, str]:
    """Returns this process's environment as the user set it: for programs of the user's."""
    return {name: value for name, value in os.environ.items() if name not in _added}


class _NoPandas:
    """A finder for sys.meta_path."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Raises ModuleNotFoundError for pandas; leaves other modules to the other finders."""
        if name == "pandas":
            raise ModuleNotFoundError("iaprof keeps pandas out of its processes", name=name)


def hide_pandas() -> None:
    """Makes it impossible to import pandas in this process."""
    if _NoPandas not in sys.meta_path:
        sys.meta_path.insert(0, _NoPandas)


def leave_out_documentation() -> None:
    """Makes Arrow and NumPy import their functions without documentation in this process."""
    parser = ModuleType(_PARSER)
    parser.NumpyDocString = lambda _text: {"Parameters": ()}  # type: ignore[attr-defined]
    sys.modules.setdefault(_PARSER, parser)
    for name in _DOCSTRINGS:
        sys.modules.setdefault(name, ModuleType(name))


def restrict_libraries() -> None:
    """Does both, before Arrow and NumPy are imported."""
    hide_pandas()
    leave_out_documentation()


def look_for_pandas() -> None:
    """Makes Arrow look now, and Ctrl-C come after it; otherwise Arrow drops the KeyboardInterrupt. Imports Arrow."""
    import pyarrow as pa

    leave_out_masked_arrays()
    with _ctrl_c_comes_later():
        pa.array([0]).to_numpy()


def leave_out_masked_arrays() -> None:
    """Makes NumPy believe that no array is masked, until somebody imports `numpy.ma`. Imports NumPy."""
    import numpy as np

    if "numpy.ma" not in sys.modules:
        np.ma = _NoMaskedArrays("numpy.ma")


class _NoMaskedArrays(ModuleType):
    """`numpy.ma` until somebody imports it: so there is no masked array yet."""

    class MaskedArray:
        """What no array is an instance of."""

    @staticmethod
    def is_masked(_array: object) -> bool:
        """Returns what it is for any array then; NumPy asks."""
        return False

    def __getattr__(self, name: str) -> object:
        """Imports the module for whatever else is asked for."""
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _ctrl_c_comes_later() -> Iterator[None]:
    """Delays SIGINT to the end of the block.

    Blocking the signal would not do: a thread of Arrow takes it then, and Python still handles it in the main thread.
    """
    came = []
    try:
        before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    except ValueError:  # this is not the main thread, where Python handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
