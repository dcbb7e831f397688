"""The interface of every source of rows: what a session calls, in which order, and what a source may do meanwhile."""

from __future__ import annotations

from typing import Any

from iaprof.record.capture.journal import Journal
from iaprof.record.loop import Loop


class Source:
    """Something that is recorded: it reads in bulk, and writes what it read to the journal as frames.

    A session has a list of sources, which `opening.open_sources` makes from the options. It calls one after the other,
    in the order of the list, and each method of all of them before the next method of any:

        when                          methods
        opening                       __init__
        the recording begins          header, start
        a command is to be started    ready, environment
        sampling begins and pauses    resume and pause, in turn; nothing is sampled before the first `resume`
        once in session.TICK_NS       read
        once in session.LOSSES_NS     losses
        another output file begins    read, end_part, losses, footer; header, begin_part; has_ended_part until it is so
        the recording ends            stop, finish, losses, footer
        at last, whatever happened    close

    A source waits for its descriptors by itself (`Loop.wait_for`), as they come and go, and are waited for in
    different ways.

    Time: only __init__, `ready`, `pause`, `stop` and `finish` may wait, for a limited time. Everything else, and what
    the loop calls, returns within some 10 ms and leaves the rest to `Loop.keep_calling`, so that no source keeps another
    one's buffers from being emptied. Nothing runs in Python per record.

    Errors: an IaprofError of __init__ or `start` means that the recording does not begin, and that nothing is left of
    it. Any later exception ends the recording; its spool holds what came before. What a device or another process does
    wrong is no error: write a loss (`Journal.loss`), warn (`Journal.warn`) and go on.

    A source that the options do not ask for is in the list all the same: it opens nothing, writes nothing, and says so
    in the header. One that is asked for and is not available writes a loss and warns when it starts, or raises an
    IaprofError in __init__ if a recording makes no sense without it.

    Whatever is read goes to the journal at once: what a killed recorder had not yet written is lost.
    """

    def header(self) -> dict[str, Any]:
        """Members that it adds to the header of an output file; also called before `start`."""
        return {}

    def start(self, journal: Journal, loop: Loop) -> None:
        """Begins to write to the journal, and to wait for descriptors and times."""

    def ready(self) -> None:
        """Waits, not for long, until nothing will be missing of a command that starts then."""

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """The environment that a command needs, made of this one; the same object if it needs no other."""
        return environment

    def resume(self) -> None:
        """Samples from now on."""

    def pause(self) -> None:
        """Writes down what was sampled, and samples no more. What is not sampled, as launches are not, goes on."""

    def read(self) -> None:
        """Writes down what came without a descriptor's telling."""

    def losses(self) -> None:
        """Writes down what was lost since the last call, where that has to be asked for."""

    def end_part(self, since_ns: int) -> None:
        """Writes down what belongs to the output file that ends now.

        Args:
            since_ns: CLOCK_MONOTONIC, when the next file begins: a little before now, as what began then is read late.
        """

    def begin_part(self, since_ns: int) -> None:
        """Writes down again what the output file that begins now needs to be read by itself.

        Args:
            since_ns: as `end_part` was told.
        """

    def has_ended_part(self) -> bool:
        """Whether the file before has all that belongs to it (`Journal.write_late`), or was waited for long enough."""
        return True

    def stop(self) -> None:
        """Samples no more, for good, and writes down what was sampled."""

    def finish(self) -> None:
        """Ends what goes on without sampling, and writes down what is on its way; all sources have stopped."""

    def footer(self) -> dict[str, Any]:
        """Members of the header that are known when a file ends. Those of `cost` are put with the others' costs."""
        return {}

    @property
    def cpu_seconds(self) -> float:
        """CPU time that processes of its own have used."""
        return 0.0

    def close(self) -> None:
        """Gives back what __init__ and `start` opened; also after an error, and after `finish`."""
