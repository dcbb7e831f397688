"""Kernels' names in launches: whole if a module of the process has them, and marked where they are cut."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LAUNCH, NAME_BYTES, ChunkOf, LaunchFlags
from iaprof.gpu.elf_code import kernel_names
from iaprof.record.capture.finish import finish
from iaprof.record.capture.rows import NAME_BYTES_PER_GROUP, launch_rows
from iaprof.record.kernels.dumped import PlacedKernel, compose
from iaprof.record.kernels.kernel_names import KernelNames
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from thorough import thorough
from unit.record.capture.test_dumped import Chunk, dumped_kernel
from unit.zebins import debug_elf, plain_zebin

PLACE = 0xFFFF_8001_0000_0000  # sign-extended, as some devices have it
PREFIX = "_ZTSN4sycl3_V16detail19__pf_kernel_wrapperIZN4dpnp6kernelsEE_" + "x" * 20
assert len(PREFIX) > 63


@dataclass(frozen=True)
class Launched:
    """A launch with as much of the name as a record holds."""

    name: str
    address: int = PLACE
    pid: int = 7
    time: int = 500
    flags: int = 0


def records(launches: Iterable[Launched]) -> np.ndarray:
    rows = list(launches)
    made = np.zeros(len(rows), LAUNCH)
    for row, launch in zip(made, rows, strict=True):
        row["time"], row["pid"], row["flags"] = launch.time, launch.pid, launch.flags
        row["address"], row["name"] = launch.address, launch.name.encode()[:63]
    return made


def elf_of(*kernels: tuple[str, int]) -> bytes:
    return compose(None, [PlacedKernel(name, address, b"code" * 4) for name, address in kernels])


def module(spool: Spool, elf: bytes, pid: int = 7, time: int = 100, with_content: bool = True) -> None:
    about = {"pid": pid, "path": "/x", "digest": hashlib.sha256(elf).hexdigest(), "size": len(elf)}
    meta = json.dumps(about | {"content": with_content}).encode()
    spool.write(FrameKind.KERNEL, meta, elf if with_content else b"", time=time, shape=len(meta))


def names_of(spool: Spool) -> list[str]:
    """The names of launches, in their order."""
    spool.close()
    output = spool.path.with_name("capture")
    finish(SpoolReader(spool.path), output)
    found: list[str] = CaptureReader(output).table("launch")["name"].to_pylist()
    return found


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def launch(spool: Spool, *launches: Launched) -> None:
    spool.write(FrameKind.LAUNCHES, records(launches).tobytes(), time=600)


@pytest.mark.parametrize("length", [1, 62, 63, 64, 300, 16_000])
def test_a_name_is_as_long_as_the_module_says(spool: Spool, length: int) -> None:
    name = "k" * length
    launch(spool, Launched(name), Launched(name))
    module(spool, elf_of((name, PLACE)))  # in any order
    assert names_of(spool) == [name, name]


def test_names_that_begin_alike_go_by_their_addresses(spool: Spool) -> None:
    # given kernels of one template in two processes
    kernels = [(f"{PREFIX}{n}", PLACE + 4096 * n) for n in range(50)]
    other = [(f"{PREFIX}other{n}", PLACE + 4096 * n) for n in range(50)]
    module(spool, elf_of(*kernels))
    module(spool, elf_of(*other), pid=8)
    order = random.Random(1).choices(range(50), k=500)
    launch(spool, *(Launched(PREFIX, PLACE + 4096 * n, pid) for n in order for pid in (7, 8)))
    # sign-extended or not, an address is the same
    launch(spool, Launched(PREFIX, PLACE + 4096 & (1 << 48) - 1))
    expected = [names[n][0] for n in order for names in (kernels, other)]
    assert names_of(spool) == [*expected, kernels[1][0]]


def test_another_kernel_at_the_same_place_goes_by_time(spool: Spool) -> None:
    for time in (100, 200, 300):
        module(spool, elf_of((f"{PREFIX}{time}", PLACE)), time=time)
    launch(spool, *(Launched(PREFIX, time=time) for time in (50, 100, 199, 200, 250, 300, 999)))
    assert names_of(spool) == [f"{PREFIX}{time}" for time in (100, 100, 100, 200, 200, 300, 300)]


def test_unknown_names_stay_cut_and_are_marked(spool: Spool) -> None:
    # given a kernel that no module has at its address, with or without another one whose name begins alike
    module(spool, elf_of((f"{PREFIX}1", PLACE)))
    module(spool, elf_of((f"{PREFIX}2", PLACE), ("short", PLACE + 4096)), pid=9)
    elsewhere, other_process = Launched(PREFIX, PLACE + 64), Launched(PREFIX, PLACE, 8)
    another = Launched("y" * 100)
    launch(spool, elsewhere, other_process, another, Launched("y" * 62), Launched("short", PLACE + 4096, 9))
    # then
    cut = PREFIX[:63] + "…"
    assert names_of(spool) == [cut, cut, "y" * 63 + "…", "y" * 62, "short"]


def test_without_an_address_only_a_unique_name_is_used(spool: Spool) -> None:
    module(spool, elf_of((f"{PREFIX}1", PLACE), ("z" * 80, PLACE + 64)))
    module(spool, elf_of((f"{PREFIX}1", PLACE), (f"{PREFIX}2", PLACE + 64)), pid=8)
    module(spool, elf_of((f"{PREFIX}unplaced", 0)), pid=9)
    flags = LaunchFlags.BAD_ARGS
    launch(spool, Launched(PREFIX, 0, 7, flags=flags), Launched(PREFIX, 0, 8, flags=flags), Launched(PREFIX, PLACE, 9))
    assert names_of(spool) == [f"{PREFIX}1", f"{PREFIX[:63]}…", f"{PREFIX}unplaced"]


def test_a_module_that_another_process_has_too_comes_without_content(spool: Spool) -> None:
    elf = elf_of((f"{PREFIX}1", PLACE))
    module(spool, elf)
    module(spool, elf, pid=8, with_content=False)
    launch(spool, Launched(PREFIX, pid=8))
    assert names_of(spool) == [f"{PREFIX}1"]


def test_names_of_dumped_kernels(spool: Spool) -> None:
    # given two dumped kernels whose names begin alike; of one no code has come
    names = [f"{PREFIX}{n}" for n in range(2)]
    chunks = [*dumped_kernel(names[0], b"code", address=PLACE), Chunk(names[1].encode(), address=PLACE + 4096)]
    for piece in chunks:
        spool.write(FrameKind.PIECE, piece.frame(), time=500)
    launch(spool, *(Launched(PREFIX, PLACE + 4096 * n, time=2_000_000) for n in (0, 1)))
    assert names_of(spool) == names


def test_launches_of_shaders_without_a_name_have_that_of_the_shader_at_their_address(spool: Spool) -> None:
    """Also where another shader was before, and not those of other processes."""
    shaders = {b"A" * 64: 100, b"B" * 64: 900}
    for code, time in shaders.items():
        place = {"module": 0x10, "address": 0x200000000, "module_time": time, "time": time}
        spool.write(FrameKind.PIECE, Chunk(code, ChunkOf.SHADER, **place).frame(), time=5000)
    when = (150, 1000)
    launch(
        spool,
        *(Launched("", 0x200000000, time=time) for time in when),
        Launched("", 0x200000000, pid=8, time=when[0]),
        Launched("", 0x200000040, time=when[0]),
        Launched("softmax", 0x200000000, time=when[0]),
    )
    first, second = (f"compute {hashlib.sha256(code).hexdigest()[:8]}" for code in shaders)
    assert names_of(spool) == [first, second, "", "", "softmax"]


def test_launches_before_a_shader_was_given_its_name_have_it_too(spool: Spool) -> None:
    place = {"module": 0x10, "address": 0x200000000, "module_time": 100, "time": 100}
    for chunk in (Chunk(b"A" * 64, ChunkOf.SHADER, **place), Chunk(b"softmax", **place)):
        spool.write(FrameKind.PIECE, chunk.frame(), time=5000)
    launch(spool, Launched("", 0x200000000, time=150), Launched("softmax", 0x200000000, time=200))
    assert names_of(spool) == ["softmax", "softmax"]


def test_names_may_be_any_bytes(spool: Spool) -> None:
    name = "ü" * 31 + "é€" + "\x1b"  # is cut within the é
    module(spool, elf_of((name, PLACE)))
    launch(spool, Launched(name), Launched(name, PLACE + 64))
    assert names_of(spool) == [name, "ü" * 31 + "\\xc3…"]


@thorough
def test_more_than_16_mib_of_names_are_written_at_once(spool: Spool) -> None:
    # given a program that launches so fast that 400,000 launches come together
    module(spool, elf_of((PREFIX, PLACE)))
    launched = np.tile(records([Launched(PREFIX, PLACE)]), 400_000)
    launched["comm"] = b"sixteen bytes -"
    spool.write(FrameKind.LAUNCHES, launched.view("u1").data, time=600)
    # then
    assert Counter(names_of(spool)) == {PREFIX: 400_000}


def test_long_names_of_many_launches_need_little_memory() -> None:
    # given many launches of kernels with names of the greatest length
    names = KernelNames()
    for number in range(100):
        names.add(7, 1, PLACE + 64 * number, (PREFIX + f"{number:05}").ljust(16_000, "n").encode())
    launches = records(Launched(PREFIX, PLACE + 64 * (number % 100)) for number in range(20_000))
    # when
    groups = list(launch_rows(launches, names))
    # then they come in small groups, which together have all of them
    assert max(group.nbytes for group in groups) < 1.5 * NAME_BYTES_PER_GROUP
    assert sum(map(len, groups)) == 20_000
    assert [name.as_py()[: len(PREFIX) + 5] for group in groups for name in group.field("name")][:3] == [
        f"{PREFIX}{number:05}" for number in range(3)
    ]


def test_names_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaprof.record.kernels.kernel_names.MAX_KEPT_BYTES", 15_000)
    names = KernelNames()
    for number in range(20):
        names.add(7, 1, PLACE + 64 * number, f"{PREFIX}{number:03}".encode())
    found = names.for_launches(records(Launched(PREFIX, PLACE + 64 * number) for number in range(20)))
    whole = [text for text in found.texts if not text.endswith("…") and len(text) > 63]
    assert 5 < len(whole) < 20


def test_kept_names_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # given the shortest names that are kept, each of another address
    most = 8 << 20
    monkeypatch.setattr("iaprof.record.kernels.kernel_names.MAX_KEPT_BYTES", most)
    names = KernelNames()
    tracemalloc.start()
    try:
        for number in range(most // NAME_BYTES):
            names.add(7, 1, PLACE + 64 * number, b"%08d" % number + b"n" * NAME_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 2 * most
    finally:
        tracemalloc.stop()


def test_many_kernels_at_one_address_are_looked_through_once() -> None:
    # given a process that claims that all its kernels have one address, and launches each
    number, compared = 300, Counter[str]()

    class Name(bytes):
        def startswith(self, *given: Any) -> bool:
            compared["names"] += 1
            return super().startswith(*given)

    names = KernelNames()
    for each in range(number):
        names.add(7, 1, PLACE, Name(b"%08d" % each + b"n" * NAME_BYTES))
    # when
    found = names.for_launches(records(Launched(f"{each:08}".ljust(100, "n"), PLACE) for each in range(number)))
    # then
    assert [found.texts[index] for index in found.indices] == [
        f"{each:08}" + "n" * NAME_BYTES for each in range(number)
    ]
    assert compared["names"] <= number


def test_which_kernels_of_a_real_zebin_have_long_names() -> None:
    for data, placed in ((debug_elf("bmg", "matmul"), True), (plain_zebin("bmg", "matmul"), False)):
        found = dict(kernel_names(data, 20, 100, are_placed=True))
        assert set(found) == {b"multiply_local_access", b"multiply_local_access_and_tiling"}
        assert all(bool(address) is placed for address in found.values())
    assert kernel_names(debug_elf("bmg", "matmul"), 63, 100, are_placed=True) == []


def test_damaged_zebins_have_fewer_names_or_none() -> None:
    data, chance = debug_elf("bmg", "matmul"), random.Random(1)
    for _ in range(2000):
        damaged = bytearray(data[: chance.choice([len(data), chance.randrange(len(data))])])
        for _ in range(chance.randrange(1, 8)):
            damaged[chance.randrange(min(len(damaged), chance.choice([64, len(damaged)])))] = chance.randrange(256)
        found = kernel_names(bytes(damaged), 1, 1000, are_placed=True)
        assert sum(len(name) for name, _ in found) <= len(data)
