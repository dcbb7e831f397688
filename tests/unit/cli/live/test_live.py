"""A live view of spools written by hand: sums, names, what is forgotten, and the screen with its costs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.cli.live import sums
from iaprof.cli.live.display import LiveView
from iaprof.cli.live.state import LiveState
from iaprof.formats.profile import Profile
from iaprof.formats.wire.launches import LAUNCH, LaunchFlags
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.spool import FrameKind, Spool
from iaprof.report.gpu.module import GpuModuleLoader
from unit.capturing import record
from unit.profiles import rows
from unit.zebins import debug_elf
from waiting import LONGEST_WAIT_S

ELF = debug_elf("bmg", "matmul")
KERNEL = read_zebin(ELF).kernels[0]
STREAM = {"layout": "xe2", "ip_version": [20, 1, 0], "subsample": 2}


@pytest.fixture(scope="module")
def loader() -> Iterator[GpuModuleLoader]:
    with GpuModuleLoader() as found:
        yield found


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "live.spool")
    made.write(FrameKind.HEADER, json.dumps({"streams": []}).encode())
    made.write(FrameKind.APPEND, json.dumps({"streams": [STREAM]}).encode())
    yield made
    made.close()


def stalls(spool: Spool, *records: tuple[int, int]) -> None:
    words = np.array(records, np.uint64).T.copy()
    spool.write(FrameKind.STALLS, words.tobytes(), time=1, shape=2)


def launched(spool: Spool, address: int, pid: int, count: int = 1, **more: Any) -> None:
    found = np.zeros(count, LAUNCH)
    fields = {"address": address, "pid": pid, "size": 64, "comm": b"app", "name": b"scale"} | more
    for name, value in fields.items():
        found[name] = value
    spool.write(FrameKind.LAUNCHES, found.tobytes(), time=1)


def module(spool: Spool, elf: bytes) -> None:
    about = json.dumps({"pid": 1, "path": "m", "digest": "", "size": len(elf), "content": True}).encode()
    spool.write(FrameKind.KERNEL, about, elf, time=1, shape=len(about))


def shown(state: LiveState) -> set[tuple[str, str, int, str, int]]:
    """Process, kernel, offset, reason and samples."""
    profile: Profile = state.contents("", "", 1.0).profile
    return {
        (
            f"{row.launch.comm} {row.launch.pid}" if row.launch else "",
            row.kernel.symbol if row.kernel else "".join(row.code.functions),
            row.offset,
            reason,
            int(count),
        )
        for row in rows(profile)
        for reason, count in zip(profile.reasons, row.counts, strict=True)
        if count
    }


def test_stalls_are_added_up_as_the_spool_grows(spool: Spool, loader: GpuModuleLoader) -> None:
    # given
    state = LiveState(spool.path, loader)
    launched(spool, 0x10_0000_2000, 7)
    stalls(spool, record(0x2010, sbid=3, active=1), record(0x9000, other=1))
    # when
    state.read()
    # then a record stands for two samples
    first = {("app 7", "scale", 0x10, "sbid", 6), ("app 7", "scale", 0x10, "active", 2), ("", "", 0x9000, "other", 2)}
    assert shown(state) == first
    # when
    stalls(spool, record(0x2010, sbid=1))
    launched(spool, 0x10_0000_2000, 8)
    state.read()
    # then
    ambiguous = "[ambiguous: 2 processes] 0"
    assert shown(state) == {
        (ambiguous, "scale", 0x10, "sbid", 8),
        (ambiguous, "scale", 0x10, "active", 2),
        ("", "", 0x9000, "other", 2),
    }
    assert state.position == spool.size
    # when
    state.clear()
    # then
    assert shown(state) == set()


def test_kernels_get_their_names_and_instructions_from_their_modules(spool: Spool, loader: GpuModuleLoader) -> None:
    # given
    state = LiveState(spool.path, loader)
    module(spool, ELF)
    stalls(spool, record(KERNEL.address + 0x10, sbid=1))
    # when
    state.read()
    contents = state.contents("", "", 1.0)
    # then
    (row,) = rows(contents.profile)
    assert row.kernel is not None
    assert (row.kernel.symbol, row.offset, row.code.mnemonic) == ("multiply_basic", 0x10, "and")
    assert contents.listing is not None
    assert contents.listing(contents.profile, "multiply_basic", 80)[2].startswith("2 samples, 100.0 % of all")


def test_launches_are_counted_per_second_by_kernel(spool: Spool, loader: GpuModuleLoader) -> None:
    # given
    state = LiveState(spool.path, loader)
    launched(spool, 0x2000, 7, 30)
    launched(spool, 0x2000, 8, 10)
    launched(spool, 0x5000, 8, 10, name=b"")
    launched(spool, 0x2000, 8, 99, flags=LaunchFlags.BAD_ARGS)
    # when
    state.read()
    # then
    assert state.contents("", "", 2.0).launches == {"scale": 20.0, "0x5000": 5.0}
    # when
    state.read()
    # then
    assert state.contents("", "", 2.0).launches == {"scale": 0.0, "0x5000": 0.0}


def test_what_was_read_can_be_released(spool: Spool, loader: GpuModuleLoader) -> None:
    # given
    state = LiveState(spool.path, loader)
    for _ in range(100):
        stalls(spool, *[record(0x2010, sbid=1)] * 500)
    os.fsync(spool.fileno())
    state.read()
    before = spool.path.stat().st_blocks
    # when
    spool.release(state.position // 4096 * 4096)
    stalls(spool, record(0x2010, sbid=1))
    state.read()
    # then
    assert spool.path.stat().st_blocks < before / 2
    assert shown(state) == {("", "", 0x2010, "sbid", 100_002)}
    assert state.damaged == 0


def test_more_instructions_than_there_is_room_for_are_counted_as_others(
    spool: Spool, loader: GpuModuleLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    monkeypatch.setattr(sums, "MOST_ADDRESSES", 10)
    state = LiveState(spool.path, loader)
    stalls(spool, *(record(0x1000 + 16 * at, sbid=at + 1) for at in range(20)))
    # when
    state.read()
    # then
    found = shown(state)
    assert {(offset, count) for _, name, offset, _, count in found if not name} == {
        (0x1000 + 16 * at, 2 * (at + 1)) for at in range(15, 20)
    }
    assert [count for _, name, _, _, count in found if name] == [2 * sum(range(1, 16))]


def test_launches_by_more_processes_than_there_is_room_for_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    monkeypatch.setattr(sums, "MOST_LAUNCHES", 3)
    launches = sums.LaunchSums()
    for pid in (1, 2, 3, 1, 4):
        found = np.zeros(1, LAUNCH)
        found["pid"] = pid
        # when
        launches.add(found)
    # then
    assert [pid for _, pid in launches.all] == [3, 1, 4]


@pytest.mark.parametrize(
    ("kind", "payload", "shape"),
    [
        (FrameKind.STALLS, b"123", 2),
        (FrameKind.STALLS, bytes(24), 3),
        (FrameKind.LAUNCHES, b"123", 0),
        (FrameKind.KERNEL, b"{}", 2),
        (FrameKind.APPEND, b'{"streams": [7]}', 0),
    ],
)
def test_damaged_frames_are_counted(
    spool: Spool, loader: GpuModuleLoader, kind: FrameKind, payload: bytes, shape: int
) -> None:
    # given
    state = LiveState(spool.path, loader)
    spool.write(kind, payload, shape=shape)
    # when
    state.read()
    # then
    assert state.damaged == 1


def test_the_screen_shows_kernels_with_rates_and_costs(spool: Spool, loader: GpuModuleLoader) -> None:
    # given
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipe, printed = os.pipe()
    os.write(printed, b"hello\x1b[2J\n")
    view = LiveView("live: ./app", LiveState(spool.path, loader), theirs, pipe)
    launched(spool, 0x2000, 7, 1000)
    stalls(spool, record(0x2010, sbid=3, active=1))
    status = {"seconds": 2.0, "records": 4000, "launches": 10, "lost": 1, "losses": 1, "bytes": 1 << 20, "cpu_s": 0.1}

    def screen() -> str:
        strips = view.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    async def until(*wanted: str) -> list[str]:
        async with asyncio.timeout(LONGEST_WAIT_S):
            while not all(each in screen() for each in wanted):
                await asyncio.sleep(0.05)
        return screen().splitlines()

    async def run() -> tuple[list[str], list[str]]:
        async with view.run_test(size=(130, 14)) as pilot:
            ours.send(json.dumps(status).encode())
            lines = await until("records/s", "scale")
            await pilot.press("v")
            return lines, await until("hello")

    # when
    lines, output = asyncio.run(run())
    # then
    assert lines[0] == " live: ./app"
    assert lines[1].startswith(
        " 8 samples, 25.0 % active; 2,000 records/s; 5 launches/s; lost 1; CPU: recorder 5.0 %, view "
    )
    assert lines[2] == "    SAMPLES    SHARE  LAUNCHES/S  TOP REASON        KERNEL"
    assert lines[3].split()[:3] == ["8", "100.0", "%"]
    assert lines[3].endswith("sbid 75 %         ▸ scale")
    assert output[:2] == [" What was printed", "hello\\x1b[2J"]
    assert json.loads(ours.recv(1 << 16)) == {"read": spool.size}
    for each in (ours, theirs):
        each.close()
    for fd in (pipe, printed):
        os.close(fd)
