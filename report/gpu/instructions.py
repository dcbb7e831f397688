"""A kernel's instructions, as columns, and the checks of the sandboxed child's answer that has them.

A capture can have hundreds of thousands of instructions, so all work is by whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.vendors import LONGEST_INSTRUCTION
from iaprof.sandbox.parent import LARGEST, AnswerError, any_list, integers

_MAX_TARGETS = 3


@dataclass(frozen=True, eq=False)
class Instructions:
    """The instructions of a kernel, sorted by offset, not overlapping."""

    offset: NDArray[np.int64]  # [n], bytes from the code's start
    size: NDArray[np.int64]  # [n], bytes
    mnemonic: NDArray[np.int64]  # [n], index into strings
    strings: Sequence[str]
    text: NDArray[np.int64] | None = None  # [n], index into strings; None unless asked for
    targets: Sequence[tuple[int, ...]] = ()  # [n], offsets that each can jump to; empty unless asked for

    def __len__(self) -> int:
        return len(self.offset)

    def __iter__(self) -> Iterator[tuple[int, int, str, str, tuple[int, ...]]]:
        """Yields (offset, size, mnemonic, text, targets); text and targets are empty unless asked for."""
        texts = [""] * len(self) if self.text is None else [self.strings[number] for number in self.text.tolist()]
        mnemonics = [self.strings[number] for number in self.mnemonic.tolist()]
        targets = self.targets or [()] * len(self)
        return zip(self.offset.tolist(), self.size.tolist(), mnemonics, texts, targets, strict=True)

    @property
    def end(self) -> int:
        """The offset of the end of the last instruction; 0 if there is none."""
        return int(self.offset[-1] + self.size[-1]) if len(self) else 0


def read_instructions(columns: Any, strings: list[str], length: int) -> Instructions:
    """Checks the columns of the child's answer.

    Args:
        columns: the answer's "instructions".
        strings: the answer's string table.
        length: of the code, bytes.

    Raises:
        AnswerError: the columns are not such as report.gpu.reader makes.
    """
    match columns:
        case {"offset": offset, "size": size, "mnemonic": mnemonic, **rest}:
            offsets, sizes = _column(offset, length), _column(size, LONGEST_INSTRUCTION + 1, 1)
            mnemonics = _column(mnemonic, len(strings))
        case _:
            raise AnswerError
    if not len(offsets) == len(sizes) == len(mnemonics):
        raise AnswerError
    if len(offsets) and ((offsets[:-1] + sizes[:-1] > offsets[1:]).any() or offsets[-1] + sizes[-1] > length):
        raise AnswerError
    if "text" not in rest:
        return Instructions(offsets, sizes, mnemonics, strings)
    texts = _column(rest["text"], len(strings))
    targets = [tuple(integers(each, LARGEST, -LARGEST)) for each in any_list(rest.get("targets"))]
    if not len(texts) == len(targets) == len(offsets) or any(len(each) > _MAX_TARGETS for each in targets):
        raise AnswerError
    return Instructions(offsets, sizes, mnemonics, strings, texts, targets)


def _column(values: Any, limit: int, lowest: int = 0) -> NDArray[np.int64]:
    """Checks a list of integers from `lowest` up to, but not including, `limit`; returns int64[n]."""
    try:
        found = np.array(any_list(values) or np.empty(0, np.int64))
    except (ValueError, OverflowError):
        raise AnswerError from None
    if found.dtype != np.int64 or found.ndim != 1 or (len(found) and not lowest <= found.min() <= found.max() < limit):
        raise AnswerError
    return found
