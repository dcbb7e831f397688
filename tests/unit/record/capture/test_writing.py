"""Row groups are written in a thread, in their order; what goes wrong there is raised where rows are given."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.record.capture import writing
from iaprof.record.capture.writing import WritingThread
from waiting import LONGEST_WAIT_S


class Writer:
    """Takes rows when it may, and keeps their kinds; fails if it should."""

    def __init__(self, error: OSError | None = None) -> None:
        self.may, self.kinds, self._error = threading.Event(), list[str](), error

    def write(self, kind: str, _rows: pa.StructArray) -> None:
        assert self.may.wait(LONGEST_WAIT_S)
        if self._error is not None:
            raise self._error
        self.kinds.append(kind)


def rows(count: int = 1) -> pa.StructArray:
    return pa.array([{"id": number, "what": "file", "path": "/x"} for number in range(count)], KINDS["module"])


def test_rows_are_written_in_their_order_while_others_are_made() -> None:
    writer = Writer()
    with WritingThread(writer) as thread:
        thread.write("first", rows())
        assert writer.kinds == []  # nothing waited for it
        writer.may.set()
        for kind in ("second", "third"):
            thread.write(kind, rows())
        thread.wait()
        assert writer.kinds == ["first", "second", "third"]


def test_a_large_row_group_is_written_before_another_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_LARGE", 1000)
    writer = Writer()
    writer.may.set()
    with WritingThread(writer) as thread:
        thread.write("large", rows(100))
        assert writer.kinds == ["large"]


def test_what_writing_raises_is_raised_once_where_the_next_rows_are_given() -> None:
    writer = Writer(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    writer.may.set()
    with WritingThread(writer) as thread:
        thread.write("first", rows())
        with pytest.raises(OSError, match="No space left on device"):
            thread.write("second", rows())
        thread.wait()


def test_a_capture_that_is_given_up_is_left_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        writer.write("module", rows())
    size = (tmp_path / "c").stat().st_size
    del writer
    gc.collect()
    # then Arrow neither writes what it still has to the closed file, nor complains that it cannot
    assert (tmp_path / "c").stat().st_size == size
    assert capfd.readouterr() == ("", "")
