"""The source of stacks that BPF could not walk to their end: the learner finishes them and sends them back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from iaprof.bpf import processes
from iaprof.formats.wire.launches import COPY, INTERPRETER, PYTHON_STACK, stack_dtype
from iaprof.record.journal import WRONG_LENGTH, Journal
from iaprof.record.loop import Loop
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind
from iaprof.record.unwinding.learner_process import DROPPED, DROPPED_MARK, LearnerProcess

MAX_INTERPRETERS = 1 << 12  # that are written again into the next output file
MOST_PROBLEMS = 16  # with interpreters that the user is warned of
MAX_COPIED_BYTES = 48 << 20  # of copies of launches' stacks that wait for the end of an output file
MAX_SAMPLES_BYTES = 24 << 20  # likewise of CPU samples'


class FinishedStacks(Source):
    """The learner's messages: finished stacks, copies that it gives back, and interpreters that it found."""

    def __init__(self, depth: int, learner: LearnerProcess) -> None:
        """Takes the learner over.

        Args:
            depth: the most frames of a stack.
            learner: the learner's process, closed with this source.
        """
        self._depth, self._learner = depth, learner
        self._copied_bytes = [0, 0]  # of launches, and of CPU samples
        self._copies_refused = self._copies_dropped = 0
        self._losses_ns = time.monotonic_ns()
        self._interpreters: list[tuple[int, bytes]] = []  # pid, and the learner's message
        self._python_problems: set[str] = set()  # why the frames of some interpreters are not recorded

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        self._wait_for_learner()

    def _wait_for_learner(self) -> None:
        if self._learner.fileno() >= 0:
            self._learner_fd = self._learner.fileno()
            self._loop.wait_for(self._learner_fd, self._read_learner)

    def ready(self) -> None:
        """See Source: waits until the learner finishes stacks."""
        self._keep_finished(self._learner.wait())

    def look_for_python(self, pid: int) -> None:
        """Has the learner look for an interpreter in a process, before the process launches."""
        self._learner.prepare(pid, will_launch=False)

    def prepare(self, pid: int) -> None:
        """Has the learner open the files of a process that has mapped a driver, before its first launch."""
        self._learner.prepare(pid, will_launch=True)

    def has_ended_part(self) -> bool:
        """See Source."""
        return self._learner.has_finished()

    def _read_learner(self) -> None:
        self._keep_finished(self._learner.read())
        if self._learner.fileno() != self._learner_fd:  # the learner died, and perhaps another took its place
            now = time.monotonic_ns()
            self._loop.forget(self._learner_fd)
            self._journal.loss("stacks", "learner", None, "the process that finishes stacks died", now, now)
            self._wait_for_learner()

    def _keep_finished(self, messages: Iterable[bytes]) -> None:
        dtypes = {
            FrameKind.PYTHON: PYTHON_STACK,
            FrameKind.COPY: COPY,
            FrameKind.STACKS: stack_dtype(self._depth),
        }
        kinds = {dtype.itemsize: (kind, dtype) for kind, dtype in dtypes.items()}
        for message in messages:  # one per distinct path
            if message.startswith(INTERPRETER):
                self._keep_interpreter(message[len(INTERPRETER) :])
                continue
            if len(message) == DROPPED.size and message.startswith(DROPPED_MARK):
                self._copies_dropped += int(DROPPED.unpack(message)[1])
                continue
            if len(message) not in kinds:
                now = time.monotonic_ns()
                self._journal.loss("stacks", "wrong length", 1, WRONG_LENGTH, now, now)
                continue
            kind, dtype = kinds[len(message)]
            (record,) = np.frombuffer(message, dtype)
            if kind is not FrameKind.COPY or self._has_room_for(record):
                self._journal.write_late(kind, message, int(record["time"]), self._depth)

    def _keep_interpreter(self, message: bytes) -> None:
        now, about = time.monotonic_ns(), json.loads(message)
        problem = about.get("problem")
        if problem is None:
            self._journal.write(FrameKind.INTERPRETER, message, time=now)
            self._interpreters.append((int(about["pid"]), message))
            if len(self._interpreters) > MAX_INTERPRETERS:
                self._forget_interpreters()
        elif problem not in self._python_problems and len(self._python_problems) < MOST_PROBLEMS:
            self._python_problems.add(problem)
            self._journal.loss("stacks", "without Python", None, problem, now, now)
            self._journal.warn(problem)

    def _forget_interpreters(self) -> None:
        """Forgets interpreters of ended processes; the next file has them all, as it may have their last stacks."""
        running = set(processes.running_pids())
        kept = [(pid, message) for pid, message in self._interpreters if pid in running]
        self._interpreters = kept[-MAX_INTERPRETERS:]

    def _has_room_for(self, copy: np.void) -> bool:
        """Whether one more copied page is kept."""
        is_sample = bool(copy["is_sample"])
        self._copied_bytes[is_sample] += copy.nbytes
        has_room = self._copied_bytes[is_sample] <= (MAX_SAMPLES_BYTES if is_sample else MAX_COPIED_BYTES)
        self._copies_refused += not has_room
        return has_room

    def losses(self) -> None:
        """See Source."""
        now = time.monotonic_ns()
        if self._copies_refused:
            detail = (
                f"{MAX_COPIED_BYTES >> 20} MiB of launches' were kept already, or {MAX_SAMPLES_BYTES >> 20} MiB of CPU "
                "samples': those stacks are cut"
            )
            self._journal.loss("stacks", "pages not copied", self._copies_refused, detail, self._losses_ns, now)
            self._copies_refused = 0
        if self._copies_dropped:
            detail = "the process that finishes stacks had no time for them: those stacks are cut"
            self._journal.loss("stacks", "not finished", self._copies_dropped, detail, self._losses_ns, now)
            self._copies_dropped = 0
        self._losses_ns = now

    def begin_part(self, since_ns: int) -> None:
        """See Source."""
        self._copied_bytes = [0, 0]
        for _, interpreter in self._interpreters:
            self._journal.write(FrameKind.INTERPRETER, interpreter, time=since_ns)
        self._forget_interpreters()

    def finish(self) -> None:
        """See Source."""
        self._keep_finished(self._learner.finish())

    def footer(self) -> dict[str, Any]:
        """See Source."""
        return {"cost": {"learn_cpu_s": round(self.cpu_seconds, 3)}}

    @property
    def cpu_seconds(self) -> float:
        """See Source."""
        return self._learner.cpu_seconds

    def close(self) -> None:
        """Ends the learner at once."""
        self._learner.close()
