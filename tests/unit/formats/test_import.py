"""Import of Intel's iaprof text: both versions, round trips, and malformed texts."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.limits import MAX_TEXT_BYTES, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import Export
from iaprof.formats.imports import iaprof_import
from iaprof.formats.imports.iaprof_import import Facts, import_text
from iaprof.formats.profile import Code, Gauges, Kernel, Launch, Profile, StackOptions
from iaprof.formats.writers.folded import Folded
from iaprof.formats.writers.iaprof_text import IaprofText
from iaprof.formats.writers.writer import Writer
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.imported import profile_of
from iaprof.report.join.attribution import MAX_INTERVALS
from unit.capturing import HEADER, capture
from unit.profiles import Row, profile, rows

TEXTS = Path(__file__).resolve().parents[2] / "data" / "iaprof-text"
S = 1_000_000_000


def read(text: bytes, folder: Path) -> tuple[CaptureReader, Facts]:
    path = folder / "imported.parquet"
    with path.open("wb") as output:
        facts = import_text(io.BytesIO(text), "x.txt", output, lambda done: None)
    return CaptureReader(path), facts


def written(found: Profile, writer: Writer) -> str:
    out = io.StringIO()
    writer.write(Export(found), StackOptions(), out)
    return out.getvalue()


def lines(*fields: str) -> bytes:
    return "".join("\t".join(line.split("|")) + "\n" for line in fields).encode()


# Both versions


def test_a_text_of_2026_2(tmp_path: Path) -> None:
    made, facts = read((TEXTS / "2026.2.txt").read_bytes(), tmp_path)
    stack = "python3;4242;main;0x7f0012345678;py::step:train.py;zeCommandListAppendLaunchKernel;-"
    matmul = f"{stack};src/matmul.cl_[G];matmul(float const*, float*)_[G]"
    assert written(profile_of(made, 0), Folded()) == (
        "[unknown process];-;src/matmul.cl_[G];copy_[G];[failed decode]_[g];inst_fetch_[g];0x0_[g] 7\n"
        f"{stack};0x8000ffd00000_[G];[failed decode]_[g];control_[g];0x40_[g] 2\n"
        f"{matmul};mad_[g];active_[g];0x10_[g] 9\n"
        f"{matmul};mad_[g];control_[g];0x10_[g] 1\n"
        f"{matmul};mad_[g];dist_acc_[g];0x10_[g] 4\n"
        f"{matmul};mad_[g];other_[g];0x10_[g] 5\n"
        f"{matmul};mad_[g];pipestall_[g];0x10_[g] 2\n"
        f"{matmul};mad_[g];tdr_[g];0x10_[g] 1\n"
        f"{matmul};send_[g];sbid_[g];0x120_[g] 51\n"
        f"{matmul};send_[g];send_[g];0x120_[g] 3\n"
    )
    assert (facts.format, facts.intervals, facts.rows, facts.samples) == ("iaprof 2026.2", 3, 5, 85)
    assert {key: made.header[key] for key in ("clock", "streams", "losses", "totals", "imported")} == {
        "clock": {"monotonic_ns": 5000_010_002_000, "realtime_ns": 0},
        "streams": [],
        "losses": [],
        "totals": {"samples": 5, "metrics": 5},
        "imported": {"format": "iaprof 2026.2", "interval_ns": 10_054_000, "cut_texts": 0, "unknown_lines": 0},
    }
    # Intel's timer is not exact: intervals of 10 ms are requested, and these are the times that result.
    by_interval = profile_of(made, 10_000_000)
    assert list(by_interval.intervals) == [5000.010002, 5000.019987, 5000.030110]
    assert by_interval.gauges == {0: Gauges(2050, 97), 1: Gauges(0, 0), 2: Gauges(1900, 3)}
    assert by_interval.counts.sum(axis=1).tolist() == [43, 22, 7, 11, 2]
    # Intervals of other lengths begin with the first.
    assert list(profile_of(made, 15_000_000).intervals) == [5000.010002, 5000.025002]


@pytest.mark.parametrize("name", ["0.5.txt", "0.5.0.txt"])
def test_a_text_of_0_5(name: str, tmp_path: Path) -> None:
    made, facts = read((TEXTS / name).read_bytes(), tmp_path)
    stack = "python3;4242;main;run(int);ioctl"
    kernel = f"{stack};entry_SYSCALL_64_[k];xe_exec_ioctl_[k];-"
    assert written(profile_of(made, 0), Folded()) == (
        "[unknown process];-;[unknown kernel]_[G];other_[g];0xdead000_[g] 7\n"
        f"{stack};-;System Routine (Exceptions)_[G];[failed decode]_[g];active_[g];0x8_[g] 1\n"
        f"{kernel};0xffbf0000_[G];[failed decode]_[g];sync_[g];0x1f0_[g] 11\n"
        f"{kernel};src/matmul.cl_[G];matmul_[G];send_[g];sbid_[g];0x120_[g] 40\n"
        f"{kernel};src/matmul.cl_[G];matmul_[G];send_[g];tdr_[g];0x120_[g] 2\n"
    )
    assert (facts.format, facts.intervals, facts.samples) == ("iaprof 0.5", 2, 61)
    found = rows(profile_of(made, S))
    assert [row.interval for row in found] == [0, 0, 1, 1, 1]
    assert found[1].kernel == Kernel(0xFFBF0000, "0xffbf0000", "")


def test_a_text_is_read_in_blocks_to_the_same_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (TEXTS / "0.5.txt").read_bytes()
    whole = rows(profile_of(read(text, tmp_path)[0], S))
    monkeypatch.setattr(iaprof_import, "_BLOCK_BYTES", 701)  # the first block ends after the first interval's line
    assert rows(profile_of(read(text, tmp_path)[0], S)) == whole


def test_windows_line_ends_are_line_ends(tmp_path: Path) -> None:
    text = (TEXTS / "2026.2.txt").read_bytes()
    plain = read(text, tmp_path)[0].table("sample").to_pylist()
    assert read(text.replace(b"\n", b"\r\n"), tmp_path)[0].table("sample").to_pylist() == plain


# Limits

HEAD = ("string|1|app", "string|2|main", "string|3|k", "interval|0|1.5", "kernel|0x8000|1|7|2|0|3")
ONES = "|".join("1" * 10)


def test_what_a_capture_cannot_hold_is_counted(tmp_path: Path) -> None:
    stack = ";".join(f"frame_{number:06}" for number in range(2000))
    text = lines("noise", f"string|9|{stack}", f"string|8|{'x' * 20000}", *HEAD, "kernel|0x8000|1|7|9|0|8")
    text += lines(f"eustall|0x0|3|{ONES}", "metric|power-W|7", "") + b"metric\tbusy-per"
    made, facts = read(text, tmp_path)
    assert (facts.cut_texts, facts.unknown_lines, facts.first_unknown, facts.cut_line) == (2, 2, 1, True)
    (row,) = rows(profile_of(made, 0))
    assert row.launch is not None and row.kernel is not None
    assert row.kernel.symbol == "x" * MAX_TEXT_BYTES
    kept = row.launch.stack[1:]
    assert row.launch.stack[0] == "[truncated]"
    assert kept == tuple(stack.split(";")[-len(kept) :])
    assert MAX_TEXT_BYTES - 20 < len(";".join(row.launch.stack)) <= MAX_TEXT_BYTES


def test_invalid_utf_8_stays_readable(tmp_path: Path) -> None:
    made, _ = read(lines(*HEAD) + b"string\t4\tm\xff\n" + lines(f"eustall|0x0|4|{ONES}"), tmp_path)
    assert made.table("sample")["mnemonic"].to_pylist() == ["m\\xff"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (f"eustall|0x0|4|{ONES}", "line 6: string '4' is not defined above this line"),
        (f"eustall|10|3|{ONES}", "line 6: this is not 'eustall 0xOFFSET INSTRUCTION COUNT"),
        (f"eustall|0x0|3|{ONES}|1", "line 6: this is not"),
        (f"eustall|0x0|3|-1|{ONES[2:]}", "line 6: this is not"),
        (f"eustall|0x0|3|{'9' * 17}|{ONES[2:]}", "line 6: this is not"),
        (f"eustall|0x11112222333344445|3|{ONES}", "line 6: this is not"),
        (f"eustall|0x0|3|{'9' * 16}|{ONES[2:]}", "up to line 6 the counts add up to more than any GPU has samples"),
        ("kernel|0x8000|1|7|2|0|5", "line 6: string '5' is not defined above this line"),
        ("kernel|0x8000|1|-7|2|0|3", "line 6: '-7' is not a number from 0 to 4294967295"),
        ("kernel|0x8000|1|4294967296|2|0|3", "line 6: '4294967296' is not a number"),
        ("kernel|8000|1|7|2|0|3", "line 6: '8000' is not an address"),
        ("kernel|0x8000|1|7|2|0", "line 6: a line 'kernel' has 6 fields, this one has 5"),
        ("string|1|again", "line 6: string 1 is defined a second time"),
        ("string|0|zero", "line 6: string 0 is defined a second time"),
        ("string|x|text", "line 6: a line 'string' has a number and a text"),
        ("string|4", "line 6: a line 'string' has a number and a text"),
        ("interval|1|nan", "line 6: 'nan' is not a time in seconds"),
        ("interval|1|8589934592.0", "line 6: '8589934592.0' is not a time in seconds"),
        ("interval|1|1.4", "line 6: this interval is earlier than the one before"),
        ("metric|busy-percent|-3", "line 6: '-3' is not a value of a metric"),
    ],
)
def test_an_error_has_the_number_of_its_line(more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(IaprofError, match="^x.txt, " + re.escape(message)):
        read(lines(*HEAD, more), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (("interval|0|1", f"eustall|0x0|3|{ONES}"), "line 2: there is no kernel above this line"),
        (("metric|busy-percent|1", "interval|0|1"), "line 1: there is no interval above this line"),
        (("interval_start|0|1", "interval_end|0", "string|1|active", "e|9|1|0|1"), "line 4: there is no interval"),
        (("string|1|tired", "interval_start|0|1", "e|9|1|0|1"), "line 3: 'tired' is not a reason to wait"),
        (("interval_start|0|1", "e|9|1|0x0|1"), "line 2: this is not 'e STACK REASON OFFSET COUNT'"),
        (("interval_start|0|1", "ustack|4"), "line 2: string '4' is not defined"),
        (("hello",), "has no intervals: it is neither iaprof text nor a trace, or nothing was recorded"),
        ((), "is empty: pass an iaprof text or a trace"),
    ],
)
def test_misplaced_lines(text: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(IaprofError, match=re.escape(message)):
        read(lines(*text), tmp_path)


def test_memory_for_strings_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iaprof_import, "_BLOCK_BYTES", 100)
    with pytest.raises(IaprofError, match="has a line of more than"):
        read(lines("interval|0|1", f"string|1|{'x' * 500}"), tmp_path)
    monkeypatch.setattr("iaprof.formats.imports.iaprof_import._MOST_STRING_BYTES", 1000)
    with pytest.raises(IaprofError, match="line 7: up to here the strings take"):
        read(lines("interval|0|1", *(f"string|{number}|x" for number in range(1, 90))), tmp_path)


# Round trips

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
FRAMES = st.lists(NAMES | st.sampled_from(["main", "ioctl_[k]", "[unknown process]", "a;b"]), max_size=3).map(tuple)
LAUNCHES = st.none() | st.builds(Launch, NAMES, st.integers(0, (1 << 32) - 1), FRAMES, FRAMES)
KERNELS = st.none() | st.builds(Kernel, st.sampled_from([0, 0x40, 0x8000FFBE0000]), NAMES, NAMES)
CODES = st.builds(Code, NAMES, st.lists(NAMES, max_size=2).map(tuple), st.just((0,)))
COUNTS = st.lists(st.integers(0, 1 << 40), min_size=10, max_size=10).map(tuple)
ROWS = st.lists(
    st.builds(Row, st.integers(0, 5), LAUNCHES, KERNELS, CODES, st.sampled_from([0, 16, (1 << 64) - 8]), COUNTS),
    min_size=1,
)


@given(
    made=ROWS,
    start_us=st.integers(1, 1 << 50),
    interval_us=st.integers(1000, 1 << 24),
    gauges=st.dictionaries(st.integers(0, 5), st.builds(Gauges, st.integers(0, 9999), st.integers(0, 100))),
)
@settings(max_examples=60, deadline=None)
def test_import_reads_back_what_report_writes(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[Row],
    start_us: int,
    interval_us: int,
    gauges: dict[int, Gauges],
) -> None:
    made.sort(key=lambda row: row.interval)
    begins = [(start_us + interval_us * number) / 1e6 for number in range(6)]
    before = profile(made, begins, gauges)
    text = written(before, IaprofText())
    assert_readable(text)
    # When
    reader, facts = read(text.encode(), tmp_path_factory.getbasetemp())
    after = profile_of(reader, interval_us * 1000)
    # Then
    assert written(after, IaprofText()) == text
    assert after.counts.sum() == facts.samples == sum(sum(row.counts) for row in made)
    keys = np.stack([after.interval, after.launch, after.kernel], axis=1).tolist()
    assert keys == sorted(keys)
    assert len({row[:5] for row in rows(after)}) == len(after)


def test_folded_stacks_survive_the_text_as_far_as_it_holds_them(tmp_path: Path) -> None:
    ones = (1,) * 10
    launch = Launch("app", 42, ("main", "py::f:a.py"), ("do_syscall_64",))
    made = profile(
        [
            Row(0, launch, Kernel(0x8000, "matmul", "a.cl"), Code("send", ("matmul",), (4,)), 16, ones),
            Row(0, Launch("app", 42, ()), Kernel(0x9000, "copy", ""), Code("mov", ("copy",), (0,)), 0, ones),
            Row(1, None, None, Code("[no binary]", ("[ambiguous: 2 processes]",), ()), 0xABC0, ones),
            Row(1, None, None, Code("[no binary]", (), ()), 0xABC0, ones),
        ],
        [3.0, 4.0],
    )
    reader, _ = read(written(made, IaprofText()).encode(), tmp_path)
    assert written(profile_of(reader, S), Folded()) == written(made, Folded())


def assert_readable(text: str) -> None:
    """The properties that other programs rely on: Intel's converter splits at tabs and looks ids up."""
    defined: set[str] = set()
    above, metrics, intervals = "", 2, 0
    for line in text.removesuffix("\n").split("\n"):
        kind, *fields = line.split("\t")
        if kind == "string":
            assert int(fields[0]) == len(defined) + 1 and len(fields) == 2
            defined.add(fields[0])
            continue
        if kind == "interval":
            assert above in ("", "metric") and metrics == 2 and fields[0] == str(intervals)
            assert re.fullmatch(r"[0-9]+\.[0-9]{6}", fields[1])
            intervals, metrics = intervals + 1, 0
        elif kind == "kernel":
            assert above in ("interval", "eustall") and {fields[1], *fields[3:]} <= defined and len(fields) == 6
        elif kind == "eustall":
            assert above in ("kernel", "eustall") and fields[1] in defined and len(fields) == 2 + len(REASONS)
        else:
            assert line.startswith(("metric\tfrequency-MHz\t", "metric\tbusy-percent\t")[metrics])
            metrics += 1
        above = kind
    assert metrics == 2


# Untrusted captures


def sample(**members: object) -> dict[str, object]:
    row = {"time_ns": S, "comm": "app", "pid": 7, "stack": "main", "address": 64, "kernel": "k", "file": "",
           "offset": 0, "mnemonic": "mov", **dict.fromkeys(REASONS, 1)}  # fmt: skip
    return row | members


def test_samples_of_untrusted_captures_are_bounded(tmp_path: Path) -> None:
    absurd = [sample(tdr=(1 << 64) - 1)] * 3
    with pytest.raises(CaptureError, match="counts are absurdly high"):
        profile_of(CaptureReader(capture(tmp_path / "a", sample=absurd)), S)
    far = [sample(time_ns=(MAX_INTERVALS + 1) * S)]
    with pytest.raises(CaptureError, match="span 1,048,577 intervals: choose longer ones"):
        profile_of(CaptureReader(capture(tmp_path / "b", sample=far)), S)
    early = [sample(time_ns=0), sample(time_ns=(1 << 64) - 1)]
    for header in (HEADER, {}, {"clock": [], "imported": {"interval_ns": -1}}, {"imported": {"interval_ns": "x"}}):
        found = profile_of(CaptureReader(capture(tmp_path / "c", header, sample=early)), 0)
        assert [(row.interval, sum(row.counts)) for row in rows(found)] == [(0, 20)]


def test_no_samples_are_no_rows(tmp_path: Path) -> None:
    found = profile_of(read(lines("interval|0|1"), tmp_path)[0], S)
    assert (len(found), list(found.intervals), found.gauges) == (0, [], {})


# The verb


def iaprof(*words: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "iaprof", "import", *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, input=stdin, timeout=120, check=False)


def test_the_verb(tmp_path: Path) -> None:
    text = tmp_path / "old.iaprof.txt"
    text.write_bytes((TEXTS / "2026.2.txt").read_bytes() + b"noise\nmetric")
    target = tmp_path / "old.parquet"
    done = iaprof(text)
    assert (done.returncode, done.stdout) == (0, b"")
    said = done.stderr.decode().replace(str(target), "old.parquet")
    assert re.sub(r"wrote [0-9.]+ kB", "wrote N kB", said) == (
        "iaprof: warning: 1 line of unknown kinds left out, the first is line 27\n"
        "iaprof: warning: the last line has no end and was left out: was the file cut short?\n"
        "[ iaprof import: wrote N kB to old.parquet; iaprof 2026.2, 3 intervals, 85 samples in 5 rows ]\n"
    )
    assert CaptureReader(target).header["imported"]["unknown_lines"] == 1
    again = iaprof(text)
    assert (again.returncode, b"exists" in again.stderr) == (1, True)


def test_the_verb_on_stdin_answers_in_json(tmp_path: Path) -> None:
    target = tmp_path / "c.parquet"
    done = iaprof("-", "-o", target, "--json", stdin=(TEXTS / "0.5.txt").read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == {
        "output": str(target),
        "bytes": target.stat().st_size,
        "format": "iaprof 0.5",
        "intervals": 2,
        "interval_s": 1.0031,
        "rows": 5,
        "samples": 61,
        "metrics": 3,
        "cut_texts": 0,
        "unknown_lines": 0,
        "last_line_cut": False,
    }


def test_a_failed_import_leaves_no_file(tmp_path: Path) -> None:
    text = tmp_path / "x.txt"
    text.write_bytes(lines(*HEAD, f"eustall|0x0|3|{ONES}", "string|1|x"))
    done = iaprof(text)
    assert done.returncode == 1
    assert (
        done.stderr.decode()
        == f"iaprof: {text}, line 7: string 1 is defined a second time: import one text at a time\n"
    )
    assert list(tmp_path.iterdir()) == [text]
    assert iaprof(tmp_path / "absent").stderr.decode().endswith("cannot be read: No such file or directory\n")
