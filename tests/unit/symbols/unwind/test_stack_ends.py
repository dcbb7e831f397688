"""How a stack ends, and the frame that marks its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from iaprof.symbols.names.address_space import NOWHERE
from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.unwind.stack_ends import BEGINNINGS, end_of, mark, without_strays


def file(path: str) -> Module:
    return Module(ModuleKind.FILE, path)


FOO, LIBC, PYTHON = (file(path) for path in ("/opt/libfoo.so.1", "/lib/x86_64-linux-gnu/libc.so.6", "/usr/bin/python3"))
LOST = Module(ModuleKind.GENERATED, NOWHERE, pid=7)
JIT = Module(ModuleKind.GENERATED, "//anon", pid=7)


@dataclass(frozen=True)
class Frame:
    label: str
    module: Module | None
    is_named: bool = False


def end_mark(name: str, module: Module | None, truncated: bool, keeps: bool | None) -> str | None:
    """The mark of a stack with this outermost frame, in a file that could not be read."""
    return mark(end_of(name, module, None, keeps), module, truncated)


def test_a_truncated_stack_is_marked_whatever_its_end() -> None:
    for keeps in (True, False, None):
        assert end_mark("f", FOO, True, keeps) == "[truncated]"
    assert end_mark("", None, True, None) == "[truncated]"


def test_the_mark_names_a_library_without_frame_pointers() -> None:
    assert end_mark("foo::run(int)", FOO, False, False) == "[no frame pointers: libfoo.so.1]"
    assert end_mark("", FOO, False, False) == "[no frame pointers: libfoo.so.1]"


@pytest.mark.parametrize("keeps", [True, None])
def test_a_library_not_known_to_lack_frame_pointers_gets_no_mark(keeps: bool | None) -> None:
    assert end_mark("foo::run(int)", FOO, False, keeps) is None


@pytest.mark.parametrize(
    "name",
    [*sorted(BEGINNINGS), "__libc_start_main@@GLIBC_2.34", "runtime.goexit.abi0", "clone@GLIBC_2.2.5"],
)
def test_stacks_that_reach_a_beginning_get_no_mark(name: str) -> None:
    assert end_mark(name, FOO, False, False) is None


@pytest.mark.parametrize("name", ["main2", "Xmain", "clone_model", "domain", "foo::main()"])
def test_functions_with_similar_names_are_no_beginnings(name: str) -> None:
    assert end_mark(name, FOO, False, False) == "[no frame pointers: libfoo.so.1]"


@pytest.mark.parametrize(
    "path",
    ["/lib/libc.so.6", "/lib/libc-2.31.so", "/lib/libpthread.so.0", "/lib64/ld-linux-x86-64.so.2",
     "/lib/libpthread-2.31.so", "/lib/ld-2.31.so", "/lib/ld-musl-x86_64.so.1"],
)  # fmt: skip
def test_an_unnamed_frame_of_the_c_library_may_be_a_beginning(path: str) -> None:
    file_name = path.rsplit("/", 1)[1]
    assert end_mark("", file(path), False, False) is None
    assert end_mark("qsort_r", file(path), False, False) == f"[no frame pointers: {file_name}]"


@pytest.mark.parametrize(
    "path", ["/lib/libcrypto.so.3", "/lib/libc++.so.1", "/lib/libcudart.so.12", "/opt/libc.so/foo"]
)
def test_other_libraries_are_not_taken_for_the_c_library(path: str) -> None:
    assert end_mark("", file(path), False, False) == f"[no frame pointers: {path.rsplit('/', 1)[1]}]"


@pytest.mark.parametrize(
    "module", [None, JIT, LOST, Module(ModuleKind.KERNEL, "[kernel]"), Module(ModuleKind.VDSO, "[vdso]")]
)
def test_modules_that_are_not_files_get_no_mark(module: Module | None) -> None:
    assert end_mark("f", module, False, False) is None


def test_hostile_names_and_paths_take_no_time() -> None:
    # given
    name = "[" + "+0x1" * 100_000
    begin = time.process_time()
    # when, then
    assert end_mark(name, LIBC, False, False) == "[no frame pointers: libc.so.6]"
    assert end_mark("@" * 100_000, FOO, False, False) == "[no frame pointers: libfoo.so.1]"
    text = end_mark("f", file("/opt/" + "x" * 100_000), False, False)
    assert text is not None
    assert len(text) < 300
    assert end_mark("", file("/lib/libc-" + "1" * 100_000), False, False) is not None
    assert time.process_time() - begin < 5


def test_unmapped_frames_outside_code_without_frame_pointers_are_removed() -> None:
    # given addresses that a walk by frame pointers read from the stack beyond the C library's first function
    frames = [Frame("0x752f746f6f722f70", LOST), Frame("0x7ffd5c1d99d1", LOST), Frame("", LIBC), Frame("main", PYTHON)]
    for kept in (False, None):
        assert without_strays(frames, {LIBC: kept, PYTHON: True}.get) == frames[2:]


def test_unmapped_frames_outside_code_with_frame_pointers_stay() -> None:
    frames = [Frame("0x1234", LOST), Frame("f", FOO), Frame("g", LIBC)]
    assert without_strays(frames, {FOO: True, LIBC: False}.get) == frames


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [Frame("0x1", LOST), Frame("0x2", LOST)],  # of a process with unknown mappings
        [Frame("0x1", LOST), Frame("jitted", JIT, is_named=True), Frame("f", FOO)],
        [Frame("jitted", LOST, is_named=True), Frame("f", FOO)],
        [Frame("f", FOO), Frame("0x1", LOST), Frame("g", FOO)],  # in the middle of a stack
    ],
)
def test_frames_that_may_be_real_stay(frames: list[Frame]) -> None:
    assert without_strays(frames, lambda _: None) == frames
