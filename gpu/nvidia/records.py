"""Records of samples: the words of a row, as inject_cuda.c packs them, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.nvidia.reasons import MEANINGS, PER_WORD, ROWS, WORDS
from iaprof.gpu.samples import ACTIVE, Fields, SampleLayout, SampleRows

MOST = 0xFFFF  # of a count
_BITS = 16
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

    @property
    def fields(self) -> Fields:
        """See SampleLayout."""
        return Fields(self.address_mask, 0, self.reasons, 64, _BITS)

    def packed(self, words: list[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        """See SampleLayout."""
        return words

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
