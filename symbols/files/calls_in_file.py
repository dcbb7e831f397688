"""Finds the addresses of a file that cannot be return addresses, as no call instruction ends there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.files.elf import Elf
from iaprof.symbols.unwind.return_addresses import BYTES_BEFORE, BYTES_FROM, can_be_returned_to

MOST_ADDRESSES = 1 << 15  # half a second


def without_call(elf: Elf, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Tells for each address whether no call ends after it: bool[n]; None for more than MOST_ADDRESSES addresses.

    Args:
        elf: the file with the code.
        addresses: uint64[n], virtual addresses in the file; for a return address, that of the byte before it.
    """
    if len(addresses) > MOST_ADDRESSES:
        return None
    return np.array([_is_without(elf, address + 1) for address in addresses.tolist()], bool)


def _is_without(elf: Elf, address: int) -> bool:
    around = elf.at(max(address - BYTES_BEFORE, 0), BYTES_BEFORE + BYTES_FROM)
    before, after = around[:BYTES_BEFORE], around[BYTES_BEFORE:]
    return any(around) and not can_be_returned_to(before, after)
