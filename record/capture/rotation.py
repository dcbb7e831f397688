"""The files of a recording: who makes captures of spools, when the output is rotated, and which files are removed.

The recording always goes to CAPTURE.spool. An earlier part becomes a capture of its own, named by the time of its end,
while recording goes on. The last part has the name that the user gave.

`cap.parquet` has `cap.20261121-0554231.parquet`, also from recordings before this one: a service that restarts must not
fill the disk. Only regular files with such a name in the output's folder count, and links are not followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import folder_descriptor, regular_file, regular_files, remove, rename
from iaprof.basics.quantities import in_bytes
from iaprof.formats.header.budgets import REMOVED_FILES, RemovedFiles
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.spool import Spool
from iaprof.record.symbolize.roots import Roots
from iaprof.sandbox.memory import MALLOC_ENVIRONMENT
from iaprof.sandbox.worker import Worker
from iaprof.symbols.names.which import Symbols


class Finisher:
    """One process that makes a capture, from its start to its answer."""

    def __init__(
        self, spool: Spool, symbols: Symbols, state_fd: int | None = None, roots: Mapping[int, int] | None = None
    ) -> None:
        """Starts the process, which waits for `go`.

        Args:
            spool: the spool to read.
            symbols: which names the capture gets.
            state_fd: descriptor of a file for the rotation state; None if no output file follows.
            roots: descriptors of root folders, by process: see Roots.by_process.

        Raises:
            IaprofError: the process cannot be started.
        """
        self._spool, self._state_fd, self._folder = spool, state_fd, folder_descriptor(spool.path)
        self._symbols, self._roots = symbols, dict(roots or {})
        self._answer: dict[str, Any] | None = None
        self._line = b""  # the last line, as far as it has come
        self.naming: tuple[int, int] | None = None  # modules named so far, and all of them; None before naming begins
        fds = [spool.fileno(), self._folder, *([] if state_fd is None else [state_fd]), *set(self._roots.values())]
        try:
            self._child = Worker(
                "iaprof.record.capture.finish:main",
                channel=socket.SOCK_STREAM,
                files=fds,
                environment=os.environ | MALLOC_ENVIRONMENT,
            )
        except OSError as error:
            raise IaprofError(f"the process that finishes captures cannot be started: {error.strerror}") from error

    def go(self, output: Path) -> None:
        """Has the capture made, in the spool's folder."""
        request = {
            "spool": self._spool.fileno(),
            "rotation_state": self._state_fd,
            "folder": self._folder,
            "output": str(output.absolute()),
            "symbols": self._symbols.value,
            "roots": self._roots,
        }
        with contextlib.suppress(OSError):  # the process has died: `result` reports it
            self._child.channel.sendall(json.dumps(request).encode() + b"\n")

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `read` has something to read."""
        return self._child.channel.fileno()

    def read(self) -> bool:
        """Reads some of the process's messages; returns whether they have ended."""
        try:
            data = self._child.channel.recv(1 << 16)
        except ConnectionError:  # the process died before it read the request
            data = b""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "naming" in message:
                self.naming = tuple(message["naming"])
            else:
                self._answer = message
        return not data

    def skip_names(self) -> None:
        """Ends the naming: the capture gets the names found so far."""
        self._child.send_signal(signal.SIGINT)

    def result(self) -> tuple[dict[str, Any], int]:
        """Waits for the capture; returns its header and bytes.

        Raises:
            IaprofError: the capture could not be made; no part of it is left, and the spool stays.
        """
        while not self.read():
            pass
        self._child.wait()
        if self._answer is None:
            raise IaprofError(f"the process that finishes the capture died (exit status {self._child.status})")
        if "error" in self._answer:
            raise IaprofError(self._answer["error"])
        return self._answer["header"], self._answer["size"]

    def close(self) -> None:
        """Ends the process at once; an unfinished capture is removed."""
        self._child.channel.close()
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()


OnPart = Callable[[Path, dict[str, Any], int], None]


class Rotation:
    """Rotates the output of one recording."""

    def __init__(self, options: Options, journal: Journal, loop: Loop, roots: Roots, on_part: OnPart) -> None:
        """Begins with the first part.

        Args:
            options: when to rotate.
            journal: its spool is replaced.
            loop: tells when a part is finished.
            roots: of processes, with which files are opened when a part is finished.
            on_part: is called for each earlier part that is finished: path, header, bytes.
        """
        self._options, self._journal, self._loop, self._roots = options, journal, loop, roots
        self._on_part = on_part
        self._finisher: Finisher | None = None
        self.is_open = False
        """Whether stacks may still be added to the part that ended last: see `end_part`."""
        self.files = PartFiles(options.output, options.max_files, options.max_total, journal.inform, journal.warn)
        self.files.make_room()
        self._since = time.monotonic()
        self.number = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to rotate, and no part is being finished."""
        options = self._options
        if self._finisher is not None:
            return False
        large = options.switch_bytes is not None and self._journal.spool.size >= options.switch_bytes
        return large or (options.switch_s is not None and time.monotonic() - self._since >= options.switch_s)

    @property
    def is_under_way(self) -> bool:
        """Whether a part is being finished."""
        return self._finisher is not None

    def rotate(self) -> None:
        """Begins another part; `end_part` then ends the previous one.

        Raises:
            IaprofError: the disk is full, or writing failed otherwise.
        """
        output, old = self._options.output, self._journal.spool
        self._part = free_name(output, time.time())
        old.rename(spool_path(self._part))
        self._old = old
        self._state_fd = os.memfd_create("rotation-state", os.MFD_CLOEXEC)
        self._journal.switch_to(Spool(spool_path(output)))
        self._since = time.monotonic()
        self.number += 1
        self._finisher = Finisher(old, self._options.symbols, self._state_fd, self._roots.by_process())
        self.is_open = True

    def end_part(self) -> None:
        """Has the capture of the previous part made: nothing more is written to its spool."""
        assert self._finisher is not None
        self.is_open = False
        self._journal.end_previous()
        self._finisher.go(self._part)
        self._loop.wait_for(self._finisher.fileno(), self._read)

    def _read(self) -> None:
        assert self._finisher is not None
        if self._finisher.read():
            self._loop.forget(self._finisher.fileno())
            self._take_part()

    def wait(self) -> None:
        """Waits until no part is being finished."""
        if self.is_open:
            self.end_part()
        if self._finisher is not None:
            self._take_part()

    def _take_part(self) -> None:
        finisher, self._finisher = self._finisher, None
        assert finisher is not None
        try:
            header, size = finisher.result()
            self._journal.spool.take_over(self._state_fd)
            self._old.remove()
            self._on_part(self._part, header, size)
            self.files.add(self._part)
        except IaprofError as error:
            spool = self._old.path
            self._journal.warn(f"{error}; 'iaprof recover {spool}' makes the capture of that part")
        finally:
            finisher.close()
            self._old.close()
            os.close(self._state_fd)

    def close(self) -> None:
        """Ends the process that finishes a part, if there is one."""
        if self._finisher is not None:
            self._finisher.close()


_MOST_OF_A_TIME = 1000  # files whose names have the same time
Tell = Callable[[str], None]


def spool_path(output: Path) -> Path:
    """Returns the path of the spool of a capture."""
    return output.with_name(output.name + ".spool")


def free_name(output: Path, when: float) -> Path:
    """Returns an unused name: `cap.20261121-0554231.parquet` for `cap.parquet`. After the dash: time to 0.1 s.

    Args:
        output: the name that the user gave.
        when: the end of the recording in that file, seconds since 1970.

    Raises:
        IaprofError: there are too many files of that time.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(when)) + f"{int(when * 10) % 10}"
    for suffix in ("", *(f"-{number}" for number in range(2, _MOST_OF_A_TIME))):
        path = output.with_name(f"{output.stem}.{stamp}{suffix}{output.suffix}")
        if not os.path.lexists(path) and not os.path.lexists(spool_path(path)):
            return path
    raise IaprofError(f"the folder of {output} has too many files of that name")


def keep_earlier(output: Path) -> Path | None:
    """Gives a finished file that has the output's name the name of an earlier file, by when it was last changed.

    Returns:
        The new path; None if there is no such file.

    Raises:
        IaprofError: the file cannot be renamed; or what has the name is not a file of its own, but a link, for example.
    """
    try:
        found = regular_file(output)
        if found is None:
            if os.path.lexists(output):
                raise IaprofError(f"{output} is not a file: name another one with -o")
            return None
        path = free_name(output, min(max(found.st_mtime, 0), time.time()))
        rename(output, path)
    except OSError as error:
        raise IaprofError(f"{output} exists and cannot be renamed ({error.strerror}): move it away") from error
    return path


@dataclass(frozen=True)
class _PartFile:
    changed_ns: int
    path: Path
    bytes: int


class PartFiles:
    """Removes earlier files, the oldest first, so that what is left keeps to the limits that the user set."""

    def __init__(self, output: Path, most_files: int | None, most_bytes: int | None, tell: Tell, warn: Tell) -> None:
        """Removes nothing yet.

        Args:
            output: the name that the user gave.
            most_files: of this recording, with the last one, which is still to come; None for any number.
            most_bytes: of all files with such a name; None for any number.
            tell: gets a sentence for each file that is removed.
            warn: gets a sentence if files cannot be removed, once.
        """
        self._output, self._most_files, self._most_bytes = output, most_files, most_bytes
        self._tell, self._warn = tell, warn
        self._own: deque[Path] = deque()  # of this recording
        self._refused: set[Path] = set()
        self.removed = RemovedFiles()

    def header(self) -> dict[str, Any]:
        """Returns the members of an output file's header; none if there are no limits."""
        limited = self._most_files is not None or self._most_bytes is not None
        return {REMOVED_FILES: self.removed.to_json()} if limited else {}

    def add(self, path: Path) -> None:
        """Takes note of a file of this recording that is finished, and removes files that are too many."""
        self._own.append(path)
        while self._most_files is not None and len(self._own) > max(self._most_files - 1, 0):
            oldest = self._own.popleft()
            if (found := _status(oldest)) is not None:
                self._remove(_PartFile(found.st_mtime_ns, oldest, found.st_size), "--max-files")
        self.make_room()

    def make_room(self) -> None:
        """Removes files until the others fit into `most_bytes`."""
        if self._most_bytes is None:
            return
        try:
            files = sorted(self._all(), key=lambda file: (file.changed_ns, file.path.name))
        except OSError as error:
            self._warn_once(self._output.absolute().parent, f"--max-total: the folder cannot be read: {error.strerror}")
            return
        total = sum(file.bytes for file in files)
        for file in files:
            if total <= self._most_bytes:
                return
            if file is files[-1] and file.bytes > self._most_bytes:
                text = f"--max-total: {file.path.name} alone has {in_bytes(file.bytes)}, which is more than may be kept"
                self._warn_once(self._output, text)
            if self._remove(file, "--max-total"):
                total -= file.bytes

    def _all(self) -> Iterator[_PartFile]:
        name = re.compile(
            rf"{re.escape(self._output.stem)}\.\d{{8}}-\d{{7}}(-\d{{1,3}})?{re.escape(self._output.suffix)}"
        )
        for each, status in regular_files(self._output):
            if name.fullmatch(each):
                yield _PartFile(status.st_mtime_ns, self._output.with_name(each), status.st_size)

    def _remove(self, file: _PartFile, why: str) -> bool:
        """Removes a file, and counts it; returns whether it is gone."""
        try:
            remove(file.path)
        except OSError as error:
            self._warn_once(file.path, f"{why}: {file.path} cannot be removed: {error.strerror}")
            return False
        self.removed = self.removed.with_file(file.bytes)
        self._tell(f"{why}: removed {file.path.name}, {in_bytes(file.bytes)}")
        return True

    def _warn_once(self, about: Path, text: str) -> None:
        if about not in self._refused:
            self._refused.add(about)
            self._warn(text)


def _status(path: Path) -> os.stat_result | None:
    try:
        return regular_file(path)
    except OSError:
        return None
