"""Whole outputs of the text formats, from rows made by hand."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.basics.clean import clean
from iaprof.formats.export import Export
from iaprof.formats.profile import Code, Kernel, Launch, StackOptions
from iaprof.formats.writers.folded import Folded
from iaprof.formats.writers.iaprof_text import IaprofText
from iaprof.gpu.intel.reasons import REASONS
from unit.in_process import iaprof
from unit.profiles import Row, profile

LAUNCH = Launch("app", 42, ("main", "run(int)"), ("do_syscall_64",))
KERNEL = Kernel(0x8000FFBE0000, "matmul", "src/matmul.cl")
ROWS = [
    Row(0, LAUNCH, KERNEL, Code("send", ("matmul", "dot(float)"), (4, 9)), 0x10, (1, 0, 0, 0, 0, 7, 0, 0, 0, 0)),
    Row(0, LAUNCH, KERNEL, Code("mov", ("matmul",), (0,)), 0x20, (0, 0, 0, 0, 0, 0, 0, 0, 0, 2)),
    Row(2, None, None, Code("[no binary]", (), ()), 0xABC0, (0, 3, 0, 0, 0, 0, 0, 0, 0, 0)),
]


def written(writer: Folded | IaprofText, rows: list[Row], options: StackOptions | None = None) -> str:
    out = io.StringIO()
    writer.write(Export(profile(rows, [10.0, 11.0, 12.0])), options or StackOptions(), out)
    return out.getvalue()


def test_folded() -> None:
    head = "app;42;main;run(int);do_syscall_64_[k];-;src/matmul.cl_[G];matmul_[G]"
    assert written(Folded(), [*ROWS, ROWS[0]]) == (
        "[unknown process];-;[unknown kernel]_[G];control_[g];0xabc0_[g] 3\n"
        f"{head};dot(float)_[G];send_[g];active_[g];0x10_[g] 2\n"
        f"{head};dot(float)_[G];send_[g];sbid_[g];0x10_[g] 14\n"
        f"{head};mov_[g];tdr_[g];0x20_[g] 2\n"
    )


def test_folded_with_lines() -> None:
    text = written(Folded(), ROWS[:1], StackOptions(gpu_lines=True))
    assert "src/matmul.cl_[G];matmul line 4_[G];dot(float) line 9_[G];send_[g]" in text


def test_a_line_in_another_file_names_the_file() -> None:
    files = ("src/matmul.cl", "include/vec.h", "")
    code = Code("send", ("matmul", "dot(float)", "mad"), (4, 9, 2), files)
    row = Row(0, LAUNCH, KERNEL, code, 0x10, (1,) + (0,) * 9)
    text = written(Folded(), [row], StackOptions(gpu_lines=True))
    assert ";matmul line 4_[G];dot(float) vec.h line 9_[G];mad line 2_[G];send_[g]" in text


@pytest.mark.parametrize(
    ("file", "frames"),
    [
        ("/build/src/matmul.cl", "build_[G];src_[G];matmul.cl_[G];"),
        ("src/../matmul.cl", "src_[G];.._[G];matmul.cl_[G];"),
        ("./matmul.cl", "matmul.cl_[G];"),
        ("matmul.cl", "matmul.cl_[G];"),
        ("", ""),
        ("///", ""),
        ("a;b/c\nd", "a:b_[G];c\\x0ad_[G];"),
    ],
)
def test_folders_as_frames(file: str, frames: str) -> None:
    row = Row(0, LAUNCH, Kernel(0x8000, "matmul", file), Code("mov", ("matmul",), (1,)), 0, (1,) + (0,) * 9)
    text = written(Folded(), [row], StackOptions(gpu_dirs=True))
    assert text.split(";-;")[1] == f"{frames}matmul_[G];mov_[g];active_[g];0x0_[g] 1\n"


def test_iaprof_text() -> None:
    assert written(IaprofText(), ROWS) == (
        "interval\t0\t10.000000\n"
        "string\t1\tapp\n"
        "string\t2\tmain;run(int);do_syscall_64_[k]\n"
        "string\t3\tsrc/matmul.cl\n"
        "string\t4\tmatmul\n"
        "kernel\t0x8000ffbe0000\t1\t42\t2\t3\t4\n"
        "string\t5\tsend\n"
        "eustall\t0x10\t5\t1\t0\t0\t0\t0\t7\t0\t0\t0\t0\n"
        "string\t6\tmov\n"
        "eustall\t0x20\t6\t0\t0\t0\t0\t0\t0\t0\t0\t0\t2\n"
        "metric\tfrequency-MHz\t0\n"
        "metric\tbusy-percent\t0\n"
        "interval\t1\t11.000000\n"
        "metric\tfrequency-MHz\t0\n"
        "metric\tbusy-percent\t0\n"
        "interval\t2\t12.000000\n"
        "string\t7\t[unknown process]\n"
        "string\t8\t[unknown file]\n"
        "string\t9\t[unknown kernel]\n"
        "kernel\t0x0\t7\t0\t7\t8\t9\n"
        "string\t10\t[no binary]\n"
        "eustall\t0xabc0\t10\t0\t3\t0\t0\t0\t0\t0\t0\t0\t0\n"
        "metric\tfrequency-MHz\t0\n"
        "metric\tbusy-percent\t0\n"
    )


def test_an_empty_profile_gives_an_empty_text() -> None:
    assert written(Folded(), []) == ""
    assert written(IaprofText(), []) == ""


HOSTILE = "a;b\nc\td\x1b[31m\u202e\0\x7f"


def test_hostile_names_stay_within_their_field() -> None:
    launch = Launch(HOSTILE, 1, (HOSTILE,), (HOSTILE,))
    kernel = Kernel(0, HOSTILE, HOSTILE)
    row = Row(0, launch, kernel, Code(HOSTILE, (HOSTILE,), (1,)), 0, (1,) * 10)
    folded = written(Folded(), [row]).splitlines()
    assert len(folded) == 10
    for line in folded:
        assert line.isprintable()
        assert line.count(";") == 9
    text = written(IaprofText(), [row]).splitlines()
    assert sum(line.startswith("eustall\t") for line in text) == 1
    for line in text:
        assert line.replace("\t", "").isprintable()
        assert line.split("\t")[0] in ("interval", "string", "kernel", "eustall", "metric")


def test_clean() -> None:
    assert clean("std::vector<int>") == "std::vector<int>"
    assert clean("größe") == "größe"
    assert clean("a;b", ";") == "a:b"
    assert clean("a\nb\x1b") == "a\\x0ab\\x1b"


def test_max_stack_applies_to_iaprof_text() -> None:
    row = ROWS[0]._replace(launch=Launch("app", 1, ("main", "run", "leaf")))
    assert "[truncated];run;leaf\n" in written(IaprofText(), [row], StackOptions(max_stack=2))


def test_the_command_starts_without_arrow_and_protobuf() -> None:
    code = (
        "import sys, iaprof.cli.main; print([name for name in ('pyarrow', 'google.protobuf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def folded_total(file: Path) -> int:
    return sum(int(line.rsplit(" ", 1)[1]) for line in file.read_text().splitlines())


def iaprof_total(file: Path) -> int:
    lines = (line.split("\t") for line in file.read_text().splitlines())
    return sum(sum(map(int, line[3:])) for line in lines if line[0] == "eustall")


TOTALS = {"folded": folded_total, "iaprof": iaprof_total}


DOC = Path(__file__).parents[3] / "docs" / "iaprof-text.md"
CAPTURE = Path(__file__).parents[2] / "data" / "captures" / "format-9.parquet"
CONVERTER = f"""\
awk -F'\\t' '
    BEGIN {{ split("{" ".join(REASONS)}", names, " "); for (at in names) stall_reasons[at - 1] = names[at] }}
    /^eustall/ {{
        idx = 4;
        for (reason in stall_reasons) {{
            if ($idx == 0) continue
            sums[reason] += $idx
            idx++
        }}
    }}
    END {{ for (reason in sums) print reason, sums[reason] }}
'
"""
"""A converter with the faults of Intel's that the documentation names: only the loop is like Intel's."""


def test_the_documented_command_corrects_a_converter_that_stops_at_a_count_of_0(tmp_path: Path) -> None:
    # given our text of a capture, what its columns add up to, and a converter
    text = iaprof("report", CAPTURE, "--format=iaprof", "-q").out
    lines = [line.split("\t") for line in text.splitlines()]
    columns = [[int(count) for count in line[3:]] for line in lines if line[0] == "eustall"]
    sums = dict(zip(REASONS, map(sum, zip(*columns, strict=True)), strict=True))
    script = tmp_path / "iaprof_to_stack_collapse.sh"
    script.write_text(CONVERTER)

    def converted() -> dict[str, int]:
        out = subprocess.run(["sh", script], input=text, capture_output=True, text=True, check=True).stdout
        return {name: int(count) for name, count in map(str.split, out.splitlines())}

    assert sum(converted().values()) < sum(sums.values())
    # when the command of the documentation is run
    (command,) = (line for line in DOC.read_text().splitlines() if line.startswith("    sed "))
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    # then no sample is missing, and reasons have their names
    assert {name: count for name, count in converted().items() if count} == {k: v for k, v in sums.items() if v}
    ranked = json.loads(iaprof("top", CAPTURE, "--by", "reason", "--json", "-q").out)
    assert sum(sums.values()) == ranked["total"]["samples"]
