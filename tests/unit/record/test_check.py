"""`iaprof check`: each subject by itself, also with hostile files, and the output."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from iaprof.basics.files import open_regular
from iaprof.bpf.probes.libraries import Outcome, Way
from iaprof.cli.main import main
from iaprof.cli.verbs import check as command
from iaprof.formats.header.stack_counts import WholeStacks
from iaprof.gpu.vendors import VENDORS
from iaprof.record.checks import bpf, gpus, kernel, libraries, limits, stacks
from iaprof.record.checks.result import Check, Level, shortened
from iaprof.record.checks.stacks import SeenLaunches
from iaprof.record.kernels.calibrating import WILL_CALIBRATE
from iaprof.record.sources import intel, nvidia, render_nodes
from iaprof.record.sources.render_nodes import DeviceError
from iaprof.record.sources.stall_driver import NotPermitted, StreamBusy
from iaprof.symbols.unwind.file_code import Prologues, read_prologues
from limits import Within
from thorough import usually
from unit.builds import no_descriptor_is_lost
from unit.record.test_devices import device

# ---- the kernel ----


@pytest.mark.parametrize(
    ("release", "level", "said"),
    [
        ("6.15.0-generic", Level.OK, "6.15.0-generic"),
        ("7.0.1", Level.OK, "new enough"),
        ("6.14.11", Level.WARNING, "EU stalls came with 6.15"),
        ("6.8.0-45-generic", Level.WARNING, "no build-ids"),
        ("6.12.9", Level.WARNING, "--waits needs 6.13"),
        ("unheard", Level.WARNING, "unheard"),
    ],
)
def test_versions_of_the_kernel(release: str, level: Level, said: str) -> None:
    check = kernel._version(release)
    assert check.level is level
    assert said in check.text


CONFIG = "CONFIG_BPF_SYSCALL=y\nCONFIG_BPF_EVENTS=y\nCONFIG_PERF_EVENTS=y\nCONFIG_UPROBE_EVENTS=y\nCONFIG_BPF_JIT=y\n"


@pytest.mark.parametrize("name", kernel.NEEDED)
def test_a_kernel_without_what_is_needed(name: str) -> None:
    assert kernel._config(CONFIG).level is Level.OK
    for config in (
        CONFIG.replace(f"CONFIG_{name}=y\n", ""),
        CONFIG.replace(f"CONFIG_{name}=y", f"# CONFIG_{name} is not set"),
    ):
        check = kernel._config(config)
        assert check.level is Level.PROBLEM
        assert f"without CONFIG_{name}:" in check.text


def test_a_kernel_whose_programs_are_slow() -> None:
    assert kernel._config(CONFIG.replace("CONFIG_BPF_JIT=y\n", "")).level is Level.WARNING


def test_a_kernel_with_a_driver_of_its_gpu_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # without such a driver nothing is said
    monkeypatch.setattr(kernel, "_GPU_SCHEDULER", tmp_path / "none")
    assert "GPU jobs" not in {check.name for check in kernel.checks()}
    # with one, that depends on its tracepoints
    monkeypatch.setattr(kernel, "_GPU_SCHEDULER", tmp_path)
    monkeypatch.setattr(kernel, "job_formats", lambda: [object()])
    assert [check.level for check in kernel.checks() if check.name == "GPU jobs"] == [Level.OK]
    monkeypatch.setattr(kernel, "job_formats", list)
    (check,) = [check for check in kernel.checks() if check.name == "GPU jobs"]
    assert (check.level, check.mend) == (Level.WARNING, "sudo mount -t tracefs nodev /sys/kernel/tracing")


def test_a_kernel_whose_config_is_nowhere() -> None:
    check = kernel._config(None)
    assert (check.level, check.text.split(":")[0]) == (Level.WARNING, "unknown")


def test_only_root_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check = kernel._root()
    assert (check.level, check.mend) == (Level.PROBLEM, "sudo iaprof check")


# ---- BPF ----


def test_without_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf, "bcc_version", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: name == "apt")
    check = bpf._bcc()
    assert (check.level, check.mend) == (Level.PROBLEM, "sudo apt install python3-bpfcc")


def test_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr("iaprof.bpf.compile.headers._own_headers", list)
    monkeypatch.setattr("iaprof.bpf.compile.headers._has_archive", lambda: False)
    monkeypatch.setattr("iaprof.bpf.compile.headers._split_headers", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: name == "dnf")
    check = bpf._headers()
    assert (check.level, check.mend) == (Level.PROBLEM, "sudo dnf install kernel-devel-$(uname -r)")


def test_bcc_and_headers_are_looked_at_only_where_the_programs_that_ship_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bpf, "_map", lambda: Check(bpf.GROUP, "maps", Level.OK, ""))
    for needs_bcc, names in ((False, ["maps", "programs"]), (True, ["maps", "bcc", "headers", "programs"])):
        programs = Check(bpf.GROUP, "programs", Level.OK, ""), needs_bcc
        monkeypatch.setattr(bpf, "_programs", lambda programs=programs: programs)
        assert [check.name for check in bpf.checks()] == names


def test_a_kernel_that_refuses_bpf(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: int, attributes: bytes) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bpf, "bpf", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert bpf._map().level is Level.PROBLEM
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bpf._map().level is Level.WARNING  # root may succeed


# ---- limits ----


@pytest.fixture
def sysctls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(limits, "_SYSCTL", tmp_path)
    for name, value in {
        "kernel/perf_event_paranoid": 2,
        "dev/xe/observation_paranoid": 1,
        "dev/i915/perf_stream_paranoid": 1,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    return tmp_path


PARANOID = intel.XE.paranoid, intel.MAX_I915.paranoid


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("sysctl", "value", "name", "level", "mend"),
    [
        ("kernel/perf_event_paranoid", "3", "perf events", Level.OK, ""),
        ("kernel/perf_event_paranoid", None, "perf events", Level.PROBLEM, ""),
        ("dev/xe/observation_paranoid", "0", "EU stalls", Level.OK, ""),
        ("dev/xe/observation_paranoid", None, "EU stalls", Level.WARNING, ""),
        ("dev/i915/perf_stream_paranoid", "0", "EU stalls", Level.OK, ""),
        ("dev/i915/perf_stream_paranoid", None, "EU stalls", Level.WARNING, ""),
    ],
)  # fmt: skip
def test_sysctls(
    sysctls: Path, tmp_path: Path, sysctl: str, value: str | None, name: str, level: Level, mend: str
) -> None:
    asked = [each for each in PARANOID if each == sysctl.replace("/", ".")]
    assert by_name(limits.checks(tmp_path, PARANOID))[name].level is Level.OK
    (sysctls / sysctl).unlink()
    if value is not None:
        (sysctls / sysctl).write_text(value)
    check = by_name(limits.checks(tmp_path, asked))[name]
    assert (check.level, check.mend) == (level, mend)


def test_too_few_open_files(sysctls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "possible_cpus", lambda: list(range(512)))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    check = by_name(limits.checks(tmp_path, PARANOID))["open files"]
    assert (check.level, check.mend) == (Level.PROBLEM, "ulimit -n 1280")


@pytest.mark.parametrize(("free", "level"), [(10 << 30, Level.OK), (1 << 30, Level.WARNING), (1 << 20, Level.PROBLEM)])
def test_room(free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[1], fields[4] = 4096, free // 4096  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert limits._room(tmp_path).level is level


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert limits._room(tmp_path / "none").level is Level.PROBLEM


# ---- GPUs ----


def test_gpus_that_work_make_others_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # given three cards: one of another driver, one that is held, one that works
    cards = {f"/dev/dri/renderD{128 + number}": device(number) for number in (1, 2)}

    def open_device(path: str) -> object:
        if path not in cards:
            raise DeviceError(f"{path} is driven by i915")
        return cards[path]

    held = {"card1"}

    def open_stream(card: object, gt: object, rate: int) -> int:
        if getattr(card, "card", "") in held:
            raise StreamBusy("held")
        return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(nvidia, "GPUS", Path("/nowhere"))
    monkeypatch.setattr(render_nodes, "render_nodes", lambda: ["/dev/dri/renderD128", *cards])
    monkeypatch.setattr(intel, "open_device", open_device)
    monkeypatch.setattr(intel.XE, "open_stream", open_stream)
    monkeypatch.setattr(render_nodes, "card_name", lambda path: f"card{int(path[-3:]) - 128}")
    # when, then
    with no_descriptor_is_lost(sockets=True):
        checks = list(gpus.checks())
    assert [(check.name, check.level) for check in checks] == [
        ("card0", Level.WARNING),
        ("card1", Level.WARNING),
        ("card2", Level.OK),
    ]
    assert checks[0].text == "it is driven by i915"
    assert checks[1].mend == intel.XE.holders
    assert checks[2].text == "Battlemage G21 [Arc B580], 20 XeCores, xe2 records, driven by xe; free"
    # when none works, then all are problems
    held.add("card2")
    assert {check.level for check in gpus.checks()} == {Level.PROBLEM}


def test_a_gpu_that_may_not_be_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_stream(*_: object) -> int:
        raise NotPermitted("no")

    monkeypatch.setattr(intel.XE, "open_stream", open_stream)
    check = gpus._gt("card0", device(), device().gts[0])
    assert (check.level, check.mend) == (Level.PROBLEM, "sudo sysctl dev.xe.observation_paranoid=0")


# ---- libraries ----


NO_EXECUTIONS = "a kernel in a closed command list counts when it is appended, not when the list is executed"


def test_libraries_and_how_their_launches_are_recorded() -> None:
    def check(outcome: Outcome, probes: Iterable[str] = (), version: str = "") -> tuple[Level, str, str]:
        found = libraries._library(outcome, set(probes), version)
        assert found.file == outcome.path
        return found.level, found.text, found.mend

    path = "/a/libze_intel_gpu.so.1"
    both, half = {"launch_kernel", "compile_kernel"}, {"launch_kernel"}
    assert check(Outcome(path, 2, way=Way.PROBES), both) == (
        Level.OK, f"launches and modules by its probes; {NO_EXECUTIONS}", "",
    )  # fmt: skip
    assert check(Outcome(path, 1, way=Way.PROBES), half) == (
        Level.WARNING, "has no compile_kernel probe: it was built without all of intel/iaprof's patches", "",
    )  # fmt: skip
    attached = "launches by attaching: it has no probes, but its build is known (26.27)"
    no_waits = "--waits does not work with it, because its layout has no functions that wait"
    whole = Outcome(path, 8, way=Way.ATTACH, build_id="ab", executions=True, copies=True, waits=5)
    assert check(whole, version="26.27") == (Level.OK, attached, "")
    cuda = Outcome("/a/libcuda.so.1", 16, way=Way.ATTACH, build_id="ab", copies=True, waits=3)
    assert check(cuda, half) == (
        Level.OK,
        "launches, copies and fills of running processes by probes, without names of kernels; those of a command by "
        "iaprof's library",
        "",
    )
    assert check(replace(whole, executions=False), version="26.27") == (
        Level.WARNING,
        f"{attached}; {NO_EXECUTIONS}, because its layout is from an older iaprof",
        f"sudo iaprof calibrate {path}",
    )  # fmt: skip
    assert check(replace(whole, waits=0), version="26.27") == (
        Level.OK, f"{attached}; {no_waits}: run 'sudo iaprof calibrate' again", "",
    )  # fmt: skip
    opencl = Outcome("/a/libigdrcl.so", 8, way=Way.ATTACH, build_id="ab", copies=True)
    assert check(opencl, version="26.27") == (
        Level.OK, f"{attached}; {no_waits}: run 'sudo iaprof calibrate LIBRARY' again", "",
    )  # fmt: skip
    level, text, _ = check(replace(whole, copies=False), version="26.27")
    assert level is Level.OK and "copies and fills are not recorded" in text and "iaprof calibrate" in text
    level, text, _ = check(replace(whole, copies=False, executions=False), version="26.27")
    assert level is Level.WARNING and "copies and fills are not recorded" in text and NO_EXECUTIONS in text
    level, text, _ = check(Outcome("/a/libigdrcl.so", 8, way=Way.ATTACH, build_id="ab"), version="26.27")
    assert level is Level.OK and "copies and fills are not recorded" in text and "iaprof calibrate" in text
    assert check(Outcome("/a/libigdrcl.so", 0, "it is unknown", build_id="ab")) == (
        Level.WARNING, "it is unknown", "sudo iaprof calibrate /a/libigdrcl.so",
    )  # fmt: skip
    vulkan = Outcome("/a/libvulkan_intel.so", 9, way=Way.ATTACH, build_id="ab", executions=True)
    level, text, mend = check(vulkan, version="26.2.6")
    assert (level, mend) == (Level.OK, "")
    assert text.startswith("compute dispatches by attaching (Mesa 26.2.6); draws, copies and fills are not recorded")
    level, text, _ = check(replace(vulkan, draws=True), version="26.2.6")
    assert level is Level.OK and text.startswith(
        "dispatches and draws by attaching (Mesa 26.2.6); copies and fills are not"
    )
    level, text, _ = check(replace(vulkan, draws=True, own_kernels=True), version="26.2.6")
    assert level is Level.OK and "copies and fills are recorded as launches of the driver's own kernels" in text
    unknown = Outcome("/a/libvulkan_intel.so", 0, "it is unknown", build_id="ab")
    for each, expected in (unknown, Level.WARNING), (replace(unknown, unused=True), Level.OK):
        assert check(each) == (expected, "it is unknown", "sudo iaprof calibrate /a/libvulkan_intel.so")
    calibrated = replace(unknown, problem=f"its build (ab) is not known; it {WILL_CALIBRATE}")
    assert check(calibrated) == (Level.OK, calibrated.problem, "")
    injected = Outcome("/a/libiaprof_inject.so", 28, way=Way.INJECT, executions=True, copies=True)
    level, text, _ = check(injected)
    assert level is Level.OK and "copies and fills are recorded, but not the driver's own kernels" in text
    level, text, _ = check(replace(injected, copies=False))
    assert level is Level.OK and "copies and fills are not recorded" in text
    assert check(Outcome("/a b/libze_intel_gpu.so", 0, "it is unknown", build_id="ab")) == (
        Level.WARNING, "it is unknown", "sudo iaprof calibrate '/a b/libze_intel_gpu.so'",
    )  # fmt: skip
    assert check(Outcome(path, 0, "it is a broken ELF file (X: y)")) == (
        Level.WARNING, "it is a broken ELF file (X: y)", "",
    )  # fmt: skip


def test_many_libraries_are_not_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many:
        def __init__(self, attach: object, attach_layout: object) -> None:
            pass

        def installed(self) -> Iterator[Outcome]:
            return iter(())

        def running(self) -> Iterator[Outcome]:
            return (Outcome(f"/tmp/{number}/libze_intel_gpu.so.1", 0, "no") for number in range(1000))

    monkeypatch.setattr(libraries, "Libraries", Many)
    checks = list(libraries.checks())
    assert len(checks) == libraries.MOST_LINES + 2
    assert checks[-2].text == f"and {1000 - libraries.MOST_LINES} more files of that name"


# ---- frame pointers ----

SOURCE = r"""
#define F(n) __attribute__((noinline)) int f##n(volatile int *p) { \
    int s = 0; for (int i = 0; i < p[0]; i++) { s += p[i] * n; p[i] ^= s + n; g(p + i, s); } return s; }
__attribute__((noinline)) void g(volatile int *p, int s) { for (int i = 0; i < s; i++) p[i] += s * i; }
F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10)
"""


def compiled(folder: Path, *flags: str) -> Path:
    source, library = folder / "f.c", folder / f"f{abs(hash(flags))}.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return library


def prologues(path: Path) -> Prologues | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_prologues(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("more", [(), ("-fcf-protection=full",), ("-s",), ("-O0",), ("-O3",)])
def test_prologues_show_whether_code_keeps_frame_pointers(tmp_path: Path, more: tuple[str, ...]) -> None:
    kept = prologues(compiled(tmp_path, *more, "-fno-omit-frame-pointer"))
    omitted = prologues(compiled(tmp_path, *more, "-fomit-frame-pointer"))
    assert kept is not None
    assert omitted is not None
    assert kept.functions == omitted.functions >= 10
    assert kept.frame_pointers
    assert omitted.with_frame == 0


def test_files_that_are_not_x86_64_elf_have_no_prologues(tmp_path: Path) -> None:
    path = tmp_path / "libc.so"
    for data in (b"", b"/* GNU ld script */", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + bytes(100), bytes(64)):
        path.write_bytes(data)
        assert prologues(path) is None


def test_prologues_of_damaged_libraries_are_read_in_time(tmp_path: Path, within: Within) -> None:
    # given a library with random damage in its headers
    whole = compiled(tmp_path).read_bytes()
    path = tmp_path / "broken"
    chance = random.Random(3)
    sections = struct.unpack_from("<Q", whole, 40)[0]
    with within(20):
        for _ in range(300):
            data = bytearray(whole[: chance.choice((len(whole), chance.randrange(64, len(whole))))])
            for _ in range(chance.randrange(1, 20)):
                places = (chance.randrange(16, 64), chance.randrange(64, 600), sections + chance.randrange(2000))
                at = chance.choice(places)
                data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), chance.randbytes(8), b"\xff\xff\xff\x7f"))
            path.write_bytes(data)
            # when, then
            damaged = prologues(path)
            assert damaged is None or 0 <= damaged.with_frame <= damaged.functions <= 1024


def test_a_huge_symbol_table_is_sampled(tmp_path: Path, within: Within) -> None:
    # given a file that claims a terabyte of symbols
    data = bytearray(compiled(tmp_path).read_bytes())
    sections, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    for at in range(sections, sections + 64 * count, 64):
        if struct.unpack_from("<I", data, at + 4)[0] in (2, 11):
            struct.pack_into("<Q", data, at + 32, 1 << 40)
    path = tmp_path / "huge"
    path.write_bytes(data)
    os.truncate(path, 1 << 40)
    # when
    with within(5):
        huge = prologues(path)
        # then
        assert huge is not None
        assert huge.functions >= 10


# ---- files of anybody's ----


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, regular in {"fifo": False, "file": True, "link": False, ".": False, "none": False}.items():
        with nullcontext() if regular else pytest.raises(OSError), open_regular(str(tmp_path / name)) as file:
            assert file.read() == b""


def test_mapped_files_of_this_process() -> None:
    mine = [file for file in stacks.mapped(re.compile(rb"libc\.so\.6")) if file.pid == os.getpid()]
    (libc,) = mine
    assert os.path.samefile(libc.path, re.search(r"/\S+libc\.so\.6", Path("/proc/self/maps").read_text())[0])  # type: ignore[index]


def test_long_paths_are_shortened() -> None:
    path = "/a" * 2000 + "/libze_intel_gpu.so.1"
    assert len(shortened(path)) <= 120
    assert shortened(path).endswith("/libze_intel_gpu.so.1")
    assert shortened("/a/b") == "/a/b"


# ---- the command ----

CHECKS = [
    Check("Kernel", "root", Level.OK, "yes"),
    Check("Stacks", "libsycl", Level.WARNING, "a long text " * 8 + "ends", "export CFLAGS=-x", "/a/libsycl.so.8"),
    Check("Stacks", "evil\x1b[2J name that is long", Level.OK, "two\nlines \x1b[31m", "", "/tmp/\x1b]0;x\x07"),
]


def run(monkeypatch: pytest.MonkeyPatch, checks: list[Check], *words: str) -> object:
    monkeypatch.setattr(command, "_checks", lambda folder: iter(checks))
    monkeypatch.setattr(sys, "argv", ["iaprof", "check", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, CHECKS) == 0
    assert capsys.readouterr().out == (
        "Kernel\n"
        "  ok       root            yes\n"
        "\n"
        "Stacks\n"
        "  warning  libsycl         a long text a long text a long text a long text a\n"
        "                           long text a long text a long text a long text ends\n"
        "                           /a/libsycl.so.8\n"
        "                           $ export CFLAGS=-x\n"
        "  ok       evil\\x1b[2J nam two\\x0alines \\x1b[31m\n"
        "                           /tmp/\\x1b]0;x\\x07\n"
        "\n"
        "Recording can work: 1 warning.\n"
    )


def test_a_problem_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Check("GPUs", "card0", Level.PROBLEM, "no")
    assert run(monkeypatch, [*CHECKS, problem, problem]) == 1
    assert capsys.readouterr().out.endswith("\nRecording cannot work: 2 problems and 1 warning.\n")
    assert run(monkeypatch, CHECKS[:1]) == 0
    assert capsys.readouterr().out.endswith("\nRecording can work: no problems or warnings.\n")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [*CHECKS, Check("GPUs", "card0", Level.PROBLEM, "no", "end it")], "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["works"] is False
    assert [each["level"] for each in said["checks"]] == ["ok", "warning", "ok", "problem"]
    assert said["checks"][3] == {
        "group": "GPUs", "name": "card0", "level": "problem", "text": "no", "fix": "end it", "file": "",
    }  # fmt: skip
    assert "\x1b" not in said["checks"][2]["text"] + said["checks"][2]["name"] + said["checks"][2]["file"]


def test_the_folder_is_that_of_the_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(command, "_checks", lambda folder: asked.append(folder) or iter(CHECKS))  # type: ignore[func-returns-value]
    monkeypatch.setattr(sys, "argv", ["iaprof", "check", "-o", str(tmp_path / "a" / "cap.parquet")])
    with pytest.raises(SystemExit):
        main()
    assert asked == [tmp_path / "a"]


@pytest.mark.parametrize("redirected", usually(["> /dev/full"], ["> /dev/full", ">&-"]))
def test_a_full_stdout_is_one_sentence(redirected: str) -> None:
    for verb in ("check", "check --json"):
        shell = ["sh", "-c", f"exec {sys.executable} -m iaprof {verb} {redirected}"]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert done.stderr.startswith("iaprof: the output cannot be written: ")
        assert done.stderr.count("\n") == 1


def test_the_decoder_in_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", "/nowhere/libiga64.so")
    check = command._decoder(VENDORS[0])
    assert check.level is Level.WARNING
    assert "libiga64 cannot be loaded" in check.text


# ---- Stacks of what launches now ----


def launching(monkeypatch: pytest.MonkeyPatch, ends: WholeStacks | None, files: dict[str, str] | None = None) -> None:
    """Lets check see a process with a driver whose launches' stacks end like this."""
    driver = stacks.MappedFile(1, "/opt/libze_intel_gpu.so.1")
    monkeypatch.setattr(
        stacks, "mapped", lambda name: iter([driver] if name.fullmatch(b"libze_intel_gpu.so.1") else [])
    )
    monkeypatch.setattr(stacks, "watch_launches", lambda: None if ends is None else SeenLaunches(ends, files or {}))


def test_where_the_stacks_of_what_launches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = WholeStacks.from_counts(2, 0, Counter({"libur_adapter.so.0": 97, "generated code": 1}))
    launching(monkeypatch, ends, {"libur_adapter.so.0": "/opt/libur_adapter.so.0"})
    found = {check.name: check for check in stacks.checks()}
    assert list(found) == ["walking", "launches", "libur_adapter.so.0", "generated code"]
    assert found["launches"].text.startswith("now, 2 of 100 launches (2.0 %) have a whole stack")
    assert found["libur_adapter.so.0"].file == "/opt/libur_adapter.so.0"
    assert [check.level for check in found.values()] == [Level.OK, *[Level.WARNING] * 3]


def test_a_kernel_whose_types_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, None)
    monkeypatch.setattr(stacks, "kernel_offsets", lambda: None)
    (check,) = stacks.checks()
    assert check.level is Level.WARNING
    assert check.text.startswith("by frame pointers")


def test_stacks_that_are_whole_are_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, WholeStacks.from_counts(7, 0, Counter()))
    _, check = stacks.checks()
    assert check.level is Level.OK
    assert check.text == "now, 7 of 7 launches (100.0 %) have a whole stack"


def test_stacks_with_guesses_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, WholeStacks.from_counts(7, 0, Counter(), guessed=3, guesses=Counter({"libblas.so": 3})))
    _, check, library = stacks.checks()
    assert check.text == "now, 7 of 10 launches (70.0 %) have a whole stack, 3 (30.0 %) a guessed one"
    assert library.name == "libblas.so"
    assert library.text == "the stacks of 3 launches have a caller that is guessed there"
    assert check.level is library.level is Level.WARNING


def test_processes_with_a_driver_that_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, WholeStacks.from_counts(0, 0, Counter()))
    _, check = stacks.checks()
    assert (check.name, check.level) == ("launches", Level.WARNING)
    assert check.text.startswith("none in 1 s")


def test_without_probes_nothing_is_said_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launching(monkeypatch, None)
    assert "launches" not in [check.name for check in stacks.checks()]
