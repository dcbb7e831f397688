"""Libraries that an unprivileged user made to hurt a recorder that is root: they cost nothing but themselves."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

import elf_sections
from iaprof.bpf import accounts
from iaprof.bpf.probes import libraries
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import MAX_LIBRARIES, MAX_OF_ONE_USER, Outcome
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import Counter
from iaprof.record.spool import FrameKind
from integration.recording import IN_TURN, copy_of_build, ended, has_met, launched, losses, spooled, start
from standin import runtime
from standin.hardware import Hardware
from waiting import until

pytestmark = [pytest.mark.bpf, IN_TURN]
NOBODY = 65534

# Maps every file that it is given so that it could be executed, says so, and stays.
MAPPER = """
import mmap, sys
maps = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def library() -> bytes:
    """A library with both probes that works."""
    return runtime.build().library.read_bytes()


@pytest.fixture
def probes() -> Iterator[LaunchProbes]:
    opened = LaunchProbes(cpu_samples=False)
    yield opened
    opened.close()


class Mapped:
    """A process of another user's that has mapped files, while `with` lasts."""

    def __init__(self, *paths: Path, user: int = NOBODY) -> None:
        for path in paths:
            os.chown(path, user, user)
        command = ["/usr/bin/python3", "-I", "-c", MAPPER, *map(str, paths)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user, group=user, extra_groups=[], cwd="/"
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"mapped\n"
        self.pid = self._process.pid

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def outcomes(probes: LaunchProbes, *paths: Path) -> list[Outcome]:
    """What becomes of libraries that the other user has mapped, in the order of the paths."""
    with Mapped(*paths) as process:
        found = {outcome.path: outcome for outcome in probes.libraries.mapped(process.pid)}
    return [found[str(path)] for path in paths]


def note_offset(library: bytes) -> int:
    """Where the first note's three addresses stand."""
    section = elf_sections.section(ELFFile(io.BytesIO(library)), ".note.stapsdt", NoteSection)
    return int(section["sh_offset"]) + 12 + 8


def test_an_address_elsewhere_places_no_probe(folder: Path, library: bytes, probes: LaunchProbes) -> None:
    # given notes that lead into data, headers, other segments and beyond the file
    paths = []
    for number, (field, address) in enumerate([(0, 0), (0, 1 << 40), (2, 0x40), (2, 0x1000), (0, (1 << 64) - 1)]):
        changed = bytearray(library)
        struct.pack_into("<Q", changed, note_offset(library) + 8 * field, address)
        paths.append(folder / f"libze_intel_gpu.so.{number}")
        paths[-1].write_bytes(changed)
    # when, then
    for outcome in outcomes(probes, *paths):
        assert outcome.probes == 0
        assert "outside its" in outcome.problem


def test_two_probes_in_one_place(folder: Path, library: bytes, probes: LaunchProbes) -> None:
    # given notes that place both probes at one instruction, with a semaphore each, which no kernel can keep
    changed = bytearray(library)
    section = elf_sections.section(ELFFile(io.BytesIO(library)), ".note.stapsdt", NoteSection)
    first, *others = (note["n_offset"] + 12 + 8 for note in section.iter_notes())
    for other in others:
        changed[other : other + 8] = changed[first : first + 8]
    path = folder / "libze_intel_gpu.so.1"
    path.write_bytes(changed)
    # when
    [outcome] = outcomes(probes, path)
    # then none is placed
    assert outcome.probes == 0
    assert outcome.problem == "its notes place probes with different semaphores at one instruction"
    assert probes._links == []


def test_libraries_made_to_be_read_slowly(folder: Path, library: bytes, probes: LaunchProbes) -> None:
    # given: more sections than there can be, in section 0's words
    many = bytearray(library) + bytes(64 << 20)
    table = struct.unpack_from("<Q", many, 40)[0]
    struct.pack_into("<H", many, 60, 0)
    struct.pack_into("<Q", many, table + 32, 1 << 60)
    # a note section as large as a large file, all tiny notes
    notes = bytearray(library) + bytes(64 << 20)
    elf = ELFFile(io.BytesIO(library))
    index = next(i for i, section in enumerate(elf.iter_sections()) if section.name == ".note.stapsdt")
    struct.pack_into("<QQ", notes, table + 64 * index + 24, len(library), 64 << 20)
    # names that do not end for 64 MB
    names = bytearray(library) + b"x" * (64 << 20)
    strings = elf["e_shstrndx"]
    struct.pack_into("<QQ", names, table + 64 * strings + 24, len(library), 64 << 20)
    paths = []
    for number, content in enumerate((many, notes, names)):
        paths.append(folder / f"libze_intel_gpu.so.{number}")
        paths[-1].write_bytes(content)
    # when
    begun = time.process_time()
    found = outcomes(probes, *paths)
    # then they are given up soon
    assert time.process_time() - begun < 10
    for outcome in found:
        assert outcome.probes == 0
        assert "more headers, notes or symbols" in outcome.problem


def test_one_users_libraries_leave_room_for_others(folder: Path, library: bytes, probes: LaunchProbes) -> None:
    # given more libraries of one user than are taken
    paths = [folder / f"libze_intel_gpu.so.{number}" for number in range(MAX_OF_ONE_USER + 5)]
    for path in paths:
        path.write_bytes(library)
    # when
    with Mapped(*paths) as process:
        found = list(probes.libraries.mapped(process.pid))
        again = list(probes.libraries.mapped(process.pid))
    # then the first are taken, the rest is told once
    assert [outcome.problem for outcome in found[:-1]] == [""] * MAX_OF_ONE_USER
    assert found[-1].problem.startswith("of different libraries, user 65534 has 16 already")
    assert again == []
    # and root's own still has its probes
    own = copy_of_build(folder.parent / "own")
    programs = runtime.build(own)
    assert [outcome.problem for outcome in probes.libraries.installed((str(own),))] == [""]
    words = runtime.command(
        [runtime.debug_elf("bmg", "matmul")], "--launches", 50, "--rate", 0, "--no-gpu", programs=programs
    )
    subprocess.run(words, env=os.environ | {"STANDIN_DUMP_DIR": str(own)}, stdout=subprocess.DEVNULL, check=True)
    assert probes.counters()[Counter.LAUNCHES] == 50


def test_one_users_subordinate_ids_leave_room_for_others(
    folder: Path, library: bytes, probes: LaunchProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a user with subordinate IDs, each of which maps as many libraries as one user may
    first, user = 700_000, 1000
    (folder.parent / "subuid").write_text(f"{user}:{first}:65536\n")
    monkeypatch.setattr(accounts, "SUBORDINATE", folder.parent / "subuid")
    monkeypatch.setattr(accounts, "ACCOUNTS", found := accounts.Accounts())
    monkeypatch.setattr(libraries, "ACCOUNTS", found)
    problems = []
    for number in range(MAX_LIBRARIES // MAX_OF_ONE_USER):
        paths = [folder / f"libze_intel_gpu.so.{number}.{each}" for each in range(MAX_OF_ONE_USER)]
        for path in paths:
            path.write_bytes(library)
        with Mapped(*paths, user=first + number) as process:
            problems += [outcome.problem for outcome in probes.libraries.mapped(process.pid)]
        for path in paths:
            path.unlink()
    # when another user maps one
    (folder / "libze_intel_gpu.so.1").write_bytes(library)
    [other] = outcomes(probes, folder / "libze_intel_gpu.so.1")
    # then that is probed, and of the first user one user's limit, which is what the recorder says
    assert (other.problem, other.probes > 0) == ("", True)
    assert problems[:-1] == [""] * MAX_OF_ONE_USER
    assert problems[-1].startswith(f"of different libraries, user {user} has 16 already")


def test_a_deleted_library_is_probed_and_its_name_gives_nothing(
    folder: Path, library: bytes, probes: LaunchProbes
) -> None:
    # given a mapped library whose path leads to another file by now
    path = folder / "libze_intel_gpu.so.1"
    path.write_bytes(library)
    with Mapped(path) as process:
        path.unlink()
        path.symlink_to("/etc/shadow")
        # when
        found = list(probes.libraries.mapped(process.pid))
    # then it is the mapped file that was read
    assert [(outcome.probes > 0, outcome.problem) for outcome in found] == [(True, "")]
    assert found[0].path.endswith(" (deleted)")


def test_a_refused_file_is_looked_at_again_when_it_changed(folder: Path, library: bytes, probes: LaunchProbes) -> None:
    # given a file that was refused, whose inode is then another library's
    path = folder / "libze_intel_gpu.so.1"
    path.write_bytes(b"nothing" * 100)
    assert outcomes(probes, path)[0].probes == 0
    path.write_bytes(library)
    # when, then
    assert outcomes(probes, path)[0].probes > 0


def test_a_library_in_another_mount_namespace(tmp_path: Path, probes: LaunchProbes) -> None:
    """The process's path does not lead to the library from where the recorder is."""
    # given
    programs = runtime.build(copy_of_build(tmp_path / "build"))
    inside = tmp_path / "inside"
    inside.mkdir()
    words = runtime.command(
        [runtime.debug_elf("bmg", "matmul")], "--seconds", 60, "--rate", 200, "--no-gpu",
        programs=runtime.Programs(inside / programs.library.name, inside / programs.workload.name),
    )  # fmt: skip
    script = f"mount --bind {programs.library.parent} {inside} && exec {' '.join(words)}"
    environment = os.environ | {"STANDIN_DUMP_DIR": str(tmp_path)}
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", script], env=environment, stdout=subprocess.DEVNULL)
    # when
    found: list[Outcome] = []

    def is_found() -> bool:
        found.extend(each for each in probes.libraries.mapped(process.pid) if each.path.startswith(str(inside)))
        return bool(found)

    until(is_found, process)
    until(lambda: probes.counters()[Counter.LAUNCHES], process)
    process.terminate()
    assert process.wait() == 0
    # then
    assert [(outcome.probes > 0, outcome.problem) for outcome in found] == [(True, "")]
    assert set(probes.launches.read()["pid"].tolist()) == {process.pid}


def test_two_containers_of_one_image(tmp_path: Path, probes: LaunchProbes) -> None:
    """Their overlays show one library as two files, but it is one: each launch is to be counted once."""
    # given (overlays on a tmpfs, as no overlay can lie on another one)
    image = tmp_path / "image"
    image.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(image)], check=True)
    try:
        programs = runtime.build(copy_of_build(image / "lower"))
        for name in ("one", "two"):
            for part in ("upper", "work", "root"):
                (image / name / part).mkdir(parents=True)
            layers = f"lowerdir={image}/lower,upperdir={image}/{name}/upper,workdir={image}/{name}/work"
            subprocess.run(["mount", "-t", "overlay", "-o", layers, "none", str(image / name / "root")], check=True)
        # when
        found = list(probes.libraries.installed(tuple(str(image / name / "root") for name in ("one", "two"))))
        for name in ("one", "two"):
            root = image / name / "root"
            inside = runtime.Programs(root / programs.library.name, root / programs.workload.name)
            words = runtime.command(
                [runtime.debug_elf("bmg", "matmul")], "--launches", 50, "--rate", 0, "--no-gpu", programs=inside
            )
            environment = os.environ | {"STANDIN_DUMP_DIR": str(tmp_path)}
            subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
    finally:
        subprocess.run(["umount", "-R", "-l", str(image)], check=True)
    # then
    assert [(outcome.probes > 0, outcome.problem) for outcome in found] == [(True, "")]
    assert probes.counters()[Counter.LAUNCHES] == 100


def test_a_recording_among_hostile_libraries(folder: Path, library: bytes) -> None:
    """A storm of mappings by the other user, while the recorder records: all launches are there, refusals are told."""
    # given libraries that are broken, each mapped again and again
    broken = bytearray(library)
    struct.pack_into("<Q", broken, note_offset(library), 0)
    for number in range(40):
        path = folder / f"libze_intel_gpu.so.{number}"
        path.write_bytes(broken if number % 2 else library)
        os.chown(path, NOBODY, NOBODY)
    storm = "while :; do " + " ".join(
        f"LD_PRELOAD={folder}/libze_intel_gpu.so.{number} /bin/sleep 0.3 2>/dev/null &" for number in range(40)
    ) + " wait; done"  # fmt: skip
    attacker = subprocess.Popen(
        ["sh", "-c", storm], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={}, stderr=subprocess.DEVNULL
    )
    try:
        with Hardware(folder.parent / "gpu") as hardware:
            # when
            capture = folder.parent / "c"
            recorder = start(hardware, capture)
            words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 600, "--rate", 500)
            environment = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(folder.parent)}
            program = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
            until(lambda: has_met(capture, runtime.build().library), recorder)
            missed = launched(hardware)  # before the library had probes
            told = "16 already, which is the maximum"
            until(lambda: any(told in row["detail"] for row in spooled(capture, FrameKind.LOSS)), recorder)
            until(lambda: launched(hardware) > missed + 200, recorder)
            program.terminate()
            assert program.wait() == 0
            ended(recorder)
    finally:
        attacker.kill()
        attacker.wait()
    # then
    reader = CaptureReader(folder.parent / "c")
    launches = launched(hardware)
    ours = {launch.pid for launch in hardware.ledger().launches}
    recorded = sum(pid in ours for pid in reader.table("launch", ("pid",))["pid"].to_pylist())
    assert launches - missed <= recorded <= launches
    assert losses(folder.parent / "c", hardware.ledger()) == []
    details = [row["detail"] for row in reader.table("loss").to_pylist() if row["what"] == "library"]
    assert any("outside its executable segments" in detail for detail in details)
    assert len(details) <= 2 * (MAX_OF_ONE_USER + 1)  # of processes, and of those that had ended meanwhile
