"""Creates the maps and loads the BPF programs that ship; if the kernel refuses these, compiles the programs here."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

from iaprof.bpf.bytecode import BpfUnavailable, Bytecode, BytecodeError, Map
from iaprof.bpf.compile import cache as compile_cache
from iaprof.bpf.compile.compilation import Compilation, Interruption
from iaprof.bpf.maps import create_map, write_slot
from iaprof.bpf.programs import (
    PHASES,
    SAMPLE_PROGRAMS,
    SESSION_COPIES,
    SESSION_PROGRAMS,
    WITHOUT_ITERATORS,
    check_maps,
    shipped,
    source,
)
from iaprof.bpf.uprobe import COOKIES_SINCE, TOO_OLD, ProgramFor, load_program

# The verifier's errors, which may not occur with another compiler's output; other errors mean no permission or memory.
_VERIFIER_ERRORS = (errno.EACCES, errno.EINVAL, errno.E2BIG, errno.EFAULT, errno.ENOSPC, errno.EOPNOTSUPP, 524)
_VERIFIED_LONGEST = ("on_walk", "on_sample_walk", "on_handle_launched")  # half of the time that all take


class Origin(enum.StrEnum):
    """How the loaded programs were obtained."""

    SHIPPED = "shipped"
    CACHED = "compiled on this machine before"
    COMPILED = "compiled now"


class _VerifierRefusal(Exception):
    """The kernel's verifier refuses a program."""


def load(
    bytecode: Bytecode, constants: Mapping[str, int], entries: Mapping[str, int], without: Collection[str] = ()
) -> dict[str, int]:
    """Creates the maps and loads the programs.

    Args:
        bytecode: maps and programs.
        constants: values by name.
        entries: sizes of maps in elements (ring buffers: bytes), by name; other maps have the size in `bytecode`.
        without: names of programs that are not loaded.

    Returns:
        Descriptors by the names of maps and programs, close-on-exec; the caller closes them.

    Raises:
        BpfUnavailable: no permission, or no memory.
        BytecodeError: the programs were compiled with other declarations.
        _VerifierRefusal: the verifier refuses a program.
    """
    check_maps(bytecode)
    fds: dict[str, int] = {}
    try:
        _create_maps(bytecode.maps, entries, fds)
        maps = dict(fds)
        programs = dict(bytecode.programs)
        programs |= {name: bytecode.programs[of] for name, of in SESSION_COPIES.items() if of in bytecode.programs}
        for_sessions = {**maps, "phases": maps["wait_phases"]} if "wait_phases" in maps else maps
        codes = {
            name: program.linked(for_sessions if name in SESSION_COPIES else maps, constants)
            for name, program in programs.items()
            if name not in without
        }
        _load_programs(codes, fds)
        for phases, members in PHASES.items():
            for phase, member in members.items():
                if member in fds and phases in fds:
                    write_slot(fds[phases], phase, struct.pack("<I", fds[member]))
    except (OSError, _VerifierRefusal) as error:
        close(fds)
        if isinstance(error, OSError):
            raise BpfUnavailable(_explain(error)) from error
        raise
    return fds


def _create_maps(maps: Mapping[str, Map], entries: Mapping[str, int], fds: dict[str, int]) -> None:
    """Creates the maps on all cores, as the kernel clears their memory; adds the descriptors to `fds`."""
    calls = {
        name: partial(
            create_map, name, each.type, each.key_bytes, each.value_bytes, entries.get(name, each.entries), each.flags
        )
        for name, each in maps.items()
    }
    for error in _at_once(calls, fds).values():
        raise error


def _load_programs(codes: Mapping[str, bytes], fds: dict[str, int]) -> None:
    """Loads programs on all cores, as verification takes most of a recording's start; adds the descriptors to `fds`."""
    longest_first = sorted(codes, key=lambda name: name not in _VERIFIED_LONGEST)
    calls = {name: partial(load_program, name, codes[name], kind_of(name)) for name in longest_first}
    for name, error in _at_once(calls, fds).items():
        if isinstance(error, OSError) and error.errno in _VERIFIER_ERRORS:
            raise _VerifierRefusal(f"{name}: {error.strerror}") from error
        raise error


def _at_once(calls: Mapping[str, Callable[[], int]], fds: dict[str, int]) -> dict[str, BaseException]:
    """Calls functions on all cores, adds to `fds` what they return, and returns what the others raise.

    After the first that raises, no others are called.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        called = {name: threads.submit(call) for name, call in calls.items()}
        wait(called.values(), return_when=FIRST_EXCEPTION)
        threads.shutdown(cancel_futures=True)
    ended = {name: each for name, each in called.items() if not each.cancelled()}
    failures = {name: error for name, each in ended.items() if (error := each.exception()) is not None}
    fds |= {name: each.result() for name, each in ended.items() if name not in failures}
    return failures


def kind_of(name: str) -> ProgramFor:
    """Returns what the program of that name is attached to."""
    if name in SAMPLE_PROGRAMS:
        return ProgramFor.PERF_EVENTS
    return ProgramFor.SESSIONS if name in SESSION_PROGRAMS or name in SESSION_COPIES else ProgramFor.UPROBES


def close(fds: dict[str, int]) -> None:
    """Closes the descriptors that `load` returned, and empties the dictionary."""
    while fds:
        os.close(fds.popitem()[1])


def linux_version() -> tuple[int, ...]:
    """Returns the first two numbers of this kernel's version; where it has none, as if it were new enough."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, found.groups())) if found else COOKIES_SINCE


def _explain(error: OSError) -> str:
    if os.geteuid() != 0:
        return "BPF needs root: run it with sudo"
    if error.errno == errno.EPERM:
        refusal = "the kernel does not permit BPF here (lockdown, a container without CAP_BPF, or a security module)"
        return refusal if linux_version() >= COOKIES_SINCE else f"{refusal}, or it is too old: {TOO_OLD}"
    return f"the BPF programs cannot be loaded ({error.strerror})"


class Loader:
    """Loads the programs that ship; if the kernel refuses them, compiles them in a child process."""

    def __init__(self, constants: Mapping[str, int], entries: Mapping[str, int], without: Collection[str] = ()) -> None:
        """Loads the programs, or starts to compile them; the arguments are those of `load`.

        Raises:
            BpfUnavailable: something is missing or not permitted, or the compiling process cannot be started.
        """
        self.origin = Origin.SHIPPED
        self._constants, self._entries, self._without = constants, entries, without
        self._fds: dict[str, int] | None = None
        self._compilation: Compilation | None = None
        try:
            self._fds = self._load(shipped())
        except (_VerifierRefusal, BytecodeError) as refusal:
            if linux_version() < COOKIES_SINCE:
                raise BpfUnavailable(TOO_OLD) from refusal
            self._refusal = refusal
            try:
                self._load_cached()
            except BpfUnavailable as error:
                raise self._failure(error) from error

    def _load(self, bytecode: Bytecode) -> dict[str, int]:
        try:
            return load(bytecode, self._constants, self._entries, self._without)
        except _VerifierRefusal:
            if not self._constants["ITERATES"]:
                raise
            self._constants = {**self._constants, **WITHOUT_ITERATORS}
            return load(bytecode, self._constants, self._entries, self._without)

    def _load_cached(self) -> None:
        self._source = source()
        self._key = compile_cache.key(self._source)
        cached = compile_cache.read(self._key)
        if cached is not None:
            with contextlib.suppress(_VerifierRefusal, BytecodeError):
                self._fds = self._load(cached)
                self.origin = Origin.CACHED
                return
        self._compilation = Compilation(self._source)

    def _failure(self, error: Exception) -> BpfUnavailable:
        failure = BpfUnavailable(
            f"the BPF programs that ship with iaprof do not load here ({self._refusal}), and compiling them anew "
            f"failed: {error}"
        )
        failure.needs_bcc = True
        return failure

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the compiling process in seconds; 0 without one."""
        return self._compilation.cpu_seconds if self._compilation is not None else 0.0

    def wait(self, interruption: Interruption | None = None) -> dict[str, int]:
        """Waits until all programs are loaded; may be called only once.

        Args:
            interruption: its `check` may raise an exception to end the wait.

        Returns:
            Descriptors, as `load` returns them.

        Raises:
            BpfUnavailable: something is missing; the text says how to get it.
        """
        if self._compilation is not None:
            try:
                bytecode = self._compilation.wait(interruption)
                self._fds = self._load(bytecode)
            except (_VerifierRefusal, BytecodeError, BpfUnavailable) as error:
                raise self._failure(error) from error
            compile_cache.write(self._key, bytecode)
            self.origin = Origin.COMPILED
        assert self._fds is not None
        fds, self._fds = self._fds, None
        return fds

    def close(self) -> None:
        """Ends the compiling process, and closes the descriptors unless `wait` has returned them."""
        if self._compilation is not None:
            self._compilation.close()
        if self._fds is not None:
            close(self._fds)
