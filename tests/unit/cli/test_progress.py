"""The status line: its numbers and its width; and how texts are printed that nobody may wait for."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from iaprof.cli.terminal import progress as module
from iaprof.cli.terminal.progress import MOST_WAITING, Printer, Progress, describe
from iaprof.record.session import Status
from waiting import until

STATUS = Status(
    seconds=12.4, records=600_000, launches=24_000, lost=0, losses=0, kernels=32, matched=31, bytes=1_100_000_000,
    cpu_s=0.2, paused=False,
)  # fmt: skip


def test_rates_are_since_the_last_status() -> None:
    before = dataclasses.replace(STATUS, seconds=11.9, records=0, launches=0, cpu_s=0.1935)
    line = describe(STATUS, before)
    assert line == "0:12  lost 0  1.2M records/s  48k launches/s  31/32 kernels  1.1 GB  cpu 1.3 %"


def test_the_first_line_and_one_with_everything() -> None:
    status = dataclasses.replace(STATUS, seconds=3725, paused=True, lost=1_234_567, losses=3)
    assert describe(status, None) == (
        "62:05 paused  lost 1.2M  161 records/s  6 launches/s  31/32 kernels  1.1 GB  cpu 0.0 %"
    )
    gap = dataclasses.replace(STATUS, losses=2)
    assert "lost something 2 times" in describe(gap, None)
    assert len(describe(gap, None)) < 100


def test_what_cannot_be_printed_waits_and_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a terminal that is stopped
    goes_on = threading.Event()
    printed: list[str] = []

    def write(text: str) -> None:
        goes_on.wait()
        printed.append(text)

    monkeypatch.setattr(module, "write", write)
    with Printer() as printer:
        printer.write("first")
        until(printer._texts.empty)
        # when more comes than can wait
        for number in range(MOST_WAITING + 3):
            printer.write(f"{number}")
        Progress(printer).show(STATUS)
        goes_on.set()
    # then all others are printed, in order, without the status line
    assert printed[:-1] == ["first", *map(str, range(MOST_WAITING))]
    assert printed[-1] == "iaprof: 3 more messages could not be printed in time\n"


def test_without_a_thread_texts_are_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError

    printed: list[str] = []
    monkeypatch.setattr(module, "write", printed.append)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with Printer() as printer:
        Progress(printer).say("told")
        assert printed == ["told\n"]
