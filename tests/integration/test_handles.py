"""Launches of a driver without probes, by its layout: nothing is named wrongly, and what cannot be read is counted."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import CACHE, Action, Dispatch, Entry, Field, Layout
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.bpf.programs import MOST_CODE_CHUNKS, MOST_MODULE_CHUNKS
from iaprof.bpf.sizes import Sizes
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import (
    CHUNK_BYTES,
    MAX_DEPTH,
    UNKNOWN_BYTES,
    ChunkOf,
    Counter,
    LaunchFlags,
    transfer_function_number,
)
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.capture.rows import IN_MEMORY
from integration.handles.driver import GONE_OFFSET, HEAP, HEAP_BYTES, Built, Driver, LoadedModule, build, copied
from integration.recording import BARE, iaprof
from integration.walking import Walking
from standin.hardware import Hardware
from thorough import thorough, usually

pytestmark = pytest.mark.bpf
NOWHERE = [0, 0x10, 1 << 63, 0xFFFF_FFFF_8100_0000]  # unmapped, no address, the kernel's
UNREADABLE, UNKNOWN, ASTRAY, CHANGED = (
    Counter.HANDLES_UNREADABLE,
    Counter.HANDLES_UNKNOWN,
    Counter.HANDLES_ASTRAY,
    Counter.HANDLES_CHANGED,
)
FAILURES = (UNREADABLE, UNKNOWN, ASTRAY, CHANGED)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("played") / "build")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LaunchProbes]:
    """The programs, which take a while to compile."""
    probes = LaunchProbes(Sizes(launch_pages=4096), cpu_samples=False)
    yield probes
    probes.close()


class Attached:
    """Probes in a copy of the library that nobody else has, which this process has loaded."""

    def __init__(self, probes: LaunchProbes, built: Built, layout: Layout | None = None) -> None:
        self.probes, self.built = probes, built
        layout = layout or built.layout
        with built.library.open("rb") as file:
            library = LibraryFile(file)
            offsets = [library.offset(entry.address, executable=True) for entry in layout.entries]
            probes._attach_layout(file.fileno(), layout, offsets)
        self.driver = Driver(built)
        self._drain()
        self._before = probes.counters()

    def _drain(self) -> None:
        for ring in (self.probes.launches, self.probes.stacks, self.probes.chunks, self.probes.modules):
            ring.read()

    def run(self, *words: str | int) -> int:
        """Runs the program to its end; gives its process id."""
        with subprocess.Popen([self.built.program, *map(str, words)]) as process:
            assert process.wait(120) == 0
        return process.pid

    def launches(self) -> NDArray[np.void]:
        """Those since the last time; each was either recorded or lost. That a stack is presumed is left out."""
        launches = self.probes.launches.read()
        launches["flags"] &= np.uint32(~LaunchFlags.PRESUMED & 0xFFFFFFFF)
        counted = self.counted()
        assert counted[Counter.LAUNCHES] == len(launches) + counted[Counter.LAUNCHES_LOST]
        failed = int((launches["flags"] & LaunchFlags.BAD_ARGS != 0).sum())
        assert failed == sum(counted[each] for each in FAILURES)
        self._before = self.probes.counters()
        return launches

    def pieces(self) -> NDArray[np.void]:
        """Those since the last time: of names and code, then of modules."""
        return np.concatenate([self.probes.chunks.read(), self.probes.modules.read()])

    def counted(self) -> Counts[Counter]:
        """What was counted since `launches` was asked last; nothing that is 0."""
        now = self.probes.counters()
        return Counts({each: now[each] - self._before[each] for each in Counter if now[each] != self._before[each]})


@pytest.fixture
def attached(loaded: LaunchProbes, built: Built, tmp_path: Path) -> Iterator[Attached]:
    yield Attached(loaded, copied(built, tmp_path / "copy"))
    loaded.detach()


Wholes = dict[tuple[ChunkOf, int, int], bytes]
"""By what it is, the module's address (of code and names: that of the kernel) and the number of its generation."""


def put_together(*batches: NDArray[np.void]) -> Wholes:
    """Pieces as wholes; all of each have to be there, once."""
    parts: dict[tuple[ChunkOf, int, int], dict[int, bytes]] = {}
    totals: dict[tuple[ChunkOf, int, int], int] = {}
    generations: dict[int, int] = {}
    for piece in np.concatenate(batches):
        what = ChunkOf(int(piece["what"]))
        generation = generations.setdefault(int(piece["module_time"]), len(generations))
        key = what, int(piece["module" if what is ChunkOf.MODULE else "address"]), generation
        offsets = parts.setdefault(key, {})
        assert int(piece["offset"]) not in offsets
        offsets[int(piece["offset"])] = piece["data"].tobytes()[: piece["bytes"]]
        totals[key] = int(piece["total"])
    found = {}
    for key, offsets in parts.items():
        found[key] = b"".join(offsets[offset] for offset in sorted(offsets))
        assert sorted(offsets) == list(range(0, totals[key], CHUNK_BYTES))
        assert len(found[key]) == totals[key]
    return found


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_launches_of_threads_and_children_are_counted_exactly(attached: Attached) -> None:
    kernels, threads, children, launches = 5, 3, 2, 400
    pid = attached.run("kernel", kernels, threads, children, launches, 0)
    found = attached.launches()
    assert len(found) == threads * (children + 1) * launches
    assert set(Counts(found["tid"].tolist()).values()) == {launches}
    assert len(set(found["pid"].tolist())) == children + 1
    assert pid in found["pid"]
    assert set(found["flags"].tolist()) == {0}
    told = set(zip(*(found[name].tolist() for name in ("iba", "address", "size", "name", "comm")), strict=True))
    assert told == {
        (0x8001_0000_0000, 0x8001_0000_0000 + 4096 * i, 100, b"kernel_%d" % i, b"program") for i in range(kernels)
    }


@pytest.mark.parametrize("of_module", [1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("of_code", [1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_kernels_and_their_module_come_whole(attached: Attached, of_code: int, of_module: int) -> None:
    # given two kernels of one module
    module = LoadedModule(noise(of_module))
    one, two = (attached.driver.kernel(b"k%d" % n, noise(of_code, n), n << 20, module) for n in (2, 3))
    # when
    for kernel in (one, one, two, two):
        attached.driver.launch(kernel.value)
    # then the module has come once
    assert put_together(attached.pieces()) == {
        (ChunkOf.MODULE, module.address, 0): noise(of_module),
        (ChunkOf.NAME, one.address, 0): b"k2",
        (ChunkOf.CODE, one.address, 0): noise(of_code, 2),
        (ChunkOf.NAME, two.address, 0): b"k3",
        (ChunkOf.CODE, two.address, 0): noise(of_code, 3),
    }
    assert attached.counted()[Counter.KERNELS] == 2
    # and again when another module has its place
    attached.driver.module_gone(module)
    attached.driver.kernel_gone(one)
    attached.driver.launch(one.value)
    assert put_together(attached.pieces()) == {
        (ChunkOf.MODULE, module.address, 0): noise(of_module),
        (ChunkOf.NAME, one.address, 0): b"k2",
        (ChunkOf.CODE, one.address, 0): noise(of_code, 2),
    }
    assert not attached.counted()[Counter.CHUNKS_LOST]


def test_what_is_too_much_for_one_launch_goes_on_at_the_next(attached: Attached) -> None:
    # given more than twice what a launch sends, of module and of code
    of_module, of_code = (2 * most * CHUNK_BYTES + 5 for most in (MOST_MODULE_CHUNKS, MOST_CODE_CHUNKS))
    module = LoadedModule(noise(of_module))
    kernel = attached.driver.kernel(b"large", noise(of_code, 2), 0, module)
    # when
    batches = []
    for _ in range(4):
        attached.driver.launch(kernel.value)
        batches.append(attached.pieces())
    # then
    each = MOST_CODE_CHUNKS + MOST_MODULE_CHUNKS
    assert [len(batch) for batch in batches] == [1 + each, each, 2, 0]
    assert put_together(*batches) == {
        (ChunkOf.MODULE, module.address, 0): noise(of_module),
        (ChunkOf.CODE, kernel.address, 0): noise(of_code, 2),
        (ChunkOf.NAME, kernel.address, 0): b"large",
    }
    counted = attached.counted()
    assert (counted[Counter.KERNELS], counted[Counter.CHUNKS_LOST]) == (1, 0)
    assert len(attached.launches()) == 4


def test_a_kernel_of_a_large_module_that_is_launched_once_is_whole(attached: Attached) -> None:
    # given modules of more than 2 MB each, and nobody who reads meanwhile
    modules = [LoadedModule(noise(3 << 20, seed)) for seed in (1, 2)]
    kernels = [
        attached.driver.kernel(b"k%d" % n, noise(200_000, 10 + n), n << 20, module) for n, module in enumerate(modules)
    ]
    # when
    for kernel in kernels:
        attached.driver.launch(kernel.value)
    # then all of them has come, name and code first
    pieces = attached.pieces()
    assert put_together(pieces) == {
        key: whole
        for n, (kernel, module) in enumerate(zip(kernels, modules, strict=True))
        for key, whole in {
            (ChunkOf.NAME, kernel.address, n): b"k%d" % n,
            (ChunkOf.CODE, kernel.address, n): noise(200_000, 10 + n),
            (ChunkOf.MODULE, module.address, n): noise(3 << 20, n + 1),
        }.items()
    }
    assert pieces["what"][0] == ChunkOf.NAME
    counted = attached.counted()
    assert (counted[Counter.KERNELS], counted[Counter.CHUNKS_LOST]) == (2, 0)


def test_names_and_code_have_room_when_modules_have_none(built: Built, tmp_path: Path) -> None:
    # given room for a few pieces of modules, which the first module fills, and nobody who reads
    probes = LaunchProbes(Sizes(module_pages=16), cpu_samples=False)
    try:
        attached = Attached(probes, copied(built, tmp_path / "copy"))
        modules = [LoadedModule(noise(200_000, seed)) for seed in range(20)]
        kernels = [
            attached.driver.kernel(b"k%d" % n, noise(3000, 100 + n), n << 20, module)
            for n, module in enumerate(modules)
        ]
        # when each is launched once
        for kernel in kernels:
            attached.driver.launch(kernel.value)
        # then every kernel is whole, though no module is
        found = put_together(probes.chunks.read())
        assert [found[ChunkOf.NAME, kernel.address, n] for n, kernel in enumerate(kernels)] == [
            b"k%d" % n for n in range(20)
        ]
        assert [found[ChunkOf.CODE, kernel.address, n] for n, kernel in enumerate(kernels)] == [
            noise(3000, 100 + n) for n in range(20)
        ]
        counted = attached.counted()
        assert (counted[Counter.KERNELS], counted[Counter.CHUNKS_LOST]) == (0, 20)
        # and a module goes on as its kernel is launched again, without what came before
        batches = [probes.modules.read()]
        for _ in range(10):
            attached.driver.launch(kernels[0].value)
            batches.append(probes.modules.read())
        of_first = [batch[batch["module"] == modules[0].address] for batch in batches]
        assert put_together(*of_first) == {(ChunkOf.MODULE, modules[0].address, 0): noise(200_000, 0)}
        assert len(probes.chunks.read()) == 0
    finally:
        probes.close()


def test_threads_that_launch_a_kernel_at_the_same_time_leave_no_gap(attached: Attached) -> None:
    # given a kernel that takes several launches to be sent
    of_module, of_code = (2 * most * CHUNK_BYTES + 5 for most in (MOST_MODULE_CHUNKS, MOST_CODE_CHUNKS))
    module = LoadedModule(noise(of_module))
    kernel = attached.driver.kernel(b"k", noise(of_code, 2), 0, module)

    def launch() -> None:
        for _ in range(200):
            attached.driver.launch(kernel.value)

    threads = [Thread(target=launch) for _ in range(4)]
    # when (a call of the driver lets other threads run)
    for thread in threads:
        thread.start()
    batches = [attached.pieces()]
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
        batches.append(attached.pieces())
    # (on a busy machine they had launched before all that there was no room for was read)
    more = 0
    while not attached.counted()[Counter.KERNELS]:
        assert more < 10
        batches.append(attached.pieces())
        attached.driver.launch(kernel.value)
        more += 1
    batches.append(attached.pieces())
    # then all pieces have come, some perhaps twice
    pieces = np.concatenate(batches)
    first = np.unique(pieces[["what", "offset"]], return_index=True)[1]
    assert put_together(pieces[np.sort(first)]) == {
        (ChunkOf.MODULE, module.address, 0): noise(of_module),
        (ChunkOf.CODE, kernel.address, 0): noise(of_code, 2),
        (ChunkOf.NAME, kernel.address, 0): b"k",
    }
    assert len(attached.launches()) == 800 + more


def test_what_there_is_no_room_for_is_counted_and_comes_when_there_is(attached: Attached) -> None:
    # given a module and code that fill the ring buffers, and nobody who reads
    of_module, of_code = (3 * most * CHUNK_BYTES for most in (MOST_MODULE_CHUNKS, MOST_CODE_CHUNKS))
    module = LoadedModule(noise(of_module))
    kernel = attached.driver.kernel(b"large", noise(of_code, 2), 0, module)
    # when
    for _ in range(5):
        attached.driver.launch(kernel.value)
    lost, batches = attached.counted()[Counter.CHUNKS_LOST], []
    for _ in range(10):
        batches.append(attached.pieces())
        attached.driver.launch(kernel.value)
    # then
    assert lost > 0
    wholes = put_together(*batches)
    assert wholes[ChunkOf.MODULE, module.address, 0] == noise(of_module)
    assert wholes[ChunkOf.CODE, kernel.address, 0] == noise(of_code, 2)
    assert wholes[ChunkOf.NAME, kernel.address, 0] == b"large"


def test_a_handle_that_is_given_back_may_be_another_kernels(attached: Attached) -> None:
    kernel = attached.driver.kernel(b"first", b"1")
    attached.driver.launch(kernel.value)
    attached.driver.kernel_gone(kernel)
    # when
    ctypes.memmove(kernel.buffers[0], b"other", 5)
    kernel.kernel.offset = 4096
    attached.driver.launch(kernel.value)
    # then
    found = attached.launches()
    assert list(zip(found["flags"], found["address"], found["name"], strict=True)) == [
        (0, HEAP, b"first"),
        (0, HEAP + 4096, b"other"),
    ]


def test_a_handle_that_changes_without_a_word_is_not_believed(attached: Attached) -> None:
    kernel = attached.driver.kernel(b"first", b"1")
    attached.driver.launch(kernel.value)
    # when
    ctypes.memmove(kernel.buffers[0], b"other", 5)
    kernel.kernel.offset = 4096
    for _ in range(2):
        attached.driver.launch(kernel.value)
    # then it is learnt anew
    assert attached.counted()[CHANGED] == 1
    found = attached.launches()
    nothing = LaunchFlags.BAD_ARGS | LaunchFlags.NO_NAME
    assert list(zip(found["flags"], found["address"], found["name"], strict=True)) == [
        (0, HEAP, b"first"),
        (nothing, 0, b""),
        (0, HEAP + 4096, b"other"),
    ]
    # and so it is where it was before, with its code elsewhere
    code = ctypes.create_string_buffer(b"2")
    kernel.kernel.offset, kernel.code.isa = 0, ctypes.addressof(code)
    for _ in range(2):
        attached.driver.launch(kernel.value)
    assert attached.counted()[CHANGED] == 1
    assert attached.launches()["name"].tolist() == [b"", b"other"]


def test_two_kernels_at_one_address_are_not_both_believed(attached: Attached) -> None:
    """Whichever of them the layout is wrong for."""
    module = LoadedModule(b"zebin")
    one, again = (attached.driver.kernel(b"one", b"code", 0, module) for _ in range(2))
    other = attached.driver.kernel(b"other", b"edoc", 0, module)
    again.code.isa = one.code.isa  # another handle of the same kernel
    for kernel in (one, other, again, one):
        attached.driver.launch(kernel.value)
    assert attached.counted()[ASTRAY] == 1
    assert attached.launches()["name"].tolist() == [b"one", b"", b"one", b"one"]
    # and when the first is given back, the other may be there, whatever is left of that in the process's memory
    for kernel in (one, again):
        attached.driver.kernel_gone(kernel)
    attached.driver.launch(other.value)
    assert attached.launches()[["flags", "name"]].tolist() == [(0, b"other")]


def test_two_gpus_have_kernels_at_one_address(attached: Attached) -> None:
    """Each has its own memory, and a module is on one of them."""
    modules = LoadedModule(b"one"), LoadedModule(b"two")
    kernels = [attached.driver.kernel(b"k%d" % n, b"code%d" % n, 0, module) for n, module in enumerate(modules)]
    for kernel in (*kernels, *kernels):
        attached.driver.launch(kernel.value)
    assert attached.launches()[["flags", "address", "name"]].tolist() == [(0, HEAP, b"k0"), (0, HEAP, b"k1")] * 2


@pytest.mark.parametrize("told", [False, True])
def test_a_kernel_that_is_made_again_may_have_its_code_elsewhere(attached: Attached, told: bool) -> None:
    kernel, new = attached.driver.kernel(b"first", b"1"), ctypes.create_string_buffer(b"code")
    attached.driver.launch(kernel.value)
    kernel.code.isa = ctypes.addressof(new)
    if told:
        attached.driver.kernel_gone(kernel)
    attached.driver.launch(kernel.value)
    assert attached.launches()[["flags", "name"]].tolist() == [(0, b"first")] * 2


def test_a_program_that_becomes_another_has_its_own_kernels(attached: Attached) -> None:
    """Process, handles and addresses are the same."""
    attached.run("first", 2, 1, 0, 10, 0, "second")
    launches, pieces = attached.launches(), attached.pieces()
    assert launches["name"].tolist() == [b"first_0", b"first_1"] * 5 + [b"second_0", b"second_1"] * 5
    assert len(set(launches["pid"].tolist())) == 1
    assert len(set(launches["address"].tolist())) == 2
    names = [each["data"].tobytes()[: each["bytes"]] for each in pieces[pieces["what"] == ChunkOf.NAME]]
    assert names == [b"first_0", b"first_1", b"second_0", b"second_1"]


def data_of(pieces: NDArray[np.void], what: ChunkOf) -> list[bytes]:
    """What they hold."""
    return [each["data"].tobytes()[: each["bytes"]] for each in pieces[pieces["what"] == what]]


def queue_of(number: int) -> list[ctypes.Array[ctypes.c_uint64]]:
    """What leads to the number of a queue's GPU by two pointers; the first of these is the queue."""
    words = [(ctypes.c_uint64 * 1)(number)]
    while len(words) < 3:
        words.insert(0, (ctypes.c_uint64 * 1)(ctypes.addressof(words[0])))
    return words


def with_gpus(layout: Layout) -> Layout:
    """A layout for handles with a kernel for each GPU, one pointer behind the other."""

    def each(of: Field) -> Field:
        return replace(of, per_gpu=(8, *(0,) * (len(of.path) - 1)))

    assert layout.module and layout.binary and layout.binary_size and layout.allocation and layout.name
    first, second = layout.address
    start, size = layout.allocation
    return replace(
        layout,
        address=(each(first), each(second)),
        allocation=(each(start), each(size)),
        size=each(layout.size),
        code=each(layout.code),
        name=each(layout.name),
        kernel_class=each(layout.kernel_class),
        module=each(layout.module),
        binary=each(layout.binary),
        binary_size=each(layout.binary_size),
        gpu=Field((0, 0, 0), 32),
    )


def test_a_handle_with_a_kernel_for_each_gpu(loaded: LaunchProbes, built: Built, tmp_path: Path) -> None:
    # given kernels of one module, at one address of two GPUs
    attached = Attached(loaded, copied(built, tmp_path / "copy"), with_gpus(built.layout))
    driver, module = attached.driver, LoadedModule(b"module")
    kernels = [driver.kernel(name, name * 2, 64, module) for name in (b"first", b"second")]
    handle = (ctypes.c_uint64 * 10)(7, *(ctypes.addressof(kernel.kernel) for kernel in kernels))
    value = ctypes.addressof(handle)
    queues = [queue_of(number) for number in (0, 1, 2, 8, 0xFFFFFFFF)]

    # when: there is no kernel for the third GPU, and there are no more than eight GPUs
    for _ in range(2):
        for queue in queues:
            driver.launch(value, queue=ctypes.addressof(queue[0]))

    # then
    assert attached.counted()[UNREADABLE] == 6
    assert attached.launches()["name"].tolist() == [b"first", b"second", b"", b"", b""] * 2
    pieces = attached.pieces()
    assert [data.rstrip(b"\0") for data in data_of(pieces, ChunkOf.NAME)] == [b"first", b"second"]
    modules = pieces[pieces["what"] == ChunkOf.MODULE]
    assert (modules["module"] - module.address).tolist() == [0, 1]

    # and when both are given back, in one call, and so is the module
    driver._loaded.kernel_gone(ctypes.c_uint64(value - GONE_OFFSET))
    driver.module_gone(module)
    for queue in queues[:2]:
        driver.launch(value, queue=ctypes.addressof(queue[0]))
    again = attached.pieces()
    assert again["what"].tolist() == pieces["what"].tolist()
    assert attached.launches()["name"].tolist() == [b"first", b"second"]

    for nowhere in NOWHERE:
        driver.launch(value, queue=nowhere)
    assert attached.counted()[UNREADABLE] == len(NOWHERE)
    assert attached.launches()["name"].tolist() == [b""] * len(NOWHERE)
    loaded.detach()


class Dispatched:
    """Structures in a row, as a driver has them of kernels that it launches together."""

    def __init__(self, handles: Sequence[int], many: int | None = None) -> None:
        self._kernels = [(ctypes.c_uint64 * 2)(5, handle) for handle in handles]
        words = [word for kernel in self._kernels for word in (1, ctypes.addressof(kernel), 3)]
        self._structures = (ctypes.c_uint64 * max(len(words), 1))(*words)
        count = len(handles) if many is None else many
        self.it = (ctypes.c_uint64 * 2)(ctypes.addressof(self._structures), count | 0xABCD00)

    @property
    def value(self) -> int:
        return ctypes.addressof(self.it)


@pytest.fixture
def dispatching(loaded: LaunchProbes, built: Built, tmp_path: Path) -> Iterator[Attached]:
    """With `launch` as the place from which the driver launches kernels of its own."""
    entries = (
        Entry("own", Action.OWN_LAUNCHES, built.symbols["launch"] + 4, 1),
        *(entry for entry in built.layout.entries if entry.action in (Action.KERNEL_GONE, Action.MODULE_GONE)),
    )
    layout = replace(built.layout, entries=entries, dispatch=Dispatch(0, 8, 24, (8, 8)))
    yield Attached(loaded, copied(built, tmp_path / "copy"), layout)
    loaded.detach()


def test_all_of_the_driver_s_own_kernels_that_it_launches_together(dispatching: Attached) -> None:
    driver = dispatching.driver
    kernels = [driver.kernel(b"own_%d" % number, b"code%d" % number, 64 * number) for number in range(16)]
    several = [Dispatched([kernel.value for kernel in kernels[:many]]) for many in (1, 3, 16)]

    for each in several:
        driver.launch(each.value)

    launches = dispatching.launches()
    names = [b"own_%d" % number for many in (1, 3, 16) for number in range(many)]
    assert launches["name"].tolist() == names
    assert {*launches["flags"].tolist()} == {LaunchFlags.OWN}
    assert len({*launches["stack"][1:4].tolist()}) == 1 and launches["stack"].all()
    pieces = dispatching.pieces()
    assert sorted(data_of(pieces, ChunkOf.CODE)) == sorted(b"code%d" % number for number in range(16))


def test_structures_that_lead_nowhere_are_launches_without_a_kernel(dispatching: Attached) -> None:
    driver = dispatching.driver
    kernel = driver.kernel(b"own", b"code", 0)
    none, many = Dispatched([], 0), Dispatched([kernel.value], 17)
    astray = Dispatched([kernel.value, *NOWHERE])

    for value in (none.value, many.value, *NOWHERE):
        driver.launch(value)
    assert dispatching.launches()["name"].tolist() == [b""] * (2 + len(NOWHERE))

    driver.launch(astray.value)
    assert dispatching.launches()["name"].tolist() == [b"own"] + [b""] * len(NOWHERE)


def test_bytes_of_a_copy_and_calls_that_the_driver_makes_itself(
    loaded: LaunchProbes, built: Built, tmp_path: Path
) -> None:
    # given `launch` as a function that copies, which the driver calls itself, too
    entries = (
        Entry("clEnqueueCopyBufferRect", Action.TRANSFER_SIZES, built.symbols["launch"] + 4, 1, nested=True),
        *(entry for entry in built.layout.entries if entry.action in (Action.KERNEL_GONE, Action.MODULE_GONE)),
    )
    layout = replace(built.layout, entries=entries, code_range=(0, 1 << 20))
    attached = Attached(loaded, copied(built, tmp_path / "copy"), layout)
    sizes = (ctypes.c_uint64 * 3)(100, 50, 4)
    # when
    for value in (ctypes.addressof(sizes), *NOWHERE):
        attached.driver.launch(value)
    attached.driver.launch_deep(ctypes.addressof(sizes), 1, "launch")
    # then
    transfers = loaded.launches.read()
    assert transfers["size"].tolist() == [100 * 50 * 4] + [UNKNOWN_BYTES] * len(NOWHERE)
    assert set(transfers["iba"].tolist()) == {transfer_function_number("clEnqueueCopyBufferRect")}
    assert attached.counted()[Counter.TRANSFERS] == len(transfers)
    loaded.detach()


@pytest.mark.parametrize(
    ("part", "values", "why"),
    [
        ("handle.kernel", NOWHERE, UNREADABLE),
        ("kernel.code", NOWHERE, UNREADABLE),
        ("code.memory", NOWHERE, UNREADABLE),
        ("kernel.cls", [0, 1 << 63, "other class", "in the class", "libc"], UNKNOWN),
        ("kernel.offset", [HEAP_BYTES, 1 << 46, 1 << 63, (1 << 64) - 1, (1 << 48) - 1], ASTRAY),
        ("memory.gpu", [1 << 48, 1 << 62, 0xFFFE_8001_0000_0000], ASTRAY),
        ("memory.bytes", [0, 3, 1 << 33, (1 << 64) - 1], ASTRAY),
        ("code.size", [0, (1 << 28) + 1, (1 << 32) - 1], ASTRAY),
    ],
)
def test_what_leads_astray_is_a_launch_without_a_kernel(
    attached: Attached, part: str, values: list[int | str], why: Counter
) -> None:
    driver = attached.driver
    libc = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    named = {"other class": driver.other_class, "in the class": driver.cls + 8, "libc": libc}
    kernels = []
    for value in values:
        kernel = driver.kernel(b"k", b"code")
        of, member = part.split(".")
        setattr(getattr(kernel, of), member, named[value] if isinstance(value, str) else value)
        kernels.append(kernel)
        driver.launch(kernel.value)

    assert attached.counted()[why] == len(values)
    found = attached.launches()
    assert len(found) == len(values)
    assert set(found["flags"].tolist()) == {LaunchFlags.BAD_ARGS | LaunchFlags.NO_NAME}
    assert not any(found[each].any() for each in ("iba", "address", "size"))
    assert set(found["name"].tolist()) == {b""}
    assert not len(attached.pieces())


def test_a_handle_of_nothing(attached: Attached) -> None:
    text = ctypes.create_string_buffer(b"this is not a kernel's handle but text, as long as one")
    handles = [*NOWHERE, ctypes.addressof(text)]
    for handle in handles:
        attached.driver.launch(handle)
        attached.driver.launch_many([handle])
    assert attached.counted()[UNREADABLE] == 2 * len(handles)
    assert len(attached.launches()) == 2 * len(handles)


def test_the_memory_that_code_lies_in_ends_behind_it(attached: Attached) -> None:
    """Up to its last byte; and addresses may be sign-extended, or not."""
    inside = attached.driver.kernel(b"inside", b"code", HEAP_BYTES - 4)
    outside = attached.driver.kernel(b"outside", b"code", HEAP_BYTES - 3)
    extended = attached.driver.kernel(b"extended", b"code", 64)
    extended.memory.gpu |= 0xFFFF << 48
    for kernel in (inside, outside, extended):
        attached.driver.launch(kernel.value)
    assert attached.counted()[ASTRAY] == 1
    assert attached.launches()["address"].tolist() == [inside.address, 0, extended.address]


def no_end() -> tuple[int, object]:
    """Text that ends where the process's memory does."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    pages[:] = b"x" * len(pages)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    return at + mmap.PAGESIZE - 8, pages


@pytest.mark.parametrize(
    ("name", "cut", "whole"),
    [
        (b"\x1b[31m\xff\xfe;\n\xc3", b"\x1b[31m\xff\xfe;\n\xc3", b"\x1b[31m\xff\xfe;\n\xc3"),
        (b"n" * 63, b"n" * 63, b"n" * 63),
        (b"n" * 64, b"n" * 63, b"n" * 64),
        (b"n" * 5000, b"n" * 63, b"n" * 5000),
        (b"n" * 40_000, b"n" * 63, b"n" * (CHUNK_BYTES - 1)),
    ],
    ids=["no text", "63", "64", "5000", "40,000"],
)
def test_names_are_bytes(attached: Attached, name: bytes, cut: bytes, whole: bytes) -> None:
    kernel = attached.driver.kernel(name, b"code")
    attached.driver.launch(kernel.value)
    assert attached.launches()[["flags", "name"]].tolist() == [(0, cut)]
    assert put_together(attached.pieces())[ChunkOf.NAME, kernel.address, 0] == whole


def test_kernels_whose_name_cannot_be_read_have_none(attached: Attached) -> None:
    without_end, kept = no_end()
    kernels = [attached.driver.kernel(b"", b"code", 64 * i) for i in range(len(NOWHERE) + 2)]
    for kernel, at in zip(kernels[1:], [*NOWHERE, without_end], strict=True):
        kernel.code.name = at
    for kernel in kernels:
        attached.driver.launch(kernel.value)
    found = attached.launches()
    assert found["address"].tolist() == [kernel.address for kernel in kernels]
    assert set(found["flags"].tolist()) == {LaunchFlags.NO_NAME}
    assert set(attached.pieces()["what"].tolist()) == {ChunkOf.CODE}
    assert kept


@pytest.mark.parametrize("bytes_", [1 << 60, (1 << 64) - 1, (1 << 26) + 1])
def test_a_module_of_an_absurd_size_is_left_out(attached: Attached, bytes_: int) -> None:
    module = LoadedModule(b"zebin")
    module.it.bytes = bytes_
    kernel = attached.driver.kernel(b"k", b"code", 0, module)
    attached.driver.launch(kernel.value)
    assert attached.counted()[Counter.CHUNKS_LOST] == 1
    assert put_together(attached.pieces()) == {
        (ChunkOf.NAME, HEAP, 0): b"k",
        (ChunkOf.CODE, HEAP, 0): b"code",
    }


@pytest.mark.parametrize("where", NOWHERE)
def test_code_and_modules_that_cannot_be_read_are_not_made_up(attached: Attached, where: int) -> None:
    # given a kernel whose code and module lead nowhere
    module = LoadedModule(b"zebin")
    kernel = attached.driver.kernel(b"k", b"code", 0, module)
    code, binary = kernel.code.isa, module.it.binary
    kernel.code.isa = module.it.binary = where
    # when
    attached.driver.launch(kernel.value)
    # then nothing of them has come
    assert attached.counted()[Counter.CHUNKS_LOST] == 1
    pieces = attached.pieces()
    assert pieces["what"].tolist() == [ChunkOf.NAME, ChunkOf.CODE, ChunkOf.MODULE]
    assert pieces["bytes"].tolist() == [1, 0, 0]
    # and the code has when it can be read
    kernel.code.isa, module.it.binary = code, binary
    attached.driver.launch(kernel.value)
    pieces = attached.pieces()
    assert put_together(pieces)[ChunkOf.CODE, HEAP, 0] == b"code"
    assert set(attached.launches()["flags"].tolist()) == {0}


def described(attached: Attached) -> dict[int, bytes]:
    """Names by address, of the kernels that have code."""
    told = put_together(attached.pieces())
    coded = {address for what, address, *_ in told if what == ChunkOf.CODE}
    return {address: name for (what, address, *_), name in told.items() if what == ChunkOf.NAME and address in coded}


@pytest.mark.parametrize("many", [0, 1, 3, 8, 9, 16])
def test_all_launches_of_a_call_are_told_and_their_kernels_described(attached: Attached, many: int) -> None:
    kernels = [attached.driver.kernel(b"k%d" % i, b"code", 4096 * i) for i in range(many)]
    handles = [kernel.value for kernel in kernels]
    # when
    attached.driver.launch_many(handles + handles[:1])
    # then
    counted = attached.counted()
    assert counted[Counter.LAUNCHES] == len(handles + handles[:1])
    assert not counted[Counter.LAUNCHES_LOST]
    found = attached.launches()
    assert found["address"].tolist() == [kernel.address for kernel in kernels + kernels[:1]]
    assert found["name"].tolist() == [b"k%d" % i for i in [*range(many), *range(many)[:1]]]
    assert len(set(found["stack"].tolist())) <= 1
    # and each was described, once
    assert counted[Counter.KERNELS] == many
    assert described(attached) == {kernel.address: b"k%d" % i for i, kernel in enumerate(kernels)}


def test_of_very_many_launches_of_a_call_the_last_are_counted_as_lost(attached: Attached) -> None:
    kernels = [attached.driver.kernel(b"k%d" % i, b"code", 4096 * i) for i in range(1000)]
    # when
    for _ in range(2):
        attached.driver.launch_many([kernel.value for kernel in kernels])
    # then
    counted, found = attached.counted(), attached.launches()
    assert counted[Counter.LAUNCHES] == 2000
    assert 2 * 64 <= len(found) == 2000 - counted[Counter.LAUNCHES_LOST]
    # and a kernel that is launched alone is told, and described, whatever became of it before
    attached.driver.launch(kernels[20].value)
    assert described(attached)[kernels[20].address] == b"k20"


def test_a_wild_array(attached: Attached) -> None:
    good, bad = attached.driver.kernel(b"k", b"code"), attached.driver.kernel(b"bad", b"code")
    bad.kernel.cls += 8
    attached.driver.launch_many([good.value, 0, bad.value, good.value])
    for where in NOWHERE:
        attached.driver.launch_many([], 3, where)
    attached.driver.launch_many([], (1 << 32) - 1, 0x10)
    counted = attached.counted()
    assert counted[Counter.LAUNCHES] == 4 + 3 * len(NOWHERE) + (1 << 32) - 1
    names = attached.launches()["name"].tolist()
    assert len(names) < 1000
    assert names == [b"k", b"", b"", b"k", *[b""] * (len(names) - 4)]
    assert (counted[UNREADABLE], counted[UNKNOWN]) == (len(names) - 3, 1)
    assert counted[Counter.LAUNCHES_LOST] == counted[Counter.LAUNCHES] - len(names)


def test_what_has_no_room_is_counted_once(built: Built, tmp_path: Path) -> None:
    # given room for few launches, and nobody who reads
    probes = LaunchProbes(Sizes(launch_pages=1), cpu_samples=False)
    try:
        attached = Attached(probes, copied(built, tmp_path / "copy"))
        kernel = attached.driver.kernel(b"k", b"code")
        # when
        for _ in range(40):
            attached.driver.launch(kernel.value)
            attached.driver.launch(0)
            attached.driver.launch_many([kernel.value, 0])
        # then (`launches` compares what was counted with what has come)
        counted = attached.counted()
        assert counted[Counter.LAUNCHES] == 160
        assert counted[Counter.LAUNCHES_LOST] > 100
        assert len(attached.launches()) < 40
    finally:
        probes.close()


def test_of_processes_that_are_not_recorded_nothing_is_told(attached: Attached) -> None:
    kernel = attached.driver.kernel(b"k", b"code", 0, LoadedModule(b"zebin"))
    attached.probes.exclude([os.getpid()])
    attached.driver.launch(kernel.value)
    attached.probes.include([os.getpid()])
    # then
    assert attached.launches()[["flags", "address", "name", "stack"]].tolist() == [(LaunchFlags.OTHER, HEAP, b"", 0)]
    assert not len(attached.pieces())
    # and what comes later is whole
    attached.driver.launch(kernel.value)
    assert attached.launches()[["flags", "name"]].tolist() == [(0, b"k")]
    assert len(put_together(attached.pieces())) == 3


@pytest.fixture
def walking(attached: Attached) -> Iterator[Walking]:
    with Walking(attached.probes) as walking:
        yield walking


def in_a_thread(function: Callable[[], None]) -> None:
    """Calls it where the stack is short: that of a test may be longer than what is copied of one."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


@pytest.mark.parametrize("how", ["launch", "launch_sub", "launch_start", "launch_frame"])
def test_who_calls_the_driver_is_in_the_stack_once(attached: Attached, walking: Walking, how: str) -> None:
    """However far the driver's function has come when it is probed, and at the first launch as at the second."""
    kernel = attached.driver.kernel(b"k", b"code")
    deep = attached.driver.loaded_at + attached.built.symbols["deep"]
    truncated = attached.probes.counters()[Counter.STACKS_TRUNCATED]

    def stack_at(depth: int) -> list[int]:
        attached.driver.launch_deep(kernel.value, depth, how)
        [launch] = attached.launches()
        ips, walked = walking.stacks()[int(launch["stack"])]
        inside = [deep <= ip < deep + 100 for ip in ips]
        calls = sum(inside)
        assert inside[: calls + 1] == [False, *[True] * calls]
        # the last of them called the driver, those before it themselves
        assert len(set(ips[1 : calls + 1])) == min(depth + 1, 2)
        assert calls == min(depth + 1, MAX_DEPTH - 1)
        assert walked is (Walked.WHOLE if depth < MAX_DEPTH else Walked.DEEP)
        return ips

    def launch() -> None:
        for _ in range(100):  # the interpreter calls from other places once it has seen what it calls
            stack_at(2)
        for depth in (0, 1, 5, MAX_DEPTH + 5):
            first, second = [stack_at(depth) for _ in range(2)]
            assert first == second

    in_a_thread(launch)
    assert attached.probes.counters()[Counter.STACKS_TRUNCATED] >= truncated + 1
    assert walking.finished > 0


@pytest.mark.parametrize("how", ["launch", "launch_frame"])
def test_a_frame_pointer_that_leads_nowhere_is_not_followed(attached: Attached, walking: Walking, how: str) -> None:
    # given a caller without call frame information, and frames of nobody: none, an odd one, one that leads to itself
    frames = ctypes.create_string_buffer(64)
    odd, circle = ctypes.addressof(frames) + 1, ctypes.addressof(frames) + 32
    ctypes.c_uint64.from_address(odd + 8).value = 0x1234
    ctypes.c_uint64.from_address(circle).value = circle
    ctypes.c_uint64.from_address(circle + 8).value = 0x5678
    kernel = attached.driver.kernel(b"k", b"code")
    start = attached.driver.loaded_at + attached.built.symbols["with_frame"]

    def launch() -> None:
        for frame in (*NOWHERE, odd, circle):
            # when
            attached.driver.launch_with_frame(kernel.value, frame, how)
            # then its caller was found all the same
            [launch] = attached.launches()
            (_, caller, *others), walked = walking.stacks()[int(launch["stack"])]
            assert start < caller < start + 32
            assert walked is Walked.WHOLE
            assert len(others) > 5
            assert not {0x1234, 0x5678} & set(others)

    in_a_thread(launch)


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Built]:
    """A driver that recorders find, and whose layout was calibrated on this machine."""
    built = build(tmp_path / "driver", "libze_intel_gpu.so.1")
    layout = CACHE / f"{built.layout.build_id}.json"
    layout.parent.mkdir(parents=True, exist_ok=True)
    layout.write_text(built.layout.to_json())
    yield built
    layout.unlink()


@pytest.mark.alone  # recorders of that time see the driver, and tell of it
@thorough
def test_a_recording_by_a_calibrated_layout_goes_on_in_another_file(known: Built, tmp_path: Path) -> None:
    # given a program of two processes and six threads that launch five kernels for six seconds: a new file may wait for
    # the learner for two
    each_thread, kernels = 6000, 5
    program = [known.program, "kernel", kernels, 3, 1, each_thread, 1000]
    told = {(f"kernel_{i}", 0x8001_0000_0000 + 4096 * i): bytes(ord("k") + i + n for n in range(100)) for i in range(5)}
    # when
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof(
            "record", "-o", tmp_path / "c.parquet", "--launches=attach", "--switch-output=0.5s", *BARE,
            "--", *map(str, program), env=hardware.env() | {"LD_LIBRARY_PATH": str(known.library.parent)},
        )  # fmt: skip
    # then
    assert done.code == 0, done.err
    parts = [CaptureReader(path) for path in sorted(tmp_path.glob("c.*parquet"))]
    assert len(parts) > 1
    counted: Counts[tuple[int, str, int]] = Counts()
    for part in parts:
        assert [each["way"] for each in part.header["libraries"] if each["path"] == str(known.library)] == ["attach"]
        assert {each["what"] for each in part.header["losses"]} <= {"library"}  # drivers that others run meanwhile
        launches = [each for each in part.table("launch").to_pylist() if each["comm"] == "program"]
        assert launches
        assert {(each["name"], each["address"]) for each in launches} <= told.keys()
        counted.update(
            (each["pid"], each["name"], each["address"]) for each in launches if not each["flags"] & LaunchFlags.CARRIED
        )
        # and each file has the kernels that are launched in it
        assert {each["pid"]: told for each in launches} == kernels_of(part, {each["pid"] for each in launches})
    assert len(counted) == 2 * kernels
    assert set(counted.values()) == {3 * each_thread // kernels}


@pytest.mark.alone
def test_a_driver_whose_launches_cost_more_is_told_of(known: Built, tmp_path: Path) -> None:
    # given two functions that launch and are probed at an endbr64 and at a sub
    program = [known.program, "kernel", 1, 1, 1, 1, 1000]
    # when
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof(
            "record", "-o", tmp_path / "c.parquet", *BARE, "--", *map(str, program),
            env=hardware.env() | {"LD_LIBRARY_PATH": str(known.library.parent)},
        )  # fmt: skip
    # then
    assert done.code == 0, done.err
    said = (
        f"{known.library}: a launch by launch_sub, launch_start costs 2 to 10 µs more: "
        "the kernel single-steps the instruction at the probe"
    )
    assert done.err.splitlines().count(f"iaprof: {said}") == 1
    (library,) = (
        each for each in CaptureReader(tmp_path / "c.parquet").header["libraries"] if each["path"] == str(known.library)
    )
    assert library["single_stepped"] == ["launch_sub", "launch_start"]
    # and whoever reads the capture is told again
    (part,) = json.loads(iaprof("info", "--json", tmp_path / "c.parquet").out)["parts"]
    assert said in part["warnings"]


@pytest.mark.alone
@pytest.mark.parametrize("found", usually(["when it is mapped"], ["before it is mapped", "when it is mapped"]))
def test_a_driver_that_is_mapped_before_it_has_probes_is_told_of(known: Built, found: str, tmp_path: Path) -> None:
    # given two processes that have the driver beside them, where the recorder is led or not
    environment = {"LD_LIBRARY_PATH": str(known.library.parent)} if found.startswith("before") else {}
    threads, each_thread = 2, 3000
    program, everything = [known.program, "kernel", 1, threads, 1, each_thread, 1000], 2 * threads * each_thread
    # when
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof(
            "record",
            "-o",
            tmp_path / "c.parquet",
            *BARE,
            "--",
            *map(str, program),
            env=hardware.env() | environment,
        )
    # then
    assert done.code == 0, done.err
    capture = CaptureReader(tmp_path / "c.parquet")
    (since,) = (each["since_ns"] for each in capture.header["libraries"] if each["path"] == str(known.library))
    mapped = {
        row["pid"]: row["time_ns"] for row in capture.table("mapping").to_pylist() if row["path"] == str(known.library)
    }
    launches = [row["time_ns"] for row in capture.table("launch").to_pylist() if row["comm"] == "program"]
    told = [line for line in done.err.splitlines() if "before it had probes" in line]
    (part,) = json.loads(iaprof("info", "--json", tmp_path / "c.parquet").out)["parts"]
    if environment:
        assert since < min(mapped.values())
        assert len(launches) == everything
        assert "unprobed" not in capture.header
        assert told == []
        return
    # the children have it from the process that mapped it
    assert capture.header["unprobed"] == {"processes": 1, "longest_ns": since - min(mapped.values()), "ended": 0}
    assert 0 < len(launches) <= everything
    ms = f"{(since - min(mapped.values())) / 1e6:,.0f} ms"
    said = f"1 process mapped a driver {ms} before it had probes: launches in that time, if any, are missing"
    assert told == [f"iaprof: {said}"]
    assert said in part["warnings"]


def kernels_of(part: CaptureReader, pids: set[int]) -> dict[int, dict[tuple[str, int], bytes]]:
    """Code by name and address, of each process, in a file; all of it was put together."""
    found: dict[int, dict[tuple[str, int], bytes]] = {pid: {} for pid in pids}
    rows = part.table("kernel").to_pylist()
    contents = {row["digest"]: row["elf"] for row in rows if row["elf"] is not None}
    for row in rows:
        if row["pid"] in pids:
            assert row["path"] == IN_MEMORY
            for kernel in read_zebin(contents[row["digest"]]).kernels:
                found[row["pid"]][kernel.name, kernel.address] = kernel.code
    return found
