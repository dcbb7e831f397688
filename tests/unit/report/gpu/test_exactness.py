"""Stalls in are stalls out: sums of every format against sums made from a capture's raw bits, for all layouts."""

import io
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.registry import WRITERS
from iaprof.gpu.instructions import InstructionSet
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.gpu.decoder import read_instructions
from iaprof.report.gpu.module import NO_DECODER, GpuFrame, GpuKernel, GpuModule, GpuModuleLoader
from iaprof.report.profile import ReportOptions, build
from thorough import usually
from unit.capturing import HEADER, capture, launch
from unit.profiles import rows

# First bits, as xe_drm.h and the kernel's driver have them; width of ip; first unused bit; version.
PVC = {"active": 29, "other": 37, "control": 45, "pipestall": 53, "send": 61, "dist_acc": 69, "sbid": 77, "sync": 85,
       "inst_fetch": 93}  # fmt: skip
XE2 = {**PVC, "tdr": 29, "active": 101}
XE3P = {reason: bit + 32 for reason, bit in XE2.items()}
LAYOUTS: dict[str, tuple[dict[str, int], int, int, list[int]]] = {
    "pvc": (PVC, 29, 101, [12, 60, 0]),
    "xe2": (XE2, 29, 113, [20, 1, 0]),
    "xe3p": (XE3P, 61, 145, [35, 0, 0]),
}
KERNELS = [(7 + n % 2, 0xFFFF_8000_0001_0000 + n * 0x100, 0x80) for n in range(12)]


def row(rng: random.Random, layout: str, stream: int, sums: Counter[str]) -> dict[str, Any]:
    bits, ip_bits, unused, _ = LAYOUTS[layout]
    words: list[list[int]] = [[], [], []]
    for _ in range(rng.choice((0, 1, 3, 40))):
        value = (rng.choice(KERNELS)[1] + 8 * rng.randrange(-4, 40) >> 3) & (1 << ip_bits) - 1
        for reason, bit in bits.items():
            count = rng.choice((0, 0, 1, 255, rng.randrange(256)))
            value |= count << bit
            sums[reason] += count
        value |= rng.getrandbits(64) << unused
        for index, word in enumerate(words):
            word.append(value >> 64 * index & (1 << 64) - 1)
    w2 = words[2] if layout == "xe3p" else None
    return {"time_ns": rng.randrange(10**10), "begin_ns": 0, "stream": stream, "w0": words[0], "w1": words[1], "w2": w2}


def header(layouts: list[str]) -> dict[str, Any]:
    return {**HEADER, "streams": [{"layout": layout, "ip_version": LAYOUTS[layout][3]} for layout in layouts]}


@pytest.mark.parametrize("seed", usually(range(10), range(40)))
def test_sums(tmp_path: Path, seed: int) -> None:
    # given streams of any layouts, and launches before, between and after the stalls, or none
    rng = random.Random(seed)
    layouts = [rng.choice(list(LAYOUTS)) for _ in range(rng.randrange(1, 5))]
    sums: Counter[str] = Counter()
    streams = [rng.randrange(len(layouts)) for _ in range(rng.randrange(1, 60))]
    stalls = [row(rng, layouts[stream], stream, sums) for stream in streams]
    first, last = rng.choice(((0, 1), (0, 10**10), (10**10, 10**10 + 5)))
    launches = [
        launch(rng.randrange(first, last), pid, address, rng.choice((0, 1, 2)), size, name=f"k{address:x}")
        for pid, address, size in KERNELS
        for _ in range(rng.choice((0, 0, 3)))
    ]
    path = capture(tmp_path / "c", header(layouts), stall=stalls, launch=launches)
    for name in ("folded", "iaprof", "json"):  # the others' sums are in their own tests
        writer = WRITERS[name]
        # when
        with GpuModuleLoader() as modules:
            report = build(CaptureReader(path), modules, ReportOptions(interval_s=0.7 if writer.interval_s else 0.0))
            out = io.StringIO()
            writer.write(Export(report.profile), StackOptions(), out)
        # then
        found: Counter[str] = Counter()
        for line in out.getvalue().splitlines():
            if name == "json":
                for one in json.loads(out.getvalue())["rows"]:
                    found.update(one["samples"])
                break
            if name == "folded":
                stack, _, count = line.rpartition(" ")
                found[stack.split(";")[-2].removesuffix("_[g]")] += int(count)
            elif line.startswith("eustall"):
                found.update(dict(zip(REASONS, map(int, line.split("\t")[3:]), strict=True)))
        assert +found == +sums
        assert report.facts.stalls == sums.total()
        assert report.facts.records == sum(len(stall["w0"]) for stall in stalls)


class TwoGenerations(GpuModuleLoader):
    """Loads every module as one kernel with an instruction named after the instruction set."""

    def load(
        self, elf: bytes, instruction_set: InstructionSet | None, only: object = None, texts: bool = True
    ) -> GpuModule:
        columns = {"offset": [0], "size": [16], "mnemonic": [0]}
        decoded = None if instruction_set is None else read_instructions(columns, [instruction_set.name.lower()], 64)
        frames = ((GpuFrame("k", "k.cl", 1),),)
        return GpuModule((GpuKernel("k", "k", 0x10000, 64, 64, decoded, (0,), frames),), ())


@pytest.mark.parametrize(
    ("layouts", "mnemonics"),
    [
        (["xe2"], {"xe2"}),
        (["xe2", "xe2"], {"xe2"}),
        (["xe2", "pvc"], {"xe2", "xe_hpc"}),
        (["pvc", "xe3p", "xe2"], {"xe_hpc", "xe3p", "xe2"}),
    ],
)
def test_a_stall_shows_the_instruction_of_its_own_gpu(tmp_path: Path, layouts: list[str], mnemonics: set[str]) -> None:
    # given a kernel on GPUs of several generations
    stalls = []
    for stream, layout in enumerate(layouts):
        value = 0x10000 >> 3 | 5 << LAYOUTS[layout][0]["sbid"]
        words = [[value >> shift & (1 << 64) - 1] for shift in (0, 64, 128)]
        stalls.append({"time_ns": 9, "begin_ns": 0, "stream": stream, "w0": words[0], "w1": words[1], "w2": words[2]})
    kernel = {"time_ns": 1, "pid": 7, "path": "/x", "digest": b"1", "size": 1, "elf": b"elf"}
    path = capture(tmp_path / "c", header(layouts), stall=stalls, launch=[launch(2, 7, 0x10000)], kernel=[kernel])
    # when
    found = rows(build(CaptureReader(path), TwoGenerations()).profile)
    # then
    assert {row.code.mnemonic for row in found} == mnemonics
    assert sum(sum(row.counts) for row in found) == 5 * len(layouts)


def test_without_a_stream_modules_are_named_but_not_decoded(tmp_path: Path) -> None:
    kernel = {"time_ns": 1, "pid": 7, "path": "/x", "digest": b"1", "size": 1, "elf": b"elf"}
    path = capture(tmp_path / "c", header([]), kernel=[kernel])
    assert rows(build(CaptureReader(path), TwoGenerations()).profile) == []
    assert TwoGenerations().load(b"", None).kernels[0].at(0).mnemonic == NO_DECODER
