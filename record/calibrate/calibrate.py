"""`iaprof calibrate`: finds the layout of any build of a Level Zero, OpenCL or Vulkan driver by running it.

The driver runs in a child process per device (child.py), which searches its own memory for what the driver's public
calls say. A path is accepted if it holds for every kernel on every device that the build supports, at least two. Of
several such paths, always the same one is chosen, so that a build has one layout. Mesa's Vulkan driver cannot simulate
a device: it runs on the machine's GPUs, in one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, is_untrusted, make_public_folder, replace_file
from iaprof.bpf.driver_layout import CACHE, Layout, LayoutError
from iaprof.bpf.probes.libraries import OPENCL, SYSTEM_FOLDERS, VULKAN, single_stepped_launches
from iaprof.bpf.probes.library_file import LibraryFile, ProbeError, exported
from iaprof.record.calibrate.answer import MAX_PROBLEM, Answer
from iaprof.record.calibrate.code import Code, Problem
from iaprof.record.calibrate.level_zero import level_zero_layout, read_level_zero
from iaprof.record.calibrate.opencl import opencl_layout, read_opencl
from iaprof.record.calibrate.opencl_driver import GPUS, OF_OPENCL
from iaprof.record.calibrate.vulkan import VulkanAnswer, read_vulkan, vulkan_layout
from iaprof.record.calibrate.vulkan_driver import OF_VULKAN
from iaprof.sandbox.privileges import NOBODY
from iaprof.sandbox.worker import Worker


class Kind(StrEnum):
    """The API of a driver, as in layouts."""

    LEVEL_ZERO = "level_zero"
    OPENCL = "opencl"
    VULKAN = "vulkan"


# The driver's names of devices, and their slices x subslices x EUs.
DEVICES = {"bmg": "5x4x8", "lnl": "1x8x8", "ptl-h": "3x4x8", "pvc": "2x8x8"}
LEAST_DEVICES = 2
SECONDS = 60.0  # for all devices; they take one or two

_MOST_BYTES = 1 << 30  # of a driver; NEO 26.27's have 60 MiB
_MFD_EXEC = 0x10  # linux/memfd.h; since Linux 6.3
_OTHER_WAYS = {
    Kind.LEVEL_ZERO: (
        "its launches can still be recorded with 'iaprof record --launches=inject -- COMMAND', or from a driver "
        "that has probes"
    ),
    Kind.OPENCL: "its launches can still be recorded with 'iaprof record --launches=inject -- COMMAND'",
    Kind.VULKAN: "stalls are recorded, but not what its programs dispatch",
}


_AnswerT = TypeVar("_AnswerT", bound=Answer)
_T = TypeVar("_T")


class CalibrationError(IaprofError):
    """No layout was found; the text says why, and how launches can be recorded without one."""

    def __init__(self, library: Path, problem: str, kind: Kind = Kind.LEVEL_ZERO) -> None:
        """Args: the library; a clause about it that says why; its kind."""
        super().__init__(f"{library} cannot be calibrated: {problem}; {_OTHER_WAYS[kind]}")
        self.problem = problem


@dataclass(frozen=True)
class Calibration:
    """A layout, and how it was found."""

    layout: Layout
    devices: tuple[str, ...]  # those that agree on it
    left_out: Mapping[str, str]  # by device, of the other devices: why it was left out
    single_stepped: tuple[str, ...]  # functions whose probes cost more: see formats.header.slow_launches
    no_own_kernels: str  # why the driver's own kernels, for copies and fills, are not recorded; empty if they are
    no_draws: str = ""  # the same of Vulkan's draws


def installed_driver() -> Path:
    """Returns the path of the driver that the machine's programs use.

    Raises:
        IaprofError: no driver is installed.
    """
    for folder in SYSTEM_FOLDERS:
        path = Path(folder, "libze_intel_gpu.so.1")
        if path.exists():
            return path
    raise IaprofError(
        "no Level Zero driver is installed (libze_intel_gpu.so.1): name the library that your programs use, or record "
        "them with 'iaprof record --launches=inject -- COMMAND'"
    )


def how(library: Path) -> str:
    """Says as which devices a driver will run."""
    return "on this machine's GPUs" if VULKAN in library.name else f"as {', '.join(DEVICES)}"


def calibrate(library: Path, opened: int | None = None, seconds: float | None = None) -> Calibration:
    """Finds the layout of a driver.

    Args:
        library: its path.
        opened: its descriptor, if nobody has asked for this: its system's dynamic linker is then run only where
            set-user-ID programs of root would be. It is closed.
        seconds: the time limit, in place of SECONDS.

    Raises:
        CalibrationError: a stranger can change the library, it does not run here, or no layout was found.
    """
    kind = _kind_of_name(library.name)  # for errors until it was read
    seconds = SECONDS if seconds is None else seconds
    try:
        is_asked = opened is None
        fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY) if opened is None else opened
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Problem("it is not a file")
            _check_owner(status)
            elf = LibraryFile(file)
            build_id = elf.build_id()
            if not build_id:
                raise Problem("it has no build-id")
            kind = _kind(elf)

            def layout_from(
                read: Callable[[Any], _AnswerT], layout_of: Callable[[str, Code, Sequence[_AnswerT]], Layout]
            ) -> tuple[Layout, Mapping[str, Answer], dict[str, str]]:
                answers, left_out = _run_driver(kind, library, file, read, is_asked, seconds)
                return layout_of(build_id, Code(elf, file), list(answers.values())), answers, left_out

            if kind is Kind.VULKAN:
                found, left_out = _run_vulkan(library, file, is_asked, seconds)
                layout, no_draws, no_own = vulkan_layout(build_id, Code(elf, file), list(found.values()))
                return Calibration(layout, tuple(found), left_out, _slow(file, elf, layout), no_own, no_draws)
            if kind is Kind.OPENCL:
                layout, answers, left_out = layout_from(read_opencl, opencl_layout)
            else:
                layout, answers, left_out = layout_from(read_level_zero, level_zero_layout)
            no_own = next((f"as {device}, {answer.no_own}" for device, answer in answers.items() if answer.no_own), "")
            if not no_own and not layout.has_own_kernels:
                no_own = "devices disagree on how its copies launch kernels"
            return Calibration(layout, tuple(answers), left_out, _slow(file, elf, layout), no_own)
    except OSError as error:
        raise CalibrationError(library, str(error.strerror), kind) from error
    except (Problem, ProbeError, LayoutError) as error:
        raise CalibrationError(library, str(error), kind) from error


def _slow(file: BinaryIO, elf: LibraryFile, layout: Layout) -> tuple[str, ...]:
    offsets = [elf.offset(entry.address, executable=True) for entry in layout.entries]
    return single_stepped_launches(file.fileno(), layout, offsets)


def _kind_of_name(name: str) -> Kind:
    return Kind.VULKAN if VULKAN in name else Kind.OPENCL if OPENCL in name else Kind.LEVEL_ZERO


def _kind(elf: LibraryFile) -> Kind:
    if exported(elf, [OF_VULKAN]):
        return Kind.VULKAN
    # Level Zero's driver may export OpenCL's function, too.
    return Kind.OPENCL if exported(elf, [OF_OPENCL, "zeInit"]).keys() == {OF_OPENCL} else Kind.LEVEL_ZERO


def store(layout: Layout, output: Path | None) -> Path:
    """Writes a layout to `output`, or to the folder where recordings look for it; returns the path.

    Raises:
        IaprofError: the file cannot be written.
    """
    path = output or CACHE / f"{layout.build_id}.json"
    if not output:
        try:
            make_public_folder(CACHE)  # next to it, drivers.py keeps the commands' libraries
        except OSError as error:
            raise IaprofError(f"{CACHE} cannot be made ({error.strerror}): name a file with -o") from error
    with replace_file(path, mode=0o644) as file:
        file.write(layout.to_json().encode())
        if not output and os.geteuid() == 0:
            os.fchown(file.fileno(), 0, 0)  # not the user's behind sudo: recordings trust it
    return path


def check_store(output: Path | None) -> None:
    """Checks that `store` will be able to write.

    Raises:
        IaprofError: it will not.
    """
    if output:
        check_output(output, force=True)
    elif os.geteuid() != 0:
        raise IaprofError(f"only root writes to {CACHE}: run it with sudo, or name a file with -o")


def _check_owner(status: os.stat_result) -> None:
    """Raises Problem for a file that a stranger could have written."""
    if is_untrusted(status):
        raise Problem("users other than root and you can change it or files beside it")


def _run_driver(
    kind: Kind, library: Path, file: BinaryIO, read: Callable[[Any], _AnswerT], is_asked: bool, seconds: float
) -> tuple[dict[str, _AnswerT], dict[str, str]]:
    """Runs the driver for all devices at once; returns answers by device, and why other devices have none."""
    deadline = time.monotonic() + seconds
    answers, left_out = {}, {}
    with _private_folder() as (private, user), contextlib.ExitStack() as running:
        folders = running.enter_context(_system_folders(library, is_asked))
        loaded = running.enter_context(_copy(file)) if kind is Kind.OPENCL else file.fileno()
        processes = {
            device: running.enter_context(
                Process.start(kind, device, _device_settings(device), loaded, folders, private, user)
            )
            for device in DEVICES
        }
        for device, process in processes.items():
            try:
                answers[device] = _read(process.answer(seconds, deadline), read)
            except Problem as problem:
                left_out[device] = str(problem)
    if len(answers) < LEAST_DEVICES:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        raise Problem(f"without a GPU it runs as {len(answers)} of {len(DEVICES)} devices ({reasons})")
    return answers, left_out


def _run_vulkan(
    library: Path, file: BinaryIO, is_asked: bool, seconds: float
) -> tuple[dict[str, VulkanAnswer], dict[str, str]]:
    """Runs the driver on the machine's GPUs; returns answers by device, and why other devices have none."""
    group = _group_of_gpus()
    with _private_folder(group) as (private, user), contextlib.ExitStack() as running:
        folders = running.enter_context(_system_folders(library, is_asked))
        device = "" if group is None else str(group)
        process = running.enter_context(
            Process.start(Kind.VULKAN, device, {}, file.fileno(), folders, private, user, group)
        )
        answers, left_out = _read(process.answer(seconds, time.monotonic() + seconds), read_vulkan)
    if not answers:
        reasons = "; ".join(f"{device}: {why}" for device, why in left_out.items())
        raise Problem(f"it finds no GPU here that it can use{f' ({reasons})' if reasons else ''}")
    return answers, left_out


def _group_of_gpus() -> int | None:
    """Returns the group whose members may use the GPUs' render nodes, such as `render`; None if there is none."""
    for node in sorted(Path("/dev/dri").glob("renderD*")):
        with contextlib.suppress(OSError):
            return node.stat().st_gid or None
    return None


@contextlib.contextmanager
def _private_folder(group: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Makes a working folder; yields it and its user, who runs the driver if we are root."""
    private = tempfile.mkdtemp(prefix="iaprof-calibrate-")
    user = None
    try:
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # the user nobody may not exist in a user namespace
                os.chown(private, NOBODY, NOBODY if group is None else group)
                user = NOBODY
        yield private, user
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _device_settings(device: str) -> dict[str, str]:
    return {"ProductFamilyOverride": device, "HardwareInfoOverride": DEVICES[device]}


def _read(raw: Any, read: Callable[[Any], _T]) -> _T:
    try:
        return read(raw)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # overflow: by 1e999, which is infinite
        raise Problem("its answer makes no sense") from None


def _executable_memory() -> int | None:
    for executable in (_MFD_EXEC, 0):  # older kernels do not know the flag, and do not need it
        with contextlib.suppress(OSError):
            return os.memfd_create("calibrated", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | executable)
    return None


@contextlib.contextmanager
def _copy(file: BinaryIO) -> Iterator[int]:
    """Yields a descriptor of a file in memory with the same content, without breakpoints of a recording in its code.

    If Linux is configured to execute nothing in memory files, it is the file itself.
    """
    remaining = os.fstat(file.fileno()).st_size
    if remaining > _MOST_BYTES:
        raise Problem(f"it has more than {_MOST_BYTES >> 20} MiB")
    fd = _executable_memory()
    if fd is None:
        yield file.fileno()
        return
    try:
        file.seek(0)
        while remaining and (copied := os.sendfile(fd, file.fileno(), None, remaining)):
            remaining -= copied
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _system_folders(library: Path, is_asked: bool) -> Iterator[tuple[int, ...]]:
    """Yields descriptors of the folders with the libraries of the driver's system; none if it is our own system's.

    The first one has the dynamic linker and the C library: the driver's folder, or one of the next above, as OpenCL's
    drivers and those of Flatpak's runtimes have a folder of their own, which is the second.
    """
    above = [library.parent, *library.parent.parents][: 1 + _MOST_ABOVE]
    folder = next((candidate for candidate in above if (candidate / DYNAMIC_LINKER).exists()), None)
    if folder is None or (folder / DYNAMIC_LINKER).samefile(f"/lib64/{DYNAMIC_LINKER}"):
        yield ()
        return
    with contextlib.ExitStack() as opened:
        folders = []
        for path in dict.fromkeys((folder, library.parent)):
            folders.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            opened.callback(os.close, folders[-1])
            # Checked by descriptor: the same files are executed.
            _check_owner(os.fstat(folders[-1]))
        _check_owner(os.stat(DYNAMIC_LINKER, dir_fd=folders[0]))
        if not is_asked and any(os.fstatvfs(each).f_flag & os.ST_NOSUID for each in folders):
            raise Problem("the file system of its dynamic linker is mounted nosuid")
        yield tuple(folders)


_MOST_ABOVE = 3  # folders: GL/default/lib in Flatpak's runtime
DYNAMIC_LINKER = "ld-linux-x86-64.so.2"
# Make the driver simulate a GPU; ProductFamilyOverride and HardwareInfoOverride say which.
_SETTINGS = {
    "NEOReadDebugKeys": "1",
    "SetCommandStreamReceiver": "1",
    "UseAubStream": "0",
    "UseBindlessMode": "0",
    "NEO_CACHE_PERSISTENT": "0",
    # NumPy would start a thread for each core, with 40 MiB each, before the process drops its rights.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_OF_KIND: dict[Kind, dict[str, str]] = {
    Kind.LEVEL_ZERO: {},
    Kind.OPENCL: {
        # Several GPUs, each with kernels of its own, and tiles, which have no own kernels and count as no GPUs.
        "CreateMultipleRootDevices": str(GPUS),
        "CreateMultipleSubDevices": "2",
        "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        "EnableTimestampWaitForQueues": "0",  # no GPU writes time stamps: clFinish would wait forever
        "EnableBlitterForEnqueueOperations": "0",  # kernels copy, not a copy engine
    },
    Kind.VULKAN: {
        "INTEL_DEBUG": "heaps",  # prints where shaders lie on the GPU
        "INTEL_FORCE_PROBE": "*",  # includes GPUs that this version of Mesa takes for experimental
        "MESA_SHADER_CACHE_DISABLE": "1",
    },
}
_SECONDS_TO_END = 5.0  # after SIGKILL
_MAX_ANSWER = 1 << 20  # bytes; child.py's limit of a file


class Process:
    """A driver running as one device."""

    def __init__(self, device: str, worker: Worker, answer: IO[bytes], errors: IO[bytes]) -> None:
        self.device = device
        self._worker = worker
        self._answer, self._errors = answer, errors

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        driver: Kind,
        device: str,
        settings: dict[str, str],
        library: int,
        folders: tuple[int, ...],
        private: str,
        user: int | None,
        group: int | None = None,
    ) -> Iterator[Process]:
        """Starts the process, which has ended when the context ends.

        Args:
            driver: the driver's API.
            device: the device, as in the names of modules.
            settings: environment variables that choose the device.
            library: the driver's descriptor, so that the checked file is loaded, even by a user who may not open its
                path.
            folders: descriptors of those with the libraries that the driver needs, the first with the dynamic linker;
                none for our own.
            private: the working folder.
            user: runs what is in `folders` from its first instruction on; None for our user.
            group: the user's group; None for the one of the same number.
        """
        paths = [f"/proc/self/fd/{each}" for each in folders]
        linker = [f"{paths[0]}/{DYNAMIC_LINKER}", "--library-path", ":".join(paths)] if paths else []
        # With this system's libraries the child drops its rights itself (child.py). Another system's dynamic linker and
        # C library never get root's rights: root of a container could have written them.
        # What a user preloads, such as libdrm-shim in place of a GPU, is wanted here, too; sudo removes it.
        kept = ("LD_LIBRARY_PATH", "LD_PRELOAD") if driver is Kind.VULKAN else ("LD_LIBRARY_PATH",)
        inherited = {name: os.environ[name] for name in kept if name in os.environ}
        with (
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryFile() as errors,
            Worker(
                "iaprof.record.calibrate.child:main",
                f"/proc/self/fd/{library}",
                device,
                driver,
                files=(library, *folders),
                environment=inherited | _SETTINGS | _OF_KIND[driver] | settings | {"HOME": private},
                folder=private,
                output=answer,
                errors=errors,
                user=user if folders else None,
                group=group,
                linker=linker,
            ) as worker,
        ):
            yield cls(device, worker, answer, errors)

    def answer(self, seconds: float, deadline: float) -> Any:
        """Waits for the answer, which can be any JSON.

        Args:
            seconds: the time limit, for messages.
            deadline: the time limit, in time.monotonic(). The process is killed then; an answer that lacks only the
                places of the driver's own kernels is used.

        Raises:
            Problem: there is no answer.
        """
        late = f"it has not ended after {seconds:.0f} s"
        if self._worker.wait(deadline - time.monotonic()):
            return self._read_answer()
        self._worker.close(_SECONDS_TO_END)
        with contextlib.suppress(Problem):
            raw = self._read_answer()
            if isinstance(raw, dict) and "no_own" in raw:
                return {**raw, "no_own": late}
        raise Problem(late)

    def _read_answer(self) -> Any:
        self._answer.seek(0)
        text = self._answer.read(_MAX_ANSWER)
        if not text:
            raise Problem(self._last_error())
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Problem("its answer makes no sense") from None

    def _last_error(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read(4096).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ends without an answer{f' ({clean(last[:MAX_PROBLEM])})' if last else ''}"
