"""Dispatches of a Vulkan driver that this process plays: what a program forges is counted, and never named wrongly."""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from numpy.typing import NDArray

import elf_sections
from iaprof.bpf.driver_layout import Action, Entry, Field, Layout
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.wire.launches import MOST_MORE, ChunkOf, Counter, LaunchFlags, ListEvent

pytestmark = pytest.mark.bpf

SOURCE = r"""
void *of_shaders[4] = {&of_shaders, &of_shaders}, *of_others[4] = {&of_others};
#define F(name) __attribute__((noinline)) int name(void *a, long b, void *c) { \
    __asm__ volatile("" :: "r"(a), "r"(b), "r"(c)); return 1; }
F(dispatch) F(draw) F(begin) F(end) F(submit) F(include) F(gone) F(named)
#define M(name) __attribute__((noinline)) int name(void *a, void *b, unsigned n, void *i, void *c, \
    unsigned long *out) { \
    __asm__ volatile("" :: "r"(a), "r"(b), "r"(i), "r"(c)); \
    for (unsigned k = 0; k < n; k++) out[k] = to_make[k]; return 0; }
unsigned long to_make[64];
M(make) M(make_to_draw)
"""
FLAGS = ["-O1", "-fcf-protection", "-fno-omit-frame-pointer", "-shared", "-fPIC", "-Wl,--build-id=sha1"]
WINDOW = (0x2_0000_0000, 0xC000_0000)
BOUND, SHADER_IN_PIPELINE = 0x1C260, 0x1F0
PIPELINE, MODULE = 19, 15  # VkObjectType
DRAWN, STAGES_IN_PIPELINE, STRIDE, KIND, LANES, STAGE = 0x1C300, 0x300, 24, 0x48, 24, 28
VERTEX, FRAGMENT = 0, 4  # of driver_layout.STAGES
COMPUTE = 0x20  # VkShaderStageFlagBits
NOWHERE = [0, 0x10, 1 << 63, 0xFFFF_FFFF_8100_0000]
MOST = 0xFFFF_FFFF


class Player:
    """The driver, attached to, and what lies in this process's memory for it."""

    def __init__(self, probes: LaunchProbes, folder: Path, bound: tuple[int, ...]) -> None:
        source, library = folder / "driver.c", folder / "driver.so"
        source.write_text(SOURCE)
        subprocess.run(["cc", *FLAGS, "-o", str(library), str(source)], check=True)
        with library.open("rb") as file:
            table = elf_sections.symbols(ELFFile(file))
            symbols = {symbol.name: symbol["st_value"] for symbol in table.iter_symbols()}
            returns = {each.name: each["st_value"] + each["st_size"] - 1 for each in table.iter_symbols()}
            elf = LibraryFile(file)
            layout = self._layout(symbols, returns, elf.build_id(), bound)
            offsets = [elf.offset(entry.address, executable=True) for entry in layout.entries]
            probes._attach_layout(file.fileno(), layout, offsets)
        self.probes, self._bound = probes, bound
        self._library = ctypes.CDLL(str(library))
        self.tables = {
            name: ctypes.addressof(ctypes.c_void_p.in_dll(self._library, name)) for name in ("of_shaders", "of_others")
        }
        self._kept: list[object] = []
        for ring in (probes.launches, probes.stacks, probes.chunks, probes.modules, probes.list_events):
            ring.read()
        self._before = probes.counters()

    @staticmethod
    def _layout(symbols: dict[str, int], returns: dict[str, int], build_id: str, bound: tuple[int, ...]) -> Layout:
        def entry(name: str, action: Action, handle: int, count: int | None = None) -> Entry:
            return Entry(name, action, symbols[name] + 4, handle, count)

        layout = Layout(
            build_id=build_id,
            driver="vulkan",
            version="1",
            entries=(
                entry("dispatch", Action.LAUNCH, 0),
                entry("draw", Action.DRAW, 0),
                entry("begin", Action.LIST_RESET, 0),
                entry("end", Action.LIST_CLOSED, 0),
                entry("submit", Action.SUBMIT, 2, 1),
                entry("include", Action.INCLUDE, 2, 1),
                entry("gone", Action.SHADER_GONE, 0),
                entry("named", Action.NAMED, 0),
                entry("make", Action.MAKE, 3, 2),
                Entry("make", Action.MADE, returns["make"], 0),
                entry("make_to_draw", Action.MAKE_TO_DRAW, 3, 2),
                Entry("make_to_draw", Action.MADE_TO_DRAW, returns["make_to_draw"], 0),
            ),
            address=(Field((8,), bits=32),),
            size=Field((12,), bits=32),
            code=Field((16,)),
            name=None,
            allocation=None,
            kernel_class=Field((0,)),
            classes=(symbols["of_shaders"],),
            window=WINDOW,
            bound=bound,
            pipeline=SHADER_IN_PIPELINE,
            drawn=(DRAWN, 0x500)[: len(bound)],
            stages=(STAGES_IN_PIPELINE, STRIDE),
            kind=(KIND, 0, 1),
            simd=LANES,
            stage=STAGE,
        )
        assert Layout.from_json(layout.to_json()) == layout
        return layout

    def block(self, data: bytes) -> int:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def shader(
        self,
        start: int,
        code: bytes,
        size: int | None = None,
        table: str = "of_shaders",
        lanes: int = 0,
        stage: int = 0,
    ) -> int:
        size = len(code) if size is None else size
        return self.block(struct.pack("<QIIQII", self.tables[table], start, size, self.block(code), lanes, stage))

    def pipeline(self, shader: int) -> int:
        return self.block(bytes(SHADER_IN_PIPELINE) + struct.pack("<Q", shader))

    def commands(self, shader: int) -> int:
        """A command buffer in which a shader is bound."""
        last = self.pipeline(shader) if len(self._bound) > 1 else shader
        return self.block(bytes(BOUND) + struct.pack("<Q", last))

    def drawing_pipeline(self, *shaders: int) -> int:
        """A pipeline that draws; in the place for a shader that dispatches it has one of another pipeline."""
        data = bytearray(STAGES_IN_PIPELINE + STRIDE * 5 + 8)
        struct.pack_into("<I", data, KIND, 1)
        for number, shader in enumerate(shaders):
            struct.pack_into("<Q", data, STAGES_IN_PIPELINE + STRIDE * number, shader)
        return self.block(bytes(data))

    def drawing(self, shaders: dict[int, int]) -> int:
        """A command buffer that draws with shaders, by stage."""
        data = bytearray(0x500 + 64) if len(self._bound) > 1 else bytearray(DRAWN + 64)
        for stage, shader in shaders.items():
            struct.pack_into("<Q", data, len(data) - 64 + 8 * stage, shader)
        last = self.block(bytes(data))
        return self.block(bytes(DRAWN) + struct.pack("<Q", last)) if len(self._bound) > 1 else last

    def draw_with(self, commands: int, shaders: dict[int, int]) -> None:
        """Binds other shaders in a command buffer that draws."""
        at = ctypes.c_uint64.from_address(commands + DRAWN).value + 0x500 if len(self._bound) > 1 else commands + DRAWN
        for stage in range(5):
            ctypes.c_uint64.from_address(at + 8 * stage).value = shaders.get(stage, 0)

    def call(self, name: str, first: int, second: int = 0, third: int = 0) -> None:
        self._library[name](ctypes.c_void_p(first), ctypes.c_long(second), ctypes.c_void_p(third))

    def name(self, object_: int, text: bytes | int, kind: int = PIPELINE) -> None:
        at = text if isinstance(text, int) else self.block(text + b"\0")
        self.call("named", self.block(struct.pack("<IIQIIQQ", 0, 0, 0, kind, 0, object_, at)))

    def make(self, pipelines: Sequence[int], stages: Sequence[Sequence[tuple[int, bytes | int]]]) -> None:
        """Makes pipelines, which exist already, of stages: bit and name of the entry point."""
        draws = any(len(each) != 1 or each[0][0] != COMPUTE for each in stages)
        infos = bytearray()
        for each in stages:
            told = [
                struct.pack("<IIQIIQQQ", 18, 0, 0, 0, bit, 0, name if isinstance(name, int) else self.block(name), 0)
                for bit, name in each
            ]
            of_all = struct.pack("<QI", self.block(b"".join(told)), len(told))
            graphics = struct.pack("<IIQII", 28, 0, 0, 0, len(told)) + of_all[:8] + bytes(112)
            infos += graphics if draws else struct.pack("<IIQII", 29, 0, 0, 0, 0) + told[0] + bytes(24)
        (ctypes.c_uint64 * 64).in_dll(self._library, "to_make")[: len(pipelines)] = list(pipelines)
        into = self.block(bytes(8 * len(pipelines)))
        function = self._library["make_to_draw" if draws else "make"]
        words = (0, 0, len(pipelines), self.block(bytes(infos)), 0, into)
        function(*map(ctypes.c_uint64, words))

    def launches(self) -> NDArray[np.void]:
        launches = self.probes.launches.read()
        counted = self.counted()
        assert counted[Counter.LAUNCHES] == len(launches) + launches["more"].sum()
        self._before = self.probes.counters()
        return launches

    def counted(self) -> Counts[Counter]:
        now = self.probes.counters()
        return Counts({each: now[each] - self._before[each] for each in Counter})


@pytest.fixture(scope="module")
def loaded() -> Iterator[LaunchProbes]:
    probes = LaunchProbes(cpu_samples=False)
    yield probes
    probes.close()


@pytest.fixture(params=[(BOUND,), (BOUND, SHADER_IN_PIPELINE)], ids=["shader", "pipeline"])
def player(loaded: LaunchProbes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Player]:
    yield Player(loaded, tmp_path, request.param)
    loaded.detach()


def code_of(player: Player) -> dict[int, bytes]:
    """Code that was sent, by address, and names."""
    found: dict[int, bytes] = {}
    for chunk in player.probes.chunks.read():
        if chunk["what"] == ChunkOf.SHADER:
            address = int(chunk["address"])
            found[address] = found.get(address, b"") + chunk["data"].tobytes()[: chunk["bytes"]]
    return found


def test_a_dispatch_has_its_shader_and_each_shader_s_code_is_sent_once(player: Player) -> None:
    # given: a small shader, and one of more bytes than go with one launch
    small, large = player.shader(0x40, b"A" * 100), player.shader(0x4000_0000, bytes(range(256)) * 20_000)
    player.name(player.pipeline(small), b"softmax")
    player.name(player.pipeline(large), b"of a module", MODULE)  # not of the pipeline
    # when
    commands = [player.commands(small), player.commands(large)]
    sent: dict[int, bytes] = {}
    for _ in range(5):
        for each in commands:
            player.call("dispatch", each)
            for address, data in code_of(player).items():
                sent[address] = sent.get(address, b"") + data
    # then
    rows = player.launches()
    assert Counts(zip(rows["address"].tolist(), rows["size"].tolist(), rows["name"].tolist(), strict=True)) == {
        (WINDOW[0] + 0x40, 100, b"softmax"): 5,
        (WINDOW[0] + 0x4000_0000, 5_120_000, b""): 5,
    }
    assert rows["list"].tolist() == commands * 5
    assert (rows["flags"] & LaunchFlags.BAD_ARGS == 0).all()
    assert sent == {WINDOW[0] + 0x40: b"A" * 100, WINDOW[0] + 0x4000_0000: bytes(range(256)) * 20_000}


def names_of(player: Player) -> Counts[tuple[int, int, bytes]]:
    """Names that were sent: what, place of the shader, and text."""
    return Counts(
        (chunk["what"], chunk["address"] - WINDOW[0], chunk["data"].tobytes()[: chunk["bytes"]])
        for chunk in player.probes.chunks.read().copy()
        if chunk["what"] in (ChunkOf.NAME, ChunkOf.ENTRY)
    )


def test_shaders_have_the_names_of_their_entry_points_unless_their_pipeline_has_one(player: Player) -> None:
    # given: five pipelines made by one call, one of which gets a name
    names = [b"triple", b"main", b"mainly", b"x" * 200, b"other"]
    shaders = [player.shader(0x40 * number, b"A" * 64) for number in range(1, 6)]
    pipelines = [player.pipeline(shader) for shader in shaders]
    player.make(pipelines, [[(COMPUTE, name + b"\0")] for name in names])
    player.name(pipelines[4], b"softmax")
    # when
    for shader in shaders:
        player.call("dispatch", player.commands(shader))
    # then
    assert names_of(player) == {
        (ChunkOf.ENTRY, 0x40, b"triple"): 1,
        (ChunkOf.ENTRY, 0xC0, b"mainly"): 1,
        (ChunkOf.ENTRY, 0x100, b"x" * 63): 1,
        (ChunkOf.NAME, 0x140, b"softmax"): 1,
    }
    assert player.launches()["name"].tolist() == [b"", b"", b"", b"", b"softmax"], "the recorder knows the whole name"


@pytest.mark.parametrize("at_their_numbers", [True, False])
def test_each_stage_has_the_name_of_its_entry_point(player: Player, at_their_numbers: bool) -> None:
    starts = {VERTEX: 0x40, 2: 0x80, FRAGMENT: 0xC0}
    shaders = {stage: player.shader(start, b"A" * 32, stage=stage) for stage, start in starts.items()}
    places = (shaders.get(stage, 0) for stage in range(5)) if at_their_numbers else (*shaders.values(), shaders[VERTEX])
    drawing = player.drawing_pipeline(*places)
    # given: stages in another order, and one that the pipeline does not have
    stages = [(16, b"fs_main\0"), (1, b"vs_main\0"), (4, b"main\0"), (2, b"none\0")]
    player.make([0, drawing], [[], stages])
    player.call("draw", player.drawing(shaders))
    assert names_of(player) == {(ChunkOf.ENTRY, 0xC0, b"fs_main"): 1, (ChunkOf.ENTRY, 0x40, b"vs_main"): 1}
    player.launches()


def test_a_shader_at_the_place_of_another_has_its_own_entry_point(player: Player) -> None:
    """Also if nothing said that the other one ended."""
    shader = player.shader(0x40, b"A" * 64)
    commands, pipeline = player.commands(shader), player.pipeline(shader)
    for name in (b"first", b"main", b"second", b"second"):
        player.make([pipeline], [[(COMPUTE, name + b"\0")]])
        player.call("dispatch", commands)
    sent = names_of(player)
    assert set(sent) == {(ChunkOf.ENTRY, 0x40, b"first"), (ChunkOf.ENTRY, 0x40, b"second")}
    player.launches()


@pytest.mark.parametrize("address", NOWHERE)
def test_pipelines_made_of_pointers_that_lead_nowhere_are_not_named(player: Player, address: int) -> None:
    shader = player.shader(0x40, b"A" * 64)
    player.make([player.pipeline(shader)], [[(COMPUTE, address)]])
    player.make([address, player.pipeline(address)], [[(COMPUTE, b"x\0")], [(COMPUTE, b"y\0")]])
    for name in ("make", "make_to_draw"):
        into = player.block(bytes(64))
        player._library[name](*map(ctypes.c_uint64, (0, 0, 4, address, 0, into)))
    player.call("dispatch", player.commands(shader))
    assert names_of(player) == {}
    player.launches()


@pytest.mark.parametrize(("lanes", "sent"), [(16, 16), (32, 32), (0x10010, 255), (MOST, 255)])
def test_a_shader_that_dispatches_has_its_lanes_and_one_that_draws_has_none(
    player: Player, lanes: int, sent: int
) -> None:
    player.call("dispatch", player.commands(player.shader(0x40, b"A" * 50_000, lanes=lanes)))
    player.call("draw", player.drawing({VERTEX: player.shader(0x1_0000, b"B", lanes=lanes)}))
    chunks = player.probes.chunks.read()
    assert set(chunks[["what", "simd"]].tolist()) == {(ChunkOf.SHADER, sent), (ChunkOf.VERTEX, 0)}
    player.launches()


def test_lanes_that_cannot_be_read_are_unknown(player: Player) -> None:
    # given: a shader at the end of a mapping
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + mmap.PAGESIZE
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0)
    content = struct.pack("<QIIQ", player.tables["of_shaders"], 0x40, 64, player.block(b"A" * 64))
    ctypes.memmove(end - len(content), content, len(content))
    player.call("dispatch", player.commands(end - len(content)))
    assert player.probes.chunks.read()[["what", "simd"]].tolist() == [(ChunkOf.SHADER, 0)]
    player.launches()


@pytest.mark.parametrize(
    ("start", "size", "table"),
    [
        (0x40, 100, "of_others"),  # no shader
        (WINDOW[1] - 64, 100, "of_shaders"),  # its end is outside
        (WINDOW[1], 100, "of_shaders"),
        (0, 0, "of_shaders"),
        (0, MOST, "of_shaders"),
    ],
)
def test_what_is_no_shader_has_no_address(player: Player, start: int, size: int, table: str) -> None:
    player.call("dispatch", player.commands(player.shader(start, b"A", size, table)))
    (row,) = player.launches()
    assert (row["address"], row["size"], row["name"]) == (0, 0, b"")
    assert row["flags"] & LaunchFlags.BAD_ARGS
    assert code_of(player) == {}


@pytest.mark.parametrize("address", NOWHERE)
def test_pointers_that_lead_nowhere_are_counted(player: Player, address: int) -> None:
    player.call("dispatch", address)
    player.call("dispatch", player.commands(address))
    for name in ("gone", "named", "begin", "end"):
        player.call(name, address)
    player.name(address, b"x")
    player.name(player.pipeline(address), b"x")
    player.name(player.pipeline(player.shader(0, b"A")), address)
    assert player.counted()[Counter.HANDLES_UNREADABLE] == 2
    rows = player.launches()
    assert rows["address"].tolist() == [0, 0]


def test_code_that_cannot_be_read_is_counted_and_the_launch_has_its_address(player: Player) -> None:
    shader = player.block(struct.pack("<QIIQ", player.tables["of_shaders"], 64, 64, 0x10))
    for _ in range(8):
        player.call("dispatch", player.commands(shader))
    assert player.counted()[Counter.CHUNKS_LOST] == 3, "it is tried three times"
    assert set(player.launches()["address"].tolist()) == {WINDOW[0] + 64}
    assert set(code_of(player).values()) <= {b""}


def test_a_shader_s_memory_is_another_s_after_its_pipeline_is_destroyed(player: Player) -> None:
    shader = player.shader(0x100, b"A" * 64)
    pipeline, commands = player.pipeline(shader), player.commands(shader)
    player.name(pipeline, b"first")
    player.call("dispatch", commands)
    player.call("gone", pipeline)
    ctypes.memmove(shader, struct.pack("<QIIQ", player.tables["of_shaders"], 0x200, 32, player.block(b"B" * 32)), 24)
    player.call("dispatch", commands)
    rows = player.launches()
    assert rows[["address", "name"]].tolist() == [(WINDOW[0] + 0x100, b"first"), (WINDOW[0] + 0x200, b"")]
    assert code_of(player) == {WINDOW[0] + 0x100: b"A" * 64, WINDOW[0] + 0x200: b"B" * 32}


def test_a_shader_that_ended_unseen_is_never_another_by_name(player: Player) -> None:
    shader = player.shader(0x100, b"A" * 64)
    commands = player.commands(shader)
    player.name(player.pipeline(shader), b"first")
    player.call("dispatch", commands)
    ctypes.memmove(shader, struct.pack("<QIIQ", player.tables["of_shaders"], 0x100, 32, player.block(b"B" * 32)), 24)
    for _ in range(2):
        player.call("dispatch", commands)
    assert player.counted()[Counter.HANDLES_CHANGED] == 1
    rows = player.launches()
    assert rows[["address", "size", "name"]].tolist() == [
        *((WINDOW[0] + 0x100, 64, b"first"), (0, 0, b""), (WINDOW[0] + 0x100, 32, b"")),
    ]


def submit_infos(player: Player, *of_infos: list[int]) -> int:
    """VkSubmitInfo2s of these command buffers."""
    infos = b""
    for buffers in of_infos:
        array = player.block(b"".join(struct.pack("<IIQQII", 0, 0, 0, each, 0, 0) for each in buffers) or b"\0")
        infos += struct.pack("<IIQIIQIIQIIQ", 0, 0, 0, 0, 0, 0, len(buffers), 0, array, 0, 0, 0)
    return player.block(infos or b"\0")


def list_records(player: Player) -> list[tuple[ListEvent, int, list[int]]]:
    """Event, queue and lists of each record."""
    rows = player.probes.list_events.read()
    return [(ListEvent(int(row["event"])), int(row["queue"]), row["lists"][: row["count"]].tolist()) for row in rows]


def test_command_buffers_of_all_batches_are_submitted(player: Player) -> None:
    # given: more of them than a record holds, and than one program sends
    first, many = list(range(1, 20)), list(range(100, 1500))
    player.call("begin", 5)
    player.call("submit", 0x900, 4, submit_infos(player, first, [], [7], many))
    player.call("include", 5, 2, player.block(struct.pack("<QQ", 7, 7)))
    player.call("end", 5)
    # then
    records = list_records(player)
    assert [each for event, queue, lists in records if event is ListEvent.EXECUTE for each in lists] == [
        *first,
        7,
        *many,
    ]
    assert {queue for event, queue, _ in records if event is ListEvent.EXECUTE} == {0x900}
    assert [each for each in records if each[0] is not ListEvent.EXECUTE] == [
        (ListEvent.RESET, 0, [5]),
        (ListEvent.INCLUDE, 5, [7, 7]),
        (ListEvent.CLOSE, 0, [5]),
    ]
    assert player.counted()[Counter.LISTS_LOST] == 0


def test_forged_submissions_end_and_are_counted(player: Player) -> None:
    broken = struct.pack("<IIQIIQIIQIIQ", 0, 0, 0, 0, 0, 0, MOST, 0, 0x10, 0, 0, 0)
    for count, infos in ((MOST, 0x10), (MOST, player.block(broken)), (1, player.block(broken)), (3, NOWHERE[3])):
        player.call("submit", 0x900, count, infos)
        assert player.counted()[Counter.LISTS_LOST] > 0
        assert len(player.probes.list_events.read()) < 10_000
        player._before = player.probes.counters()


def drawn(rows: NDArray[np.void]) -> list[tuple[int, int]]:
    """Address and number of draws of each record."""
    return [(int(row["address"]) - WINDOW[0], 1 + int(row["more"])) for row in rows]


def test_draws_with_the_same_shaders_are_counted_until_these_change_or_the_command_buffer_ends(player: Player) -> None:
    vertex, first, second = (player.shader(0x40 * number, b"A" * 50) for number in (1, 2, 3))
    commands = player.drawing({VERTEX: vertex, FRAGMENT: first})
    for _ in range(4):
        player.call("draw", commands)
    assert drawn(player.launches()) == [(0x40, 1), (0x80, 1)]
    # when: the fragment shader changes
    player.draw_with(commands, {VERTEX: vertex, FRAGMENT: second})
    player.call("draw", commands)
    assert drawn(player.launches()) == [(0x40, 3), (0x80, 3), (0x40, 1), (0xC0, 1)]
    # when: no fragment is drawn, as for shadows
    player.draw_with(commands, {VERTEX: vertex})
    for _ in range(3):
        player.call("draw", commands)
    player.call("end", commands)
    rows = player.launches()
    assert drawn(rows) == [(0x40, 1), (0x40, 2)]
    assert set(rows["list"].tolist()) == {commands}
    assert len(set(rows["stack"].tolist())) == 1 and (rows["flags"] & LaunchFlags.BAD_ARGS == 0).all()
    # then: nothing is left
    player.call("end", commands)
    assert len(player.launches()) == 0


def test_a_command_buffer_that_begins_anew_has_none_of_its_draws(player: Player) -> None:
    commands = player.drawing({VERTEX: player.shader(0x40, b"A" * 50)})
    for _ in range(3):
        player.call("draw", commands)
    player.call("begin", commands)
    for _ in range(2):
        player.call("draw", commands)
    player.call("end", commands)
    assert drawn(player.launches()) == [(0x40, 1), (0x40, 1), (0x40, 1)]


def test_very_many_draws_are_all_counted(player: Player) -> None:
    commands = player.drawing({VERTEX: player.shader(0x40, b"A" * 50)})
    for _ in range(5_000):
        player.call("draw", commands)
    player.call("end", commands)
    rows = player.launches()
    assert sum(count for _, count in drawn(rows)) == 5_000
    assert len(rows) < 20 and rows["more"].max() < MOST_MORE, "a record has no end of draws"


def test_shaders_that_draw_have_their_stage_and_their_pipeline_s_name(player: Player) -> None:
    vertex, fragment = player.shader(0x40, b"A" * 50), player.shader(0x80, b"B" * 50)
    player.name(player.drawing_pipeline(vertex, 0, fragment), b"sky")
    player.call("draw", player.drawing({VERTEX: vertex, FRAGMENT: fragment}))
    assert [row["name"] for row in player.launches()] == [b"", b""], "the recorder gives them"
    chunks = [
        (int(chunk["address"]) - WINDOW[0], ChunkOf(int(chunk["what"])), chunk["data"].tobytes()[: chunk["bytes"]])
        for chunk in player.probes.chunks.read()
    ]
    assert set(chunks) == {
        (0x40, ChunkOf.NAME, b"sky"),
        (0x40, ChunkOf.VERTEX, b"A" * 50),
        (0x80, ChunkOf.NAME, b"sky"),
        (0x80, ChunkOf.FRAGMENT, b"B" * 50),
    }


def test_a_pipeline_names_no_shader_that_lies_behind_it(player: Player) -> None:
    # given: a pipeline that dispatches, with a pointer to another's shader where one that draws would have its own
    vertex, own = player.shader(0x40, b"A" * 50), player.shader(0x80, b"B" * 50)
    data = bytearray(STAGES_IN_PIPELINE + STRIDE * 5)
    struct.pack_into("<Q", data, SHADER_IN_PIPELINE, own)
    struct.pack_into("<Q", data, STAGES_IN_PIPELINE, vertex)
    player.name(player.block(bytes(data)), b"reduce")
    player.call("draw", player.drawing({VERTEX: vertex}))
    player.call("dispatch", player.commands(own))
    assert [row["name"] for row in player.launches()] == [b"", b"reduce"]
    named = [int(chunk["address"]) for chunk in player.probes.chunks.read() if chunk["what"] == ChunkOf.NAME]
    assert named == [WINDOW[0] + 0x80]


@pytest.mark.parametrize("address", NOWHERE[1:])
def test_forged_shaders_of_draws_are_counted(player: Player, address: int) -> None:
    vertex = player.shader(0x40, b"A" * 50)
    commands = player.drawing({VERTEX: vertex, FRAGMENT: address})
    for _ in range(3):
        player.call("draw", commands)
    player.call("end", commands)
    assert drawn(player.launches()) == [(0x40, 1), (-WINDOW[0], 1), (0x40, 2), (-WINDOW[0], 2)]
    player.call("draw", address)
    assert not (player.launches()["address"]).any()


def test_a_forged_shader_is_unreadable_as_often_as_it_draws(player: Player) -> None:
    commands = player.drawing({VERTEX: 0x10})
    for _ in range(3):
        player.call("draw", commands)
    player.call("end", commands)
    assert player.counted()[Counter.HANDLES_UNREADABLE] == 3
