"""What `iaprof check` says of running Pythons: of real ones, and of libraries made for the other cases."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from iaprof.record.checks import pythons
from iaprof.record.checks.result import Level
from iaprof.record.symbolize.opener import Opener
from pythons.interpreters import NAMES, files_of, started_as
from unit.symbols.python.test_python_interpreter import SOURCE, built, patched, published

ECHO = "import sys; print(*sys.version_info[:3], sep='.', flush=True); sys.stdin.read()"
CODE = "int runs(void) { return 0; }\n"  # a library without code has no executable mapping
MAPPING = """
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
int main(int count, char **files) {
    while (--count)
        mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, open(files[count], O_RDONLY), 0);
    puts("mapped");
    fflush(stdout);
    while (getchar() != EOF)
        ;
}
"""
NOBODY = 65534
T = TypeVar("T", bound=Callable[..., None])


def needs_root(test: T) -> T:
    """Marks a test: only root can open what processes have mapped."""
    for mark in (pytest.mark.root, pytest.mark.beside):
        mark(test)
    return test


@contextlib.contextmanager
def running(*words: str | Path, **more: Any) -> Iterator[tuple[int, str]]:
    """Yields the pid of a command that has begun, and the line that it printed; the command ends with its input."""
    command = [str(word) for word in words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("begun\n")
        process.stdin.flush()
        yield process.pid, process.stdout.readline().rstrip()
        process.communicate()


def loading(library: Path, **more: Any) -> contextlib.AbstractContextManager[tuple[int, str]]:
    """A program that has loaded a library, and is not a Python."""
    return running("cat", env=os.environ | {"LD_PRELOAD": str(library)}, **more)


def found_in(*pids: int) -> list[tuple[str, str, str, int]]:
    """Path, version, problem and number of processes of each interpreter that was found."""
    with pythons.PythonSearch() as search:
        assert search.run(pids, time.monotonic() + 60) == 0
        return [(each.path, each.version, each.problem, len(each.pids)) for each in search.found]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "libpython3.99t.so.1.0"


# ---- Pythons that will be seen ----


@needs_root
@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_whose_functions_will_be_seen(name: str) -> None:
    python = started_as(name)
    (file,) = files_of(python)
    with running(*python, "-c", ECHO) as (pid, version):
        assert found_in(pid) == [(str(file), version, "", 1)]


@needs_root
def test_an_interpreter_inside_of_another_program(tmp_path: Path) -> None:
    program = Path(shutil.copy(Path(sys.executable).resolve(), tmp_path / "app"))
    with running(program, "-S", "-c", ECHO, env=os.environ | {"PYTHONHOME": sys.base_prefix}) as (pid, version):
        ((_, found, problem, count),) = found_in(pid)
    assert (found, problem, count) == (version, "", 1)


@needs_root
def test_an_interpreter_whose_file_is_gone(library: Path) -> None:
    library.write_bytes(patched(built(library.parent, SOURCE + CODE), published()))
    with loading(library) as (pid, _):
        library.unlink()
        assert found_in(pid) == [(str(library), "3.14.10", "", 1)]


@needs_root
def test_a_file_is_read_once_for_a_thousand_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_mapping = Opener.open_mapping

    def counted(self: Opener, *words: Any) -> int | str:
        opened.append(words)
        return open_mapping(self, *words)

    monkeypatch.setattr(Opener, "open_mapping", counted)
    with running(sys.executable, "-S", "-c", ECHO) as (pid, version):
        ((_, found, _, count),) = found_in(*[pid] * 1000)
    assert (found, count) == (version, 1000)
    assert len(opened) <= 2  # the program's, and that of libpython


def test_programs_without_an_interpreter() -> None:
    with running("cat") as (pid, _):
        assert found_in(pid) == []


# ---- and others, each with the reason ----


@needs_root
@pytest.mark.parametrize(
    ("content", "version", "said"),
    [
        (published(free_threaded=1), 0x030E0AF0, "it is a free-threaded build"),
        (published({40: 1 << 40}), 0x030E0AF0, "the offset that it publishes for interpreters_head is absurd"),
        (published(), 0x03630000, "it is Python 3.99.0, which is newer than what is known here (3."),
        (published(), 0x030E00A1, "it is a preview of Python 3.14.0"),
        (b"xdebugpy", 0x030E0AF0, "it publishes the offsets of another version"),
    ],
    ids=["free-threaded", "damaged", "newer", "preview", "other offsets"],
)
def test_versions_that_cannot_be_walked(content: bytes, version: int, said: str, library: Path) -> None:
    library.write_bytes(patched(built(library.parent, SOURCE + CODE), content, version))
    with loading(library) as (pid, _):
        ((path, name, problem, count),) = found_in(pid)
    assert (path, name, count) == (str(library), "3.99", 1)
    assert problem.startswith(said)


@needs_root
@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("libpython3.so", "char _PyRuntime[64] = {1};", "it is older than Python 3.11, or does not export its version"),
        ("libpython3.10.so.1.0", "char _PyRuntime[64] = {1};", "it is older than Python 3.11"),
        ("libpython3.12.so.1.0", "char _PyRuntime[64] = {1};", "it is older than Python 3.11, or does not export"),
        ("libpython3.6m.so.1.0", "", "it is older than Python 3.11"),
        ("libpython2.7.so.1.0", "", "it is older than Python 3.11"),
        (
            "libpython3.so",
            "",
            "no CPython was found in its file: it is older than 3.7, another implementation, or exports",
        ),
    ],
)
def test_older_ones(name: str, source: str, said: str, tmp_path: Path) -> None:
    library = tmp_path / name
    library.write_bytes(built(tmp_path, source + CODE))
    with loading(library) as (pid, _):
        ((_, _, problem, _),) = found_in(pid)
    assert problem.startswith(said)
    assert ("export" in problem) is ("export" in said)


@needs_root
def test_a_file_that_its_user_may_not_read(library: Path) -> None:
    library.write_bytes(patched(built(library.parent, SOURCE + CODE), published()))
    for folder in (library.parent, *library.parent.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    with loading(library, user=NOBODY, group=NOBODY) as (pid, _):
        library.chmod(0)
        assert found_in(pid) == [(str(library), "3.99", pythons._REFUSED, 1)]


@needs_root
def test_what_takes_too_long_is_not_looked_at() -> None:
    with running(sys.executable, "-S", "-c", ECHO) as (pid, _), pythons.PythonSearch() as search:
        assert search.run([pid, pid], time.monotonic()) == 2
        assert search.found == []


@needs_root
def test_a_process_with_many_files_is_left_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    files = [tmp_path / f"libpython3.{number}.so.1.0" for number in range(50)]
    for file in files:
        file.write_bytes(b"no ELF file" * 500)
    program = tmp_path / "mapping"
    subprocess.run(["cc", "-x", "c", "-", "-o", program], input=MAPPING, text=True, check=True)
    opened, open_mapping = [], Opener.open_mapping

    def until_three(self: Opener, *words: Any) -> int | str:
        opened.append(words)
        search._end = search._end if len(opened) < 3 else 0.0
        return open_mapping(self, *words)

    monkeypatch.setattr(Opener, "open_mapping", until_three)
    # when
    with running(program, *files) as (pid, _), pythons.PythonSearch() as search:
        assert search.run([pid, pid], time.monotonic() + 60) == 2
    # then
    assert len(opened) == 3


@needs_root
def test_a_damaged_file_keeps_nobody_from_looking_on(library: Path) -> None:
    library.write_bytes(patched(built(library.parent, SOURCE + CODE), published()))
    with loading(library) as (pid, _), running(sys.executable, "-S", "-c", ECHO) as (other, version):
        os.truncate(library, 4096)  # what its headers lead to is not there any more
        (broken, whole) = found_in(pid, other)
    assert broken == (str(library), "3.99", pythons._UNKNOWN, 1)
    assert whole[1:] == (version, "", 1)


# ---- what is printed ----


def lines(*found: tuple[str, str, str, int]) -> list[tuple[str, str, str]]:
    """Name, level and text of each line."""
    interpreters = [
        pythons._Interpreter(path, version, problem, list(range(7, 7 + count)))
        for path, version, problem, count in found
    ]
    return [(check.name, check.level.value, check.text) for check in pythons._lines(interpreters)]


def test_each_interpreter_has_a_line_and_those_that_will_not_be_seen_come_first() -> None:
    seen = [("/usr/bin/python3.11", "3.11.2", "", 1), ("/opt/libpython3.13.so.1.0", "3.13.0", "", 20)]
    unseen = ("/opt/python3.13t", "3.13", "it is a free-threaded build", 2)
    (first, *rest) = lines(*seen, unseen, ("/opt/python", "", pythons._REFUSED, 1))
    assert first[:2] == ("Python 3.13", "warning")
    assert first[2].startswith("its functions will not be in stacks (2 processes): it is a free-threaded build. To see")
    assert "run the program with a release of CPython 3.11 to 3." in first[2]
    assert rest[0][:2] == ("Python", "warning")
    assert rest[0][2].endswith("To see them, let the users who run it read the file")
    assert rest[1:] == [
        ("Python 3.13.0", "ok", "its functions will be in stacks (20 processes)"),
        ("Python 3.11.2", "ok", "its functions will be in stacks (process 7)"),
    ]


@pytest.mark.parametrize(
    ("problem", "level", "said"), [("", "ok", "none of them"), ("it is old", "warning", "3 of them")]
)
def test_no_more_than_some_lines(problem: str, level: str, said: str) -> None:
    found = [(f"/opt/{number}/python", "3.12.1", problem, 1) for number in range(pythons.MOST_LINES + 3)]
    *_, last = lines(*found)
    assert last == ("Python", level, f"and 3 more files; functions of {said} will not be in stacks")


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (check,) = pythons.checks()
    assert (check.level, check.text) == (Level.WARNING, "only root can tell whether running Pythons will be seen")


def test_a_kernel_on_which_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pythons, "kernel_offsets", lambda: None)
    (check,) = pythons.checks()
    assert check.level is Level.WARNING
    assert check.text.startswith("stacks will have no Python functions: the kernel's BTF")


@needs_root
def test_all_that_runs_is_looked_at_but_not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(sys.executable, "-S", "-c", ECHO) as (pid, version):
        monkeypatch.setattr(pythons, "running_pids", lambda: [os.getpid(), pid])
        (check,) = pythons.checks()
    expected = (f"Python {version}", f"its functions will be in stacks (process {pid})")
    assert (check.name, check.text) == expected
