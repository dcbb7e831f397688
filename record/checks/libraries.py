"""The drivers' libraries: which are installed or mapped, and how launches are recorded in each."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from iaprof.basics.errors import IaprofError
from iaprof.bpf.driver_layout import Layout
from iaprof.bpf.probes.libraries import COMPILE, CUDA_DRIVER, LAUNCH, OPENCL, Libraries, Outcome, Way, is_vulkan
from iaprof.bpf.probes.usdt import Probe
from iaprof.formats.header.launch_warnings import (
    COPIES_UNRECORDED,
    NO_GRAPHICS,
    NO_TRANSFERS,
    OWN_KERNELS_UNRECORDED,
    slow_launches,
)
from iaprof.record.checks.result import Check, Level, shortened
from iaprof.record.kernels.calibrating import WILL_CALIBRATE, refusal
from iaprof.record.kernels.drivers import built_library, check_folders

GROUP = "Runtime"
MOST_LINES = 16
_NO_EXECUTIONS = "a kernel in a closed command list counts when it is appended, not when the list is executed"
_NO_COPIES = f"{COPIES_UNRECORDED}: 'iaprof calibrate' of this version may find them, or says why not"


def checks() -> Iterator[Check]:
    """Checks the drivers that are installed, and those that running processes have mapped."""
    names: list[str] = []  # of the probes in the next outcome's library
    versions: list[str] = []  # of the next outcome's driver, if its layout is known

    def would_probe(_: int, probes: Sequence[Probe]) -> str:
        names.extend(probe.name for probe in probes)
        return ""

    def would_attach(_: int, layout: Layout, offsets: object) -> None:
        versions.append(layout.version)

    def would_calibrate(file: int, _: str, build_id: str) -> str:
        why = refusal(file, build_id)
        return f", so what programs dispatch is not recorded: {why}" if why else f"; it {WILL_CALIBRATE}"

    libraries = Libraries(would_probe, would_attach)
    libraries.calibrate = would_calibrate
    outcomes = itertools.chain(libraries.installed(), libraries.running())
    count = 0
    for outcome in outcomes:
        if outcome.unused and not (is_vulkan(outcome.path) and outcome.build_id):
            continue
        count += 1
        if count <= MOST_LINES:
            yield _library(outcome, set(names), "".join(versions))
        names.clear()
        versions.clear()
    if count > MOST_LINES:
        yield Check(GROUP, "driver", Level.WARNING, f"and {count - MOST_LINES} more files of that name")
    if not count:
        text = (
            "no libze_intel_gpu.so is installed here or used now: without Intel's compute runtime there are no "
            "launches to record"
        )
        if os.geteuid() != 0:
            text = "none is installed here; only root can tell which ones are used"
        yield Check(GROUP, "driver", Level.WARNING, text)
    yield _injection()


def _library(outcome: Outcome, names: set[str], version: str) -> Check:
    if is_vulkan(outcome.path):
        return _vulkan(outcome, version)
    file, what = shortened(outcome.path), "OpenCL" if OPENCL in outcome.path else "driver"
    if outcome.way is Way.ATTACH and CUDA_DRIVER in outcome.path:
        text = (
            "launches, copies and fills of running processes by probes, without names of kernels; those of a command "
            "by iaprof's library"
        )
        return _with_cost(Check(GROUP, "CUDA", Level.OK, text, file=file), outcome)
    if outcome.way is Way.ATTACH:
        text = f"launches by attaching: it has no probes, but its build is known ({version})"
        if not outcome.copies:
            text = f"{text}; {_NO_COPIES}"
        if not outcome.waits:
            text += "; --waits does not work with it, because its layout has no functions that wait"
            text += f": run 'sudo iaprof calibrate{'' if what == 'driver' else ' LIBRARY'}' again"
        if what == "driver" and not outcome.executions:
            text += f"; {_NO_EXECUTIONS}, because its layout is from an older iaprof"
            mend = f"sudo iaprof calibrate {shlex.quote(outcome.path)}"
            return _with_cost(Check(GROUP, what, Level.WARNING, text, mend, file), outcome)
        return _with_cost(Check(GROUP, what, Level.OK, text, file=file), outcome)
    if outcome.way is Way.INJECT:
        unrecorded = OWN_KERNELS_UNRECORDED if outcome.copies else COPIES_UNRECORDED
        text = f"launches by a library that iaprof put into its command; {unrecorded}"
        return Check(GROUP, what, Level.OK, text, file=file)
    if outcome.way is None:
        mend = ""
        if outcome.build_id:
            mend = f"sudo iaprof calibrate {shlex.quote(outcome.path)}"
        return Check(GROUP, what, Level.WARNING, outcome.problem, mend, file)
    if missing := [name for name in (LAUNCH, COMPILE) if name not in names]:
        text = f"has no {missing[0]} probe: it was built without all of intel/iaprof's patches"
        return Check(GROUP, what, Level.WARNING, text, file=file)
    text = f"launches and modules by its probes; {_NO_EXECUTIONS}"
    return _with_cost(Check(GROUP, what, Level.OK, text, file=file), outcome)


def _vulkan(outcome: Outcome, version: str) -> Check:
    file = shortened(outcome.path)
    if outcome.way is Way.ATTACH:
        text = f"compute dispatches by attaching (Mesa {version}); {NO_GRAPHICS}"
        if outcome.draws:
            unrecorded = NO_TRANSFERS if outcome.own_kernels else COPIES_UNRECORDED
            text = f"dispatches and draws by attaching (Mesa {version}); {unrecorded}"
        if outcome.outdated:
            text += f"; its layout is from an older iaprof, so it {WILL_CALIBRATE}"
        return Check(GROUP, "Vulkan", Level.OK, text, file=file)
    is_calibrated = outcome.problem.endswith(WILL_CALIBRATE)
    mend = f"sudo iaprof calibrate {shlex.quote(outcome.path)}" if outcome.build_id and not is_calibrated else ""
    # Most machines have it, and most of their programs dispatch nothing.
    level = Level.OK if outcome.unused or is_calibrated else Level.WARNING
    return Check(GROUP, "Vulkan", level, outcome.problem, mend, file)


def _with_cost(check: Check, outcome: Outcome) -> Check:
    """Makes a check a warning if launches cost more than they should."""
    if not outcome.single_stepped:
        return check
    return replace(check, level=Level.WARNING, text=f"{check.text}; {slow_launches(outcome.single_stepped)}")


def _injection() -> Check:
    """Checks injection, the way for drivers that iaprof does not know."""
    try:
        built_library()
        check_folders()
    except IaprofError as error:
        return Check(GROUP, "injecting", Level.WARNING, f"iaprof cannot inject into other drivers: {error}")
    text = (
        "'record -- COMMAND' can put its library into a command whose driver has no probes and is of an unknown build; "
        f"{OWN_KERNELS_UNRECORDED}"
    )
    return Check(GROUP, "injecting", Level.OK, text)
