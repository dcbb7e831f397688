"""The sandboxed children that read traces, and the list of events that they read, several pieces at a time.

The end of a piece is guessed, so that the next piece can be read meanwhile. If a child cannot read a piece up to its
end, it returns how far it came, and what was read ahead is discarded. Results are in the order of the file.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from iaprof.sandbox.parent import AnswerError, Limits, Sandbox, SandboxDied, SandboxRefused, integer, string
from iaprof.sandbox.worker import Closing
from iaprof.timelines.reading import answer as answers
from iaprof.timelines.reading.answer import Columns
from iaprof.timelines.reading.source import Reads, Source, Span

_LIMITS = Limits(memory_bytes=640 << 20, seconds=60.0, files=2, mapped_bytes=1 << 30, written_bytes=1 << 30)
PIECE_BYTES = 3 << 20
MOST_PIECE_BYTES = 64 << 20  # an event that is longer is dropped
_LEAST_PIECE_BYTES = 1 << 16
_LOOKED_AT = 1 << 16  # bytes before the end of a piece, for the start of an event
_MOST_EVENTS = 1 << 32
_REASONS = 64


@dataclass
class Read:
    """The content of a piece."""

    columns: Columns
    events: int = 0  # in the piece
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    consumed: int = 0
    ended: bool = False  # the list has ended
    lost: bool = False
    bad_bytes: int = 0  # that are not UTF-8


@dataclass
class PacketsRead:
    """The content of a batch of packets."""

    read: Read
    consumed: int
    is_damaged: bool  # there is no packet at `consumed`
    is_lost: bool  # and no packet was found after it
    longer: int  # bytes of the packet at `consumed`, if it does not end in the piece
    needs_zstd: bool  # some packets need a child that unpacks zstd
    facts: dict[str, int]  # counts of doubtful things, since the beginning of the file
    left_out: dict[str, int]  # counts of what was left out, likewise


_PACKET_FACTS = ("late", "undescribed", "described_later", "refused", "unread", "unrelated", "flows")


@dataclass
class _Ahead:
    start: int
    end: int
    is_last: bool
    result: Future[Read]


class Children(Closing):
    """Sandboxed children: `count` that read pieces of JSON, one that converts, and one that reads packets."""

    def __init__(
        self,
        count: int,
        children: Sequence[Reads] = (),
        threads: Executor | None = None,
        unpack_zstd: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            count: how many read events.
            children: used in place of sandboxes, in tests.
            threads: wait for the children; None for a thread for each.
            unpack_zstd: packets can be compressed with zstd: the child for packets takes longer to start.
        """
        self._sandboxes: list[Sandbox] = []
        if not children:
            self._sandboxes += (Sandbox("iaprof.timelines.reading.json_reader", _LIMITS) for _ in range(count + 1))
            self._sandboxes.append(
                Sandbox("iaprof.timelines.reading.perfetto.zstd_reader", _LIMITS)
                if unpack_zstd
                else Sandbox("iaprof.timelines.reading.perfetto.packet_reader", _LIMITS)
            )
        everyone = [*(children or self._sandboxes[:-1])]
        self.count = max(len(everyone) - 1, 1)
        self.converter = everyone[0]
        self._free: queue.SimpleQueue[Reads] = queue.SimpleQueue()
        self._keeper = self._sandboxes[-1] if self._sandboxes else everyone[-1]
        for child in everyone[1:] or everyone:
            self._free.put(child)
        self._threads = threads or ThreadPoolExecutor(self.count)

    def close(self) -> None:
        """Ends the children."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def read(self, span: Span, is_last: bool, is_lost: bool, gives_up: bool) -> Future[Read]:
        """Has one of them read a piece."""
        return self._threads.submit(self._read, span, is_last, is_lost, gives_up)

    def members(self, span: Span, parameters: Mapping[str, object]) -> Any:
        """Has one of them read a piece of the outermost object."""
        child = self._free.get()
        try:
            return child.call("members", {**span.parameters, **parameters}, span.data, fds=span.files)
        finally:
            self._free.put(child)

    def packets(self, span: Span, parameters: Mapping[str, object]) -> Future[PacketsRead]:
        """Has the child for packets read a batch. It keeps the state that packets share."""
        return self._threads.submit(self._read_packets, span, parameters)

    def _read_packets(self, span: Span, parameters: Mapping[str, object]) -> PacketsRead:
        file = os.memfd_create("iaprof packets", os.MFD_CLOEXEC)
        try:
            found = self._keeper.call("packets", parameters, span.data, fds=[*span.files, file])
            return _packets_checked(found, os.pread(file, os.fstat(file).st_size, 0))
        finally:
            os.close(file)

    def _read(self, span: Span, is_last: bool, is_lost: bool, gives_up: bool) -> Read:
        child = self._free.get()
        file = os.memfd_create("iaprof events", os.MFD_CLOEXEC)
        try:
            parameters = {**span.parameters, "is_last": is_last, "is_lost": is_lost, "gives_up": gives_up}
            found = child.call("events", parameters, span.data, fds=[*span.files, file])
            return _checked(found, os.pread(file, os.fstat(file).st_size, 0))
        finally:
            os.close(file)
            self._free.put(child)


def _packets_checked(found: Any, content: bytes) -> PacketsRead:
    match found:
        case {
            "is_damaged": bool(is_damaged), "is_lost": bool(is_lost), "longer": longer, "facts": dict(facts),
            "left_out": dict(left_out), "needs_zstd": bool(needs_zstd),
        } if len(left_out) <= _REASONS:  # fmt: skip
            read = _checked({**found, "ended": False, "lost": False, "bad_bytes": 0}, content)
            counts = {name: integer(facts.get(name)) for name in _PACKET_FACTS}
            others = {string(reason): integer(number) for reason, number in left_out.items()}
            return PacketsRead(read, read.consumed, is_damaged, is_lost, integer(longer), needs_zstd, counts, others)
    raise AnswerError


def _checked(found: Any, content: bytes) -> Read:
    match found:
        case {
            "events": events,
            "dropped": dict(dropped),
            "consumed": consumed,
            "ended": bool(ended),
            "lost": bool(lost),
            "bad_bytes": bad_bytes,
        }:
            if len(dropped) > _REASONS:
                raise AnswerError
            counts = {string(reason): integer(number, _MOST_EVENTS) for reason, number in dropped.items()}
            columns = answers.read(found, content)
            return Read(
                columns, integer(events, _MOST_EVENTS), counts, integer(consumed), ended, lost, integer(bad_bytes)
            )
    raise AnswerError


@dataclass
class End:
    """Where reading a list of events ended."""

    at: int = 0
    ended: bool = False  # by its `]`, not by the end of the file


def events(source: Source, start: int, children: Children, end: End, piece_bytes: int = PIECE_BYTES) -> Iterator[Read]:
    """Reads a list of events.

    Args:
        source: the file.
        start: where its events begin.
        children: the readers.
        end: is set.
        piece_bytes: how long pieces are.
    """
    ahead: deque[_Ahead] = deque()
    at, size, is_lost = start, piece_bytes, False
    following, is_done = start, False  # where the next piece starts that no child reads yet
    failed_at, failed_length = -1, 0  # the piece that failed last

    def discard() -> None:
        for each in ahead:
            if not each.result.cancel():
                each.result.exception()
        ahead.clear()

    try:
        while True:
            while not is_done and len(ahead) <= children.count:
                stop, is_last = _end_of_piece(source, following, size)
                span = source.span(following, stop - following)[0]
                gives_up = size >= MOST_PIECE_BYTES
                ahead.append(_Ahead(following, stop, is_last, children.read(span, is_last, is_lost, gives_up)))
                following, is_done = stop, is_last
                if is_lost or size != piece_bytes:
                    break  # where the next piece starts is not known yet
            piece = ahead.popleft()
            length = piece.end - piece.start
            try:
                read = piece.result.result()
                if read.consumed > length or (piece.is_last and not read.ended and read.consumed < length):
                    raise AnswerError
            except (SandboxDied, SandboxRefused, AnswerError):
                if length > _LEAST_PIECE_BYTES:
                    discard()
                    failed_at, failed_length = piece.start, length
                    size, following, is_done = max(length // 8, _LEAST_PIECE_BYTES), at, False
                    continue
                read = _unreadable(length)
            stuck = not read.consumed and not read.ended and length > 0 and not (read.lost and not is_lost)
            # A longer piece helps, unless it failed before: otherwise reading would never end.
            if stuck and (length >= MOST_PIECE_BYTES or (piece.start == failed_at and 4 * length >= failed_length)):
                read, stuck = _unreadable(length), False
            yield read
            at = piece.start + read.consumed
            if read.ended or (piece.is_last and at == piece.end):
                end.at, end.ended = at, read.ended
                return
            if at != piece.end or read.lost or is_lost:
                discard()
                following, is_done = at, False
                size = min(max(size, length) * 4, MOST_PIECE_BYTES) if stuck else piece_bytes
            elif size != piece_bytes:
                size = piece_bytes
            is_lost = read.lost
            source.forget(at)
    finally:
        discard()


def _unreadable(length: int) -> Read:
    """Returns the content of a piece with an event that cannot be read: reading continues after the piece."""
    return Read(Columns(), 1, {"unreadable": 1}, length, False, True)


def _end_of_piece(source: Source, start: int, size: int) -> tuple[int, bool]:
    """Returns where a piece may end, after a comma that seems to follow an event; and whether the file ends there."""
    looked_at = min(_LOOKED_AT, size)
    tail, is_last = source.bytes(start + size - looked_at, looked_at)
    if is_last and not tail:  # the file ends before that offset
        return start + len(source.bytes(start, size)[0]), True
    if is_last:
        return start + size - looked_at + len(tail), True
    at = tail.rfind(b"{", 1)
    while at > 0:
        before = tail[max(at - 64, 0) : at]
        if (stripped := before.rstrip(b" \t\r\n")).endswith(b","):
            return start + size - looked_at + at - len(before) + len(stripped), False
        at = tail.rfind(b"{", 1, at)
    return start + size, False
