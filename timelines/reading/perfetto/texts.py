"""Names and categories of events."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import NO_TEXT
from iaprof.timelines.reading.columns import Texts
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import InternedData, LegacyEvent, TrackEvent
from iaprof.timelines.reading.perfetto.sequences import Sequences
from iaprof.timelines.reading.perfetto.timed import Events
from iaprof.timelines.reading.perfetto.wire import Places

_MOST_CATEGORIES = 64  # of an event


class EventTexts:
    """The texts of a batch."""

    def __init__(self, texts: Texts, content: bytes, sequences: Sequences) -> None:
        """Args: what gives them codes, the batch's bytes, and where interned ones are."""
        self._texts, self._content, self._sequences = texts, content, sequences
        self._codes: dict[bytes, int] = {}

    def _code(self, content: bytes | None) -> int:
        content = content or b""
        if content not in self._codes:
            self._codes[content] = self._texts[content.decode("utf-8", "replace")]
        return self._codes[content]

    def names(self, events: Events) -> NDArray[np.int32]:
        """Returns the codes of names; NO_TEXT for events without one."""
        fields, row = events.fields, events.row
        iids = fields.column(TrackEvent.NAME_IID)[row]
        if events.legacy is not None:
            iids = np.where(iids == 0, events.legacy.column(LegacyEvent.NAME_IID)[row], iids)
        found = self._interned(InternedData.EVENT_NAMES, events.generation, iids)
        owner, starts, ends = fields.spans(TrackEvent.NAME)
        if len(owner):
            codes = np.full(len(fields.damaged), NO_TEXT, np.int32)
            codes[owner] = self._inline(starts, ends)
            found = np.where(codes[row] != NO_TEXT, codes[row], found)
        nameless = (found == NO_TEXT) & (events.phase != ord("E"))
        if nameless.any():
            found[nameless] = self._code(b"")
        return found

    def _interned(self, kind: int, generation: NDArray[np.int64], iids: NDArray[np.uint64]) -> NDArray[np.int32]:
        found = np.full(len(iids), NO_TEXT, np.int32)
        rows = np.flatnonzero(iids)
        if len(rows):
            texts, of_row = self._sequences.distinct(kind, generation[rows], iids[rows])
            found[rows] = np.array([self._code(text) for text in texts], np.int32)[of_row]
            missing = np.array([text is None for text in texts], bool)[of_row]
            self._sequences.left_out["interned texts that nobody defined"] += int(missing.sum())
        return found

    def _inline(self, starts: Places, ends: Places) -> NDArray[np.int32]:
        content = self._content
        return np.array(
            [self._code(content[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)],
            np.int32,
        )

    def categories(self, events: Events) -> NDArray[np.int32]:
        """Returns the codes of categories, several with commas between them; NO_TEXT for events without."""
        fields = events.fields
        place = events.places()
        found = np.full(len(events.row), NO_TEXT, np.int32)
        rows = fields.of(TrackEvent.CATEGORY_IIDS, wire.VARINT)
        rows = rows[place[fields.owner[rows]] >= 0]
        at = place[fields.owner[rows]]
        codes = self._interned(InternedData.EVENT_CATEGORIES, events.generation[at], fields.value[rows])
        owner, starts, ends = fields.spans(TrackEvent.CATEGORIES)
        kept = place[owner] >= 0
        at = np.concatenate([at, place[owner[kept]]])
        codes = np.concatenate([codes, self._inline(starts[kept], ends[kept])])
        found[at] = codes
        several = np.flatnonzero((np.bincount(at, minlength=len(found)) > 1)[at]) if len(at) else at
        if len(several):
            texts = list(self._texts)
            by_row: dict[int, list[str]] = defaultdict(list)
            for row, code in zip(at[several].tolist(), codes[several].tolist(), strict=True):
                if code != NO_TEXT and len(by_row[row]) < _MOST_CATEGORIES:
                    by_row[row].append(texts[code])
            for row, each in by_row.items():
                found[row] = self._texts[",".join(each)]
        return found

    def letters(self, phases: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Returns the codes of phases."""
        codes = np.zeros(256, np.int32)
        for phase in np.unique(phases).tolist():
            codes[phase] = self._texts[chr(phase)]
        return codes[phases]
