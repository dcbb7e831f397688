"""The spool survives whatever happens to its end."""

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.record.capture.spool import FrameKind, Spool, SpoolError, SpoolReader


def write(path: Path) -> list[tuple[FrameKind, bytes]]:
    spool = Spool(path)
    frames = [
        (FrameKind.HEADER, b"{}"),
        (FrameKind.STALLS, bytes(range(64))),
        (FrameKind.LOSS, b""),
        (FrameKind.END, b"{}"),
    ]
    for kind, payload in frames:
        spool.write(kind, payload[:3], payload[3:], time=5, begin=4, source=1, part=2)
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
    assert {(f.time, f.begin, f.source, f.part) for f in frames} == {(5, 4, 1, 2)}
    assert reader.cut == 0
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_cut_at_every_byte(tmp_path: Path) -> None:
    # given a spool, and its length after each frame
    written = write(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    ends = list(accumulate((36 + len(payload) for _, payload in written), initial=8))
    assert ends[-1] == len(data)
    for length in range(8, len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        # when
        reader = SpoolReader(tmp_path / "cut")
        frames = [(f.kind, f.payload) for f in reader.frames()]
        # then the whole frames are there, and the rest is counted
        whole = bisect_right(ends, length) - 1
        assert frames == written[:whole]
        assert reader.cut == length - ends[whole]


def test_a_header_that_was_damaged_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path / "s")
    data = bytearray((tmp_path / "s").read_bytes())
    data[8 + 36 + 2 + 20] ^= 1  # in the second frame's header
    (tmp_path / "s").write_bytes(data)
    reader = SpoolReader(tmp_path / "s")
    assert [f.kind for f in reader.frames()] == [FrameKind.HEADER]
    assert reader.cut > 0


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
        spool.write(FrameKind.STALLS, b"x" * 16_000, time=7, begin=5, part=2)
    # then
    frames = list(SpoolReader(tmp_path / "s").frames())
    assert [(f.kind, f.begin, f.time) for f in frames] == [(FrameKind.LOSS, 5, 7)]
    loss = json.loads(frames[0].payload)
    assert (loss["what"], loss["count"]) == ("unwritten", 1000)
