"""Tells which tool wrote a trace by what its events look like: categories, names of processes, counters of a device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import Columns

FLEX, TORCH, UNKNOWN = "flex", "torch", "unknown"  # as in the header of a capture, see timelines/trace.py
TORCH_NPU, UNITRACE, ROCPROF = "torch_npu", "unitrace", "rocprof"
IAPROF = "iaprof"  # its own output, which names the dialects of its files
_MOST = 256  # categories and names of processes that are examined
_OF_FLEX = " Cmpt (Exec|Prep)$|[ _]Dma[IO]$|^(Flex RoundTrip|AIU Roundtrip)$"  # names of slices
_MEMBERS_OF_TORCH = ("deviceProperties", "distributedInfo", "schemaVersion")
_PROCESSES_OF_ROCPROF = re.compile(r"^(\d+ )?(CPU (HIP|HSA|KFD) API|GPU ?\d+)$")
_CATEGORIES_OF_ROCPROF = re.compile("^(rocm_)?(kernel_dispatch|memory_copy|(hip|hsa|hip_runtime|hsa_core)_api)$")
_PROCESSES_OF_UNITRACE = re.compile(r"^(?:RANK (\d{1,9}) )?(?:HOST|DEVICE)<")  # unitrace/src/chromelogger.h
ONE_FILE_PER_RANK = frozenset({TORCH_NPU, UNITRACE, ROCPROF})  # with these tools, each process writes a file
_PROCESSES_OF_NPU = frozenset({"Ascend Hardware", "CANN"})
_OF_NPU = frozenset({"async_npu", "async_task_queue"})
# Kineto's ActivityType.cpp, with those that came later for other devices, and the flows of its output_json.cpp
_CATEGORIES_OF_TORCH = frozenset(
    {
        "cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "python_function", "cuda_runtime",
        "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver",
        "hpu_op", "overhead", "ac2g", "fwdbwd", "kernel", "gpu_memcpy", "gpu_memset", "gpu_render_stage",
    }
)  # fmt: skip


class Signs:
    """The signs of a dialect that the events of a file have."""

    def __init__(self) -> None:
        """Starts without events."""
        self.categories: set[str] = set()
        self.processes: set[str] = set()
        self.has_counters = False
        self._has_flex_names = False
        self._has_rows = False

    def add(self, columns: Columns, tables: Mapping[str, pa.Table]) -> None:
        """Examines the events of a piece: its distinct texts, not each event."""
        self._has_rows |= bool(tables)
        for kind in ("slices", "flows"):
            codes = getattr(columns, kind).get("category")
            if codes is not None and len(self.categories) < _MOST:
                used = np.flatnonzero(np.bincount(codes + 1)[1:])[:_MOST]
                self.categories.update(columns.texts[code] for code in used.tolist())
        counters: NDArray[Any] | None = columns.slices.get("ts1")
        self.has_counters |= counters is not None and bool((counters != counters.min(initial=0)).any())
        if not self.has_counters and not self._has_flex_names and columns.slices:
            found = pc.match_substring_regex(pa.array(columns.texts, pa.string()), _OF_FLEX)
            self._has_flex_names = bool(pc.any(found).as_py())
        if "instant" in tables and len(self.processes) < _MOST:
            self._add_processes(tables["instant"])

    def _add_processes(self, instants: pa.Table) -> None:
        is_name = pc.and_(pc.equal(instants["phase"], "M"), pc.equal(instants["name"], "process_name"))
        for text in pc.unique(instants["args"].filter(is_name)).slice(0, _MOST).cast(pa.string()).to_pylist():
            try:
                members = json.loads(text or "{}")
            except (ValueError, RecursionError):
                continue
            if isinstance(members, dict) and isinstance(members.get("name"), str):
                self.processes.add(members["name"])

    def rank(self) -> int | None:
        """Returns the rank in the names of processes; None if they have none or several."""
        found = {match[1] for name in self.processes if (match := _PROCESSES_OF_UNITRACE.match(name))}
        (rank,) = found if len(found) == 1 else (None,)
        return None if rank is None else int(rank)

    def dialect(self, members: Mapping[str, Any]) -> str:
        """Returns the dialect of a file.

        Args:
            members: of the file, beside its events.
        """
        about = members.get("otherData")
        about = about if isinstance(about, dict) else {}
        is_output = about.get("Application") == "iaprof"
        if is_output and isinstance(about.get("Files"), list):
            return IAPROF
        if self.processes & _PROCESSES_OF_NPU or self.categories & _OF_NPU:
            return TORCH_NPU
        if not is_output and any(name in members for name in _MEMBERS_OF_TORCH):  # dumps are of any dialect
            return TORCH
        if "gpu_op" in self.categories or any(map(_PROCESSES_OF_UNITRACE.match, self.processes)):
            return UNITRACE
        if any(map(_PROCESSES_OF_ROCPROF.match, self.processes)) or any(
            map(_CATEGORIES_OF_ROCPROF.match, self.categories)
        ):
            return ROCPROF
        if self.has_counters or self._has_flex_names or not self._has_rows:
            return FLEX
        return TORCH if self.categories & _CATEGORIES_OF_TORCH else UNKNOWN
