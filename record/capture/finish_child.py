"""The process that makes a capture of a spool: a sandbox.worker.Worker with a stream channel.

A request comes as a line of JSON: the spool's, the carry's and the folder's descriptor, those of processes' roots,
where to, and which names. Lines of JSON go back: how the naming goes, and last the answer. SIGINT ends the naming. The
recorder starts it early, so that what it has to import is there when there is something to do; and it stays apart so
that the recorder itself stays small.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import use_folder
from iaprof.record.capture.finish import finish
from iaprof.record.capture.rotation_state import Carry
from iaprof.record.capture.spool import SpoolReader
from iaprof.record.symbolize.recorded import late_stacks, recorded_symbols
from iaprof.sandbox.memory import half_of_available, limit_memory
from iaprof.symbols.names.which import Symbols

_CHANNEL = 0  # its descriptor


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    reader = SpoolReader(Path(f"/proc/self/fd/{request['spool']}"))
    use_folder(Path(request["output"]), request["folder"])
    carry = Carry() if request["carry"] is not None else None
    which = Symbols(request["symbols"])
    kept = {int(pid): fd for pid, fd in request["roots"].items()}
    names = None if which is Symbols.NONE else recorded_symbols(which, _say_progress, kept)
    try:
        finished = finish(reader, Path(request["output"]), carry.add if carry else None, names, late_stacks(kept))
        if carry:
            carry.write(reader, request["carry"])
    except (IaprofError, OSError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {
            "error": "finishing the capture takes more memory than it may: 'iaprof recover --memory-limit' allows more"
        }
    except Exception as error:  # noqa: BLE001 - there is nobody else who could tell it
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} ({error}) at {Path(last.filename).name}:{last.lineno}"
        return {"error": f"the capture could not be finished, which should not have happened: {place}"}
    return {"header": finished.header, "size": finished.size}


def _say_progress(done: int, total: int) -> None:
    _say({"naming": [done, total]})


def _say(line: dict[str, Any]) -> None:
    with open(_CHANNEL, "w", closefd=False) as channel:
        channel.write(json.dumps(line) + "\n")


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the unfinished file is taken away on the way out


def main() -> None:
    """Serves one request; without one, ends."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # what records goes first
    line = sys.stdin.readline()
    if line:
        limit_memory(half_of_available())  # this is root's process on somebody's production machine; the spool stays
        _say(_serve(json.loads(line)))
