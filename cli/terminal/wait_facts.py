"""The summary of a capture's waits, on stderr."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from iaprof.cli.terminal.summary import say

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader


_NONE = (
    "no waits were recorded: nothing waited, the kernel was older than Linux 6.13, or the driver's layout has no "
    "functions that wait (run 'sudo iaprof calibrate')"
)


def no_waits(reader: CaptureReader) -> str:
    """Why a capture has no `wait` rows, or how to record waits: a sentence without a full stop."""
    headers = [part.header for part in reader.parts]
    if not any(header.get("waits_wanted") is True for header in headers):
        return "this capture has no waits: record with 'iaprof record --waits'"
    return "; ".join([_NONE, *_losses(headers)])


def say_waits(verb: str, reader: CaptureReader) -> None:
    """Prints the totals and losses of waits over all parts."""
    from iaprof.formats.header.waits import WaitTotals, total_waits

    headers = [part.header for part in reader.parts]
    say(f"[ iaprof {verb}: {(total_waits(headers) or WaitTotals()).sentence()} ]")
    for text in _losses(headers):
        say(f"iaprof: {text}")


def _losses(headers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for loss in (loss for header in headers for loss in header.get("losses", ()) if isinstance(loss, dict)):
        if loss.get("source") == "waits" and isinstance(loss.get("what"), str):
            count = loss.get("count")
            yield f"waits {loss['what']}: {count:,}" if type(count) is int else f"waits {loss['what']}"
