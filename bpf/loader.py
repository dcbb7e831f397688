"""Creates the maps and loads the BPF programs that ship; if the kernel refuses these, compiles the programs here."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

from iaprof.bpf import cache
from iaprof.bpf.bytecode import BpfUnavailable, Bytecode, BytecodeError, Map, from_text
from iaprof.bpf.compile.compilation import Compilation, Interruption
from iaprof.bpf.compile.compiler import bcc_version
from iaprof.bpf.maps import create_map, write_slot
from iaprof.bpf.programs import (
    PHASES,
    SAMPLE_PROGRAMS,
    SESSION_COPIES,
    SESSION_PROGRAMS,
    WHEN_NEEDED,
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


class _VerifierRefusal(OSError):
    """The kernel's verifier refuses a program."""


class Programs:
    """Maps and programs in the kernel, and those programs that are loaded when they are needed."""

    def __init__(self, fds: dict[str, int], codes: Mapping[str, bytes]) -> None:
        """Loads nothing yet.

        Args:
            fds: descriptors of the maps, by name.
            codes: the programs, by name.
        """
        self.fds = fds
        """Descriptors by the names of maps and loaded programs, close-on-exec; the caller closes them."""
        self._codes = codes

    def need(self, names: Iterable[str]) -> None:
        """Loads programs, and those that are loaded together with them (WHEN_NEEDED), unless they are.

        Raises:
            OSError: no permission, no memory, or the verifier refuses one.
        """
        wanted = {each for name in names for each in WHEN_NEEDED.get(name, (name,))} - self.fds.keys()
        codes = {name: code for name, code in self._codes.items() if name in wanted}
        if not codes:
            return
        _load_programs(codes, self.fds)
        for phases, members in PHASES.items():
            for phase, member in members.items():
                if member in self.fds and phases in self.fds:  # also what was loaded when another one was refused
                    write_slot(self.fds[phases], phase, struct.pack("<I", self.fds[member]))


def load(
    bytecode: Bytecode, constants: Mapping[str, int], entries: Mapping[str, int], without: Collection[str] = ()
) -> Programs:
    """Creates the maps and loads the programs, but for those of WHEN_NEEDED.

    Args:
        bytecode: maps and programs.
        constants: values by name.
        entries: sizes of maps in elements (ring buffers: bytes), by name; other maps have the size in `bytecode`.
        without: names of programs that are never loaded.

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
        loaded = Programs(
            fds,
            {
                name: program.linked(for_sessions if name in SESSION_COPIES else maps, constants)
                for name, program in programs.items()
                if name not in without
            },
        )
        loaded.need(programs.keys() - WHEN_NEEDED.keys() - set(without))
    except _VerifierRefusal:
        close(fds)
        raise
    except OSError as error:
        close(fds)
        raise BpfUnavailable(_explain(error)) from error
    return loaded


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
        self._programs: Programs | None = None
        self._compilation: Compilation | None = None
        try:
            self._programs = self._load(shipped())
        except (_VerifierRefusal, BytecodeError) as refusal:
            if linux_version() < COOKIES_SINCE:
                raise BpfUnavailable(TOO_OLD) from refusal
            self._refusal = refusal
            try:
                self._load_cached()
            except BpfUnavailable as error:
                raise self._failure(error) from error

    def _load(self, bytecode: Bytecode) -> Programs:
        try:
            return load(bytecode, self._constants, self._entries, self._without)
        except _VerifierRefusal:
            if not self._constants["ITERATES"]:
                raise
            self._constants = {**self._constants, **WITHOUT_ITERATORS}
            return load(bytecode, self._constants, self._entries, self._without)

    def _load_cached(self) -> None:
        self._source = source()
        self._name = cache.name_of(self._source.digest(), bcc_version() or "none")
        if cached := cache.read(self._name):
            with contextlib.suppress(_VerifierRefusal, BytecodeError):
                self._programs = self._load(from_text(cached))
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

    def wait(self, interruption: Interruption | None = None) -> Programs:
        """Waits until programs are loaded, and returns what `load` does; may be called only once.

        Args:
            interruption: its `check` may raise an exception to end the wait.

        Raises:
            BpfUnavailable: something is missing; the text says how to get it.
        """
        if self._compilation is not None:
            try:
                bytecode = self._compilation.wait(interruption)
                self._programs = self._load(bytecode)
            except (_VerifierRefusal, BytecodeError, BpfUnavailable) as error:
                raise self._failure(error) from error
            cache.write(self._name, bytecode.to_text())
            self.origin = Origin.COMPILED
        assert self._programs is not None
        programs, self._programs = self._programs, None
        return programs

    def close(self) -> None:
        """Ends the compiling process, and closes the descriptors unless `wait` has returned them."""
        if self._compilation is not None:
            self._compilation.close()
        if self._programs is not None:
            close(self._programs.fds)
