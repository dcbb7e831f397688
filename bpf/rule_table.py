"""The rules and spaces of bpf/c/unwind.c, as user space writes them."""

from __future__ import annotations

import contextlib
import mmap
import struct
from typing import NamedTuple

from iaprof.bpf.maps import delete_element, read_element, write_element
from iaprof.bpf.structs import SPACE, WAY, pack
from iaprof.formats.wire.unwind_rules import ADDRESS_BITS, BLOCK_BYTES, Rule, RuleScope

_BUCKET_BYTES, _SLOTS = 64, 4
_FIRST_BITS, _MORE_BITS = 10, 2  # of the number of buckets that are used at first, and that this grows by
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Generation(NamedTuple):
    """What a state of a process's mappings is recognised by."""

    born: int  # CLOCK_BOOTTIME ns
    mm: int
    exec_vm: int
    loads: int


class RuleTable:
    """The `rules` map: a hash table of 64-byte buckets, written through a mapping while BPF programs read it.

    A full bucket loses one of its rules. That costs time, as the rule is learnt again, and nothing else. At first only
    the first buckets are used, as what is looked up is seldom in the caches.
    """

    def __init__(self, fd: int, bits: int) -> None:
        """Args: the map's descriptor, which stays the caller's; the binary logarithm of its number of buckets.

        Raises:
            OSError: it cannot be mapped.
        """
        self._most_bits = bits
        self.bits = min(_FIRST_BITS, bits)  # binary logarithm of the number of buckets that are used
        self._memory = mmap.mmap(fd, _BUCKET_BYTES << bits)
        self._words = memoryview(self._memory).cast("Q")
        self._used = 0  # slots
        self.written = self.evicted = 0

    @property
    def is_crowded(self) -> bool:
        """Whether half of what is used is full, and it may grow."""
        return self._used > _SLOTS << self.bits >> 1 and self.bits < self._most_bits

    def grow(self) -> None:
        """Uses more buckets; no space may have rules meanwhile."""
        words = self._words[: _BUCKET_BYTES // 8 << self.bits].tolist()
        self.clear()
        self.bits = min(self.bits + _MORE_BITS, self._most_bits)
        for key, packed in zip(words[::2], words[1::2], strict=True):
            if key:
                self._write(key, packed)

    def write(self, space: int, address: int, scope: RuleScope, rule: Rule) -> None:
        """Sets the rule for an address of a space."""
        key = address | space << 48
        if scope is not RuleScope.RETURN:
            key |= 1 << ADDRESS_BITS
        if scope is RuleScope.BLOCK:
            key = key & -BLOCK_BYTES | 1 << 63
        self._write(key, rule.pack())

    def _write(self, key: int, packed: int) -> None:
        hashed = (key ^ key >> 13) * _ODD & _MASK
        bucket = hashed >> 64 - self.bits
        first = bucket * _BUCKET_BYTES // 8
        keys = [self._words[first + 2 * slot] for slot in range(_SLOTS)]
        if key in keys:
            slot = keys.index(key)
            if self._words[first + 2 * slot + 1] == packed:
                return
        elif 0 in keys:
            slot = keys.index(0)
            self._used += 1
        else:
            slot = hashed & 3
            self.evicted += 1
        # A program may read it meanwhile: it must not take the old rule for the new address.
        self._words[first + 2 * slot] = 0
        self._words[first + 2 * slot + 1] = packed
        self._words[first + 2 * slot] = key
        self.written += 1

    def clear(self) -> None:
        """Forgets all rules."""
        for at in range(0, len(self._words), 2):
            self._words[at] = 0
        self._used = 0

    def close(self) -> None:
        """Unmaps the table."""
        self._words.release()
        self._memory.close()


class Spaces:
    """The `spaces`, `loads` and `ways` maps."""

    def __init__(self, spaces: int, loads: int, ways: int) -> None:
        """Args: the maps' descriptors, which stay the caller's."""
        self._spaces, self._loads, self._ways = spaces, loads, ways

    def set(self, pid: int, generation: Generation, number: int, bits: int) -> None:
        """From now on the rules of a space hold for a process, as long as it stays as it was; see RuleTable.bits."""
        write_element(self._spaces, struct.pack("<I", pid), pack(SPACE, *generation, number, 64 - bits))

    def forget(self, pid: int) -> None:
        """From now on no rules hold for a process."""
        with contextlib.suppress(OSError):
            delete_element(self._spaces, struct.pack("<I", pid))

    def loads(self, pid: int) -> int:
        """How often a process called dlopen."""
        found = read_element(self._loads, struct.pack("<I", pid), 8)
        return int.from_bytes(found, "little") if found else 0

    def arrived(self, way: int) -> None:
        """A copy was answered, and rules lead on: launches of its path are walked again."""
        with contextlib.suppress(OSError):
            delete_element(self._ways, struct.pack("<Q", way))

    def stays(self, way: int, stack: int, until_ns: int) -> None:
        """A copy was answered, and no rules lead on: launches of its path get its stack until then."""
        write_element(self._ways, struct.pack("<Q", way), pack(WAY, stack, until_ns, 0))
