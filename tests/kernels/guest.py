# SPDX-License-Identifier: Apache-2.0
"""The first process of the guest that scripts/test_kernels.py boots: tests iaprof's BPF, reports, and powers off.

It reads /plan.json, and writes a JSON object for each check to the second serial line: its name, whether it succeeded,
and a text.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.bpf.driver_layout import Layout
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.bpf.programs import SESSION_COPIES, WHEN_NEEDED
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.kernels.drivers import Injection
from iaprof.record.spool import FrameKind, SpoolReader
from integration.walking import Walking
from kernels import jobs_module
from pythons.frames import frames_of, frames_told
from standin.hardware import Hardware, Programs

REPORT = "/dev/ttyS1"
LAUNCHES = 3
ROUNDS = 2  # of launches.py
UNSAID = "it is not probed, which is said of an OpenCL library when a process maps it"
_RB_POWER_OFF = 0x4321FEDC
_MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp"))
_MMAP2 = 10  # enum perf_event_type
_SYS_FINIT_MODULE = 313  # x86-64
# Two processes that write jobs to jobs.c's device, and print the durations, with the times before and after each call.
JOBS = """
import json, os, struct, time
child = os.fork()
device = os.open("/dev/jobs", os.O_WRONLY)
jobs = []
for us in (2000, 500, 0, 3000, 100, 0, 1000) * 3:
    before = time.monotonic_ns()
    os.write(device, struct.pack("I", us))
    jobs.append((us, before, time.monotonic_ns()))
os.write(1, (json.dumps({"pid": os.getpid(), "jobs": jobs}) + "\\n").encode())
if child:
    os.wait()
"""
Environment = Callable[[dict[str, str]], dict[str, str]]
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Runs the checks, as init."""
    for kind, where in _MOUNTS:
        os.makedirs(where, exist_ok=True)
        if _LIBC.mount(kind.encode(), where.encode(), kind.encode(), 0, None):
            print(f"mount {where}: {os.strerror(ctypes.get_errno())}", flush=True)
    os.environ |= {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    with contextlib.suppress(OSError):
        _LIBC.prctl(15, b"init", 0, 0, 0)  # PR_SET_NAME: so that its name differs from those of programs that it starts
    try:
        with open(REPORT, "w") as report:
            Checks(report.write, report.flush).run(json.loads(Path("/plan.json").read_text()))
    except Exception:  # noqa: BLE001 - if init ended, the kernel would panic without the reason
        traceback.print_exc()
    sys.stdout.flush()
    os.sync()
    time.sleep(0.2)  # until the serial line has sent everything
    _LIBC.reboot(_RB_POWER_OFF)


class Checks:
    """The checks; each reports its result, and the next one runs even if it failed."""

    def __init__(self, write: Callable[[str], int], flush: Callable[[], None]) -> None:
        self._write, self._flush = write, flush

    def run(self, plan: dict[str, Any]) -> None:
        """Runs all checks.

        Args:
            plan: written by make_initramfs of scripts/test_kernels.py.
        """
        self._tell("kernel", True, os.uname().release)
        begun = time.monotonic()
        by_rules: LaunchProbes | None = None
        probes: LaunchProbes | None = None
        with self._check("programs") as say:
            by_rules, probes = LaunchProbes(waits=True), LaunchProbes(frame_pointers_only=True)
            for each in (by_rules, probes):
                each.need(WHEN_NEEDED)
            assert by_rules._loaded is not None
            programs = {name for name in by_rules._loaded.fds if name.startswith("on_")} - SESSION_COPIES.keys()
            assert programs == set(plan["programs"]), programs
            assert not by_rules.follows_frame_pointers
            say(f"{len(programs)} loaded, twice, in {time.monotonic() - begun:.1f} s of an emulated CPU")
        if by_rules is not None and probes is not None and probes._loaded is not None:
            with self._check("stacks") as say:
                say(self._stacks(by_rules, plan["usdt"]))
            by_rules.close()
            for name in ("usdt", "layout", "attach", "inject", "opencl"):
                with self._check(name) as say:
                    say(getattr(self, f"_{name}")(probes, plan[name]))
                with contextlib.suppress(OSError):
                    probes.detach()
        with self._check("side-band") as say:
            say(self._side_band())
        if (modules := Path("/modules")).exists():
            with self._check("jobs") as say:
                say(self._jobs(modules, plan["record"]))
        with self._check("record") as say:
            say(self._record(plan["record"]))
        self._tell("end", True, "")

    @contextlib.contextmanager
    def _check(self, name: str) -> Iterator[Callable[[str], None]]:
        said: list[str] = []
        try:
            yield said.append
        except Exception as error:  # noqa: BLE001 - every error is reported
            if not isinstance(error, IaprofError):
                traceback.print_exc()
            self._tell(name, False, f"{error}" if isinstance(error, IaprofError) else repr(error))
        else:
            self._tell(name, True, " ".join(said))

    def _tell(self, name: str, ok: bool, said: str) -> None:
        self._write(json.dumps({"check": name, "ok": ok, "said": said}) + "\n")
        self._flush()

    def _stacks(self, probes: LaunchProbes, plan: dict[str, Any]) -> str:
        """Checks that stacks without frame pointers are whole, with rules that are learnt meanwhile."""
        _taken(probes, plan["library"])
        told, full = os.pipe()
        os.set_blocking(full, False)
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(full, bytes(1 << 12))
        os.set_blocking(full, True)
        # The program blocks when it prints its result, so that its stacks are finished before it ends.
        environment = os.environ | plan["environment"]
        with Walking(probes) as walking, subprocess.Popen(plan["command"], env=environment, stdout=full) as process:
            launched: list[int] = []
            while len(launched) < plan["launches"] and process.poll() is None:
                launched += probes.launches.read()["stack"].tolist()
                time.sleep(0.1)
            ends = {number: walked for number, (_, walked) in walking.stacks().items()}
            os.close(full)
            while os.read(told, 1 << 16):
                pass
        os.close(told)
        assert process.returncode == 0
        assert len(launched) == plan["launches"]
        assert set(launched) <= ends.keys()
        assert set(ends.values()) == {Walked.WHOLE}, ends
        return f"{len(ends)} stacks are whole"

    def _usdt(self, probes: LaunchProbes, plan: dict[str, Any]) -> str:
        """Checks probes with semaphores, in the stand-in's runtime."""
        _taken(probes, plan["library"])
        process = _run(plan)
        told = json.loads(process.stdout.splitlines()[-1])
        compiled = len(probes.compiled.read())
        assert compiled == 1, f"{compiled} modules were told"
        return _arrived(probes, told["pid"], told["launches"], {name.encode() for name in told["kernels"]})

    def _layout(self, probes: LaunchProbes, plan: dict[str, Any]) -> str:
        """Checks a driver of the tests, by its layout: BPF follows pointers."""
        layout = Layout.from_json(plan["layout"])
        with open(plan["library"], "rb") as file:
            library = LibraryFile(file)
            offsets = [library.offset(entry.address, executable=True) for entry in layout.entries]
            try:
                probes._attach_layout(file.fileno(), layout, offsets)
            except OSError as refusal:
                raise IaprofError(refusal.strerror) from refusal
        done = subprocess.Popen(plan["command"])
        assert done.wait() == 0
        return _arrived(probes, done.pid, LAUNCHES, {b"kernel_0"}) + _chunks(probes)

    def _attach(self, probes: LaunchProbes, plan: dict[str, Any]) -> str:
        """Checks Intel's runtime, by the layout that ships."""
        return self._real(probes, plan) + _chunks(probes)

    _opencl = _attach

    def _inject(self, probes: LaunchProbes, plan: dict[str, Any]) -> str:
        """Checks Intel's runtime, by the injected library."""
        injection = Injection()
        try:
            return self._real(probes, plan | {"library": injection.library}, injection.environment)
        finally:
            injection.close()

    def _real(self, probes: LaunchProbes, plan: dict[str, Any], environment: Environment = dict) -> str:
        _taken(probes, plan["library"])
        kernels = [json.loads(line) for line in _run(plan, environment).stdout.splitlines()]
        launches = sum(sum(kernel["launches"].values()) for kernel in kernels)
        # Stacks are walked by frame pointers, which the OpenCL driver lacks, so only one frame is certain.
        return _arrived(probes, kernels[0]["pid"], launches, {kernel["kernel"].encode() for kernel in kernels}, depth=1)

    def _record(self, plan: dict[str, Any]) -> str:
        """Checks a whole recording: 'iaprof record' has each launch of a program, and its frames of Python."""
        capture, go, told = Path("/tmp/cap.parquet"), Path("/tmp/go"), Path("/tmp/told")
        with Hardware(Path("/tmp/gpu"), programs=Programs(*map(Path, plan["hardware"]))) as hardware:
            words = [sys.executable, *plan["program"], str(told), str(ROUNDS), str(go)]
            record = [sys.executable, "-m", "iaprof", "record", "-o", str(capture), "--", *words]
            with subprocess.Popen(
                record, env=os.environ | hardware.env(), stderr=subprocess.PIPE, text=True
            ) as recorder:
                while recorder.poll() is None and not _is_known(capture, plan["library"]):
                    time.sleep(0.5)
                go.touch()
                assert recorder.stderr is not None
                said = recorder.stderr.read()
        assert recorder.returncode == 0, said
        print(said, flush=True)
        reader, launched = CaptureReader(capture), frames_told(told)
        (pid,) = set(reader.table("launch", ("pid",))["pid"].to_pylist())
        recorded = frames_of(reader, pid)
        wrong = {
            tid: [each for each in enumerate(zip_longest(recorded.get(tid, ()), told)) if each[1][0] != each[1][1]]
            for tid, told in launched.items()
        }
        flags = reader.table("launch", ("flags",))["flags"].to_numpy()
        presumed = int(((flags & LaunchFlags.PRESUMED) > 0).sum())  # stacks of others, which may differ in their lines
        assert sum(map(len, wrong.values())) <= presumed, wrong
        launches = sum(map(len, launched.values()))
        ends = {stack["id"]: stack["ended"] for stack in reader.table("stack", ("id", "ended")).to_pylist()}
        rows = reader.table("launch", ("time_ns", "tid", "stack")).to_pylist()
        cut = [row | {"ended": ends.get(row["stack"])} for row in rows if ends.get(row["stack"]) != "whole"]
        assert not cut, (cut, [loss for loss in reader.header["losses"] if loss["source"] == "stacks"])
        assert reader.header["stack_ends"]["launches"]["whole"] == launches
        done = subprocess.run([sys.executable, "-m", "iaprof", "info", capture], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return f"{launches} launches have the frames of Python that the program told"

    def _jobs(self, modules: Path, plan: dict[str, Any]) -> str:
        """Checks that 'iaprof record' has the jobs of processes, and when each was with the GPU."""
        for name in jobs_module.NAMES:
            fd = os.open(modules / f"{name}.ko", os.O_RDONLY)
            if _LIBC.syscall(_SYS_FINIT_MODULE, fd, b"", 0):
                raise IaprofError(f"{name}.ko: {os.strerror(ctypes.get_errno())}")
            os.close(fd)
        _LIBC.mount(b"tracefs", b"/sys/kernel/tracing", b"tracefs", 0, None)
        capture = Path("/tmp/jobs.parquet")
        record = [sys.executable, "-m", "iaprof", "record", "-o", str(capture), "--", sys.executable, "-c", JOBS]
        with Hardware(Path("/tmp/gpu"), programs=Programs(*map(Path, plan["hardware"]))) as hardware:
            done = subprocess.run(record, env=os.environ | hardware.env(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        rows = CaptureReader(capture).table("gpu_job").to_pylist()
        for each in told:
            own = sorted((row for row in rows if row["pid"] == each["pid"]), key=lambda row: row["queued_ns"])
            assert len(own) == len(each["jobs"]), (len(own), each)
            for row, (us, before, after) in zip(own, each["jobs"], strict=True):
                assert row["queue"] == "ccs0"
                assert row["at_once"] == (us == 0), (row, us)
                times = [before, row["queued_ns"], row["time_ns"], row["end_ns"]]
                assert times == sorted(times), times
                assert row["end_ns"] <= after
                assert us == 0 or row["end_ns"] - row["time_ns"] >= 1000 * us, (row, us)
        assert len(told) == 2
        assert len(rows) == sum(len(each["jobs"]) for each in told)
        return f"{len(rows)} jobs of {len(told)} processes ran when these say"

    def _side_band(self) -> str:
        """Checks perf's records of mappings."""
        buffers = SideBandBuffers()
        try:
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            kinds: Counter[int] = Counter()
            for _cpu, data in buffers.read():
                at = 0
                while at < len(data):
                    kind, _misc, size = struct.unpack_from("<IHH", data, at)
                    kinds[kind] += 1
                    at += size
        finally:
            buffers.close()
        assert kinds[_MMAP2], kinds
        return f"{kinds[_MMAP2]} mappings told"


def _is_known(capture: Path, library: str) -> bool:
    """Whether a recorder has probed a library, and found the interpreter of the program that mapped it."""
    spool = capture.with_name(capture.name + ".spool")
    if not spool.exists():
        return False
    reader = SpoolReader(spool)
    frames = [
        (frame.kind, json.loads(frame.payload)) for frame in reader.frames({FrameKind.APPEND, FrameKind.INTERPRETER})
    ]
    reader.close()
    libraries = [row["path"] for kind, told in frames if kind is FrameKind.APPEND for row in told.get("libraries", ())]
    command = {told["command_pid"][0] for kind, told in frames if kind is FrameKind.APPEND and "command_pid" in told}
    # The recorder's own processes are in Python, too.
    interpreters = {told.get("pid") for kind, told in frames if kind is FrameKind.INTERPRETER}
    return library in libraries and bool(command & interpreters)


def _taken(probes: LaunchProbes, library: str | Path) -> None:
    """Probes a library."""
    outcomes = list(probes.libraries.take(Path(library)))
    problems = [outcome.problem for outcome in outcomes] or [UNSAID]
    if problems != [""]:
        raise IaprofError("; ".join(problems))


def _run(plan: dict[str, Any], environment: Environment = dict) -> subprocess.CompletedProcess[str]:
    variables = environment(os.environ | plan["environment"])
    done = subprocess.run(plan["command"], env=variables, cwd="/tmp", capture_output=True, text=True)
    assert done.returncode == 0, f"the program ended with {done.returncode}: {done.stderr[-500:]}"
    return done


def _arrived(probes: LaunchProbes, pid: int, launches: int, names: set[bytes], depth: int = 2) -> str:
    """Checks that exactly these launches arrived, each with a stack of at least `depth` frames; returns a summary."""
    read, stacks = probes.launches.read(), probes.stacks.read()
    assert len(read) == launches > 0, f"{len(read)} of {launches} launches arrived"
    assert set(read["pid"].tolist()) == {pid}
    assert set(read["name"].tolist()) == names, set(read["name"].tolist())
    assert set(read["flags"].tolist()) == {0}, set(read["flags"].tolist())
    assert set(read["stack"].tolist()) <= set(stacks["id"].tolist())
    assert (stacks["depth"] >= depth).all()
    return f"{launches} of {launches} launches arrived, {len(stacks)} stacks"


def _chunks(probes: LaunchProbes) -> str:
    chunks = probes.chunks.read()
    assert len(chunks), "no piece of a kernel was sent"
    return f", {len(chunks)} pieces of kernels"


if __name__ == "__main__":
    main()
