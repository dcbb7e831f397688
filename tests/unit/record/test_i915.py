"""Intel's i915 from outside the Linux kernel: what is made of its answers, its refusals, its flags and its resets."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.basics.errors import UsageError
from iaprof.gpu.intel import records
from iaprof.record.sources import i915, intel, render_nodes, stalls
from iaprof.record.sources.render_nodes import DeviceError
from iaprof.record.sources.stall_driver import POLL_NS, Device, Engine, Gt, NotPermitted, OtherDriver, StreamBusy
from iaprof.record.sources.stalls import StallLoss, StallRead, StallStream
from unit.record.test_devices import device

PVC = Gt(0, 0, (12, 60, 0), 64)


def refusal(error: int) -> OSError:
    return OSError(error, os.strerror(error))


# ---- what the driver answers ----


class Driver:
    """Answers ioctls as the driver does, of a GPU whose engines are told apart from their numbers on purpose."""

    # By class and instance: the tile.
    engines = {(1, 0): 1, (4, 0): 1, (4, 1): 0, (4, 2): 1, (1, 1): 0}  # noqa: RUF012

    def __init__(self) -> None:
        self.device_id = 0x0BD6
        self.version: tuple[int, ...] = (12, 60)
        self.nearest = 0  # the distance to an engine's own memory
        self.memories = 2
        self.opened: list[tuple[int, dict[int, int]]] = []
        self.refuses: Callable[[dict[int, int]], int] = lambda properties: 0
        self.resets = 0

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        match request:
            case 0xC0106446:
                param, _, address = struct.unpack("<iiQ", argument)
                ctypes.c_int.from_address(address).value = {4: self.device_id, 32: 47}[param]
            case 0xC0106479:
                (address,) = struct.unpack_from("<Q", argument, 8)
                query, length, flags, data = struct.unpack("<QiIQ", ctypes.string_at(address, 24))
                answer = self.query(query, flags, ctypes.string_at(data, length) if length > 0 else b"")
                if isinstance(answer, bytes) and length:
                    ctypes.memmove(data, answer, min(len(answer), length))
                size = len(answer) if isinstance(answer, bytes) else answer
                ctypes.c_int.from_address(address + 8).value = size
            case 0x40106476:
                flags, count, address = struct.unpack("<IIQ", argument)
                numbers = struct.unpack(f"<{2 * count}Q", ctypes.string_at(address, 16 * count))
                properties = dict(zip(numbers[::2], numbers[1::2], strict=True))
                self.opened.append((flags, properties))
                if error := self.refuses(properties):
                    raise refusal(error)
                return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            case 0xC0186472:
                struct.pack_into("<I", argument, 8, self.resets)
            case _:
                raise refusal(errno.ENOTTY)
        return 0

    def query(self, query: int, flags: int, asked: bytes) -> bytes | int:
        match query:
            case 0x1000D:
                rows = (struct.pack("<HH52x", *engine) for engine in self.engines)
                return struct.pack("<I12x", len(self.engines)) + b"".join(rows)
            case 0x10005:
                engine_class, instance, memory_class, memory, _ = struct.unpack_from("<HHHHi", asked)
                if memory >= self.memories or memory_class != 1:
                    return -errno.EINVAL
                near = self.engines[engine_class, instance] == memory
                return asked[:8] + struct.pack("<i", self.nearest if near else 1000 + self.nearest) + bytes(12)
            case 0x10008:
                tile = self.engines[flags & 0xFF, flags >> 8]
                head = struct.pack("<8H", 0, 1, 64, 8, 1, 8, 9, 1)
                return head + b"\x01" + (b"\xff" * 7 + bytes([0x0F, 0x7F][tile : tile + 1])) + bytes(64)
            case 0x1000C:
                return asked[:5] + bytes((*self.version, 3)) if self.version else -errno.EINVAL
        return -errno.EINVAL


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    made = Driver()
    monkeypatch.setattr(fcntl, "ioctl", made.ioctl)
    monkeypatch.setattr(i915, "DRM", str(tmp_path))
    monkeypatch.setattr(i915, "card_name", lambda path: "card0")
    monkeypatch.setattr(i915, "pci_address", lambda path: "0000:4d:00.0")
    monkeypatch.setattr(i915, "pci_number", lambda path, name: 0)
    monkeypatch.setattr(i915, "device_name", lambda vendor, device: "")
    monkeypatch.setattr(i915, "open_node", lambda path: os.open("/dev/null", os.O_RDONLY))
    (tmp_path / "card0/gt/gt0/error_counter").mkdir(parents=True)
    (tmp_path / "card0/prelim_uapi_version").write_text("2.0\n")
    return made


def described() -> Device:
    return intel.MAX_I915.describe(-1, "/dev/dri/renderD128")


@pytest.mark.parametrize("nearest", [0, 10])
def test_engines_lead_to_tiles_by_their_distances(driver: Driver, nearest: int) -> None:
    driver.nearest = nearest
    found = described()
    assert (found.driver, found.card, found.pci_address) == ("i915", "card0", "0000:4d:00.0")
    assert (found.device_id, found.revision, found.name) == (0x0BD6, 47, "Ponte Vecchio (Xe-HPC)")
    assert found.gts == (Gt(0, 0, (12, 60, 0), 60), Gt(1, 1, (12, 60, 0), 63))
    assert found.engines == tuple(Engine(*engine, tile) for engine, tile in driver.engines.items())
    assert found.rates == tuple(251 * step for step in range(1, 8))
    assert [found.layout(gt) for gt in found.gts] == [records.PVC, records.PVC]


def test_without_device_memory_there_is_one_tile(driver: Driver) -> None:
    driver.memories = 0
    assert [gt.tile for gt in described().gts] == [0]


@pytest.mark.parametrize(("device_id", "sampled"), [(0x0BD5, True), (0x0B6E, True), (0x56C0, False)])
def test_an_older_driver_is_known_by_the_id(driver: Driver, device_id: int, sampled: bool) -> None:
    driver.device_id, driver.version = device_id, ()
    if sampled:
        assert described().gts[0].ip_version == (12, 60, 0)
    else:
        with pytest.raises(DeviceError, match="only a Data Center GPU Max"):
            described()


def test_a_flex_cannot_be_sampled(driver: Driver) -> None:
    driver.version = 12, 55
    with pytest.raises(DeviceError, match="has no EU stall sampling: under Intel's i915"):
        described()


def test_linux_s_own_i915_is_another_driver(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "card0/prelim_uapi_version").unlink()
    with pytest.raises(OtherDriver, match="is driven by i915; EU stalls need Intel's xe driver"):
        described()
    monkeypatch.setattr(i915, "pci_number", lambda path, name: 0x0BDB)
    with pytest.raises(DeviceError, match="package intel-i915-dkms"):
        described()


@pytest.mark.parametrize("answer", [b"", b"\0" * 8, -errno.EACCES, 1 << 30])
def test_a_driver_that_answers_nonsense_is_one_sentence(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, answer: bytes | int
) -> None:
    monkeypatch.setattr(driver, "query", lambda *_: answer)
    monkeypatch.setattr(intel, "open_node", lambda path: os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(intel, "driver_name", lambda fd: "i915")
    with pytest.raises(DeviceError, match=r"does not answer as the i915 driver does|has no EU stall sampling"):
        intel.open_device("/dev/dri/renderD128")


@pytest.mark.parametrize(
    ("head", "masks", "count"),
    [
        ((0, 1, 64, 8, 1, 8, 9, 1), b"\x01" + b"\xff" * 8, 64),
        ((0, 2, 8, 8, 2, 1, 4, 1), b"\x03\0\x0f\x03" + b"\xff" * 9, 6),
        ((0, 9, 8, 8, 60000, 9, 4, 1), b"\x03" * 8, 0),
    ],
)
def test_xecores_are_counted_in_the_masks(head: tuple[int, ...], masks: bytes, count: int) -> None:
    assert i915._count_xecores(struct.pack("<8H", *head) + masks) == count


# ---- opening ----


def test_the_properties_of_a_stream(driver: Driver) -> None:
    found = described()
    for gt, instance in zip(found.gts, (1, 0), strict=True):
        os.close(intel.MAX_I915.open_stream(found, gt, 753))
        flags, properties = driver.opened[-1]
        assert flags == 1 | 2 | 4 | 0x10000
        assert properties == {1001: 512 << 10, 1002: 3, 1003: 5_000_000, 1004: 4, 1005: instance, 1006: 1}


def test_a_driver_without_the_last_property_is_opened_without_it(driver: Driver) -> None:
    driver.refuses = lambda properties: errno.EINVAL if 1006 in properties else 0
    found = described()
    os.close(intel.MAX_I915.open_stream(found, found.gts[0], 251))
    assert [1006 in properties for _, properties in driver.opened] == [True, False]
    with pytest.raises(DeviceError, match="refuses an EU-stall stream: Invalid argument"):
        intel.MAX_I915.open_stream(found, found.gts[0], 251, wait_num_reports=2)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (errno.EBUSY, StreamBusy, r"\(GT 0\) is held by another profiler"),
        (errno.EACCES, NotPermitted, "with sudo, or as root: sysctl dev.i915.perf_stream_paranoid=0"),
        (errno.EPERM, DeviceError, "only a Data Center GPU Max"),
        (errno.EINVAL, DeviceError, "refuses an EU-stall stream: Invalid argument"),
        (errno.ENOMEM, DeviceError, "refuses an EU-stall stream: Cannot allocate memory"),
    ],
)
def test_refusals_are_sentences(driver: Driver, error: int, kind: type[DeviceError], said: str) -> None:
    driver.refuses = lambda properties: error
    found = described()
    with pytest.raises(kind, match=said):
        intel.MAX_I915.open_stream(found, found.gts[0], 251)


def test_rates_are_steps_of_251_cycles(driver: Driver) -> None:
    found = described()
    assert intel.pick_rate(found, "1255") == 1255
    for rate in ("250", "2008", "5"):
        with pytest.raises(
            UsageError, match=rf"card0 has no sampling rate '{rate}': it has fastest, .*251, 502, .*1757"
        ):
            intel.pick_rate(found, rate)


# ---- reading ----


def read_records(count: int, xecores: range, dropped: set[int]) -> bytes:
    """Records of some XeCores, as the driver writes them."""
    made = np.random.default_rng(3).integers(0, 1 << 63, (count, 8)).astype(np.uint64)
    made[:, 2:] = 0
    for place in range(count):
        xecore = xecores[place % len(xecores)]
        made[place, 6] = xecore | (0x100 if xecore in dropped else 0) << 16
    return made.tobytes()


class Reads:
    """A stream whose reads return, in turn, what they are given: records, or an errno; then EAGAIN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.todo = 1_000_000_000_000, list[bytes | int]()
        self.resets, self.enabled, self.opened = 3, 0, 0
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(os, "readv", self.readv)
        monkeypatch.setattr(os, "close", lambda fd: None)
        monkeypatch.setattr(intel.MAX_I915, "open_stream", self.open_stream)
        monkeypatch.setattr(intel.MAX_I915, "enable_stream", self.enable_stream)
        monkeypatch.setattr(intel.MAX_I915, "disable_stream", lambda fd: None)
        monkeypatch.setattr(intel.MAX_I915, "resets", lambda device, gt: self.resets)
        monkeypatch.setattr(render_nodes, "pci_address", lambda path: "0000:03:00.0")

    def open_stream(self, *_: object) -> int:
        self.opened += 1
        return 1 << 20

    def enable_stream(self, *_: object) -> None:
        self.enabled += 1

    def readv(self, fd: int, buffers: list[Any]) -> int:
        self.now += 1_000_000
        todo = self.todo.pop(0) if self.todo else errno.EAGAIN
        if isinstance(todo, int):
            raise refusal(todo) if todo != errno.EAGAIN else BlockingIOError
        buffers[0][: len(todo)] = todo
        return len(todo)

    def stream(self, subsample: int = 1) -> StallStream:
        return StallStream(device(driver="i915", gts=(PVC,)), PVC, 251, records.PVC, subsample)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    with monkeypatch.context() as patch:
        yield Reads(patch)


def test_a_flag_is_a_loss_that_names_its_xecores(reads: Reads) -> None:
    # given reads of which the second one says that XeCores 2 and 4 to 6 dropped records
    stream = reads.stream()
    stream.resume()
    started = reads.now
    clean = read_records(50, range(8), set())
    reads.todo = [clean, read_records(80, range(8), {2, 4, 5, 6}), clean]
    # when
    found = [stream.read() for _ in range(5)]
    # then the records are read, without the flags, and the loss comes with the next call
    first, second, loss, third, nothing = found
    assert isinstance(first, StallRead) and isinstance(second, StallRead) and isinstance(third, StallRead)
    assert [len(each.words[0]) for each in (first, second, third)] == [50, 80, 50]
    assert [len(each.words) for each in (first, second, third)] == [2, 2, 2]
    assert nothing is None
    assert loss == StallLoss(
        "overflow",
        "the hardware's buffers of XeCores 2, 4-6 were full: it dropped records, and does not report how many",
        started,
        second.time_ns,
    )


def test_an_overflow_lies_between_the_last_empty_buffers_and_the_read(reads: Reads) -> None:
    stream = reads.stream()
    stream.resume()
    reads.now += 50_000_000
    assert stream.read() is None
    emptied = reads.now - 1_000_000 - POLL_NS
    reads.now += 50_000_000
    clean, full = read_records(9, range(3), set()), read_records(9, range(3), {1})
    reads.todo = [clean, full]
    assert isinstance(stream.read(), StallRead)
    reads.now += 50_000_000  # the reader is slow
    assert isinstance(stream.read(), StallRead)
    loss = stream.read()
    assert isinstance(loss, StallLoss)
    assert (loss.begin_ns, loss.time_ns) == (emptied, reads.now)
    assert " of XeCore 1 were full" in loss.detail


def test_a_flag_counts_whatever_is_kept_of_the_records(reads: Reads) -> None:
    stream = reads.stream(subsample=1000)
    stream.resume()
    made = bytearray(read_records(4000, range(8), set()))
    struct.pack_into("<HH", made, 64 * 3333 + 48, 63, 0x100)
    reads.todo = [bytes(made)]
    assert isinstance(stream.read(), StallRead)
    loss = stream.read()
    assert isinstance(loss, StallLoss)
    assert "XeCore 63 " in loss.detail


def test_a_flag_of_the_last_read_is_told_at_the_end(reads: Reads) -> None:
    stream = reads.stream()
    stream.resume()
    reads.todo = [read_records(4, range(1), {0})]
    assert isinstance(stream.read(), StallRead)
    assert [loss.what for loss in stream.unfinished()] == ["overflow"]


def test_other_flags_are_no_losses() -> None:
    made = np.zeros((4, 8), np.uint64)
    made[:, 6] = 0xFEFF_FFFF | 0xFF << 32
    assert list(intel.MAX_I915.dropping(made)) == []
    made[2, 6] = 1 << 24 | 7
    assert list(intel.MAX_I915.dropping(made)) == [7]
    assert list(intel.MAX_I915.dropping(made[:0])) == []
    made[:, 6] = 1 << 24
    assert list(intel.XE.dropping(made)) == []


def test_eio_is_a_stream_that_ended_and_not_an_overflow(reads: Reads) -> None:
    stream = reads.stream()
    stream.resume()
    reads.todo = [errno.EIO]
    loss = stream.read()
    assert isinstance(loss, StallLoss)
    assert (loss.what, stream.fileno()) == ("stream", None)
    assert "Input/output error" in loss.detail


def test_a_reset_that_is_counted_ends_the_stream(reads: Reads) -> None:
    # given a stream that is read, when the driver counts one more reset
    stream = reads.stream()
    stream.resume()
    reads.now += 1_000_000_000
    assert stream.reset_meanwhile() is None
    asked = reads.now
    assert stream.read() is None
    reads.now += 1_000_000_000
    reads.resets += 1
    loss = stream.reset_meanwhile()
    # then the loss begins when the count was known to be as before, and the stream is opened again
    assert isinstance(loss, StallLoss)
    assert (loss.what, loss.begin_ns, loss.time_ns) == (
        "reset",
        asked + 1_000_000 - 1_000_000 - POLL_NS,
        reads.now,
    )
    reads.now += stalls.REOPEN_NS
    gap = stream.read()
    assert isinstance(gap, StallLoss)
    assert (gap.what, gap.begin_ns, gap.time_ns) == ("gap", loss.begin_ns, reads.now)
    assert (reads.opened, reads.enabled) == (2, 2)
    assert stream.reset_meanwhile() is None


@pytest.mark.parametrize("counts", [(None, None), (None, 4), (4, None)])
def test_a_count_that_is_not_known_is_no_reset(reads: Reads, counts: tuple[int | None, int | None]) -> None:
    before, after = counts
    reads.resets = before  # type: ignore[assignment]
    stream = reads.stream()
    stream.resume()
    reads.resets = after  # type: ignore[assignment]
    assert stream.reset_meanwhile() is None
    assert stream.fileno() is not None


def test_a_reset_during_a_pause_is_noticed_when_sampling_goes_on(reads: Reads) -> None:
    stream = reads.stream()
    stream.resume()
    assert stream.read() is None
    stream.pause()
    reads.resets += 1
    loss = stream.resume()
    assert loss is not None
    assert (loss.what, stream.fileno()) == ("reset", None)


def test_what_was_sampled_before_a_pause_may_come_after_it(reads: Reads) -> None:
    # given records that the driver had not seen yet when sampling was paused
    stream = reads.stream()
    stream.resume()
    reads.now += 100_000_000
    assert stream.read() is None
    before = reads.now - 1_000_000 - POLL_NS
    stream.pause()
    assert stream.read() is None
    reads.now += 1_000_000_000
    assert stream.resume() is None
    # when they come with the first poll afterwards
    assert stream.read() is None
    reads.now += POLL_NS
    reads.todo = [read_records(4, range(1), set())] * 2
    first = stream.read()
    second = stream.read()
    # then their time begins before the pause, and that of the next ones does not
    assert isinstance(first, StallRead) and isinstance(second, StallRead)
    assert first.begin_ns == before
    assert second.begin_ns > reads.now - 10_000_000


def test_resets_are_those_of_the_gpu_and_of_engines(driver: Driver, tmp_path: Path) -> None:
    found = described()
    driver.resets = 5
    assert intel.MAX_I915.resets(found, found.gts[0]) == 5
    (tmp_path / "card0/gt/gt0/error_counter/engine_reset").write_text("7\n")
    assert [intel.MAX_I915.resets(found, gt) for gt in found.gts] == [12, 5]
    assert intel.XE.resets(device(), device().gts[0]) is None
