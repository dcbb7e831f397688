"""The interface of what has metrics: a part of a GPU says what can be measured of it, and reads the numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from iaprof.formats.capture.metrics import Metric


@dataclass(frozen=True)
class NotMeasured:
    """What cannot be measured."""

    why: str  # a sentence


class Numbers(Protocol):
    """Numbers that are read together."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self) -> bytes:
        """Returns the numbers, little-endian u64, negative ones as two's complement; MISSING where there is none now.

        Raises:
            OSError: the device has vanished.
        """

    def close(self) -> None:
        """Closes what `read` needs."""


@dataclass(frozen=True)
class Measured:
    """Numbers, and the metrics that follow from them."""

    what: str  # in messages, such as "the energy"
    numbers: Numbers
    metrics: Sequence[Metric]  # column 1 is the first number
    period_ns: int  # the least time between two readings; 0: as often as the user wants


class Metered(ABC):
    """What is measured for one stream of samples: a GT of Intel's, a GPU of NVIDIA's."""

    stream: int  # index into the header's `streams`
    card: str  # the PCI address of its GPU
    name: str  # in messages

    @abstractmethod
    def open(self, with_card: bool) -> Iterator[Measured | NotMeasured]:
        """Opens all that can be measured; says once what cannot.

        Args:
            with_card: includes what is measured of the whole GPU, of which this may be a part.
        """
