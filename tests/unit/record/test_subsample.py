"""One record of N: exactly one of each N successive records, however reads divide the stream."""

import numpy as np
import pytest

from iaprof.record.sources.stalls import Subsample


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_exactly_one_of_each_n_whatever_the_reads(n: int) -> None:
    # given reads of random lengths, also empty ones
    random = np.random.default_rng(n)
    subsample = Subsample(n, np.random.default_rng(1))
    kept, position = [], 0
    for length in [0, 1, n, n - 1, n + 1, *random.integers(0, 3 * n + 5, 400)]:
        # when
        places = subsample.keep(int(length))
        # then each kept record is one of this read
        assert ((places >= 0) & (places < length)).all()
        kept += (places + position).tolist()
        position += int(length)
    # and each whole block of n has one
    blocks = np.array(kept) // n
    whole = position // n
    assert blocks[blocks < whole].tolist() == list(range(whole))


def test_a_periodic_pattern_in_the_stream_distorts_nothing() -> None:
    """In a stream whose every tenth record is of another kind, a tenth of the kept records is, too."""
    kept = Subsample(10, np.random.default_rng(3)).keep(1_000_000)
    special = np.count_nonzero(kept % 10 == 0)
    assert 9_000 < special < 11_000
