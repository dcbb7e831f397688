"""Converts Intel's iaprof text to a capture: reads blocks of bounded size, writes row group by row group.

There are two versions of the text: 2026.2, and 0.5 (the Tiber release). In both, strings are numbered, and intervals
and metrics have the same lines. Both list the stalls of each interval by kernel, instruction and reason. 2026.2 has
`kernel` lines, each followed by `eustall` lines with a count per reason. 0.5 has an `e` line per reason, and state
lines that remain in force, in following intervals too, until another one replaces them.

Both print the line of an interval when it is over, with the time of its end; iaprof's own text has the time of its
start. As the text does not say which program wrote it, the time is used as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, busy
from iaprof.formats.capture.schema import KINDS, make_rows
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.imports.encoded_text import EncodedText
from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.gpu.vendors import FIRST_REASONS, FIRST_REASONS as REASONS

MOST_SAMPLES = 1 << 53  # per text: more than any GPU takes, and exact in a double
_MOST_SECONDS = 1 << 33  # up to here a double resolves microseconds
_MOST_STRING_BYTES = 1 << 28  # of all strings of a text, which stay in memory; real texts have a few MB
_STRING_COST = 128  # Python's overhead per string, bytes
_GROUP_TEXT_BYTES = 1 << 25  # per row group, as its rows are written with their decoded texts
_TRUNCATED = "[truncated]"
_BUSY = busy("any")
_METRICS = {b"frequency-MHz": FREQUENCY_ACTUAL, b"busy-percent": _BUSY}
_SECONDS = re.compile(rb"([0-9]{1,10})(?:\.([0-9]{1,9}))?")
_VALUE = re.compile(rb"[0-9]{1,20}(?:\.[0-9]{1,9})?")

_HEX = re.compile(rb"0x([0-9a-fA-F]{1,16})")

_BLOCK_BYTES = 1 << 22


@dataclass
class Facts:
    """The contents of a text, and what was lost in the conversion."""

    format: str
    intervals: int = 0
    first_ns: int = 0  # of the first interval line, CLOCK_MONOTONIC
    last_ns: int = 0
    rows: int = 0  # `sample` rows
    samples: int = 0  # sum over all counts
    metrics: int = 0  # `metric` rows
    cut_texts: int = 0  # longer than MAX_TEXT_BYTES
    unknown_lines: int = 0
    first_unknown: int = 0  # number of the first of these, from 1
    cut_line: bool = False  # the last line has no line end

    @property
    def interval_ns(self) -> int:
        """The mean length of an interval, rounded to microseconds; 0 if there is only one."""
        span = self.last_ns - self.first_ns
        return round(span / (self.intervals - 1) / 1000) * 1000 if self.intervals > 1 else 0


class LineReader:
    """The base class of both versions: reads blocks of lines and gives rows."""

    format = ""
    stall_line: re.Pattern[bytes]
    stall_form = ""  # its syntax, for messages

    def __init__(self) -> None:
        """Starts before the first line."""
        self.facts = Facts(self.format)
        self._line = 0  # number of the line that was read last
        self._ids: dict[bytes, int] = {b"0": 0}  # string id -> index into _texts; id 0: no string
        self._texts = [""]
        self._text_bytes = [0]
        self._made: dict[str, int] = {}  # text that is not one of the file's strings -> index into _texts
        self._string_bytes = 0
        self._unknown_process = self._make(UNKNOWN_PROCESS)
        self._unknown_file = self._make(UNKNOWN_FILE)
        self._time: int | None = None  # of the current interval, ns
        self._kinds: dict[bytes, tuple[int, Callable[[list[bytes]], None]]] = {b"metric": (2, self._metric)}
        self._begin_rows()

    def read(self, block: bytes) -> Iterator[tuple[str, pa.StructArray]]:
        """Reads whole lines and gives (kind, rows); ignores an unterminated last line.

        Raises:
            ValueError: a line is invalid; the text begins with its number.
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
            columns = {"time_ns": times, "name": names, "value": values}
            nothing = [None] * len(times)
            own = {field.name: pa.array(columns.get(field.name, nothing), field.type) for field in KINDS["metric"]}
            yield "metric", make_rows("metric", own)
            self.facts.metrics += len(times)

    # Parsing of lines

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
        _, *fields = line.split(b"\t", 2)  # the text may contain tabs
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
            raise ValueError(f"'{quoted(fields[1])}' is not a time in seconds")
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
            raise ValueError(f"'{quoted(value)}' is not a value of a metric")
        # 0 MHz means not measured. An idle GPU's 0 % is kept: it shows that the interval exists.
        if name == _BUSY or float(value):
            self._metrics.append((self._in_interval(), name, float(value)))

    def _stall(self, found: re.Match[bytes]) -> None:
        raise NotImplementedError

    def _in_interval(self) -> int:
        if self._time is None:
            raise ValueError("there is no interval above this line")
        return self._time

    # Strings

    def _add(self, text: str) -> int:
        raw = text.encode()
        if len(raw) > MAX_TEXT_BYTES:
            self.facts.cut_texts += 1
            text = truncated_text(raw)
            raw = text.encode()
        self._string_bytes += len(raw) + _STRING_COST
        if self._string_bytes > _MOST_STRING_BYTES:
            raise ValueError(f"up to here the strings take {_MOST_STRING_BYTES >> 20} MiB: no profile has that many")
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
            raise ValueError(f"string '{quoted(number)}' is not defined above this line")
        return index

    # Rows

    def _begin_rows(self) -> None:
        self._owner = -1  # index into _owners for the next stall lines; -1: not yet known
        self._owners: list[tuple[int, ...]] = []  # time, comm, pid, stack, address, kernel, file
        self._owner_of: list[int] = []
        self._offsets: list[int] = []
        self._mnemonics: list[int] = []
        self._metrics: list[tuple[int, str, float]] = []

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows as indices of their first lines [n], and their counts [n, len(REASONS)]."""
        raise NotImplementedError

    def _samples(self) -> Iterator[tuple[str, pa.StructArray]]:
        """The stalls that were read, in row groups of bounded size."""
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
        for some in np.split(np.arange(len(first)), np.unique(cuts)):
            texts = {"comm": comm, "stack": stack, "kernel": kernel, "file": file, "mnemonic": mnemonic}
            own = {
                "time_ns": time[some],
                "pid": pid[some].astype(np.uint32),
                "address": address[some],
                "offset": offset[some],
                **{name: self._text_column(text[some]) for name, text in texts.items()},
                **{
                    reason: count.astype(np.uint64) for reason, count in zip(FIRST_REASONS, counts[some].T, strict=True)
                },
            }
            self.facts.rows += len(some)
            yield "sample", make_rows("sample", own)

    def _text_column(self, indices: NDArray[np.uint64]) -> pa.Array:
        used, which = np.unique(indices, return_inverse=True)
        return pa.array([self._texts[index] for index in used.tolist()], pa.string()).take(pa.array(which))


def truncated_text(raw: bytes) -> str:
    """Cuts a text to MAX_TEXT_BYTES: keeps the innermost frames of a stack, or else the beginning."""
    head = f"{_TRUNCATED};".encode()
    _, found, frames = raw[len(head) - MAX_TEXT_BYTES :].partition(b";")
    return (head + frames if found else raw[:MAX_TEXT_BYTES]).decode("utf-8", "ignore")


def whole_number(field: bytes, most: int) -> int:
    """A field's number; ValueError if it is not a number from 0 to `most`."""
    if not field.isdigit() or len(field) > 20 or int(field) > most:
        raise ValueError(f"'{quoted(field)}' is not a number from 0 to {most}")
    return int(field)


def quoted(field: bytes) -> str:
    """The beginning of a field, for a message."""
    return field[:40].decode("utf-8", "backslashreplace")


class LineReader2026(LineReader):
    """Version 2026.2."""

    format = "iaprof 2026.2"
    stall_form = "eustall 0xOFFSET INSTRUCTION" + " COUNT" * len(REASONS)
    stall_line = re.compile(rb"eustall\t0x([0-9a-fA-F]{1,16})\t([0-9]{1,18})((?:\t[0-9]{1,16}){10})")

    def __init__(self) -> None:
        """Starts before the first line."""
        super().__init__()
        self._kernel: tuple[int, ...] | None = None  # a tuple of _owners without its time
        self._kinds |= {
            b"interval": (2, self._new_interval),
            b"kernel": (6, self._new_kernel),
        }

    def _begin_rows(self) -> None:
        super()._begin_rows()
        self._ten_counts: list[bytes] = []

    def _new_interval(self, fields: list[bytes]) -> None:
        self._interval(fields)
        self._kernel = None

    def _new_kernel(self, fields: list[bytes]) -> None:
        address = _hex(fields[0])
        comm, stack, file, symbol = (self._index(fields[n]) for n in (1, 3, 4, 5))
        # A kernel known only from its launch or only from its debug ELF has zeros for what is missing.
        if not self._texts[symbol]:
            symbol = self._make(f"0x{address:x}" if address else UNKNOWN_KERNEL)
        self._kernel = (
            comm or self._unknown_process,
            whole_number(fields[2], (1 << 32) - 1),
            stack or self._unknown_process,
            address,
            symbol,
            file or self._unknown_file,
        )
        self._owner = -1

    def _stall(self, found: re.Match[bytes]) -> None:
        offset, instruction, counts = found.groups()
        if self._owner < 0:
            if self._kernel is None:
                raise ValueError("there is no kernel above this line")
            self._owners.append((self._in_interval(), *self._kernel))
            self._owner = len(self._owners) - 1
        self._owner_of.append(self._owner)
        self._offsets.append(int(offset, 16))
        self._mnemonics.append(self._index(instruction))
        self._ten_counts.append(counts)

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        counts = np.fromstring(b"".join(self._ten_counts), np.int64, sep="\t")
        return np.arange(len(self._offsets)), counts.reshape(-1, len(REASONS))


class LineReader05(LineReader):
    """Version 0.5."""

    format = "iaprof 0.5"
    stall_form = "e STACK REASON OFFSET COUNT"
    stall_line = re.compile(rb"e\t[0-9]{1,18}\t([0-9]{1,18})\t([0-9a-fA-F]{1,16})\t([0-9]{1,16})")

    def __init__(self) -> None:
        """Starts before the first line."""
        super().__init__()
        self._state = dict.fromkeys((b"proc_name", b"ustack", b"kstack", b"gpu_file", b"gpu_symbol", b"insn_text"), 0)
        self._pid = 0
        self._base = 0  # added to offsets: the address, if nothing is known of a stall
        self._reasons: dict[bytes, int] = {}  # string id -> index into REASONS
        self._kinds |= {
            b"interval_start": (2, self._interval),
            b"interval_end": (1, self._end_interval),
            b"pid": (1, self._new_pid),
            b"shader_type": (1, lambda fields: None),  # other lines tell as much
            b"eustall": (12, self._whole_stall),
            **{kind: (1, self._new_state(kind)) for kind in self._state},
        }

    def _begin_rows(self) -> None:
        super()._begin_rows()
        self._one_count: list[tuple[int, int]] = []  # index into REASONS, count

    def _string(self, line: bytes) -> None:
        # Skip whole stacks, one per offset and reason: they repeat the state, and are most of the file.
        if not line.endswith(b"_[g]"):
            super()._string(line)

    def _new_state(self, kind: bytes) -> Callable[[list[bytes]], None]:
        def change(fields: list[bytes]) -> None:
            self._state[kind] = self._index(fields[0])
            self._owner = -1

        return change

    def _new_pid(self, fields: list[bytes]) -> None:
        self._pid = whole_number(fields[0], (1 << 32) - 1)
        self._owner = -1

    def _end_interval(self, fields: list[bytes]) -> None:
        self._time = None
        self._owner = -1

    def _stall(self, found: re.Match[bytes]) -> None:
        reason, offset, count = found.groups()
        self._count(reason, int(offset, 16), int(count))

    def _whole_stall(self, fields: list[bytes]) -> None:
        """An `eustall` line of the tag v0.5.0, which has all of the state."""
        proc_name, pid, ustack, kstack, _is_debug, _is_system, *rest = fields
        for kind, number in zip(self._state, (proc_name, ustack, kstack, *rest[:3]), strict=True):
            self._state[kind] = self._index(number)
        self._new_pid([pid])
        self._count(rest[3], _hex(rest[4]), whole_number(rest[5], MOST_SAMPLES))

    def _count(self, reason: bytes, offset: int, count: int) -> None:
        if self._owner < 0:
            self._owners.append((self._in_interval(), *self._kernel()))
            self._owner = len(self._owners) - 1
        if reason not in self._reasons:
            self._reasons[reason] = _reason(self._texts[self._index(reason)])
        self._owner_of.append(self._owner)
        self._offsets.append(offset + self._base & (1 << 64) - 1)
        self._mnemonics.append(self._state[b"insn_text"])
        self._one_count.append((self._reasons[reason], count))

    def _kernel(self) -> tuple[int, ...]:
        """The state as a tuple of _owners without its time."""
        state = self._state
        stacks = (self._texts[state[kind]].rstrip(";") for kind in (b"ustack", b"kstack"))
        stack = ";".join(stack for stack in stacks if stack)
        symbol = state[b"gpu_symbol"]
        named = _HEX.fullmatch(self._texts[symbol].encode())
        address, self._base = int(named[1], 16) if named else 0, 0
        if not (state[b"proc_name"] or self._pid):  # the profiler found nothing at this address
            address, self._base = 0, address
        return (
            state[b"proc_name"] or self._unknown_process,
            self._pid,
            self._make(stack or UNKNOWN_PROCESS),
            address,
            self._make(UNKNOWN_KERNEL) if self._base or not symbol else symbol,
            state[b"gpu_file"] or self._unknown_file,
        )

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        key = np.array([self._owner_of, self._mnemonics], np.int64)
        offset = np.array(self._offsets, np.uint64)
        first = np.concatenate([[True], (key[:, 1:] != key[:, :-1]).any(axis=0) | (offset[1:] != offset[:-1])])
        reason, count = np.array(self._one_count, np.int64).T
        counts = np.zeros((int(first.sum()), len(REASONS)), np.int64)
        np.add.at(counts, (np.cumsum(first) - 1, reason), count)
        return np.flatnonzero(first), counts


def line_reader(block: bytes) -> LineReader | None:
    """The reader for a text with this first block; None if the block has no interval."""
    found = re.search(rb"^interval(_start)?\t", block, re.MULTILINE)
    return None if not found else LineReader05() if found[1] else LineReader2026()


def _reason(text: str) -> int:
    if text == "unknown":  # 0.5 counts this reason but has no name for it (interval_printer.c)
        text = "tdr"
    if text not in REASONS:
        raise ValueError(f"'{quoted(text.encode())}' is not a reason to wait")
    return REASONS.index(text)


def _hex(field: bytes) -> int:
    found = _HEX.fullmatch(field)
    if not found:
        raise ValueError(f"'{quoted(field)}' is not an address, such as 0x1f00")
    return int(found[1], 16)


def import_text(source: BinaryIO, name: str, output: BinaryIO, tell: Callable[[int], None]) -> Facts:
    """Writes a text's stalls and metrics as a capture with `sample` and `metric` rows.

    Args:
        source: the text, in either version and any encoding of Unicode, also compressed with gzip.
        name: the text's name for messages.
        output: receives the capture.
        tell: progress callback, called with the number of bytes read so far.

    Raises:
        IaprofError: the text is not in Intel's format, or a line has an invalid value.
        OSError: the text cannot be read, or the capture cannot be written.
    """
    writer = CaptureWriter(output, ("metric", "sample"))
    header: dict[str, Any] = {}
    try:
        lines = _read(source, name, writer, tell)
        header = _header(lines.facts)
    finally:
        writer.close(header)  # in any case, or pyarrow complains on stderr
    return lines.facts


def _read(source: BinaryIO, name: str, writer: CaptureWriter, tell: Callable[[int], None]) -> LineReader:
    lines: LineReader | None = None
    done, is_empty = 0, True
    try:
        for block in _blocks(EncodedText(source, name)):
            is_empty = is_empty and not block.strip()
            lines = lines or line_reader(block)
            if lines is None:
                break
            for kind, rows in lines.read(block):
                writer.write(kind, rows)
            done += len(block)
            tell(done)
    except ValueError as error:
        raise IaprofError(f"{name}, {error}") from None
    if is_empty:
        raise IaprofError(f"{name} is empty: pass an iaprof text or a trace")
    if lines is None or not lines.facts.intervals:
        raise IaprofError(f"{name} has no intervals: it is neither iaprof text nor a trace, or nothing was recorded")
    return lines


def _blocks(source: EncodedText) -> Iterator[bytes]:
    """Whole lines; finally the rest after the last line end."""
    rest = b""
    while data := source.read(_BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if not end and len(rest) + len(data) > _BLOCK_BYTES:
            raise ValueError(f"which has a line of more than {_BLOCK_BYTES >> 20} MiB, is not an iaprof text")
        if end:
            yield rest + data[:end]
            rest = b""
        rest += data[end:]
    if rest:
        yield rest


def _header(facts: Facts) -> dict[str, Any]:
    """The header that a recorder would write, as far as the text has the facts."""
    return {
        "clock": {"monotonic_ns": facts.first_ns, "realtime_ns": 0},
        "end_ns": facts.last_ns,
        "streams": [],
        "totals": {"samples": facts.rows, "metrics": facts.metrics},
        "losses": [],
        "imported": {
            "format": facts.format,
            "interval_ns": facts.interval_ns,
            "cut_texts": facts.cut_texts,
            "unknown_lines": facts.unknown_lines,
        },
    }
