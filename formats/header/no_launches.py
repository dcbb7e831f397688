"""The header member `no_launches`: stalls but no launches were recorded although a process mapped a driver.

The member is an object: `driver`, the file name of the driver's library without version; `pid`, the first process that
mapped it; `by`, the value of --launches; `way`, how launches by that driver would have been seen (`probes`, `attach`,
`inject`), or null if there was no way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from iaprof.formats.wire.sideband import Mappings

MEMBER = "no_launches"
LEVEL_ZERO, OPENCL = "libze_intel_gpu.so", "libigdrcl.so"
DRIVERS = (LEVEL_ZERO, OPENCL)
_INJECT = "inject"


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


def sentence(member: object, stalls: int | None) -> str:
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
