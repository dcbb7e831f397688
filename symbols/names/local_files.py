"""Names from the ELF files of this machine, for a report: of a module only a file with its build-id counts.

Paths come from captures, which may be anyone's. So what lies at one is opened only when it is a regular file, and is
read in a sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.elf import MAGIC
from iaprof.symbols.files.debug_files import Candidate, build_id_path, debug_files
from iaprof.symbols.files.debuginfod import Debuginfod, Kind
from iaprof.symbols.names.binaries import Binaries, BinaryError, Facts
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import Named
from iaprof.symbols.names.sources import DYNAMIC_SYMBOLS

_SHORTEST_BUILD_ID, _LONGEST_BUILD_ID = 2, 64  # bytes; others make no file names
_MOST_ENTRIES, _SCAN_SECONDS = 100_000, 20.0  # of all symbol folders together; an ELF file takes 1 to 6 ms
_MOST_COPIES = 8  # of one build that are looked at
_MOST_PROBLEMS = 8  # that are told of one file
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL}
_HANDLE = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SYS_OPENAT2 = 437  # x86-64 and all others
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10  # linux/openat2.h


class LocalFiles:
    """A Naming for files."""

    def __init__(
        self,
        binaries: Binaries,
        symfs: Path | None,
        symbol_dirs: Sequence[Path],
        debuginfod: Debuginfod | None,
        everything: bool = False,
    ) -> None:
        """Looks at nothing yet.

        Args:
            binaries: reads the files.
            symfs: looked in for what the modules' paths name, instead of this machine's root; links do not lead out.
            symbol_dirs: folders with files by any name.
            debuginfod: servers to ask for what is not here.
            everything: names every function of each file, not only the addresses that are asked for.
        """
        self._binaries, self._debuginfod, self._everything = binaries, debuginfod, everything
        self._symfs = None if symfs is None else symfs.absolute()
        self._symbol_dirs = [folder.absolute() for folder in symbol_dirs]
        self._scanned: dict[bytes, list[Path]] | None = None
        self._unscanned = ""  # what to say of files that were not looked at

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Named | None:
        """See Naming."""
        if module.kind is not ModuleKind.FILE:
            return None
        build_id = module.build_id
        if build_id is None or not _SHORTEST_BUILD_ID <= len(build_id) <= _LONGEST_BUILD_ID:
            return Named(problem="it has no build-id, without which nothing tells whether a file here is the same")
        with contextlib.ExitStack() as opened:
            search = _Search(build_id, opened)
            self._look_in_folders(module.path, search)
            if not search.is_complete:
                self._look_on(module.path, search)
            main, debug = search.main, search.debug
            if main is None:
                if debug is not None:
                    search.problems.append(f"{debug.path} has only its debug information: the file itself is needed")
                return Named(problem=search.problem or f"no file with its build-id ({build_id.hex()}) was found")
            if debug is None and search.facts is not None and not search.facts.has_symbols:
                search.problems.append(f"{main.path} is stripped, and no debug information of it was found")
            file = None if debug is None else debug.file
            named = self._binaries.name(main.file, addresses, file, self._everything)
        where = debug.path if debug is not None and named.source != DYNAMIC_SYMBOLS else main.path
        problems = "; ".join(each for each in (named.problem, search.problem) if each)
        source = f"{named.source} of {where}" if named.source else ""
        return Named(named.names, source, problems, named.frame_pointers, named.outermost, named.no_calls)

    def _look_in_folders(self, path: str, search: _Search) -> None:
        """For the file and for debug information of it, where people put them."""
        for place in self._places(path, search.build_id):
            if search.is_complete:
                return
            file = self._open(place)
            if isinstance(file, str):
                search.problems += [f"{place} {file}"] if file else []
                continue
            self._consider(Candidate(file, str(place)), search)
        if self._unscanned:
            search.problems.append(self._unscanned)

    def _look_on(self, path: str, search: _Search) -> None:
        """Asks servers for the file; then for its debug information the system, and servers."""
        if search.main is None:
            self._ask(Kind.EXECUTABLE, search)
        if search.main is None or search.facts is None or search.is_complete:
            return
        roots = [*([self._symfs] if self._symfs is not None else []), Path("/")]
        for each in dict.fromkeys(each for each in (path, search.main.path) if os.path.isabs(each)):
            for found in debug_files(each, search.facts, roots, self._opened, self._binaries, self._symbol_dirs):
                search.opened.callback(os.close, found.file)
                search.debug = found
                return
        self._ask(Kind.DEBUG_INFO, search)

    def _ask(self, kind: Kind, search: _Search) -> None:
        if self._debuginfod is None:
            return
        found = self._debuginfod.find(search.build_id, kind, self._binaries, search.problems)
        if found is not None:
            self._consider(found, search)

    def _consider(self, found: Candidate, search: _Search) -> None:
        """Takes an open file for what it is good for, or closes it."""
        with contextlib.ExitStack() as unused:
            unused.callback(os.close, found.file)
            try:
                facts = self._binaries.facts(found.file)
            except BinaryError as error:
                search.problems.append(f"{found.path}: {error}")
                return
            if facts.build_id != search.build_id:
                has = f"build-id {facts.build_id.hex()}" if facts.build_id is not None else "without a build-id"
                search.problems.append(f"{found.path} is another build ({has})")
            elif search.takes(found, facts):
                search.opened.push(unused.pop_all())

    def _places(self, path: str, build_id: bytes) -> Iterator[Path]:
        """Where the file may be, the likeliest first."""
        inside = path.lstrip("/")
        yield (self._symfs or Path("/")) / inside
        link = build_id_path(build_id)
        for folder in self._symbol_dirs:
            yield folder / link
            yield folder / link.with_name(f"{link.name}.debug")
            if ".." not in inside.split("/"):  # there links may lead out of the folder, a capture's paths may not
                yield folder / os.path.basename(inside)
                yield folder / inside
        if self._scanned is None:
            self._scanned = self._scan()
        yield from self._scanned.get(build_id, ())

    def _scan(self) -> dict[bytes, list[Path]]:
        """The ELF files in the symbol folders by build-id; not all, where there are too many."""
        found: defaultdict[bytes, list[Path]] = defaultdict(list)
        folders = deque(self._symbol_dirs)
        end = time.monotonic() + _SCAN_SECONDS
        entries = 0
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.popleft()) as listed:
                for entry in sorted(itertools.islice(listed, _MOST_ENTRIES - entries), key=lambda each: each.name):
                    entries += 1
                    if entries == _MOST_ENTRIES or time.monotonic() > end:
                        self._unscanned = "the symbol folders have more files than are looked through"
                        return found
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                        continue
                    build_id = self._build_id(Path(entry.path))
                    if build_id is not None and len(found[build_id]) < _MOST_COPIES:
                        found[build_id].append(Path(entry.path))
        return found

    def _build_id(self, path: Path) -> bytes | None:
        file = self._opened(path)
        if file is None:
            return None
        try:
            return self._binaries.facts(file).build_id if os.pread(file, 4, 0) == MAGIC else None
        except (BinaryError, OSError):
            return None
        finally:
            os.close(file)

    def _opened(self, path: Path) -> int | None:
        file = self._open(path)
        return None if isinstance(file, str) else file

    def _open(self, path: Path) -> int | str:
        """A regular file for reading; else why it is not opened, empty where there is none."""
        try:
            if self._symfs is not None and path.is_relative_to(self._symfs):
                handle = _open_below(self._symfs, path.relative_to(self._symfs))
            else:
                handle = os.open(path, _HANDLE)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return "is no regular file"
                return os.open(f"/proc/self/fd/{handle}", _READ)
            finally:
                os.close(handle)
        except ValueError:  # a zero byte, or what no file name can be made of
            return ""
        except OSError as error:
            return "" if error.errno in _NO_FILE else f"cannot be opened: {error.strerror}"


class _Search:
    """What was found of one build so far."""

    def __init__(self, build_id: bytes, opened: contextlib.ExitStack) -> None:
        self.build_id = build_id
        self.opened = opened  # closes what is found
        self.problems: list[str] = []
        self.main: Candidate | None = None
        self.debug: Candidate | None = None
        self.facts: Facts | None = None  # of `main`

    @property
    def is_complete(self) -> bool:
        """Whether nothing better can be found."""
        return self.facts is not None and (self.facts.has_debug_info or self.debug is not None)

    @property
    def problem(self) -> str:
        """All problems as one sentence."""
        return "; ".join(dict.fromkeys(self.problems[:_MOST_PROBLEMS]))

    def takes(self, found: Candidate, facts: Facts) -> bool:
        """Whether a file of the build is taken: for its code's addresses, or for its debug information."""
        if self.main is None and facts.has_code:
            self.main, self.facts = found, facts
            self.problems.clear()  # it is found
        elif self.debug is None and facts.has_debug_info:
            self.debug = found
        else:
            return False
        return True


def _open_below(root: Path, path: Path) -> int:
    """A handle that nothing can be read from, of a file below a folder; links and `..` do not lead out of that."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = struct.pack("<QQQ", _HANDLE, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_IN_ROOT)
        libc = ctypes.CDLL(None, use_errno=True)
        name = os.fsencode(path)
        if b"\0" in name:  # the system call would open what is named before it
            raise ValueError
        handle: int = libc.syscall(
            ctypes.c_long(_SYS_OPENAT2), folder, ctypes.c_char_p(name), how, ctypes.c_size_t(len(how))
        )
        if handle < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return handle
    finally:
        os.close(folder)
