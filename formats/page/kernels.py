"""The names of kernels on the page, by which its trees, its table of kernels and its listings refer to each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.profile import UNKNOWN_KERNEL, Profile, kernel_name

_LONGEST = 2_000  # characters


def shown_name(symbol: str) -> str:
    """A kernel's name on the page: clean, and of bounded length."""
    return clean(symbol or UNKNOWN_KERNEL)[:_LONGEST]


def kernels_of_rows(profile: Profile) -> tuple[list[str], NDArray[np.int64]]:
    """The distinct names of kernels, and the index of each profile row's name: int64[rows]."""
    width = max(len(profile.codes), 1)
    pairs, pair_of = np.unique(profile.kernel * width + profile.code, return_inverse=True)
    numbers: dict[str, int] = {}
    number_of = [
        numbers.setdefault(shown_name(kernel_name(profile.kernels[kernel], profile.codes[code])), len(numbers))
        for kernel, code in (divmod(pair, width) for pair in pairs.tolist())
    ]
    return list(numbers), np.array(number_of, np.int64)[pair_of]
