"""The drivers' functions that wait for the GPU, and their entries in the map of bpf/c/waits.c."""

from __future__ import annotations

from iaprof.bpf.driver_layout import ARGUMENTS, Entry, LayoutError
from iaprof.bpf.structs import WAIT_ENTRY, pack
from iaprof.formats.header.waits import FUNCTIONS

NO_SESSIONS = "this kernel has no uprobe sessions, which came with Linux 6.13: boot a newer one"
LEVEL_ZERO = tuple(name for name in FUNCTIONS.values() if name.startswith("ze"))
OPENCL = {"clFinish": 0, "clWaitForEvents": 1}
"""By name: number of the argument that is the handle, or the array of handles."""
TIMEOUTS = {
    "zeEventHostSynchronize": 1,
    "zeCommandQueueSynchronize": 1,
    "zeFenceHostSynchronize": 1,
    "zeCommandListHostSynchronize": 1,
}
"""By name: number of the argument that is the timeout, counted from 0; functions not listed wait without a limit."""
_WITH_ARRAYS = ("clWaitForEvents",)  # functions that take an array of handles
_NUMBERS = {name: number for number, name in FUNCTIONS.items()}


def packed_wait_entry(entry: Entry) -> bytes:
    """Packs an entry as WAIT_ENTRY.

    Raises:
        LayoutError: this version does not know the function.
    """
    number = _NUMBERS.get(entry.name)
    if number is None:
        raise LayoutError(f"this iaprof does not know how to record waits in {entry.name}")
    timeout = ARGUMENTS[TIMEOUTS[entry.name]] if entry.name in TIMEOUTS else 0
    is_array = entry.name in _WITH_ARRAYS
    return pack(WAIT_ENTRY, entry.address, number, ARGUMENTS[entry.handle], timeout, is_array)
