"""The source of launches: what the launch probes send, and what /proc says of the processes that launch.

Ring buffers are emptied in bulk. Python works once per process, not per record.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter as CountOf
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf import processes
from iaprof.bpf.accounts import describe
from iaprof.bpf.loader import linux_version
from iaprof.bpf.maps import RingBuffer
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.formats.wire.launches import MESSAGE_BYTES, Counter, LaunchFlags, MessageOf
from iaprof.record.journal import WRONG_LENGTH, Journal
from iaprof.record.kernels.drivers import Drivers
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.scope import Scope
from iaprof.record.sources.code_objects import CodeObjects
from iaprof.record.sources.launch_paths import LaunchPaths
from iaprof.record.sources.metrics import Metering
from iaprof.record.sources.source import Sampler, Source
from iaprof.record.spool import FrameKind
from iaprof.record.symbolize.roots import Roots

MAX_PROCESSES = 1 << 16  # that are remembered as described
NONE_SKIPPED_SINCE = 6, 0  # version of Linux
SKIPPED = (
    "before Linux 6.0 the kernel skips a probe while another BPF program runs on that CPU, and does not count it: "
    "launches may be missing"
)

_LOSSES = {
    Counter.LAUNCHES_LOST: ("launches", "lost", "no room in the ring buffer, or very many kernels in one call"),
    Counter.BAD_ARGS: ("launches", "unreadable", "the probe's arguments could not be read"),
    Counter.STACKS_LOST: ("stacks", "lost", "no room in the ring buffer; those launches have no stack"),
    Counter.STACKS_TRUNCATED: (
        "stacks",
        "truncated",
        "launches from a stack that is deeper than what is recorded of one",
    ),
    Counter.COPIES_LOST: ("stacks", "not copied", "no room in the ring buffer to finish them: they are cut"),
    Counter.PYTHON_LOST: ("stacks", "without Python", "no room in the ring buffer for their frames of Python"),
    Counter.SAMPLES_LOST: ("cpu samples", "lost", "no room in the ring buffer"),
    Counter.SAMPLE_STACKS_LOST: ("stacks", "lost", "no room in the ring buffer; those CPU samples lack a stack"),
    Counter.WAITS_LOST: ("waits", "lost", "no room for them"),
    Counter.WAITS_ASTRAY: ("waits", "unreadable", "no return address was found where they were called"),
    Counter.COMPILED_LOST: ("kernels", "lost", "a module was compiled whose path could not be kept"),
    Counter.HANDLES_UNREADABLE: ("launches", "unreadable", "what their kernels' handles point to could not be read"),
    Counter.HANDLES_UNKNOWN: ("launches", "unreadable", "the layout does not fit their kernels' handles"),
    Counter.HANDLES_ASTRAY: ("launches", "unreadable", "their addresses are not where the driver keeps code"),
    Counter.HANDLES_CHANGED: ("launches", "unreadable", "their kernels' handles had another address before"),
    Counter.LISTS_LOST: (
        "command lists",
        "lost",
        "what was executed, closed, reset or destroyed: no room in the ring buffer, or it could not be read",
    ),
    Counter.MESSAGES_LOST: (
        "messages",
        "lost",
        "no room in the ring buffer: samples, cubins or executions are missing",
    ),
    Counter.CHUNKS_LOST: ("kernels", "incomplete", "their name, code or module could not be read at a launch"),
}


class Launches(Source):
    """The probes' ring buffers, and the processes whose records come through them."""

    def __init__(
        self,
        options: Options,
        probes: LaunchProbes,
        code: CodeObjects,
        drivers: Drivers,
        roots: Roots,
        metering: Metering,
        sampler: Sampler,
        scope: Scope | None = None,
        sampled: Scope | None = None,
    ) -> None:
        """Takes the opened probes.

        Args:
            options: what to record.
            probes: the caller closes them.
            code: gets the probes' records about code.
            drivers: make the command's environment.
            roots: keep the root folders of the processes that launch, wait or copy, and are told of their ends.
            metering: measures these processes.
            sampler: gets the messages of its library.
            scope: the processes in scope; None for all.
            sampled: likewise for CPU samples, whose program is one of the probes'.
        """
        self._options, self._probes, self._code, self._drivers = options, probes, code, drivers
        self._roots, self._metering, self._scope, self._sampled = roots, metering, scope, sampled
        self._sampler = sampler
        self._paths = LaunchPaths(time.monotonic_ns())
        self._last_stacks: list[NDArray[np.void]] = []  # of the last read: stacks, frames of Python, code objects
        self._taken_waits: list[NDArray[np.void]] = []  # from BPF maps; they are written once their stacks are read
        self._described: dict[int, int] = {}  # by pid: when something of it was read last, CLOCK_MONOTONIC ns
        self._last_counters = dict.fromkeys(Counter, 0)
        self._last_misfits: CountOf[str] = CountOf()  # by source of losses
        self._counters_ns = time.monotonic_ns()
        self._again: dict[int, tuple[dict[str, Any], bytes]] = {}  # what the next file gets of processes

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {
            "stack_depth": self._probes.depth,
            "follows_frame_pointers": self._probes.follows_frame_pointers,
            "launches_by": str(self._options.launches),
            "waits_wanted": self._options.waits,
            **({"scope": list(self._scope.pids)} if self._scope else {}),
        }

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal = journal
        if self._drivers.warning:
            journal.warn(self._drivers.warning)
        if self._probes.follows_frame_pointers:
            journal.warn(
                "the kernel's BTF does not say where it has a process's mappings: stacks are walked by frame pointers, "
                "and end in code without them"
            )
        if linux_version() < NONE_SKIPPED_SINCE:
            journal.warn(SKIPPED)
        for followed in filter(None, {self._scope, self._sampled}):
            followed.start(journal, self._probes)
        # Edge-triggered: one event per wake-up that a BPF program requests. Else each launch that comes while we read
        # would wake us again.
        for ring in (
            self._probes.launches,
            self._probes.list_events,
            self._probes.stacks,
            self._probes.python_stacks,
            self._probes.codes,
            self._probes.compiled,
            self._probes.samples,
            self._probes.waits,
            self._probes.chunks,
            self._probes.modules,
            self._probes.messages,
            self._probes.pieces,
            self._probes.paths,
        ):
            loop.wait_for(ring.fileno(), self.read, select.EPOLLET)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """See Source."""
        return self._drivers.environment(environment)

    def read(self) -> None:
        """See Source: empties the ring buffers."""
        # In this order: stacks are sent before the launches and samples that refer to them, so all of them are there.
        # Likewise launches before their paths.
        paths = self._probes.paths.read()
        launches, samples, lists, waits = (
            ring.read()
            for ring in (self._probes.launches, self._probes.samples, self._probes.list_events, self._probes.waits)
        )
        rings = (self._probes.stacks, self._probes.python_stacks, self._probes.codes)
        self._last_stacks = [ring.read() for ring in rings]
        now = time.monotonic_ns()
        self._write_stacks(self._last_stacks, now)
        launches = self._sampler.placed(self._without_transfers(launches, now))
        self._write_launches(launches, now)
        self._paths.learn(launches, paths)
        if len(lists):
            self._journal.write(FrameKind.LISTS, lists.view("u1").data, time=now)
            self._describe_processes(lists)
        if len(samples):
            self._journal.write(FrameKind.CPU_SAMPLES, samples.view("u1").data, time=now)
        self._write_waits(np.concatenate([waits, *self._taken_waits]), now)
        self._taken_waits = []
        compiled = self._probes.compiled.read()
        if self._scope is not None and len(compiled):
            compiled = compiled[~np.isin(compiled["pid"], list(self._scope.others))]
        if len(compiled):
            self._code.ask(compiled, now)
        for ring in (self._probes.chunks, self._probes.modules):
            self._code.keep_chunks(ring.read(), now)
        messages, now = self._probes.messages.read(), time.monotonic_ns()  # they are about times up to now
        of_launches = (messages["what"] == MessageOf.LAUNCHES) & (messages["bytes"] <= MESSAGE_BYTES)
        for launches in self._paths.launches_of(messages[of_launches], now):
            self._write_launches(launches, now)
        self._sampler.take(messages[~of_launches], now)
        self._sampler.take(self._probes.pieces.read(), now)

    def _write_launches(self, launches: NDArray[np.void], now: int) -> None:
        if not len(launches):
            return
        totals = self._journal.totals
        totals.launches += len(launches)
        self._journal.write(FrameKind.LAUNCHES, launches.view("u1").data, time=now)
        if totals.kernels is not None:
            totals.kernels.add_launches(launches[(launches["flags"] & LaunchFlags.OTHER) == 0])
        self._describe_processes(launches)

    def _without_transfers(self, records: NDArray[np.void], now: int) -> NDArray[np.void]:
        """Writes those of the records that are copies and fills, and returns the launches."""
        if not len(records) or not (is_transfer := (records["flags"] & LaunchFlags.TRANSFER) > 0).any():
            return records
        transfers: NDArray[np.void] = records[is_transfer]
        self._journal.write(FrameKind.TRANSFERS, transfers.view("u1").data, time=now)
        self._describe_processes(transfers)
        launches: NDArray[np.void] = records[~is_transfer]
        return launches

    def _write_waits(self, waits: NDArray[np.void], now: int) -> None:
        if len(waits):
            self._journal.write(FrameKind.WAITS, waits.view("u1").data, time=now)
            self._describe_new(waits["pid"])

    def _write_stacks(self, records: Sequence[NDArray[np.void]], now: int) -> None:
        """Writes stacks, frames of Python and code objects."""
        kinds = {FrameKind.STACKS: self._probes.depth, FrameKind.PYTHON: 0, FrameKind.CODES: 0}
        for (kind, shape), stack_records in zip(kinds.items(), records, strict=True):
            if len(stack_records):
                self._journal.write(kind, stack_records.view("u1").data, time=now, shape=shape)

    def _describe_processes(self, calls: NDArray[np.void]) -> None:
        """Describes the processes of LAUNCH or LIST_EVENT records that are new."""
        self._describe_new(calls["pid"][(calls["flags"] & LaunchFlags.OTHER) == 0])

    def _describe_new(self, pids: NDArray[np.uint32]) -> None:
        now = time.monotonic_ns()
        for pid in np.unique(pids).tolist():
            if pid not in self._described:
                self._describe(pid)
            self._described[pid] = now

    def _describe(self, pid: int) -> None:
        if len(self._described) >= MAX_PROCESSES:
            self._described.clear()
        self._write_described(pid, describe(pid))
        self._roots.keep(pid)
        self._metering.watch(pid)

    def _write_described(self, pid: int, about: dict[str, Any]) -> None:
        self._described[pid] = time.monotonic_ns()
        if about["uid"] is not None:  # else it has ended, and nothing is known
            self._journal.json(FrameKind.PROCESS, {"pid": pid, **about})

    def ended(self, pid: int, time_ns: int) -> None:
        """Forgets a process that has ended, as another one may get its pid.

        Args:
            pid: the process.
            time_ns: when it ended, CLOCK_MONOTONIC: if something of this pid was read after that, it may be the next
                process's, which is described now.
        """
        self._roots.ended(pid)
        if self._paths.has(pid):
            self.read()
            self._write_unsent(pid)
            self._paths.ended(pid)
        if (read_ns := self._described.pop(pid, None)) is not None and read_ns > time_ns:
            self._describe(pid)

    def end_part(self, since_ns: int) -> None:
        """See Source: has each stack sent again, for the next file; what has come goes into this one."""
        # Now: a process that ends before `begin_part` may have launches in the next file, too.
        self._again = {
            pid: (describe(pid), records) for pid in self._described if (records := processes.describe(pid, since_ns))
        }
        self._probes.new_epoch()
        now = time.monotonic_ns()
        self._paths.new_epoch()
        self._taken_waits.append(self._probes.take_short_waits())
        self.read()
        self._write_unsent()
        self._paths.forget_stacks(before_ns=now)
        self._first_stacks = self._last_stacks  # some belong to launches of the new epoch, which come later

    def begin_part(self, since_ns: int) -> None:
        """See Source: writes what is known of processes, and the new epoch's first stacks."""
        self._write_stacks(self._first_stacks, time.monotonic_ns())
        pids, self._described = list(self._described), {}
        for pid in pids:
            about, records = self._again.get(pid) or (describe(pid), processes.describe(pid, since_ns))
            if records:
                self._write_described(pid, about)
                self._journal.write(FrameKind.SIDEBAND, records, time=since_ns)
        self._again = {}

    def _write_unsent(self, pid: int | None = None) -> None:
        now = time.monotonic_ns()
        for launches in self._paths.unsent(now, pid):
            self._write_launches(launches, now)

    def losses(self) -> None:
        """See Source: what the BPF programs could not send."""
        now, counters = time.monotonic_ns(), self._probes.counters()
        if lost := self._paths.take_lost():
            detail = "on known paths: a message was lost, or cannot be right"
            self._journal.loss("launches", "lost", lost, detail, self._counters_ns, now)
        for counter, (source, what, detail) in _LOSSES.items():
            lost = counters[counter] - self._last_counters[counter]
            if lost:
                self._journal.loss(source, what, lost, detail, self._counters_ns, now)
        self._take_waits(counters, now)
        for source, of_source in self._rings().items():
            for held_ns, end_ns in (held for ring in of_source for held in ring.take_held()):
                detail = (
                    f"for {(end_ns - held_ns) / 1e9:.1f} s a thread that got no CPU held up what came after its record"
                )
                self._journal.loss(source, "held up", None, detail, held_ns, end_ns)
            misfits = sum(ring.misfits for ring in of_source)
            if misfits > self._last_misfits[source]:
                number = misfits - self._last_misfits[source]
                self._journal.loss(source, "wrong length", number, WRONG_LENGTH, self._counters_ns, now)
                self._last_misfits[source] = misfits
        self._last_counters, self._counters_ns = counters, now

    def _rings(self) -> dict[str, tuple[RingBuffer, ...]]:
        """Returns the ring buffers, by source of losses."""
        return {
            "launches": (self._probes.launches,),
            "command lists": (self._probes.list_events,),
            "stacks": (self._probes.stacks, self._probes.python_stacks, self._probes.codes),
            "cpu samples": (self._probes.samples,),
            "waits": (self._probes.waits,),
            "messages": (self._probes.messages, self._probes.pieces, self._probes.paths),
            "kernels": (self._probes.compiled, self._probes.chunks, self._probes.modules),
        }

    def _take_waits(self, counters: dict[Counter, int], now: int) -> None:
        """Takes waits still in BPF maps: a thread's next wait would send them, or the thread has ended."""
        if counters[Counter.WAITS] != self._last_counters[Counter.WAITS]:
            self._taken_waits += [self._probes.take_short_waits(), self._probes.forget_waits(_is_alive, now)]

    def finish(self) -> None:
        """See Source: detaches the probes."""
        self._probes.detach()
        now = time.monotonic_ns()
        self._taken_waits += [self._probes.unended_waits(now), self._probes.take_short_waits()]
        self.read()
        self._write_unsent()
        for source, of_source in self._rings().items():
            if unread := sum(ring.unread for ring in of_source):
                detail = "bytes after a record that was not finished when the recording ended"
                self._journal.loss(source, "unread", unread, detail, now, now)

    def footer(self) -> dict[str, Any]:
        """See Source."""
        counters = self._probes.counters()
        return {
            "probes": {counter.name.lower(): value for counter, value in counters.items()},
            "cost": {
                "compile_cpu_s": round(self._probes.compile_cpu_seconds, 3),
                "probe_ns": counters[Counter.PROBE_NS],
            },
        }

    def close(self) -> None:
        """See Source."""
        self._paths.close()

    @property
    def cpu_seconds(self) -> float:
        """See Source: CPU time of the process that compiles BPF programs."""
        return self._probes.compile_cpu_seconds

    @property
    def probe_seconds(self) -> float:
        """See Source: of launches, copies and waits; programs for CPU samples do not count theirs."""
        counters = self._probes.counters()
        return (counters[Counter.PROBE_NS] + counters[Counter.WAIT_NS]) / 1e9


def _is_alive(pid: int, tid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/task/{tid}")
