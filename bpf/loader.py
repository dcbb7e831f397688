"""Makes the maps and loads the BPF programs that ship; if the kernel refuses these, compiles the programs here."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import struct
from collections.abc import Collection, Mapping

from iaprof.bpf.bytecode import Bytecode, BytecodeError
from iaprof.bpf.compile import cache as compile_cache
from iaprof.bpf.compile.compilation import Compilation, Interruption
from iaprof.bpf.declarations import check_maps
from iaprof.bpf.errors import BpfUnavailable
from iaprof.bpf.maps import create_map, write_slot
from iaprof.bpf.probes.uprobe import ProgramFor, load_program
from iaprof.bpf.programs import COPIES, PHASES, SAMPLING, SESSIONS, shipped, source

# What a program is refused with that another compiler's may not be; else it is for want of permission or memory.
_REFUSALS = (errno.EACCES, errno.EINVAL, errno.E2BIG, errno.EFAULT, errno.ENOSPC, errno.EOPNOTSUPP, 524)


class Origin(enum.StrEnum):
    """Where the loaded programs come from."""

    SHIPPED = "shipped"
    CACHED = "compiled on this machine before"
    COMPILED = "compiled now"


class _Refused(Exception):
    """The kernel's verifier refuses a program."""


def load(
    bytecode: Bytecode, constants: Mapping[str, int], entries: Mapping[str, int], without: Collection[str] = ()
) -> dict[str, int]:
    """Makes maps and loads programs.

    Args:
        bytecode: both.
        constants: values by name.
        entries: for how many elements a map has room, by its name; of other maps, what `bytecode` says.
        without: programs that are not loaded.

    Returns:
        Descriptors, close-on-exec, by the names of maps and programs; they are the caller's.

    Raises:
        BpfUnavailable: no permission, or no memory.
        BytecodeError: the programs were compiled of other declarations.
        _Refused: the verifier says no.
    """
    check_maps(bytecode)
    fds: dict[str, int] = {}
    try:
        for name, each in bytecode.maps.items():
            fds[name] = create_map(
                name, each.type, each.key_bytes, each.value_bytes, entries.get(name, each.entries), each.flags
            )
        maps = dict(fds)
        programs = dict(bytecode.programs)
        programs |= {name: bytecode.programs[of] for name, of in COPIES.items() if of in bytecode.programs}
        for_sessions = {**maps, "phases": maps["wait_phases"]} if "wait_phases" in maps else maps
        for name, program in programs.items():
            if name in without:
                continue
            try:
                code = program.linked(for_sessions if name in COPIES else maps, constants)
                fds[name] = load_program(name, code, kind_of(name))
            except OSError as error:
                if error.errno in _REFUSALS:
                    raise _Refused(f"{name}: {error.strerror}") from error
                raise
        for phases, members in PHASES.items():
            for phase, member in members.items():
                if member in fds and phases in fds:
                    write_slot(fds[phases], phase, struct.pack("<I", fds[member]))
    except (OSError, _Refused) as error:
        close(fds)
        if isinstance(error, OSError):
            raise BpfUnavailable(_why(error)) from error
        raise
    return fds


def kind_of(name: str) -> ProgramFor:
    """What a program is loaded for."""
    if name in SAMPLING:
        return ProgramFor.PERF_EVENTS
    return ProgramFor.SESSIONS if name in SESSIONS or name in COPIES else ProgramFor.UPROBES


def close(fds: dict[str, int]) -> None:
    """Closes what `load` returned."""
    while fds:
        os.close(fds.popitem()[1])


def _why(error: OSError) -> str:
    if os.geteuid() != 0:
        return "BPF needs root: run it with sudo"
    if error.errno == errno.EPERM:
        return "the kernel does not permit BPF here (lockdown, a container without CAP_BPF, or a security module)"
    return f"the BPF programs cannot be loaded ({error.strerror})"


class Loader:
    """Loads the programs that ship; if the kernel refuses them, compiles them in a child process."""

    def __init__(self, constants: Mapping[str, int], entries: Mapping[str, int], without: Collection[str] = ()) -> None:
        """Loads, or begins to compile; the arguments are `load`'s.

        Raises:
            BpfUnavailable: what is missing or not permitted; or there is no room for a process that compiles.
        """
        self.origin = Origin.SHIPPED
        self._constants, self._entries, self._without = constants, entries, without
        self._fds: dict[str, int] | None = None
        self._compilation: Compilation | None = None
        self._cpu_seconds = 0.0
        try:
            self._fds = load(shipped(), constants, entries, without)
        except (_Refused, BytecodeError) as refusal:
            self._refusal = refusal
            self._load_cached()

    def _load_cached(self) -> None:
        self._source = source()
        self._key = compile_cache.key(self._source)
        cached = compile_cache.read(self._key)
        if cached is not None:
            with contextlib.suppress(_Refused, BytecodeError):
                self._fds = load(cached, self._constants, self._entries, self._without)
                self.origin = Origin.CACHED
                return
        self._compilation = Compilation(self._source)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the child process that compiled, seconds; 0 if there was none."""
        return self._compilation.cpu_seconds if self._compilation is not None else 0.0

    def wait(self, interruption: Interruption | None = None) -> dict[str, int]:
        """Waits until all is loaded. To be called once.

        Args:
            interruption: may end the wait, by what its `check` raises.

        Returns:
            As `load`.

        Raises:
            BpfUnavailable: what is missing, and how to get it.
        """
        if self._compilation is not None:
            try:
                bytecode = self._compilation.wait(interruption)
                self._fds = load(bytecode, self._constants, self._entries, self._without)
            except (_Refused, BytecodeError, BpfUnavailable) as error:
                failure = BpfUnavailable(
                    f"the BPF programs that ship with iaprof do not load here ({self._refusal}), and compiling them "
                    f"anew failed: {error}"
                )
                failure.needs_bcc = True
                raise failure from error
            compile_cache.write(self._key, bytecode)
            self.origin = Origin.COMPILED
        assert self._fds is not None
        fds, self._fds = self._fds, None
        return fds

    def close(self) -> None:
        """Ends the child process, and closes the descriptors that `wait` did not return."""
        if self._compilation is not None:
            self._compilation.close()
        if self._fds is not None:
            close(self._fds)
