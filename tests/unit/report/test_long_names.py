"""Reports tell functions apart whose long names differ at the end, and say how many names were cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iaprof.symbols.names.names import shortened
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof

PATH, START, GPU = "/opt/app", 0x10000, 0x8000


def instance(parameters: int, last: str) -> str:
    """The symbol of a function template's instance; the last parameter is `last`, all others are int."""
    return f"_Z1fI{'i' * (parameters - 1)}{last}Evv"


def test_functions_with_long_names_stay_two_and_cut_names_are_counted(tmp_path: Path) -> None:
    # given templates, the longer ones longer than can be demangled; and names that were cut as they were read
    functions = [instance(number, last) for number in (500, 4000) for last in "ij"]
    functions += [shortened("x" * 20_000 + last) for last in "ab"]
    module: dict[str, Any] = {"path": PATH, "build_id": b"1", "pid": 7, "inode": None, "time_ns": 1}
    mapping = module | {"start": START, "length": 1 << 16, "offset": 0}
    del module["time_ns"]
    module |= {"id": 0, "what": "file", "pid": 0, "inode": 0, "source": "", "problem": "", "frame_pointers": True}
    numbers = range(len(functions))
    path = capture(
        tmp_path / "c",
        HEADER,
        mapping=[mapping],
        module=[module],
        symbol=[
            {"module": 0, "address": at << 8, "size": 256, "depth": 0, "function": name, "file": "", "line": 0}
            for at, name in enumerate(functions)
        ],
        stack=[
            {"id": at + 1, "time_ns": 5, "pid": 7, "truncated": False, "ips": [START + (at << 8) + 8]} for at in numbers
        ],
        launch=[launch(10 + at, 7, GPU + (at << 12), stack=at + 1, size=256) for at in numbers],
        stall=[stall(50 + 10 * at, record(GPU + (at << 12), sbid=1), begin_ns=20) for at in numbers],
    )
    # when
    done = iaprof("report", path, "--frames", "cpu")
    # then
    found = {line.rpartition(" ")[0] for line in done.out.splitlines()}
    short = [f"void f<{'int, ' * 499}{last}>()" for last in ("int", "unsigned int")]
    assert found == {*short, *functions[2:]}
    assert f"iaprof: warning: {PATH}: 2 function names of more than 16 KiB: cut, with a hash at the end\n" in done.err
