"""Tables of events: dataclasses whose fields are columns."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterator, ValuesView
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.columns.packed import ABSENT, Column, Constant, joined, pack, unpacked

NO_CODE = -1
LEAST_PACKED = 1 << 16
"""Rows of a table whose columns are packed. Fewer take little memory as they are."""
_PACKED = "_packed"


class Extra(dict[str, NDArray[Any]]):
    """Columns by name. Some are packed: they are unpacked whenever they are asked for."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        return unpacked(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a column."""
        return unpacked(super().get(name, default)) if name in self else default

    def __iter__(self) -> Iterator[str]:  # so that `{**extra}` asks __getitem__, too
        return super().__iter__()

    def items(self) -> ItemsView[str, NDArray[Any]]:  # type: ignore[override]
        """Returns names and columns, one after the other."""
        return ItemsView(self)

    def values(self) -> ValuesView[NDArray[Any]]:  # type: ignore[override]
        """Returns columns, one after the other."""
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

    Large ones are packed, see `pack`: they are unpacked whenever they are asked for, and cannot be written to then.
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
        """Takes some rows in place of all: column by column, which needs less memory than `take`."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        for name in self._stored():
            setattr(self, name, _taken(self._stored()[name], rows))
        extra = Extra.of(_stored_extra(self.extra))
        self.extra = extra
        for name in list(extra):
            extra[name] = _taken(dict.__getitem__(extra, name), rows)  # type: ignore[assignment]

    def joined(self, other: Self) -> Self:
        """Returns these rows and others after them. What is extra in one of them is absent in the others."""
        if len(self) + len(other) >= LEAST_PACKED:
            self.pack(0)
            other.pack(0)
        mine, others = self._stored(), other._stored()
        columns = {name: joined([column, others[name]]) for name, column in mine.items()}
        extras = [_stored_extra(each.extra) for each in (self, other)]
        extra = {}
        for name in {**extras[0], **extras[1]}:
            like = unpacked(extras[0].get(name, extras[1].get(name)))[:0]  # type: ignore[arg-type]
            parts = [
                own[name] if name in own else _absent(like, len(each))
                for own, each in zip(extras, (self, other), strict=True)
            ]
            extra[name] = joined(parts)
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


def _taken(column: Column, rows: NDArray[Any]) -> Column:
    return column.take(rows, 0) if isinstance(column, np.ndarray) else column.take(rows)


def _absent(like: NDArray[Any], count: int) -> Column:
    """Returns absent values: NaN, ABSENT, or NO_CODE for int32, which has codes of texts."""
    if like.dtype == np.int32:
        return Constant(np.array(NO_CODE, np.int32), count)
    if like.dtype == bool:
        return Constant(np.array(False), count)
    return Constant(np.array(np.nan if like.dtype.kind == "f" else ABSENT, like.dtype), count)
