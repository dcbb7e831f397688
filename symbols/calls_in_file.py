"""Which addresses in a file can be no return addresses, because no call instruction ends there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.elf import Elf
from iaprof.symbols.return_addresses import BYTES_BEFORE, BYTES_FROM, can_be_returned_to, codes, is_known

MOST_ADDRESSES = 1 << 15  # half a second


def without_call(elf: Elf, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Whether no call ends after each address: bool[n]; None for more than MOST_ADDRESSES addresses.

    Args:
        elf: whose code it is.
        addresses: uint64[n], as its program header has them; of a return address the byte before it.
    """
    if len(addresses) > MOST_ADDRESSES:
        return None
    whole = BYTES_BEFORE + BYTES_FROM
    around = b"".join(
        elf.at(max(address + 1 - BYTES_BEFORE, 0), whole).ljust(whole, b"\0") for address in addresses.tolist()
    )
    words = np.frombuffer(around, "<u8").reshape(-1, 2)
    found = codes(words[:, 0], words[:, 1])
    missing: NDArray[np.bool_] = is_known(found) & ~can_be_returned_to(found)
    return missing
