"""Offsets of members and numbers of functions in a compiler's BTF, and in damaged BTF."""

from __future__ import annotations

import random
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from iaprof.bpf.btf import VMLINUX, Btf, BtfError

SOURCE = """\
#include <stddef.h>
#include <stdio.h>
typedef unsigned long count;
enum kind { ONE, TWO };
struct inner { char first; count second; };
struct outer;
typedef int (*call)(struct outer *, enum kind);
struct outer {
    int a[3];
    struct { union { short b; long c; }; struct inner in; };
    unsigned bits : 3, more : 5;
    call function;
    const volatile struct outer *next;
} one;
struct other { int outer; } two;
struct fields {
    int before;
    unsigned one : 3, two : 1;
    struct { unsigned char three : 7, four : 1; };
} three;
int main(void)
{
    printf("%zu %zu ", offsetof(struct outer, a), offsetof(struct outer, c));
    printf("%zu %zu ", offsetof(struct outer, in.second), offsetof(struct outer, next));
    return sizeof one + sizeof two + sizeof three == 0;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The BTF of a program, and the offsets that it prints."""
    folder = tmp_path_factory.mktemp("btf")
    (folder / "a.c").write_text(SOURCE)
    subprocess.run(["gcc", "-gbtf", "-O0", "-o", folder / "a", folder / "a.c"], check=True)
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.BTF", "--set-section-flags", ".BTF=alloc", folder / "a",
                    folder / "btf"], check=True)  # fmt: skip
    printed = subprocess.run([folder / "a"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return folder / "btf", [int(word) for word in printed.split()]


def test_offsets_equal_the_compiler_s(compiled: tuple[Path, list[int]]) -> None:
    path, printed = compiled
    btf = Btf(path)
    members = (("a",), ("c",), ("in", "second"), ("next",))
    assert [btf.offset("outer", *names) for names in members] == printed


def test_bit_fields_are_where_the_abi_puts_them(compiled: tuple[Path, list[int]]) -> None:
    # System V's for x86-64: from the lowest bit on; the structure of bytes begins at the next byte
    btf = Btf(compiled[0])
    found = {name: btf.bit("fields", name) for name in ("before", "one", "two", "three", "four", "five")}
    assert found == {"before": 0, "one": 32, "two": 35, "three": 40, "four": 47, "five": None}


def test_functions_have_the_number_of_their_type(tmp_path: Path) -> None:
    # given an integer, a function that returns it, a structure of the same name, and another function
    strings = b"\0int\0go\0stay\0"
    integer, prototype = (1, 1 << 24, 4, 32), (0, 13 << 24, 1)
    go, structure, stay = (5, 12 << 24, 2), (5, 4 << 24, 0), (8, 12 << 24, 2)
    words = [word for each in (integer, prototype, go, structure, stay) for word in each]
    types = struct.pack(f"<{len(words)}I", *words)
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    path = tmp_path / "btf"
    path.write_bytes(header + types + strings)
    # when
    btf = Btf(path)
    # then types are counted from 1
    assert [btf.function(name) for name in ("go", "stay", "int", "nothing")] == [3, 5, None, None]


def test_missing_members_have_no_offset(compiled: tuple[Path, list[int]]) -> None:
    btf = Btf(compiled[0])
    missing = (("outer", "d"), ("nothing", "a"), ("outer", "a", "b"), ("outer", "in", "third"), ("kind", "a"))
    assert [btf.offset(*names) for names in missing] == [None] * 5


def test_damaged_btf_gives_a_number_none_or_an_error(compiled: tuple[Path, list[int]], tmp_path: Path) -> None:
    chance, whole = random.Random(1), compiled[0].read_bytes()
    outcomes: Counter[type[object]] = Counter()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 10, 100))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / "btf").write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            outcomes[type(Btf(tmp_path / "btf").offset("outer", "in", "second"))] += 1
        except BtfError:
            outcomes[BtfError] += 1
    assert outcomes.keys() == {int, type(None), BtfError}, outcomes


def test_missing_btf_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BtfError, match="cannot be read"):
        Btf(tmp_path / "none")


@pytest.mark.skipif(not VMLINUX.exists(), reason="this kernel has no BTF")
def test_this_kernel_has_the_members_that_walks_read() -> None:
    btf = Btf()
    for names in (("task_struct", "mm"), ("mm_struct", "exec_vm"), ("task_struct", "thread", "fsbase")):
        offset = btf.offset(*names)
        assert offset is not None
        assert offset > 0
