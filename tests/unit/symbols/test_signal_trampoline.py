"""The code to which signal handlers return has a name where no symbol gives it one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries
from unit.symbols.asked import our_names

SOURCE = """
#include <signal.h>
static void handler(int number) { __builtin_trap(); }
int main(void) {
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGUSR1, &action, 0);
    return raise(SIGUSR1);
}
"""


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache") / "cache") as made:
        yield made


@pytest.mark.parametrize("compiler", [["gcc"], ["gcc", "-static"], ["musl-gcc"], ["musl-gcc", "-static"]])
@pytest.mark.parametrize("stripped", [False, True])
def test_the_caller_of_a_signal_handler(
    compiler: list[str], stripped: bool, tmp_path: Path, binaries: Binaries
) -> None:
    (tmp_path / "a.c").write_text(SOURCE)
    program = tmp_path / "program"
    flags = ["-no-pie", "-fno-omit-frame-pointer", *(["-s"] if stripped else [])]
    subprocess.run([*compiler, *flags, "-o", program, "a.c"], cwd=tmp_path, check=True)
    # given where gdb finds the handler's return address in memory, and the file that has it
    script = ["-ex", "handle SIGUSR1 nostop noprint pass", "-ex", "run", "-ex", "output/x *(long*)($rbp+8)",
              "-ex", r"echo \n", "-ex", "info proc mappings", "-ex", "x/2i *(long*)($rbp+8)"]  # fmt: skip
    done = subprocess.run(["gdb", "-nx", "-batch", *script, program], capture_output=True, text=True, check=True)
    assert re.search(r"mov +\$0xf,%rax\n.*syscall", done.stdout)
    (start,) = (int(match, 16) for match in re.findall(r"^(0x[0-9a-f]+)$", done.stdout, re.MULTILINE))
    rows = re.findall(r"^ *(0x\w+) +(0x\w+) +0x\w+ +(0x\w+) .*?(/.*?) *$", done.stdout, re.MULTILINE)
    low, _, offset, path = next(row for row in rows if int(row[0], 16) <= start < int(row[1], 16))
    place = start - int(low, 16) + int(offset, 16)
    # when the caller is looked for before the return address, and a sample is in the code itself
    names = [our_names(binaries, Path(path), [address_of(Path(path), place + more)]) for more in (-1, 0, 7)]
    # then
    assert names == [["__restore_rt"]] * 3


def address_of(path: Path, offset: int) -> int:
    listed = subprocess.run(["readelf", "-lW", path], capture_output=True, text=True, check=True).stdout
    for match in re.finditer(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+)", listed):
        first, address, size = (int(word, 16) for word in match.groups())
        if first <= offset < first + size:
            return address + offset - first
    raise KeyError(offset)


def test_the_same_system_call_in_another_function_is_none(tmp_path: Path, binaries: Binaries) -> None:
    assembly = """
    .globl _start
    _start: nop
    .type other, @function
    other: .cfi_startproc
    nop
    mov $15, %rax
    syscall
    ret
    .cfi_endproc
    """
    (tmp_path / "a.S").write_text(assembly)
    program = tmp_path / "program"
    flags = ["-nostdlib", "-static", "-s", "-Wl,--eh-frame-hdr"]
    subprocess.run(["gcc", *flags, "-o", program, "a.S"], cwd=tmp_path, check=True)
    listed = subprocess.run(["objdump", "-d", program], capture_output=True, text=True, check=True).stdout
    (start,) = (int(match, 16) for match in re.findall(r"([0-9a-f]+):.*mov +\$0xf,%rax", listed))
    assert our_names(binaries, program, [start - 1, start, start + 7]) == ["", "", ""]
