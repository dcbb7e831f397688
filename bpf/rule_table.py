"""Writes the maps of bpf/c/unwind.c: unwinding rules, and which rules hold for a process."""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.maps import delete_element, read_element, write_element
from iaprof.bpf.structs import MISSED_PATH, SPACE, pack
from iaprof.formats.wire.unwind_rules import ADDRESS_BITS, BLOCK_BYTES, RuleScope

_BUCKET_BYTES, _SLOTS = 64, 4
_INITIAL_BITS = 10  # binary logarithm of the number of buckets used at first
_SPACE_BITS, _MOST_SPACES = 48, (1 << 15) - 1  # where a key has the number of its space, and the largest one
_ID_BYTES = 8  # at the beginning of MISSED_PATH
_BY_USER_SPACE = struct.pack("<I", 0)  # enum changed_by in bpf/c/unwind.c
_MULTIPLIER, _END_MULTIPLIER, _MASK_64 = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, (1 << 64) - 1


class MappingState(NamedTuple):
    """Identifies one state of a process's mappings; see MAPPING_STATE in formats/wire/launches.py."""

    born: int  # start of the process, CLOCK_BOOTTIME ns
    mm: int
    exec_vm: int
    unloads: int


class RuleTable:
    """The `rules` map: a hash table of 64-byte buckets, written through a mapping while BPF programs read it.

    The table starts with few buckets, so that lookups hit the CPU's caches more often. A new rule for a full bucket
    waits until the table has grown. In a table that cannot grow it replaces another one, and all walks that need that
    rule end there until it is learnt again.

    A table of 2^n buckets begins at bucket 2^n of the map. So a larger one does not touch the one before, which
    processes use until `Spaces.set`.
    """

    def __init__(self, fd: int, bits: int) -> None:
        """Maps the table.

        Args:
            fd: the map's descriptor; the caller closes it.
            bits: binary logarithm of its number of buckets: twice as many as the largest table has.

        Raises:
            OSError: the table cannot be mapped.
        """
        self._max_bits = bits - 1
        self.bits = min(_INITIAL_BITS, self._max_bits)  # binary logarithm of the table's number of buckets
        self._memory = mmap.mmap(fd, _BUCKET_BYTES << bits)
        self._words = memoryview(self._memory).cast("Q")
        self._used = 0  # number of slots with a rule
        self._waiting: dict[int, int] = {}  # rules that wait for the table to grow, by key
        self.evicted = 0

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of the slots in use have a rule, or a rule waits, and the table can grow."""
        return (self._used > _SLOTS << self.bits >> 1 or bool(self._waiting)) and self.bits < self._max_bits

    def grow(self) -> None:
        """Puts the rules into a table of twice the size; the caller then has all processes use that one."""
        slots = self._slots()
        slots = slots[slots[:, 0] != 0]
        waiting, self._waiting = self._waiting, {}
        self.bits = min(self.bits + 1, self._max_bits)
        hashes = (slots[:, 0] ^ slots[:, 0] >> np.uint64(13)) * np.uint64(_MULTIPLIER)
        buckets = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        number = np.arange(len(order)) - np.searchsorted(buckets[order], buckets[order])  # in the bucket
        fits = number < _SLOTS
        larger = self._slots()
        larger[:, 0] = 0  # it may have rules of an earlier learner
        larger[(_SLOTS * buckets[order] + number)[fits]] = slots[order[fits]]
        self._used = int(fits.sum())
        for key, packed in (*slots[order[~fits]].tolist(), *waiting.items()):
            self._write(key, packed)

    def _slots(self) -> NDArray[np.uint64]:
        """Returns the table: keys and rules, uint64[slots, 2]."""
        words = np.frombuffer(self._memory, np.uint64, _BUCKET_BYTES // 8 << self.bits, _BUCKET_BYTES << self.bits)
        return words.reshape(-1, 2)

    def write(self, space: int, address: int, scope: int, packed: int) -> None:
        """Sets the rule, as Rule.pack makes it, for an address in a space; `scope` is a RuleScope."""
        key = address | space << _SPACE_BITS
        if scope != RuleScope.RETURN:
            key |= 1 << ADDRESS_BITS
        if scope == RuleScope.BLOCK:
            key = key & -BLOCK_BYTES | 1 << 63
        self._write(key, packed)

    def copy(self, space: int, to: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Copies the rules of a space for addresses in some ranges, [start, end), to another space."""
        slots = self._slots()
        keys = slots[:, 0]
        of_space = slots[(keys >> np.uint64(_SPACE_BITS) & np.uint64(_MOST_SPACES)) == space]
        addresses = of_space[:, 0] & np.uint64((1 << ADDRESS_BITS) - 1)
        bounds = np.array(sorted(ranges), np.uint64).reshape(-1, 2)
        at = np.searchsorted(bounds[:, 0], addresses, "right")
        is_inside = (at > 0) & (addresses < bounds[:, 1][np.maximum(at, 1) - 1]) if len(bounds) else at > 0
        other = (space ^ to) << _SPACE_BITS
        copied = of_space[is_inside & (of_space[:, 0] != 0)].tolist()
        del slots, keys  # otherwise the mapping could not be closed
        for key, packed in copied:
            self._write(key ^ other, packed)

    def _write(self, key: int, packed: int) -> None:
        hashed = (key ^ key >> 13) * _MULTIPLIER & _MASK_64
        bucket = (1 << self.bits) + (hashed >> 64 - self.bits)
        first = bucket * _BUCKET_BYTES // 8
        keys = [self._words[first + 2 * slot] for slot in range(_SLOTS)]
        if key in keys:
            slot = keys.index(key)
            if self._words[first + 2 * slot + 1] == packed:
                return
        elif 0 in keys:
            slot = keys.index(0)
            self._used += 1
        elif self.bits < self._max_bits:
            self._waiting[key] = packed
            return
        else:
            # One of a block, if there is one, as instructions have rules of their own; else each in turn, so that two
            # rules that are needed all the time do not replace each other for ever.
            slot = next((slot for slot in range(_SLOTS) if keys[slot] >> 63), self.evicted % _SLOTS)
            self.evicted += 1
        # A program may read the slot meanwhile, and must not combine the new address with the old rule.
        self._words[first + 2 * slot] = 0
        self._words[first + 2 * slot + 1] = packed
        self._words[first + 2 * slot] = key

    def clear(self) -> None:
        """Forgets all rules."""
        slots = np.frombuffer(self._memory, np.uint64).reshape(-1, 2)
        slots[:, 0] = 0
        del slots  # otherwise the mapping could not be closed
        self._used = 0
        self._waiting.clear()

    def close(self) -> None:
        """Unmaps the table."""
        self._words.release()
        self._memory.close()


class Spaces:
    """What BPF knows of processes, and of their stacks that lack rules: the maps of MAPS."""

    MAPS = ("spaces", "process_unloads", "pythons", "process_changes", "missed_paths", "copies_done")

    def __init__(self, maps: Mapping[str, int]) -> None:
        """Args: descriptors of the maps, by name; the caller closes them."""
        self._spaces, self._unloads, self._pythons, self._changes, self._missed_paths, self._copies_done = (
            maps[name] for name in self.MAPS
        )
        found = read_element(self._changes, _BY_USER_SPACE, 8) or b""  # of an earlier learner
        self._changed = int.from_bytes(found, "little")

    def _note_change(self) -> None:
        # BPF looks at the maps of processes only after this.
        self._changed += 1
        write_element(self._changes, _BY_USER_SPACE, struct.pack("<Q", self._changed))

    def set(self, pid: int, state: MappingState, number: int, bits: int) -> None:
        """Assigns a space to a process while its mappings are in this state.

        Args:
            pid: the process.
            state: of its mappings.
            number: of the space.
            bits: RuleTable.bits.
        """
        write_element(self._spaces, struct.pack("<I", pid), pack(SPACE, *state, number, 64 - bits))
        self._note_change()

    def forget(self, pid: int) -> None:
        """Removes the space of a process, which then has no rules."""
        with contextlib.suppress(OSError):
            delete_element(self._spaces, struct.pack("<I", pid))
            self._note_change()

    def set_python(self, pid: int, python: bytes) -> None:
        """Tells BPF of a process's interpreter, a PYTHON."""
        write_element(self._pythons, struct.pack("<I", pid), python)
        self._note_change()

    def unloads(self, pid: int) -> int:
        """Returns the present `unloads` of a process's MappingState."""
        found = read_element(self._unloads, struct.pack("<I", pid), 8)
        return 1 + int.from_bytes(found, "little") if found else 0

    def set_copies_done(self, pid: int, records: int) -> None:
        """Tells BPF how many records of copies of a process's stacks were answered, so that it sends further ones."""
        write_element(self._copies_done, struct.pack("<I", pid), struct.pack("<Q", records))

    def walk_again(self, path: int) -> None:
        """Has BPF walk stacks of a missed path again, because the missing rules have been written."""
        with contextlib.suppress(OSError):
            delete_element(self._missed_paths, struct.pack("<Q", path))

    def copy_again(self, ip: int, depth: int, tid: int) -> None:
        """Has BPF send copies of a thread's walks that end there, however many it has sent in this second.

        Args:
            ip: the address for which a rule was missing.
            depth: the walk's.
            tid: the thread.
        """
        self.walk_again(_end_key(ip, depth, tid))

    def copy_few(self, ip: int, depth: int, tid: int) -> None:
        """Has BPF send few copies of a thread's walks that end there, because no rule leads further from one of them.

        Args: as those of `copy_again`.
        """
        key = struct.pack("<Q", _end_key(ip, depth, tid))
        found = read_element(self._missed_paths, key, MISSED_PATH.itemsize)
        if found and any(found[:_ID_BYTES]):
            write_element(self._missed_paths, key, bytes(_ID_BYTES) + found[_ID_BYTES:])

    def keep_stack(self, path: int, stack: int, until_ns: int) -> None:
        """Has BPF use the copied stack for a missed path until then, because no rule can lead further."""
        write_element(self._missed_paths, struct.pack("<Q", path), pack(MISSED_PATH, stack, until_ns, 0))


def _end_key(ip: int, depth: int, tid: int) -> int:
    """Returns the key in `missed_paths` of all walks of a thread that end alike: end_key in bpf/c/launches.c."""
    key = (ip ^ depth << ADDRESS_BITS ^ ~tid) * _END_MULTIPLIER & _MASK_64
    return key ^ key >> 32
