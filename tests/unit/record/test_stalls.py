"""The three record layouts, compared with the driver's bit positions, which are repeated here."""

import os
from typing import Any

import numpy as np
import pytest

from iaprof.gpu.intel import generations, records
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.intel.records import RecordLayout
from iaprof.record.sources import intel
from iaprof.record.sources.stalls import StallLoss, StallRead, StallStream
from unit.record.test_devices import device

# First and last bit of each field, from the driver's structures.
PVC = {
    "ip": (0, 28), "active": (29, 36), "other": (37, 44), "control": (45, 52), "pipestall": (53, 60),
    "send": (61, 68), "dist_acc": (69, 76), "sbid": (77, 84), "sync": (85, 92), "inst_fetch": (93, 100),
}  # fmt: skip
XE2 = {
    "ip": (0, 28), "tdr": (29, 36), "other": (37, 44), "control": (45, 52), "pipestall": (53, 60),
    "send": (61, 68), "dist_acc": (69, 76), "sbid": (77, 84), "sync": (85, 92), "inst_fetch": (93, 100),
    "active": (101, 108), "ex_id": (109, 111), "end_flag": (112, 112),
}  # fmt: skip
XE3P = {
    "ip": (0, 60), "tdr": (61, 68), "other": (69, 76), "control": (77, 84), "pipestall": (85, 92),
    "send": (93, 100), "dist_acc": (101, 108), "sbid": (109, 116), "sync": (117, 124), "inst_fetch": (125, 132),
    "active": (133, 140), "ex_id": (141, 143), "end_flag": (144, 144),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "fields"), [(records.PVC, PVC), (records.XE2, XE2), (records.XE3P, XE3P)])
def test_every_field_of_random_records(layout: RecordLayout, fields: dict[str, tuple[int, int]]) -> None:
    # given records with random bits in every field, also those that are not kept
    random = np.random.default_rng(7)
    expected: dict[str, list[int]] = {name: [] for name in fields}
    raw = b""
    for _ in range(500):
        record = 0
        for name, (first, last) in fields.items():
            value = int.from_bytes(random.bytes(8), "little") & ((1 << (last - first + 1)) - 1)
            expected[name].append(value)
            record |= value << first
        raw += record.to_bytes(64, "little")
    # when they are reduced to their significant words and decoded
    words = layout.columns(np.frombuffer(raw, np.uint64).reshape(-1, 8))
    # then all fields are as before
    assert len(words) == layout.words
    assert layout.ips(words).tolist() == [(ip << 3) & (1 << 64) - 1 for ip in expected["ip"]]
    for reason in REASONS:
        assert layout.counts(words, reason).tolist() == expected.get(reason, [0] * 500), reason


@pytest.mark.parametrize(
    ("version", "layout"),
    [
        ((12, 60), records.PVC),
        ((20, 1), records.XE2),
        ((20, 4), records.XE2),
        ((30, 0), records.XE2),
        ((35, 10), records.XE3P),
        ((12, 55), None),
        ((12, 71), None),
    ],
)
def test_layout_by_ip_version(version: tuple[int, int], layout: RecordLayout | None) -> None:
    assert generations.layout(*version) is layout


@pytest.mark.parametrize(
    ("version", "layout"),
    [
        ((12, 60), None),
        ((20, 1), None),
        ((30, 4), None),
        ((35, 11), None),
        ((25, 0), records.XE2),
        ((34, 0), records.XE2),
        ((36, 0), records.XE3P),
        ((200, 3), records.XE3P),
    ],
)
def test_a_version_of_no_gpu_that_is_known_is_a_guess(version: tuple[int, int], layout: RecordLayout | None) -> None:
    """The decoder does not know it, either."""
    assert generations.is_guess(*version) is (layout is not None)
    assert (generations.platform_of(*version) is None) is (layout is not None)
    if layout is not None:
        assert generations.layout(*version) is layout


def test_a_read_of_no_whole_records_is_a_loss_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a driver that returns two records, then one and a half, then one
    there, driver = os.pipe()
    os.set_blocking(there, False)
    monkeypatch.setattr(intel.XE, "open_stream", lambda *_: there)
    monkeypatch.setattr(intel.XE, "enable_stream", lambda *_: None)
    unknown: Any = None
    stream = StallStream(device(), unknown, 100, records.XE2)
    stream.resume()
    found = []
    for length in (128, 96, 64):
        os.write(driver, bytes(length))
        found.append(stream.read())
    os.close(driver)
    stream.close()
    # then
    two, loss, one = found
    assert isinstance(two, StallRead)
    assert isinstance(loss, StallLoss)
    assert isinstance(one, StallRead)
    assert [len(words) for words in (two.words[0], one.words[0])] == [2, 1]
    assert (loss.what, loss.detail) == ("wrong length", "96 bytes, which are not whole records, were not read")
