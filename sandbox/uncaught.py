"""Calls a function when C++ code runs out of memory and does not catch std::bad_alloc.

Arrow turns most failed allocations into errors, but not all. For the others libstdc++ aborts the process; the function
runs before that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

_LIBRARY = "libstdc++.so.6"  # used by all of Arrow's libraries
_BAD_ALLOC = b"St9bad_alloc"  # the name in std::bad_alloc's type information
_Handler = ctypes.CFUNCTYPE(None)
_kept_handlers: list[object] = []  # functions that libstdc++ calls, which must not be garbage-collected


def on_uncaught_bad_alloc(act: Callable[[], None]) -> None:
    """Registers `act`, which is called when an allocation fails and no C++ code catches the exception.

    If `act` returns, the process aborts, as after any other uncaught C++ exception.

    Args:
        act: should first remove limits on memory, as Python may have none left, and then end the process.
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
        kind = type_of_exception()  # std::type_info: pointers to a virtual table and to the name
        if kind and kind[1] == _BAD_ALLOC:
            act()
        before()

    handler = _Handler(terminate)
    before = library._ZSt13set_terminatePFvvE(handler)
    _kept_handlers.append(handler)
