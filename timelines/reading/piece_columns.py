"""Makes the columns of a piece of a list of events, in a sandboxed child.

Blocks of events in the usual forms are read as arrays, others event by event.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading import block_columns, event_columns, event_decoding
from iaprof.timelines.reading.answer import ABSENT, CODES, DOUBLES, NO_TEXT, Columns, Table
from iaprof.timelines.reading.blocks import Block, NotPlain
from iaprof.timelines.reading.not_finite import WithNulls, with_nulls

BLOCK_BYTES = 3 << 19  # a larger one needs more memory, a smaller one costs more for each event
_SLACK = 4  # the last block may be longer by 1/4: a short block costs almost as much as a whole one
_BLANK, _AHEAD = b" \t\r\n,", 64
_ONCE = frozenset({"args", "args_row", "args_length"})  # columns without a value for each row


def read(
    data: bytes, is_last: bool, is_lost: bool = False, gives_up: bool = False, block_bytes: int = BLOCK_BYTES
) -> tuple[Columns, event_decoding.Piece, int]:
    """Reads a piece. Arguments are as of event_decoding.read; a block has about `block_bytes`.

    Returns:
        its columns; what event_decoding.read returned, without the events; and the number of events, dropped ones
        included.
    """
    given = data
    data, bad_bytes = event_decoding.valid(given)
    texts = event_columns.Texts()
    columns: list[Columns] = []
    piece = event_decoding.Piece()
    count = at = 0
    replaced: WithNulls | None = None

    def add(found: event_decoding.Piece) -> None:
        nonlocal piece, count
        count += len(found.events) + sum(found.dropped.values())
        columns.append(event_columns.columns_of(found.events, found.dropped, texts))
        found.dropped += piece.dropped
        piece = found

    size = block_bytes
    while not is_lost and data[at : at + _AHEAD].strip(_BLANK) + data[at + _AHEAD : at + _AHEAD + 1]:
        try:
            left = len(data) - at
            block = Block(data[at : at + (size if left > size + size // _SLACK else left)])
        except NotPlain:
            if replaced is None:
                data, replaced = _replaced(data, at)
                if replaced.words:
                    continue
            if size < len(data) - at and size == block_bytes:
                size *= 8  # one event may be so long
                continue
            break
        size = block_bytes
        try:
            columns.append(block_columns.columns_of(block, texts))
            count += block.events
        except NotPlain:
            found = event_decoding.read(
                data[at : at + block.length] + b",", is_last=False
            )  # the comma ends the last event
            if found.lost or found.consumed < block.length:
                break
            add(found)
        at += block.length
    if at < len(data):
        if replaced is None:
            data, replaced = _replaced(data, at)
        found = event_decoding.read(data[at:], is_last, is_lost, gives_up)
        add(found)
        at += found.consumed
    if replaced is not None:
        at = replaced.given(at)
    piece.consumed, piece.events = at, []
    if bad_bytes:
        piece.bad_bytes = event_decoding.valid(given[:at])[1]  # bytes after it are read again
    joined = join(columns)
    joined.texts = texts.values_cut()
    joined.cut_texts = texts.cut
    return joined, piece, count


def _replaced(data: bytes, at: int) -> tuple[bytes, WithNulls]:
    """Replaces numbers that are not finite, from an offset on."""
    found = with_nulls(data[at:])
    found.words = [(word + at, longer) for word, longer in found.words]
    return data[:at] + found.text, found


def join(columns: list[Columns]) -> Columns:
    """Concatenates columns whose codes refer to the same texts."""
    if len(columns) == 1:
        return columns[0]
    slices, counters, flows, instants = (
        _join([table for each in columns if (table := getattr(each, kind))])
        for kind in ("slices", "counters", "flows", "instants")
    )
    cut_args, bad_values = sum(each.cut_args for each in columns), sum(each.bad_values for each in columns)
    return Columns(slices, counters, flows, instants, cut_args=cut_args, bad_values=bad_values)


def _join(tables: list[Table]) -> Table:
    if len(tables) < 2:
        return tables[0] if tables else {}
    counts = [len(table["time_ns"]) for table in tables]
    found: Table = {}
    for name in dict.fromkeys(name for table in tables for name in table if name not in _ONCE):
        values = [table.get(name) for table in tables]
        if name == "event":  # numbers
            first = np.cumsum([0, *(int(each.max(initial=-1)) + 1 for each in values if each is not None)])
            values = [each + begin for each, begin in zip(values, first, strict=False) if each is not None]
        found[name] = np.concatenate(
            [_absent(name, count) if each is None else each for each, count in zip(values, counts, strict=True)]
        )
    with_args = [(table, int(sum(counts[:number]))) for number, table in enumerate(tables) if "args" in table]
    if with_args:
        found["args_row"] = np.concatenate([table["args_row"] + first for table, first in with_args])
        for name in ("args_length", "args"):
            found[name] = np.concatenate([table[name] for table, _ in with_args])
    return found


def _absent(name: str, count: int) -> NDArray[Any]:
    """Returns a column for rows that do not have it."""
    if name == "phase":
        return np.zeros(count, np.uint8)  # of slices, all of them X
    if name in CODES:
        return np.full(count, NO_TEXT, np.int32)
    return np.full(count, np.nan) if name in DOUBLES else np.full(count, ABSENT, np.int64)
