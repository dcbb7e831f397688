"""Names from the ELF files of this machine, for reports. Only files with the build-id of the module are used.

Paths come from captures, which may be hostile. So a path is opened only if it is a regular file, and the file is read
in a sandbox.
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

from iaprof.basics.elf import MAGIC
from iaprof.formats.file_names import possible_names
from iaprof.symbols.names.names import DEBUG_INFORMATION, SYMBOL_TABLE, Module, ModuleKind, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError, Companions, Facts
from iaprof.symbols.symbolizers.debug_files import Candidate, build_id_path, debug_files
from iaprof.symbols.symbolizers.debuginfod import Debuginfod, Kind

_SHORTEST_BUILD_ID, _LONGEST_BUILD_ID = 2, 64  # bytes; .build-id folders have no names for others
_MOST_ENTRIES, _SCAN_SECONDS = 100_000, 20.0  # for all symbol folders together; an ELF file takes 1 to 6 ms
_MOST_COPIES = 8  # tried for one build-id
_MOST_PROBLEMS = 8  # shown for one file
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL}
_HANDLE = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SYS_OPENAT2 = 437  # x86-64 and all others
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10  # linux/openat2.h


class LocalFiles:
    """A Symbolizer for files."""

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
            symfs: the folder that replaces the root folder for the modules' paths; links in it cannot lead out of it.
            symbol_dirs: folders with files of any name.
            debuginfod: servers to ask for files that are not here.
            everything: name every function of each file, not only the given addresses.
        """
        self._binaries, self._debuginfod, self._everything = binaries, debuginfod, everything
        self._symfs = None if symfs is None else symfs.absolute()
        self._symbol_dirs = [folder.absolute() for folder in symbol_dirs]
        self._scanned: dict[bytes, list[Path]] | None = None  # files in the symbol folders, by build-id
        self._scan_problem = ""  # a sentence if not all files were scanned

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized | None:
        """See Symbolizer."""
        if module.kind is not ModuleKind.FILE:
            return None
        build_id = module.build_id
        if build_id is None or not _SHORTEST_BUILD_ID <= len(build_id) <= _LONGEST_BUILD_ID:
            return Symbolized(problem="it has no build-id, without which nothing tells whether a file here is the same")
        with contextlib.ExitStack() as opened:
            search = _Search(build_id, opened)
            self._search_folders(module.path, search)
            if not search.is_complete:
                self._search_further(module.path, search)
            main, debug = search.main, search.debug
            if main is None:
                if debug is not None:
                    search.problems.append(f"{debug.path} has only its debug information: the file itself is needed")
                return Symbolized(problem=search.problem or f"no file with its build-id ({build_id.hex()}) was found")
            if debug is None and search.facts is not None and not search.facts.has_symbols:
                search.problems.append(f"{main.path} is stripped, and no debug information of it was found")
            file = None if debug is None else debug.file
            companions = Companions(main.path if os.path.isabs(main.path) else module.path, self._open_companion)
            symbolized = self._binaries.name(main.file, addresses, file, self._everything, companions)
        is_from_debug = any(source in symbolized.source for source in (DEBUG_INFORMATION, SYMBOL_TABLE))
        path = debug.path if debug is not None and is_from_debug else main.path
        problems = "; ".join(problem for problem in (symbolized.problem, search.problem) if problem)
        source = f"{symbolized.source} of {path}" if symbolized.source else ""
        return Symbolized(
            symbolized.names,
            source,
            problems,
            symbolized.frame_pointers,
            symbolized.outermost,
            symbolized.no_calls,
        )

    def _search_folders(self, path: str, search: _Search) -> None:
        """Looks for the file and its debug information at its path and in the user's folders."""
        for place in self._places(path, search.build_id):
            if search.is_complete:
                return
            file = self._open(place)
            if isinstance(file, str):
                search.problems += [f"{place} {file}"] if file else []
                continue
            self._consider(Candidate(file, str(place)), search)
        if self._scan_problem:
            search.problems.append(self._scan_problem)

    def _search_further(self, path: str, search: _Search) -> None:
        """Asks servers for the file, then looks for its debug information on the system and asks servers for it."""
        if search.main is None:
            self._ask_servers(Kind.EXECUTABLE, search)
        if search.main is None or search.facts is None or search.is_complete:
            return
        roots = [*([self._symfs] if self._symfs is not None else []), Path("/")]
        for name in dict.fromkeys(name for name in (path, search.main.path) if os.path.isabs(name)):
            for debug in debug_files(name, search.facts, roots, self._opened, self._binaries, self._symbol_dirs):
                search.opened.callback(os.close, debug.file)
                search.debug = debug
                return
        self._ask_servers(Kind.DEBUG_INFO, search)

    def _ask_servers(self, kind: Kind, search: _Search) -> None:
        if self._debuginfod is None:
            return
        candidate = self._debuginfod.find(search.build_id, kind, self._binaries, search.problems)
        if candidate is not None:
            self._consider(candidate, search)

    def _consider(self, candidate: Candidate, search: _Search) -> None:
        """Takes an open file as the file itself or its debug file, or closes it."""
        with contextlib.ExitStack() as unused:
            unused.callback(os.close, candidate.file)
            try:
                facts = self._binaries.facts(candidate.file)
            except BinaryError as error:
                search.problems.append(f"{candidate.path}: {error}")
                return
            if facts.build_id != search.build_id:
                has = f"build-id {facts.build_id.hex()}" if facts.build_id is not None else "without a build-id"
                search.problems.append(f"{candidate.path} is another build ({has})")
            elif search.takes(candidate, facts):
                search.opened.push(unused.pop_all())

    def _places(self, path: str, build_id: bytes) -> Iterator[Path]:
        """Yields the paths where the file or its debug file may be, the likeliest first."""
        inside = path.lstrip("/")
        yield (self._symfs or Path("/")) / inside
        link = build_id_path(build_id)
        for folder in self._symbol_dirs:
            yield folder / link
            yield folder / link.with_name(f"{link.name}.debug")
            if ".." not in inside.split("/"):  # links may lead out of a symbol folder, paths of a capture must not
                yield folder / os.path.basename(inside)
                yield folder / inside
        if self._scanned is None:
            self._scanned = self._scan()
        yield from self._scanned.get(build_id, ())

    def _scan(self) -> dict[bytes, list[Path]]:
        """Returns the ELF files in the symbol folders by build-id; stops early if the folders have too many files."""
        paths: defaultdict[bytes, list[Path]] = defaultdict(list)
        folders = deque(self._symbol_dirs)
        end = time.monotonic() + _SCAN_SECONDS
        entries = 0
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.popleft()) as listed:
                for entry in sorted(itertools.islice(listed, _MOST_ENTRIES - entries), key=lambda entry: entry.name):
                    entries += 1
                    if entries == _MOST_ENTRIES or time.monotonic() > end:
                        self._scan_problem = "the symbol folders have more files than are looked through"
                        return paths
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                        continue
                    build_id = self._build_id(Path(entry.path))
                    if build_id is not None and len(paths[build_id]) < _MOST_COPIES:
                        paths[build_id].append(Path(entry.path))
        return paths

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

    def _open_companion(self, path: str) -> int | None:
        """Opens a file at its path, below --symfs first."""
        places = [Path(path), *([self._symfs / path.lstrip("/")] if self._symfs is not None else [])]
        return next((file for place in places[::-1] if (file := self._opened(place)) is not None), None)

    def _opened(self, path: Path) -> int | None:
        file = self._open(path)
        return None if isinstance(file, str) else file

    def _open(self, path: Path) -> int | str:
        """Opens a regular file for reading; returns why if it cannot be opened, empty if it does not exist."""
        file_or_reason: int | str = ""
        for name in possible_names(str(path)):
            file_or_reason = self._open_name(Path(os.fsdecode(name)))
            if file_or_reason != "":
                break
        return file_or_reason

    def _open_name(self, path: Path) -> int | str:
        try:
            if self._symfs is not None and path.is_relative_to(self._symfs):
                handle = _open_below(self._symfs, path.relative_to(self._symfs))
            else:
                handle = os.open(path, _HANDLE)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return "is not a regular file"
                return os.open(f"/proc/self/fd/{handle}", _READ)
            finally:
                os.close(handle)
        except ValueError:  # the path has a zero byte, or characters that no file name can have
            return ""
        except OSError as error:
            return "" if error.errno in _NO_FILE else f"cannot be opened: {error.strerror}"


class _Search:
    """The files found so far for one build-id."""

    def __init__(self, build_id: bytes, opened: contextlib.ExitStack) -> None:
        self.build_id = build_id
        self.opened = opened  # closes the files
        self.problems: list[str] = []
        self.main: Candidate | None = None
        self.debug: Candidate | None = None
        self.facts: Facts | None = None  # of `main`

    @property
    def is_complete(self) -> bool:
        """Whether the file is found, and debug information of it."""
        return self.facts is not None and (self.facts.has_debug_info or self.debug is not None)

    @property
    def problem(self) -> str:
        """All problems as one sentence."""
        return "; ".join(dict.fromkeys(self.problems[:_MOST_PROBLEMS]))

    def takes(self, candidate: Candidate, facts: Facts) -> bool:
        """Takes a file of the build for its code or for its debug information; False if it is needed for neither."""
        if self.main is None and facts.has_code:
            self.main, self.facts = candidate, facts
            self.problems.clear()  # of other places, which no longer matter
        elif self.debug is None and facts.has_debug_info:
            self.debug = candidate
        else:
            return False
        return True


def _open_below(root: Path, path: Path) -> int:
    """Opens a file below a folder with O_PATH: it cannot be read. Links and `..` cannot lead out of the folder."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = struct.pack("<QQQ", _HANDLE, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_IN_ROOT)
        libc = ctypes.CDLL(None, use_errno=True)
        name = os.fsencode(path)
        if b"\0" in name:  # the system call would take the part before it for the name
            raise ValueError
        handle: int = libc.syscall(
            ctypes.c_long(_SYS_OPENAT2), folder, ctypes.c_char_p(name), how, ctypes.c_size_t(len(how))
        )
        if handle < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return handle
    finally:
        os.close(folder)
