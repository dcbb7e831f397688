"""Finds CPython in processes, and tells BPF where it keeps its frames."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from iaprof.basics.errors import IaprofError
from iaprof.bpf.rule_table import Spaces
from iaprof.bpf.structs import PYTHON, pack
from iaprof.formats.wire.launches import INTERPRETER, PYTHON_OFFSETS
from iaprof.record.unwinding.mappings import ImageGone, Images
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.unwind.finishing import Finishing, FoundInterpreter, Mapping

MOST_PROCESSES = 4096  # that are remembered
MOST_CANDIDATES = 32  # mappings of one process that are searched
MOST_FOUND = 1 << 13  # mappings of files whose search result is kept
_ADDRESSES = 1 << 64


class InterpreterSearch:
    """Searches the files that processes have mapped for interpreters."""

    def __init__(self, finishing: Finishing, images: Images) -> None:
        """Args: reads files; numbers files."""
        self._finishing, self._images = finishing, images
        # By image and offset of the mapping, from which the interpreter's addresses count: it, a problem, or None.
        self._by_mapping: OrderedDict[tuple[int, int], FoundInterpreter | str | None] = OrderedDict()
        self.failures = 0  # files on which the reader died, or took too long

    def find(self, mappings: Sequence[Mapping]) -> tuple[Mapping, FoundInterpreter | str] | None:
        """Returns the interpreter that a process runs; None if none was found.

        Args:
            mappings: the process's executable mappings, sorted.

        Returns:
            A mapping of the interpreter's file; and the interpreter, or why its frames cannot be walked.
        """
        candidates = (
            mapping
            for mapping in mappings
            if mapping.image >= 0 and (mapping is mappings[0] or self._images.may_be_python(mapping.image))
        )
        for mapping in islice(candidates, MOST_CANDIDATES):
            interpreter = self._in_image(mapping)
            if interpreter is not None:
                return mapping, interpreter
        return None

    def _in_image(self, mapping: Mapping) -> FoundInterpreter | str | None:
        key = mapping.image, mapping.offset
        if key not in self._by_mapping:
            try:
                self._by_mapping[key] = self._finishing.interpreter(*key)
            except ImageGone:
                return None
            except IaprofError:  # the child may have been slow on a busy machine: searched again for the next process
                self.failures += 1
                return None
            if len(self._by_mapping) > MOST_FOUND:
                self._by_mapping.popitem(last=False)
        return self._by_mapping[key]


class Interpreters:
    """The interpreters of all processes."""

    def __init__(self, finishing: Finishing, images: Images, spaces: Spaces) -> None:
        """Args: reads files; numbers files; tells BPF."""
        self._search, self._spaces = InterpreterSearch(finishing, images), spaces
        # By pid and start time: the mapping with the interpreter. It changes with exec.
        self._known: OrderedDict[tuple[int, int], Mapping] = OrderedDict()

    @property
    def failures(self) -> int:
        """Files on which the reader died, or took too long."""
        return self._search.failures

    def search(self, pid: int, born_ticks: int, mappings: Sequence[Mapping]) -> list[bytes]:
        """Searches a process for an interpreter, and tells BPF of it; returns messages for the recorder.

        Args:
            pid: the process.
            born_ticks: its start time in /proc/PID/stat.
            mappings: its executable mappings, sorted.
        """
        search_result = self._search.find(mappings)
        if search_result is None:
            return []
        mapping, interpreter = search_result
        if self._known.get((pid, born_ticks)) == mapping:
            return []
        self._remember(pid, born_ticks, mapping)
        if isinstance(interpreter, str):
            problem = f"Python functions of {_program(pid)} are not recorded: {interpreter}"
            return [_message({"problem": problem})]
        runtime, *types = (
            (mapping.start + offset) % _ADDRESSES
            for offset in (interpreter.runtime, interpreter.text_type, interpreter.bytes_type)
        )
        self._write_offsets(pid, born_ticks, runtime, interpreter.layout)
        members = {"pid": pid, "version": interpreter.version, "types": types, "layout": vars(interpreter.layout)}
        return [_message(members)]

    def _remember(self, pid: int, born_ticks: int, mapping: Mapping) -> None:
        self._known[pid, born_ticks] = mapping
        if len(self._known) > MOST_PROCESSES:
            self._known.popitem(last=False)

    def _write_offsets(self, pid: int, born_ticks: int, runtime: int, layout: Layout) -> None:
        offsets = [getattr(layout, name) or 0 for name in PYTHON_OFFSETS]
        if layout.cframe_frame is not None:
            offsets[PYTHON_OFFSETS.index("thread_frame")] = layout.cframe_frame
        self._spaces.set_python(pid, pack(PYTHON, born_ticks, runtime, 0, *offsets))


def _program(pid: int) -> str:
    """Returns the path of a process's program, or its pid if the path is unknown."""
    try:
        return os.readlink(b"/proc/%d/exe" % pid).decode("utf-8", "backslashreplace")
    except OSError:
        return f"process {pid}"


def _message(members: dict[str, object]) -> bytes:
    return INTERPRETER + json.dumps(members).encode()
