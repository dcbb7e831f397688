"""What a header says of launches and copies that are missing, and of launches that were slower.

The member `no_launches`: stalls but no launches were recorded although a process mapped a driver. It is an object:
`driver`, the file name of the driver's library without version; `pid`, the first process that mapped it; `by`, the
value of --launches; `way`, how launches by that driver would have been seen (`probes`, `attach`, `inject`), or null if
there was no way.

The member `unprobed`: processes that mapped a driver before it had probes, so that launches are missing. A driver at a
path that iaprof does not search, such as in a container, is found only when a process maps it.

Members of a library: `single_stepped`, functions whose launches are slower, because the kernel single-steps the
instructions at their probes; `copies` and `own_kernels`, whether copies and fills are recorded, and the driver's own
kernels that do them; `draws`, whether Vulkan's draws are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.basics.quantities import and_more, counted

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.wire.sideband import Mappings

NO_LAUNCHES = "no_launches"
LEVEL_ZERO, OPENCL, VULKAN = "libze_intel_gpu.so", "libigdrcl.so", "libvulkan_intel.so"
DRIVERS = (LEVEL_ZERO, OPENCL)
_INJECT = "inject"

UNPROBED = "unprobed"
_MOST_REMEMBERED = 4096  # processes; beyond that, some may count twice
_MOST = 1 << 63

SINGLE_STEPPED = "single_stepped"
"""The member of a library in a capture's header: names of functions or probes that are single-stepped."""
_MOST_NAMED = 3
_LONGEST_NAME = 100  # characters

_MOST_SENTENCES = 20

COPIES = "copies"
"""The member of a library in a capture's header: whether transfers are recorded; missing if launches are not."""
OWN_KERNELS = "own_kernels"
"""Whether the driver's own kernels are recorded; if it is missing, they are if copies are."""
DRAWS = "draws"
"""Whether draws are recorded; missing if they are not."""
COPIES_UNRECORDED = (
    "copies and fills are not recorded, and stalls of the driver's own kernels, which do them, are at no known kernel"
)
NO_GRAPHICS = (
    "draws, copies and fills are not recorded, and stalls of their shaders are at no known kernel: "
    "run 'sudo iaprof calibrate LIBRARY' once, to see whether draws can be"
)
"""Of Mesa's Vulkan driver."""
NO_TRANSFERS = (
    "copies and fills are recorded as launches of the driver's own kernels, not as transfers, and not those that a "
    "copy engine does"
)
"""Of Mesa's Vulkan driver, too."""
OWN_KERNELS_UNRECORDED = (
    "copies and fills are recorded, but not the driver's own kernels that do them: their stalls are at no known kernel"
)


def driver_at(path: str) -> str:
    """The driver (one of DRIVERS) that a library is; empty if it is none."""
    name = os.path.basename(path)
    return next((driver for driver in DRIVERS if name.startswith(driver)), "")


def add_drivers(drivers: dict[str, int], mappings: Mappings) -> None:
    """Adds the first process that mapped each driver, by driver, to those of earlier mappings."""
    found = {path: driver for path in set(mappings.path) if (driver := driver_at(path))}
    if not set(found.values()) <= drivers.keys():
        for pid, path in zip(mappings.pid, mappings.path, strict=True):
            if path in found:
                drivers.setdefault(found[path], pid)


def no_launches(header: Mapping[str, Any], drivers: Mapping[str, int]) -> dict[str, object] | None:
    """The member `no_launches`; None if no driver was mapped.

    Args:
        header: members `launches_by` and `libraries` of the recording.
        drivers: the first process that mapped each driver.
    """
    by = header.get("launches_by")
    mapped = [driver for driver in DRIVERS if driver in drivers]
    if not mapped:
        return None
    ways: dict[str, str] = {}
    libraries = header.get("libraries")
    for library in libraries if isinstance(libraries, list) else ():
        match library:
            case {"path": str(path), "way": str(way), "probes": int(probes)} if probes:
                ways[way if way == _INJECT else driver_at(path)] = way
    # OpenCL's driver maps Level Zero's: if both are mapped, the program may use OpenCL only.
    driver = mapped[-1] if by == _INJECT else mapped[0]
    if _INJECT in ways:
        driver = next((each for each in reversed(mapped) if each not in ways), driver)
    return {
        "driver": driver,
        "pid": drivers[driver],
        "by": by if isinstance(by, str) else "auto",
        "way": ways.get(driver) or ways.get(_INJECT),
    }


def no_launches_sentence(member: object, stalls: int | None) -> str:
    """The warning about missing launches, with advice; empty if the header has no valid `no_launches`.

    Args:
        member: the member; untrusted.
        stalls: number of stall records; None if unknown.
    """
    match member:
        case {"driver": str(driver), "pid": int(pid), "by": str(by), "way": str() | None as way} if driver in DRIVERS:
            number = "" if stalls is None else f"{stalls:,} "
            advice = _advice(driver, by, way)
            return f"no launch was seen, though process {pid} mapped {driver} and {number}stall records came: {advice}"
    return ""


def _advice(driver: str, by: str, way: str | None) -> str:
    if way == _INJECT or by == _INJECT:
        not_seen = (
            "the program may not have loaded the library that iaprof puts into it, or it does not call the driver"
        )
        loader, library = ("OpenCL", " LIBRARY") if driver == OPENCL else ("Level Zero", "")
        return (
            f"{not_seen} through the {loader} loader; try --launches=attach, after 'sudo iaprof calibrate{library}' if "
            "the driver's build is not known"
        )
    if way is not None:
        return (
            "the kernels may have been launched before the recording began, or by a graphics or media driver, or be "
            "the driver's own, which copy and fill ('iaprof check' says whether these are recorded); start the program "
            "with 'sudo iaprof record -- COMMAND'"
        )
    if by == "probes":
        return "the driver has no launch_kernel and compile_kernel probes; try --launches=auto"
    if driver == OPENCL:
        return (
            "this build of the driver is not known; run 'sudo iaprof calibrate LIBRARY' with the path of its "
            "libigdrcl.so and record again, or try 'sudo iaprof record --launches=inject -- COMMAND'"
        )
    return (
        "this build of the driver is not known; run 'sudo iaprof calibrate' and record again, or try "
        "'sudo iaprof record --launches=inject -- COMMAND'"
    )


@dataclass
class Unprobed:
    """Counts processes that mapped a driver before it had probes."""

    processes: int = 0  # processes that had mapped a driver before its probes were attached
    longest_ns: int = 0  # the longest time from a mapping to the probes
    ended: int = 0  # processes that ended, or unmapped the driver, before iaprof opened it
    _pids: set[int] = field(default_factory=set)

    def waited(self, pid: int, ns: int) -> None:
        """A process had mapped a driver for `ns` before it had probes."""
        self.longest_ns = max(self.longest_ns, ns)
        self.processes += pid not in self._pids
        self._remember(pid)

    def gone(self, pid: int) -> None:
        """A process ended before iaprof opened its driver."""
        self.ended += pid not in self._pids
        self._remember(pid)

    def _remember(self, pid: int) -> None:
        if len(self._pids) >= _MOST_REMEMBERED:
            self._pids.clear()
        self._pids.add(pid)

    def to_json(self) -> dict[str, int]:
        """The member; empty if there are no such processes."""
        if not self.processes and not self.ended:
            return {}
        return {"processes": self.processes, "longest_ns": self.longest_ns, "ended": self.ended}


def unprobed_sentence(member: Any) -> str:
    """A sentence, without a full stop, about the member (untrusted); empty if there is nothing to say."""
    match member:
        case {"processes": int(processes), "longest_ns": int(longest), "ended": int(ended)} if all(
            type(number) is int and 0 <= number < _MOST for number in (processes, longest, ended)
        ):
            pass
        case _:
            return ""
    parts = []
    if processes:
        most = "up to " if processes > 1 else ""
        parts.append(
            f"{counted(processes, 'process', 'processes')} mapped a driver {most}{longest / 1e6:,.0f} ms before it had "
            "probes: launches in that time, if any, are missing"
        )
    if ended:
        it = "it" if ended == 1 else "they"
        parts.append(
            f"{counted(ended, 'process', 'processes')} mapped a driver and ended before it had probes: what {it} "
            "launched, if anything, is missing"
        )
    return "; ".join(parts)


def slow_launches(functions: Sequence[str]) -> str:
    """A clause about a driver.

    Args:
        functions: launching functions whose probe is single-stepped, or probes' names; at least one.
    """
    names = ", ".join(name[:_LONGEST_NAME] for name in functions[:_MOST_NAMED])
    return (
        f"a launch by {names}{and_more(len(functions) - _MOST_NAMED)} costs 2 to 10 µs more: "
        "the kernel single-steps the instruction at the probe"
    )


def slow_launches_sentence(library: Any) -> str:
    """A sentence, without a full stop, about a library in a header (untrusted); empty if there is nothing to say."""
    match library:
        case {"path": str(path), "single_stepped": [*names]} if names and all(type(name) is str for name in names):
            return f"{path}: {slow_launches(names)}"
    return ""


def unrecorded_sentence(library: Any) -> str:
    """A sentence, without a full stop, about a library in a header (untrusted); empty if there is nothing to say."""
    match library:
        case {"path": str(path), "copies": False, "own_kernels": True} if os.path.basename(path) == VULKAN:
            return f"{path}: {NO_TRANSFERS}"
        case {"path": str(path), "copies": False} if os.path.basename(path) == VULKAN:
            return f"{path}: {COPIES_UNRECORDED if library.get(DRAWS) is True else NO_GRAPHICS}"
        case {"path": str(path), "copies": False}:
            return f"{path}: {COPIES_UNRECORDED}"
        case {"path": str(path), "copies": True, "own_kernels": False}:
            return f"{path}: {OWN_KERNELS_UNRECORDED}"
    return ""


def unrecorded(capture: CaptureReader) -> list[str]:
    """A sentence for each driver whose copies and fills, or own kernels, are not recorded, over all parts."""
    libraries = [part.header.get("libraries") for part in capture.parts]
    texts = [unrecorded_sentence(library) for each in libraries if isinstance(each, list) for library in each]
    return [clean(text) for text in list(dict.fromkeys(filter(None, texts)))[:_MOST_SENTENCES]]
