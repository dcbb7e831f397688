"""Finishes stacks in a sandboxed child, which reads call frame information that may be hostile.

The child is symbols/unwind/reader.py. This module supplies what the child asks for: a process's mappings, an image when
a stack leads into it, and memory when a signal handler ran on a stack of its own. It also checks the child's answers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping as Mapped, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from iaprof.formats.wire.unwind_rules import Rule, RuleScope, Walked
from iaprof.sandbox.answers import AnswerError, integers
from iaprof.sandbox.closing import Closing
from iaprof.sandbox.parent import Limits, Sandbox, SandboxError, SandboxSlow
from iaprof.symbols.python.layout import LARGEST_OFFSET, Layout
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.reader import MAPPING
from iaprof.symbols.unwind.walk import PAGE, HowFound

MOST_IMAGES = 2000  # of one child
MOST_ROUNDS = 256  # of requests, for one stack
_MOST_PAGES = 64  # that the child may ask for, for one stack
_MOST_ADDRESS = 1 << 64
_LONGEST_PROBLEM, _LONGEST_VERSION = 300, 20  # characters
_PATIENCE_S = 3.0  # for one answer
_LIMITS = Limits(memory_bytes=512 << 20, mapped_bytes=1 << 42, seconds=20.0, files=MOST_IMAGES, answer_bytes=1 << 20)

OpenImage = Callable[[int], int | None]
"""Opens the image with a number; returns a descriptor, which the caller closes, or None if it cannot be opened."""
Answer = TypeVar("Answer")
ReadPage = Callable[[int], bytes]
"""Reads the page of the process's memory at an address; returns b"" if it cannot be read."""


@dataclass(frozen=True)
class StackCopy:
    """A copied stack, and the registers of its innermost frame."""

    registers: Mapped[int, int]  # by DWARF number
    how_found: HowFound  # how the address in them was found
    pages: dict[int, bytes]  # by address


@dataclass(frozen=True)
class Finished:
    """A stack, as far as it could be walked."""

    ips: Sequence[int]  # innermost first
    how_found: Sequence[HowFound]  # for each address
    ending: Walked
    rules: dict[tuple[int, RuleScope], Rule] = field(default_factory=dict)
    """By address and scope: the unwinding rules that the walk learnt."""
    met_unknown: bool = False  # the walk met a likely return address outside all known mappings
    cfas: Sequence[int] = ()  # for each address the CFA; 0 if the walk found no caller


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
        self._images_given = 0  # to the present child

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def start(self) -> None:
        """Starts the child process, which otherwise starts when it is first needed.

        Raises:
            SandboxError: the child cannot be started.
        """
        self._sandbox.call("space", {"space": 0})

    def finish(
        self, space: int, mappings: Sequence[Mapping], copy: StackCopy, limit: int, read_page: ReadPage | None = None
    ) -> Finished:
        """Walks a stack to its end, or as far as possible.

        Args:
            space: a number for these mappings, which no other mappings have.
            mappings: the process's executable mappings, sorted.
            copy: of the stack.
            limit: the most addresses to return.
            read_page: reads the process's memory, for a second stack that a signal handler interrupted.

        Raises:
            SandboxError: the child died or took too long.
            AnswerError: the child's answer is invalid.
        """
        return self._with_own_child(lambda: self._finish(space, mappings, copy, limit, read_page))

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

    def _finish(
        self, space: int, mappings: Sequence[Mapping], copy: StackCopy, limit: int, read_page: ReadPage | None
    ) -> Finished:
        pages, absent = dict(copy.pages), list[int]()
        for _ in range(MOST_ROUNDS):
            parameters = {
                "space": space,
                "limit": limit,
                "found": copy.how_found,
                "registers": list(copy.registers.items()),
                "pages": list(pages),
                "absent": absent,
            }
            match self._sandbox.call("finish", parameters, b"".join(pages.values()), seconds=self._patience_s):
                case {"space": _}:
                    data = b"".join(MAPPING.pack(*mapping) for mapping in mappings)
                    self._sandbox.call("space", {"space": space}, data, seconds=self._patience_s)
                case {"image": int(number)}:
                    self._give_image(number)
                case {"memory": int(address)} if 0 <= address < _MOST_ADDRESS:
                    is_allowed = read_page is not None and len(pages) - len(copy.pages) < _MOST_PAGES
                    page = read_page(address & -PAGE) if read_page is not None and is_allowed else b""
                    if len(page) == PAGE:
                        pages[address & -PAGE] = page
                    else:
                        absent.append(address & -PAGE)
                case answer:
                    finished, signals = _checked(answer, limit)
                    if len(pages) == len(copy.pages) or read_page is None or _are_unchanged(signals, read_page):
                        return finished
                    return _up_to_signal(finished)
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
        self._images_given = 0

    def _give_image(self, number: int) -> None:
        """Opens an image and passes it to the child. A child that has MOST_IMAGES is replaced first."""
        if self._images_given == MOST_IMAGES:
            self._renew()
        self._images_given += 1
        file = self._open_image(number)
        try:
            parameters = {"image": number, "is_open": file is not None}
            self._sandbox.call("image", parameters, fds=[] if file is None else [file], seconds=self._patience_s)
        finally:
            if file is not None:
                os.close(file)


def _is_layout(layout: dict[Any, Any]) -> bool:
    return layout.keys() == {member.name for member in fields(Layout)} and all(
        value is None or (isinstance(value, int) and 0 <= value < LARGEST_OFFSET) for value in layout.values()
    )


def _checked(answer: Any, limit: int) -> tuple[Finished, list[tuple[int, int, int]]]:
    """Returns the stack, and its signal frames as in Walk.interrupted; raises AnswerError."""
    match answer:
        case {
            "ips": ips,
            "found": numbers,
            "cfas": cfas,
            "ending": int(ending),
            "rules": list(rules),
            "interrupted": list(signals),
            "met_unknown": bool(met_unknown),
        }:
            ips, cfas = integers(ips, _MOST_ADDRESS), integers(cfas, _MOST_ADDRESS)
            how_found = [HowFound(number) for number in integers(numbers, len(HowFound))]
            frames = [integers(frame, _MOST_ADDRESS) for frame in signals]
            if (
                len(ips) == len(how_found) == len(cfas) <= limit
                and 0 <= ending < len(Walked)
                and all(len(frame) == 3 for frame in frames)
            ):
                learnt = dict(_rule(rule) for rule in rules)
                return Finished(ips, how_found, Walked(ending), learnt, met_unknown, cfas), [
                    (frame[0], frame[1], frame[2]) for frame in frames
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
    how_found = finished.how_found
    count = next((at for at, how in enumerate(how_found) if at and how is HowFound.INTERRUPTED), len(finished.ips))
    kept = slice(count)
    return Finished(finished.ips[kept], how_found[kept], Walked.MEMORY, {}, cfas=finished.cfas[kept])
