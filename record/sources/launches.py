"""What the launch probes tell: launches, stacks and compiled modules, and who launched.

Ring buffers are emptied in bulk. What Python does per process, per library and per module happens once for each.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import Counter as CountOf
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf import processes
from iaprof.bpf.launches import LaunchProbes
from iaprof.bpf.libraries import Mapped, Outcome
from iaprof.formats.header.slow_launches import MEMBER as SINGLE_STEPPED, sentence
from iaprof.formats.header.unrecorded_copies import MEMBER as COPIES, OWN_KERNELS
from iaprof.formats.wire.launches import (
    COPY,
    INTERPRETER,
    PIECE,
    PIECE_BYTES,
    PYTHON_STACK,
    Counter,
    LaunchFlags,
    PieceOf,
    stack_dtype,
)
from iaprof.formats.zebin import placed_ranges
from iaprof.record.containers import describe
from iaprof.record.intake import MAX_TOTAL_BYTES, Intake, RefusedElf, TakenElf
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.spool import FrameKind
from iaprof.record.unwinding.learning import Learning

TURN_NS = 10_000_000  # of looking for libraries, before others get theirs
COUNTERS_EVERY_NS = 1_000_000_000
INTAKE_WAIT_S = 3.0
MIN_PIECE_BYTES = 4096  # that one counts as: who puts a million tiny ones together needs memory for each
MAX_INTERPRETERS = 1 << 12  # in processes, of which later files are told
MOST_PROBLEMS = 16  # with interpreters, that are told
MAX_PROCESSES = 1 << 16  # that are remembered as described
MOST_PATHS = 16  # of drivers that one process mapped at once, that are remembered
# Of stacks that are to be finished when the recording has ended, in one recording: of launches, and of CPU samples.
MAX_COPIED_BYTES, MAX_SAMPLED_BYTES = 1 << 30, 1 << 26

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
    Counter.WAITS_LOST: ("waits", "lost", "no room for them"),
    Counter.WAITS_ASTRAY: ("waits", "unreadable", "no return address was found where they were called"),
    Counter.COMPILED_LOST: ("kernels", "lost", "a module was compiled whose path could not be kept"),
    Counter.HANDLES_UNREADABLE: ("launches", "unreadable", "what their kernels' handles point to could not be read"),
    Counter.HANDLES_UNKNOWN: ("launches", "unreadable", "their kernels' handles are none that the layout knows"),
    Counter.HANDLES_ASTRAY: ("launches", "unreadable", "their addresses are not where the driver keeps code"),
    Counter.HANDLES_CHANGED: ("launches", "unreadable", "their kernels' handles had another address before"),
    Counter.LISTS_LOST: (
        "command lists",
        "lost",
        "what was executed, closed, reset or destroyed: no room in the ring buffer, or it could not be read",
    ),
    Counter.PIECES_LOST: ("kernels", "incomplete", "their name, code or module could not be had at a launch"),
}
_WRONG_LENGTH = "records in the ring buffer whose length is not the one that this iaprof expects: they were skipped"


class Launches:
    """The probes, the intake of debug ELFs, and what is known of the processes that launch."""

    def __init__(self, probes: LaunchProbes, intake: Intake, scope: Scope | None = None) -> None:
        self._probes, self._intake, self._scope = probes, intake, scope
        self._last_stacks: list[NDArray[np.void]] = []  # read last, with their frames of Python and code
        self._learning: Learning | None = None
        self._mapping: dict[int, Mapped] = {}  # by process that mapped a library, in order
        self._ready_ns = 0  # since when probes are in the drivers that were there
        self._described: dict[int, None] = {}
        self.libraries: list[dict[str, object]] = []  # as the capture's header has them
        self._last_counters = dict.fromkeys(Counter, 0)
        self._last_misfits: CountOf[str] = CountOf()  # by what the ring buffer is for
        self._counters_ns = time.monotonic_ns()
        self._piece_bytes = 0
        self._copied_bytes = self._sampled_bytes = self._copies_refused = 0
        self._interpreters: list[tuple[int, bytes]] = []  # as the learner told of them, with the processes
        self._without_python: set[str] = set()  # why the frames of some interpreters are not recorded
        self._again: dict[int, tuple[dict[str, Any], bytes]] = {}  # what another spool is to have of processes
        self._told_of_waits = False  # that they are not recorded
        self.kernels: Kernels | None = None
        self.on_mapped: Callable[[int], None] = lambda _: None  # is told the pid of who mapped a library
        self.on_taken: Callable[[bytes], None] = lambda _: None  # is told the path of each debug ELF that was taken

    def learn(self) -> None:
        """Starts the process that finishes stacks.

        Raises:
            OSError: it cannot be started.
        """
        self._learning = Learning(self._probes)

    def start(
        self, journal: Journal, loop: Loop, on_process: Callable[[int], None], libraries: Iterable[Outcome]
    ) -> None:
        """Attaches the probes, and begins to be read by `loop`.

        Args:
            journal: gets what comes.
            loop: calls back.
            on_process: is told the pid of each process that launches, once.
            libraries: that nobody needs to have mapped yet.
        """
        self._journal, self._loop, self._on_process = journal, loop, on_process
        self._took(libraries)
        self._took(self._probes.libraries.running())
        for pid in processes.running_pids():
            if b"python" in processes.maps_of(pid):
                self.look_for_python(pid)
        self._ready_ns = time.monotonic_ns()
        # Told once per wake-up that a program asked for. Else we would be woken by each launch that comes while
        # we read those before it.
        for ring in (
            self._probes.launches,
            self._probes.list_events,
            self._probes.stacks,
            self._probes.codes,
            self._probes.compiled,
            self._probes.samples,
            self._probes.waits,
            self._probes.pieces,
            self._probes.modules,
        ):
            loop.wait_for(ring.fileno(), self.read, select.EPOLLET)
        self._wait_for_intake()
        self._wait_for_learner()
        loop.every(COUNTERS_EVERY_NS, self.read_counters)

    def count_kernels(self) -> Kernels:
        """From now on counts the kernels that are launched, for who shows it: it costs a little for each read."""
        self.kernels = Kernels()
        return self.kernels

    def read(self) -> NDArray[np.void]:
        """Empties the ring buffers; gives the stacks that came, as stack_dtype[n]."""
        # In this order: a launch's or sample's stack was sent before it, so all that these name will be there.
        launches, samples, lists, waits = (
            ring.read()
            for ring in (self._probes.launches, self._probes.samples, self._probes.list_events, self._probes.waits)
        )
        rings = (self._probes.stacks, self._probes.python_stacks, self._probes.codes)
        self._last_stacks = [ring.read() for ring in rings]
        now = time.monotonic_ns()
        self._write_stacks(self._last_stacks, now)
        launches = self._without_transfers(launches, now)
        if len(launches):
            self._journal.totals.launches += len(launches)
            self._journal.write(FrameKind.LAUNCHES, launches.view("u1").data, time=now)
            if self.kernels is not None:
                self.kernels.launched(launches[(launches["flags"] & LaunchFlags.OTHER) == 0])
            self._meet(launches)
        if len(lists):
            self._journal.write(FrameKind.LISTS, lists.view("u1").data, time=now)
            self._meet(lists)
        if len(samples):
            self._journal.write(FrameKind.CPU_SAMPLES, samples.view("u1").data, time=now)
        self._keep_waits(waits, now)
        compiled = self._probes.compiled.read()
        if self._scope is not None and len(compiled):
            compiled = compiled[~np.isin(compiled["pid"], list(self._scope.others))]
        if len(compiled):
            refused = self._intake.ask(compiled)
            if refused:
                self._journal.loss("kernels", "refused", refused, "too many were compiled at once", now, now)
        for ring in (self._probes.pieces, self._probes.modules):
            self._keep_pieces(ring.read(), now)
        return self._last_stacks[0]

    def _without_transfers(self, records: NDArray[np.void], now: int) -> NDArray[np.void]:
        """Writes down which of the records are copies and fills, and gives the launches."""
        if not len(records) or not (is_transfer := (records["flags"] & LaunchFlags.TRANSFER) > 0).any():
            return records
        transfers: NDArray[np.void] = records[is_transfer]
        self._journal.write(FrameKind.TRANSFERS, transfers.view("u1").data, time=now)
        self._meet(transfers)
        launches: NDArray[np.void] = records[~is_transfer]
        return launches

    def _keep_waits(self, waits: NDArray[np.void], now: int) -> None:
        if len(waits):
            self._journal.write(FrameKind.WAITS, waits.view("u1").data, time=now)
            self._describe_all(waits["pid"])

    def _keep_pieces(self, pieces: NDArray[np.void], now: int) -> None:
        """Writes them down without the room that they do not use: kernels are described once each."""
        if not len(pieces):
            return
        self._piece_bytes += int(np.maximum(pieces["bytes"], MIN_PIECE_BYTES).sum())
        if self._piece_bytes > MAX_TOTAL_BYTES:
            detail = f"{MAX_TOTAL_BYTES >> 30} GiB of kernels were taken already"
            self._journal.loss("kernels", "refused", len(pieces), detail, now, now)
            return
        rows = pieces.view("u1").reshape(len(pieces), -1)
        ends = pieces["bytes"] + PIECE.itemsize - PIECE_BYTES
        for row, end in zip(rows, ends.tolist(), strict=True):
            self._journal.write(FrameKind.PIECE, row[:end].data, time=now)
        first = pieces["offset"] == 0
        self._journal.totals.modules += int((first & (pieces["what"] == PieceOf.MODULE)).sum())
        last = pieces["offset"] + pieces["bytes"] == pieces["total"]
        known = pieces[last & (pieces["what"] == PieceOf.CODE)]
        if self.kernels is not None:
            self.kernels.compiled(zip(known["address"].tolist(), known["size"].tolist(), strict=True))

    def _write_stacks(self, records: Sequence[NDArray[np.void]], now: int) -> None:
        """Writes down stacks, frames of Python and code objects."""
        kinds = {FrameKind.STACKS: self._probes.depth, FrameKind.PYTHON: 0, FrameKind.CODES: 0}
        for (kind, part), each in zip(kinds.items(), records, strict=True):
            if len(each):
                self._journal.write(kind, each.view("u1").data, time=now, part=part)

    # Stacks that are finished in a process apart

    def _wait_for_learner(self) -> None:
        if self._learning is not None and self._learning.fileno() >= 0:
            self._learner_fd = self._learning.fileno()
            self._loop.wait_for(self._learner_fd, self._read_learner)

    def wait_for_learner(self) -> None:
        """Waits until stacks can be finished as they come, but not for long."""
        if self._learning is not None:
            self._keep_finished(self._learning.wait())

    def look_for_python(self, pid: int) -> None:
        """Has it looked whether a process has an interpreter, before it launches."""
        if self._learning is not None:
            self._learning.look_for_python(pid)

    def has_finished_stacks(self) -> bool:
        """Whether all stacks are finished, or have been waited for long enough; to be asked again."""
        return self._learning is None or self._learning.has_finished()

    def _read_learner(self) -> None:
        assert self._learning is not None
        self._keep_finished(self._learning.read())
        if self._learning.fileno() != self._learner_fd:  # it died, and perhaps another one took its place
            now = time.monotonic_ns()
            self._loop.forget(self._learner_fd)
            self._journal.loss("stacks", "learner", None, "the process that finishes stacks died", now, now)
            self._wait_for_learner()

    def _keep_finished(self, messages: Iterable[bytes]) -> None:
        depth = self._probes.depth
        for message in messages:  # one a path
            if message.startswith(INTERPRETER):
                self._keep_interpreter(message[len(INTERPRETER) :])
                continue
            if len(message) == PYTHON_STACK.itemsize:
                (frames,) = np.frombuffer(message, PYTHON_STACK, 1)
                self._journal.write_late(FrameKind.PYTHON, message, int(frames["time"]), depth)
                continue
            is_copy = len(message) == COPY.itemsize
            (record,) = np.frombuffer(message, COPY if is_copy else stack_dtype(depth), 1)
            if is_copy and not self._has_room_for(record):
                continue
            kind = FrameKind.COPY if is_copy else FrameKind.STACKS
            self._journal.write_late(kind, message, int(record["time"]), depth)

    def _keep_interpreter(self, told: bytes) -> None:
        now, about = time.monotonic_ns(), json.loads(told)
        problem = about.get("problem")
        if problem is None:
            self._journal.write(FrameKind.INTERPRETER, told, time=now)
            self._interpreters.append((int(about["pid"]), told))
            if len(self._interpreters) > MAX_INTERPRETERS:
                self._forget_interpreters()
        elif problem not in self._without_python and len(self._without_python) < MOST_PROBLEMS:
            self._without_python.add(problem)
            self._journal.loss("stacks", "without Python", None, problem, now, now)
            self._journal.warn(problem)

    def _forget_interpreters(self) -> None:
        """Those of processes that have ended; but the next file was told of them, as it may have their last stacks."""
        running = set(processes.running_pids())
        kept = [(pid, told) for pid, told in self._interpreters if pid in running]
        self._interpreters = kept[-MAX_INTERPRETERS:]

    def _has_room_for(self, copy: np.void) -> bool:
        """Whether one more page is kept."""
        if copy["is_sample"]:
            self._sampled_bytes += copy.nbytes
            return self._sampled_bytes <= MAX_SAMPLED_BYTES
        self._copied_bytes += copy.nbytes
        self._copies_refused += self._copied_bytes > MAX_COPIED_BYTES
        return self._copied_bytes <= MAX_COPIED_BYTES

    def new_epoch(self, time_ns: int) -> None:
        """Lets each stack travel again, for another spool; what came until now goes into this one.

        Args:
            time_ns: since when what is known of processes is said to be so there.
        """
        # Now: who ends before `describe_again` may have launches in that spool, too.
        self._again = {
            pid: (describe(pid), records) for pid in self._described if (records := processes.describe(pid, time_ns))
        }
        self._probes.new_epoch()
        self.read()
        self._keep_waits(self._probes.take_short_waits(), time.monotonic_ns())
        self._first_stacks = self._last_stacks  # some are of the new epoch, of launches that come after these

    def _meet(self, calls: NDArray[np.void]) -> None:
        """Describes the processes of LAUNCH or LIST_EVENT records that are new."""
        self._describe_all(calls["pid"][(calls["flags"] & LaunchFlags.OTHER) == 0])

    def _describe_all(self, pids: NDArray[np.uint32]) -> None:
        for pid in np.unique(pids).tolist():
            if pid not in self._described:
                self._describe(pid)
                self._on_process(pid)

    def _describe(self, pid: int) -> None:
        if len(self._described) >= MAX_PROCESSES:
            self._described.clear()
        self._keep_described(pid, describe(pid))

    def _keep_described(self, pid: int, told: dict[str, Any]) -> None:
        self._described[pid] = None
        self._journal.json(FrameKind.PROCESS, {"pid": pid, **told})

    def describe_again(self, time_ns: int) -> None:
        """Writes down once more what is known of processes, and the new epoch's first stacks, into another spool.

        Args:
            time_ns: since when it is said to be so.
        """
        self._write_stacks(self._first_stacks, time.monotonic_ns())
        for _, interpreter in self._interpreters:
            self._journal.write(FrameKind.INTERPRETER, interpreter, time=time_ns)
        self._forget_interpreters()
        known, self._described = list(self._described), {}
        for pid in known:
            told, records = self._again.get(pid) or (describe(pid), processes.describe(pid, time_ns))
            if records:
                self._keep_described(pid, told)
                self._journal.write(FrameKind.SIDEBAND, records, time=time_ns)
        self._again = {}

    # Modules

    def _wait_for_intake(self) -> None:
        self._intake_fd = self._intake.fileno()
        self._loop.wait_for(self._intake_fd, self.read_intake)

    def read_intake(self) -> None:
        """Takes the debug ELFs that were read meanwhile."""
        while (answer := self._intake.read()) is not None:
            self._keep_elf(answer)
        if self._intake.fileno() != self._intake_fd and not self._loop.closed:  # its child was replaced
            self._loop.forget(self._intake_fd)
            self._wait_for_intake()

    def _keep_elf(self, answer: TakenElf | RefusedElf) -> None:
        compiled = answer.compiled
        path = compiled.path.decode("utf-8", "backslashreplace")
        if isinstance(answer, RefusedElf):
            detail = f"{path} of process {compiled.pid}: {answer.reason}"
            self._journal.loss("kernels", "refused", 1, detail, compiled.time_ns, compiled.time_ns)
            self._journal.inform(f"not taken: {detail}")
            return
        about = {"pid": compiled.pid, "path": path, "digest": answer.digest, "size": answer.size}
        about["content"] = answer.content is not None
        meta = json.dumps(about).encode()
        content = answer.content or b""
        self._journal.write(FrameKind.KERNEL, meta, content, time=compiled.time_ns, part=len(meta))
        self._journal.totals.modules += 1
        self.on_taken(compiled.path)
        self._journal.inform(f"took {path} of process {compiled.pid}: {answer.size:,} bytes")
        if self.kernels is not None and answer.content is not None:
            self.kernels.compiled(placed_ranges(answer.content))

    def take_modules_again(self) -> None:
        """Modules of which the content was written come with it again, into another spool."""
        self._intake.forget_contents()
        self._piece_bytes = 0

    # Libraries

    def mapped(self, time_ns: int, pid: int, path: bytes) -> None:
        """A process mapped a file that has a library's name, and this path for the process."""
        mapped = self._mapping.setdefault(pid, Mapped(time_ns, set()))
        if len(mapped.paths) < MOST_PATHS:
            mapped.paths.add(path)
        self._loop.go_on_with("libraries", self._look_into_processes)

    def _look_into_processes(self) -> None:
        """Their maps may be long, and they may be many: one turn."""
        turn_ends = time.monotonic_ns() + TURN_NS
        while self._mapping and time.monotonic_ns() < turn_ends:
            pid = next(iter(self._mapping))
            mapped = self._mapping.pop(pid)
            self.on_mapped(pid)
            self._took(self._probes.libraries.mapped(pid, mapped if self._is_counted(pid, mapped) else None))
        if not self._mapping:
            self._loop.done_with("libraries")

    def _took(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            now = time.monotonic_ns()
            way = str(outcome.way) if outcome.way else None
            since = outcome.since_ns or now
            library: dict[str, object] = {"path": outcome.path, "probes": outcome.probes, "since_ns": since, "way": way}
            if outcome.probes:
                library["executions"] = outcome.executions
            if outcome.single_stepped:
                library[SINGLE_STEPPED] = list(outcome.single_stepped)
            if outcome.way:
                library[COPIES] = outcome.copies
                library[OWN_KERNELS] = outcome.own_kernels
            if outcome.waits and self._probes.records_waits:
                library["waits"] = outcome.waits
            self.libraries.append(library)
            self._journal.append("libraries", library)
            self._journal.inform(f"{outcome.path}: {outcome.probes} probes{f' ({way})' if way else ''}")
            if slow := sentence(library):
                self._journal.warn(slow)
            if (refused := self._probes.waits_refused) and not self._told_of_waits:
                self._told_of_waits = True
                self._journal.loss("waits", "not recorded", None, f"{outcome.path}: {refused}", now, now)
                self._journal.warn(f"waits for the GPU are not recorded in {outcome.path}: {refused}")
            if outcome.problem:
                problem = f"{outcome.path} is not probed: {outcome.problem}"
                self._journal.loss("launches", "library", None, problem, now, now)
                self._journal.warn(problem)
            if outcome.doubt:
                self._journal.loss("launches", "library", None, f"{outcome.path}: {outcome.doubt}", now, now)
                self._journal.warn(f"{outcome.path}: {outcome.doubt}")

    def _is_counted(self, pid: int, mapped: Mapped) -> bool:
        """Whether it matters that launches may be missing: not of processes that ran before the recording."""
        return mapped.time_ns > self._ready_ns and (self._scope is None or pid not in self._scope.others)

    def count_missed(self) -> None:
        """Counts processes that ended before anybody could look at their drivers, once all mappings were told."""
        for pid, mapped in self._mapping.items():
            if self._is_counted(pid, mapped):
                self._probes.libraries.missed(pid, mapped)

    def unprobed(self) -> dict[str, int]:
        """The header's `unprobed`, of processes since this was asked last."""
        return self._probes.libraries.take_unprobed().to_json()

    # Counts and end

    @property
    def learning_cpu_seconds(self) -> float:
        """CPU time of the process that finishes stacks."""
        return self._learning.cpu_seconds if self._learning is not None else 0.0

    def close(self) -> None:
        """Ends the process that finishes stacks, whatever it is doing."""
        if self._learning is not None:
            self._learning.close()

    def read_counters(self) -> None:
        """Writes down what the BPF programs could not send since the last look."""
        now, counters = time.monotonic_ns(), self._probes.counters()
        for counter, (source, what, detail) in _LOSSES.items():
            lost = counters[counter] - self._last_counters[counter]
            if lost:
                self._journal.loss(source, what, lost, detail, self._counters_ns, now)
        self._read_short_waits(counters, now)
        rings = {
            "launches": (self._probes.launches,),
            "command lists": (self._probes.list_events,),
            "stacks": (self._probes.stacks, self._probes.python_stacks, self._probes.codes),
            "cpu samples": (self._probes.samples,),
            "waits": (self._probes.waits,),
            "kernels": (self._probes.compiled, self._probes.pieces, self._probes.modules),
        }
        for source, of_source in rings.items():
            misfits = sum(ring.misfits for ring in of_source)
            if misfits > self._last_misfits[source]:
                number = misfits - self._last_misfits[source]
                self._journal.loss(source, "wrong length", number, _WRONG_LENGTH, self._counters_ns, now)
                self._last_misfits[source] = misfits
        if self._copies_refused:
            detail = f"{MAX_COPIED_BYTES >> 30} GiB of them were kept already: those stacks are cut"
            self._journal.loss("stacks", "pages not copied", self._copies_refused, detail, self._counters_ns, now)
            self._copies_refused = 0
        self._last_counters, self._counters_ns = counters, now

    def _read_short_waits(self, counters: dict[Counter, int], now: int) -> None:
        """Those that a thread would add to only if it came back, and threads that are no more."""
        if counters[Counter.WAITS] != self._last_counters[Counter.WAITS]:
            self._keep_waits(self._probes.take_short_waits(), now)
            self._keep_waits(self._probes.forget_waits(_is_alive, now), now)

    def finish(self) -> None:
        """Detaches, and takes what is still on its way."""
        self._probes.detach()
        self.read()
        now = time.monotonic_ns()
        self._keep_waits(self._probes.unended_waits(now), now)
        self._keep_waits(self._probes.take_short_waits(), now)
        if self._learning is not None:
            self._keep_finished(self._learning.finish())
        deadline = time.monotonic() + INTAKE_WAIT_S
        while not self._intake.idle and time.monotonic() < deadline:
            self.read_intake()
            time.sleep(0.001)
        for refused in self._intake.close():
            self._keep_elf(refused)
        self.read_counters()


def _is_alive(pid: int, tid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/task/{tid}")


class Kernels:
    """How many different kernels were launched, and how many of them lie in a module that was taken."""

    def __init__(self) -> None:
        self._launched = np.empty(0, np.uint64)  # distinct addresses
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._matched = 0
        self._changed = False

    def launched(self, launches: NDArray[np.void]) -> None:
        """Kernels at these launches' addresses."""
        readable = (launches["flags"] & LaunchFlags.BAD_ARGS) == 0
        addresses = np.unique(launches["address"][readable] & np.uint64((1 << 48) - 1))
        if not np.isin(addresses, self._launched, assume_unique=True).all():
            self._launched = np.union1d(self._launched, addresses)
            self._changed = True

    def compiled(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Code that was taken, as (address, size)."""
        for address, size in ranges:
            start = address & ((1 << 48) - 1)
            self._starts.append(start)
            self._ends.append(start + size)
            self._changed = True

    def counts(self) -> tuple[int, int]:
        """How many were launched, and how many of them are known."""
        if self._changed:
            self._changed = False
            starts = np.sort(np.array(self._starts, np.uint64))
            ends = np.sort(np.array(self._ends, np.uint64))
            # inside something, where more ranges have begun than ended
            begun = np.searchsorted(starts, self._launched, "right")
            self._matched = int((begun > np.searchsorted(ends, self._launched, "right")).sum())
        return len(self._launched), self._matched
