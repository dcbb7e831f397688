"""The interface of all sources of rows: what a session calls, in which order, and what a source may do then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.record.budget import Level
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.sources.metered import Metered


class Source:
    """A source reads in bulk, and writes what it has read to the journal as frames.

    A session has a list of sources, which `opening.open_sources` makes from the options. It calls a method of all
    sources, in the order of the list, before it calls the next method of any source:

        when                          methods
        opening                       __init__
        the recording begins          header, start
        a command is started          ready, environment
        sampling begins, pauses       resume and pause, in turn; nothing is sampled before the first `resume`
        the budget is near, or far    thin
        once in session.TICK_NS       read
        once in session.LOSSES_NS     losses
        another output file begins    read, end_part, losses, footer; header, begin_part; then has_ended_part until true
        the recording ends            stop, finish, losses, footer
        always, at the end            close

    A source registers its descriptors with the loop itself (`Loop.wait_for`): they come and go, and need different
    flags.

    Time: only __init__, `ready`, `pause`, `stop` and `finish` may wait, for a limited time. All other methods, and what
    the loop calls, return within some 10 ms and leave the rest to `Loop.keep_calling`, so that no source keeps another
    one's buffers from being emptied. Nothing runs in Python per record.

    Errors: an IaprofError of __init__ or `start` means that the recording does not begin and leaves nothing behind. Any
    later exception ends the recording; the spool holds what came before. Faults of a device or of another process are
    no errors: write a loss (`Journal.loss`), warn (`Journal.warn`) and go on.

    A source that the options do not ask for is in the list, too: it opens nothing, writes nothing, and says so in the
    header. A source that is asked for but not available writes a loss and warns when it starts, or raises an
    IaprofError in __init__ if a recording makes no sense without it.

    Write what was read to the journal at once: what a killed recorder has not written is lost.
    """

    def header(self) -> dict[str, Any]:
        """Returns the source's members of an output file's header; also called before `start`."""
        return {}

    def start(self, journal: Journal, loop: Loop) -> None:
        """Starts writing to the journal, and waiting for descriptors and times."""

    def ready(self) -> None:
        """Waits, for a limited time, until nothing of a command that starts now will be missed."""

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Returns the environment for the command, made of `environment`; the same object if it needs no change."""
        return environment

    def resume(self) -> None:
        """Starts sampling."""

    def pause(self) -> None:
        """Stops sampling, after writing what was sampled. What is not sampled, such as launches, goes on."""

    def thin(self, level: Level) -> None:
        """Samples more or less often from now on; what the source does not sample goes on. See record/budget.py."""

    def read(self) -> None:
        """Writes what has come without waking the loop."""

    def losses(self) -> None:
        """Writes losses since the last call that only show when they are asked for."""

    def end_part(self, since_ns: int) -> None:
        """Writes what belongs to the output file that ends now.

        Args:
            since_ns: when the next file begins, CLOCK_MONOTONIC: a little ago, as what began then may be read late.
        """

    def begin_part(self, since_ns: int) -> None:
        """Writes again what makes the output file that begins now readable by itself.

        Args:
            since_ns: as in `end_part`.
        """

    def has_ended_part(self) -> bool:
        """Whether all that belongs to the previous file is written (`Journal.write_late`), or has taken too long."""
        return True

    def stop(self) -> None:
        """Stops sampling for good, after writing what was sampled."""

    def finish(self) -> None:
        """Ends what goes on without sampling, and writes the rest; all sources have stopped."""

    def footer(self) -> dict[str, Any]:
        """Returns members of the header known when a file ends; those in `cost` are added to other sources' costs."""
        return {}

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the source's own processes have used."""
        return 0.0

    @property
    def probe_seconds(self) -> float:
        """CPU time that the source's BPF programs have used in other processes, as far as they count it."""
        return 0.0

    def close(self) -> None:
        """Releases what __init__ and `start` opened; also called after an error, and after `finish`."""


class Sampler(Source):
    """A source of samples, one for each vendor.

    Its header describes its streams in `streams`, each with at least `ip_version`, the vendor's version of the GPU, and
    `layout`, the name of one of the vendor's layouts. It writes a STALLS frame for each read: columns of u64, the first
    `shape` of the vendor's SampleRows, one after the other, with `source` as the index of the stream. It adds the
    number of records to `Journal.totals.records`.
    """

    has_library = False
    """Whether a library of ours, which the command loads, sends the samples as messages: see `take`."""

    def take(self, messages: NDArray[np.void], now: int) -> None:
        """Takes MESSAGE[n], which were read at `now`."""

    def placed(self, launches: NDArray[np.void]) -> NDArray[np.void]:
        """Returns LAUNCH[n] with the addresses that samples and kernels have."""
        return launches

    def open_metrics(self) -> None:
        """Opens what all metrics need; called once before the recording begins, if it has metrics. It may wait."""

    def metered(self) -> Sequence[Metered]:
        """Returns what is recorded so far, in the order of the streams, for the source of metrics."""
        return ()
