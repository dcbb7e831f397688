"""`iaprof calibrate`: finds the Layout of any build of the Level Zero driver by running it without a GPU.

The driver runs in a child process per device (calibrate_child.py), which searches its own memory for what the driver's
public calls say. A path is believed when it holds for every kernel on every device that the build knows, two at least.
Of several that do, the same is always taken, so that a build has one layout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from iaprof.bpf.driver_layout import CACHE, MAX_ENTRIES, TRANSFERS, Action, Entry, Field, Layout, LayoutError
from iaprof.bpf.libraries import SYSTEM_FOLDERS, single_stepped_launches
from iaprof.bpf.library_file import LibraryFile, ProbeError
from iaprof.bpf.transfers import LEVEL_ZERO as TRANSFERRING
from iaprof.bpf.waits import LEVEL_ZERO as WAITING
from iaprof.formats.errors import IaprofError
from iaprof.formats.files import can_be_strangers, check_output, make_for_everyone, replacing
from iaprof.formats.profile import clean
from iaprof.record import calibrate_search as search
from iaprof.record.calibrate_child import NOBODY
from iaprof.record.calibrate_entry import LENGTH, probe_offset
from iaprof.record.calibrate_own import MAX_BIAS, Place

# What the driver calls the devices, and their slices x subslices x EUs.
DEVICES = {"bmg": "5x4x8", "lnl": "1x8x8", "ptl-h": "3x4x8", "pvc": "2x8x8"}
LEAST_DEVICES = 2
SECONDS = 60.0  # for all devices; they take one or two

# What makes the driver believe in a GPU; ProductFamilyOverride and HardwareInfoOverride say in which.
_SETTINGS = {
    "NEOReadDebugKeys": "1",
    "SetCommandStreamReceiver": "1",
    "UseAubStream": "0",
    "UseBindlessMode": "0",
    "NEO_CACHE_PERSISTENT": "0",
}
_START = "import sys; sys.path[:] = sys.argv[3:]; from iaprof.record.calibrate_child import main; main(*sys.argv[1:3])"
_DYNAMIC_LINKER = "ld-linux-x86-64.so.2"
_MAX_ANSWER = 1 << 20  # bytes; calibrate_child.py's limit of a file
_MAX_PROBLEM = 300  # characters

# The arguments in which the functions have handles, or an array of them and its length.
_ENTRIES = {
    "zeCommandListAppendLaunchKernel": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchCooperativeKernel": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchKernelIndirect": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchMultipleKernelsIndirect": (Action.LAUNCH_MANY, 2, 1),
    "zeCommandListAppendLaunchKernelWithParameters": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchKernelWithArguments": (Action.LAUNCH, 1, None),
    "zeCommandListUpdateMutableCommandKernelsExp": (Action.LAUNCH_MANY, 3, 1),
    "zexCommandListAppendVariableLaunchKernel": (Action.LAUNCH, 1, None),
    **{name: (action, argument, None) for name, (action, argument) in TRANSFERRING.items()},
    "zeKernelDestroy": (Action.KERNEL_GONE, 0, None),
    "zeModuleDestroy": (Action.MODULE_GONE, 0, None),
    "zeCommandQueueExecuteCommandLists": (Action.EXECUTE, 2, 1),
    "zeCommandListImmediateAppendCommandListsExp": (Action.EXECUTE, 2, 1),
    "zeCommandListImmediateAppendCommandListsWithParameters": (Action.EXECUTE, 2, 1),
    "zeCommandListClose": (Action.LIST_CLOSED, 0, None),
    "zeCommandListReset": (Action.LIST_RESET, 0, None),
    "zeCommandListDestroy": (Action.LIST_GONE, 0, None),
    **dict.fromkeys(WAITING, (Action.WAIT, 0, None)),
}
# Of how many paths, or a path and a number, candidates consist.
_PARTS = {
    "address": (1, 2),
    "allocation": (2,),
    "binary": (2,),
    "code": (1,),
    "kernel_class": (2,),
    "module": (2,),
    "name": (1,),
    "size": (1,),
}
OWN_KERNELS = "launch of the driver's own kernels"  # in place of a function's name
_JUMP = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xe9(.{4})", re.DOTALL)
_NEEDED = ("zeCommandListAppendLaunchKernel", "zeKernelDestroy")


class CalibrationError(IaprofError):
    """There is no layout; the text says why, and how launches can be had without one."""

    def __init__(self, library: Path, problem: str) -> None:
        """`problem` is a clause about the library."""
        super().__init__(
            f"{library} cannot be calibrated: {problem}; its launches can still be had with "
            "'iaprof record --launches=inject -- COMMAND', or from a driver that has probes"
        )


class _Problem(Exception):
    """Why there is no layout: a clause about the library."""


@dataclass(frozen=True)
class Calibration:
    """A layout, and what it rests on."""

    layout: Layout
    devices: tuple[str, ...]  # that agree
    left_out: Mapping[str, str]  # devices, and why
    single_stepped: tuple[str, ...]  # functions whose probes cost more: see formats.slow_launches
    no_own_kernels: str  # why those are not recorded that copy and fill; empty where they are


@dataclass(frozen=True)
class _Answer:
    """Of one child."""

    version: str
    functions: Mapping[str, int]  # by name: place in the file
    exports: Mapping[str, int]  # likewise, of what programs find by name
    candidates: Mapping[str, frozenset[search.Candidate]]
    own: tuple[Place, ...]  # where it launches kernels of its own
    no_own: str  # why that is not known


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
    try:
        fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _Problem("it is not a file")
            _check_owner(status)
            elf = LibraryFile(file)
            build_id = elf.build_id()
            if not build_id:
                raise _Problem("it has no build-id")
            answers, left_out = _ask(library, file)
            layout = _layout(build_id, elf, file, list(answers.values()))
            offsets = [elf.offset(entry.address, executable=True) for entry in layout.entries]
            slow = single_stepped_launches(file.fileno(), layout, offsets)
            no_own = next((f"as {device}, {answer.no_own}" for device, answer in answers.items() if answer.no_own), "")
            return Calibration(layout, tuple(answers), left_out, slow, no_own)
    except OSError as error:
        raise CalibrationError(library, str(error.strerror)) from error
    except (_Problem, ProbeError, LayoutError) as error:
        raise CalibrationError(library, str(error)) from error


def store(layout: Layout, output: Path | None) -> Path:
    """Writes a layout to `output`, or to where recordings look for it; gives that place.

    Raises:
        IaprofError: it cannot be written there.
    """
    path = output or CACHE / f"{layout.build_id}.json"
    if not output:
        try:
            for folder in (CACHE.parent, CACHE):
                make_for_everyone(folder)  # injection.py has the commands' libraries beside it
        except OSError as error:
            raise IaprofError(f"{CACHE} cannot be made ({error.strerror}): name a file with -o") from error
    with replacing(path, mode=0o644) as file:
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
    if can_be_strangers(status):
        raise _Problem("others than root and you can change it, or what lies beside it")


def _ask(library: Path, file: BinaryIO) -> tuple[dict[str, _Answer], dict[str, str]]:
    """Runs the driver for all devices at once; gives the answers, and of the other devices why there is none."""
    folder = os.open(library.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    private = tempfile.mkdtemp(prefix="iaprof-calibrate-")
    deadline = time.monotonic() + SECONDS
    answers, left_out = {}, {}
    try:
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # in a user namespace nobody may not exist
                os.chown(private, NOBODY, NOBODY)
        linker = _linker_beside(library)
        with contextlib.ExitStack() as running:
            children = [
                running.enter_context(_Child.start(device, file.fileno(), folder, linker, private))
                for device in DEVICES
            ]
            for child in children:
                try:
                    answers[child.device] = child.answer(deadline)
                except _Problem as problem:
                    left_out[child.device] = str(problem)
    finally:
        os.close(folder)
        shutil.rmtree(private, ignore_errors=True)
    if len(answers) < LEAST_DEVICES:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        raise _Problem(f"without a GPU it runs as {len(answers)} of {len(DEVICES)} devices ({reasons})")
    return answers, left_out


def _linker_beside(library: Path) -> bool:
    """Whether the library is of another system than ours: one whose own dynamic linker lies beside it."""
    beside = library.parent / _DYNAMIC_LINKER
    if not beside.exists() or beside.samefile(f"/lib64/{_DYNAMIC_LINKER}"):
        return False
    for path in (beside, library.parent):
        _check_owner(path.stat())
    return True


class _Child:
    """The driver, running as one device."""

    def __init__(self, device: str, process: subprocess.Popen[bytes], answer: IO[bytes], errors: IO[bytes]) -> None:
        self.device = device
        self._process = process
        self._answer, self._errors = answer, errors

    @classmethod
    @contextlib.contextmanager
    def start(cls, device: str, library: int, folder: int, linker: bool, private: str) -> Iterator[_Child]:
        """Starts it; whatever it does, it has ended when this ends.

        Args:
            device: one of DEVICES.
            library: the driver's descriptor: what was checked is what is loaded, and who is nobody can load it.
            folder: a descriptor of the driver's folder.
            linker: the dynamic linker and C library are those of that folder.
            private: the working folder.
        """
        beside = f"/proc/self/fd/{folder}"
        python = [sys.executable, "-I", "-c", _START, f"/proc/self/fd/{library}", device]
        command = [f"{beside}/{_DYNAMIC_LINKER}", "--library-path", beside, *python] if linker else python
        settings = {"ProductFamilyOverride": device, "HardwareInfoOverride": DEVICES[device], "HOME": private}
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*command, *(path for path in sys.path if os.path.isabs(path))],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=errors,
                cwd=private,
                env=inherited | _SETTINGS | settings,
                pass_fds=(library, folder) if linker else (library,),
                start_new_session=True,
            )
            try:
                yield cls(device, process, answer, errors)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # as it was not waited for, this is still its session
                process.wait()

    def answer(self, deadline: float) -> _Answer:
        """What it found.

        Raises:
            _Problem: nothing.
        """
        ended = os.pidfd_open(self._process.pid)
        try:
            if not select.select([ended], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _Problem(f"it has not ended after {SECONDS:.0f} s")
        finally:
            os.close(ended)
        self._answer.seek(0)
        text = self._answer.read(_MAX_ANSWER)
        if not text:
            raise _Problem(self._last_words())
        try:
            return _read(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _Problem("it answers what makes no sense") from None

    def _last_words(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read(4096).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ends without an answer{f' ({clean(last[:_MAX_PROBLEM])})' if last else ''}"


def _read(told: Any) -> _Answer:
    """Checks a child's answer, as anybody may have written it; what Layout.from_json checks is left to it."""
    if "problem" in told:
        raise _Problem(clean(str(told["problem"])[:_MAX_PROBLEM]))
    return _Answer(
        version=clean(str(told["version"])[:64]),
        functions={name: int(told["functions"][name]) for name in _ENTRIES if name in told["functions"]},
        exports={name: int(place) for name, place in told.get("exports", {}).items() if name in _ENTRIES},
        candidates={kind: frozenset(_candidates(told["candidates"].get(kind, ()), kind)) for kind in _PARTS},
        own=tuple(_places(told.get("own", ()))),
        no_own=clean(str(told.get("no_own", ""))[:_MAX_PROBLEM])
        or ("" if told.get("own") else "its copies are unknown"),
    )


def _places(told: Any) -> Iterator[Place]:
    for each in told[:MAX_ENTRIES]:
        address, kernel, of_list, is_function = each
        if not all(0 <= int(bias) <= MAX_BIAS for bias in (kernel, of_list)):
            raise ValueError("own")
        yield Place(int(address), int(kernel), int(of_list), bool(is_function))


def _candidates(told: Any, kind: str) -> Iterator[search.Candidate]:
    for each in told:
        candidate = tuple(tuple(map(int, part)) for part in each)
        if len(candidate) not in _PARTS[kind] or not all(candidate):
            raise ValueError(kind)
        yield candidate


def _layout(build_id: str, elf: LibraryFile, file: BinaryIO, answers: list[_Answer]) -> Layout:
    """The layout on which all agree."""
    functions = dict(set.intersection(*(set(answer.functions.items()) for answer in answers)))
    if missing := [name for name in _NEEDED if name not in functions]:
        raise _Problem(f"it has no {missing[0]}")

    def best(kind: str, key: Callable[[search.Candidate], Any] = search.nearest) -> search.Candidate:
        common = frozenset.intersection(*(answer.candidates[kind] for answer in answers))
        if not common:
            raise _Problem(f"no way from a kernel's handle leads to its {kind} in all modules on all devices")
        return min(common, key=key)

    address = best("address", lambda candidate: (not _is_of_one_object(candidate), search.nearest(candidate)))
    allocation = best("allocation", lambda candidate: (candidate[0] != address[0], search.nearest(candidate)))
    module, binary = best("module"), best("binary")
    kernel_class, places = _class(address[0], answers)
    layout = Layout(
        build_id=build_id,
        driver="level_zero",
        version=answers[0].version,
        entries=(*_entries(functions, answers[0].exports, elf, file), *_own_launches(answers, elf, file)),
        address=tuple(map(Field, address)),
        size=Field(best("size")[0], bits=32),
        code=Field(best("code")[0]),
        name=Field(best("name")[0]),
        allocation=(Field(allocation[0]), Field(allocation[1])),
        kernel_class=Field(kernel_class),
        classes=tuple(_address(elf, place, executable=False) for place in places),
        module=Field(module[0]),
        module_bias=module[1][0],
        binary=Field(binary[0]),
        binary_size=Field(binary[1]),
    )
    return Layout.from_json(layout.to_json())


def _is_of_one_object(address: search.Candidate) -> bool:
    """Whether one object leads to the allocation and knows where in it the code is.

    Of other objects that lead to the same allocation some do so for small modules only.
    """
    return len(address) == 1 or address[0][:-2] == address[1][:-1]


def _class(address: search.Path, answers: list[_Answer]) -> tuple[search.Path, list[int]]:
    """A virtual table on the way to the address, and where in the file it lies.

    Not that of the last object, the allocation: with a GPU the driver has allocations of another class.
    """
    found = [{path: place[0] for path, place in answer.candidates["kernel_class"]} for answer in answers]
    common = set.intersection(*map(set, found))
    for length in range(len(address) - 2, -1, -1):
        here = [path for path in common if path[:-1] == address[:length]]
        if here:
            return min(here), sorted({of[min(here)] for of in found})
    raise _Problem("no virtual table tells its kernels from other objects")


def _entries(
    functions: Mapping[str, int], exports: Mapping[str, int], elf: LibraryFile, file: BinaryIO
) -> Iterator[Entry]:
    taken = set()
    for name, (action, _, _) in _ENTRIES.items():
        place = functions.get(name)
        if place is None or place in taken:
            continue  # where a function is not supported, one stub may stand for several
        taken.add(place)
        yield _entry(name, place, elf, file)
        # A copy by a function that is not probed would have the stack of the thread's copy before.
        if (
            action in TRANSFERS
            and (export := exports.get(name, place)) not in taken
            and not _jumps(export, place, file)
        ):
            taken.add(export)
            yield _entry(name, export, elf, file)


def _jumps(export: int, place: int, file: BinaryIO) -> bool:
    """Whether an exported function does nothing but go on with the one at `place`."""
    file.seek(export)
    found = _JUMP.match(file.read(LENGTH))
    return found is not None and export + found.end() + int(struct.unpack("<i", found[1])[0]) == place


def _entry(name: str, place: int, elf: LibraryFile, file: BinaryIO) -> Entry:
    action, handle, count = _ENTRIES[name]
    start = _address(elf, place, executable=True)
    file.seek(place)
    # The first is the list, which leads to the GPU; the second of a wait is how long it may take.
    needed = {0, 1} if action is Action.WAIT else {0, handle, handle if count is None else count}
    offset = probe_offset(file.read(LENGTH), needed, keeps_stack=action is Action.WAIT)
    return Entry(name, action, start + offset, handle, count)


def _own_launches(answers: list[_Answer], elf: LibraryFile, file: BinaryIO) -> Iterator[Entry]:
    """Where any of the devices launches kernels of the driver's own; nowhere if that is not known of one of them."""
    if any(answer.no_own for answer in answers):
        return
    for place in sorted({place for answer in answers for place in answer.own}):
        start = _address(elf, place.address, executable=True)
        file.seek(place.address)
        inside = probe_offset(file.read(LENGTH), {0, 1}) if place.is_function else 0
        yield Entry(OWN_KERNELS, Action.OWN_LAUNCH, start + inside, 1, None, place.kernel, place.list)


def _address(elf: LibraryFile, place: int, executable: bool) -> int:
    """The virtual address of a place in the file, in a segment of code or of data."""
    with elf.reading():
        for segment in elf.elf.iter_segments("PT_LOAD"):
            start = segment["p_offset"]
            if start <= place < start + segment["p_filesz"] and bool(segment["p_flags"] & 1) is executable:
                return int(place - start + segment["p_vaddr"])
    raise _Problem(f"it answers with an address that is in no segment of {'code' if executable else 'data'}")
