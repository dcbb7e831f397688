"""Stacks with Python functions, without the frames of the interpreter."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.python.frames import is_interpreter, without_interpreter


@dataclass(frozen=True)
class Frame:
    name: str
    module: Module | None

    @property
    def is_python(self) -> bool:
        return self.name.startswith("py::")

    @property
    def is_of_interpreter(self) -> bool:
        return is_interpreter(self.module)


def native(path: str, name: str) -> Frame:
    return Frame(name, Module(ModuleKind.FILE, path))


def py(name: str) -> Frame:
    return Frame(f"py::{name}:app.py", Module(ModuleKind.GENERATED, pid=7))


PYTHON, LIBC, TORCH = "/usr/bin/python3.15", "/lib/x86_64-linux-gnu/libc.so.6", "/opt/libtorch.so"


def names(frames: list[Frame]) -> list[str]:
    return [frame.name for frame in without_interpreter(frames)]


def test_cpython_frames_between_python_functions_are_removed() -> None:
    frames = [
        native(LIBC, "__libc_start_main"),
        native(PYTHON, "Py_RunMain"),
        py("<module>"),
        native(PYTHON, "py_trampoline_evaluator"),
        native(PYTHON, "_PyEval_EvalFrameDefault"),
        py("train"),
        native(PYTHON, "cfunction_call"),
        native(TORCH, "at::native::matmul"),
        native(PYTHON, "PyObject_Call"),  # a callback into Python
        py("hook"),
        native(PYTHON, "[python3.15+0x1234]"),
        native("/usr/lib/python3.15/lib-dynload/_ctypes.cpython-315-x86_64-linux-gnu.so", "_call_function_pointer"),
        native(LIBC, "qsort"),
        Frame("0x1234", None),
    ]
    assert names(frames) == [
        "__libc_start_main",
        "py::<module>:app.py",
        "py::train:app.py",
        "at::native::matmul",
        "py::hook:app.py",
        "_call_function_pointer",
        "qsort",
        "0x1234",
    ]


def test_a_stack_without_python_functions_is_left_as_it_is() -> None:
    frames = [native(PYTHON, "main"), native(PYTHON, "_PyEval_EvalFrameDefault"), native(TORCH, "launch")]
    assert without_interpreter(frames) == frames
    assert without_interpreter([]) == []


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/python",
        "/usr/bin/python3",
        "/usr/bin/python3.11",
        "/usr/bin/python3.13t",
        "/usr/bin/python3.13d",
        "/usr/bin/python3.14td",
        "/usr/bin/python3.12 (deleted)",
        "/usr/lib/libpython3.12.so.1.0",
        "/usr/lib/libpython3.13t.so.1.0",
        "/usr/lib/libpython3.7m.so.1.0",
        "/usr/lib/libpython3.15.so",
        "/odd\nfolder/python3.11",
    ],
)
def test_files_that_are_the_interpreter(path: str) -> None:
    assert is_interpreter(Module(ModuleKind.FILE, path))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/usr/bin/python3.11/other",
        "/usr/bin/python-launcher",
        "/usr/bin/python3.11-config",
        "/usr/bin/ipython3",
        "/usr/bin/python3.11\n",
        "/usr/lib/libpython3.12.so.1.0.debug",
        "/usr/lib/libboost_python311.so.1.74.0",
        "/usr/lib/libpython3." + "1" * 100_000,
        "/usr/lib/libpython3.1" + ".so" * 100_000,
    ],
)
def test_files_that_are_not_the_interpreter(path: str) -> None:
    begin = time.process_time()
    assert not is_interpreter(Module(ModuleKind.FILE, path))
    assert time.process_time() - begin < 5


def test_only_a_file_is_the_interpreter() -> None:
    assert not is_interpreter(None)
    assert not is_interpreter(Module(ModuleKind.GENERATED, "python3.11", pid=7))
