"""Names for code that a process made while it ran, as it told them itself: in a perf map or in jitdumps.

A sandboxed child reads the files (symbols.generated_reader); which files are a process's to name is the caller's to
know, and to open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.sandbox.answers import AnswerError, ascending, integers, sentence, string, string_list
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.parent import Limits, Sandbox, SandboxError
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Named, Names

_LIMITS = Limits(seconds=20.0, files=1)  # 200 MB of hostile lines take some 3 s
_LARGEST_LINE = 1 << 32


class GeneratedCode(Closing):
    """Reads perf maps and jitdumps in a child process; also a context manager."""

    def __init__(self, limits: Limits = _LIMITS) -> None:
        """Starts nothing yet."""
        self._sandbox = Sandbox("iaprof.symbols.files.generated_reader", limits)

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def name(
        self,
        perf_map: int | None,
        jitdumps: Sequence[int],
        addresses: NDArray[np.uint64],
        times: NDArray[np.uint64],
    ) -> Named:
        """Names addresses of one process; each name is for that very address, where other code may be at other times.

        What a jitdump says, which knows when code was where, goes before what the perf map says.

        Args:
            perf_map: an open regular file, None where the process has none.
            jitdumps: open regular files.
            addresses: uint64[n], distinct and sorted.
            times: uint64[n], when each was met, CLOCK_MONOTONIC ns.
        """
        frames: dict[int, Frame] = {}
        sources, problems = [], []
        files = [("jitdump", file) for file in jitdumps]
        files += [("perf_map", perf_map)] if perf_map is not None else []
        for what, file in files:
            left = np.setdiff1d(np.arange(len(addresses)), list(frames))
            if not len(left):
                break
            called = what.replace("_", " ")
            try:
                found, problem = self._read(what, file, addresses[left], times[left])
            except (SandboxError, AnswerError, OSError) as error:
                found, problem = {}, getattr(error, "strerror", None) or str(error)
            frames |= {int(left[index]): frame for index, frame in found.items()}
            if found and called not in sources:
                sources.append(called)
            if problem:
                problems.append(f"its {called}: {sentence(problem)}")
        entries = [(int(addresses[index]), 1, [frame]) for index, frame in frames.items()]
        return Named(Names.of(entries), " and ".join(sources), "; ".join(problems))

    def _read(
        self, what: str, file: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[dict[int, Frame], str]:
        """What one file says, by index in `addresses`; and what is wrong with it."""
        asked = addresses.astype(np.uint64).tobytes() + times.astype(np.uint64).tobytes()
        return _checked(self._sandbox.call(what, data=asked, fds=[file]), len(addresses))


def _checked(answer: Any, count: int) -> tuple[dict[int, Frame], str]:
    """The child's answer, which has to be what generated_reader gives."""
    match answer:
        case {"index": index, "function": function, "file": file, "line": line, "strings": strings, "problem": problem}:
            texts = string_list(strings)
            columns = (
                integers(index, count),
                integers(function, len(texts)),
                integers(file, len(texts)),
                integers(line, _LARGEST_LINE),
            )
        case _:
            raise AnswerError
    ascending(columns[0])
    if len({len(column) for column in columns}) != 1 or any(len(text) > LONGEST_NAME for text in texts):
        raise AnswerError
    frames = {row: Frame(texts[name], texts[path], number) for row, name, path, number in zip(*columns, strict=True)}
    return frames, string(problem)
