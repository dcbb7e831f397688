"""Whether stacks will be whole: how they are walked, and where those of current launches end, by a short recording."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.basics.quantities import counted
from iaprof.bpf.accounts import may_read
from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import Libraries
from iaprof.bpf.processes import describe, running_pids, user_of
from iaprof.bpf.sizes import kernel_offsets
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.header.stack_counts import WholeStacks
from iaprof.formats.wire.launches import LAUNCH, LaunchFlags, stack_dtype
from iaprof.formats.wire.process_maps import lines, mappings, maps_of
from iaprof.formats.wire.sideband import SideBand, decode
from iaprof.record.capture.rows import sideband_rows
from iaprof.record.checks.result import Check, Level, shortened
from iaprof.record.stacks.ends import StackEnds
from iaprof.record.stacks.launch_stacks import LaunchStacks
from iaprof.record.stacks.python_stacks import PythonStacks
from iaprof.record.stacks.walks import Walks
from iaprof.record.symbolize.opener import MappedFiles
from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
from iaprof.record.unwinding.learner_process import LearnerProcess
from iaprof.sandbox.answering import ANSWERING
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.boot import boot_id
from iaprof.symbols.unwind.stack_ends import code_of

GROUP = "Stacks"
MOST_LINES = 8
_DRIVERS = re.compile(rb"libze_intel_gpu\.so[0-9.]*|libigdrcl\.so")


def checks() -> Iterator[Check]:
    """Checks how stacks are walked, and the stacks of current launches."""
    yield _walking()
    seen = watch_launches() if next(mapped(_DRIVERS), None) else None
    if seen is None:
        return
    if seen.ends.stacks:
        yield from _seen_launches(seen)
    else:
        text = f"none in {SECONDS:g} s by the processes that use a GPU, so nothing is known of their stacks"
        yield Check(GROUP, "launches", Level.WARNING, text)


def _walking() -> Check:
    if kernel_offsets() is not None:
        return Check(GROUP, "walking", Level.OK, "by call frame information: code needs no frame pointers")
    text = "by frame pointers: the kernel's BTF does not say where it has a process's mappings"
    return Check(GROUP, "walking", Level.WARNING, f"{text}. Stacks end in code without frame pointers")


def _seen_launches(seen: SeenLaunches) -> Iterator[Check]:
    """Yields a check for all launches that were seen, and one for each library in which stacks end or are guessed."""
    ends = seen.ends
    level = Level.OK if ends.whole == ends.stacks else Level.WARNING
    yield Check(GROUP, "launches", level, f"now, {ends.text('launches')}")
    for libraries, what in ((ends.ends, "end there"), (ends.guesses, "have a caller that is guessed there")):
        for end in libraries[:MOST_LINES]:
            text = f"the stacks of {counted(end.count, 'launch', 'launches')} {what}"
            yield Check(GROUP, end.library, Level.WARNING, text, file=shortened(seen.files.get(end.library, "")))


@dataclass(frozen=True)
class MappedFile:
    """A file that a process has mapped."""

    pid: int
    path: str


def mapped(name: re.Pattern[bytes]) -> Iterator[MappedFile]:
    """Yields files with executable mappings whose name (without folder) matches, once for each process.

    Those of file systems of other users, or that do not answer, are left out: opening them could take forever.
    """
    line = lines(rb"/.*", rights=rb"..x.")
    for pid in running_pids():
        seen = set()
        for mapping in mappings(maps_of(pid), line):
            path = mapping.name.removesuffix(b" (deleted)")
            if path not in seen and name.fullmatch(os.path.basename(path)):
                seen.add(path)
                location = f"/proc/{pid}/map_files/{mapping.span}"
                if may_read(pid, mapping.device, user_of) and ANSWERING.answers(mapping.device, location):
                    yield MappedFile(pid, path.decode("utf-8", "backslashreplace"))


SECONDS = 1.0
ENOUGH = 2_000  # launches, after which the recording ends early


@dataclass(frozen=True)
class SeenLaunches:
    """What was seen of launches."""

    ends: WholeStacks
    files: dict[str, str] = field(default_factory=dict)  # by name: paths of the libraries in which stacks end


def watch_launches(seconds: float = SECONDS) -> SeenLaunches | None:
    """Probes the drivers that running processes have mapped, for a short time, as a recording does.

    Args:
        seconds: at most.

    Returns:
        What was seen; None if no process maps a driver that can be probed, or if the probes cannot be loaded.
    """
    would_probe = Libraries(lambda *_: "", lambda *_: None)
    if not any(outcome.probes for outcome in would_probe.running()):
        return None
    try:
        probes = LaunchProbes(cpu_samples=False)
    except BpfUnavailable:
        return None
    try:
        probes.ready()
        if not sum(outcome.probes for outcome in probes.libraries.running()):
            return None
        with contextlib.closing(LearnerProcess()) as learner:
            learner.learn_from(probes)
            launches, stacks = _read(probes, learner, seconds)
    except (IaprofError, OSError):
        return None
    finally:
        probes.close()
    return _ends(launches, stacks, probes)


def _read(probes: LaunchProbes, learner: LearnerProcess, seconds: float) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Returns the launches that have a stack, and the stacks.

    Launches do not count before the learner knows the code that launches: their stacks would seem to end there.
    """
    sent, stacks = learner.wait(), [probes.stacks.read()]
    while not learner.has_finished():
        select.select([learner], [], [], 0.05)
        sent += learner.read()
    probes.launches.read()
    end, seen_launches = time.monotonic() + seconds, np.empty(0, LAUNCH)
    while (left := end - time.monotonic()) > 0 and len(seen_launches) < ENOUGH:
        select.select([probes.launches.fileno()], [], [], min(left, 0.05))
        launches = probes.launches.read()
        stacks.append(probes.stacks.read())
        walked = launches[launches["flags"] & (LaunchFlags.OTHER | LaunchFlags.NO_STACK) == 0]
        seen_launches = np.concatenate([seen_launches, walked])
    probes.detach()
    dtype = stack_dtype(probes.depth)
    finished = b"".join(message for message in (*sent, *learner.finish()) if len(message) == dtype.itemsize)
    return seen_launches, np.concatenate([*stacks, probes.stacks.read(), np.frombuffer(finished, dtype)])


def _ends(launches: NDArray[np.void], records: NDArray[np.void], probes: LaunchProbes) -> SeenLaunches:
    band, first = SideBand(), int(records["time"].min()) if len(records) else 0
    for pid in np.unique(records["pid"]).tolist():
        decode(describe(pid, first), band)
    rows = dict(sideband_rows(band))
    mappings, processes = (
        pa.concat_tables([pa.schema(list(KINDS[kind])).empty_table(), pa.Table.from_struct_array(rows[kind])])
        for kind in ("mapping", "process")
    )
    spaces, ends = AddressSpaces(mappings, processes), StackEnds()
    stacks = LaunchStacks(Walks(spaces, True), ends, PythonStacks(lambda _: b""), probes.follows_frame_pointers)
    stacks.rows(records, probes.depth)
    stacks.rows_of_unfinished()
    presumed, late = launches["flags"] & LaunchFlags.PRESUMED > 0, np.zeros(len(launches), bool)
    ends.launches.add(stacks.ids(launches["stack"]), launches["pid"], presumed, late)
    files = {}
    known = MappedFiles()
    known.add(band.mappings)
    now = {"monotonic_ns": time.monotonic_ns(), "realtime_ns": time.time_ns()}
    header = {"host": {"boot_id": boot_id()}, "clock": now}
    with RecordingSymbolizer(header, spaces, mappings, processes, False, known) as naming:
        for module, addresses in ends.places(spaces.modules):
            files[code_of(module)] = module.path
            times = np.full(len(addresses), first, np.uint64)
            ends.add_names(module, naming.name(module, addresses, times))
    whole_stacks = WholeStacks.from_json(ends.header(spaces.modules)["launches"])
    assert whole_stacks is not None
    return SeenLaunches(whole_stacks, files)
