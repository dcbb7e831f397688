"""The profile as an Arrow table in long form: a row per stack, instruction and reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.energy import NJ_PER_J
from iaprof.formats.export import Export
from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions, kernel_name
from iaprof.formats.stacks.frames import StackTexts

_dictionary = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("host", _dictionary), ("process", _dictionary), ("pid", pa.uint32()), ("operators", _dictionary),
     ("stack", _dictionary), ("kernel", _dictionary), ("file", _dictionary), ("function", _dictionary),
     ("instruction", _dictionary), ("line", pa.uint32()), ("offset", pa.uint64()), ("device", _dictionary),
     ("reason", _dictionary), ("samples", pa.uint64()), ("joules", pa.float64())]
)  # fmt: skip
"""`operators` and `stack` join frames with `;`, outermost first. `function` is the innermost at the instruction, in
`file` and `line`, 0 if unknown. `offset` is in bytes from the kernel's beginning. Unknown values are null;
`host` is null unless the capture is merged, `operators` unless it has a trace. `joules` is what the
GPU used for these samples; null if the capture does not tell."""
SECONDS = pa.field("seconds", pa.float64())
"""The start of the interval, since time 0."""


def profile_table(profile: Profile, options: StackOptions) -> pa.Table:
    """The rows of a profile, one per reason that has samples: SCHEMA, with clean texts.

    Args:
        profile: the profile.
        options: limits the length of CPU stacks.
    """
    row, reason = np.nonzero(profile.counts)
    launches = profile.launches
    launch, code = profile.launch[row], profile.code[row]
    width = max(len(profile.codes), 1)
    places, place = np.unique(profile.kernel[row] * width + code, return_inverse=True)
    names = [_place_names(profile.kernels[each // width], profile.codes[each % width]) for each in places.tolist()]
    texts = StackTexts(options)
    stacks = [None if each is None else texts.of(each) for each in launches]
    columns = [
        _texts([None if each is None else each.host or None for each in launches], launch),
        _texts([None if each is None else each.comm for each in launches], launch),
        pa.array([None if each is None else each.pid for each in launches], pa.uint32()).take(pa.array(launch)),
        _texts([_operators(each) for each in launches], launch),
        _texts(stacks, launch),
        *(_texts([each[at] for each in names], place) for at in range(3)),
        _texts([each.mnemonic for each in profile.codes], code),
        pa.array([each.lines[-1] if each.lines else 0 for each in profile.codes], pa.uint32()).take(pa.array(code)),
        pa.array(profile.offset[row]),
        _texts(profile.devices, profile.device[row]),
        _texts(profile.reasons, reason),
        pa.array(profile.counts[row, reason]),
        _joules(profile, row, profile.counts[row, reason]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def export_table(export: Export, options: StackOptions) -> pa.Table:
    """The rows of an export's profile; if it has intervals, the first column is SECONDS."""
    table = profile_table(export.profile, options)
    if not export.interval_s:
        return table
    numbers = export.profile.interval[np.nonzero(export.profile.counts)[0]]
    return table.add_column(0, SECONDS, pa.array(np.round(numbers * export.interval_s, 9)))


def _texts(texts: Sequence[str | None], numbers: NDArray[Any]) -> pa.Array:
    """The clean text of each row, by `numbers`, as a dictionary column."""
    distinct: dict[str, int] = {}
    of = [-1 if text is None else distinct.setdefault(clean(text), len(distinct)) for text in texts]
    indices = np.array(of, np.int32)[numbers]
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), pa.array(distinct, pa.string()))


def _joules(profile: Profile, row: NDArray[np.int64], samples: NDArray[np.uint64]) -> pa.Array:
    if profile.energy is None:
        return pa.nulls(len(row), pa.float64())
    each = profile.energy / np.maximum(profile.counts.sum(axis=1), 1) / NJ_PER_J
    return pa.array(each[row] * samples)


def _operators(launch: Launch | None) -> str | None:
    return None if launch is None else ";".join(clean(text, ";") for text in launch.operators) or None


def _place_names(kernel: Kernel | None, code: Code) -> tuple[str, str, str]:
    """Kernel, file and innermost function of an instruction."""
    if kernel is None:
        return kernel_name(kernel, code), "", ""
    file = (code.files[-1] if code.files else "") or kernel.file
    return kernel.symbol, file, code.functions[-1] if code.functions else kernel.symbol
