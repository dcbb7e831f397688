"""Finishes stacks in a child process, which reads strangers' call frame information (symbols.unwind.reader).

Here is what the child is told, and in which order: a process's mappings when it asks for them, an image when a stack
leads into it, memory when a signal handler ran on a stack of its own. What it answers is checked.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping as Mapped, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from iaprof.formats.wire.unwind_rules import Rule, RuleScope, Walked
from iaprof.sandbox.answers import AnswerError, integers
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.parent import Limits, Sandbox
from iaprof.symbols.python.layout import LARGEST_OFFSET, Layout
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.reader import MAPPING
from iaprof.symbols.unwind.walk import PAGE, Found

MOST_IMAGES = 2000
MOST_ROUNDS = 256  # of questions, for one stack
_MOST_PAGES = 64  # that the child may ask for, for one stack
_MOST_ADDRESS = 1 << 64
_LONGEST_PROBLEM, _LONGEST_VERSION = 300, 20  # characters
_PATIENCE_S = 1.5  # for one answer; a busy machine may keep the child from running
_LIMITS = Limits(memory_bytes=512 << 20, mapped_bytes=1 << 42, seconds=20.0, files=MOST_IMAGES, answer_bytes=1 << 20)

OpenImage = Callable[[int], int | None]
"""Opens the image of a number: a descriptor, which whoever calls this closes; None if it cannot be had."""
ReadPage = Callable[[int], bytes]
"""The process's memory at an address, a page; empty if it cannot be had."""


@dataclass(frozen=True)
class Copy:
    """A copied stack and the registers of its top."""

    registers: Mapped[int, int]  # by their numbers in DWARF
    found: Found  # how the address in them was found
    pages: dict[int, bytes]  # by address


@dataclass(frozen=True)
class Finished:
    """A stack, as far as it could be walked."""

    ips: Sequence[int]  # innermost first
    found: Sequence[Found]  # how each was found
    ending: Walked
    rules: dict[tuple[int, RuleScope], Rule] = field(default_factory=dict)
    """By address and what they are for."""
    met_unknown: bool = False  # what may be a return address lies in none of the mappings
    cfas: Sequence[int] = ()  # where the caller of each address has its frame, 0 if it has none


class FoundInterpreter(NamedTuple):
    """A CPython interpreter in an image; addresses in bytes from the start of one of its mappings."""

    runtime: int  # _PyRuntime
    text_type: int  # PyUnicode_Type
    bytes_type: int  # PyBytes_Type
    layout: Layout
    version: str


class Finishing(Closing):
    """The child, and what it is told; also a context manager."""

    def __init__(self, open_image: OpenImage, limits: Limits = _LIMITS, patience_s: float = _PATIENCE_S) -> None:
        """Starts nothing yet.

        Args:
            open_image: opens the files that the child asks for.
            limits: of the child.
            patience_s: how long to wait for each of its answers, in seconds.
        """
        self._open_image = open_image
        self._patience_s = patience_s
        self._sandbox = Sandbox("iaprof.symbols.unwind.reader", limits)
        self._given = 0  # images, to the present child

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def start(self) -> None:
        """Starts the child process now, which else starts when it is needed.

        Raises:
            SandboxError: it cannot be started.
        """
        self._sandbox.call("space", {"space": 0})

    def finish(
        self, space: int, mappings: Sequence[Mapping], copy: Copy, limit: int, read_page: ReadPage | None = None
    ) -> Finished:
        """Walks a stack to its end, or as far as that can be done.

        Args:
            space: a number that no other mappings have.
            mappings: the process's executable ones, sorted.
            copy: of the stack.
            limit: addresses.
            read_page: reads the process's memory, for the stack that a signal came to.

        Raises:
            SandboxError: the child died or took too long.
            AnswerError: it answered nonsense.
        """
        pages, absent = dict(copy.pages), list[int]()
        for _ in range(MOST_ROUNDS):
            parameters = {
                "space": space,
                "limit": limit,
                "found": copy.found,
                "registers": list(copy.registers.items()),
                "pages": list(pages),
                "absent": absent,
            }
            match self._sandbox.call("finish", parameters, b"".join(pages.values()), seconds=self._patience_s):
                case {"space": _}:
                    data = b"".join(MAPPING.pack(*each) for each in mappings)
                    self._sandbox.call("space", {"space": space}, data, seconds=self._patience_s)
                case {"image": int(number)}:
                    self._give(number)
                case {"memory": int(address)} if 0 <= address < _MOST_ADDRESS:
                    may = read_page is not None and len(pages) - len(copy.pages) < _MOST_PAGES
                    page = read_page(address & -PAGE) if read_page is not None and may else b""
                    if len(page) == PAGE:
                        pages[address & -PAGE] = page
                    else:
                        absent.append(address & -PAGE)
                case answer:
                    finished, signals = _checked(answer, limit)
                    if len(pages) == len(copy.pages) or read_page is None or _still_stand(signals, read_page):
                        return finished
                    return _before_the_signal(finished)
        raise AnswerError

    def interpreter(self, image: int, offset: int) -> FoundInterpreter | str | None:
        """The CPython interpreter in an image.

        Args:
            image: its number.
            offset: of a mapping, in the image.

        Returns:
            What is known of it; why its frames cannot be walked; or None if there is none.

        Raises:
            SandboxError: the child died or took too long.
            AnswerError: it answered nonsense.
        """
        for _ in range(2):
            match self._sandbox.call("interpreter", {"image": image, "offset": offset}, seconds=self._patience_s):
                case {"image": int(number)}:
                    self._give(number)
                case {"problem": str(problem)}:
                    return problem[:_LONGEST_PROBLEM]
                case {
                    "addresses": [int(runtime), int(text_type), int(bytes_type)],
                    "version": str(version),
                    "layout": dict(layout),
                } if _is_layout(layout):
                    said = version[:_LONGEST_VERSION]
                    return FoundInterpreter(runtime, text_type, bytes_type, Layout(**layout), said)
                case None:
                    return None
                case _:
                    break
        raise AnswerError

    def _give(self, number: int) -> None:
        if self._given == MOST_IMAGES:
            self._sandbox.close()
            self._given = 0
        self._given += 1
        file = self._open_image(number)
        try:
            self._sandbox.call("image", {"image": number}, fds=[] if file is None else [file], seconds=self._patience_s)
        finally:
            if file is not None:
                os.close(file)


def _is_layout(layout: dict[Any, Any]) -> bool:
    return layout.keys() == {each.name for each in fields(Layout)} and all(
        value is None or (isinstance(value, int) and 0 <= value < LARGEST_OFFSET) for value in layout.values()
    )


def _checked(answer: Any, limit: int) -> tuple[Finished, list[tuple[int, int, int]]]:
    """The stack, and its signals' frames as Walk.interrupted has them."""
    match answer:
        case {
            "ips": ips,
            "found": found,
            "cfas": cfas,
            "ending": int(ending),
            "rules": list(rules),
            "interrupted": list(signals),
            "met_unknown": bool(met_unknown),
        }:
            ips, cfas = integers(ips, _MOST_ADDRESS), integers(cfas, _MOST_ADDRESS)
            hows = [Found(each) for each in integers(found, len(Found))]
            frames = [integers(each, _MOST_ADDRESS) for each in signals]
            if (
                len(ips) == len(hows) == len(cfas) <= limit
                and 0 <= ending < len(Walked)
                and all(len(each) == 3 for each in frames)
            ):
                learnt = dict(_rule(each) for each in rules)
                return Finished(ips, hows, Walked(ending), learnt, met_unknown, cfas), [
                    (each[0], each[1], each[2]) for each in frames
                ]
    raise AnswerError


def _rule(answer: Any) -> tuple[tuple[int, RuleScope], Rule]:
    match answer:
        case [int(address), int(scope), int(packed)] if 0 <= address < 1 << 47 and 0 <= packed < 1 << 64:
            try:
                return (address, RuleScope(scope)), Rule.unpack(packed)
            except ValueError:
                pass
    raise AnswerError


def _still_stand(signals: list[tuple[int, int, int]], read_page: ReadPage) -> bool:
    """Whether the frames of signals are what they were: else the stacks that these came to went on meanwhile."""
    for at, rsp, rip in signals:
        inside = at & PAGE - 1
        here = read_page(at & -PAGE)[inside:]
        if len(here) < 16:
            here += read_page((at & -PAGE) + PAGE)
        if here[:16] != struct.pack("<QQ", rsp, rip):
            return False
    return True


def _before_the_signal(finished: Finished) -> Finished:
    count = next((at for at, how in enumerate(finished.found) if at and how is Found.INTERRUPTED), len(finished.ips))
    kept = slice(count)
    return Finished(finished.ips[kept], finished.found[kept], Walked.MEMORY, {}, cfas=finished.cfas[kept])
