"""Compiles the C programs with bcc, into bytecode that any process can load.

The programs ship compiled (programs.json), so a recorder compiles them only if the kernel refuses those. As clang takes
130 MB and frees little of it, a child process compiles (`main`; compilation.py starts
it).

bcc comes from the distribution's package, not from PyPI (what is called `bcc` there is something else). Its Python
part is plain ctypes, so this one package can be imported from the distribution's folder by its path. With the whole
folder on sys.path, other packages in it would shadow those of our environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from iaprof.bpf.bytecode import (
    BpfUnavailable,
    Bytecode,
    BytecodeError,
    Map,
    call_placeholder,
    from_compiled,
    placeholder,
)
from iaprof.bpf.compile.headers import HEADERS_ADVICE, find_headers
from iaprof.bpf.syscall import BPF_OBJ_GET_INFO_BY_FD, bpf

BCC_FOLDERS = (
    "/usr/lib/python3/dist-packages",
    f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
    f"/usr/lib64/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
)
_MAP_INFO_BYTES = 256  # more than struct bpf_map_info has


@dataclass(frozen=True)
class Source:
    """The programs' C text, and what the compiler needs to know of it."""

    text: str
    defines: Mapping[str, int]  # values of macros
    constants: Sequence[str]  # names of the constants that the loader fills in
    functions: Sequence[str]  # names of the functions that are programs
    calls: Sequence[str] = ()  # names of the constants with the numbers of functions of the kernel's

    def flags(self) -> list[str]:
        """Returns the compiler's options."""
        fixed = [f"-D{name}={value}" for name, value in sorted(self.defines.items())]
        constants = (f"-D{name}=NAMED({placeholder(name):#x})" for name in self.constants)
        calls = (f"-D{name}={call_placeholder(name)}" for name in self.calls)
        return [*fixed, *constants, *calls, "-Wno-everything"]

    def digest(self) -> str:
        """Returns a hash of everything that can change the compiled programs."""
        whole = {"text": self.text, "flags": self.flags(), "functions": list(self.functions), "calls": list(self.calls)}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def to_text(self) -> str:
        """Returns the source as JSON, for the child process."""
        return json.dumps(asdict(self))


def bcc_version(folders: Sequence[str] = BCC_FOLDERS) -> str | None:
    """Returns the version of the bcc that `import_bcc` would find, without loading it; None without bcc."""
    for folder in folders:
        package = Path(folder) / "bcc"
        if (package / "libbcc.py").is_file():
            with contextlib.suppress(OSError):
                found = re.search(r"__version__\s*=\s*['\"]([^'\"]*)", (package / "version.py").read_text())
                return found[1] if found else "unknown"
            return "unknown"
    return None


def import_bcc(folders: Sequence[str] = BCC_FOLDERS) -> ModuleType:
    """Imports the distribution's `bcc` module.

    Raises:
        BpfUnavailable: bcc is not installed, or its library does not load.
    """
    if "bcc" in sys.modules:
        return sys.modules["bcc"]
    for folder in folders:
        package = Path(folder) / "bcc"
        if not (package / "libbcc.py").is_file():
            continue
        spec = importlib.util.spec_from_file_location(
            "bcc", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules["bcc"] = module
        try:
            spec.loader.exec_module(module)
        except (OSError, ImportError) as error:
            del sys.modules["bcc"]
            raise BpfUnavailable(f"bcc in {folder} does not load ({error}); reinstall python3-bpfcc") from error
        return module
    raise BpfUnavailable(
        "bcc is not installed: install the distribution's package (Debian and Ubuntu: apt install python3-bpfcc; "
        "Fedora: dnf install python3-bcc). The package called bcc on PyPI is another program"
    )


def compile_source(source: Source, folders: Sequence[str] = BCC_FOLDERS) -> Bytecode:
    """Compiles the programs; kernel headers must be where bcc finds them (headers.py).

    Args:
        source: what to compile.
        folders: folders in which bcc may be.

    Raises:
        BpfUnavailable: bcc is missing, permission is missing, or the source does not compile.
    """
    bcc = import_bcc(folders)
    with _captured_stderr() as messages:
        try:
            compiled = bcc.BPF(text=source.text.encode(), cflags=source.flags())
            maps = {name: compiled[name.encode()].map_fd for name in _map_names(bcc, compiled)}
            names = {fd: name for name, fd in maps.items()}
            code = {name: compiled.dump_func(name.encode()) for name in source.functions}
        except Exception as error:  # bcc raises bare Exception
            raise BpfUnavailable(_explain(str(error), messages())) from error
    try:
        programs = {name: from_compiled(each, names, source.constants, source.calls) for name, each in code.items()}
    except BytecodeError as error:
        raise BpfUnavailable(f"bcc {bcc.__version__} compiled programs that cannot be loaded: {error}") from error
    used = {name for program in programs.values() for _, name in program.maps}
    return Bytecode(
        source.digest(),
        f"bcc {bcc.__version__}",
        {name: _map(fd) for name, fd in maps.items() if name in used},
        programs,
    )


def _map_names(bcc: ModuleType, compiled: Any) -> list[str]:
    library = bcc.libbcc.lib
    library.bpf_num_tables.argtypes = [ctypes.c_void_p]
    library.bpf_num_tables.restype = ctypes.c_size_t
    library.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.bpf_table_name.restype = ctypes.c_char_p
    count = library.bpf_num_tables(compiled.module)
    return [library.bpf_table_name(compiled.module, number).decode() for number in range(count)]


def _map(fd: int) -> Map:
    """Returns the attributes of a map that bcc created, from the kernel."""
    info = ctypes.create_string_buffer(_MAP_INFO_BYTES)
    bpf(BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    kind, _, key_bytes, value_bytes, entries, flags = struct.unpack_from("<6I", info)
    return Map(kind, key_bytes, value_bytes, entries, flags)


def _explain(error: str, output: str) -> str:
    if "Operation not permitted" in output or "Operation not permitted" in error:
        return "the kernel does not permit BPF here (lockdown, a container without CAP_BPF, or a security module)"
    if "chdir" in output or "Unable to find kernel headers" in output:
        return f"kernel headers were not found: {HEADERS_ADVICE}"
    lines = output.strip().splitlines()
    detail = next((line for line in lines if "error:" in line), lines[-1] if lines else "it said no more")
    return f"the BPF programs did not compile ({error}: {detail})"


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Captures what clang and libbcc print to file descriptor 2; yields a function that returns it as text."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)

        def text() -> str:
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)


REQUEST, ANSWER = "request", "answer"


def main(folder: str) -> None:
    """Serves the request in the file REQUEST of a folder that only root can enter; the result is in the file ANSWER."""
    private = Path(folder)
    tempfile.tempdir = str(private)
    request = json.loads((private / REQUEST).read_text())
    try:
        find_headers(os.environ).prepare(private)
        compiled = compile_source(Source(**request["source"]), request["bcc_folders"])
        answer = {"bytecode": compiled.to_text()}
    except BpfUnavailable as error:
        answer = {"error": str(error)}
    (private / ANSWER).write_text(json.dumps(answer))
    os._exit(0)  # the kernel frees clang's and bcc's memory faster than their destructors
