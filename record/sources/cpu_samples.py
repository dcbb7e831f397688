"""The source of CPU samples: a clock on each CPU that runs BPF. BPF's records come through the source of launches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.bpf.perf_event import CpuClock
from iaprof.record.budget import Level
from iaprof.record.journal import Journal
from iaprof.record.left_out import RECORDER, SCOPE
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.sources.new_cpus import NewCpus
from iaprof.record.sources.source import Source


class CpuSamples(Source):
    """The clocks of all CPUs."""

    def __init__(self, programs: Mapping[str, int], hz: int, scope: Scope | None = None) -> None:
        """Opens the clocks.

        Args:
            programs: descriptors of BPF programs by name; without those for CPU samples if `hz` is 0.
            hz: samples per second on each CPU; 0 for none.
            scope: the processes whose samples are reported; None for all but the recorder's own.

        Raises:
            IaprofError: CPUs cannot be sampled.
        """
        self._hz = self._hz_now = hz
        self._scope = scope
        self._runs = False
        try:
            self._clock = CpuClock(programs.get("on_sample", -1), hz)
        except OSError as error:
            raise IaprofError(
                f"CPUs cannot be sampled (perf_event_open: {error.strerror}): use --cpu-freq=0"
            ) from error
        self._new_cpus = NewCpus(self._clock, "cpu samples", "samples there")

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal = journal

    def losses(self) -> None:
        """See Source: what ran on a CPU that came online, before it was sampled."""
        self._new_cpus.look(self._journal)

    def header(self) -> dict[str, Any]:
        """See Source."""
        scope = {SCOPE: self._scope.running} if self._scope else {}
        return {"cpu_hz": self._hz, RECORDER: os.getpid(), **scope}

    def resume(self) -> None:
        """See Source."""
        self._runs = True
        self._clock.enable(self._hz_now > 0)

    def pause(self) -> None:
        """See Source; the samples are in the ring buffer."""
        self._runs = False
        self._clock.enable(False)

    def thin(self, level: Level) -> None:
        """See Source."""
        if level.cpu_hz == self._hz_now:
            return
        self._hz_now = level.cpu_hz
        if level.cpu_hz:
            self._clock.change(level.cpu_hz)
        self._clock.enable(self._runs and level.cpu_hz > 0)

    def stop(self) -> None:
        """See Source; the samples are in the ring buffer."""
        self._clock.close()

    def close(self) -> None:
        """Closes the clocks."""
        self._clock.close()
