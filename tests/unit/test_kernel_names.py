"""What kernels are called in reports: demangled, and told apart where different code has one name."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from iaprof.formats.capture import CaptureReader
from iaprof.formats.export import Export
from iaprof.formats.folded import Folded
from iaprof.formats.profile import Shape
from iaprof.formats.zebin import read_zebin
from iaprof.report.gpu_module import GpuModule, GpuModules
from iaprof.report.platforms import Platform
from iaprof.report.profile import build
from unit.capturing import capture, launch, record, stall
from unit.elfwriter import kernel, zebin
from unit.zebins import debug_elf, disassembly, line_rows

BASIC = {"bmg": 0x8000_FFBE_0000, "lnl": 0x8001_FFFE_5000, "ptl": 0x8001_FFFE_4000}  # where multiply_basic lies


def folded(path: Path, shape: Shape = Shape()) -> str:  # noqa: B008 (it is frozen)
    out = io.StringIO()
    with GpuModules() as modules:
        Folded().write(Export(build(CaptureReader(path), modules).profile), shape, out)
    return out.getvalue()


def recorded(path: Path, devices: list[str], module: str = "matmul") -> Path:
    """A capture of one process that compiled a module for each device, and has one stall at each one's beginning."""
    kernels = [
        {"time_ns": 1, "pid": 7, "path": device, "digest": device.encode() * 8, "size": 1,
         "elf": debug_elf(device, module)}
        for device in devices
    ]  # fmt: skip
    launches = [launch(10 + i, 7, BASIC[device], size=1024, name="multiply_basic") for i, device in enumerate(devices)]
    stalls = [stall(1000, *(record(BASIC[device], sbid=1 + i) for i, device in enumerate(devices)))]
    return capture(path, kernel=kernels, launch=launches, stall=stalls)


def test_one_code_at_two_addresses_is_one_kernel(tmp_path: Path) -> None:
    # given modules that hold the same code, compiled for two GPUs of a generation
    text = folded(recorded(tmp_path / "c", ["bmg", "lnl"]))
    # then their stalls come together
    (line,) = text.splitlines()
    assert line.endswith(" 3")
    assert "/build/zebin/src/matmul.cl_[G];multiply_basic_[G];" in line


def test_different_code_of_one_name_is_told_apart(tmp_path: Path) -> None:
    # given a third module whose code is another
    text = folded(recorded(tmp_path / "c", ["bmg", "lnl", "ptl"]))
    # then it has a name of its own, and the other two have one together
    counts = {
        line.split("matmul.cl_[G];")[1].split("_[G]")[0]: int(line.rsplit(" ", 1)[1]) for line in text.splitlines()
    }
    assert sorted(counts.values()) == [3, 3]
    assert len(counts) == 2
    assert all(name.startswith("multiply_basic [code ") for name in counts)
    # which is the same in every report
    assert folded(tmp_path / "c") == text


def test_code_that_differs_in_a_number_only_is_told_apart(tmp_path: Path) -> None:
    # given two processes with the same module, but for one byte of an operand
    elf = debug_elf("bmg", "matmul")
    code = read_zebin(elf).kernels[0].code
    at = elf.index(code) + 0x20  # and (1) ... 0xFF: its immediate is in the last four bytes
    changed = elf[: at + 13] + bytes([elf[at + 13] ^ 1]) + elf[at + 14 :]
    text = folded(compiled(tmp_path / "c", {7: elf, 8: changed}, BASIC["bmg"], offset=0x20))
    # then mnemonic, line and offset are the same, the names are not
    names = [line.split(";")[-4] for line in text.splitlines()]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"multiply_basic \[code [0-9a-f]{6}\]_\[G\]", name) for name in names)
    # but one that is in both is
    text = folded(compiled(tmp_path / "d", {7: elf, 8: changed}, BASIC["bmg"] + 0x400))
    assert {line.split(";")[-4] for line in text.splitlines()} == {"multiply_local_access_[G]"}


def compiled(path: Path, modules: dict[int, bytes], address: int, offset: int = 0, name: str = "") -> Path:
    """A capture of processes that each compiled a module, launched the kernel at `address` and stalled in it."""
    kernels = [
        {"time_ns": 1, "pid": pid, "path": f"/m{pid}", "digest": bytes([pid]) * 32, "size": 1, "elf": elf}
        for pid, elf in modules.items()
    ]
    hour = 3_600 * 10**9  # between processes, so that they are told apart
    launches = [launch(hour * pid, pid, address, stack=0, size=1024, name=name) for pid in modules]
    stalls = [stall(hour * pid + 5, record(address + offset, sbid=5), begin_ns=hour * pid) for pid in modules]
    return capture(path, kernel=kernels, launch=launches, stall=stalls)


def test_a_module_without_debug_information(tmp_path: Path) -> None:
    """Such as the driver's own kernels are: names and instructions, no source."""
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    elf = zebin([kernel("CopyBufferRectBytes2d", code, 0x10000)])
    path = compiled(tmp_path / "c", {7: elf}, 0x10000, offset=0x20)
    expected = "app;7;[no stack];-;CopyBufferRectBytes2d_[G];and_[g];sbid_[g];0x20_[g] 5\n"
    for shape in (Shape(), Shape(gpu_lines=True, gpu_dirs=True)):
        assert folded(path, shape) == expected


@pytest.mark.parametrize(
    ("shape", "frames"),
    [
        (Shape(), "/build/zebin/src/attention.clcpp_[G];attention_scores_[G];WORKGROUP_[G];APPLY_[G]"),
        (
            Shape(gpu_lines=True),
            "/build/zebin/src/attention.clcpp_[G];attention_scores line 29_[G];"
            "WORKGROUP reduce.h line 16_[G];APPLY reduce.h line 4_[G]",
        ),
        (
            Shape(gpu_dirs=True),
            "build_[G];zebin_[G];src_[G];attention.clcpp_[G];attention_scores_[G];WORKGROUP_[G];APPLY_[G]",
        ),
    ],
)
@pytest.mark.parametrize("device", ["bmg", "lnl", "ptl"])
def test_inlined_functions_lines_and_folders(tmp_path: Path, device: str, shape: Shape, frames: str) -> None:
    # given a stall in a function of a header, inlined twice
    elf = debug_elf(device, "attention")
    (attention,) = read_zebin(elf).kernels
    rows = line_rows(device, "attention")
    offset, text = next(
        (offset, text)
        for offset, text in disassembly(device, "attention", "attention_scores")
        if rows.at(attention.address + offset) == ("/build/zebin/src/lib/reduce.h", 4)
    )
    mnemonic = re.sub(r"^\([^)]*\)\s*", "", text).split()[0].split(".")[0]
    # when
    found = folded(compiled(tmp_path / "c", {7: elf}, attention.address, offset), shape)
    # then
    workgroup = "float reduce::workgroup<float, reduce::Max>(float, float AS3*)"
    frames = frames.replace("WORKGROUP", workgroup).replace("APPLY", "reduce::Max::apply(float, float)")
    assert found == f"app;7;[no stack];-;{frames};{mnemonic}_[g];sbid_[g];0x{offset:x}_[g] 5\n"


def test_only_kernels_with_stalls_are_read(tmp_path: Path) -> None:
    # given two modules, and stalls in one kernel of one of them
    path = compiled(tmp_path / "c", {7: debug_elf("bmg", "matmul"), 8: debug_elf("ptl", "matmul")}, BASIC["bmg"])
    asked = []

    class Asked(GpuModules):
        def load(
            self, elf: bytes, platform: Platform | None, only: Collection[int] | None = None, texts: bool = True
        ) -> GpuModule:
            asked.append((elf, only))
            return super().load(elf, platform, only, texts)

    # when
    with Asked() as modules:
        report = build(CaptureReader(path), modules)
    # then both were looked at for what lies where, and the kernel alone for the rest
    elf, other = debug_elf("bmg", "matmul"), debug_elf("ptl", "matmul")
    assert asked == [(elf, ()), (other, ()), (elf, {BASIC["bmg"]})]
    assert report.facts.problems == {}
