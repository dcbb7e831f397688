"""`iaprof calibrate`: finds the Layout of any build of a Level Zero or OpenCL driver by running it without a GPU.

The driver runs in a child process per device (calibrate_child.py), which searches its own memory for what the driver's
public calls say. A path is believed when it holds for every kernel on every device that the build knows, two at least.
Of several that do, the same is always taken, so that a build has one layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, is_untrusted, make_public_folder, replace_file
from iaprof.bpf.probes.driver_layout import CACHE, Layout, LayoutError
from iaprof.bpf.probes.libraries import OPENCL, SYSTEM_FOLDERS, single_stepped_launches
from iaprof.bpf.probes.library_file import LibraryFile, ProbeError, exported
from iaprof.record.calibrate.answer import Answer, Code, Problem
from iaprof.record.calibrate.level_zero import level_zero_layout, read_level_zero
from iaprof.record.calibrate.opencl import opencl_layout, read_opencl
from iaprof.record.calibrate.opencl_driver import OF_OPENCL
from iaprof.record.calibrate.process import DYNAMIC_LINKER, Kind, Process
from iaprof.sandbox.privileges import NOBODY

# What the driver calls the devices, and their slices x subslices x EUs.
DEVICES = {"bmg": "5x4x8", "lnl": "1x8x8", "ptl-h": "3x4x8", "pvc": "2x8x8"}
LEAST_DEVICES = 2
SECONDS = 60.0  # for all devices; they take one or two

_MOST_BYTES = 1 << 30  # of a driver; NEO 26.27's have 60 MiB
_MFD_EXEC = 0x10  # linux/memfd.h; since Linux 6.3
_OTHER_WAYS = {
    Kind.LEVEL_ZERO: (
        "its launches can still be had with 'iaprof record --launches=inject -- COMMAND', or from a driver that has "
        "probes"
    ),
    Kind.OPENCL: "its launches can still be had with 'iaprof record --launches=inject -- COMMAND'",
}


_Told = TypeVar("_Told", bound=Answer)


class CalibrationError(IaprofError):
    """There is no layout; the text says why, and how launches can be had without one."""

    def __init__(self, library: Path, problem: str, kind: Kind = Kind.LEVEL_ZERO) -> None:
        """`problem` is a clause about the library."""
        super().__init__(f"{library} cannot be calibrated: {problem}; {_OTHER_WAYS[kind]}")


@dataclass(frozen=True)
class Calibration:
    """A layout, and what it rests on."""

    layout: Layout
    devices: tuple[str, ...]  # that agree
    left_out: Mapping[str, str]  # devices, and why
    single_stepped: tuple[str, ...]  # functions whose probes cost more: see formats.slow_launches
    no_own_kernels: str  # why those are not recorded that copy and fill; empty where they are


def installed_driver() -> Path:
    """The driver that the machine's programs use.

    Raises:
        IaprofError: there is none.
    """
    for folder in SYSTEM_FOLDERS:
        path = Path(folder, "libze_intel_gpu.so.1")
        if path.exists():
            return path
    raise IaprofError(
        "no Level Zero driver is installed (libze_intel_gpu.so.1): name the library that your programs use, or record "
        "them with 'iaprof record --launches=inject -- COMMAND'"
    )


def calibrate(library: Path) -> Calibration:
    """Finds the layout of a driver.

    Raises:
        CalibrationError: the library is a stranger's, does not run here, or nothing in it can be believed.
    """
    kind = Kind.OPENCL if OPENCL in library.name else Kind.LEVEL_ZERO  # as long as it was not read
    try:
        fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
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

            def found(
                read: Callable[[Any], _Told], layout_of: Callable[[str, Code, Sequence[_Told]], Layout]
            ) -> tuple[Layout, Mapping[str, Answer], dict[str, str]]:
                answers, left_out = _ask(kind, library, file, read)
                return layout_of(build_id, Code(elf, file), list(answers.values())), answers, left_out

            if kind is Kind.OPENCL:
                layout, answers, left_out = found(read_opencl, opencl_layout)
            else:
                layout, answers, left_out = found(read_level_zero, level_zero_layout)
            offsets = [elf.offset(entry.address, executable=True) for entry in layout.entries]
            slow = single_stepped_launches(file.fileno(), layout, offsets)
            no_own = next((f"as {device}, {answer.no_own}" for device, answer in answers.items() if answer.no_own), "")
            if not no_own and not layout.has_own_kernels:
                no_own = "devices do not agree how its copies launch kernels"
            return Calibration(layout, tuple(answers), left_out, slow, no_own)
    except OSError as error:
        raise CalibrationError(library, str(error.strerror), kind) from error
    except (Problem, ProbeError, LayoutError) as error:
        raise CalibrationError(library, str(error), kind) from error


def _kind(elf: LibraryFile) -> Kind:
    # Level Zero's driver has OpenCL on top of it, too.
    return Kind.OPENCL if exported(elf, [OF_OPENCL, "zeInit"]).keys() == {OF_OPENCL} else Kind.LEVEL_ZERO


def store(layout: Layout, output: Path | None) -> Path:
    """Writes a layout to `output`, or to where recordings look for it; gives that place.

    Raises:
        IaprofError: it cannot be written there.
    """
    path = output or CACHE / f"{layout.build_id}.json"
    if not output:
        try:
            for folder in (CACHE.parent, CACHE):
                make_public_folder(folder)  # injection.py has the commands' libraries beside it
        except OSError as error:
            raise IaprofError(f"{CACHE} cannot be made ({error.strerror}): name a file with -o") from error
    with replace_file(path, mode=0o644) as file:
        file.write(layout.to_json().encode())
        if not output and os.geteuid() == 0:
            os.fchown(file.fileno(), 0, 0)  # not of the user behind sudo: recordings believe it
    return path


def check_store(output: Path | None) -> None:
    """Whether `store` will be able to write.

    Raises:
        IaprofError: it will not.
    """
    if output:
        check_output(output, force=True)
    elif os.geteuid() != 0:
        raise IaprofError(f"only root writes to {CACHE}: run it with sudo, or name a file with -o")


def _check_owner(status: os.stat_result) -> None:
    """Refuses what a stranger could have written."""
    if is_untrusted(status):
        raise Problem("others than root and you can change it, or what lies beside it")


def _ask(
    kind: Kind, library: Path, file: BinaryIO, read: Callable[[Any], _Told]
) -> tuple[dict[str, _Told], dict[str, str]]:
    """Runs the driver for all devices at once; gives the answers, and of the other devices why there is none."""
    private = tempfile.mkdtemp(prefix="iaprof-calibrate-")
    deadline = time.monotonic() + SECONDS
    answers, left_out = {}, {}
    user = None
    try:
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # in a user namespace nobody may not exist
                os.chown(private, NOBODY, NOBODY)
                user = NOBODY
        with contextlib.ExitStack() as running:
            folder = running.enter_context(_linker_of(kind, library))
            loaded = running.enter_context(_copy(file)) if kind is Kind.OPENCL else file.fileno()
            processes = {
                device: running.enter_context(
                    Process.start(kind, device, _as_device(device), loaded, folder, private, user)
                )
                for device in DEVICES
            }
            for device, process in processes.items():
                try:
                    answers[device] = _read(process.answer(SECONDS, deadline), read)
                except Problem as problem:
                    left_out[device] = str(problem)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    if len(answers) < LEAST_DEVICES:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        raise Problem(f"without a GPU it runs as {len(answers)} of {len(DEVICES)} devices ({reasons})")
    return answers, left_out


def _as_device(device: str) -> dict[str, str]:
    return {"ProductFamilyOverride": device, "HardwareInfoOverride": DEVICES[device]}


def _read(told: Any, read: Callable[[Any], _Told]) -> _Told:
    try:
        return read(told)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # the last of 1e999, which is infinite
        raise Problem("it answers what makes no sense") from None


def _executable_memory() -> int | None:
    for executable in (_MFD_EXEC, 0):  # older kernels do not know it, nor need it
        with contextlib.suppress(OSError):
            return os.memfd_create("calibrated", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | executable)
    return None


@contextlib.contextmanager
def _copy(file: BinaryIO) -> Iterator[int]:
    """A descriptor of a file in memory with the same content: no recording's breakpoints are in its code.

    Where Linux is set to run nothing that lies in memory, it is the file itself.
    """
    left = os.fstat(file.fileno()).st_size
    if left > _MOST_BYTES:
        raise Problem(f"it has more than {_MOST_BYTES >> 20} MiB")
    fd = _executable_memory()
    if fd is None:
        yield file.fileno()
        return
    try:
        file.seek(0)
        while left and (many := os.sendfile(fd, file.fileno(), None, left)):
            left -= many
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _linker_of(kind: Kind, library: Path) -> Iterator[int | None]:
    """A descriptor of the folder with the dynamic linker and C library of the system that the driver is of.

    That is the library's folder, or the one above where OpenCL's driver has one to itself. None if there is no dynamic
    linker, or ours.
    """
    folders = [library.parent, library.parent.parent] if kind is Kind.OPENCL else [library.parent]
    folder = next((each for each in folders if (each / DYNAMIC_LINKER).exists()), None)
    if folder is None or (folder / DYNAMIC_LINKER).samefile(f"/lib64/{DYNAMIC_LINKER}"):
        yield None
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # What was checked is what is run.
        _check_owner(os.fstat(fd))
        _check_owner(os.stat(DYNAMIC_LINKER, dir_fd=fd))
        yield fd
    finally:
        os.close(fd)
