"""Energy as whole numbers: nanojoules, so that parts add up to their sum exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

NJ_PER_J = 10**9
MOST_J = 1e9  # more is damage; its nanojoules fit into 63 bits


@dataclass(frozen=True)
class Energy:
    """What became of the energy that GPUs used, nJ; these add up to `total`."""

    selected: int = 0  # while what is selected ran
    others: int = 0  # while other kernels ran
    unsampled: int = 0  # while the GPU was busy without stalls, with copies for example
    idle: int = 0

    @property
    def total(self) -> int:
        """All that was measured."""
        return self.selected + self.others + self.unsampled + self.idle

    def text(self) -> str:
        """Returns the total and its parts, for people."""
        parts = [("kernels", self.selected), ("other kernels", self.others), ("busy without stalls", self.unsampled),
                 ("idle", self.idle)]  # fmt: skip
        shown = [f"{name} {part / NJ_PER_J:,.1f} J ({100 * part / self.total:.1f} %)" for name, part in parts if part]
        return f"{self.total / NJ_PER_J:,.1f} J: {', '.join(shown)}"

    @classmethod
    def sum(cls, several: Sequence[Energy]) -> Energy:
        """Adds up several."""
        return cls(*(sum(getattr(each, field.name) for each in several) for field in fields(cls)))


def whole_parts(parts: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Rounds parts to whole numbers that add up to a total, each within 1 of its part: int64[n].

    Args:
        parts: float64[n], 0 or more, in any unit: they are scaled.
        total: what they add up to; must be 0 if all parts are.
    """
    reached = np.cumsum(parts)
    if not len(parts) or not reached[-1] > 0:
        return np.zeros(len(parts), np.int64)
    marks = np.rint(reached / reached[-1] * total).astype(np.int64)
    marks[-1] = total
    return np.asarray(np.diff(marks, prepend=0), np.int64)
