"""The frames of stacks: names, inlined functions, lines, marks where a stack ends, and hidden CPython frames."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.header.stack_counts import NO_CODE, LibraryEnd, ProcessEnd, WholeStacks
from iaprof.symbols.cpu_frames import CpuFrames, FrameOptions, unnamed
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.names import Frame, Module, ModuleKind, Names, Symbolized

APP, LIBRARY = "/opt/app", "/lib/libfoo.so"
PYTHON = "/usr/lib/libpython3.12.so.1.0"
BASES = {APP: 0x1000, LIBRARY: 0x10000, PYTHON: 0x20000, "//anon": 0x30000, "[vdso]": 0x40000}


class Known:
    """A Symbolizer with names by path and address in the module; `keeps` says by path which keep frame pointers."""

    def __init__(self, names: dict[str, dict[int, list[Frame]]], keeps: dict[str, bool] | None = None) -> None:
        self._names, self._keeps = names, keeps or {}
        self.asked: list[tuple[str, list[int]]] = []

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized:
        self.asked.append((module.path, addresses.tolist()))
        known = self._names.get(module.path, {})
        return Symbolized(
            Names.of([(address, 1, frames) for address, frames in known.items()]),
            frame_pointers=self._keeps.get(module.path),
        )


def frames_of(
    symbolizer: Known,
    *stacks: list[int],
    frame_options: FrameOptions = FrameOptions(),  # noqa: B008
    truncated: bool = False,
    **more: Any,
) -> CpuFrames:
    """The frames of one process's stacks, whose ids count from 1; `more` are further members of their rows."""
    mappings = [
        {"time_ns": 1, "pid": 7, "start": base, "length": 0x1000, "offset": 0, "path": path,
         "build_id": path.encode() if path.startswith("/") and path != "//anon" else None}
        for path, base in BASES.items()
    ]  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"id": number, "time_ns": 10, "pid": 7, "truncated": truncated, "ips": ips, **more}
        for number, ips in enumerate(stacks, 1)
    ]
    return CpuFrames(
        pa.Table.from_pylist(rows, pa.schema(list(KINDS["stack"]))),
        AddressSpaces(
            pa.Table.from_pylist(mappings, pa.schema(list(KINDS["mapping"]))),
            pa.Table.from_pylist([], pa.schema(list(KINDS["process"]))),
        ),
        symbolizer,
        frame_options,
    )


def test_frames_are_named_from_outermost_to_innermost() -> None:
    # given the innermost address, which is an instruction's, and return addresses
    known = Known({APP: {0x10: [Frame("probe")], 0x1F: [Frame("_ZN2nn3dotEif")], 0x2F: [Frame("main")]}})
    # when
    frames = frames_of(known, [0x1010, 0x1020, 0x1030], [0x1010, 0x1020, 0x1030, 0x1030], [])
    # then
    assert frames.frames(1) == ("main", "nn::dot(int, float)", "probe")
    assert frames.frames(2) == ("main", "main", "nn::dot(int, float)", "probe")
    assert frames.frames(3) == ()
    assert frames.frames(99) == ()
    # and each address was asked for once
    assert known.asked == [(APP, [0x10, 0x1F, 0x2F])]


def test_inlined_functions_and_lines() -> None:
    chain = [Frame("main", "/src/app.cpp", 10), Frame("inlined", "/src/vec.h", 3), Frame("deeper")]
    known = Known({APP: {0x10: chain}})
    assert frames_of(known, [0x1010]).frames(1) == ("main", "inlined", "deeper")
    assert frames_of(known, [0x1010], frame_options=FrameOptions(inlines=False)).frames(1) == ("main",)
    assert frames_of(known, [0x1010], frame_options=FrameOptions(lines=True)).frames(1) == (
        "main app.cpp:10",
        "inlined vec.h:3",
        "deeper",
    )


def test_unnamed_frames_show_module_or_address() -> None:
    frames = frames_of(Known({}), [0x10010, 0x30101, 0x40010, 0x99999])
    assert frames.frames(1) == ("0x99998", "[vdso]", "[anon]", "[libfoo.so+0x10]")
    assert unnamed(Module(ModuleKind.KERNEL, "[kernel]"), 5) == "[kernel]"


def test_a_mark_shows_where_a_cut_stack_ends() -> None:
    names = {APP: {0x10: [Frame("work")], 0x2F: [Frame("main")]}, LIBRARY: {0x10: [Frame("foo")]}}
    known = Known(names, {APP: True, LIBRARY: False})
    assert frames_of(known, [0x1010, 0x1030]).frames(1) == ("main", "work")
    assert frames_of(known, [0x1010], truncated=True).frames(1) == ("[truncated]", "work")
    assert frames_of(known, [0x1010]).frames(1) == ("work",)
    assert frames_of(known, [0x1010, 0x10011]).frames(1) == ("[no frame pointers: libfoo.so]", "foo", "work")
    assert frames_of(Known(names), [0x1010, 0x10011]).frames(1) == ("foo", "work")


def test_cpython_frames_are_hidden_unless_the_option_shows_them() -> None:
    # given main in the interpreter, two Python functions with frames of the interpreter between, and C++ called last
    known = Known({
        PYTHON: {0x10: [Frame("cfunction_call")], 0x1F: [Frame("_PyEval_EvalFrameDefault")], 0x2F: [Frame("Py_Main")]},
        "//anon": {0x3000F: [Frame("py::outer:/x.py")], 0x3001F: [Frame("py::inner:/x.py")]},
        LIBRARY: {0x10: [Frame("launch")]},
    })  # fmt: skip
    ips = [0x10010, 0x20011, 0x30020, 0x20020, 0x30010, 0x20030]
    # when, then
    assert frames_of(known, ips).frames(1) == ("py::outer:/x.py", "py::inner:/x.py", "launch")
    everything = (
        "Py_Main",
        "py::outer:/x.py",
        "_PyEval_EvalFrameDefault",
        "py::inner:/x.py",
        "cfunction_call",
        "launch",
    )
    assert frames_of(known, ips, frame_options=FrameOptions(interpreter=True)).frames(1) == everything
    # and a stack without Python functions stays as it is
    assert frames_of(known, [0x10010, 0x20011]).frames(1) == ("cfunction_call", "launch")


def test_shares_count_weights_by_module() -> None:
    known = Known({APP: {0x10: [Frame("work")]}})
    frames = frames_of(known, [0x1010], [0x1010, 0x10010], [0x1400])
    shares = frames.shares({1: 70, 2: 20, 3: 10, 99: 5})
    by_path = {names.module.path: shares[names.module.identity] for names in frames.modules}
    assert by_path == {APP: (100, 10), LIBRARY: (20, 20)}


def test_an_unmapped_address_is_in_the_module_nowhere() -> None:
    frames = frames_of(Known({}), [0x5])
    assert [names.module.path for names in frames.modules] == [NOWHERE]
    assert frames.frames(1) == ("0x5",)


class KnownCode(Known):
    """A Symbolizer that also knows which addresses are in outermost functions, and at which no call ends."""

    def __init__(self, names: dict[str, dict[int, list[Frame]]], outermost: list[int], no_calls: list[int]) -> None:
        super().__init__(names)
        self._outermost, self._no_calls = (np.array(listed, np.uint64) for listed in (outermost, no_calls))

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized:
        outermost, no_calls = (self._outermost, self._no_calls) if module.path == APP else (None, None)
        return replace(super().name(module, addresses, times), outermost=outermost, no_calls=no_calls)


NAMED = {APP: {0x10: [Frame("probe")], 0x1F: [Frame("dot")], 0x2F: [Frame("caller")]}}


def test_a_stack_is_cut_before_an_address_without_a_call() -> None:
    # given the address of an instruction, and a return address, without a call before them
    frames = frames_of(KnownCode(NAMED, [], [0x10, 0x2F]), [0x1010, 0x1020, 0x1030, 0x1020], truncated=True)
    assert frames.frames(1) == (f"[no frame pointers: {os.path.basename(APP)}]", "dot", "probe")
    ends = (LibraryEnd(os.path.basename(APP), 5),)
    assert frames.ends({1: 5}) == WholeStacks(5, 0, 0, ends, processes=(ProcessEnd(7, 5, 5),))


def test_a_stack_that_ends_in_an_outermost_function_is_whole() -> None:
    frames = frames_of(KnownCode(NAMED, [0x2F], []), [0x1010, 0x1020, 0x1030], [0x1010, 0x1020])
    assert frames.frames(1) == ("caller", "dot", "probe")
    assert frames.frames(2)[0].startswith("[no frame pointers")
    ends = frames.ends({1: 5, 2: 3, 77: 100})
    assert (ends.stacks, ends.whole, ends.unknown) == (8, 5, 0)


def test_without_the_code_the_end_of_a_stack_is_unknown() -> None:
    frames = frames_of(Known(NAMED), [0x1010, 0x1020])
    assert frames.frames(1) == ("dot", "probe")
    ends = (LibraryEnd(os.path.basename(APP), 4),)
    assert frames.ends({1: 4}) == WholeStacks(4, 0, 4, ends, processes=(ProcessEnd(7, 4, 4),))


def test_cpp_functions_in_a_namespace_py_stay_among_python_frames() -> None:
    """A perf map of `python -X perf` names the same functions as the Python frames: they are shown once."""
    known = Known({
        PYTHON: {0x1F: [Frame("_PyEval_EvalFrameDefault")]},
        "//anon": {0x3000F: [Frame("py::outer:/x.py")]},
        LIBRARY: {0x10: [Frame("_ZN2py6launchEv")]},
    })  # fmt: skip
    python = [{"code": NO_CODE, "line": 0, "at": 1}]
    frames = frames_of(known, [0x10010, 0x20020, 0x30010], ended="whole", python=python, python_ended="whole")
    assert frames.frames(1) == ("py::[unknown]", "py::launch()")
