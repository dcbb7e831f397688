"""Records of samples: the words of a row, as the source of samples packs them, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.nvidia.reasons import MEANINGS, PER_WORD, ROWS, SELECTED, WORDS
from iaprof.gpu.samples import ACTIVE, SampleLayout, SampleRows

MOST = 0xFFFF  # of a count
_BITS = 16
_PREFIX = "smsp__pcsamp_warps_issue_stalled_"
_LATENCY = "_not_issued"
_PLACE_OF = {reason: divmod(number, PER_WORD) for number, reason in enumerate(MEANINGS)}


class PcSamples(SampleLayout):
    """Sums of samples by instruction and reason, of all of NVIDIA's GPUs since Volta."""

    name = "pc-samples"
    reasons = tuple(MEANINGS)
    words = ROWS.required

    @property
    def rows(self) -> SampleRows:
        """See SampleLayout."""
        return ROWS

    @property
    def most(self) -> int:
        """See SampleLayout."""
        return MOST

    @property
    def unit_bits(self) -> int:
        """See SampleLayout."""
        return 4

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """See SampleLayout."""
        return words[0] & np.uint64(self.address_mask)

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint16]:
        """See SampleLayout."""
        if reason not in _PLACE_OF:
            return np.zeros(len(words[0]), np.uint16)
        word, place = _PLACE_OF[reason]
        return (words[1 + word] >> np.uint64(_BITS * place)).astype(np.uint16)  # the cast keeps the low 16 bits

    def ip_sql(self) -> str:
        """See SampleLayout."""
        return f"w0 & {self.address_mask}"

    def count_sql(self, reason: str) -> str:
        """See SampleLayout."""
        if reason not in _PLACE_OF:
            return "0"
        word, place = _PLACE_OF[reason]
        return f"(w{1 + word} >> {_BITS * place}) & {MOST}"

    def more_sql(self) -> Mapping[str, str]:
        """See SampleLayout; `latency_X` has the latency samples of each reason."""
        return {
            f"latency_{reason}": f"(w{1 + WORDS + word} >> {_BITS * place}) & {MOST}"
            for reason, (word, place) in _PLACE_OF.items()
            if reason != ACTIVE  # an instruction was issued: it has none
        }


PC_SAMPLES = PcSamples()


def places(metrics: Mapping[int, str]) -> dict[int, int]:
    """Returns where `packed` puts the count of each metric: its column, or of a metric that counts no samples none.

    Args:
        metrics: NVIDIA's names of the metrics, by the index that its library has for them.

    Returns:
        By index, the column among twice as many as there are reasons: those of all samples, then those of latency.
    """
    found: dict[int, int] = {}
    reasons = list(MEANINGS)
    for index, metric in metrics.items():
        if metric.startswith(_PREFIX):
            state = metric.removeprefix(_PREFIX)
            reason = state.removesuffix(_LATENCY)
            reason = ACTIVE if reason == SELECTED else reason if reason in MEANINGS else "other"
            found[index] = reasons.index(reason) + (len(reasons) if state.endswith(_LATENCY) else 0)
    return found


def packed(addresses: NDArray[np.uint64], counts: NDArray[np.uint32]) -> list[NDArray[np.uint64]]:
    """Returns records as the columns of rows.

    Args:
        addresses: of the instructions, uint64[n].
        counts: uint32[n, twice the reasons], as `places` has the columns.

    Returns:
        The columns, uint64[m] each. An instruction with a count above MOST has several records.
    """
    repeats = np.maximum(-(-counts.max(axis=1, initial=0).astype(np.int64) // MOST), 1)
    row = np.repeat(np.arange(len(counts)), repeats)
    number = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # among its instruction's records
    left = counts[row].astype(np.int64) - number[:, None] * MOST
    parts = np.clip(left, 0, MOST).astype("<u2")
    kinds = np.zeros((len(row), 2, WORDS * PER_WORD), "<u2")
    kinds[:, :, : len(MEANINGS)] = parts.reshape(len(row), 2, len(MEANINGS))
    return [addresses[row], *kinds.reshape(len(row), 2 * WORDS * PER_WORD).view("<u8").T.copy()]
