"""Hostile names from perf maps, symbols and debug information: outputs stay well formed."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.registry import WRITERS
from iaprof.report.archive.archiving import archive
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.profile import ReportOptions, build
from iaprof.symbols.cpu_frames import FrameOptions
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Module, Names, Symbolized
from iaprof.symbols.symbolizers.generated import GeneratedCode
from unit.capturing import capture, launch, named_by, record, stall

NAMES = [
    "a\nb", "a;b;c", "a\tb\rc", "\"quotes\" 'and' `ticks`", "<script>alert(1)</script>]]></style>",
    "\x1b[31mred\x1b]0;t\x07", "\u202egnp.exe", "a\0b", "x" * 5_000_000,
    " 12345", "_[k]", "-", "[unknown kernel]", "", "\\", "%s%n",
    "é\u2028\u0085",
]  # fmt: skip


class Hostile:
    """A Symbolizer that gives each address one of the names, as function and file."""

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized:
        entries = [(int(a), 1, [Frame(NAMES[int(a) % 100], NAMES[int(a) % 100], 7)]) for a in addresses]
        return Symbolized(Names.of(entries), NAMES[4], NAMES[5], False)


@pytest.fixture
def recorded(tmp_path: Path) -> CaptureReader:
    """A capture with these names, and for each name a launch with stalls, whose stack has only that name."""
    stacks = [
        {"id": i + 1, "time_ns": 5, "pid": 7, "truncated": False, "ips": [100 * (i + 1) + i]} for i in range(len(NAMES))
    ]
    launches = [launch(10 + i, 7, 0x4000 + 0x1000 * i, stack=i + 1, name="k") for i in range(len(NAMES))]
    stalls = [stall(1000, *(record(0x4000 + 0x1000 * i, sbid=1 + i) for i in range(len(NAMES))))]
    path = capture(tmp_path / "bare", stack=stacks, launch=launches, stall=stalls)
    archive(
        CaptureReader(path),
        tmp_path / "c",
        named_by(lambda _: Hostile()),
        lambda *_: None,
        redact=None,
        keep_kernels=True,
    )
    return CaptureReader(tmp_path / "c")


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if not writer.binary or name == "csv"])
@pytest.mark.parametrize("frame_options", [FrameOptions(), FrameOptions(lines=True)])
def test_hostile_names_do_not_break_the_lines_of_text_formats(
    name: str, frame_options: FrameOptions, recorded: CaptureReader
) -> None:
    out = io.BytesIO() if WRITERS[name].binary else io.StringIO()
    with GpuModuleLoader() as modules:
        built = build(
            recorded,
            modules,
            ReportOptions(interval_s=1.0 if WRITERS[name].interval_s else 0.0, frame_options=frame_options),
        )
        WRITERS[name].write(Export(built.profile), StackOptions(), out)
    text = out.getvalue().decode() if isinstance(out, io.BytesIO) else out.getvalue()
    # then no control characters remain, and no line is broken or added
    assert all(character.isprintable() for line in text.split("\n") for character in line.replace("\t", ""))
    assert max(map(len, text.split("\n"))) < 5 * LONGEST_NAME
    lines = text.splitlines()
    assert len(lines) == text.count("\n")
    if name == "folded":
        assert len(lines) == len(NAMES)
        assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == sum(range(1, len(NAMES) + 1))
        assert {len(line.split(";-;")[0].split(";")) for line in lines} == {3}
    if name == "iaprof":
        assert "\t".join(lines).count("eustall\t") == len(NAMES)


def test_a_perf_map_with_hostile_names(tmp_path: Path) -> None:
    # given a perf map with these names, one on each line
    with (tmp_path / "map").open("wb") as file:
        for number, name in enumerate(NAMES):
            file.write(f"{0x1000 * (number + 1):x} 100 ".encode() + name.encode("utf-8", "surrogateescape") + b"\n")
    fd = os.open(tmp_path / "map", os.O_RDONLY)
    addresses = np.arange(1, len(NAMES) + 1, dtype=np.uint64) * np.uint64(0x1000)
    # when
    with GeneratedCode() as generated:
        symbolized = generated.name(fd, (), addresses, addresses)
    os.close(fd)
    # then each address has its own name, or none
    rows = symbolized.names.find(addresses)
    assert (rows >= 0).sum() >= len(NAMES) - 2
    functions = {
        int(a): symbolized.names.frames(row)[0].function for a, row in zip(addresses, rows, strict=True) if row >= 0
    }
    assert functions[0x1000 * (NAMES.index("a;b;c") + 1)] == "a;b;c"
    assert max(map(len, functions.values())) <= 1 << 13
    assert not any("\n" in name for name in functions.values())
