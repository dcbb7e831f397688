"""What the versions of Intel's iaprof text have in common: blocks of lines go in, rows of a capture come out.

Every string has a number; an interval's line has its time, the metrics' lines their values. Lines of stalls are what
each version (iaprof_versions.py) reads in its way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, busy
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.profile import UNKNOWN_PROCESS
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE

MOST_SAMPLES = 1 << 53  # in a text: more than any GPU takes, and sums stay exact in every type
_MOST_SECONDS = 1 << 33  # until then a float tells microseconds apart
_MOST_STRING_BYTES = 1 << 28  # all strings of a text, which stay in memory; real ones have a few MB
_STRING_COST = 128  # bytes that Python needs beside the characters
_GROUP_TEXT_BYTES = 1 << 25  # of one row group, whose rows are written with all their texts
_TRUNCATED = "[truncated]"
_BUSY = busy("any")
_METRICS = {b"frequency-MHz": FREQUENCY_ACTUAL, b"busy-percent": _BUSY}
_SECONDS = re.compile(rb"([0-9]{1,10})(?:\.([0-9]{1,9}))?")
_VALUE = re.compile(rb"[0-9]{1,20}(?:\.[0-9]{1,9})?")


@dataclass
class Facts:
    """What was in a text, and what of it a capture cannot hold."""

    format: str
    intervals: int = 0
    first_ns: int = 0  # of the first interval's line, CLOCK_MONOTONIC
    last_ns: int = 0
    rows: int = 0  # `sample` rows
    samples: int = 0  # their counts' sum
    metrics: int = 0  # `metric` rows
    cut_texts: int = 0  # longer than a capture's texts may be
    unknown_lines: int = 0
    first_unknown: int = 0  # the number of the first one of them, from 1
    cut_line: bool = False  # the last line did not end

    @property
    def interval_ns(self) -> int:
        """The mean length of an interval, in whole microseconds; 0 where there is only one."""
        span = self.last_ns - self.first_ns
        return round(span / (self.intervals - 1) / 1000) * 1000 if self.intervals > 1 else 0


class Lines:
    """What both versions have in common; a block of lines goes in, rows come out."""

    format = ""
    stall_line: re.Pattern[bytes]
    stall_form = ""  # what such a line consists of

    def __init__(self) -> None:
        """Begins above the first line."""
        self.facts = Facts(self.format)
        self._line = 0  # the last one that was read
        self._ids: dict[bytes, int] = {b"0": 0}  # indices of texts by the text's ids; 0 is a text that is missing
        self._texts = [""]
        self._text_bytes = [0]
        self._made: dict[str, int] = {}  # indices of texts that are no string of the text's
        self._string_bytes = 0
        self._unknown_process = self._make(UNKNOWN_PROCESS)
        self._unknown_file = self._make(UNKNOWN_FILE)
        self._time: int | None = None  # of the interval, ns
        self._kinds: dict[bytes, tuple[int, Callable[[list[bytes]], None]]] = {b"metric": (2, self._metric)}
        self._begin_rows()

    def read(self, block: bytes) -> Iterator[tuple[str, pa.StructArray]]:
        """Reads whole lines; gives their rows with the rows' kind. A last line without an end is left out.

        Raises:
            ValueError: what is wrong, with the line's number.
        """
        self._begin_rows()
        match, stall = self.stall_line.fullmatch, self._stall
        *lines, cut = block.replace(b"\r\n", b"\n").split(b"\n")
        self.facts.cut_line = bool(cut)
        try:
            for line in lines:
                self._line += 1
                if found := match(line):
                    stall(found)
                elif line:
                    self._other(line)
        except ValueError as error:
            raise ValueError(f"line {self._line}: {error}") from None
        yield from self._samples()
        if self._metrics:
            times, names, values = zip(*self._metrics, strict=True)
            nothing = [None] * len(times)
            columns = zip((times, nothing, nothing, names, values), KINDS["metric"], strict=True)
            yield "metric", _struct("metric", [pa.array(column, field.type) for column, field in columns])
            self.facts.metrics += len(times)

    # Lines

    def _other(self, line: bytes) -> None:
        kind, *fields = line.split(b"\t")
        if kind == self.stall_form.split()[0].encode():
            raise ValueError(f"this is not '{self.stall_form}' with tabs between")
        if kind == b"string":
            self._string(line)
        elif kind in self._kinds:
            wanted, read = self._kinds[kind]
            if len(fields) != wanted:
                raise ValueError(f"a line '{kind.decode()}' has {wanted} fields, this one has {len(fields)}")
            read(fields)
        else:
            self._unknown()

    def _unknown(self) -> None:
        self.facts.unknown_lines += 1
        self.facts.first_unknown = self.facts.first_unknown or self._line

    def _string(self, line: bytes) -> None:
        _, *fields = line.split(b"\t", 2)  # a text may have tabs
        if len(fields) != 2 or not fields[0].isdigit() or len(fields[0]) > 18:
            raise ValueError("a line 'string' has a number and a text")
        number, text = fields
        if number in self._ids:
            raise ValueError(f"string {number.decode()} is defined a second time: import one text at a time")
        self._ids[number] = self._add(text.decode("utf-8", "backslashreplace"))

    def _interval(self, fields: list[bytes]) -> None:
        whole_number(fields[0], (1 << 63) - 1)
        found = _SECONDS.fullmatch(fields[1])
        if not found or int(found[1]) >= _MOST_SECONDS:
            raise ValueError(f"'{shown(fields[1])}' is no time in seconds")
        time = int(found[1]) * 10**9 + int((found[2] or b"").ljust(9, b"0"))
        if time < self.facts.last_ns:
            raise ValueError("this interval is earlier than the one before")
        self.facts.first_ns = self.facts.first_ns if self.facts.intervals else time
        self.facts.last_ns = self._time = time
        self.facts.intervals += 1
        self._owner = -1

    def _metric(self, fields: list[bytes]) -> None:
        name, value = _METRICS.get(fields[0]), fields[1]
        if name is None:
            self._unknown()
            return
        if not _VALUE.fullmatch(value):
            raise ValueError(f"'{shown(value)}' is no value of a metric")
        # A GPU at 0 MHz was not measured. Idle ones count, and tell that there was an interval.
        if name == _BUSY or float(value):
            self._metrics.append((self._in_interval(), name, float(value)))

    def _stall(self, found: re.Match[bytes]) -> None:
        raise NotImplementedError

    def _in_interval(self) -> int:
        if self._time is None:
            raise ValueError("there is no interval above this line")
        return self._time

    # Texts

    def _add(self, text: str) -> int:
        raw = text.encode()
        if len(raw) > MAX_TEXT_BYTES:
            self.facts.cut_texts += 1
            text = cut_text(raw)
            raw = text.encode()
        self._string_bytes += len(raw) + _STRING_COST
        if self._string_bytes > _MOST_STRING_BYTES:
            raise ValueError(f"up to here the strings take {_MOST_STRING_BYTES >> 20} MiB: no profile has so many")
        self._texts.append(text)
        self._text_bytes.append(len(raw))
        return len(self._texts) - 1

    def _make(self, text: str) -> int:
        if text not in self._made:
            self._made[text] = self._add(text)
        return self._made[text]

    def _index(self, number: bytes) -> int:
        index = self._ids.get(number)
        if index is None:
            raise ValueError(f"string '{shown(number)}' is not defined above this line")
        return index

    # Rows

    def _begin_rows(self) -> None:
        self._owner = -1  # whose stalls the next lines are; -1: that is to be found out
        self._owners: list[tuple[int, ...]] = []  # time, comm, pid, stack, address, kernel, file
        self._owner_of: list[int] = []
        self._offsets: list[int] = []
        self._mnemonics: list[int] = []
        self._metrics: list[tuple[int, str, float]] = []

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which rows there are, as indices of their first lines [n], and their counts [n, 10]."""
        raise NotImplementedError

    def _samples(self) -> Iterator[tuple[str, pa.StructArray]]:
        """The stalls that were read, in groups of bounded size."""
        if not self._owner_of:
            return
        first, counts = self._counts()
        self.facts.samples += int(counts.sum(dtype=np.float64))
        if self.facts.samples > MOST_SAMPLES:
            raise ValueError(f"up to line {self._line} the counts add up to more than any GPU has samples")
        owner = np.array(self._owner_of)[first]
        columns = [np.array(column, np.uint64)[owner] for column in zip(*self._owners, strict=True)]
        time, comm, pid, stack, address, kernel, file = columns
        offset = np.array(self._offsets, np.uint64)[first]
        mnemonic = np.array(self._mnemonics, np.uint64)[first]
        lengths = np.array(self._text_bytes)
        ends = np.cumsum(sum(lengths[text.astype(np.int64)] for text in (comm, stack, kernel, file, mnemonic)))
        cuts = np.searchsorted(ends, np.arange(_GROUP_TEXT_BYTES, ends[-1], _GROUP_TEXT_BYTES))
        for rows in np.split(np.arange(len(first)), np.unique(cuts)):
            some = [
                pa.array(time[rows]),
                self._text_column(comm[rows]),
                pa.array(pid[rows].astype(np.uint32)),
                self._text_column(stack[rows]),
                pa.array(address[rows]),
                self._text_column(kernel[rows]),
                self._text_column(file[rows]),
                pa.array(offset[rows]),
                self._text_column(mnemonic[rows]),
                *(pa.array(count.astype(np.uint64)) for count in counts[rows].T),
            ]
            self.facts.rows += len(rows)
            yield "sample", _struct("sample", some)

    def _text_column(self, indices: NDArray[np.uint64]) -> pa.Array:
        used, which = np.unique(indices, return_inverse=True)
        return pa.array([self._texts[index] for index in used.tolist()], pa.string()).take(pa.array(which))


def _struct(kind: str, columns: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(columns, fields=list(KINDS[kind]))


def cut_text(raw: bytes) -> str:
    """As much of a text as a capture's may have: of a stack the innermost frames, else the beginning."""
    head = f"{_TRUNCATED};".encode()
    _, found, frames = raw[len(head) - MAX_TEXT_BYTES :].partition(b";")
    return (head + frames if found else raw[:MAX_TEXT_BYTES]).decode("utf-8", "ignore")


def whole_number(field: bytes, most: int) -> int:
    """A field's number; ValueError where it is none up to `most`."""
    if not field.isdigit() or len(field) > 20 or int(field) > most:
        raise ValueError(f"'{shown(field)}' is no number from 0 to {most}")
    return int(field)


def shown(field: bytes) -> str:
    """A field for a message."""
    return field[:40].decode("utf-8", "backslashreplace")
