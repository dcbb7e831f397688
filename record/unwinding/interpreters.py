"""Finds CPython in processes, and tells BPF where it keeps its frames."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import OrderedDict
from collections.abc import Sequence

from iaprof.bpf.maps import write_element
from iaprof.formats.errors import IaprofError
from iaprof.formats.launches import INTERPRETER
from iaprof.record.unwinding.mappings import Images
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finishing

MOST_PROCESSES = 4096  # that are remembered
_FIELDS = (  # struct python_layout of python.c; what a version does not have is 0
    *("interpreters_head", "threads_head", "interpreter_next", "thread_next", "thread_id", "thread_frame"),
    *("thread_cframe", "cframe_previous", "frame_code", "frame_previous", "frame_instruction", "frame_owner"),
    *("frame_is_entry", "code_filename", "code_qualname", "code_linetable", "code_first_line", "code_version"),
    "frame_bytes",
)
_PYTHON = struct.Struct(f"<QQQ{len(_FIELDS)}H2x")  # struct python


class Interpreters:
    """Of all processes."""

    def __init__(self, finishing: Finishing, images: Images, pythons: int) -> None:
        """Args: reads files; numbers them; the descriptor of BPF's map, which stays the caller's."""
        self._finishing, self._images, self._pythons = finishing, images, pythons
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()  # processes, by number and when they began
        self._of: dict[int, tuple[int, Layout, str] | str | None] = {}  # by image: what was found, a problem, nothing

    def look(self, pid: int, born_ticks: int, mappings: Sequence[Mapping]) -> list[bytes]:
        """Looks for one in a process; gives messages for the recorder.

        Args:
            pid: of the process.
            born_ticks: when it began, as /proc tells it.
            mappings: its executable ones, sorted.
        """
        if (pid, born_ticks) in self._known:
            return []
        for mapping in mappings:
            if mapping.image < 0 or not (mapping is mappings[0] or self._images.may_be_python(mapping.image)):
                continue
            found = self._in_image(mapping)
            if found is None:
                continue
            self._remember(pid, born_ticks)
            if isinstance(found, str):
                return [_message({"pid": pid, "problem": found})]
            runtime, layout, version = found
            self._tell(pid, born_ticks, mapping.start + runtime, layout)
            return [_message({"pid": pid, "version": version, "layout": vars(layout)})]
        return []

    def _in_image(self, mapping: Mapping) -> tuple[int, Layout, str] | str | None:
        """Where _PyRuntime is, from the start of the mapping on, and its layout; or why that is not known."""
        if mapping.image not in self._of:
            found = None
            with contextlib.suppress(IaprofError):
                found = self._finishing.interpreter(mapping.image, mapping.offset)
            self._of[mapping.image] = found
        return self._of[mapping.image]

    def _remember(self, pid: int, born_ticks: int) -> None:
        self._known[pid, born_ticks] = None
        if len(self._known) > MOST_PROCESSES:
            self._known.popitem(last=False)

    def _tell(self, pid: int, born_ticks: int, runtime: int, layout: Layout) -> None:
        offsets = [getattr(layout, name) or 0 for name in _FIELDS]
        if layout.cframe_frame is not None:
            offsets[_FIELDS.index("thread_frame")] = layout.cframe_frame
        packed = _PYTHON.pack(born_ticks, runtime & (1 << 64) - 1, 0, *offsets)
        write_element(self._pythons, struct.pack("<I", pid), packed)


def _message(told: dict[str, object]) -> bytes:
    return INTERPRETER + json.dumps(told).encode()
