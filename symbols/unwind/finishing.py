"""Finishes stacks in a sandboxed child, which reads call frame information that may be hostile.

The child is symbols/unwind/reader.py. This module supplies what the child asks for: a process's mappings, an image when
a stack leads into it, and memory when a signal handler ran on a stack of its own. It also checks the child's answers.
Stacks go to the child together, as a process that waits for an answer to each has to wait for a CPU each time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping as Mapped, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.unwind_rules import Rule, RuleFlags, RuleKind, RuleScope, Walked
from iaprof.sandbox.parent import AnswerError, Limits, Sandbox, SandboxError, SandboxSlow
from iaprof.sandbox.worker import Closing
from iaprof.symbols.python.layout import LARGEST_OFFSET, Layout
from iaprof.symbols.unwind.reader import MAPPING

PAGE = 4096
MOST_IMAGES = 2000  # of one child
MOST_ROUNDS = 256  # of requests, for one stack
_MOST_PAGES = 64  # that the child may ask for, for one stack
_LONGEST_PROBLEM, _LONGEST_VERSION = 300, 20  # characters
_PATIENCE_S = 3.0  # for one answer
_REGISTERS = 17  # by DWARF number; the last is the return address
# struct request, and struct answer with what follows it, in walk.c.
_REQUEST = struct.Struct(f"<4Q{_REGISTERS}Q2Q")
_ANSWER = struct.Struct("<6Q")  # ending, value, numbers of frames, rules and signals, met_unknown
_FRAME = np.dtype([(name, "<u8") for name in ("ip", "how", "cfa")])
RULE = np.dtype([(name, "<u8") for name in ("address", "scope", "rule")])
_SIGNAL = np.dtype([(name, "<u8") for name in ("at", "rsp", "rip")])
_ALL_FLAGS = RuleFlags.GUESS | RuleFlags.OTHER_STACK
_NEEDS_SPACE, _NEEDS_IMAGE, _NEEDS_MEMORY = 16, 17, 18  # in place of Walked
_LIMITS = Limits(memory_bytes=512 << 20, mapped_bytes=1 << 42, seconds=20.0, files=MOST_IMAGES, answer_bytes=1 << 20)

OpenImage = Callable[[int], int | None]
"""Opens the image with a number; returns a descriptor, which the caller closes, or None if it cannot be opened."""
Answer = TypeVar("Answer")
ReadPage = Callable[[int], bytes]
"""Reads the page of the process's memory at an address; returns b"" if it cannot be read."""


class Mapping(NamedTuple):
    """Executable memory of a process."""

    start: int
    end: int
    offset: int  # in the image
    image: int  # the image's number; -1 for memory without a file


class HowFound(IntEnum):
    """How an address of a stack was found."""

    BY_RULE = 0
    BY_GUESS = 1
    INTERRUPTED = 2  # not a return address: a signal interrupted this instruction


class StackCopy(NamedTuple):
    """A copied stack, and the registers of its innermost frame."""

    registers: Mapped[int, int]  # by DWARF number
    how_found: HowFound  # how the address in them was found
    pages: Mapped[int, bytes | memoryview]  # by address


@dataclass(frozen=True)
class Finished:
    """A stack, as far as it could be walked: columns with an element for each address, innermost first."""

    ips: NDArray[np.uint64]
    how_found: NDArray[np.uint64]  # HowFound
    cfas: NDArray[np.uint64]  # 0 if the walk found no caller
    ending: Walked
    learnt: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, RULE))
    """RULE[n]: the unwinding rules that the walk learnt."""
    met_unknown: bool = False  # the walk met a likely return address outside all known mappings

    @property
    def rules(self) -> dict[tuple[int, RuleScope], Rule]:
        """The rules that the walk learnt, by address and scope."""
        return {(address, RuleScope(scope)): Rule.unpack(packed) for address, scope, packed in self.learnt.tolist()}


@dataclass
class _Walk:
    """A walk that the child does, with what it has asked for."""

    space: int
    copy: StackCopy
    limit: int
    read_page: ReadPage | None
    supplied: dict[int, bytes] = field(default_factory=dict)  # pages that it needed
    absent: list[int] = field(default_factory=list)  # pages that it needed and that cannot be read

    def request(self) -> bytes:
        """The request as the child takes it."""
        known = 0
        values = [0] * _REGISTERS
        for number, value in self.copy.registers.items():
            known |= 1 << number
            values[number] = value
        pages = {**self.copy.pages, **self.supplied}
        return b"".join(
            (
                _REQUEST.pack(
                    self.space, self.limit, self.copy.how_found, known, *values, len(pages), len(self.absent)
                ),
                struct.pack(f"<{len(pages) + len(self.absent)}Q", *pages, *self.absent),
                *pages.values(),
            )
        )

    def supply(self, address: int) -> None:
        """Reads the page at an address."""
        is_allowed = self.read_page is not None and len(self.supplied) < _MOST_PAGES
        page = self.read_page(address) if self.read_page is not None and is_allowed else b""
        if len(page) == PAGE:
            self.supplied[address] = page
        else:
            self.absent.append(address)


class FoundInterpreter(NamedTuple):
    """A CPython interpreter in an image; addresses count from the start of one of the image's mappings, in bytes."""

    runtime: int  # _PyRuntime
    text_type: int  # PyUnicode_Type
    bytes_type: int  # PyBytes_Type
    layout: Layout
    version: str


class Finishing(Closing):
    """Finishes stacks in a child process; also a context manager."""

    def __init__(self, open_image: OpenImage, limits: Limits = _LIMITS, patience_s: float = _PATIENCE_S) -> None:
        """Starts nothing yet.

        Args:
            open_image: opens the files that the child asks for.
            limits: the child's.
            patience_s: how long to wait for each of the child's answers, in seconds.
        """
        self._open_image = open_image
        self._patience_s = patience_s
        self._sandbox = Sandbox("iaprof.symbols.unwind.reader", limits)
        self._given: set[int] = set()  # images that the present child has

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def start(self) -> None:
        """Starts the child process, which otherwise starts when it is first needed.

        Raises:
            SandboxError: the child cannot be started.
        """
        self._sandbox.call("finish")

    def finish(
        self, space: int, mappings: Sequence[Mapping], copy: StackCopy, limit: int, read_page: ReadPage | None = None
    ) -> Finished:
        """Walks a stack to its end, or as far as possible; see finish_all."""
        (finished,) = self.finish_all(space, mappings, [copy], [limit], read_page)
        return finished

    def finish_all(
        self,
        space: int,
        mappings: Sequence[Mapping],
        copies: Sequence[StackCopy],
        limits: Iterable[int],
        read_page: ReadPage | None = None,
    ) -> list[Finished]:
        """Walks stacks of one process to their ends, or as far as possible.

        Args:
            space: a number for these mappings, which no other mappings have.
            mappings: the process's executable mappings, sorted.
            copies: of the stacks.
            limits: the most addresses to return, for each stack.
            read_page: reads the process's memory, for a second stack that a signal handler interrupted.

        Raises:
            SandboxError: the child died or took too long.
            AnswerError: the child's answer is invalid.
        """
        limits = list(limits)

        def finish() -> list[Finished]:
            walks = [_Walk(space, copy, limit, read_page) for copy, limit in zip(copies, limits, strict=True)]
            return self._finish_all(walks, mappings)

        return self._with_own_child(finish)

    def _with_own_child(self, ask: Callable[[], Answer]) -> Answer:
        """Asks the child; if that fails, a new one: what others' files left in the first is nobody else's fault."""
        is_new = self._sandbox.pid is None
        try:
            return ask()
        except SandboxSlow:
            raise
        except SandboxError:
            self._renew()
            if is_new:
                raise
            return ask()

    def _finish_all(self, walks: list[_Walk], mappings: Sequence[Mapping]) -> list[Finished]:
        results: list[Finished | None] = [None] * len(walks)
        for _ in range(MOST_ROUNDS):
            left = [at for at, result in enumerate(results) if result is None]
            if not left:
                break
            asked = b"".join(walks[at].request() for at in left)
            answer = self._sandbox.call("finish", data=asked, seconds=self._patience_s)
            if not isinstance(answer, bytearray):
                raise AnswerError
            supplied = set[tuple[int, int]]()
            for at, (needs, value, result) in zip(left, _answers(answer, [walks[at] for at in left]), strict=True):
                if result is not None:
                    results[at] = result
                elif needs == _NEEDS_MEMORY:
                    walks[at].supply(value & -PAGE)
                elif (needs, value) not in supplied:
                    supplied.add((needs, value))
                    self._supply(needs, value, mappings)
        finished = [result for result in results if result is not None]
        if len(finished) < len(walks):
            raise AnswerError
        return finished

    def _supply(self, needs: int, value: int, mappings: Sequence[Mapping]) -> None:
        if needs == _NEEDS_IMAGE:
            self._give_image(value)
        elif needs == _NEEDS_SPACE:
            data = b"".join(MAPPING.pack(*mapping) for mapping in mappings)
            self._sandbox.call("space", {"space": value}, data, seconds=self._patience_s)
        else:
            raise AnswerError

    def interpreter(self, image: int, offset: int) -> FoundInterpreter | str | None:
        """Looks for the CPython interpreter in an image.

        Args:
            image: the image's number.
            offset: of a mapping, in the image.

        Returns:
            The interpreter; why its frames cannot be walked; or None if the image has none.

        Raises:
            SandboxError: the child died or took too long.
            AnswerError: the child's answer is invalid.
        """
        return self._with_own_child(lambda: self._interpreter(image, offset))

    def _interpreter(self, image: int, offset: int) -> FoundInterpreter | str | None:
        for _ in range(2):
            match self._sandbox.call("interpreter", {"image": image, "offset": offset}, seconds=self._patience_s):
                case {"image": int(number)}:
                    self._give_image(number)
                case {"problem": str(problem)}:
                    return problem[:_LONGEST_PROBLEM]
                case {
                    "addresses": [int(runtime), int(text_type), int(bytes_type)],
                    "version": str(version),
                    "layout": dict(layout),
                } if _is_layout(layout):
                    version = version[:_LONGEST_VERSION]
                    return FoundInterpreter(runtime, text_type, bytes_type, Layout(**layout), version)
                case None:
                    return None
                case _:
                    break
        raise AnswerError

    def _renew(self) -> None:
        self._sandbox.close()
        self._given.clear()

    def has(self, image: int) -> bool:
        """Whether the child has an image, or memory of no file."""
        return image in self._given or image < 0

    def prepare(self, image: int) -> bool:
        """Opens an image for the child, unless it has it, so that the first stack that needs it does not wait.

        Returns:
            Whether to read more of it ahead.

        Raises:
            SandboxError: the child died or took too long.
        """
        if image in self._given or len(self._given) >= MOST_IMAGES:
            return False
        return self._give_image(image)

    def read_ahead(self, image: int) -> bool:
        """Has the child read a piece of an image's call frame information, which may be on a slow disk.

        Returns:
            Whether to read more of it ahead.

        Raises:
            SandboxError: the child died or took too long.
        """
        return self._sandbox.call("ahead", {"image": image}, seconds=self._patience_s) is True

    def _give_image(self, number: int) -> bool:
        """Opens an image and passes it to the child; returns whether to read more of it ahead.

        A child that has MOST_IMAGES is replaced first.
        """
        if len(self._given) == MOST_IMAGES:
            self._renew()
        file = self._open_image(number)
        self._given.add(number)
        try:
            parameters = {"image": number, "is_open": file is not None}
            fds = [] if file is None else [file]
            return self._sandbox.call("image", parameters, fds=fds, seconds=self._patience_s) is True
        finally:
            if file is not None:
                os.close(file)


def _is_layout(layout: dict[Any, Any]) -> bool:
    return layout.keys() == {member.name for member in fields(Layout)} and all(
        value is None or (isinstance(value, int) and 0 <= value < LARGEST_OFFSET) for value in layout.values()
    )


def _answers(answer: bytearray, walks: list[_Walk]) -> list[tuple[int, int, Finished | None]]:
    """Returns for each walk what it needs, or else how it ended; raises AnswerError."""
    results: list[tuple[int, int, Finished | None]] = []
    all_frames: list[NDArray[np.uint64]] = []
    all_rules: list[NDArray[np.uint64]] = []
    at = 0
    for walk in walks:
        if len(answer) - at < _ANSWER.size:
            raise AnswerError
        ending, value, *counts, met_unknown = _ANSWER.unpack_from(answer, at)
        at += _ANSWER.size
        pieces = []
        for count, dtype in zip(counts, (_FRAME, RULE, _SIGNAL), strict=True):
            if count > (len(answer) - at) // dtype.itemsize:
                raise AnswerError
            pieces.append(np.frombuffer(answer, dtype, count, at))
            at += count * dtype.itemsize
        if ending >= len(Walked):
            results.append((ending, value, None))
            continue
        frames, rules, signals = pieces
        if len(frames) > walk.limit:
            raise AnswerError
        all_frames.append(frames["how"])
        all_rules.append(rules.view(np.uint64).reshape(-1, 3))
        finished = Finished(frames["ip"], frames["how"], frames["cfa"], Walked(ending), rules, bool(met_unknown))
        if walk.supplied and walk.read_page is not None and not _are_unchanged(signals.tolist(), walk.read_page):
            finished = _up_to_signal(finished)
        results.append((ending, value, finished))
    if at != len(answer):
        raise AnswerError
    if all_rules and ((np.concatenate(all_frames) >= len(HowFound)).any() or not _are_rules(np.concatenate(all_rules))):
        raise AnswerError
    return results


def _are_rules(rules: NDArray[np.uint64]) -> bool:
    """Whether all rows, with RULE's members, are rules that BPF knows, of addresses that it knows."""
    address, scope, rule = rules.T
    kind, flags = rule >> np.uint64(48) & np.uint64(255), rule >> np.uint64(56)
    is_rule = (address < 1 << 47) & (scope < len(RuleScope)) & (kind <= RuleKind.HARD) & (flags <= _ALL_FLAGS)
    return bool(is_rule.all())


def _are_unchanged(signals: list[tuple[int, int, int]], read_page: ReadPage) -> bool:
    """Tells whether signal frames are still in memory; if not, the thread has run on, and later pages may be wrong."""
    for at, rsp, rip in signals:
        inside = at & PAGE - 1
        content = read_page(at & -PAGE)[inside:]
        if len(content) < 16:
            content += read_page((at & -PAGE) + PAGE)
        if content[:16] != struct.pack("<QQ", rsp, rip):
            return False
    return True


def _up_to_signal(finished: Finished) -> Finished:
    """Cuts a stack before the first address that a signal interrupted, and drops its rules."""
    later = np.flatnonzero(finished.how_found[1:] == HowFound.INTERRUPTED)
    kept = slice(int(later[0]) + 1 if len(later) else None)
    return Finished(finished.ips[kept], finished.how_found[kept], finished.cfas[kept], Walked.MEMORY)
