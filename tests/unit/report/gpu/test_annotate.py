"""`iaprof annotate`: whole listings of a kernel made by hand, and of a real one in a capture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.cli.main import main
from iaprof.cli.terminal.listing_lines import lines
from iaprof.cli.verbs.annotate import chosen
from iaprof.formats.profile import Code, Kernel, Launch
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.report.gpu.module import GpuFrame, GpuKernel, InstructionInfo
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.views.annotation import Listing, listings, matching_kernels
from unit.capturing import capture, launch, record, stall
from unit.profiles import Row, counts, profile
from unit.zebins import FOLDER, debug_elf

APP, OTHER = Launch("app", 7, ("main",)), Launch("app", 8, ("main",))
MATMUL = Kernel(0x1000, "matmul", "/build/src/matmul.cl")
AGAIN = Kernel(0x9000, "matmul", "/build/src/matmul.cl")
ELSE = Kernel(0x5000, "dot(float*)", "")
OUTER = GpuFrame("matmul", "/build/src/matmul.cl", 3)
INNER = (GpuFrame("matmul", "/build/src/matmul.cl", 4), GpuFrame("dot(float)", "/build/src/vec.h", 1))
LOAD = "send.ugm (32|M0)         r22      r18  null:0  0x0            0x08200580           {I@1,$2} // wr:4+0; load"
CODE = [
    (0x00, 16, "add", "(W)     add (1|M0)               r3.0<1>:q     r3.0<1;1,0>:q     16:w   {Compacted}", (OUTER,)),
    (0x10, 16, "send", LOAD, INNER),
    (0x20, 8, "sync", "sync.nop                             null        {Compacted,$2.dst}", INNER),
    (0x28, 8, "mad", "mad (32|M0)              r14.0<1>:f    r14.0<1;0>:f      r22.0<1;0>:f   {F@3}", INNER),
    (0x30, 16, "jmpi", "(W&f1.0) jmpi                                L0", (OUTER,)),
    (0x40, 16, "illegal", "illegal", (OUTER,)),
]
ROWS = [
    Row(0, APP, MATMUL, Code("send", ("matmul",), (3,)), 0x10, counts(send=50, active=1)),
    Row(0, OTHER, AGAIN, Code("send", ("matmul",), (3,)), 0x10, counts(send=30)),
    Row(0, APP, MATMUL, Code("sync", ("matmul",), (3,)), 0x20, counts(sync=12_000)),
    Row(0, APP, MATMUL, Code("mad", ("matmul",), (3,)), 0x28, counts(dist_acc=700, tdr=2)),
    Row(0, APP, ELSE, Code("mov", ("dot(float*)",), (0,)), 0x0, counts(active=217)),
]
PROFILE = replace(profile(ROWS), launch_counts={0: 40, 1: 2})


def by_hand(fingerprint: str = "f") -> GpuKernel:
    kernel = GpuKernel("matmul", "matmul", 0x1000, 0x40, 0x50, fingerprint=fingerprint, simd=16)
    jumps = {0x30: (0x00,)}
    found = tuple(
        InstructionInfo(at, size, name, text, jumps.get(at, ()), frames) for at, size, name, text, frames in CODE
    )
    kernel.__dict__["instructions"] = found  # as if they had been decoded
    return kernel


def of(name: str, fingerprints: tuple[str, ...] = ("f", "f")) -> list[Listing]:
    kernels = [by_hand(fingerprint) for fingerprint in fingerprints]
    return listings(PROFILE, [name], lambda index: kernels[index] if index < len(kernels) else None)


@pytest.fixture
def sources(tmp_path: Path) -> SourceFiles:
    (tmp_path / "matmul.cl").write_text("kernel\n{\n\tfor (;;)\n\t\tc += dot(a);\n}\n")
    return SourceFiles([tmp_path])


NARROW = """\
matmul
/build/src/matmul.cl
12,783 samples, 98.3 % of all; 2 processes, 42 launches; SIMD16
launched by main

  SAMPLES     %  SYNC  DIST   OFFSET  INSTRUCTION
   12,783 100.0  93.9   5.5           (all)
matmul.cl:3      for (;;)
                                 0x0  add r3.0:q r3.0:q 16:w
-- in matmul > dot(float)
vec.h:1
       81   0.6                 0x10  send.ugm r22 r18 …8200580 {I@1,$2}
   12,000  93.9  93.9       >   0x20  sync.nop null {$2.dst}
           ^ waits for 0x10 send.ugm at vec.h:1 ($2.dst)
      702   5.5         5.5     0x28  mad r14.0:f r14.0:f r22.0:f {F@3}
           ^ waits for the instruction 3 back in the float pipe (F@3)
-- in matmul
matmul.cl:3      for (;;)
                                0x30  (W&f1.0) jmpi L0

   SYNC  waits for other threads
   DIST  dist_acc: waits for a register that an instruction shortly bef…"""


def test_a_narrow_terminal(sources: SourceFiles) -> None:
    found = list(lines(of("matmul"), sources, 72, False))
    assert "\n".join(found) == NARROW
    assert max(map(len, found)) <= 72


def test_a_pipe_gets_everything(sources: SourceFiles) -> None:
    found = "\n".join(lines(of("matmul"), sources, None, False))
    assert "send.ugm (32|M0) r22 r18 null:0 0x0 0x08200580 {I@1,$2}  // wr:4+0; load\n" in found
    assert "mad (32|M0) r14.0<1>:f r14.0<1;0>:f r22.0<1;0>:f {F@3}\n" in found


def test_colours_do_not_change_the_text(sources: SourceFiles) -> None:
    found = list(lines(of("matmul"), sources, 80, True))
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in found]
    assert plain == list(lines(of("matmul"), sources, 80, False))
    assert [line for line in found if line.startswith("\x1b[1;31m")] == [line for line in found if ">   0x20" in line]
    assert next(line for line in found if "  0x30  " in line).startswith("\x1b[2m")


def test_different_code_of_one_name_has_its_own_listing() -> None:
    assert [(each.samples, each.processes, each.launches) for each in of("matmul", ("f", "g"))] == [
        (12_753, 1, 40),
        (30, 1, 2),
    ]


def test_a_kernel_without_binary() -> None:
    (found,) = of("dot(float*)")
    assert "\n".join(lines([found], SourceFiles([]), 80, False)) == (
        "dot(float*)\n"
        "217 samples, 1.7 % of all; 1 process, no launch recorded\n"
        "launched by main\n"
        "\n"
        "  SAMPLES     % ACTIV   OFFSET  INSTRUCTION\n"
        "      217 100.0 100.0           (all)\n"
        "      217 100.0 100.0 >   0x0  mov\n"
        "\n"
        "  ACTIV  active: an instruction was issued: no stall"
    ).replace("100.0 >   0x0", "100.0 >    0x0")


def test_stalls_at_offsets_without_an_instruction() -> None:
    rows = [Row(0, APP, MATMUL, Code("", ("matmul",), (0,)), offset, counts(other=1)) for offset in (0x18, 0x48)]
    (found,) = listings(profile(rows), ["matmul"], lambda index: by_hand())
    shown = {row.instruction.offset: row.instruction.mnemonic for row in found.rows if row.samples}
    assert shown == {0x18: "[no decoder]", 0x48: "[no decoder]"}
    assert found.samples == sum(row.samples for row in found.rows) == 2


def test_untrusted_names_and_sources_stay_in_their_line(tmp_path: Path) -> None:
    (tmp_path / "x.cl").write_text("a\x1b[2Jb\r\u202ec 漢字漢字漢字\n")
    evil = Kernel(0x1000, "evil\n\x1b[2J", "/x\r.cl")
    frames = (GpuFrame("evil\n\x1b[2J", "x.cl", 1),)
    kernel = GpuKernel("evil", "evil", 0x1000, 0x40, 0x50)
    kernel.__dict__["instructions"] = (InstructionInfo(0, 16, "mov", "mov \x1b[2J r1\n{$2.dst}", (), frames),)
    row = Row(0, APP, evil, Code("mov", ("evil",), (1,)), 0, counts(sbid=1))
    for width in (None, 30):
        found = list(
            lines(listings(profile([row]), [evil.symbol], lambda _: kernel), SourceFiles([tmp_path]), width, False)
        )
        assert all(line.isprintable() for line in found)
        assert "evil\\x0a\\x1b[2J" in found
        assert any(line.startswith("x.cl:1  a\\x1b[2Jb\\x0d\\u202ec") for line in found)


def test_matching_kernels_by_name_or_pattern() -> None:
    names = ["matmul", "matmul_tiled", "dot(float*)", "dot(float*) [code 12]"]
    rows = [
        Row(0, APP, Kernel(at, name, ""), Code("mov", (name,), (0,)), 0, counts(active=10 - at))
        for at, name in enumerate(names)
    ]
    made = profile(rows)
    assert matching_kernels(made, "matmul") == ["matmul"]
    assert matching_kernels(made, "mat.*") == ["matmul", "matmul_tiled"]
    assert matching_kernels(made, "MATMUL") == []
    assert matching_kernels(made, "dot(float*)") == ["dot(float*)"]
    assert (
        matching_kernels(made, "t(float*)") == names[2:]
    )  # literally: as a regular expression, it matches none of these
    assert matching_kernels(made, "(") == names[2:]
    assert matching_kernels(profile([]), ".") == []


def test_no_kernel_or_too_many_match() -> None:
    rows = [
        Row(0, APP, Kernel(at, f"kernel_{at}", ""), Code("mov", (), ()), 0, counts(active=20 - at)) for at in range(12)
    ]
    with pytest.raises(IaprofError) as none:
        chosen(profile(rows), "matmul")
    assert str(none.value) == "no kernel with stalls is called 'matmul': run 'iaprof top' to list kernels"
    with pytest.raises(IaprofError) as many:
        chosen(profile(rows), "kern")
    assert str(many.value).startswith("12 kernels match 'kern': name one of 'kernel_0', 'kernel_1',")
    assert str(many.value).endswith("'kernel_9' and 2 more")
    assert len(chosen(profile(rows[:5]), "kern")) == 5


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Stalls of a real kernel, most of them at the instruction that waits for the loads in its loop."""
    elf = debug_elf("lnl", "matmul")
    kernel = next(each for each in read_zebin(elf).kernels if each.name == "multiply_local_access")
    row = {"time_ns": 1, "pid": 7, "path": "/tmp/m.elf", "digest": bytes(32), "size": len(elf), "elf": elf}
    stalls = [record(kernel.address + 0x2A8, sbid=90), record(kernel.address + 0x270, send=9)]
    header = {"clock": {"monotonic_ns": 0, "realtime_ns": 10**18}, "totals": {}, "losses": []}
    return capture(
        tmp_path / "cap.parquet",
        header | {"streams": [{"layout": "xe2", "ip_version": [20, 4, 4]}]},
        kernel=[row],
        stall=[stall(9, *stalls)],
        launch=[launch(2, 7, kernel.address, 0, size=kernel.size, flags=2)],
    )


def test_a_capture(recorded: Path, tmp_path: Path) -> None:
    for name in ("matmul.cl", "lib/tile.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((FOLDER / "src" / name).read_text())
        os.utime(tmp_path / name, (10**9 + 5, 10**9 + 5 if name == "lib/tile.h" else 10**8))
    command: list[str | Path] = [sys.executable, "-m", "iaprof", "annotate", recorded]
    command += ["local_access$", "--source-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text = done.stdout
    assert text.startswith(
        "multiply_local_access\n/build/zebin/src/matmul.cl\n99 samples, 100.0 % of all; 1 process, 1 "
    )
    hottest = text.index("       90  90.9  90.9       >  0x2a8  mad (32|M0)")
    assert text[hottest:].splitlines()[1] == "           ^ waits for 0x260 send.ugm at tile.h:7 ($2.dst)"
    assert "tile.h:7      sum = fma(a[row * n + k], b[k * n + col], sum);" in text[:hottest]
    assert text.count(">  0x") == 1
    warning = f"iaprof: warning: {tmp_path}/lib/tile.h was changed after the recording began: its lines may differ"
    assert warning in done.stderr.splitlines()
    assert "matmul.cl was changed" not in done.stderr


def test_json(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["iaprof", "annotate", str(recorded), "local_access$", "--json"])
    with pytest.raises(SystemExit):
        main()
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (kernel["kernel"], kernel["samples"], kernel["launches"]) == ("multiply_local_access", 99, 1)
    assert kernel["reasons"] == dict(zip(REASONS, counts(sbid=90, send=9), strict=True))
    by_offset = {each["offset"]: each for each in kernel["instructions"]}
    mad = by_offset[0x2A8]
    assert (mad["mnemonic"], mad["samples"], mad["reasons"], mad["source"]) == ("mad", 90, {"sbid": 90}, None)
    assert mad["waits"] == [{"what": "$2.dst", "for": [0x260]}]
    assert [frame["function"] for frame in mad["frames"]] == ["multiply_local_access", "dot_row"]
    assert sum(each["samples"] for each in kernel["instructions"]) == 99
