"""The symbolizer at the end of a recording, on the same machine: names addresses from processes' files and maps.

record.symbolize.opener opens all files with the rights of the process that named them or, if it has ended, of the user
who gets the capture; sandboxes read them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import sudo_user
from iaprof.bpf.accounts import ACCOUNTS, describe
from iaprof.bpf.driver_layout import Layout, LayoutError, find_layout
from iaprof.formats.capture.dictionaries import rows_equal, rows_where
from iaprof.record.symbolize.opener import FileIdentity, MappedFiles, Opener, Rights
from iaprof.sandbox.deadline import patient_clock
from iaprof.sandbox.worker import Closing
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.boot import is_same_boot, open_vdso
from iaprof.symbols.names.names import Frame, Module, ModuleKind, Names, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError, Companions, Facts
from iaprof.symbols.symbolizers.debug_files import debug_files
from iaprof.symbols.symbolizers.generated import GeneratedCode
from iaprof.symbols.symbolizers.this_boot import ThisBoot

_MOST_PROCESSES = 4  # that are tried for one file: they may be in several containers
_MOST_JITDUMPS = 8
_USER_SECONDS = 120.0  # for all files and maps of one user, who may have made them slow to read
_JITDUMP = re.compile(r"(?:.*/)?jit-\d+\.dump", re.DOTALL)
_NOT_SINCE = "it has no build-id, and this machine was restarted after the recording, or is not the one that recorded"
_SYSTEM = (Path("/"),)  # roots below which debug files are searched


class RecordingSymbolizer(Closing):
    """Names a recording's addresses: a Symbolizer; also a context manager."""

    def __init__(
        self,
        header: dict[str, Any],
        spaces: AddressSpaces,
        mappings: pa.Table,
        processes: pa.Table,
        everything: bool,
        files: MappedFiles | None = None,
        roots: Mapping[int, int | str] | None = None,
        accounts: Mapping[int, str] | None = None,
        binaries: Binaries | None = None,
    ) -> None:
        """Opens no files yet.

        Args:
            header: of the recording; if this machine was restarted since, only files with a build-id are used.
            spaces: the recording's address spaces.
            mappings: its `mapping` rows.
            processes: its `process` rows.
            everything: whether to name every function of each file, or only the addresses asked for.
            files: its files without a build-id; None: these are not named.
            roots: by process, of those whose root is not ours: a descriptor, a folder's path, or an empty path for a
                root that vanished with its processes.
            accounts: by process: who is answerable for it, as far as that was recorded.
            binaries: what reads files, which the caller closes; None: its own.
        """
        self._header, self._spaces, self._everything = header, spaces, everything
        self._files, self._roots, self._accounts = files or MappedFiles(), roots or {}, accounts or {}
        self._is_this_boot = is_same_boot(header)
        self._opened = contextlib.ExitStack()
        self._opener = self._opened.enter_context(Opener())
        self._binaries = binaries or self._opened.enter_context(Binaries())
        self._generated = self._opened.enter_context(GeneratedCode())
        self._this_boot = ThisBoot(header, self._binaries, self._generated, everything)
        described = processes.select(["pid", "ns_pid", "uid", "gid"]).filter(
            pa.array(rows_equal(processes["event"], "described"))
        )
        self._described = {
            row["pid"]: row for row in described.to_pylist() if row["uid"] is not None and row["gid"] is not None
        }
        self._rights = cache(self._find_rights)
        self._capture_owner = Rights(*(sudo_user() or (os.getuid(), os.getgid())))
        self._seconds: defaultdict[str, float] = defaultdict(float)  # spent so far, by account
        self._jitdumps: dict[int, dict[str, None]] = {}
        is_jitdump = rows_where(mappings["path"], lambda path: bool(_JITDUMP.fullmatch(path or "")))
        dumps = mappings.select(["pid", "path"]).filter(pa.array(is_jitdump))
        for pid, path in zip(dumps["pid"].to_pylist(), dumps["path"].to_pylist(), strict=True):
            self._jitdumps.setdefault(pid, {})[path] = None

    def close(self) -> None:
        """Ends the child processes."""
        self._opened.close()

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized:
        """See Symbolizer."""
        pids = self._processes_of(module) if module.kind is ModuleKind.FILE else [module.pid]
        account = self._rights(pids[0] if pids else 0).answerable
        if self._seconds[account] > _USER_SECONDS:
            return Symbolized(problem="other files of its user took too long to read")
        begun = patient_clock()
        try:
            return self._name(module, addresses, times)
        finally:
            self._seconds[account] += patient_clock() - begun

    def _name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized:
        try:
            if module.kind is ModuleKind.FILE:
                return self._name_file(module, addresses)
            if not self._is_this_boot:
                return Symbolized(
                    problem="this machine was restarted after the recording, or is not the one that recorded"
                )
            if module.kind is ModuleKind.GENERATED:
                return self._name_generated(module.pid, addresses, times)
            return self._this_boot.name(module, addresses, times) or Symbolized(problem="the recorder has no vDSO")
        except (IaprofError, OSError) as error:
            return Symbolized(problem=str(error))

    # Files

    def open(self, module: Module) -> int | None:
        """Opens a file with recorded code, or the vDSO; the caller closes it. Returns None if it cannot be had."""
        if module.kind is ModuleKind.VDSO:
            return open_vdso() if self._is_this_boot else None
        if module.kind is ModuleKind.FILE:
            for file, _ in self._files_of(module, {}):
                return os.dup(file)
        return None

    def _name_file(self, module: Module, addresses: NDArray[np.uint64]) -> Symbolized:
        problems: dict[str, None] = {}
        for file, facts in self._files_of(module, problems):
            with self._debug_file(module, facts) as debug:
                companions = Companions(module.path, partial(self._open_companion, module))
                named = self._binaries.name(file, addresses, debug, self._everything, companions)
            return with_entry_names(named, self._binaries, file, facts.build_id, addresses)
        return Symbolized(problem="; ".join(problems) or f"{module.path} cannot be opened")

    def _files_of(self, module: Module, problems: dict[str, None]) -> Iterator[tuple[int, Facts]]:
        """Yields open files that are the module's."""
        for file in self._candidates(module, problems):
            with _closing(file):
                try:
                    facts = self._binaries.facts(file)
                except BinaryError as error:
                    problems[str(error)] = None
                    continue
                if module.build_id is not None and facts.build_id != module.build_id:
                    problems[f"{module.path} was replaced by another build"] = None
                    continue
                yield file, facts

    def _candidates(self, module: Module, problems: dict[str, None]) -> Iterator[int]:
        """Yields open files that may be the module's: those mapped by running processes, then those at its path."""
        pids = self._processes_of(module)[:_MOST_PROCESSES] if self._is_this_boot else []
        same: FileIdentity | str | None = None
        if module.build_id is None:
            same = self._files.find(module.path, module.inode, self._header) if self._is_this_boot else _NOT_SINCE
        if isinstance(same, str):
            problems[f"{module.path}: {same}"] = None
            return
        for pid in pids:
            file_or_problem = self._opener.open_mapped(pid, module.path, module.inode, self._rights(pid), same)
            if isinstance(file_or_problem, int):
                yield file_or_problem
        for user, pid, below in self._places(pids, problems):
            file_or_problem = self._opener.open(module.path, self._rights(user), pid, below=below, same=same)
            if isinstance(file_or_problem, int):
                yield file_or_problem
            else:
                problems[f"{module.path}: {file_or_problem}"] = None

    def _open_companion(self, module: Module, path: str) -> int | None:
        """Opens a file that a module names, as one of the processes that mapped the module."""
        pids = self._processes_of(module)[:_MOST_PROCESSES] if self._is_this_boot else []
        for user, pid, below in self._places(pids, {}):
            file_or_problem = self._opener.open(path, self._rights(user), pid, below=below)
            if isinstance(file_or_problem, int):
                return file_or_problem
        return None

    def _places(self, pids: Sequence[int], problems: dict[str, None]) -> Iterator[tuple[int, int, int | str | None]]:
        """Yields where processes' file may be: whose rights to use; the process with the root, or another root."""
        for pid in pids:
            lives, root = os.path.exists(f"/proc/{pid}"), self._roots.get(pid)
            if lives:
                yield pid, pid, None
            if root:
                yield pid, 0, root
            elif root is not None and not lives:
                problems[f"process {pid} is gone, and its mount namespace with it"] = None
        yield pids[0] if pids else 0, 0, None

    def _processes_of(self, module: Module) -> list[int]:
        """Returns the processes that mapped a module, root's first: a user's own file may claim its build-id.

        One stands for all that ended before anything was read of them: their file is looked for in the same place.
        """
        known, unknown = list[int](), list[int]()
        for pid in self._spaces.processes_of(module):
            is_unknown = self._rights(pid) is self._capture_owner and pid not in self._roots
            (unknown if is_unknown else known).append(pid)
        return sorted([*known, *unknown[:1]], key=lambda pid: self._rights(pid).uid != 0)

    @contextlib.contextmanager
    def _debug_file(self, module: Module, facts: Facts) -> Iterator[int | None]:
        if facts.has_debug_info:
            yield None
            return

        def open_(path: Path) -> int | None:
            file_or_problem = self._opener.open(str(path), self._capture_owner)
            return file_or_problem if isinstance(file_or_problem, int) else None

        for candidate in debug_files(module.path, facts, _SYSTEM, open_, self._binaries):
            with _closing(candidate.file):
                yield candidate.file
            return
        yield None

    # Code that processes made

    def _name_generated(self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized:
        rights = self._rights(pid)
        lives = os.path.exists(f"/proc/{pid}")
        ns_pid = self._described.get(pid, {}).get("ns_pid")
        below = None if lives else self._roots.get(pid) or None
        if ns_pid and not lives and below is None:  # a file of that name here would be another process's
            return Symbolized(problem=f"process {pid} is gone, and its container's files with it")
        inside = ns_pid or pid  # the map's name has the pid in the process's own namespace
        # The process writes the map itself: it must belong to its user, or any other user could write its names.
        name = f"/tmp/perf-{inside}.map"  # noqa: S108
        map_or_problem = self._opener.open(name, rights, pid if lives else 0, owner=rights.uid, below=below)
        perf_map = map_or_problem if isinstance(map_or_problem, int) else None
        dumps = []
        for path in list(self._jitdumps.get(pid, ()))[:_MOST_JITDUMPS]:
            dump = self._opener.open(path, rights, pid if lives else 0, owner=rights.uid, below=below)
            dumps += [dump] if isinstance(dump, int) else []
        try:
            if perf_map is None and not dumps:
                return Symbolized(problem=f"process {pid} has no perf map: {map_or_problem}")
            return self._generated.name(perf_map, dumps, addresses, times)
        finally:
            for fd in (*dumps, *(() if perf_map is None else (perf_map,))):
                os.close(fd)

    def _find_rights(self, pid: int) -> Rights:
        """Returns the rights of a running process, or those recorded of it; else those of who gets the capture.

        A process recorded as a user's that is root's now has executed a program of root's, or its pid was reused.
        """
        candidates = []
        for about in (describe(pid), self._described.get(pid, {}) | {"account": self._accounts.get(pid)}):
            uid, gid, account = about.get("uid"), about.get("gid"), about.get("account")
            if isinstance(uid, int) and isinstance(gid, int):
                candidates.append(Rights(uid, gid, str(account or ACCOUNTS.of_user(uid))))
        return next(
            (rights for rights in candidates if rights.uid), candidates[0] if candidates else self._capture_owner
        )


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def with_entry_names(
    named: Symbolized, binaries: Binaries, file: int, build_id: bytes | None, addresses: NDArray[np.uint64]
) -> Symbolized:
    """Adds the names of entry points to a driver's names, for addresses without a name.

    Distributions' drivers have no symbols for probed functions, but driver layouts do.

    Args:
        named: the names from the file's symbols.
        binaries: reads the file, which can be anyone's.
        file: the file's descriptor.
        build_id: the file's; without one there is no layout.
        addresses: uint64[n], the offsets in the file to name.
    """
    try:
        layout = find_layout(build_id.hex()) if build_id else None
    except LayoutError:
        layout = None  # the source of libraries reports it
    if layout is None:
        return named
    missing = addresses[named.names.find(addresses) < 0]
    entry_names = _entries(layout, binaries, file, missing)
    if not entry_names:
        return named
    entries = Names.of((offset, 1, [Frame(name)]) for offset, name in entry_names.items())
    source = f"iaprof's layout of this driver ({layout.version})"
    return replace(
        named,
        names=Names.joined([entries, named.names]),
        source=f"{named.source} and {source}" if named.source else source,
        problem="" if len(entry_names) == len(missing) else named.problem,
    )


def _entries(layout: Layout, binaries: Binaries, file: int, offsets: NDArray[np.uint64]) -> dict[int, str]:
    """Returns the entry points at these file offsets, by offset; none if the file is damaged."""
    names = {entry.address: entry.name for entry in layout.entries}
    try:
        addresses = binaries.addresses(file, offsets)
    except BinaryError:
        return {}
    return {offset: names[address] for offset, address in addresses.items() if address in names}
