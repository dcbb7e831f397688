"""Where the stacks of current launches end, by a short recording: a list of libraries would say less."""

from __future__ import annotations

import contextlib
import select
import time
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.bpf.errors import BpfUnavailable
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import Libraries
from iaprof.bpf.processes import describe
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.header.stack_counts import WholeStacks
from iaprof.formats.wire.launches import LAUNCH, LaunchFlags, stack_dtype
from iaprof.formats.wire.sideband import SideBand, decode
from iaprof.record.capture.sideband_rows import sideband_rows
from iaprof.record.stacks.ends import StackEnds
from iaprof.record.stacks.launch_stacks import LaunchStacks
from iaprof.record.stacks.python_stacks import PythonStacks
from iaprof.record.stacks.walks import Walks
from iaprof.record.symbolize.mapped_files import MappedFiles
from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
from iaprof.record.unwinding.learner_process import LearnerProcess
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.boot import boot_id
from iaprof.symbols.unwind.stack_ends import code_of

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
        with contextlib.closing(LearnerProcess(probes)) as learner:
            launches, stacks = _read(probes, learner, seconds)
    except (BpfUnavailable, OSError):
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
    stacks = LaunchStacks(Walks(spaces, True), ends, PythonStacks(), probes.follows_frame_pointers)
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
