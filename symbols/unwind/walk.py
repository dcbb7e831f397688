"""Walks a stack to its end by call frame information, in a copy of the stack and with the registers of its top.

What BPF could not walk is finished here, and each address on the way gives a rule for BPF. Code without call frame
information is left by the frame pointer if that leads to a likely caller, else by the first word of the stack that
looks like a return address; such callers are guesses, and marked.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping as Mapped
from dataclasses import dataclass, field
from enum import IntEnum

from iaprof.formats.wire.unwind_rules import (
    BLOCK_BYTES,
    BY_FRAME_POINTER,
    END,
    HARD,
    SIGNAL,
    TO_OTHER_STACK,
    Rule,
    RuleKind,
    RuleScope,
    Walked,
)
from iaprof.symbols.unwind.cfi import R12, R13, R14, R15, RBP, RBX, RETURN_ADDRESS, RSP, How, Row
from iaprof.symbols.unwind.code import Mapping, Space
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.expressions import ExpressionError, evaluate
from iaprof.symbols.unwind.rules import checked, rule_of

PAGE = 4096
SCANNED_BYTES = 36 << 10  # of the stack, for a word that looks like a return address; OpenBLAS has frames of 32 KiB
MOST_CHECKED = 1 << 13  # words of one walk, that are looked at as return addresses: 10 ms
_LARGEST_FRAME = 1 << 20  # bytes that a frame pointer may lead upwards
_LEARNT_BYTES = 1024  # of code on each side of an instruction, for which rules are learnt with it
_KEPT = (RBX, RBP, R12, R13, R14, R15)  # registers that a function gives back as they were
_OUTERMOST_BYTES = 64  # before the call of what has no caller, in which it clears rbp
_OWN_BYTES = 1 << 16  # before an address, that may be of the same function
_COPIES_RSP = (b"\x48\x89\xe3", b"\x48\x8b\xdc")  # mov %rsp,%rbx, as assemblers write it
_CLEARS_RBP = b"\x31\xed"  # xor %ebp,%ebp
_SIGNAL_RETURN = bytes.fromhex("48c7c00f0000000f05")  # mov $15,%rax; syscall
# Where the kernel's signal frame has registers, from the ucontext on (struct sigcontext, asm/sigcontext.h).
_UCONTEXT = {RBX: 128, RBP: 120, RSP: 160, R12: 72, R13: 80, R14: 88, R15: 96, RETURN_ADDRESS: 168}
_MASK = (1 << 64) - 1
_USER_END = 1 << 47  # above is what the kernel maps into all processes


class Found(IntEnum):
    """What is to be known of one address of a stack."""

    BY_RULE = 0
    BY_GUESS = 1
    INTERRUPTED = 2  # no return address: a signal came there


class NeedsMemory(Exception):
    """Memory at this address, which is in no copy, has to be had first."""

    def __init__(self, address: int) -> None:
        super().__init__(address)
        self.address = address


class Absent(LookupError):
    """Memory that was asked for, and cannot be had."""


Read = Callable[[int, int], int]
"""The unsigned number of so many bytes at an address; LookupError if it is not known."""


class Registers(dict[int, int]):
    """What is known of a frame's registers, by their numbers in DWARF.

    Those that a function has saved are read from the stack when they are asked for, as most never are.
    """

    def __init__(self, read: Read, values: Mapped[int, int], saved: Mapped[int, int]) -> None:
        """Args: reads the stack; those that are known; where others are saved."""
        super().__init__(values)
        self._read, self._saved = read, dict(saved)

    def __missing__(self, number: int) -> int:
        value = self[number] = self._read(self._saved[number], 8)
        return value

    def save(self, number: int, address: int) -> None:
        """This register is on the stack."""
        self.pop(number, None)
        self._saved[number] = address

    def forget(self, number: int) -> None:
        """This register is lost."""
        self.pop(number, None)
        self._saved.pop(number, None)

    def kept(self) -> Registers:
        """Those that a function gives back as they were."""
        return Registers(self._read, {number: self[number] for number in _KEPT if number in self}, self._saved)

    def but(self, values: Mapped[int, int]) -> Registers:
        """These, but for some."""
        return Registers(self._read, {**self, **values}, self._saved)


@dataclass
class Walk:
    """A walk: what was found, and the rules that were learnt."""

    space: Space
    read: Read
    limit: int  # frames
    ips: list[int] = field(default_factory=list)  # innermost first
    found: list[Found] = field(default_factory=list)  # of each address
    cfas: list[int] = field(default_factory=list)  # where the caller of each has its frame; 0 if it has none
    rules: dict[tuple[int, RuleScope], Rule] = field(default_factory=dict)  # by address and what they are for
    interrupted: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each signal frame where its saved rsp lies, that, and the saved rip behind it."""
    checked: int = 0  # words of the stack, for want of call frame information
    met_unknown: bool = False  # what may be a return address, in no code that is known to be mapped
    searched: tuple[int, tuple[int, RuleScope]] | None = None
    """Which address was the first that was found by looking through the stack, and the key of the rule that says so."""

    def run(self, start: Mapped[int, int], how: Found = Found.INTERRUPTED) -> Walked:
        """Walks from an address on, to be called once.

        Args:
            start: registers by their numbers in DWARF, RETURN_ADDRESS for the address; those that are known.
            how: whether that is an instruction's or a return address.

        Raises:
            NeedsImage: nothing was done; to be run anew, by a new walk, when the image is there.
            NeedsMemory: the same.
        """
        registers = Registers(self._word, start, {})
        while True:
            address = registers[RETURN_ADDRESS]
            if not address:
                return self._unless_astray(Walked.WHOLE)
            if len(self.ips) >= self.limit:
                return Walked.DEEP
            mapping = self.space.mapping(address)
            if mapping is None:
                self.met_unknown = True
                return self._unless_astray(Walked.NOWHERE)
            self.ips.append(address)
            self.found.append(how)
            self.cfas.append(0)
            try:
                step = self._step(address, how is Found.INTERRUPTED, mapping, registers)
            except CfiError:
                return Walked.DAMAGED
            except (LookupError, ExpressionError):
                return Walked.MEMORY
            if isinstance(step, Walked):
                return step
            # A caller's frame lies further up; only a signal handler may have a stack of its own.
            if step[1] is not Found.INTERRUPTED and step[0][RSP] <= registers[RSP]:
                return Walked.STUCK
            registers, how = step
            self.cfas[-1] = registers[RSP]

    def _unless_astray(self, ending: Walked) -> Walked:
        """How a walk ended that came to no code. What was found by looking through the stack was no caller, then."""
        if self.searched is None:
            return ending
        count, at = self.searched
        del self.ips[count:], self.found[count:], self.cfas[count:]
        self.cfas[-1] = 0
        wrong = self.rules[at]
        self.rules = {of: rule for of, rule in self.rules.items() if of[1] is not RuleScope.BLOCK or rule != wrong}
        self.rules[at] = HARD
        return Walked.STUCK

    def _step(
        self, address: int, is_exact: bool, mapping: Mapping, registers: Registers
    ) -> tuple[Registers, Found] | Walked:
        """The caller's registers, and how it was found."""
        row = self.space.row(address, is_exact, mapping)
        scope = RuleScope.INSTRUCTION if is_exact else RuleScope.RETURN
        if row is None:
            return self._step_without(address, scope, registers)
        rule = self.rules[address, scope] = rule_of(row, address, is_exact)
        if is_exact and rule != HARD and (rule.kind is RuleKind.BY_DEREF or not isinstance(row.cfa, bytes)):
            self._learn_blocks(address, (row.before, row.behind), rule)
        if row.is_outermost:
            return Walked.WHOLE
        callers = self._unwound(row, registers)
        if not row.is_signal_frame:
            return callers, Found.BY_RULE
        self._note_signal(registers[RSP])
        return callers, Found.INTERRUPTED

    def _learn_blocks(self, address: int, extent: tuple[int, int], rule: Rule) -> None:
        """The same rule for the code around an instruction, so many bytes before it and from it on."""
        mapping = self.space.mapping(address)
        if mapping is None:
            return
        start = max(address - min(extent[0], _LEARNT_BYTES), mapping.start)
        end = min(address + min(extent[1], _LEARNT_BYTES), mapping.end)
        first = start + BLOCK_BYTES - 1 & -BLOCK_BYTES
        for block in range(first, end - BLOCK_BYTES + 1, BLOCK_BYTES):
            self.rules[block, RuleScope.BLOCK] = rule

    def _unwound(self, row: Row, registers: Registers) -> Registers:
        cfa = self._cfa(row, registers)
        if cfa & 7 and not row.is_signal_frame:
            raise LookupError("a stack pointer that is not aligned")
        callers = registers.kept()
        callers[RSP] = cfa
        for number, (how, value) in row.registers.items():
            try:
                if how is How.OFFSET and isinstance(value, int) and number in _KEPT:
                    callers.save(number, cfa + value & _MASK)
                elif how is How.UNDEFINED:
                    callers.forget(number)
                elif how is not How.SAME:
                    callers[number] = self._value(how, value, cfa, registers)
            except (LookupError, ExpressionError):
                if number in (RSP, RETURN_ADDRESS):
                    raise
                callers.forget(number)  # perhaps nobody needs it
        if RETURN_ADDRESS not in row.registers:
            raise LookupError("no rule for the return address")
        return callers

    def _cfa(self, row: Row, registers: Registers) -> int:
        if isinstance(row.cfa, bytes):
            return evaluate(row.cfa, registers, self._word)
        if row.cfa is None:
            raise CfiError("no rule for the CFA")
        return registers[row.cfa[0]] + row.cfa[1] & _MASK

    def _value(self, how: How, value: int | bytes, cfa: int, registers: Registers) -> int:
        if isinstance(value, bytes):
            where = evaluate(value, registers, self._word, cfa)
            return where if how is How.VALUE_EXPRESSION else self._word(where)
        if how is How.REGISTER:
            return registers[value]
        where = cfa + value & _MASK
        return where if how is How.VALUE_OFFSET else self._word(where)

    def _word(self, address: int, size: int = 8) -> int:
        """A number of the stack. The stack that a signal came to may be another one, which has to be asked for."""
        try:
            return self.read(address, size)
        except LookupError as error:
            if self.interrupted and not isinstance(error, Absent):
                raise NeedsMemory(address & -PAGE) from None
            raise

    def _note_signal(self, ucontext: int) -> None:
        at = ucontext + _UCONTEXT[RSP]
        self.interrupted.append((at, self._word(at), self._word(at + 8)))

    def _step_without(self, address: int, scope: RuleScope, registers: Registers) -> tuple[Registers, Found] | Walked:
        """A step out of code without call frame information."""
        rsp = registers[RSP]
        try:
            rbp = registers[RBP]
        except LookupError:
            rbp = 0
        if self.space.code_at(address, len(_SIGNAL_RETURN)) == _SIGNAL_RETURN:
            self.rules[address, scope] = SIGNAL
            before = {number: self._word(rsp + at) for number, at in _UCONTEXT.items()}
            self._note_signal(rsp)
            return Registers(self._word, before, {}), Found.INTERRUPTED
        clears_rbp = rbp == 0 and _CLEARS_RBP in self.space.code_before(address, _OUTERMOST_BYTES)
        if clears_rbp or self.space.begins_goroutine(address):
            self.rules[address, scope] = END
            return Walked.WHOLE
        callers = self._by_frame_pointer(rsp, rbp)
        if callers is None and self.space.is_go(address):
            # All of its functions that call others keep frame pointers. What else is on the stack is of earlier calls.
            self.rules[address, scope] = TO_OTHER_STACK if self._has_called_c(rsp, rbp) else HARD
            return Walked.STUCK
        rule = BY_FRAME_POINTER
        if callers is None:
            callers, rule = self._by_scan(address, registers)
            if self.searched is None:
                self.searched = len(self.ips), (address, scope)
            if rule.kind is RuleKind.BY_RBX:
                # As likely as not it holds for the whole function. Where it does not, BPF finds no caller by it.
                self._learn_blocks(address, self.space.untold(address), rule)
        self.rules[address, scope] = rule
        return Walked.STUCK if callers is None else (callers, Found.BY_GUESS)

    def _has_called_c(self, rsp: int, rbp: int) -> bool:
        """Whether the last frame is of Go's code that called C on another stack, so that rbp leads to its own.

        Not so where C has called Go: what rbp is there is C's affair.
        """
        was_called_by_rule = len(self.found) > 1 and self.found[-1] is Found.BY_RULE
        return was_called_by_rule and rbp > 0 and not rbp & 7 and not rsp <= rbp < rsp + _LARGEST_FRAME

    def _by_frame_pointer(self, rsp: int, rbp: int) -> Registers | None:
        if not rsp <= rbp < rsp + _LARGEST_FRAME or rbp & 7:
            return None
        try:
            address = self._word(rbp + 8)
            self.met_unknown |= 0 < address < _USER_END and self.space.mapping(address) is None
            if not self.space.is_after_call(address, unread=True) and not self.space.begins_goroutine(address):
                return None
            return Registers(self._word, {RBP: self._word(rbp), RSP: rbp + 16, RETURN_ADDRESS: address}, {})
        except LookupError:
            return None

    def _by_scan(self, address: int, registers: Registers) -> tuple[Registers | None, Rule]:
        """The caller's registers, None if nothing was found; and a rule for that, which may hold at another time."""
        rsp, from_generated = registers[RSP], self.space.is_unread(address)
        start, end = rsp + 7 & ~7, rsp + SCANNED_BYTES
        with contextlib.suppress(LookupError):
            # OpenBLAS's functions make room for data, and keep in rbx what rsp was before. Below is what others left.
            # But where nothing follows, rbx points to something else.
            if start < registers[RBX] < end and not registers[RBX] & 7 and self._may_keep_rsp(address):
                kind = RuleKind.BY_RBX if len(self.ips) == 1 else RuleKind.HARD
                found = self._search(registers[RBX], registers[RBX], end, kind, registers, from_generated)
                if found[0] is not None:
                    return found
                end = registers[RBX]
        return self._search(start, rsp, end, RuleKind.BY_RSP, registers, from_generated)

    def _may_keep_rsp(self, address: int) -> bool:
        """Whether the code before an address, of which nothing is told, copies rsp into rbx."""
        before = self.space.code_before(address, min(self.space.untold(address)[0], _OWN_BYTES))
        return any(copy in before for copy in _COPIES_RSP)

    def _search(
        self, start: int, base: int, end: int, kind: RuleKind, registers: Registers, from_generated: bool
    ) -> tuple[Registers | None, Rule]:
        """Likewise, by the first word in a part of the stack that looks like a return address.

        None if it may be one of generated code, from where generated code may have been called.

        Args:
            start: of the part.
            base: what the rule counts from.
            end: of the part.
            kind: of the rule.
            registers: of the frame.
            from_generated: whether its code is generated.
        """
        for at, word in self._words(start, end):
            if not self.space.low <= word < self.space.high:
                continue
            self.checked += 1
            if self.space.is_after_call(word, unread=False):
                saved = self._saved_rbp(at)
                rule = checked(kind, at + 8 - base, -16 if saved else 0, bool(saved), is_guess=True)
                return registers.but({**saved, RSP: at + 8, RETURN_ADDRESS: word}), rule
            if self.checked == MOST_CHECKED or (from_generated and self.space.is_unread(word)):
                break
        return None, HARD

    def _words(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Addresses and words of the stack, up to a page that is not there: nothing was ever pushed so far down."""
        for page in range(start & -PAGE, end, PAGE):
            first, last = max(start, page), min(end, page + PAGE)
            try:
                content = self._word(first, last - first).to_bytes(last - first, "little")
            except LookupError:
                return
            words = struct.unpack(f"<{(last - first) // 8}Q", content[: (last - first) & ~7])
            yield from zip(range(first, last, 8), words, strict=False)

    def _saved_rbp(self, at: int) -> dict[int, int]:
        """The caller's rbp, where a function that uses it for data has pushed it first: below its return address."""
        try:
            word = self._word(at - 8)
        except LookupError:
            return {}
        return {RBP: word} if at < word < at + _LARGEST_FRAME and not word & 7 else {}
