"""Damage to files, as chance and malice do it, repeatable: a case is told by its seed and number alone."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

ODD_NUMBERS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 32, 1 << 40,
               (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 16)  # fmt: skip
MOST_CHANGES = 8
LONGEST_PIECE = 1 << 12
RESIZED = 0.2  # of the cases change the length, too: most readers look no further than that


def chance(seed: int, case: int) -> random.Random:
    """The chance of one case."""
    return random.Random(f"{seed}/{case}")


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A damaged copy: one to eight changes, most of them at the same kind of place.

    Args:
        data: what is damaged.
        rng: see `chance`.
        others: files of which pieces may get in.
    """
    changed = bytearray(data)
    focus = rng.choice((_anywhere, _anywhere, _start, _end))
    changes = (*_CHANGES, *_RESIZING) if rng.random() < RESIZED else _CHANGES
    for _ in range(rng.randint(1, MOST_CHANGES)):
        if not changed:
            break
        change = rng.choice(changes)
        change(changed, focus(len(changed), rng), rng, others)
    return bytes(changed)


def odd_number(rng: random.Random) -> int:
    """A number of 64 bits that programs tend to handle badly."""
    return rng.choice(ODD_NUMBERS) if rng.random() < 0.7 else rng.getrandbits(rng.randint(1, 64))


def _anywhere(length: int, rng: random.Random) -> int:
    return rng.randrange(length)


def _start(length: int, rng: random.Random) -> int:
    return rng.randrange(min(length, 1024))


def _end(length: int, rng: random.Random) -> int:
    return length - 1 - rng.randrange(min(length, 4096))


def _flip(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    size = rng.choice((2, 4, 8))
    at &= ~(size - 1)
    data[at : at + size] = struct.pack("<Q", odd_number(rng))[:size]


def _near(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    """A number that becomes a little larger or smaller: an offset or a length that is just wrong."""
    at &= ~3
    if at + 4 <= len(data):
        (value,) = struct.unpack_from("<I", data, at)
        struct.pack_into("<I", data, at, (value + rng.randint(-16, 16)) & 0xFFFF_FFFF)


def _cut(data: bytearray, at: int, _: random.Random, __: Sequence[bytes]) -> None:
    del data[at:]


def _remove(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    del data[at : at + rng.randint(1, LONGEST_PIECE)]


def _repeat(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    piece = data[at : at + rng.randint(1, LONGEST_PIECE)]
    data[at:at] = piece * rng.randint(1, 4)


def _fill(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    length = min(rng.randint(1, LONGEST_PIECE), len(data) - at)
    data[at : at + length] = bytes([rng.choice((0, 0xFF, 0x80))]) * length


def _noise(data: bytearray, at: int, rng: random.Random, _: Sequence[bytes]) -> None:
    length = min(rng.randint(1, 64), len(data) - at)
    data[at : at + length] = rng.randbytes(length)


def _graft(data: bytearray, at: int, rng: random.Random, others: Sequence[bytes]) -> None:
    source = rng.choice(others) if others else bytes(data)
    begin = rng.randrange(max(1, len(source)))
    piece = source[begin : begin + rng.randint(1, LONGEST_PIECE)]
    data[at : at + len(piece)] = piece[: len(data) - at]


_Change = Callable[[bytearray, int, random.Random, Sequence[bytes]], None]
_CHANGES: tuple[_Change, ...] = (
    *(_flip, _flip, _byte, _byte, _number, _number, _near, _near),
    *(_fill, _noise, _graft),
)
_RESIZING: tuple[_Change, ...] = (_remove, _repeat, _cut)
