"""`--control`: as other programs should use it, and misuse."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iaprof.basics.errors import UsageError
from iaprof.record.control import MAX_BYTES, Control
from unit.builds import no_descriptor_is_lost


def test_commands_come_in_pieces_and_are_answered(tmp_path: Path) -> None:
    # given
    for name in ("ctl", "ack"):
        os.mkfifo(tmp_path / name)
    control = Control(f"fifo:{tmp_path}/ctl,{tmp_path}/ack")
    writer = os.open(tmp_path / "ctl", os.O_WRONLY)
    reader = os.open(tmp_path / "ack", os.O_RDONLY | os.O_NONBLOCK)
    # when
    os.write(writer, b"enable\ndis")
    first = list(control.read())
    os.write(writer, b"able\n\nbl\x1b[2Jah\n")
    second = list(control.read())
    control.acknowledge()
    # then
    assert first == ["enable"]
    assert second == ["disable", r"bl\x1b[2Jah"]
    assert os.read(reader, 10) == b"ack\n"
    # and it outlives the writer
    os.close(writer)
    assert list(control.read()) == []
    control.close()
    os.close(reader)


def test_nobody_reads_the_answers(tmp_path: Path) -> None:
    for name in ("ctl", "ack"):
        os.mkfifo(tmp_path / name)
    control = Control(f"fifo:{tmp_path}/ctl,{tmp_path}/ack")
    for _ in range(40_000):  # more than a pipe holds
        control.acknowledge()
    control.close()


def test_descriptors_end_when_the_other_side_is_closed() -> None:
    reading, writing = os.pipe()
    control = Control(f"fd:{reading}")
    os.write(writing, b"stop\n")
    assert list(control.read()) == ["stop"]
    os.close(writing)
    assert list(control.read()) == ["closed"]
    control.close()
    os.close(reading)


def test_a_command_without_end_is_cut() -> None:
    reading, writing = os.pipe()
    control = Control(f"fd:{reading}")
    seen: list[str] = []
    for _ in range(3):
        os.write(writing, b"x" * MAX_BYTES)
        seen += control.read()
    assert seen == ["x" * 64]
    control.close()


@pytest.mark.parametrize(
    "text", ["", "ctl", "fifo:", "fd:x", "fd:99999", "fd:-1", "fd:" + "9" * 30, "tcp:1", "fifo:/nowhere/x"]
)
def test_what_is_no_control(text: str) -> None:
    with pytest.raises(UsageError, match="--control"):
        Control(text)


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc", "/dev/null"])
def test_a_descriptor_in_which_nobody_can_wait(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    with no_descriptor_is_lost(sockets=True), pytest.raises(UsageError, match="use a pipe"):
        Control(f"fd:{fd}")
    os.close(fd)


def test_a_file_or_device_is_no_fifo(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/dev/null")):
        with pytest.raises(UsageError, match="not a FIFO"):
            Control(f"fifo:{path}")
