"""Names generated code from what its process wrote: a perf map or jitdumps.

A sandboxed child reads the files (symbols/files/generated_reader.py). The caller opens them, and makes sure that they
are the process's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.sandbox.parent import (
    AnswerError,
    Limits,
    Sandbox,
    SandboxError,
    ascending,
    integers,
    sentence,
    string,
    string_list,
)
from iaprof.sandbox.worker import Closing
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Names, Symbolized

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
    ) -> Symbolized:
        """Names addresses of one process. Each name holds for that address only: other code may have been around it.

        Jitdumps go before the perf map, as they tell when code was where.

        Args:
            perf_map: an open regular file; None if the process has none.
            jitdumps: open regular files.
            addresses: uint64[n], distinct and sorted.
            times: uint64[n], when each was first seen, CLOCK_MONOTONIC ns.
        """
        frames: dict[int, Frame] = {}
        sources, problems = [], []
        files = [("jitdump", file) for file in jitdumps]
        files += [("perf_map", perf_map)] if perf_map is not None else []
        for kind, file in files:
            unnamed = np.setdiff1d(np.arange(len(addresses)), list(frames))
            if not len(unnamed):
                break
            source = kind.replace("_", " ")
            try:
                frames_of_file, problem = self._read(kind, file, addresses[unnamed], times[unnamed])
            except (SandboxError, AnswerError, OSError) as error:
                frames_of_file, problem = {}, getattr(error, "strerror", None) or str(error)
            frames |= {int(unnamed[index]): frame for index, frame in frames_of_file.items()}
            if frames_of_file and source not in sources:
                sources.append(source)
            if problem:
                problems.append(f"its {source}: {sentence(problem)}")
        entries = [(int(addresses[index]), 1, [frame]) for index, frame in frames.items()]
        return Symbolized(Names.of(entries), " and ".join(sources), "; ".join(problems))

    def _read(
        self, kind: str, file: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[dict[int, Frame], str]:
        """Reads one file; returns frames by index in `addresses`, and what is wrong with the file."""
        data = addresses.astype(np.uint64).tobytes() + times.astype(np.uint64).tobytes()
        return _checked(self._sandbox.call(kind, data=data, fds=[file]), len(addresses))


def _checked(answer: Any, count: int) -> tuple[dict[int, Frame], str]:
    """Checks the child's answer, which must have the form that generated_reader.py gives it; raises AnswerError."""
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
