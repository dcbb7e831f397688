"""Calibrates Mesa's Vulkan driver while recording, where iaprof does not know its build: no command is needed for it.

A child of root's calibrates the file (calibrate.py) and keeps its layout; the driver itself runs in that child's own
child, without rights. What is run must be root's, in root's own mounts: no code of a container, and none of a file
system that root mounted without trusting what is on it, is run here unless somebody asks for it.

Intel's other drivers are not calibrated this way. That takes four processes for seconds, and a command can be recorded
meanwhile by injection.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import iaprof
from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import is_untrusted, make_public_folder, open_regular, replace_file
from iaprof.bpf import driver_layout
from iaprof.bpf.probes.libraries import is_vulkan
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.sandbox.worker import Closing, Worker
from iaprof.symbols.names.boot import boot_id

SECONDS = 10.0  # for one build; it takes one or two
WILL_CALIBRATE = "is calibrated when a recording of Intel's GPUs begins, in a second or two"
_MOST_BUILDS = 4  # of one recording
_SECONDS_TO_END = 2.0  # for a child that removes what it has made
_MOST_BYTES = 1 << 16  # of a file with a refusal, and of an answer
_MOUNT = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


def refusal(file: int, build_id: str) -> str:
    """Returns why a driver is not calibrated unasked, a clause about it; an empty string if it is.

    Args:
        file: descriptor of the driver.
        build_id: its build-id, in hexadecimal; empty if it has none.
    """
    if not build_id:
        return "it has no build-id"
    try:
        if is_untrusted(os.fstat(file)):
            return "users other than root can change it"
        if os.fstatvfs(file).f_flag & os.ST_NOSUID:
            return "its file system is mounted nosuid, so what is on it may not be root's"
        if _mount_of(file) not in _our_mounts():
            return "it is in a container, or another file system that is mounted for a process only"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return _earlier_refusal(build_id)


def _mount_of(file: int) -> str:
    found = _MOUNT.search(Path(f"/proc/self/fdinfo/{file}").read_text())
    return found[1] if found else ""


def _our_mounts() -> set[str]:
    return {line.split(" ", 1)[0] for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()}


def _problem_file(build_id: str) -> Path:
    return driver_layout.CACHE / f"{build_id}.problem"


def _earlier_refusal(build_id: str) -> str:
    """Returns why it could not be calibrated, since this machine was started, by this version of iaprof."""
    try:
        with open_regular(str(_problem_file(build_id))) as file:
            if is_untrusted(os.fstat(file.fileno())):
                return ""
            told = json.loads(file.read(_MOST_BYTES))
        same = told["boot_id"] == boot_id() and told["iaprof"] == iaprof.__version__
        return clean(str(told["problem"])) if same else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remember_refusal(build_id: str, problem: str) -> None:
    told = {"boot_id": boot_id(), "iaprof": iaprof.__version__, "problem": problem}
    with contextlib.suppress(OSError, IaprofError):
        make_public_folder(driver_layout.CACHE)
        with replace_file(_problem_file(build_id), mode=0o644) as file:
            file.write(json.dumps(told).encode())
            os.fchown(file.fileno(), 0, 0)


def child(library: str, file: str) -> None:
    """Is the child: calibrates the open driver `file`, a descriptor, and answers on descriptor 0 with one message."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends after it has removed what it made
    from iaprof.record.calibrate.calibrate import CalibrationError, calibrate, store  # they load the search

    answer = {}
    try:
        try:
            found = calibrate(Path(library), int(file), SECONDS)
            store(found.layout, None)
        except CalibrationError as error:
            answer = {"problem": error.problem}
        except IaprofError as error:  # there is no room for the layout
            answer = {"problem": str(error)}
        with socket.socket(fileno=0) as channel:
            channel.send(json.dumps(answer).encode())
    except KeyboardInterrupt:
        os._exit(1)


class Calibrator(Closing):
    """Calibrates drivers one after the other, while other things go on; also a context manager."""

    def __init__(self) -> None:
        """Calibrates nothing yet."""
        self._waiting: list[tuple[str, str, int]] = []  # path, build-id, descriptor
        self._current: tuple[str, str, int] | None = None
        self._outdated: set[str] = set()  # build-ids whose layout is from an older iaprof
        self._child: Worker | None = None
        self._since = 0.0
        self._taken: set[str] = set()  # build-ids
        self._problems: dict[str, str] = {}  # by build-id
        self.told: list[str] = []  # sentences about what was calibrated
        self.begun: Callable[[int], None] = lambda _: None
        """Is called with the descriptor that is readable when a child has answered."""
        self.ending: Callable[[int], None] = lambda _: None
        """Is called with it before it is closed."""

    def take(self, file: int, path: str, build_id: str) -> str:
        """Begins to calibrate an open driver whose build is not known, or not to this version, unless that is refused.

        Args:
            file: its descriptor.
            path: as messages have it.
            build_id: in hexadecimal; empty if it has none.

        Returns:
            What happens, for a sentence that begins with "its build is not known".
        """
        if not is_vulkan(path):
            return ""
        why = self._problems.get(build_id) or refusal(file, build_id)
        if not why and build_id not in self._taken and len(self._taken) >= _MOST_BUILDS:
            why = f"a recording calibrates no more than {_MOST_BUILDS} builds"
        if why:
            return f", so what programs dispatch is not recorded: {why}; run 'sudo iaprof calibrate LIBRARY'"
        if build_id not in self._taken:
            self._taken.add(build_id)
            if driver_layout.find_layout(build_id) is not None:
                self._outdated.add(build_id)
            self._waiting.append((os.readlink(f"/proc/self/fd/{file}"), build_id, os.dup(file)))
            self._begin_next()
        return "; it is being calibrated, and what programs dispatch is recorded from then on"

    def _begin_next(self) -> None:
        if self._current or not self._waiting:
            return
        self._current = self._waiting.pop(0)
        path, _, file = self._current
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if name in os.environ}
        try:
            self._child = Worker(
                "iaprof.record.kernels.calibrating:child",
                path,
                file,
                channel=socket.SOCK_SEQPACKET,
                files=(file,),
                environment=kept,
            )
        except OSError as error:
            self._end({"problem": f"no process can be started for it ({error.strerror})"})
            return
        self._since = time.monotonic()
        self.begun(self._child.channel.fileno())

    def fileno(self) -> int | None:
        """Returns the descriptor that is readable when a child has answered; None if none works."""
        return self._child.channel.fileno() if self._child else None

    def read(self) -> str:
        """Reads the answer of a child, and begins the next one; returns the calibrated driver's path, or ''."""
        if self._child is None or self._current is None:
            return ""
        try:
            answer, _ = self._child.receive()
        except (OSError, ValueError):
            answer = {"problem": "its process ends without an answer"}
        return self._end(answer)

    def _end(self, answer: Any) -> str:
        assert self._current is not None
        path, build_id, file = self._current
        os.close(file)
        self._current = None
        self._close_child()
        problem = answer.get("problem", "") if isinstance(answer, dict) else "its answer makes no sense"
        known = "known to an older iaprof only" if build_id in self._outdated else "not known"
        if problem:
            self._problems[build_id] = str(problem)
            _remember_refusal(build_id, str(problem))
            self.told.append(f"{path}: its build is {known}, and cannot be calibrated: {problem}")
        else:
            took = time.monotonic() - self._since
            self.told.append(f"{path}: its build was {known}, and was calibrated in {took:.1f} s")
        self._begin_next()
        return "" if problem else path

    def take_installed(self, paths: Iterable[Path]) -> None:
        """Begins to calibrate those of these files that are drivers that this version does not know, or not all of."""
        for path in paths:
            with contextlib.suppress(OSError, IaprofError), open_regular(str(path)) as file:
                build_id = LibraryFile(file).build_id()
                layout = driver_layout.find_layout(build_id)
                if build_id and (layout is None or layout.is_outdated):
                    self.take(file.fileno(), str(path), build_id)

    def wait(self, check: Callable[[], object]) -> None:
        """Waits until all children have answered, each for a limited time.

        Args:
            check: is called meanwhile, and may raise.
        """
        while self._child is not None:
            ready, _, _ = select.select([self._child.channel], [], [], 0.05)
            check()
            if ready:
                self.read()
            elif time.monotonic() > self._since + SECONDS + _SECONDS_TO_END:
                self._end({"problem": f"it has not ended after {SECONDS:.0f} s"})

    def _close_child(self) -> None:
        if self._child is None:
            return
        child, self._child = self._child, None
        self.ending(child.channel.fileno())
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGTERM)
        child.wait(_SECONDS_TO_END)
        child.close()

    def close(self) -> None:
        """Ends what works still."""
        for _, _, file in (*self._waiting, *([self._current] if self._current else ())):
            os.close(file)
        self._waiting, self._current = [], None
        self._close_child()
