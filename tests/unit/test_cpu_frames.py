"""Names of CPU frames: whole symbol tables against nm, and files that are not what was mapped."""

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from iaprof.formats.capture import KINDS
from iaprof.report.address_space import AddressSpaces, Place
from iaprof.report.cpu_frames import CpuFrames, unnamed
from iaprof.report.elf_symbols import ElfSymbols, open_module
from standin import runtime


def symbols_of(path: Path) -> ElfSymbols:
    with path.open("rb") as file:
        return ElfSymbols(file)


def functions_by_nm(path: Path, *options: str) -> dict[int, tuple[int, set[str]]]:
    """Size and names of each function, by address."""
    out = subprocess.run(
        ["nm", "-S", "--defined-only", *options, str(path)], capture_output=True, text=True, check=True
    )
    found: dict[int, tuple[int, set[str]]] = {}
    for line in out.stdout.splitlines():
        if match := re.match(r"^(\w+) (\w+) [tTwWi] (.+)$", line):
            address, size = int(match[1], 16), int(match[2], 16)
            found.setdefault(address, (size, set()))[1].add(match[3].split("@")[0])
    return found


def load_offset(path: Path, address: int) -> int:
    """Where an address of the file is in the file, by readelf."""
    out = subprocess.run(["readelf", "-Wl", str(path)], capture_output=True, text=True, check=True).stdout
    for line in out.splitlines():
        if match := re.match(r"\s+LOAD\s+(0x\w+) (0x\w+) 0x\w+ (0x\w+)", line):
            offset, start, size = (int(part, 16) for part in match.groups())
            if start <= address < start + size:
                return address - start + offset
    raise AssertionError(hex(address))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (Path("/lib/x86_64-linux-gnu/libm.so.6"), ("-D",)),
        (Path("/lib/x86_64-linux-gnu/libstdc++.so.6"), ("-D",)),
        (runtime.build().workload, ()),
    ],
)
def test_every_function_has_the_name_that_nm_gives(path: Path, options: tuple[str, ...]) -> None:
    # given
    symbols, functions = symbols_of(path), functions_by_nm(path, *options)
    assert len(functions) > 20
    # when each function's first and last byte is looked up, then its name is one of those at that address
    for address, (size, names) in functions.items():
        for inside in {address, address + size - 1}:
            found = symbols.name(load_offset(path, inside))
            if found not in names:  # then in those of another function that has this byte, too
                others = set().union(*(n for a, (s, n) in functions.items() if a <= inside < a + s)) if found else set()
                assert found in others, (hex(inside), names)


def test_outside_of_functions_there_is_no_name() -> None:
    symbols = symbols_of(runtime.build().workload)
    assert symbols.name(0) is None
    assert symbols.name(1 << 40) is None


def test_only_the_build_that_was_mapped_names_anything(tmp_path: Path) -> None:
    # given
    path = tmp_path / "program"
    shutil.copy(runtime.build().workload, path)
    build_id = symbols_of(path).build_id
    assert build_id is not None
    # when, then
    assert open_module(str(path), build_id) is not None
    assert open_module(str(path), build_id[::-1]) is None
    assert open_module(str(path), None) is None
    assert open_module("program", build_id) is None
    assert open_module(str(tmp_path / "absent"), build_id) is None
    assert open_module(str(tmp_path), build_id) is None
    assert open_module("/dev/zero", build_id) is None


def test_broken_files_have_no_names() -> None:
    data = runtime.build().workload.read_bytes()
    cases = [data[:length] for length in range(0, len(data), 4001)] + [b"", b"\x7fELF"]
    for position in [*range(16, 64), *range(len(data) - 2000, len(data), 17)]:
        changed = bytearray(data)
        changed[position] ^= 0xFF
        cases.append(bytes(changed))
    for case in cases:
        with contextlib.suppress(ValueError):
            ElfSymbols(io.BytesIO(case)).name(0x1234)


def test_a_stack_from_outermost_to_innermost() -> None:
    # given a stack: the innermost is an instruction, the others are where calls return to, behind the call
    workload = runtime.build().workload
    functions = functions_by_nm(workload)
    main = next(a for a, (_, names) in functions.items() if "main" in names)
    train = next(a for a, (_, names) in functions.items() if any("train" in name for name in names))
    size = functions[train][0]
    base = 0x5000_0000
    build_id = symbols_of(workload).build_id
    mapping = {"time_ns": 1, "pid": 7, "start": base, "length": 1 << 20, "offset": 0, "path": str(workload),
               "build_id": build_id}  # fmt: skip
    assert load_offset(workload, main) == main  # a position-independent program, mapped here as one piece
    ips = [base + main, base + train + size, 0x1234]
    stack = {"id": 5, "time_ns": 10, "pid": 7, "truncated": False, "ips": ips}
    spaces = AddressSpaces(
        pa.Table.from_pylist([mapping], pa.schema(list(KINDS["mapping"]))),
        pa.Table.from_pylist([], pa.schema(list(KINDS["process"]))),
    )
    # when
    frames = CpuFrames(pa.Table.from_pylist([stack, stack | {"id": 6, "truncated": True}]), spaces)
    # then
    names = frames.frames(5)
    assert names[0] == "0x1233"
    assert "train" in names[1]
    assert names[2] == "main"
    assert frames.frames(6)[0] == "[truncated]"
    assert frames.frames(99) == ()


def test_frames_without_names() -> None:
    assert unnamed(Place("/usr/lib/libfoo.so", None, 0x1234)) == "[libfoo.so+0x1234]"
    assert unnamed(Place("[vdso]", None, 0x1234)) == "[vdso]"
    assert unnamed(Place("//anon", None, 0x1234)) == "[anon]"
