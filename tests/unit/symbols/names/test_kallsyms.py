"""Names for the Linux kernel, from texts like /proc/kallsyms and from the running kernel's own."""

from __future__ import annotations

import io
import os
import time

import numpy as np
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.symbols.files.symbol_lists import LARGEST_FUNCTION, KernelSymbols
from iaprof.symbols.names.names import LONGEST_READ, Frame, Module, ModuleKind, shortened
from limits import Within

KERNEL = Module(ModuleKind.KERNEL, "[kernel]")

TEXT = b"""\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000040 t local_alias
ffffffff81000040 T do_syscall_64
ffffffff81000040 W weak_alias
ffffffff81000100 D jiffies
ffffffff81000200 w __weak_function
ffffffffc0100000 t xe_exec\t[xe]
ffffffffc0100080 d xe_data\t[xe]
ffffffffc0300000 t bpf_prog_6deef7357e7b4530_sd_egress\t[bpf]
"""


def symbolize(text: bytes, *addresses: int) -> dict[int, Frame]:
    symbols = KernelSymbols(io.BytesIO(text), "kallsyms")
    asked = np.array(addresses, np.uint64)
    symbolized = symbols.name(KERNEL, asked, np.zeros(len(addresses), np.uint64))
    assert symbolized is not None
    assert symbolized.source == "kallsyms"
    rows = symbolized.names.find(asked).tolist()
    return {address: symbolized.names.frames(row)[0] for address, row in zip(addresses, rows, strict=True) if row >= 0}


def test_functions_reach_to_the_next_symbol() -> None:
    names = symbolize(
        TEXT,
        0xFFFFFFFF81000000,
        0xFFFFFFFF81000040,
        0xFFFFFFFF810000FF,
        0xFFFFFFFF81000100,
        0xFFFFFFFF81000201,
        0xFFFFFFFFC010007F,
        0xFFFFFFFFC0100080,
        0xFFFFFFFFC0300010,
    )
    assert names == {
        0xFFFFFFFF81000000: Frame("_text"),  # the first of two global names
        0xFFFFFFFF81000040: Frame("do_syscall_64"),  # the global one
        0xFFFFFFFF810000FF: Frame("do_syscall_64"),
        0xFFFFFFFF81000201: Frame("__weak_function"),
        0xFFFFFFFFC010007F: Frame("xe_exec", "[xe]"),
        0xFFFFFFFFC0300010: Frame("bpf_prog_6deef7357e7b4530_sd_egress", "[bpf]"),
    }


def test_functions_have_a_largest_size() -> None:
    weak, last = 0xFFFFFFFF81000200, 0xFFFFFFFFC0300000
    asked = [0xFFFFFFFF80FFFFFF, weak + LARGEST_FUNCTION - 1, weak + LARGEST_FUNCTION, last + LARGEST_FUNCTION]
    assert symbolize(TEXT, *asked) == {weak + LARGEST_FUNCTION - 1: Frame("__weak_function")}


def test_only_the_kernel_is_named() -> None:
    symbols = KernelSymbols(io.BytesIO(TEXT), "kallsyms")
    addresses = np.array([0xFFFFFFFF81000000], np.uint64)
    for kind in set(ModuleKind) - {ModuleKind.KERNEL}:
        assert symbols.name(Module(kind), addresses, addresses) is None


def test_the_order_of_lines_does_not_matter() -> None:
    shuffled = b"\n".join(reversed(TEXT.splitlines()[3:]))
    assert symbolize(shuffled, 0xFFFFFFFF81000050, 0xFFFFFFFFC0100000) == {
        0xFFFFFFFF81000050: Frame("do_syscall_64"),
        0xFFFFFFFFC0100000: Frame("xe_exec", "[xe]"),
    }


def test_hidden_addresses_are_refused_with_what_to_do() -> None:
    hidden = b"".join(b"0000000000000000" + line[16:] for line in TEXT.splitlines(keepends=True))
    with pytest.raises(IaprofError, match=r"kallsyms shows no addresses: read it as root, .*kptr_restrict"):
        KernelSymbols(io.BytesIO(hidden), "kallsyms")


@pytest.mark.parametrize(
    "text", [b"", b"\n\n", b"\x7fELF\x02\x01\x01", b"name T f\n", b"\xff" * 5000, b"ffffffff81000000 D data"]
)
def test_files_without_kernel_symbols_are_refused(text: bytes) -> None:
    with pytest.raises(IaprofError, match="kallsyms has no kernel symbols: give a copy of /proc/kallsyms"):
        KernelSymbols(io.BytesIO(text), "kallsyms")


def test_hostile_lines_do_not_affect_other_lines() -> None:
    # given
    lines = [
        b"ffffffff81000000 T good",
        b"ffffffff81000010 T " + b"x" * 3_000_000,
        b'ffffffff81000020 T caf\xe9;"<b>\x00\t[mod\xff]',
        b"ffffffff81000030 T",
        b"ffffffff81000030",
        b"ffffffff81000030  T two_spaces",
        b"ffffffff810000300000 T too_long",
        b"\x00" * 100,
        b"ffffffffffffffff T last",
        b"ffffffff81000040 T no_line_end",
    ]
    # when
    names = symbolize(b"\n".join(lines), *(0xFFFFFFFF81000000 + i * 16 for i in range(5)), (1 << 64) - 1)
    # then
    assert names == {
        0xFFFFFFFF81000000: Frame("good"),
        0xFFFFFFFF81000010: Frame(shortened("x" * LONGEST_READ)),
        0xFFFFFFFF81000020: Frame('caf\\xe9;"<b>\x00', "[mod\\xff]"),
        0xFFFFFFFF81000030: Frame('caf\\xe9;"<b>\x00', "[mod\\xff]"),
        0xFFFFFFFF81000040: Frame("no_line_end"),
        (1 << 64) - 1: Frame("last"),
    }


def test_a_kernel_with_all_its_modules_takes_less_than_half_a_second(within: Within) -> None:
    # given
    text = b"".join(
        b"%016x t some_function_of_a_module_%d\t[module]\n" % (0xFFFFFFFF81000000 + 64 * i, i) for i in range(300_000)
    )
    addresses = np.arange(0, 300_000, 15).astype(np.uint64) * np.uint64(64) + np.uint64(0xFFFFFFFF81000001)
    # when
    begin = time.process_time()
    symbolized = KernelSymbols(io.BytesIO(text), "kallsyms").name(KERNEL, addresses, addresses)
    took = time.process_time() - begin
    # then
    assert symbolized is not None
    assert len(symbolized.names) == 20_000
    assert symbolized.names.frames(19_999) == (Frame("some_function_of_a_module_299985", "[module]"),)
    within.took(took, 0.5)


@pytest.mark.root
def test_all_functions_of_the_running_kernel_are_named() -> None:
    # given
    with open("/proc/kallsyms", "rb") as file:
        lines = [line.split() for line in file]
        file.seek(0)
        symbols = KernelSymbols(file, "/proc/kallsyms")
    functions = [(int(line[0], 16), line[2].decode()) for line in lines if line[1] in (b"T", b"t", b"W", b"w")]
    by_address: dict[int, set[str]] = {}
    for address, function in functions:
        by_address.setdefault(address, set()).add(function)
    addresses = np.array(sorted(by_address), np.uint64)
    assert os.geteuid() == 0
    assert len(addresses) > 10_000
    # when
    symbolized = symbols.name(KERNEL, addresses, addresses)
    # then
    assert symbolized is not None
    rows = symbolized.names.find(addresses)
    assert (rows >= 0).all()
    for address, row in zip(addresses[::50].tolist(), rows[::50].tolist(), strict=True):
        assert symbolized.names.frames(row)[0].function in by_address[address]
