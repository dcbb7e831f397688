"""What was mapped where in which process at which time, told from the side-band of a capture.

A mapping lasts until another covers it, until the process executes another program, or for good; a forked process
begins with its parent's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import rows_equal
from iaprof.symbols.names.layers import Layers
from iaprof.symbols.names.modules import Module, ModuleKind, Place

NOWHERE = ""  # path of the GENERATED module for addresses that were in no mapping that is known of
_MAX_FORKS = 16  # generations that share a mapping; a loop in a capture from a stranger ends here
_LAST_ADDRESS = (1 << 64) - 1
_VDSO = "[vdso]"
# What has no file whose content is the code: a process made it. A jitdump is mapped so that profilers see its name.
_GENERATED = re.compile(
    r"\[(?!vdso\]).*|//anon|anon_inode:.*|/memfd:.*|/dev/zero.*|/SYSV.*|(?:.*/)?jit-\d+\.dump", re.DOTALL
)


class AddressSpaces:
    """All processes of a capture."""

    def __init__(self, mappings: pa.Table, processes: pa.Table) -> None:
        """Sorts the rows by process and time.

        Args:
            mappings: `mapping` rows.
            processes: `process` rows.
        """
        self.modules: list[Module] = []  # those that `locate` met
        self._numbers: dict[Module, int] = {}
        self._module_of_row: dict[int, Module] = {}
        self._rows_of: dict[tuple[object, ...], list[int]] = defaultdict(list)  # those that `locate` met
        self._times, self._starts, self._lengths, self._offsets = (
            mappings[name].to_numpy() for name in ("time_ns", "start", "length", "offset")
        )
        self._paths, self._build_ids, self._inodes = (mappings[name] for name in ("path", "build_id", "inode"))
        self._pids = mappings["pid"].to_numpy()
        self._rows = dict(_groups(self._pids))
        self._layers: dict[int, Layers] = {}
        execs: dict[int, list[int]] = defaultdict(list)
        forks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        is_exec, is_fork = (rows_equal(processes["event"], name) for name in ("exec", "fork"))
        columns = [processes[name].filter(pa.array(is_exec)).to_pylist() for name in ("time_ns", "pid")]
        for time, pid in zip(*columns, strict=True):
            execs[pid].append(time)
        columns = [processes[name].filter(pa.array(is_fork)).to_pylist() for name in ("time_ns", "pid", "tid", "ppid")]
        for time, pid, tid, ppid in zip(*columns, strict=True):
            if pid == tid and ppid is not None and ppid != pid:
                forks[pid].append((time, ppid))
        self._execs = {pid: np.array([0, *sorted(times)], np.uint64) for pid, times in execs.items()}
        self._forks = {pid: _columns(sorted(born)) for pid, born in forks.items()}

    def locate(
        self, pids: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        """The module that each address was in, and what the address is in it.

        Args:
            pids: [n], whose; 0 for the operating system's kernel.
            addresses: [n].
            times: [n], CLOCK_MONOTONIC ns.

        Returns:
            int32[n], indices into `modules`; uint64[n], see ModuleKind.
        """
        modules = np.empty(len(pids), np.int32)
        inside = addresses.copy()
        for pid, index in _groups(pids):
            if pid == 0:
                modules[index] = self._number(Module(ModuleKind.KERNEL, "[kernel]"))
                continue
            rows = self._mappings(pid, addresses[index], times[index], _MAX_FORKS)
            for row, which in _groups(rows):
                module = self._module(row, pid)
                here = index[which]
                modules[here] = self._number(module)
                if module.kind is not ModuleKind.GENERATED:
                    inside[here] = addresses[here] - self._starts[row] + self._offsets[row]
        return modules, inside

    def mapped(self, pid: int, time_ns: int) -> list[tuple[int, int, int, Module]]:
        """What a process had mapped at a time: start, end, offset in the module, module; sorted."""
        rows = self._own_and_parents(pid, _MAX_FORKS)
        if not len(rows):
            return []
        starts = self._starts[rows]
        ends = starts + np.minimum(self._lengths[rows], np.uint64(_LAST_ADDRESS) - starts)
        bounds = np.unique(np.concatenate([starts, ends]))
        times = np.full(len(bounds), time_ns, np.uint64)
        covering = self._mappings(pid, bounds, times, _MAX_FORKS)
        found = []
        for start, end, row in zip(bounds[:-1].tolist(), bounds[1:].tolist(), covering[:-1].tolist(), strict=True):
            if row >= 0:
                offset = start - int(self._starts[row]) + int(self._offsets[row])
                found.append((start, end, offset, self._module(row, pid)))
        return found

    def _own_and_parents(self, pid: int, generations: int) -> NDArray[np.int64]:
        """The rows of a process and of those that it was forked from."""
        rows = [self._rows.get(pid, np.empty(0, np.int64))]
        if generations and pid in self._forks:
            parents = set(self._forks[pid][1].tolist()) - {-1, pid}
            rows += [self._own_and_parents(parent, generations - 1) for parent in parents]
        return np.concatenate(rows)

    def place(self, pid: int, address: int, time_ns: int) -> Place:
        """One address, for who has few."""
        number, inside = self.locate(
            np.array([pid], np.uint32), np.array([address], np.uint64), np.array([time_ns], np.uint64)
        )
        return Place(self.modules[number[0]], int(inside[0]))

    def processes_of(self, module: Module) -> list[int]:
        """The processes in whose stacks it was met and that mapped it themselves, those that did last first."""
        rows = sorted(self._rows_of[module.identity], key=lambda row: int(self._times[row]), reverse=True)
        return list(dict.fromkeys(self._pids[rows].tolist()))

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
            self._rows_of[module.identity].append(row)
        module = self._module_of_row[row]
        return Module(module.kind, module.path, pid=pid) if module.kind is ModuleKind.GENERATED else module

    def _mappings(
        self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64], generations: int
    ) -> NDArray[np.int64]:
        """The rows that cover the addresses at those times, a parent's too; -1 for none: int64[n]."""
        rows = self._last_mappings(pid, addresses, times)
        execs = self._execs.get(pid, np.zeros(1, np.uint64))
        begun = execs[np.searchsorted(execs, times, side="right") - 1]
        parents = np.full(len(rows), -1, np.int64)
        if pid in self._forks:
            fork_times, fork_parents = self._forks[pid]
            fork = np.searchsorted(fork_times, times, side="right") - 1
            born = fork_times[fork]
            parents = np.where(begun <= born, fork_parents[fork], -1)
            begun = np.maximum(begun, born)
        # A process's own first mappings carry the time of its exec or come after it.
        rows = np.where((rows >= 0) & (self._times[rows] >= begun), rows, -1) if len(self._times) else rows
        left = np.flatnonzero((rows < 0) & (parents >= 0))
        for parent, which in _groups(parents[left]) if generations else ():
            its = left[which]
            rows[its] = self._mappings(parent, addresses[its], begun[its], generations - 1)
        return rows

    def _last_mappings(self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The rows of the process itself that cover the addresses, the last ones up to a time; -1 for none."""
        rows = self._rows.get(pid)
        if rows is None:
            return np.full(len(addresses), -1)
        if pid not in self._layers:
            starts = self._starts[rows]
            # What ends behind the last address ends there.
            ends = starts + np.minimum(self._lengths[rows], np.uint64(_LAST_ADDRESS) - starts)
            self._layers[pid] = Layers(starts, ends, self._times[rows], np.arange(len(rows)))
        layers = self._layers[pid]
        found = layers.last(layers.pieces(addresses), times)
        return np.where(found >= 0, rows[found], -1)


def _groups(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each distinct key and where it stands, in time that does not grow with their product."""
    order = np.argsort(keys, kind="stable")
    found, firsts = np.unique(keys[order], return_index=True)
    return zip(found.tolist(), np.split(order, firsts[1:]), strict=False)


def _columns(forks: list[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Times and parents of a process's births, after a first one of nobody's."""
    return np.array([0, *(t for t, _ in forks)], np.uint64), np.array([-1, *(p for _, p in forks)], np.int64)
