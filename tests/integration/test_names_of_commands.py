"""Names of a COMMAND that ends before they are searched: files without a build-id, other roots, other namespaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from integration.recording import IAPROF, until_ticked
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf
NO_BUILD_ID = ("-Wl,--build-id=none",)

# A mount namespace in which a folder becomes a tmpfs with the runtime and the program; it vanishes with the program.
IN_A_TMPFS = """
mount -t tmpfs none "$1"
cp "$2"/libze_intel_gpu.so.1 "$2"/workload "$1"
export LD_LIBRARY_PATH="$1"
shift 2
sleep 0.1 # files' times are those of the last tick of a clock: what is mapped in the same one could be another file
"$@"
"""
UNSHARED = ["unshare", "--mount", "--propagation=private", "sh", "-ec"]


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[Hardware]:
    with Hardware(tmp_path / "gpu") as made:
        yield made


def programs_in(folder: Path, build_ids: bool) -> runtime.Programs:
    """The stand-in's library and program, with or without build-ids."""
    built = runtime.build()
    folder.mkdir(parents=True)
    programs = runtime.Programs(folder / runtime.LIBRARY, folder / "workload")
    if build_ids:
        for source, target in ((built.library, programs.library), (built.workload, programs.workload)):
            shutil.copy(source, target)
        return programs
    headers = (f"-I{built.library.parent}", f"-I{runtime.SOURCES}")
    for compiler, flags, inputs, output in (
        ("cc", runtime.LIBRARY_FLAGS, [runtime.SOURCES / "ze.c", built.library.parent / "probes.o"], programs.library),
        ("c++", runtime.PROGRAM_FLAGS, [runtime.SOURCES / "workload.cpp", programs.library], programs.workload),
    ):
        subprocess.run([compiler, *flags, *NO_BUILD_ID, *headers, "-o", output, *inputs], check=True)
        assert "Build ID" not in subprocess.check_output(["readelf", "-n", output], text=True)
    return programs


def with_its_libraries(programs: runtime.Programs, root: Path) -> None:
    """Copies what a program needs into a root folder, at the same paths."""
    listed = subprocess.check_output(["ldd", programs.workload], text=True)
    for path in re.findall(r"(/\S+) \(0x", listed):
        if not path.startswith(str(programs.library.parent)):
            (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.lstrip("/"))


def recording(
    hardware: Hardware, capture: Path, library: Path, *command: str | Path
) -> tuple[list[str | Path], dict[str, str]]:
    """Returns the words and the environment that record a command whose library gets its probes before it is mapped."""
    words: list[str | Path] = [*IAPROF, "record", "-o", capture, "--symbols", "needed", "--", *command]
    return words, os.environ | hardware.env() | {"LD_LIBRARY_PATH": str(library.parent)}


def record(hardware: Hardware, capture: Path, library: Path, *command: str | Path) -> None:
    """Records a command to its end."""
    words, env = recording(hardware, capture, library, *command)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def names_in(capture: Path, path: str) -> tuple[set[str], str]:
    """The names, as in the source, that a capture has for a file's functions, and why others have none."""
    reader = CaptureReader(capture)
    (module,) = (row for row in reader.table("module").to_pylist() if row["path"] == path)
    symbols = reader.table("symbol", ("module", "function")).to_pylist()
    return {row["function"] for row in symbols if row["module"] == module["id"]}, module["problem"]


def check_named(capture: Path, folder: str) -> None:
    """Asserts that the functions of the program and of the library have names."""
    functions, problem = names_in(capture, f"{folder}/workload")
    assert any(function.startswith("_ZN3app5epoch") for function in functions), problem
    assert "main" in functions
    assert problem == ""
    functions, problem = names_in(capture, f"{folder}/{runtime.LIBRARY}")
    assert "zeCommandListAppendLaunchKernel" in functions, problem


@dataclass(frozen=True)
class Rooted:
    """A program in a root folder of its own."""

    library: Path
    folder: str  # of the program, as it sees it
    command: list[str]


def rooted(tmp_path: Path, build_ids: bool) -> Rooted:
    """Makes a root folder with all that the program needs.

    The program's folder has the test's name: what tests beside this one run in their roots is recorded, too.
    """
    root, folder = tmp_path / "root", f"/{tmp_path.name}"
    programs = programs_in(root / tmp_path.name, build_ids)
    with_its_libraries(programs, root)
    shutil.copy(runtime.debug_elf("bmg", "matmul"), root / "elf")
    (root / "tmp").mkdir()
    # It has no GPU, as the way to it leads through /proc: launches are recorded all the same.
    chroot = f"env -u LD_PRELOAD -u STANDIN_DIR LD_LIBRARY_PATH={folder} chroot {root}"
    return Rooted(programs.library, folder, f"{chroot} {folder}/workload --elf /elf --launches 300".split())


def matmul(programs: runtime.Programs, elf: Path) -> list[str]:
    return runtime.command([elf], "--launches", 300, programs=programs)


@thorough
def test_files_without_a_build_id(hardware: Hardware, tmp_path: Path) -> None:
    programs = programs_in(tmp_path / "build", build_ids=False)
    record(hardware, tmp_path / "c", programs.library, *matmul(programs, runtime.debug_elf("bmg", "matmul")))
    rows = CaptureReader(tmp_path / "c").table("module", ("path", "build_id")).to_pylist()
    assert {row["build_id"] for row in rows if row["path"].startswith(str(tmp_path))} == {None}
    check_named(tmp_path / "c", str(programs.library.parent))


@pytest.mark.parametrize(
    ("replace", "problem"),
    [
        ('mv "$2" "$1"', "the file there is not the one that was mapped"),
        pytest.param('cat "$2" > "$1"', "it was changed since it was mapped", marks=thorough),
        pytest.param('rm "$1"; cp -p "$2" "$1"', " since it was mapped|the one that was mapped", marks=thorough),
    ],
)
@thorough
def test_what_was_put_in_their_place_names_nothing(
    replace: str, problem: str, hardware: Hardware, tmp_path: Path
) -> None:
    # given a program that its command replaces by one with other names at the same addresses
    programs = programs_in(tmp_path / "build", build_ids=False)
    wrong = tmp_path / "wrong"
    subprocess.run(["objcopy", "--prefix-symbols=wrong_", "--strip-debug", programs.workload, wrong], check=True)
    script = f'workload=$1; wrong=$2; shift 2; "$@"; set "$workload" "$wrong"; {replace}'
    words = matmul(programs, runtime.debug_elf("bmg", "matmul"))
    # when
    record(hardware, tmp_path / "c", programs.library, "sh", "-ec", script, "sh", programs.workload, wrong, *words)
    # then
    functions, told = names_in(tmp_path / "c", str(programs.workload))
    assert functions == set()
    assert re.search(problem, told), told
    assert "zeCommandListAppendLaunchKernel" in names_in(tmp_path / "c", str(programs.library))[0]


@pytest.mark.parametrize("build_ids", [True, False])
@thorough
def test_a_root_of_its_own(build_ids: bool, hardware: Hardware, tmp_path: Path) -> None:
    # given
    program = rooted(tmp_path, build_ids)
    # when
    record(hardware, tmp_path / "c", program.library, *program.command)
    # then
    check_named(tmp_path / "c", program.folder)
    assert not Path(program.folder).exists()


@pytest.mark.parametrize("build_ids", [True, False])
@thorough
def test_a_mount_namespace_that_vanishes(build_ids: bool, hardware: Hardware, tmp_path: Path) -> None:
    # given a folder that is a tmpfs for the program only
    programs = programs_in(tmp_path / "build", build_ids)
    inside = tmp_path / "inside"
    inside.mkdir()
    copies = runtime.Programs(inside / runtime.LIBRARY, inside / "workload")
    # when it launches there, for long enough to get probes
    words = [*matmul(copies, runtime.debug_elf("bmg", "matmul")), "--rate", "100"]
    command: list[str | Path] = [*UNSHARED, IN_A_TMPFS, "sh", inside, programs.workload.parent, *words]
    record(hardware, tmp_path / "c", programs.library, *command)
    # then
    check_named(tmp_path / "c", str(inside))
    assert list(inside.iterdir()) == []


@thorough
def test_recover_names_what_still_lies_where_it_did(hardware: Hardware, tmp_path: Path) -> None:
    """Files without a build-id, in a root folder, of a recorder that was killed after its command had ended."""
    # given
    program = rooted(tmp_path, build_ids=False)
    ended, gate = tmp_path / "ended", tmp_path / "gate"
    script = f'"$@"; touch {ended}; until [ -e {gate} ]; do sleep 0.05; done'
    command, env = recording(hardware, tmp_path / "c", program.library, "sh", "-c", script, "sh", *program.command)
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as recorder:
        until(ended.exists, recorder)
        until_ticked(tmp_path / "c", recorder)
        recorder.kill()
        gate.touch()
    # when
    subprocess.run([*IAPROF, "recover", tmp_path / "c.spool"], check=True, capture_output=True)
    # then
    check_named(tmp_path / "c", program.folder)
