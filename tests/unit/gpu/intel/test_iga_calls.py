"""What cffi made of the declarations of IGA is in the repository, as making it takes longer than to decode a kernel."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import cffi

from iaprof.gpu.intel import iga, iga_calls


def made_by_cffi(file: Path) -> str:
    """The call that makes the object, of a file that cffi wrote."""
    [call] = [each.value for each in ast.parse(file.read_text()).body if isinstance(each, ast.Assign)]
    return ast.unparse(call)


def test_the_calls_are_those_that_are_declared(tmp_path: Path) -> None:
    made = tmp_path / "iga_calls.py"
    ffi = cffi.FFI()
    ffi.cdef(iga.DECLARATIONS)
    ffi.set_source(iga_calls.__name__, None)
    ffi.emit_python_code(str(made))
    there = Path(iga_calls.__file__)
    assert made_by_cffi(made) == made_by_cffi(there), f"{there.name} is old: copy the call from {made}"


def test_the_decoder_is_imported_without_the_parser_of_declarations() -> None:
    code = "import sys, iaprof.gpu.intel.iga; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "_cffi_backend" in done.stdout.split()
    assert not {"cffi", "pycparser"} & set(done.stdout.split())
