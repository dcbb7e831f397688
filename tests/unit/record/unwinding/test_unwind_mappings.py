"""What the learner reads of running processes: executable mappings, whose files are numbered, and memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from iaprof.record.symbolize.opener import ELSEWHERE, LATE, UNREADABLE
from iaprof.record.unwinding.mappings import ImageGone, Images, Memory, executable, rights_of
from iaprof.symbols.unwind.finishing import PAGE

RUNS = "import sys; print('ready', flush=True); sys.stdin.read()"


class Closed:
    """Opens nothing, and says why."""

    why = UNREADABLE[0]

    def open_mapping(self, *of: object) -> str:
        return self.why


@pytest.fixture
def images() -> Images:
    return Images(Closed())  # type: ignore[arg-type]


def test_processes_of_the_same_program_share_the_numbers_of_its_files(images: Images) -> None:
    words = [sys.executable, "-c", RUNS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as one, subprocess.Popen(words, **pipes) as other:  # type: ignore[call-overload]
        for program in (one, other):
            program.stdout.readline()
        found = [executable(program.pid, images) for program in (one, other)]
        for program in (one, other):
            program.stdin.close()
    assert [each.image for each in found[0]] == [each.image for each in found[1]]
    assert [(each.offset, each.end - each.start) for each in found[0]] == [
        (each.offset, each.end - each.start) for each in found[1]
    ]
    # and a process that has ended has no mappings
    assert executable(one.pid, images) == ()
    assert rights_of(one.pid) is None


def test_generated_code_is_of_no_file_and_the_vdso_is_one(images: Images) -> None:
    rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=rights) as generated:
        at = ctypes.addressof(ctypes.c_char.from_buffer(generated))
        found = {each.start: each for each in executable(os.getpid(), images)}
        # the kernel may have joined it to another mapping of the same rights, such as one of libffi's closures
        (around,) = [each for each in found.values() if each.start <= at < each.end]
        assert around.image == -1
    assert sorted(found) == [each.start for each in found.values()]
    with open("/proc/self/maps") as maps:
        (vdso,) = [int(line.split("-")[0], 16) for line in maps if line.endswith("[vdso]\n")]
    descriptor = images.open(found[vdso].image)
    assert descriptor is not None
    assert os.pread(descriptor, 4, 0) == b"\x7fELF"
    os.close(descriptor)


@pytest.mark.parametrize("why", [LATE, *ELSEWHERE, "Cannot allocate memory"])
def test_a_file_that_is_not_there_now_or_not_opened_in_time_may_be_opened_later(
    images: Images, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next(each.image for each in executable(os.getpid(), images) if each.image >= 0)
    assert images.open(image) is None
    monkeypatch.setattr(Closed, "why", why)
    with pytest.raises(ImageGone):
        images.open(image)


def test_files_of_two_subvolumes_are_two(images: Images) -> None:
    # given what /proc/PID/maps had of the first files in two subvolumes of a btrfs (Linux 6.18)
    mapped = [(0x27, 257, name, pid, PAGE, 2 * PAGE) for pid, name in enumerate((b"/a/one", b"/home/other", b"/a/one"))]
    numbers = [images.number(*each) for each in mapped]
    assert numbers[0] == numbers[2] != numbers[1]


def test_a_file_that_one_of_its_processes_cannot_read_is_opened_for_another(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a file that two processes have mapped
    image = next(each.image for each in executable(os.getpid(), images) if each.image >= 0)
    with subprocess.Popen([sys.executable, "-c", RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert image in {each.image for each in executable(program.pid, images)}

        def only_ours(_: Closed, pid: int, *of: object) -> str | int:
            return os.open(os.devnull, os.O_RDONLY) if pid == os.getpid() else UNREADABLE[0]

        # when
        monkeypatch.setattr(Closed, "open_mapping", only_ours)
        file = images.open(image)
        # then
        assert file is not None
        os.close(file)

        # and a process that ends meanwhile tells nothing of the file
        def ends(_: Closed, pid: int, *of: object) -> str:
            if pid == os.getpid():
                return ELSEWHERE[0]
            program.kill()
            program.wait()
            return UNREADABLE[0]

        monkeypatch.setattr(Closed, "open_mapping", ends)
        with pytest.raises(ImageGone):
            images.open(image)


def test_a_file_that_nobody_maps_any_more_is_gone(images: Images) -> None:
    # given a file that was mapped by a process that has ended
    with subprocess.Popen([sys.executable, "-c", RUNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        found = executable(program.pid, images)
    # then
    with pytest.raises(ImageGone):
        images.open(next(each.image for each in found if each.image >= 0))
    with pytest.raises(ImageGone):
        images.open(1 << 20)


def test_memory_is_read_a_page_at_a_time() -> None:
    content = ctypes.create_string_buffer(b"iaprof", 3 * PAGE)
    page = (ctypes.addressof(content) + PAGE) & -PAGE
    ctypes.memset(page, 7, PAGE)
    assert Memory(os.getpid()).page(page) == bytes([7]) * PAGE
    # and missing memory is empty
    assert Memory(os.getpid()).page(PAGE) == b""
    assert Memory(os.getpid()).page(1 << 70) == b""
    assert Memory((1 << 22) + 1).page(page) == b""
