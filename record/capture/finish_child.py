"""The process that makes a capture of a spool: a sandbox.worker.Worker with a stream channel.

A request is a line of JSON: descriptors of the spool, of the file for the rotation state, of the output folder and of
processes' roots; the output's path; and which names to write. Lines of JSON go back: the progress of naming, and at
last the answer. SIGINT ends the naming. The recorder starts this process early, so that its imports are done when the
recording ends; it is a process of its own so that the recorder stays small.
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
from iaprof.record.capture.recorded import stack_finisher, symbol_writer
from iaprof.record.capture.rotation_state import RotationState
from iaprof.record.spool import SpoolReader
from iaprof.sandbox.memory import half_of_available, limit_memory
from iaprof.symbols.names.which import Symbols

_CHANNEL = 0  # its descriptor


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    reader = SpoolReader(Path(f"/proc/self/fd/{request['spool']}"))
    use_folder(Path(request["output"]), request["folder"])
    state = RotationState() if request["rotation_state"] is not None else None
    wanted_symbols = Symbols(request["symbols"])
    kept = {int(pid): fd for pid, fd in request["roots"].items()}
    names = None if wanted_symbols is Symbols.NONE else symbol_writer(wanted_symbols, _say_progress, kept)
    try:
        finished = finish(reader, Path(request["output"]), state.add if state else None, names, stack_finisher(kept))
        if state:
            state.write(reader, request["rotation_state"])
    except (IaprofError, OSError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {
            "error": "finishing the capture needs more memory than it may use: "
            "'iaprof recover --memory-limit' allows more"
        }
    except Exception as error:  # noqa: BLE001 - nobody else could report it
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} ({error}) at {Path(last.filename).name}:{last.lineno}"
        return {"error": f"the capture could not be finished; this is a bug, please report it: {place}"}
    return {"header": finished.header, "size": finished.size}


def _say_progress(done: int, total: int) -> None:
    _say({"naming": [done, total]})


def _say(line: dict[str, Any]) -> None:
    with open(_CHANNEL, "w", closefd=False) as channel:
        channel.write(json.dumps(line) + "\n")


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # context managers remove the unfinished file


def main() -> None:
    """Serves one request; ends at once if the recorder closes the channel instead."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # the recorder goes first
    line = sys.stdin.readline()
    if line:
        limit_memory(half_of_available())  # root's process on a production machine; the spool stays if it is reached
        _say(_serve(json.loads(line)))
