"""Captures that name their frames: where the binaries are gone or replaced, and how large that makes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow.parquet as pq
import pytest

import iaprof
from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.capture.rotation import Finisher
from iaprof.record.spool import Spool
from iaprof.symbols.names.which import Symbols
from integration.attacking import NOBODY
from integration.recording import IAPROF, Finished, copy_of_build, environment, start, until_ticked
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough

pytestmark = pytest.mark.bpf
NAMED = ("--symbols", "needed")

# A root folder with Python, its libraries and nothing else: no checkout, no home, no /tmp, no debug information.
CONTAINER = """
root=$1; shift
for folder in /usr /lib /lib64 /bin "$PYTHON_HOME" "$PACKAGES"; do
    [ -e "$folder" ] || continue
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
mkdir -p "$root/usr/lib/debug" "$root/proc" "$root/dev"
mount -t tmpfs none "$root/usr/lib/debug"
mount -t tmpfs none "$root/dev"
touch "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
mount -t proc none "$root/proc"
exec chroot "$root" "$@"
"""


def record(hardware: Hardware, capture: Path, *words: str | Path) -> Finished:
    """Records with whatever names `words` ask for."""
    command = [*IAPROF, "record", "-o", str(capture), *map(str, words)]
    env = os.environ | environment(hardware)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Finished(done.returncode, done.stdout, done.stderr)


def report(capture: Path, *words: str) -> Finished:
    command = [*IAPROF, "report", str(capture), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[Hardware]:
    """A GPU."""
    with Hardware(tmp_path / "gpu") as made:
        yield made


@pytest.fixture
def recorded(hardware: Hardware, tmp_path: Path) -> tuple[Path, Path]:
    """A capture with names of a program and a runtime in a folder of their own, and that folder."""
    folder = copy_of_build(tmp_path / "build")
    programs = runtime.Programs(folder / runtime.LIBRARY, folder / "workload")
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 300, programs=programs)
    record(hardware, tmp_path / "c", *NAMED, "--", *words)
    return tmp_path / "c", folder


def in_a_container(root: Path, capture: Path, *words: str) -> Finished:
    """A report where there is nothing but Python, what iaprof depends on, its wheel's files, and the capture."""
    site = root / "site"
    package = Path(iaprof.__file__).parent
    shutil.copytree(package, site / "iaprof", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(capture, root / "capture.parquet")
    iga = sorted((Path(sys.prefix) / "lib" / "iaprof").glob("libiga64.so*"))
    for library in iga:
        shutil.copy(library, root)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {
        "PYTHON_HOME": str(Path(sys.base_prefix).resolve()),
        "PACKAGES": packages,
        "PYTHONPATH": f"/site:{packages}",
        "PATH": os.environ["PATH"],
        "IAPROF_IGA_LIBRARY": f"/{iga[-1].name}" if iga else "",
    }
    python = str(Path(sys.executable).resolve())
    command = ["unshare", "--mount", "--pid", "--fork", "--propagation=private", "sh", "-euc", CONTAINER, "container",
               str(root), python, "-m", "iaprof.cli", "report", "/capture.parquet", *words]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return Finished(done.returncode, done.stdout, done.stderr)


@thorough
def test_the_same_report_where_nothing_of_what_was_recorded_is(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    capture, folder = recorded
    # given a report where it was recorded
    here = report(capture, "--lines")
    assert "main workload.cpp:" in here.out
    assert "[workload+0x" not in here.out
    # when the binaries are gone, and in a container without the sources and everything else
    shutil.rmtree(folder)
    gone = report(capture, "--lines")
    root = tmp_path / "root"
    root.mkdir()
    elsewhere = in_a_container(root, capture, "--lines")
    # then
    assert elsewhere.code == 0, elsewhere.err
    assert gone.out == here.out
    assert elsewhere.out == here.out
    assert len(here.out.splitlines()) > 100


@thorough
def test_without_names_the_report_looks_for_the_very_build(hardware: Hardware, tmp_path: Path) -> None:
    # given a capture without names
    folder = copy_of_build(tmp_path / "build")
    programs = runtime.Programs(folder / runtime.LIBRARY, folder / "workload")
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100, programs=programs)
    record(hardware, tmp_path / "c", "--symbols", "none", "--", *words)
    assert len(CaptureReader(tmp_path / "c").table("symbol")) == 0
    named = report(tmp_path / "c").out
    assert ";app::epoch(" in named
    # when another build lies at the same path, with other names for the same addresses
    wrong = tmp_path / "wrong"
    subprocess.run(["objcopy", "--prefix-symbols=wrong_", "--strip-debug", programs.workload, wrong], check=True)
    build_id = next(
        row["build_id"]
        for row in CaptureReader(tmp_path / "c").table("mapping").to_pylist()
        if row["path"] == str(programs.workload)
    )
    content = wrong.read_bytes()
    assert content.count(build_id) == 1
    wrong.write_bytes(content.replace(build_id, build_id[::-1]))
    wrong.replace(programs.workload)
    replaced = report(tmp_path / "c", "--symbol-sources")
    # then no name of it appears, and it is told
    assert "wrong_" not in replaced.out
    assert "[workload+0x" in replaced.out
    assert "another build" in replaced.err
    # and the right build is found by its id wherever it lies
    shutil.copy(runtime.build().workload, tmp_path / "kept")
    (tmp_path / "dir").mkdir()
    (tmp_path / "kept").rename(tmp_path / "dir" / "some-other-name")
    assert report(tmp_path / "c", "--symbol-dir", str(tmp_path / "dir")).out == named
    # and `archive` puts the names into the capture
    words = ["archive", str(tmp_path / "c"), "-o", str(tmp_path / "a"), "--symbol-dir", str(tmp_path / "dir"), "-q"]
    subprocess.run([*IAPROF, *words], check=True)
    assert report(tmp_path / "a").out == named


@thorough
def test_a_binary_that_is_replaced_while_it_runs(hardware: Hardware, tmp_path: Path) -> None:
    # given a program that runs on when the file at its path is another
    folder = copy_of_build(tmp_path / "build")
    programs = runtime.Programs(folder / runtime.LIBRARY, folder / "workload")
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100, programs=programs)
    until_mapped = f"while [ -e /proc/$!/exe ] && ! grep -q {runtime.LIBRARY} /proc/$!/maps; do sleep 0.01; done"
    replace = f"rm {programs.workload}; cp /bin/true {programs.workload}"
    script = f"{' '.join(words)} > /dev/null & {until_mapped}; {replace}; wait"
    # when
    record(hardware, tmp_path / "c", *NAMED, "--", "sh", "-c", script)
    # then the capture has either the names of what ran, or says that they could not be had
    told = {row["path"]: row["problem"] for row in CaptureReader(tmp_path / "c").table("module").to_pylist()}
    named = ";app::epoch(" in report(tmp_path / "c").out
    assert named or "another build" in told[str(programs.workload)]


@thorough
def test_a_process_like_cpython_makes_a_capture_little_larger(hardware: Hardware, tmp_path: Path) -> None:
    # given a Python with many libraries that is sampled often
    script = (
        "import sys, time, asyncio, ctypes, decimal, hashlib, json, pydoc, sqlite3, ssl, unittest, xml.dom.minidom\n"
        "import iaprof, numpy, pyarrow, pyarrow.parquet\n"
        "while time.process_time() < 2:\n"
        "    pydoc.render_doc(json); json.loads(json.dumps(list(range(1000)))); numpy.sort(numpy.random.rand(10000))\n"
    )
    record(hardware, tmp_path / "c", *NAMED, "--cpu-freq", "999", "--", sys.executable, "-c", script)
    reader = CaptureReader(tmp_path / "c")
    assert reader.header["symbols"]["named"] > 300
    # then
    written = pq.read_metadata(tmp_path / "c")
    groups = (written.row_group(number) for number in range(written.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    of_names = sum(
        each.total_compressed_size for each in columns if each.path_in_schema.startswith(("module.", "symbol."))
    )
    assert 0 < of_names < 2_000_000


@thorough
def test_paths_that_are_not_utf_8(hardware: Hardware, tmp_path: Path) -> None:
    # given a program, its library and a working directory with such names
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    build = copy_of_build(folder)
    programs = runtime.Programs(build / runtime.LIBRARY, build / os.fsdecode(b"work\xff"))
    (build / "workload").rename(programs.workload)
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100, programs=programs)
    capture = folder / os.fsdecode(b"c\xe9.parquet")
    # when
    command = [*IAPROF, "record", "-o", capture.name, *NAMED, "--cpu-freq", "999", "--", *words]
    env = os.environ | environment(hardware) | {"LD_LIBRARY_PATH": str(build)}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # then functions are named, and the module's path is text for its bytes
    modules = CaptureReader(capture).table("module").to_pylist()
    named = {row["path"]: row for row in modules if row["source"]}
    assert {rf"{tmp_path}/caf\xe9/work\xff", rf"{tmp_path}/caf\xe9/{runtime.LIBRARY}"} <= set(named)
    here = report(capture)
    assert ";app::epoch(" in here.out
    # and the same in an archive, redacted or not, whose names were looked up anew
    record(hardware, tmp_path / "bare", "--symbols", "none", "--", *words)
    for number, options in enumerate(([], ["--redact"])):
        made = folder / os.fsdecode(b"a\xff%d.parquet" % number)
        subprocess.run([*IAPROF, "archive", tmp_path / "bare", "-o", made, "-q", *options], check=True)
        assert (";app::epoch(" in report(made).out) == (number == 0)
        assert CaptureReader(made).header["symbols"]["named"] > 0


@thorough
def test_lines_of_split_debug_information(hardware: Hardware, tmp_path: Path) -> None:
    # given a program of another user, whose .dwo only that user can read
    folder = Path("/tmp") / f"iaprof-split-{os.getpid()}"
    folder.mkdir(mode=0o700)
    source = "int main(void) { for (volatile long i = 0; i < 1500000000;\n    i++); }\n"
    (folder / "spin.c").write_text(source)
    subprocess.run(["gcc", "-g", "-gsplit-dwarf", "-O1", "-c", "spin.c"], cwd=folder, check=True)
    subprocess.run(["gcc", "-o", "spin", "spin.o"], cwd=folder, check=True)
    (folder / "spin.dwo").chmod(0o600)
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", str(folder / "spin")]
    # when
    record(hardware, tmp_path / "c", *NAMED, "--cpu-freq", "199", "--", *words)
    out = report(tmp_path / "c", "--cpu-samples", "--lines").out
    # and when the .dwo is a link to what that user may not read
    (folder / "spin.dwo").unlink()
    (folder / "spin.dwo").symlink_to("/etc/shadow")
    record(hardware, tmp_path / "d", *NAMED, "--cpu-freq", "199", "--", *words)
    shutil.rmtree(folder)
    # then
    assert any(
        line.split(" spin.c:")[-1].startswith(("1 ", "2 ")) for line in out.splitlines() if ";main spin.c:" in line
    )
    assert ";main spin.c:" not in report(tmp_path / "d", "--cpu-samples", "--lines").out
    problems = [row["problem"] for row in CaptureReader(tmp_path / "d").table("module").to_pylist()]
    assert "its lines are in spin.dwo, which is not there, or of another build" in problems


def test_names_of_the_kernel_and_of_all_functions(hardware: Hardware, tmp_path: Path) -> None:
    # given programs that are sampled in the kernel
    record(hardware, tmp_path / "c", "--symbols", "all", "--cpu-freq", "999", "--",
           "sh", "-c", "for i in $(seq 40); do cat /proc/self/maps /proc/self/smaps; done > /dev/null")  # fmt: skip
    # when
    folded = report(tmp_path / "c", "--cpu-samples", "--all-processes").out
    # then
    assert "_[k]" in folded
    assert any("do_syscall_64" in line or "asm_exc_page_fault" in line for line in folded.splitlines())
    symbols = CaptureReader(tmp_path / "c").table("symbol")
    assert max(symbols["size"].to_pylist()) > 1
    counts = sum(int(line.rsplit(" ", 1)[1]) for line in folded.splitlines())
    assert counts == CaptureReader(tmp_path / "c").header["totals"]["cpu_samples"]


@thorough
def test_each_part_of_a_rotated_recording_has_its_names(hardware: Hardware, tmp_path: Path) -> None:
    # given a recording in parts
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 3000, "--rate", 1000)
    record(hardware, tmp_path / "c.parquet", *NAMED, "--switch-output", "1s", "--", *words)
    # then
    parts = sorted(tmp_path.glob("c*.parquet"))
    assert len(parts) >= 2
    of_parts = []
    for part in parts:
        reader = CaptureReader(part)
        assert reader.header["symbols"]["named"] > 0
        if reader.header["totals"]["stalls"]:
            of_parts.append(report(part).out)
            assert ";app::launch_from(" in of_parts[-1]
            assert "[workload+0x" not in of_parts[-1]
    # and one of them has the stalls of this path; a short one may have those of a launch by another
    assert any(";app::epoch(" in out for out in of_parts)


@thorough
def test_names_that_are_not_waited_for(hardware: Hardware, tmp_path: Path) -> None:
    # given the spool of a recorder that was killed
    recorder = start(hardware, tmp_path / "c", "--cpu-freq", "999")
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100)
    subprocess.run(words, env=os.environ | hardware.env(), stdout=subprocess.DEVNULL, check=True)
    until_ticked(tmp_path / "c", recorder)
    recorder.kill()
    recorder.wait()
    spool = tmp_path / "c.spool"
    with spool.open("rb") as file:
        finisher = Finisher(cast(Spool, SimpleNamespace(path=spool, fileno=file.fileno)), Symbols.NEEDED)
        finisher.go(tmp_path / "c")
        # when somebody does not want to wait for names
        while finisher.naming is None:
            assert not finisher.read()
        finisher.skip_names()
        header, _ = finisher.result()
        finisher.close()
    # then the capture is whole, with the names that there were by then
    assert header["symbols"]["skipped"] > 0
    assert report(tmp_path / "c").out
    problems = CaptureReader(tmp_path / "c").table("module")["problem"].to_pylist()
    assert sum("stopped before it was read" in problem for problem in problems) == header["symbols"]["skipped"]


@thorough
def test_recover_names_too(hardware: Hardware, tmp_path: Path) -> None:
    # given
    recorder = start(hardware, tmp_path / "c")
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100)
    subprocess.run(words, env=os.environ | hardware.env(), stdout=subprocess.DEVNULL, check=True)
    until_ticked(tmp_path / "c", recorder)
    recorder.kill()
    recorder.wait()
    # when
    subprocess.run([*IAPROF, "recover", str(tmp_path / "c.spool")], check=True, capture_output=True)
    # then
    assert CaptureReader(tmp_path / "c").header["symbols"]["named"] > 0
    assert len(CaptureReader(tmp_path / "c").table("symbol")) > 0
