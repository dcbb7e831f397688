"""Small files that expand to gigabytes: no verb exceeds its memory limit, whatever a capture declares."""

from __future__ import annotations

import mmap
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from iaprof.basics.errors import UsageError
from iaprof.cli import main
from iaprof.cli.options.memory_limit import memory_bytes
from iaprof.formats.capture.dictionaries import (
    bounded_slices,
    decoded_bytes,
    deduplicated,
    map_texts,
    shared_texts,
    with_null_rows,
)
from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, SCHEMA
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.writers.registry import WRITERS
from iaprof.record.spool import FrameKind, Spool, framed
from iaprof.sandbox.memory import available
from iaprof.timelines.outputs.formats import FORMATS
from thorough import thorough, usually
from unit.bombs import BOMBS, LONGEST, texts_of_time_lines
from unit.capturing import HEADER, capture
from unit.formats.test_hostile_captures import rows
from unit.in_process import iaprof
from unit.memory_runs import Run, Runs

LIMIT = 320 << 20  # a third of it is for Python and its libraries
MOST_ON_DISK = 25 << 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("runs")) as started:
        yield started


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid capture."""
    header = HEADER | {"clock": {"monotonic_ns": 5, "realtime_ns": 77}}
    return capture(tmp_path_factory.mktemp("other") / "other.parquet", header, **rows())


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with texts of the maximum length everywhere."""
    return BOMBS["texts_everywhere"](tmp_path_factory.mktemp("bomb") / "bomb.parquet")


def commands(bomb: Path, other: Path, output: Path) -> dict[str, list[str | Path]]:
    """Every verb that reads captures; those that write a capture write `output`."""
    texts = "SELECT max(name), max(comm) FROM launches UNION ALL SELECT max(function), max(file) FROM symbols"
    return {
        "report": ["report", "-q", bomb],
        "page": ["report", "-q", "-o", output.with_suffix(".html"), bomb],
        "top": ["top", "-q", bomb],
        "diff": ["diff", "-q", other, bomb],
        "annotate": ["annotate", bomb, "k"],
        "query": ["query", bomb, f"{texts} UNION ALL SELECT max(path), max(hex(build_id)) FROM mappings"],
        "info": ["info", bomb],
        "archive": ["archive", "-q", "-o", output, bomb],
        "redact": ["archive", "-q", "--redact", "-o", output, bomb],
        "merge": ["merge", "-q", "-o", output, bomb, other],
    }


def assert_bounded(run: Run, most: int, folder: Path, what: str) -> None:
    assert run.code in (0, 1), f"{what}: {run.err}"
    assert run.peak <= most, f"{what}: {run.peak >> 20} MB"
    if run.code == 1:
        assert (run.err.startswith("iaprof: "), run.err.count("\n")) == (True, 1), f"{what}: {run.err}"
        assert list(folder.iterdir()) == [], what  # no incomplete file


@pytest.mark.parametrize("name", usually(["one_text"], BOMBS))
def test_no_verb_takes_more_memory_than_its_limit(name: str, tmp_path: Path, runs: Runs, other: Path) -> None:
    # given
    bomb = BOMBS[name](tmp_path / "bomb.parquet")
    assert bomb.stat().st_size < MOST_ON_DISK
    folder = tmp_path / "out"
    folder.mkdir()
    for verb, words in commands(bomb, other, folder / "out.parquet").items():
        # when
        run = runs.run(*words, f"--memory-limit={LIMIT >> 20}M")
        # then it succeeds, or says in one sentence why not
        assert_bounded(run, LIMIT, folder, f"{name}, {verb}")
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize("format_", usually(["folded", "html"], WRITERS))
def test_no_format_takes_more_memory_than_the_limit(format_: str, tmp_path: Path, runs: Runs, bomb: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    words = "report", "-q", f"--format={format_}", "-o", folder / "out", bomb, f"--memory-limit={LIMIT >> 20}M"
    assert_bounded(runs.run(*words), LIMIT, folder, format_)


@pytest.mark.parametrize("verb", usually(["html", "redact"], [*FORMATS, "timeline", "diff", "redact"]))
def test_no_verb_takes_more_memory_than_the_limit_for_time_lines(verb: str, tmp_path: Path, runs: Runs) -> None:
    bomb = texts_of_time_lines(tmp_path / "bomb.parquet")
    folder = tmp_path / "out"
    folder.mkdir()
    words = {
        "timeline": ("timeline", "-q", bomb),
        "diff": ("diff", "-q", bomb, bomb),
        "redact": ("archive", "-q", "--redact", "-o", folder / "out.parquet", bomb),
    }.get(verb, ("report", "-q", f"--format={verb}", "-o", folder / "out", bomb))
    assert_bounded(runs.run(*words, f"--memory-limit={LIMIT >> 20}M"), LIMIT, folder, verb)


@thorough
def test_captures_of_one_long_text_are_copied_with_it(tmp_path: Path, runs: Runs, other: Path) -> None:
    # given half a million launches of a kernel with a name of maximum length
    bomb = BOMBS["one_text"](tmp_path / "bomb.parquet")
    for verb in ("archive", "redact", "merge"):
        # when
        output = tmp_path / verb
        run = runs.run(*commands(bomb, other, output)[verb], "--memory-limit=512M")
        # then they keep the name, within the memory limit
        assert (run.code, run.err) == (0, "")
        assert run.peak <= 512 << 20
        assert output.stat().st_size < 10 * bomb.stat().st_size
        part = next(part for part in CaptureReader(output).parts if part.count("launch") > 1)
        names = part.table("launch", ("name",))["name"].unify_dictionaries()
        assert len(names) == 1 << 19
        found = pc.unique(names).dictionary.to_pylist()
        assert found == [LONGEST] if verb != "redact" else found[0].startswith("kernel-")


def test_redacted_stacks_are_no_longer_than_a_text_may_be(tmp_path: Path, runs: Runs) -> None:
    # given deep stacks, whose hashes are longer than their names
    bomb = BOMBS["imported_stacks"](tmp_path / "bomb.parquet")
    # when
    run = runs.run("archive", "-q", "--redact", "-o", tmp_path / "public", bomb, "--memory-limit=1G")
    # then the innermost frames are kept, and the result is a valid capture
    assert (run.code, run.err) == (0, "")
    assert run.peak <= 1 << 30
    stacks = pc.unique(CaptureReader(tmp_path / "public").table("sample", ("stack",))["stack"]).dictionary.to_pylist()
    assert len(stacks) == 50
    for stack in stacks:
        first, *frames = stack.split(";")
        assert first == "[truncated]"
        assert MAX_TEXT_BYTES - 20 < len(stack) <= MAX_TEXT_BYTES
        assert all(frame.startswith("function-") for frame in frames)


def test_a_spool_of_zeros_is_not_recovered_into_memory(tmp_path: Path, runs: Runs) -> None:
    # given a record in a hole of the file, which takes no disk space
    spool = Spool(tmp_path / "cap.parquet.spool")
    spool.close()
    zeros = mmap.mmap(-1, 960 << 20)
    with spool.path.open("ab") as file:
        file.write(framed(FrameKind.STALLS, memoryview(zeros), time=1, shape=2)[0])
        file.truncate(file.tell() + len(zeros))
    # when
    run = runs.run("recover", spool.path, "-o", tmp_path / "cap.parquet", "--symbols=none", "--memory-limit=512M")
    # then
    assert run.peak <= 512 << 20
    assert (run.code, run.err.count("\n")) == (1, 1)
    assert run.err.startswith("iaprof: this needs more memory than the 512M that it may take")
    assert [path.name for path in tmp_path.iterdir()] == ["cap.parquet.spool"]


def test_an_imported_text_that_repeats_the_longest_string(tmp_path: Path, runs: Runs) -> None:
    # given 2 GB of stacks
    head = f"string\t1\t{LONGEST}\ninterval\t0\t1.0\nkernel\t0x8000\t0\t7\t1\t0\t0\n"
    stalls = (f"eustall\t0x{offset:x}\t0\t1" + 9 * "\t0" for offset in range(1 << 17))
    (tmp_path / "x.txt").write_text(head + "\n".join(stalls) + "\n")
    # when
    run = runs.run("import", "-q", tmp_path / "x.txt", "--memory-limit=512M")
    # then
    assert (run.code, run.err) == (0, "")
    assert run.peak <= 512 << 20


# Dictionaries


def dictionary(indices: list[int | None], texts: list[str | None]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(texts, pa.string()))


def test_deduplicated_dictionaries_have_each_used_text_once() -> None:
    found = deduplicated(dictionary([2, 0, None, 1, 2], ["a", "b", "a", "unused"]))
    assert found.to_pylist() == ["a", "a", None, "b", "a"]
    assert sorted(found.dictionary.to_pylist()) == ["a", "b"]
    assert deduplicated(pa.array(["x", None, "x"])).dictionary.to_pylist() == ["x"]


def test_nulls_of_a_dictionary_become_nulls_of_its_rows() -> None:
    found = with_null_rows(dictionary([0, 1, 2, None], ["a", None, "b"]))
    assert found.to_pylist() == ["a", None, "b", None]
    assert found.dictionary.to_pylist() == ["a", "b"]


def test_each_distinct_text_is_changed_once() -> None:
    asked: list[str] = []

    def change(text: str) -> str:
        asked.append(text)
        return "same"

    found = map_texts(dictionary([0, 1, 0, None], ["a", "b", "unused"]), change)
    assert found.to_pylist() == ["same", "same", "same", None]
    assert found.dictionary.to_pylist() == ["same"]
    assert sorted(asked) == ["a", "b"]


def test_rows_share_their_texts() -> None:
    found = shared_texts(pa.chunked_array([dictionary([0, 0, None], ["a" * 100]), dictionary([1], ["x", "b"])]))
    assert found == ["a" * 100, "a" * 100, None, "b"]
    assert found[0] is found[1]


def test_slices_bound_the_decoded_bytes() -> None:
    # given values of 40 MiB, 40 MiB, null, 100 MiB and 1 byte, and slices of at most 64 MiB
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0, 0, None, 1, 2], pa.int32()), pa.array([bytes(40 << 20), bytes(100 << 20), b"x"])
    )
    assert decoded_bytes(texts) == (180 << 20) + 1
    assert [(each.start, each.stop) for each in bounded_slices(texts)] == [(0, 1), (1, 3), (3, 4), (4, 5)]


def test_captures_store_a_repeated_text_once(tmp_path: Path) -> None:
    # given rows with a dictionary that repeats a text, which Arrow's own writer would write out
    count = 1 << 15
    members = [pa.repeat(pa.scalar(0 if pa.types.is_integer(f.type) else "", f.type), count) for f in KINDS["launch"]]
    texts = pa.array([LONGEST] * 8)
    name = pa.DictionaryArray.from_arrays(pa.array(np.arange(count, dtype=np.int32) % 8), texts)
    members[KINDS["launch"].get_field_index("name")] = name
    rows = pa.StructArray.from_arrays(members, names=[field.name for field in KINDS["launch"]])
    # when
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        writer.write("launch", rows)
        writer.close(HEADER)
    # then nobody needs the 512 MB of decoded text
    assert pq.read_metadata(tmp_path / "c").row_group(0).total_byte_size < 1 << 20
    assert pc.unique(CaptureReader(tmp_path / "c").table("launch")["name"]).dictionary.to_pylist() == [LONGEST]


def test_other_programs_see_plain_texts(tmp_path: Path) -> None:
    given = rows()
    path = capture(tmp_path / "c", **given)
    assert pq.read_schema(path).equals(
        pa.schema([SCHEMA.field(name) for name in ("kind", "part", *KINDS) if name in {"kind", "part", *given}])
    )


# The option


def test_the_limit_is_a_size(tmp_path: Path) -> None:
    assert (memory_bytes("1G"), memory_bytes("700m"), memory_bytes(None)) == (1 << 30, 700 << 20, None)
    for text, message in (("100M", "takes 256M or more"), ("lots", "takes a size such as 500M or 2G")):
        with pytest.raises(UsageError, match=message):
            memory_bytes(text)


READERS = (
    "report", "top", "diff", "annotate", "query", "info", "archive", "merge", "import", "recover", "flame", "timeline",
)  # fmt: skip


COMMAND: Any = get_command(main.app)


@pytest.mark.parametrize("verb", COMMAND.commands)
def test_verbs_that_read_untrusted_files_have_the_option(verb: str) -> None:
    done = iaprof(verb, "--help")
    assert ("--memory-limit SIZE" in done.out) == (verb in READERS)


def test_available_memory_respects_machine_and_cgroups(tmp_path: Path) -> None:
    # given 8 GB on the machine
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n")
    assert available(tmp_path) == 8_000_000 << 10
    # and a cgroup without a limit in one with a limit of 3 GiB, of which 2 are used, half a GiB of it by files
    own = tmp_path / "sys/fs/cgroup/pod/own"
    own.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/own\n")
    for folder, most in ((own, "max"), (own.parent, str(3 << 30))):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{2 << 30}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 29}\nactive_file 0\n")
    assert available(tmp_path) == 3 << 29
    # or a cgroup of version 1
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/old\n2:pids:/old\n")
    old = tmp_path / "sys/fs/cgroup/memory/old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{1 << 30}\n")
    (old / "memory.usage_in_bytes").write_text(f"{2 << 30}\n")
    assert available(tmp_path) == 0


def test_programs_started_for_the_user_have_no_limit() -> None:
    code = (
        "import os, resource, subprocess, sys\n"
        "from iaprof.sandbox.memory import lift_limit, limit, limit_memory\n"
        "limit_memory(1 << 30)\n"
        "assert limit() == 1 << 30 and resource.getrlimit(resource.RLIMIT_DATA)[0] < 3 << 30\n"
        "assert 'ARROW_DEFAULT_MEMORY_POOL' not in os.environ\n"
        "lift_limit()\n"
        "assert limit() is None and len(set(resource.getrlimit(resource.RLIMIT_DATA))) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def after_a_verb(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A verb that ran in this process, before the fixtures of any test."""
    assert iaprof("info", capture(tmp_path_factory.mktemp("small") / "c", **rows())).code == 0


@pytest.mark.usefixtures("after_a_verb")
def test_verbs_that_fixtures_run_leave_no_limit_to_browsers() -> None:
    assert len(set(resource.getrlimit(resource.RLIMIT_DATA))) == 1


def test_an_error_of_arrow_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def archive(*_: object, **__: object) -> None:
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes\nbacktrace")

    monkeypatch.setattr("iaprof.report.archive.archiving.archive", archive)
    done = iaprof("archive", capture(tmp_path / "c", **rows()), "-o", tmp_path / "out")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("iaprof: a file that was read is damaged or malicious: ")
    assert "2147483646 bytes" in done.err


def test_no_room_for_a_thread_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (tmp_path / "out").mkdir()
    done = iaprof("report", capture(tmp_path / "c", **rows()), "-o", tmp_path / "out" / "page.html")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "needs more memory" in done.err
    assert not list((tmp_path / "out").iterdir())


def dying(throw: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A verb that is writing a file when C++ code throws an uncaught exception."""
    script = f"""
import ctypes, pathlib
from iaprof.cli.options.memory_limit import apply_limit
from iaprof.basics.files import replace_file
apply_limit({LIMIT})
library = ctypes.CDLL("libstdc++.so.6")
with replace_file(pathlib.Path({str(folder / "out")!r})) as file:
    file.write(b"half")
    {throw}
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_an_uncaught_bad_alloc_is_one_sentence(tmp_path: Path) -> None:
    # as when Arrow allocates in a noexcept function; here it is operator new
    done = dying("library._Znwm(ctypes.c_size_t(1 << 62))", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "iaprof: this needs more memory than the 320M that it may take: if you trust the files, allow more with "
        "--memory-limit\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_other_uncaught_exceptions_are_not_called_lack_of_memory(tmp_path: Path) -> None:
    done = dying('library._ZSt20__throw_length_errorPKc(b"too long")', tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "std::length_error" in done.stderr
    assert "memory" not in done.stderr
