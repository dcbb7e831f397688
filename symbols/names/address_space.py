"""Tells what a process had mapped at an address at a given time, from the side-band of a capture.

A mapping lasts until another one covers it or the process executes another program. A forked process begins with the
mappings of its parent.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts, rows_equal, rows_where
from iaprof.formats.distinct import distinct
from iaprof.formats.ranges import RowsOfKeys, groups
from iaprof.formats.wire.process_maps import HUGE_PAGE
from iaprof.symbols.names.names import Module, ModuleKind, Place
from iaprof.symbols.names.segment_tree import SegmentTree

NOWHERE = ""  # the path of the GENERATED module for addresses in no known mapping
_MAX_FORKS = 16  # generations that share a mapping; a hostile capture may have processes fork one another in a loop
_LAST_ADDRESS = (1 << 64) - 1
_VDSO = "[vdso]"
_ANONYMOUS = re.compile(r"|//anon|\[anon:.*|/anon_hugepage.*", re.DOTALL)
_MOST_REMAPPED = 1 << 10  # mappings that may be text in huge pages; a process has one
# Mappings without a file that holds the code: the process generated it. A process maps a jitdump only to announce it.
_GENERATED = re.compile(
    r"\[(?!vdso\]).*|//anon|anon_inode:.*|/memfd:.*|/dev/zero.*|/SYSV.*|(?:.*/)?jit-\d+\.dump", re.DOTALL
)


class AddressSpaces:
    """The mappings of all processes of a capture.

    Attributes:
        modules: the modules that `locate` has found so far.
    """

    def __init__(self, mappings: pa.Table, processes: pa.Table) -> None:
        """Sorts the rows by process and time.

        Args:
            mappings: `mapping` rows.
            processes: `process` rows.
        """
        self.modules: list[Module] = []
        self._numbers: dict[Module, int] = {}  # indices into `modules`
        self._module_of_row: dict[int, Module] = {}
        self._times, self._starts, self._lengths, self._offsets = (
            mappings[name].to_numpy() for name in ("time_ns", "start", "length", "offset")
        )
        self._paths, self._build_ids, self._inodes = (mappings[name] for name in ("path", "build_id", "inode"))
        self._pids = mappings["pid"].to_numpy()
        self._rows = RowsOfKeys(self._pids)
        self._trees: dict[int, SegmentTree] = {}  # by pid, over the process's rows
        is_exec, is_fork = (rows_equal(processes["event"], name) for name in ("exec", "fork"))
        time, pid, tid = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
        parent = processes["ppid"].fill_null(0).to_numpy()
        is_fork &= (pid == tid) & processes["ppid"].is_valid().to_numpy() & (parent != pid)
        self._exec_times, self._execs = time[is_exec], RowsOfKeys(pid[is_exec])
        self._fork_times, self._parents = time[is_fork], parent[is_fork].astype(np.int64)
        self._forks = RowsOfKeys(pid[is_fork])
        self._with_mappings = {*np.unique(self._pids).tolist(), *np.unique(pid[is_fork]).tolist()}  # of others, too
        self._take_remapped_text_for_files()

    def _take_remapped_text_for_files(self) -> None:
        """Gives mappings of text that a process copied into anonymous memory the file that still borders on them.

        `node --use-largepages` and others replace the inner part of their text by whole huge pages.
        """
        aligned = (self._starts | self._lengths) % np.uint64(HUGE_PAGE) == 0
        aligned &= (self._starts > 0) & rows_where(
            self._paths, lambda path: _ANONYMOUS.fullmatch(path or "") is not None
        )
        candidates = np.flatnonzero(aligned)[:_MOST_REMAPPED]
        self._offsets = self._offsets.copy() if len(candidates) else self._offsets
        for row in candidates.tolist():
            start, length, pid = int(self._starts[row]), int(self._lengths[row]), int(self._pids[row])
            places = np.array([start - 1, min(start + length, _LAST_ADDRESS)], np.uint64)
            around = self._mappings(pid, places, np.repeat(self._times[row], 2), _MAX_FORKS)
            texts = {
                (module, start - int(self._starts[each]) + int(self._offsets[each]))
                for each in around.tolist()
                if (module := self._module(each, pid)).kind is ModuleKind.FILE
            }
            if len(texts) == 1 and (text := texts.pop())[1] >= 0:
                self._module_of_row[row], self._offsets[row] = text

    def locate(
        self, pids: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        """Finds the module of each address, and the address within that module.

        Args:
            pids: uint32[n], the processes; 0 for the Linux kernel.
            addresses: uint64[n].
            times: uint64[n], CLOCK_MONOTONIC ns.

        Returns:
            int32[n], indices into `modules`; uint64[n], what ModuleKind says of addresses in a module.
        """
        modules = np.empty(len(pids), np.int32)
        inside = addresses.copy()
        for pid, index in groups(pids):
            if pid == 0:
                modules[index] = self._number(Module(ModuleKind.KERNEL, "[kernel]"))
                continue
            if pid not in self._with_mappings:
                modules[index] = self._number(self._module(-1, pid))
                continue
            rows = self._mappings(pid, addresses[index], times[index], _MAX_FORKS)
            for row, positions in groups(rows):
                module = self._module(row, pid)
                here = index[positions]
                modules[here] = self._number(module)
                if module.kind is not ModuleKind.GENERATED:
                    inside[here] = addresses[here] - self._starts[row] + self._offsets[row]
        return modules, inside

    def mapped(self, pid: int, time_ns: int) -> list[tuple[int, int, int, Module]]:
        """Returns what a process had mapped at a time, sorted: (start, end, offset in the module, module)."""
        rows = self._own_and_inherited_rows(pid, _MAX_FORKS)
        if not len(rows):
            return []
        starts = self._starts[rows]
        ends = starts + np.minimum(self._lengths[rows], np.uint64(_LAST_ADDRESS) - starts)
        bounds = distinct(np.concatenate([starts, ends]))
        times = np.full(len(bounds), time_ns, np.uint64)
        covering = self._mappings(pid, bounds, times, _MAX_FORKS)
        mapped = []
        for start, end, row in zip(bounds[:-1].tolist(), bounds[1:].tolist(), covering[:-1].tolist(), strict=True):
            if row >= 0:
                offset = start - int(self._starts[row]) + int(self._offsets[row])
                mapped.append((start, end, offset, self._module(row, pid)))
        return mapped

    def _own_and_inherited_rows(self, pid: int, generations: int) -> NDArray[np.int64]:
        """Returns the rows of a process and of its ancestors."""
        rows = [self._rows.of(pid)]
        if generations:
            parents = set(self._parents[self._forks.of(pid)].tolist()) - {pid}
            rows += [self._own_and_inherited_rows(parent, generations - 1) for parent in parents]
        return np.concatenate(rows)

    def place(self, pid: int, address: int, time_ns: int) -> Place:
        """Like `locate`, for a single address."""
        number, inside = self.locate(
            np.array([pid], np.uint32), np.array([address], np.uint64), np.array([time_ns], np.uint64)
        )
        return Place(self.modules[number[0]], int(inside[0]))

    def processes_of(self, module: Module) -> list[int]:
        """Returns the processes that mapped a FILE themselves, the latest mapping first."""
        rows = self._files.rows(module)
        latest_first = rows[np.argsort(self._times[rows], kind="stable")[::-1]]
        return list(dict.fromkeys(self._pids[latest_first].tolist()))

    @cached_property
    def _files(self) -> _Files:
        return _Files(self._paths, self._build_ids, self._inodes)

    def _number(self, module: Module) -> int:
        if module not in self._numbers:
            self._numbers[module] = len(self.modules)
            self.modules.append(module)
        return self._numbers[module]

    def _module(self, row: int, pid: int) -> Module:
        if row < 0:
            return Module(ModuleKind.GENERATED, NOWHERE, pid=pid)
        if row not in self._module_of_row:
            path, build_id = self._paths[row].as_py(), self._build_ids[row].as_py() or None
            if path == _VDSO:
                module = Module(ModuleKind.VDSO, path)
            elif build_id is None and (not path or _GENERATED.fullmatch(path)):
                module = Module(ModuleKind.GENERATED, path or "//anon")
            else:
                inode = 0 if build_id is not None else self._inodes[row].as_py() or 0
                module = Module(ModuleKind.FILE, path, build_id, inode)
            self._module_of_row[row] = module
        module = self._module_of_row[row]
        return Module(module.kind, module.path, pid=pid) if module.kind is ModuleKind.GENERATED else module

    def _mappings(
        self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64], generations: int
    ) -> NDArray[np.int64]:
        """Returns the row that covers each address at its time, inherited ones included: int64[n]; -1 for none."""
        rows = self._own_mappings(pid, addresses, times)
        execs = np.append(np.uint64(0), np.sort(self._exec_times[self._execs.of(pid)]))
        begun = execs[np.searchsorted(execs, times, side="right") - 1]
        parents = np.full(len(rows), -1, np.int64)
        if len(births := self._forks.of(pid)):
            births = births[np.lexsort((self._parents[births], self._fork_times[births]))]
            fork_times = np.append(np.uint64(0), self._fork_times[births])
            fork_parents = np.append(-1, self._parents[births])
            fork = np.searchsorted(fork_times, times, side="right") - 1
            fork_time = fork_times[fork]
            parents = np.where(begun <= fork_time, fork_parents[fork], -1)
            begun = np.maximum(begun, fork_time)
        # A process's own first mappings carry the time of its exec or a later one.
        rows = np.where((rows >= 0) & (self._times[rows] >= begun), rows, -1) if len(self._times) else rows
        inherited = np.flatnonzero((rows < 0) & (parents >= 0))
        for parent, positions in groups(parents[inherited]) if generations else ():
            here = inherited[positions]
            rows[here] = self._mappings(parent, addresses[here], begun[here], generations - 1)
        return rows

    def _own_mappings(self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the process's own latest row up to each time that covers the address: int64[n]; -1 for none."""
        rows = self._rows.of(pid)
        if not len(rows):
            return np.full(len(addresses), -1)
        if pid not in self._trees:
            starts = self._starts[rows]
            # Mappings that would end beyond the last address end there.
            ends = starts + np.minimum(self._lengths[rows], np.uint64(_LAST_ADDRESS) - starts)
            self._trees[pid] = SegmentTree(starts, ends, self._times[rows], np.arange(len(rows)))
        tree = self._trees[pid]
        events = tree.last(tree.segments(addresses), times)
        return np.where(events >= 0, rows[events], -1)


class _Files:
    """The rows of each mapped file."""

    def __init__(self, paths: pa.ChunkedArray, build_ids: pa.ChunkedArray, inodes: pa.ChunkedArray) -> None:
        """Takes columns of `mapping` rows."""
        self._path_numbers: dict[Any, int] = {}
        self._build_id_numbers: dict[Any, int] = {None: 0, b"": 0}
        numbers = number_texts(paths, self._path_numbers) << 32
        numbers |= number_texts(build_ids, self._build_id_numbers)
        self._rows, self._inodes = RowsOfKeys(numbers), inodes

    def rows(self, module: Module) -> NDArray[np.int64]:
        """Returns the rows of a FILE."""
        path, build_id = self._path_numbers.get(module.path), self._build_id_numbers.get(module.build_id)
        if path is None or build_id is None:
            return np.empty(0, np.int64)
        rows = self._rows.of(path << 32 | build_id)
        if module.build_id is None:
            rows = rows[self._inodes.take(pa.array(rows)).fill_null(0).to_numpy() == module.inode]
        return rows
