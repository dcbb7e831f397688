"""What becomes of a process whose C++ code ran out of memory where nobody catches it.

Arrow turns failed allocations into errors, but not everywhere: where it does not, libstdc++ aborts the process in the
middle of whatever it does. Here something else is done first.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

_LIBRARY = "libstdc++.so.6"  # which Arrow's libraries share
_BAD_ALLOC = b"St9bad_alloc"  # std::bad_alloc, as type information names it
_Handler = ctypes.CFUNCTYPE(None)
_set: list[object] = []  # what libstdc++ calls: it must not be collected


def on_uncaught_bad_alloc(act: Callable[[], None]) -> None:
    """Has `act` called when an allocation fails and nobody catches that; it should end the process.

    When it returns, the process aborts, as it does for all other exceptions that nobody catches.

    Args:
        act: should begin by removing limits on memory, as even Python may have none left.
    """
    library = None
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(_LIBRARY)
    if library is None:
        return
    library.__cxa_current_exception_type.restype = ctypes.POINTER(ctypes.c_char_p)
    library._ZSt13set_terminatePFvvE.restype = _Handler
    type_of_exception = library.__cxa_current_exception_type

    def terminate() -> None:
        kind = type_of_exception()  # std::type_info: a virtual table, and a name
        if kind and kind[1] == _BAD_ALLOC:
            act()
        before()

    handler = _Handler(terminate)
    before = library._ZSt13set_terminatePFvvE(handler)
    _set.append(handler)
