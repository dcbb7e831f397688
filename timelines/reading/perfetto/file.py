"""Reads files in Perfetto's format (https://perfetto.dev/docs/reference/trace-packet-proto): lists of packets.

A child reads packets batch by batch, in their order, and keeps what they share. While the rows of a batch are written,
it reads the next one.
"""

from __future__ import annotations

from concurrent.futures import Future

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.parent import AnswerError
from iaprof.timelines.reading.children import MOST_PIECE_BYTES, PacketsRead
from iaprof.timelines.reading.imported_file import ImportedFile, ReadAgain
from iaprof.timelines.reading.perfetto.packets import is_trace

is_perfetto = is_trace
_SKIPPED = 1 << 20  # bytes at a time
_PROBLEMS = {
    "late": "slices that begin or end before others of their track, far away in the file: {:,}; they may be wrong",
    "undescribed": "tracks that are not described: {:,}",
    "refused": "args that are nested too deeply, too many, or of unknown kinds: {:,}",
    "unread": "members of events that are not read: {:,}",
    "unrelated": "times of clocks that no snapshot relates to the trace's, taken as they are: {:,}",
    "flows": "flows that are open at a time, too many to remember: {:,}",
}


def read_perfetto(file: ImportedFile) -> None:
    """Reads a file.

    Raises:
        ReadAgain: tracks were described after their events, names must not be changed, or another child is needed.
    """
    reader = _Reader(file)
    reader.read()
    reader.conclude()


class _Reader:
    def __init__(self, file: ImportedFile) -> None:
        self._file, self._source, self._size = file, file.source, file.reading.piece_bytes
        self._at = 0
        self._begins = True
        self._is_lost = False  # whether the next batch may begin with something else than a packet
        self._places = 0  # places with bytes that are not packets
        self._last: PacketsRead | None = None

    def _submit(self) -> tuple[Future[PacketsRead], int, bool]:
        """Has the next batch read; returns where its bytes end, and whether that is the file's end."""
        span, stop, is_last = self._source.span(self._at, self._size)
        parameters = {
            **span.parameters, "begins": self._begins, "again": self._file.remembered.has_tracks,
            "is_lost": self._is_lost, "is_last": is_last,
        }  # fmt: skip
        self._begins = False
        return self._file.reading.children.packets(span, parameters), stop, is_last

    def read(self) -> None:
        """Reads all batches; the rows of one are written while the next one is read."""
        future, stop, is_last = self._submit()
        is_done = False
        while not is_done:
            self._last = found = future.result()
            if found.needs_zstd:
                self._ask_for_zstd()
            is_done = self._advance(found, stop, is_last)
            self._source.forget(self._at)
            if not is_done:
                future, stop, is_last = self._submit()
            self._file.add(found.read)

    def _ask_for_zstd(self) -> None:
        if self._file.remembered.needs_zstd:
            raise AnswerError
        self._file.remembered.needs_zstd = True
        raise ReadAgain

    def _advance(self, found: PacketsRead, stop: int, is_last: bool) -> bool:
        """Goes to the next batch; returns whether there is none. Counts what cannot be read."""
        length = stop - self._at
        if found.consumed > length:
            raise AnswerError
        self._at += found.consumed
        if found.is_damaged:
            self._places += 1
            self._drop(found, "unreadable")
            self._is_lost = True
        elif found.consumed:
            self._is_lost = found.is_lost
            self._size = self._file.reading.piece_bytes
        if self._at == stop and is_last:
            return True
        if found.longer and is_last:
            self._drop(found, "cut off at the end of the file")
            return True
        if found.longer > MOST_PIECE_BYTES:
            self._drop(found, "too long")
            return self._skip(found.longer)
        if found.longer and not found.consumed:
            self._size = min(max(4 * self._size, found.longer), MOST_PIECE_BYTES)
        elif not found.consumed and not found.is_damaged and not found.is_lost:
            raise AnswerError
        return False

    def _skip(self, count: int) -> bool:
        """Skips bytes, in chunks; returns whether the file ends before."""
        while count:
            data, is_last = self._source.bytes(self._at, min(count, _SKIPPED))
            self._at += len(data)
            count -= len(data)
            self._source.forget(self._at)
            if is_last and (count or not data):
                return True
        return False

    @staticmethod
    def _drop(found: PacketsRead, reason: str) -> None:
        found.read.events += 1
        found.read.dropped[reason] = found.read.dropped.get(reason, 0) + 1

    def conclude(self) -> None:
        """Sets the dialect of the file, and the problems for what is doubtful."""
        found, file = self._last, self._file
        assert found is not None
        if found.facts["described_later"] and not file.remembered.has_tracks:
            file.remembered.has_tracks = True
            raise ReadAgain
        file.find_dialect()
        counts, problems = file.facts.counts, file.facts.problems
        if self._places and counts.events == sum(counts.dropped.values()):
            raise IaprofError(f"{file.name} is not a trace: it has bytes that are no packets, and nothing else to show")
        if self._places:
            places = "1 place" if self._places == 1 else f"{self._places:,} places"
            problems.append(f"bytes that are not packets, at {places}: what is up to the next marker was not read")
        problems += [text.format(found.facts[what]) for what, text in _PROBLEMS.items() if found.facts[what]]
        problems += [f"{what}: {count:,}" for what, count in found.left_out.items()]
