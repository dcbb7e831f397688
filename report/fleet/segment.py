"""The file in which profiles are kept: a segment has those of several captures (docs/fleet.md has the columns).

A row is a sum of samples. Texts stand in it as they are, for SQL; the numbers beside them, `launch_id` and the like,
are those of the segment's tables, which are made of each number's first row. A segment is as untrusted as a capture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.energy import Energy
from iaprof.formats.header.stack_counts import PythonCounts, WholeStacks
from iaprof.formats.profile import Code, CodeKind, Launch, Origin
from iaprof.gpu.vendors import REASONS
from iaprof.report.facts import Matched
from iaprof.report.fleet.samples import TABLES, HashedKernel, Rows, Samples
from iaprof.report.fleet.totals import Summary
from iaprof.report.gpu.lines import MAX_LINE

VERSION = 8
SAMPLES = "samples_"  # and the reason: the columns of counts
_KEY = b"iaprof-profiles"
_LAUNCH = ("process", "container", "pod", "operators", "stack", "kernel_stack", "origins")
_KERNEL = ("kernel", "kernel_file", "kernel_hash")
_CODE = ("functions", "files", "lines", "mnemonic")
_OF = {"launch": _LAUNCH, "kernel": _KERNEL, "code": _CODE, "device": ("device",)}
_IDS = tuple(f"{name}_id" for name in _OF)
_NUMBERS = ("capture", *_IDS, "offset", "time", "energy_nj", "divided", "fork")
_TEXTS = tuple(text for texts in _OF.values() for text in texts)
_OF_CAPTURE = ("file", "host", "labels")
_MOST_METADATA = 64 << 20  # bytes
_MOST_ROWS = 1 << 26
_MOST_BYTES = 1 << 29  # of a file: a task of a fleet makes one of captures of 256 MiB
_MOST = 1 << 53  # samples or nJ of a row: sums of these fit 64 bits, and JSON has them exactly
_LATEST_NS = 1 << 62  # since 1970: in 2116
_DAMAGES = (
    pa.ArrowException, ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What reading a file that a stranger made may raise."""


class SegmentError(IaprofError):
    """The file is not a segment, or is damaged."""


@dataclass(frozen=True, eq=False)
class Segment(Samples):
    """The profiles of several captures, which the column `capture` of the rows refers to."""

    captures: Sequence[Summary]

    def only(self, captures: Sequence[int]) -> Segment:
        """Some of the captures, by number."""
        number = np.full(len(self.captures), -1, np.int64)
        number[captures] = np.arange(len(captures))
        rows = self.rows.renumbered({"capture": number})
        rows = rows.only(rows.capture >= 0)
        return replace(self, captures=[self.captures[each] for each in captures], rows=rows)

    def write(self, file: BinaryIO) -> None:
        """Writes it as Parquet."""
        rows = self.rows
        columns: dict[str, pa.Array] = {"capture": pa.array(rows.capture.astype(np.int32))}
        described = [(each.file, each.host, json.dumps(each.labels, sort_keys=True)) for each in self.captures]
        columns |= _dictionaries(_OF_CAPTURE, rows.capture, _columns_of(_OF_CAPTURE, described))
        kernels = [(None,) * 3 if each is None else (each.symbol, each.file, each.hash) for each in self.kernels]
        tables: dict[str, Iterable[Sequence[str | None]]] = {
            "launch": _launch_columns(self.launches),
            "kernel": _columns_of(_KERNEL, kernels),
            "code": _columns_of(_CODE, list(map(_code_texts, self.codes))),
            "device": [self.devices],
        }
        for name, texts in tables.items():
            number = getattr(rows, name)
            columns[f"{name}_id"] = pa.array(number.astype(np.int32))
            columns |= _dictionaries(_OF[name], number, texts)
        columns |= {"offset": pa.array(rows.offset), "time": pa.array(rows.time).cast(pa.timestamp("ns", "UTC"))}
        columns["samples"] = pa.array(rows.counts.sum(axis=1))
        columns |= {f"{SAMPLES}{reason}": pa.array(rows.counts[:, at]) for at, reason in enumerate(self.reasons)}
        columns |= {"energy_nj": pa.array(rows.energy), "divided": pa.array(rows.divided), "fork": pa.array(rows.fork)}
        about = {"version": VERSION, "captures": self.captures}
        table = pa.table(columns).replace_schema_metadata({_KEY: msgspec.json.encode(about)})
        pq.write_table(table, file, compression="zstd", row_group_size=_MOST_ROWS, write_statistics=False)

    @classmethod
    def read(cls, file: BinaryIO, name: str) -> Segment:
        """Reads a segment.

        Args:
            file: the open file.
            name: its name, for errors.

        Raises:
            SegmentError: it is none, or is damaged.
        """
        try:
            return _read(pq.ParquetFile(file, read_dictionary=list(_TEXTS)))
        except _DAMAGES as error:
            raise SegmentError(f"{name} holds no profiles of this version, or is damaged: remove it") from error


def keys_in(file: BinaryIO, name: str) -> list[str]:
    """Returns the keys of the profiles that a segment has. Reading it can still show that it is damaged.

    Raises:
        SegmentError: it is none, or is damaged.
    """
    try:
        if file.seek(0, os.SEEK_END) > _MOST_BYTES:
            raise ValueError
        about = msgspec.json.decode(_metadata(pq.ParquetFile(file).schema_arrow), type=_About)
        if about.version != VERSION:
            raise ValueError
        return [each.key for each in about.captures]
    except (*_DAMAGES, MemoryError) as error:
        raise SegmentError(f"{name} holds no profiles of this version, or is damaged: remove it") from error


class _Keyed(msgspec.Struct):
    key: str


class _About(msgspec.Struct):
    """As much of the metadata as keys_in needs."""

    version: int
    captures: list[_Keyed]


def _read(file: pq.ParquetFile) -> Segment:
    captures = _summaries(file.schema_arrow)
    if file.metadata.num_rows > _MOST_ROWS:
        raise ValueError
    reasons = [name.removeprefix(SAMPLES) for name in file.schema_arrow.names if name.startswith(SAMPLES)]
    counted = [f"{SAMPLES}{reason}" for reason in reasons]
    if not set(reasons) <= set(REASONS):
        raise ValueError
    table = file.read([*_NUMBERS, *_TEXTS, *counted])
    numbers = {name: _integers(table[name]) for name in (*_NUMBERS, *counted)}
    capture = numbers["capture"]
    if len(capture) and not 0 <= capture.min() <= capture.max() < len(captures):
        raise ValueError
    made: dict[str, Callable[..., Any]] = {
        "launch": _Launches().of, "kernel": _kernel, "code": _code, "device": lambda device: device or ""
    }  # fmt: skip
    found: dict[str, tuple[NDArray[np.int64], list[Any]]] = {}
    for name, texts in _OF.items():
        _, first, number = np.unique(numbers[f"{name}_id"], return_index=True, return_inverse=True)
        of_first = table.select(list(texts)).take(pa.array(first))
        columns = [of_first[text].cast(pa.string()).to_pylist() for text in texts]
        found[name] = number, list(map(made[name], *columns))
    counts = np.stack([numbers[name] for name in counted], axis=1) if counted else np.empty((len(table), 0), np.int64)
    for name in (*counted, "energy_nj", "divided"):
        if len(table) and not 0 <= numbers[name].min() <= numbers[name].max() < _MOST:
            raise ValueError
    if np.bincount(capture, counts.sum(axis=1), len(captures)).tolist() != [each.samples for each in captures]:
        raise ValueError
    selected = [Energy(*each.energy_nj).selected for each in captures]
    if (np.bincount(capture, numbers["energy_nj"], len(captures)) > selected).any():
        raise ValueError
    if numbers["fork"].min(initial=0) < 0 or (numbers["divided"] > counts.sum(axis=1)).any():
        raise ValueError
    rows = Rows(
        capture,
        **{name: number for name, (number, _) in found.items()},
        offset=numbers["offset"],
        time=numbers["time"],
        fork=numbers["fork"],
        counts=counts,
        energy=numbers["energy_nj"],
        divided=numbers["divided"],
    )
    tables: dict[str, Any] = {TABLES[name]: made for name, (_, made) in found.items()}
    return Segment(rows, **tables, reasons=reasons, captures=captures)


def _summaries(schema: pa.Schema) -> list[Summary]:
    about = json.loads(_metadata(schema))
    if about["version"] != VERSION:
        raise ValueError
    captures = [Summary.from_json(each) for each in about["captures"]]
    if not all(map(_is_valid, captures)):
        raise ValueError
    return captures


def _metadata(schema: pa.Schema) -> bytes:
    written: bytes = (schema.metadata or {})[_KEY]
    if len(written) > _MOST_METADATA:
        raise ValueError
    return written


def _is_valid(capture: Summary) -> bool:
    """Whether figures are such as a Mapper makes; it keeps no captures with problems."""
    counts = [
        capture.records,
        capture.samples,
        capture.active,
        capture.unknown_kernel,
        capture.no_launch,
        *capture.matched,
    ]
    counts += [*capture.energy_nj, *(each.launches for each in capture.launched)]
    counts += [each.count for each in capture.losses if each.count is not None]
    return (
        capture.is_sound
        and all(0 <= count < _MOST for count in counts)
        and 0 <= capture.begun_ns < _LATEST_NS
        and 0 <= capture.seconds < _LATEST_NS / 1e9
        and len(capture.matched) == len(fields(Matched))
        and len(capture.energy_nj) in (0, len(fields(Energy)))
        and WholeStacks.from_json(capture.whole) is not None
        and PythonCounts.from_json(capture.python) is not None
    )


def _integers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    if column.null_count:
        raise ValueError
    return np.asarray(column.cast(pa.int64()).to_numpy(), np.int64)


def _dictionaries(
    names: Sequence[str], number: NDArray[np.int64], columns: Iterable[Sequence[str | None]]
) -> Iterator[tuple[str, pa.Array]]:
    """Yields a column for each name: the texts of each row's number.

    Args:
        names: the names of the columns.
        number: int64[rows].
        columns: the texts by number, in the order of the names.
    """
    for name, texts in zip(names, columns, strict=True):
        places: dict[str, int] = {}
        place = np.array([-1 if text is None else places.setdefault(text, len(places)) for text in texts], np.int32)
        of_rows = place[number]
        indices = pa.array(of_rows, mask=of_rows < 0)
        yield name, pa.DictionaryArray.from_arrays(indices, pa.array(list(places), pa.string()))


def _columns_of(names: Sequence[str], texts: Sequence[Sequence[str | None]]) -> Iterable[Sequence[str | None]]:
    return zip(*texts, strict=True) if texts else ((),) * len(names)


def _launch_columns(launches: Sequence[Launch | None]) -> Iterator[Sequence[str | None]]:
    """Yields columns of texts, one by one, as those of the frames are large."""
    yield [None if each is None else each.comm for each in launches]
    yield [None if each is None else each.container for each in launches]
    yield [None if each is None else each.pod for each in launches]
    yield [None if each is None else _joined(each.operators) for each in launches]
    yield [None if each is None else _joined(each.stack) for each in launches]
    yield [None if each is None else _joined(each.kernel_stack) for each in launches]
    origin = cache(lambda each: f"{each.kind}\t{each.module}")  # millions of frames share few
    yield [None if each is None else _joined(list(map(origin, each.origins))) for each in launches]


class _Launches:
    """Launches of texts; they share their frames and origins, of which millions are few different ones."""

    def __init__(self) -> None:
        self._frames: dict[str, str] = {}
        self._origin = cache(_origin)

    def of(
        self,
        process: str | None,
        container: str | None,
        pod: str | None,
        operators: str | None,
        stack: str | None,
        kernel_stack: str | None,
        origins: str | None,
    ) -> Launch | None:
        """Returns the launch with these texts."""
        if process is None:
            return None
        frames, of_frames = _lines(stack), _lines(origins)
        if len(of_frames) not in (0, len(frames)):
            raise ValueError
        return Launch(
            process,
            0,
            tuple(map(self._frames.setdefault, frames, frames)),
            _lines(kernel_stack),
            origins=tuple(map(self._origin, of_frames)),
            operators=_lines(operators),
            container=container or "",
            pod=pod or "",
        )


def _origin(text: str) -> Origin:
    kind, _, module = text.partition("\t")
    return Origin(CodeKind(kind), module)


def _code_texts(code: Code) -> tuple[str | None, ...]:
    return _joined(code.functions), _joined(code.files), _joined(list(map(str, code.lines))), code.mnemonic


def _code(functions: str | None, files: str | None, lines: str | None, mnemonic: str | None) -> Code:
    code = Code(mnemonic or "", _lines(functions), tuple(map(int, _lines(lines))), _lines(files))
    lengths = {len(each) for each in (code.lines, code.files)}
    if lengths - {0, len(code.functions)} or not all(0 <= each <= MAX_LINE for each in code.lines):
        raise ValueError
    return code


def _joined(lines: Sequence[str]) -> str | None:
    return "\n".join(lines) if lines else None  # "" is one empty frame


def _lines(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(text.split("\n"))


def _kernel(symbol: str | None, file: str | None, hash_: str | None) -> HashedKernel | None:
    return None if symbol is None else HashedKernel(symbol, file or "", hash_ or "")
