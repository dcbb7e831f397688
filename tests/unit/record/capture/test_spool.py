"""The spool survives whatever happens to its end."""

import json
import secrets
import subprocess
import sys
import time
import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.record.spool import (
    _CHECK,
    _FRAME,
    _MARK,
    _SEARCHED_FIRST,
    VERSION,
    FrameKind,
    Spool,
    SpoolError,
    SpoolReader,
    framed,
)

START, HEAD = 16, 48  # bytes of the spool's beginning, and of a frame's header


def write(path: Path) -> list[tuple[FrameKind, bytes]]:
    spool = Spool(path)
    frames = [
        (FrameKind.HEADER, b"{}"),
        (FrameKind.STALLS, bytes(range(64))),
        (FrameKind.LOSS, b""),
        (FrameKind.END, b"{}"),
    ]
    for kind, payload in frames:
        spool.write(kind, payload[:3], payload[3:], time=5, begin=4, source=1, shape=2)
    spool.close()
    return frames


def test_frames_come_back_as_written(tmp_path: Path) -> None:
    # given
    written = write(tmp_path / "s")
    # when
    reader = SpoolReader(tmp_path / "s")
    frames = list(reader.frames())
    # then
    assert [(f.kind, f.payload) for f in frames] == written
    assert {(f.time, f.begin, f.source, f.shape) for f in frames} == {(5, 4, 1, 2)}
    assert reader.cut == 0
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_cut_at_every_byte(tmp_path: Path) -> None:
    # given a spool, and its length after each frame
    written = write(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    ends = list(accumulate((HEAD + len(payload) for _, payload in written), initial=START))
    assert ends[-1] == len(data)
    for length in range(START, len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        # when
        reader = SpoolReader(tmp_path / "cut")
        frames = [(f.kind, f.payload) for f in reader.frames()]
        # then the whole frames are there, and the rest is counted
        whole = bisect_right(ends, length) - 1
        assert frames == written[:whole]
        assert reader.cut == length - ends[whole]


RECORDS = [FrameKind.LAUNCHES, FrameKind.STACKS, FrameKind.PYTHON, FrameKind.CODES, FrameKind.COPY, FrameKind.WAITS]


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_compressed(tmp_path: Path, kind: FrameKind) -> None:
    # given records much like one another, in two buffers, and some that cannot be compressed
    like, random = bytes(range(64)) * 1000, secrets.token_bytes(5000)
    spool = Spool(tmp_path / "s")
    spool.write(kind, like[:999], like[999:], time=5)
    spool.write(kind, random, time=6)
    spool.close()
    # then they take little room, and come back as they were written
    assert spool.size < len(random) + len(like) // 20
    reader = SpoolReader(tmp_path / "s")
    frames = list(reader.frames())
    assert [frame.payload for frame in frames] == [like, random]
    assert [reader.frame_at(frame.position).payload for frame in frames] == [like, random]
    # also while they are read once more
    assert [reader.frame_at(frames[0].position).payload + frame.payload for frame in reader.frames()] == [
        like + like,
        like + random,
    ]


@pytest.mark.parametrize("size", [0, 1, 63, 65, 1 << 20, (1 << 30) + 1])
def test_a_compressed_frame_of_another_size_than_its_header_says_is_damaged(tmp_path: Path, size: int) -> None:
    # given a frame of 64 bytes that somebody has made, whose checksums are right
    stored = zlib.compress(bytes(64))
    head = _FRAME.pack(FrameKind.LAUNCHES, 0, 0, len(stored), size, 5, 4, zlib.crc32(stored))
    spool = Spool(tmp_path / "s")
    spool.close()
    with (tmp_path / "s").open("ab") as file:
        file.write(_CHECK.pack(_MARK, zlib.crc32(head)) + head + stored)
    # then
    reader = SpoolReader(tmp_path / "s")
    assert list(reader.frames()) == []
    assert losses(reader) == [("damaged", 1)]


def losses(reader: SpoolReader) -> list[tuple[str, int]]:
    return [(what, count) for _, _, what, count, _ in reader.losses(9)]


@pytest.mark.parametrize("at", [0, 7, 8, 11, 12, 20, HEAD - 1])
def test_a_damaged_header_costs_its_frame(tmp_path: Path, at: int) -> None:
    written = write(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    for number, begin in enumerate((START, START + HEAD + 2)):  # of the first two frames
        other = bytearray(data)
        other[begin + at] ^= 1
        (tmp_path / "s").write_bytes(other)
        reader = SpoolReader(tmp_path / "s")
        assert [(f.kind, f.payload) for f in reader.frames()] == written[:number] + written[number + 1 :]
        assert losses(reader) == [("overwritten", HEAD + len(written[number][1]))]
        assert reader.cut == 0


@pytest.mark.parametrize("at", range(8, START))
def test_a_flipped_bit_of_the_spools_own_mark_costs_nothing(tmp_path: Path, at: int) -> None:
    written = write(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    data[at] ^= 1
    (tmp_path / "s").write_bytes(data)
    reader = SpoolReader(tmp_path / "s")
    assert [(f.kind, f.payload) for f in reader.frames()] == written
    assert losses(reader) == []


def test_a_flipped_bit_of_a_payload_costs_its_frame_and_is_told(tmp_path: Path) -> None:
    written = write(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    for at in range(64):
        other = bytearray(data)
        other[START + 2 * HEAD + 2 + at] ^= 0x10
        (tmp_path / "s").write_bytes(other)
        reader = SpoolReader(tmp_path / "s")
        assert [(f.kind, f.payload) for f in reader.frames()] == [written[0], *written[2:]]
        ((begin, time, what, count, detail),) = reader.losses(9)
        assert (begin, time, what, count) == (4, 5, "damaged", 1)
        assert detail == "frames of STALLS whose content was changed, 64 bytes"


@pytest.mark.parametrize(("first", "length"), [(0, 16 << 10), (40_000, 16 << 10), (100_001, 4096), (500_000, 1 << 18)])
def test_zeros_in_the_middle_cost_what_lay_there_and_no_more(tmp_path: Path, first: int, length: int) -> None:
    # given a spool of a thousand frames, in which a disk has put zeros
    spool = Spool(tmp_path / "s")
    for number in range(1000):
        spool.write(FrameKind.STALLS, number.to_bytes(4, "little") * 250, time=1000 + number)
    spool.close()
    data = bytearray((tmp_path / "s").read_bytes())
    begin = START + first
    data[begin : begin + length] = bytes(length)
    (tmp_path / "s").write_bytes(data)
    # when
    reader = SpoolReader(tmp_path / "s")
    numbers = [int.from_bytes(frame.payload[:4], "little") for frame in reader.frames()]
    # then all others are there, unchanged
    each = HEAD + 1000
    hit = set(range(first // each, -(-(first + length) // each)))
    assert set(range(1000)) - set(numbers) == hit
    assert numbers == sorted(numbers)
    told = list(reader.losses(9))
    lost = sum(count if what == "overwritten" else HEAD + 1000 for _, _, what, count, _ in told)
    assert lost == len(hit) * each
    assert all(0 <= begin <= time <= 2000 for begin, time, *_ in told)


@pytest.mark.parametrize("beside", range(-9, 10))
def test_a_frame_is_found_wherever_it_lies(tmp_path: Path, beside: int) -> None:
    # given that the next good header lies about where the first stretch that is searched ends, behind another mark
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.STALLS, _MARK.ljust(_SEARCHED_FIRST - HEAD + beside, b"\0"), time=5)
    spool.write(FrameKind.END, b"{}", time=6)
    spool.close()
    data = bytearray((tmp_path / "s").read_bytes())
    data[START + 20] ^= 1
    (tmp_path / "s").write_bytes(data)
    # then
    assert [frame.kind for frame in SpoolReader(tmp_path / "s").frames()] == [FrameKind.END]


def test_a_frame_that_is_in_a_payload_is_none(tmp_path: Path) -> None:
    # given a process that has made a payload a frame, as well as it can without the mark
    spool = Spool(tmp_path / "s")
    forged = b"".join(framed(FrameKind.HEADER, b'{"forged": 1}', mark=b"IAPSIAPS"))
    for _ in range(2):
        spool.write(FrameKind.LAUNCHES, forged, time=5)
    spool.close()
    # when the header before it is damaged
    data = bytearray((tmp_path / "s").read_bytes())
    data[START + 3] ^= 1
    (tmp_path / "s").write_bytes(data)
    # then
    assert [frame.kind for frame in SpoolReader(tmp_path / "s").frames()] == [FrameKind.LAUNCHES]
    # and each process has a mark of its own
    code = "from iaprof.record.spool import _MARK; print(_MARK.hex())"
    marks = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(marks) == 2


def test_marks_without_frames_take_no_long_time(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"IAPS" + VERSION.to_bytes(4, "little") + b"markmark" * (1 << 17))
    reader = SpoolReader(tmp_path / "s")
    begin = time.process_time()
    assert list(reader.frames()) == []
    assert losses(reader) == [("overwritten", (1 << 20) - 8)]
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("content", [b"", b"IAP", b"PAR1aaaa", b"IAPS\x09\0\0\0"])
def test_what_is_no_spool(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(SpoolError):
        SpoolReader(tmp_path / "s")


def test_a_spool_is_never_overwritten_and_no_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("s", "link"):
        with pytest.raises(IaprofError, match="exists"):
            Spool(tmp_path / name)
    assert not (tmp_path / "target").exists()


def test_a_full_disk_leaves_whole_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a disk that takes half of a frame and then nothing
    import os

    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.HEADER, b"{}")
    real, calls = os.writev, []

    def writev(fd: int, parts: list[memoryview]) -> int:
        calls.append(1)
        if len(calls) == 1:
            return real(fd, [parts[0][:20]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", writev)
    # when
    with pytest.raises(IaprofError, match="No space left"):
        spool.write(FrameKind.STALLS, b"x" * 100)
    # then
    reader = SpoolReader(tmp_path / "s")
    assert [f.kind for f in reader.frames()] == [FrameKind.HEADER]
    assert reader.cut == 0


def test_what_a_full_disk_has_no_room_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a disk that has room for a little, but not for a large frame
    import os

    spool = Spool(tmp_path / "s")
    real = os.writev

    def writev(fd: int, parts: list[memoryview]) -> int:
        if sum(map(len, parts)) > 1000:
            raise OSError(28, "No space left on device")
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", writev)
    # when
    with pytest.raises(IaprofError, match="No space left"):
        spool.write(FrameKind.STALLS, b"x" * 16_000, time=7, begin=5, shape=2)
    # then
    frames = list(SpoolReader(tmp_path / "s").frames())
    assert [(f.kind, f.begin, f.time) for f in frames] == [(FrameKind.LOSS, 5, 7)]
    loss = json.loads(frames[0].payload)
    assert (loss["what"], loss["count"]) == ("unwritten", 1000)
