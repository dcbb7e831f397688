"""Whoever guesses what a redacted capture hides cannot tell whether the guess is right."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture import schema
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FIELDS, KINDS
from iaprof.formats.header.traces import JoinedBy, TraceClock
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import is_public_file
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof

SECOND = 10**9
BOOTED = 1_790_000_000 * SECOND
BEGAN = 123_456 * SECOND + 789
WORDS = ["train", "--model", "llama", "--batch", "64"]
PATHS = ["/opt/company/bin/train", "/home/ann/lib/libze_secret.so", "/usr/lib/x86_64-linux-gnu/libc.so.6"]
_DURATIONS = {"slice.duration_ns", "wait.waited_ns"}


def recorded(path: Path, host: str = "gpu-node-17") -> Path:
    """A capture with what a stranger could guess."""
    header = HEADER | {
        "host": {"name": host, "kernel": "6.12.48-company-1", "machine": "x86_64", "cpus": 8, "boot_id": "b" * 36},
        "clock": {"monotonic_ns": BEGAN, "realtime_ns": BOOTED + BEGAN},
        "clock_end": {"monotonic_ns": BEGAN + SECOND, "realtime_ns": BOOTED + BEGAN + SECOND},
        "end_ns": BEGAN + SECOND,
        "thinned": [{"time_ns": BEGAN + 7, "cpu_hz": 1}],
        "paused": [[BEGAN + 5, BEGAN + 9]],
        "command": WORDS,
        "arguments": ["iaprof", "record"],
        "libraries": [{"path": PATHS[1], "probes": 2, "since_ns": BEGAN + 3}],
    }
    mappings = [
        {"time_ns": BEGAN, "pid": 7, "start": number << 20, "length": 1 << 20, "offset": 0, "path": each,
         "build_id": hashlib.sha1(each.encode()).digest(), "inode": None}
        for number, each in enumerate(PATHS, 1)
    ]  # fmt: skip
    stacks = [{"id": 1, "time_ns": BEGAN + 1, "pid": 7, "truncated": False, "ips": [0x100010, 0x200010, 0x300010]}]
    modules = [
        {"id": number, "what": "file", "path": each, "build_id": hashlib.sha1(each.encode()).digest(), "inode": 0,
         "pid": 0, "source": "", "problem": "", "frame_pointers": True}
        for number, each in enumerate(PATHS)
    ]  # fmt: skip
    symbols = [
        {"module": number, "address": 0, "size": 1 << 20, "depth": 0, "function": function, "file": "", "line": 0}
        for number, function in enumerate(["company_train", "company_zeLaunch", "malloc"])
    ]
    process: dict[str, Any] = dict.fromkeys(field.name for field in KINDS["process"])
    process |= {"time_ns": BEGAN, "pid": 7, "tid": 7, "event": "comm", "comm": "train"}
    elf = {"time_ns": BEGAN + 1, "pid": 7, "path": "/tmp/company.elf", "digest": b"\1" * 32, "size": 4, "elf": None}
    return capture(
        path,
        header,
        stall=[stall(BEGAN + 50, record(0x8000_0000, sbid=5), begin_ns=BEGAN + 20)],
        launch=[launch(BEGAN + 10, 7, 0x8000_0000, comm="train", name="company_gemm", size=256)],
        stack=stacks,
        mapping=mappings,
        process=[process],
        kernel=[elf],
        module=modules,
        symbol=symbols,
    )


def redacted(plain: Path, output: Path, *options: str | Path) -> CaptureReader:
    done = iaprof("archive", "--redact", plain, "-o", output, "-q", *options)
    assert (done.code, done.err) == (0, "")
    return CaptureReader(output)


def everything(reader: CaptureReader) -> str:
    return json.dumps(reader.header) + "".join(str(reader.table(kind).to_pylist()) for kind in KINDS)


def hashes(reader: CaptureReader) -> set[str]:
    """What stands for names, as words; for build-ids and digests, as bytes."""
    return set(re.findall(r"[a-z]+-[0-9a-f]{8}\b|b['\"].{20,}?['\"]", everything(reader)))


def test_nothing_of_an_archive_is_what_a_stranger_makes_of_the_very_same_capture(tmp_path: Path) -> None:
    # given a stranger who has guessed everything, down to the last byte
    plain = recorded(tmp_path / "plain")
    # when each makes an archive
    public, guessed = (redacted(plain, tmp_path / name) for name in ("public", "guessed"))
    # then they have nothing in common that would confirm it
    assert len(hashes(public)) > 15
    assert hashes(public) & hashes(guessed) == set()


def test_no_name_is_found_by_hashing_guesses(tmp_path: Path) -> None:
    public = redacted(recorded(tmp_path / "plain"), tmp_path / "public")
    text = everything(public)
    guesses = ["gpu-node-17", "train", "company_gemm", "company_train", *WORDS, *PATHS, "iaprof", "/usr/lib"]
    kinds = ("host", "process", "file", "folder", "word", "function", "kernel", "container", "build-id")
    for guess in guesses:
        for told in (guess, *(f"{kind}:{guess}" for kind in kinds)):
            for algorithm in (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b):
                assert algorithm(told.encode()).hexdigest()[:8] not in text, guess
    for path in PATHS:
        build_id = hashlib.sha1(path.encode()).digest()
        known = {build_id, hashlib.sha256(b"build-id:" + build_id).digest()[:20]}
        assert not known & set(public.table("mapping")["build_id"].to_pylist())
        assert not known & set(public.table("module")["build_id"].to_pylist())


def test_clocks_tell_neither_boot_nor_date_but_durations(tmp_path: Path) -> None:
    plain = recorded(tmp_path / "plain")
    reader = CaptureReader(plain)
    public = redacted(plain, tmp_path / "public")
    begin, end = public.header["clock"], public.header["clock_end"]
    day = 86_400 * SECOND
    assert abs(begin["realtime_ns"] - begin["monotonic_ns"] - BOOTED) > day
    assert abs(begin["monotonic_ns"] - BEGAN) > day
    assert abs(begin["realtime_ns"] - BOOTED - BEGAN) > day
    assert [end[name] - begin[name] for name in ("monotonic_ns", "realtime_ns")] == [SECOND, SECOND]
    # all times of rows and header are moved alike
    moved = begin["monotonic_ns"] - BEGAN
    assert public.header["end_ns"] == BEGAN + SECOND + moved
    assert public.header["paused"] == [[BEGAN + 5 + moved, BEGAN + 9 + moved]]
    assert public.header["libraries"][0]["since_ns"] == BEGAN + 3 + moved
    assert public.header["thinned"] == [{"time_ns": BEGAN + 7 + moved, "cpu_hz": 1}]
    checked = 0
    for kind in KINDS:
        for name in ("time_ns", "begin_ns", "end_ns"):
            if name in KINDS[kind].names and len(reader.table(kind)):
                before, after = (each.table(kind)[name].to_pylist() for each in (reader, public))
                assert after == [time and time + moved for time in before], (kind, name)
                checked += 1
    assert checked >= 7


@pytest.mark.parametrize("by", list(JoinedBy))
def test_the_clock_of_a_joined_trace_tells_no_time(tmp_path: Path, by: JoinedBy) -> None:
    # given a trace whose clock is the wall clock, and gained while it was recorded
    clock = TraceClock(by, -BOOTED, False, drift_ns=99_000, rate=1e-5, steady_ns=BOOTED + BEGAN)
    traces = [{"name": "acme.json", "clock": clock.as_dict()}]
    plain = capture(tmp_path / "plain", HEADER | {"traces": traces}, launch=[launch(BEGAN, 7, 64)])
    # when it is redacted
    found = redacted(plain, tmp_path / "public").header["traces"][0]["clock"]
    # then what it gained stays, but no time
    assert (found["by"], found["drift_ns"], found["rate"]) == (by, 99_000, 1e-5)
    assert (found["offset_ns"], found["steady_ns"]) == (0, 0)


def test_clocks_are_moved_far_and_those_of_two_machines_differently() -> None:
    here, there = ({"host": {"name": name, "boot_id": "1"}} for name in ("a", "b"))
    for number in range(300):
        names = Pseudonyms(bytes([number % 256, number // 256]) * 16)
        clocks, others = names.clocks(here), names.clocks(there)
        assert min(map(abs, (clocks.monotonic_ns, clocks.wall_ns, clocks.trace_ns))) > 50 * 86_400 * SECOND
        assert clocks.monotonic_ns != others.monotonic_ns


def test_every_time_of_the_schema_is_moved() -> None:
    for name, field in FIELDS.items():
        if name.endswith("_ns"):
            assert bool(field.flags & schema.TIME) is (name not in _DURATIONS), name


def test_nothing_tells_the_release_of_the_linux_kernel(tmp_path: Path) -> None:
    assert "6.12" not in everything(redacted(recorded(tmp_path / "plain"), tmp_path / "public"))


def test_functions_stay_only_in_files_that_everybody_has_in_that_folder(tmp_path: Path) -> None:
    public = redacted(recorded(tmp_path / "plain"), tmp_path / "public")
    functions = public.table("symbol")["function"].to_pylist()
    assert "malloc" in functions
    assert not [each for each in functions if "company" in each]
    assert "secret" not in everything(public)


@pytest.mark.parametrize(
    ("path", "is_public"),
    [
        ("/usr/lib/x86_64-linux-gnu/libze_loader.so.1", True),
        ("/home/ann/lib/libze_loader.so.1", False),
        ("/usr/lib/x86_64-linux-gnu/libze_secret.so.1", False),
        ("/srv/usr/lib/libc.so.6", False),
        ("/usr/lib/../../home/ann/libc.so.6", False),
        ("/usr/lib/libc.so.6 (deleted)", False),
    ],
)
def test_folder_and_name_make_a_file_public(path: str, is_public: bool) -> None:
    assert is_public_file(path) is is_public


def test_archives_of_one_key_agree(tmp_path: Path) -> None:
    # given two captures of one machine
    plain, other = recorded(tmp_path / "plain"), recorded(tmp_path / "other")
    key = tmp_path / "key"
    # when the first archive makes the key, and the second one uses it
    first, second = (redacted(each, tmp_path / f"{each.name}.r", "--redact-key", key) for each in (plain, other))
    # then names and clocks agree, and those of another key do not
    assert hashes(first) == hashes(second)
    assert first.header["clock"] == second.header["clock"]
    assert first.header["host"] == second.header["host"]
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) >= 32
    third = redacted(plain, tmp_path / "third", "--redact-key", tmp_path / "another")
    assert hashes(third) & hashes(first) == set()
    assert third.header["clock"] != first.header["clock"]


def test_a_key_that_others_may_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    plain, output = recorded(tmp_path / "plain"), tmp_path / "out"
    public, short, folder = tmp_path / "readable", tmp_path / "short", tmp_path / "folder"
    public.write_bytes(b"k" * 64)
    public.chmod(0o644)
    short.write_bytes(b"k")
    short.chmod(0o600)
    folder.mkdir()
    for key, said in ((public, "others may read the key"), (short, "is not a key"), (folder, "Is a directory")):
        done = iaprof("archive", "--redact", plain, "-o", output, "--redact-key", key)
        assert done.code == 1
        assert re.search(said, done.err)
        assert done.err.count("\n") == 1
        assert not output.exists()
    public.chmod(0o640)  # a group's, too
    assert "others may read" in iaprof("archive", "--redact", plain, "-o", output, "--redact-key", public).err
    assert iaprof("archive", plain, "-o", output, "--redact-key", tmp_path / "k").code == 2


@pytest.mark.parametrize("member", ["host", "command", "libraries", "arguments", "traces", "file"])
def test_lone_surrogates_in_a_header(tmp_path: Path, member: str) -> None:
    lone = "name\udcff\ud800"
    values: dict[str, Any] = {
        "host": {"name": lone, "machine": lone, "boot_id": lone}, "command": [lone], "arguments": [lone],
        "libraries": [{"path": lone}], "traces": [{"name": lone}], "file": lone,
    }  # fmt: skip
    plain = capture(tmp_path / "plain", HEADER | {member: values[member]}, launch=[launch(1, 7, 64)])
    redacted(plain, tmp_path / "public")
    for verb in ("info", "report", "top"):
        assert iaprof(verb, tmp_path / "public").code in (0, 1)


def test_names_of_modules_and_programs_of_the_kernel(tmp_path: Path) -> None:
    high = 0xFFFF_FFFF_8100_0000
    names = [("do_syscall_64", ""), ("xe_exec", "[xe]"), ("acme_ioctl", "[acme_driver]"), ("bpf_prog_12ab_acme", "")]
    stack = {"id": 1, "time_ns": BEGAN, "pid": 0, "truncated": False,
             "ips": [high + (number << 12) + 8 for number in range(len(names))]}  # fmt: skip
    module = {"id": 0, "what": "kernel", "path": "[kernel]", "build_id": None, "inode": 0, "pid": 0, "source": "",
              "problem": "", "frame_pointers": None}  # fmt: skip
    symbols = [
        {"module": 0, "address": high + (number << 12), "size": 1 << 12, "depth": 0, "function": function,
         "file": file, "line": 0}
        for number, (function, file) in enumerate(names)
    ]  # fmt: skip
    plain = capture(tmp_path / "plain", stack=[stack], module=[module], symbol=symbols)
    assert "acme" in everything(CaptureReader(plain))
    public = redacted(plain, tmp_path / "public")
    rows = public.table("symbol").to_pylist()
    assert [(row["function"], row["file"]) for row in rows[:2]] == names[:2]
    assert re.fullmatch(r"function-\w{8}", rows[2]["function"])
    assert re.fullmatch(r"\[module-\w{8}\]", rows[2]["file"])
    assert "acme" not in everything(public)
