"""Functions of the library that commands are started with of which the recorder probes the calls itself."""

from __future__ import annotations

from iaprof.bpf.probes import transfers, waits
from iaprof.bpf.probes.driver_layout import Action, Entry
from iaprof.bpf.probes.library_file import LibraryFile, exported

PREFIX = "iaprof_"  # begins the names by which the library exports them: programs must not call these
_FUNCTIONS = {
    **dict.fromkeys(waits.LEVEL_ZERO, (Action.WAIT, 0)),
    **{name: (Action.WAIT, handle) for name, handle in waits.OPENCL.items()},
    **transfers.LEVEL_ZERO,
    **transfers.OPENCL,
}


def injected_entries(library: LibraryFile) -> list[tuple[Entry, int]]:
    """The functions in which such commands wait, copy and fill, and their offsets in that file.

    Each is a jump to the driver's function, which has its arguments where the driver takes them from.

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
