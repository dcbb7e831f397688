"""The summary of a capture's waits, on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iaprof.cli.terminal.summary import say

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader


def say_waits(verb: str, reader: CaptureReader) -> None:
    """Prints the totals and losses of waits over all parts, or how to record waits."""
    from iaprof.formats.header.waits import WaitTotals, total_waits

    headers = [part.header for part in reader.parts]
    totals = total_waits(headers)
    wanted = any(header.get("waits_wanted") is True for header in headers)
    if totals is None and not wanted and not reader.count("wait"):
        say("iaprof: this capture has no waits: record with 'iaprof record --waits'")
        return
    say(f"[ iaprof {verb}: {(totals or WaitTotals()).sentence()} ]")
    if totals is None:
        say(
            "iaprof: no waits were recorded: nothing waited, the kernel was older than Linux 6.13, or the driver's "
            "layout has no functions that wait (run 'sudo iaprof calibrate')"
        )
    for loss in (loss for header in headers for loss in header.get("losses", ()) if isinstance(loss, dict)):
        if loss.get("source") == "waits" and isinstance(loss.get("what"), str):
            count = loss.get("count")
            say(f"iaprof: waits {loss['what']}: {count:,}" if type(count) is int else f"iaprof: waits {loss['what']}")
