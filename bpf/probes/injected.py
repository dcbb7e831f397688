"""Functions of the injected library, libiaprof_inject.so, that the recorder probes like those of a driver."""

from __future__ import annotations

from iaprof.bpf.driver_layout import Action, Entry
from iaprof.bpf.probes import transfers, waits
from iaprof.bpf.probes.library_file import LibraryFile, exported

PREFIX = "iaprof_"  # of the exported names, so that programs do not call these functions by accident
_FUNCTIONS = {
    **dict.fromkeys(waits.LEVEL_ZERO, (Action.WAIT, 0)),
    **{name: (Action.WAIT, handle) for name, handle in waits.OPENCL.items()},
    **transfers.LEVEL_ZERO,
    **transfers.OPENCL,
}


def injected_entries(library: LibraryFile) -> list[tuple[Entry, int]]:
    """Returns the library's functions that wait, copy and fill, and their file offsets.

    Each function is a jump to the driver's function, so the arguments are in the registers that the ABI prescribes.

    Raises:
        ProbeError: the file is broken.
    """
    found = exported(library, (f"{PREFIX}{name}" for name in _FUNCTIONS))
    names = {name.removeprefix(PREFIX): offset for name, offset in found.items()}
    return [
        (Entry(name, action, names[name], handle), names[name])
        for name, (action, handle) in _FUNCTIONS.items()
        if name in names
    ]
