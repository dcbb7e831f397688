"""Finds CPython in processes, and tells BPF where it keeps its frames."""

from __future__ import annotations

import json
import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from iaprof.basics.errors import IaprofError
from iaprof.bpf.maps import write_element
from iaprof.bpf.structs import PYTHON, PYTHON_OFFSETS, pack
from iaprof.formats.wire.launches import INTERPRETER
from iaprof.record.unwinding.mappings import ImageGone, Images
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finishing, FoundInterpreter

MOST_PROCESSES = 4096  # that are remembered
MOST_CANDIDATES = 32  # mappings of one process, in which an interpreter is looked for
MOST_FOUND = 1 << 13  # mappings of files of which it is remembered what was found in them
_ADDRESSES = 1 << 64


class Search:
    """Looks for interpreters in the files that processes have mapped."""

    def __init__(self, finishing: Finishing, images: Images) -> None:
        """Args: reads files; numbers them."""
        self._finishing, self._images = finishing, images
        # By image and offset of the mapping, from which addresses count: what was found, a problem, nothing.
        self._of: OrderedDict[tuple[int, int], FoundInterpreter | str | None] = OrderedDict()
        self.failures = 0  # files on which the reader died, or took too long

    def find(self, mappings: Sequence[Mapping]) -> tuple[Mapping, FoundInterpreter | str] | None:
        """The interpreter that a process runs; None if none was found.

        Args:
            mappings: its executable ones, sorted.

        Returns:
            A mapping of the file with the interpreter; and what is known of it, or why its frames cannot be walked.
        """
        candidates = (
            mapping
            for mapping in mappings
            if mapping.image >= 0 and (mapping is mappings[0] or self._images.may_be_python(mapping.image))
        )
        for mapping in islice(candidates, MOST_CANDIDATES):
            found = self._in_image(mapping)
            if found is not None:
                return mapping, found
        return None

    def _in_image(self, mapping: Mapping) -> FoundInterpreter | str | None:
        key = mapping.image, mapping.offset
        if key not in self._of:
            try:
                self._of[key] = self._finishing.interpreter(*key)
            except ImageGone:
                return None
            except IaprofError:  # a busy machine may have kept the child from running: others try again
                self.failures += 1
                return None
            if len(self._of) > MOST_FOUND:
                self._of.popitem(last=False)
        return self._of[key]


class Interpreters:
    """Of all processes."""

    def __init__(self, finishing: Finishing, images: Images, pythons: int) -> None:
        """Args: reads files; numbers them; the descriptor of BPF's map, which stays the caller's."""
        self._search, self._pythons = Search(finishing, images), pythons
        # Of processes, by number and when they began: the mapping that the interpreter is in. Exec brings another one.
        self._known: OrderedDict[tuple[int, int], Mapping] = OrderedDict()

    @property
    def failures(self) -> int:
        """Files on which the reader died, or took too long."""
        return self._search.failures

    def look(self, pid: int, born_ticks: int, mappings: Sequence[Mapping]) -> list[bytes]:
        """Looks for one in a process; gives messages for the recorder.

        Args:
            pid: of the process.
            born_ticks: when it began, as /proc tells it.
            mappings: its executable ones, sorted.
        """
        interpreter = self._search.find(mappings)
        if interpreter is None:
            return []
        mapping, found = interpreter
        if self._known.get((pid, born_ticks)) == mapping:
            return []
        self._remember(pid, born_ticks, mapping)
        if isinstance(found, str):
            problem = f"Python functions of {_program(pid)} are not recorded: {found}"
            return [_message({"problem": problem})]
        runtime, *types = (
            (mapping.start + offset) % _ADDRESSES for offset in (found.runtime, found.text_type, found.bytes_type)
        )
        self._tell(pid, born_ticks, runtime, found.layout)
        told = {"pid": pid, "version": found.version, "types": types, "layout": vars(found.layout)}
        return [_message(told)]

    def _remember(self, pid: int, born_ticks: int, mapping: Mapping) -> None:
        self._known[pid, born_ticks] = mapping
        if len(self._known) > MOST_PROCESSES:
            self._known.popitem(last=False)

    def _tell(self, pid: int, born_ticks: int, runtime: int, layout: Layout) -> None:
        offsets = [getattr(layout, name) or 0 for name in PYTHON_OFFSETS]
        if layout.cframe_frame is not None:
            offsets[PYTHON_OFFSETS.index("thread_frame")] = layout.cframe_frame
        packed = pack(PYTHON, born_ticks, runtime, 0, *offsets)
        write_element(self._pythons, struct.pack("<I", pid), packed)


def _program(pid: int) -> str:
    """Its file, as far as that can be told."""
    try:
        return os.readlink(b"/proc/%d/exe" % pid).decode("utf-8", "backslashreplace")
    except OSError:
        return f"process {pid}"


def _message(told: dict[str, object]) -> bytes:
    return INTERPRETER + json.dumps(told).encode()
