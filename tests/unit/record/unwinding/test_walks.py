"""Where stacks that were walked by frame pointers are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from iaprof.formats.capture.schema import KINDS
from iaprof.record.stacks.walks import WalkedStacks, Walks
from iaprof.symbols.names.address_space import AddressSpaces

PID = 7
DRIVER, LIBRARY, JIT = 0x10000, 0x20000, 0x30000  # where code is; each of 64 KiB
HEAP = 0x900000


def spaces(*records: dict[str, Any]) -> AddressSpaces:
    rows = [dict.fromkeys(field.name for field in KINDS["mapping"]) | record for record in records]
    mapped = pa.Table.from_struct_array(pa.array(rows, KINDS["mapping"]))
    return AddressSpaces(mapped, pa.schema(list(KINDS["process"])).empty_table())


def walked(time: int, *ips: int) -> WalkedStacks:
    ones = np.ones(1, np.uint64)
    return WalkedStacks(
        np.array([PID], np.uint32), ones * np.uint64(time), np.array([len(ips)]), np.array(ips, np.uint64)
    )


def library(time: int) -> dict[str, Any]:
    return {"time_ns": time, "pid": PID, "start": LIBRARY, "length": 0x10000, "offset": 0, "path": "/opt/libfoo.so"}


def test_a_mapping_counts_when_it_was_there() -> None:
    walks = Walks(spaces({**library(1), "start": DRIVER}, library(10**12)), True)
    # not before, but for the time that reading the mappings of running processes takes
    for time, depth in ((100, 1), (10**12 - 10**8, 2), (10**12, 2)):
        cut, _ = walks.cut(walked(time, DRIVER, LIBRARY + 8, HEAP))
        assert cut.depths.tolist() == [depth]


def test_where_mappings_were_lost_a_sample_goes_on_as_far_as_code_is_known() -> None:
    # given samples through code whose mapping was lost, with other data after it
    for complete, depth in ((True, 1), (False, 3)):
        walks = Walks(spaces({**library(1), "start": DRIVER}, library(1)), complete)
        cut, ends = walks.cut(walked(100, DRIVER, JIT + 8, LIBRARY + 8, HEAP))
        assert cut.depths.tolist() == [depth]
        assert ends.addresses.tolist() == [0 if depth == 1 else LIBRARY + 7 - LIBRARY]


def test_nothing_is_cut_of_nothing() -> None:
    empty = WalkedStacks(np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint64))
    cut, ends = Walks(spaces(), True).cut(empty)
    assert len(cut.depths) == len(ends.modules) == 0


def test_stacks_without_frames_end_in_no_module() -> None:
    none = WalkedStacks(
        np.full(2, PID, np.uint32), np.ones(2, np.uint64), np.zeros(2, np.int64), np.zeros(0, np.uint64)
    )
    cut, ends = Walks(spaces(library(1)), True).cut(none)
    assert (cut.depths.tolist(), ends.modules.tolist()) == ([0, 0], [-1, -1])
