"""Tables of events: dataclasses whose fields are columns, which take as little memory as their values permit."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterator, Sequence, ValuesView
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

ABSENT = np.iinfo(np.int64).min
"""An integer that an event does not have, in columns of int64."""
_NARROW = (np.uint8, np.uint16, np.uint32)
_CHUNK = 1 << 18  # rows
_SAMPLE = 1000  # the first values, which are checked before all of them


def chunks(count: int) -> Iterator[slice]:
    """Yields ranges of rows: what is computed for one range at a time needs little memory for intermediate arrays."""
    for begin in range(0, count, _CHUNK):
        yield slice(begin, begin + _CHUNK)


@dataclass(frozen=True)
class Constant:
    """The same value in all rows."""

    value: NDArray[Any]  # of shape ()
    count: int

    def __len__(self) -> int:
        return self.count

    def values(self) -> NDArray[Any]:
        """Returns the values, as a view of a single one."""
        return np.broadcast_to(self.value, self.count)

    def take(self, rows: NDArray[np.int64]) -> Constant:
        """Returns the given rows."""
        return Constant(self.value, len(rows))


@dataclass(frozen=True)
class Narrow:
    """Integers as differences from the least one. The greatest code means ABSENT."""

    codes: NDArray[Any]  # uint8, uint16 or uint32
    least: int
    has_absent: bool
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.codes)

    def values(self) -> NDArray[Any]:
        """Returns the values."""
        found = self.codes.astype(self.dtype)
        if self.least:
            found += self.dtype.type(self.least)
        if self.has_absent:
            found[self.codes == np.iinfo(self.codes.dtype).max] = ABSENT
        found.flags.writeable = False
        return found

    def take(self, rows: NDArray[np.int64]) -> Narrow:
        """Returns the given rows."""
        return Narrow(self.codes.take(rows), self.least, self.has_absent, self.dtype)


@dataclass(frozen=True)
class Repeated:
    """Rows of several values, most of which repeat the row before."""

    codes: NDArray[np.uint32]  # [n], rows of the table
    table: tuple[Column, ...]  # its columns

    def __len__(self) -> int:
        return len(self.codes)

    def distinct(self) -> NDArray[np.int64]:
        """Returns the table, int64[m, columns], in which some rows may not be used by any code."""
        found = np.empty((len(self.table[0]), len(self.table)), np.int64)
        for number, column in enumerate(self.table):
            found[:, number] = unpacked(column)
        return found

    def values(self) -> NDArray[Any]:
        """Returns all rows: int64[n, columns]."""
        found = self.distinct()[self.codes]
        found.flags.writeable = False
        return found

    def column(self, number: int) -> NDArray[Any]:
        """Returns one of the values of each row."""
        return np.asarray(unpacked(self.table[number])[self.codes])

    def with_table(self, table: NDArray[np.int64]) -> Repeated:
        """Returns the same codes with another table."""
        return Repeated(self.codes, tuple(pack(np.ascontiguousarray(column)) for column in table.T))

    def take(self, rows: NDArray[np.int64]) -> Repeated:
        """Returns the given rows."""
        if self.codes.strides[0] == 0:  # all codes are equal
            return Repeated(np.broadcast_to(self.codes[:1], len(rows)), self.table)
        codes = self.codes.take(rows)
        if len(codes) * 4 >= len(self.table[0]):
            return Repeated(codes, self.table)
        # A few rows, which is what writers take, neither keep the whole table nor unpack it.
        table = tuple(_taken(column, codes) for column in self.table)
        return Repeated(np.arange(len(codes), dtype=np.uint32), table)


Packed: TypeAlias = Constant | Narrow | Repeated
Column: TypeAlias = NDArray[Any] | Packed


def unpacked(column: Column) -> NDArray[Any]:
    """Returns the values of a column."""
    return column if isinstance(column, np.ndarray) else column.values()


def _taken(column: Column, rows: NDArray[Any]) -> Column:
    return column.take(rows, 0) if isinstance(column, np.ndarray) else column.take(rows)


def pack(values: NDArray[Any]) -> Column:
    """Returns a column in less memory, or as it is."""
    if values.ndim > 1:
        return _repeated(values) if values.dtype == np.int64 else values
    if not len(values) or values.dtype.kind not in "biuf":
        return values
    if values.strides[0] == 0 or _is_constant(values):
        return Constant(np.array(values[0]), len(values))
    if values.dtype.kind == "f":
        return _whole(values)
    return values if values.dtype == bool else _narrow(values)


def _is_constant(values: NDArray[Any]) -> bool:
    # As bytes: NaN is not NaN, and -0.0 is 0.0.
    bits = values.view(f"u{values.itemsize}")
    return bool((bits[:_SAMPLE] == bits[0]).all() and (bits == bits[0]).all())


def _narrow(values: NDArray[Any]) -> Column:
    least, most = int(values.min()), int(values.max())
    absent = None
    if least == ABSENT:
        absent = values == ABSENT
        least = int(values.min(where=~absent, initial=most))
    return _codes(values, least, most, absent)


def _codes(values: NDArray[Any], least: int, most: int, absent: NDArray[np.bool_] | None) -> Column:
    width = _width(least, most, absent is not None)
    if width is None or np.dtype(width).itemsize >= values.itemsize:
        return values
    least = least if least < 0 or most >= np.iinfo(width).max else 0  # then unpacking adds nothing
    codes = (values - values.dtype.type(least) if least else values).astype(width)
    if absent is not None:
        codes[absent] = np.iinfo(width).max
    return Narrow(codes, least, absent is not None, values.dtype)


def _width(least: int, most: int, has_absent: bool) -> type[np.unsignedinteger[Any]] | None:
    for each in _NARROW:
        if most - least < np.iinfo(each).max + (not has_absent):
            return each
    return None


def _whole(values: NDArray[Any]) -> Column:
    """Packs float64 values that are whole numbers."""
    for some in (values[:_SAMPLE], values):
        with np.errstate(invalid="ignore"):
            codes = some.astype(np.uint32)
        if values.dtype != np.float64 or not (codes.astype(np.float64).view(np.int64) == some.view(np.int64)).all():
            return values
    return Narrow(codes, 0, False, values.dtype)


def _repeated(values: NDArray[np.int64]) -> Column:
    if not len(values) or len(values) >= np.iinfo(np.uint32).max:
        return values
    new = np.zeros(len(values), bool)
    for number in range(values.shape[1]):
        column = values[:, number]
        new[1:] |= column[1:] != column[:-1]
    absent = values[:, 0] == ABSENT
    for number in range(1, values.shape[1]):
        absent &= values[:, number] == ABSENT
    new[0] = True
    new &= ~absent  # these have the first row of the table
    codes = np.cumsum(new, dtype=np.uint32) if new.any() else np.broadcast_to(np.uint32(0), len(values))
    if new.any():
        codes[absent] = 0
    rows = np.flatnonzero(new)
    table = np.empty((len(rows) + 1, values.shape[1]), np.int64)
    table[0] = ABSENT
    table[1:] = values[rows]
    return Repeated(codes, tuple(pack(np.ascontiguousarray(column)) for column in table.T))


def joined(pieces: Sequence[Column]) -> Column:
    """Concatenates columns of one type."""
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    if isinstance(first, Constant) and all(
        isinstance(each, Constant) and each.value.tobytes() == first.value.tobytes() for each in pieces
    ):
        return Constant(first.value, sum(map(len, pieces)))
    if all(isinstance(each, Repeated) for each in pieces):
        return _joined_repeated([each for each in pieces if isinstance(each, Repeated)])
    narrow = [each for each in pieces if not isinstance(each, np.ndarray)]
    if len(narrow) == len(pieces) and unpacked(first)[:1].dtype.kind in "iu" and unpacked(first).ndim == 1:
        return _joined_narrow(narrow)
    whole = np.empty((sum(map(len, pieces)), *unpacked(first).shape[1:]), unpacked(first).dtype)
    begin = 0
    for each in pieces:
        whole[begin : begin + len(each)] = unpacked(each)
        begin += len(each)
    return whole


def _joined_narrow(pieces: Sequence[Packed]) -> Column:
    lows, highs, has_absent = [], [], False
    for each in pieces:
        values = each.values()
        present = values != ABSENT
        if not present.all():
            has_absent, values = True, values[present]
        if len(values):
            lows.append(int(values.min()))
            highs.append(int(values.max()))
    dtype = pieces[0].values().dtype
    count = sum(map(len, pieces))
    width = _width(min(lows), max(highs), has_absent) if lows else None
    whole = np.empty(count, dtype if width is None else width)
    least = min(lows, default=0)
    begin = 0
    for each in pieces:
        values = each.values()
        mine = whole[begin : begin + len(each)]
        mine[:] = values if width is None else (values - dtype.type(least)).astype(width)
        if has_absent and width is not None:
            mine[values == ABSENT] = np.iinfo(width).max
        begin += len(each)
    if width is None or np.dtype(width).itemsize >= dtype.itemsize:
        return whole if width is None else Narrow(whole, least, has_absent, dtype).values()
    return Narrow(whole, least, has_absent, dtype)


def _joined_repeated(pieces: Sequence[Repeated]) -> Column:
    codes = np.empty(sum(map(len, pieces)), np.uint32)
    begin = rows = 0
    for each in pieces:
        codes[begin : begin + len(each)] = each.codes + np.uint32(rows)
        begin += len(each)
        rows += len(each.table[0])
    return Repeated(codes, tuple(joined(columns) for columns in zip(*(each.table for each in pieces), strict=True)))


NO_CODE = -1
LEAST_PACKED = 1 << 16
"""Tables with at least so many rows are packed: smaller ones need little memory anyway."""
_PACKED = "_packed"


class Extra(dict[str, NDArray[Any]]):
    """Columns by name. Packed columns are unpacked at each access."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        return unpacked(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a column."""
        return unpacked(super().get(name, default)) if name in self else default

    def __iter__(self) -> Iterator[str]:  # so that `{**extra}` calls __getitem__, too
        return super().__iter__()

    def items(self) -> ItemsView[str, NDArray[Any]]:  # type: ignore[override]
        """Yields names and columns, unpacked one at a time."""
        return ItemsView(self)

    def values(self) -> ValuesView[NDArray[Any]]:  # type: ignore[override]
        """Yields columns, unpacked one at a time."""
        return ValuesView(self)

    def stored(self) -> dict[str, Column]:
        """Returns columns as they are stored."""
        return dict(super().items())

    @classmethod
    def of(cls, columns: dict[str, Any]) -> Extra:
        """Returns columns, packed or not."""
        return cls(columns)


class Columns:
    """A dataclass of arrays of one length, and `extra`, which maps names to arrays of that length.

    Large arrays are packed, see `pack`. A packed array is unpacked at each access, so writing to it has no effect.
    """

    extra: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self._stored().values())))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NDArray[Any]:
            """Returns a packed column."""
            packed = self.__dict__.get(_PACKED, {}).get(name)
            if packed is None:
                raise AttributeError(name)
            return packed.values()

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__.get(_PACKED, {}).pop(name, None)
        if isinstance(value, np.ndarray) or name in (_PACKED, "extra"):
            super().__setattr__(name, value)
        else:
            self.__dict__.setdefault(_PACKED, {})[name] = value
            self.__dict__.pop(name, None)

    def take(self, rows: NDArray[Any], only: Collection[str] = ()) -> Self:
        """Returns some rows, by numbers or by a mask; without extra columns if `only` names those that are needed."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)  # once, not for each column
        extra = {} if only else {name: _taken(column, rows) for name, column in _stored_extra(self.extra).items()}
        stored = {name: column for name, column in self._stored().items() if not only or name in only}
        return self._of({name: _taken(column, rows) for name, column in stored.items()}, extra)

    def keep(self, rows: NDArray[Any]) -> None:
        """Keeps only some rows. Columns are replaced one at a time, which needs less memory than `take`."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        for name in self._stored():
            setattr(self, name, _taken(self._stored()[name], rows))
        extra = Extra.of(_stored_extra(self.extra))
        self.extra = extra
        for name in list(extra):
            extra[name] = _taken(dict.__getitem__(extra, name), rows)  # type: ignore[assignment]

    def joined(self, other: Self) -> Self:
        """Returns these rows, then those of `other`. Extra columns that only one has are absent in the other rows."""
        if len(self) + len(other) >= LEAST_PACKED:
            self.pack(0)
            other.pack(0)
        mine, others = self._stored(), other._stored()
        columns = {name: joined([column, others[name]]) for name, column in mine.items()}
        extras = [_stored_extra(each.extra) for each in (self, other)]
        extra = {}
        for name in {**extras[0], **extras[1]}:
            like = unpacked(extras[0].get(name, extras[1].get(name)))[:0]  # type: ignore[arg-type]
            pieces = [
                own[name] if name in own else _absent(like, len(each))
                for own, each in zip(extras, (self, other), strict=True)
            ]
            extra[name] = joined(pieces)
        return self._of(columns, extra)

    def changed(self, **columns: NDArray[Any]) -> Self:
        """Returns the same rows with other values in some columns."""
        made = self._of(self._stored(), _stored_extra(self.extra))
        for name, values in columns.items():
            setattr(made, name, values)
        return made

    def pack(self, least: int = LEAST_PACKED) -> None:
        """Packs columns of many rows, at least `least`, that are small integers, constant, or repeated."""
        if len(self) < least:
            return
        for name, column in self._stored().items():
            if isinstance(column, np.ndarray):
                setattr(self, name, pack(column))
        extra = Extra.of(_stored_extra(self.extra))
        for name, column in extra.stored().items():
            if isinstance(column, np.ndarray):
                extra[name] = pack(column)  # type: ignore[assignment]
        self.extra = extra

    def unpack(self, *names: str) -> None:
        """Makes columns arrays that can be written to."""
        for name in names:
            values = getattr(self, name)
            setattr(self, name, values if values.flags.writeable else np.array(values))

    def column(self, name: str) -> Column:
        """Returns a column as it is stored."""
        return self._stored()[name]

    def _stored(self) -> dict[str, Column]:
        """Returns columns as they are stored, without extra ones."""
        packed = self.__dict__.get(_PACKED, {})
        names = [each.name for each in fields(self) if each.name != "extra"]  # type: ignore[arg-type]
        known = {**self.__dict__, **packed}
        return {name: known[name] for name in names if name in known}

    def _of(self, columns: dict[str, Column], extra: dict[str, Column]) -> Self:
        made = object.__new__(type(self))
        for name, column in columns.items():
            setattr(made, name, column)
        made.extra = Extra.of(extra)
        return made


def _stored_extra(extra: dict[str, NDArray[Any]]) -> dict[str, Column]:
    return extra.stored() if isinstance(extra, Extra) else dict(extra)


def _absent(like: NDArray[Any], count: int) -> Column:
    """Returns absent values: NaN, ABSENT, or NO_CODE for int32, which has codes of texts."""
    if like.dtype == np.int32:
        return Constant(np.array(NO_CODE, np.int32), count)
    if like.dtype == bool:
        return Constant(np.array(False), count)
    return Constant(np.array(np.nan if like.dtype.kind == "f" else ABSENT, like.dtype), count)
