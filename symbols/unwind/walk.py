"""Walks a copied stack to its end by call frame information, starting with the registers of its innermost frame.

This finishes stacks that BPF could not walk, and learns a rule for BPF at each address. The caller of code without call
frame information is found by the frame pointer if it leads to a likely caller, else by the first word on the stack that
looks like a return address. Such callers are guesses, and marked.
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
from iaprof.symbols.unwind.cfi import R12, R13, R14, R15, RBP, RBX, RETURN_ADDRESS, RSP, RegisterRuleKind, Row
from iaprof.symbols.unwind.code import Mapping, Space
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.expressions import ExpressionError, evaluate
from iaprof.symbols.unwind.rules import checked, rule_of

PAGE = 4096
SCANNED_BYTES = 36 << 10  # of the stack, for a word that looks like a return address; OpenBLAS has frames of 32 KiB
MOST_CHECKED = 1 << 13  # words of one walk that are checked as return addresses: 10 ms
_LARGEST_FRAME = 1 << 20  # the most bytes that a frame pointer may point upwards
_LEARNT_BYTES = 1024  # of code on each side of an instruction for which its rule is learnt, too
_KEPT = (RBX, RBP, R12, R13, R14, R15)  # callee-saved registers (System V ABI for x86-64)
_OUTERMOST_BYTES = 64  # before a call in a function without a caller: there it clears rbp
_OWN_BYTES = 1 << 16  # before an address, which may belong to the same function
_COPIES_RSP = (b"\x48\x89\xe3", b"\x48\x8b\xdc")  # the two encodings of mov %rsp,%rbx
_CLEARS_RBP = b"\x31\xed"  # xor %ebp,%ebp
_SIGNAL_RETURN = bytes.fromhex("48c7c00f0000000f05")  # mov $15,%rax; syscall
# Offsets of registers in the signal frame, from its ucontext on (struct sigcontext, asm/sigcontext.h).
_UCONTEXT = {RBX: 128, RBP: 120, RSP: 160, R12: 72, R13: 80, R14: 88, R15: 96, RETURN_ADDRESS: 168}
_MASK = (1 << 64) - 1
_USER_END = 1 << 47  # above are mappings that the Linux kernel makes in all processes


class HowFound(IntEnum):
    """How an address of a stack was found."""

    BY_RULE = 0
    BY_GUESS = 1
    INTERRUPTED = 2  # not a return address: a signal interrupted this instruction


class NeedsMemory(Exception):
    """The walk needs memory at this address, which has not been copied yet."""

    def __init__(self, address: int) -> None:
        super().__init__(address)
        self.address = address


class Absent(LookupError):
    """The walk asked for this memory, but it cannot be copied."""


Read = Callable[[int, int], int]
"""Reads an unsigned number, given its address and size in bytes; raises LookupError if it was not copied."""


class Registers(dict[int, int]):
    """The known registers of a frame, by DWARF number.

    Registers that a function has saved are read from the stack only when needed, as most never are.
    """

    def __init__(self, read: Read, values: Mapped[int, int], saved: Mapped[int, int]) -> None:
        """Makes the registers of a frame.

        Args:
            read: reads the stack.
            values: of known registers.
            saved: the addresses at which other registers are saved.
        """
        super().__init__(values)
        self._read, self._saved = read, dict(saved)

    def __missing__(self, number: int) -> int:
        value = self[number] = self._read(self._saved[number], 8)
        return value

    def save(self, number: int, address: int) -> None:
        """Notes that a register is saved at an address of the stack."""
        self.pop(number, None)
        self._saved[number] = address

    def forget(self, number: int) -> None:
        """Notes that a register's value is lost."""
        self.pop(number, None)
        self._saved.pop(number, None)

    def kept(self) -> Registers:
        """Returns the callee-saved registers and all that are saved on the stack."""
        return Registers(self._read, {number: self[number] for number in _KEPT if number in self}, self._saved)

    def replaced(self, values: Mapped[int, int]) -> Registers:
        """Returns the registers with some other values."""
        return Registers(self._read, {**self, **values}, self._saved)


@dataclass
class Walk:
    """A walk, with its addresses and the rules that it learns."""

    space: Space
    read: Read
    limit: int  # frames
    ips: list[int] = field(default_factory=list)  # innermost first
    how_found: list[HowFound] = field(default_factory=list)  # for each address
    cfas: list[int] = field(default_factory=list)  # for each address the CFA; 0 if its caller was not found
    rules: dict[tuple[int, RuleScope], Rule] = field(default_factory=dict)  # by address and scope
    interrupted: list[tuple[int, int, int]] = field(default_factory=list)
    """For each signal frame: the address of its saved rsp, the saved rsp, and the saved rip, which comes after it."""
    checked: int = 0  # words of the stack that were checked as return addresses
    met_unknown: bool = False  # met a likely return address outside all known mappings
    searched: tuple[int, tuple[int, RuleScope]] | None = None
    """The index of the first address that was found by searching the stack, and the key of the rule that it made."""

    def run(self, start: Mapped[int, int], how: HowFound = HowFound.INTERRUPTED) -> Walked:
        """Walks from an address on; a Walk runs only once.

        Args:
            start: the known registers, by DWARF number; RETURN_ADDRESS is the first address.
            how: BY_RULE if the first address is a return address, INTERRUPTED if it is an instruction's.

        Raises:
            NeedsImage: a new Walk has to start again once the image is supplied.
            NeedsMemory: a new Walk has to start again once the memory is copied.
        """
        registers = Registers(self._word, start, {})
        while True:
            address = registers[RETURN_ADDRESS]
            if not address:
                return self._without_wrong_guess(Walked.WHOLE)
            if len(self.ips) >= self.limit:
                return Walked.DEEP
            mapping = self.space.mapping(address)
            if mapping is None:
                self.met_unknown = True
                return self._without_wrong_guess(Walked.NOWHERE)
            self.ips.append(address)
            self.how_found.append(how)
            self.cfas.append(0)
            try:
                step = self._step(address, how is HowFound.INTERRUPTED, mapping, registers)
            except CfiError:
                return Walked.DAMAGED
            except (LookupError, ExpressionError):
                return Walked.MEMORY
            if isinstance(step, Walked):
                return step
            # The caller's frame is further up; only a signal handler may run on another stack.
            if step[1] is not HowFound.INTERRUPTED and step[0][RSP] <= registers[RSP]:
                return Walked.STUCK
            registers, how = step
            self.cfas[-1] = registers[RSP]

    def _without_wrong_guess(self, ending: Walked) -> Walked:
        """Returns how a walk ended that came to an address outside of code.

        If the walk searched the stack for a caller before, that caller was wrong: the stack is cut there, and the rules
        that were learnt from it are dropped.
        """
        if self.searched is None:
            return ending
        count, key = self.searched
        del self.ips[count:], self.how_found[count:], self.cfas[count:]
        self.cfas[-1] = 0
        wrong = self.rules[key]
        self.rules = {
            own_key: rule for own_key, rule in self.rules.items() if own_key[1] is not RuleScope.BLOCK or rule != wrong
        }
        self.rules[key] = HARD
        return Walked.STUCK

    def _step(
        self, address: int, is_exact: bool, mapping: Mapping, registers: Registers
    ) -> tuple[Registers, HowFound] | Walked:
        """Steps to the caller; returns its registers and how it was found, or how the walk ends."""
        row = self.space.row(address, is_exact, mapping)
        scope = RuleScope.INSTRUCTION if is_exact else RuleScope.RETURN
        if row is None:
            return self._step_without_cfi(address, scope, registers)
        rule = self.rules[address, scope] = rule_of(row, address, is_exact)
        if is_exact and rule != HARD and (rule.kind is RuleKind.BY_DEREF or not isinstance(row.cfa, bytes)):
            self._learn_blocks(address, (row.before, row.behind), rule)
        if row.is_outermost:
            return Walked.WHOLE
        callers = self._unwound(row, registers)
        if not row.is_signal_frame:
            return callers, HowFound.BY_RULE
        self._note_signal(registers[RSP])
        return callers, HowFound.INTERRUPTED

    def _learn_blocks(self, address: int, extent: tuple[int, int], rule: Rule) -> None:
        """Sets the rule of the blocks of code around an instruction.

        Args:
            address: of the instruction.
            extent: the bytes before the instruction, and from it on, for which the rule holds.
            rule: for these bytes.
        """
        mapping = self.space.mapping(address)
        if mapping is None:
            return
        start = max(address - min(extent[0], _LEARNT_BYTES), mapping.start)
        end = min(address + min(extent[1], _LEARNT_BYTES), mapping.end)
        first = start + BLOCK_BYTES - 1 & -BLOCK_BYTES
        for block in range(first, end - BLOCK_BYTES + 1, BLOCK_BYTES):
            self.rules[block, RuleScope.BLOCK] = rule

    def _unwound(self, row: Row, registers: Registers) -> Registers:
        """Returns the caller's registers by the rules of a row."""
        cfa = self._cfa(row, registers)
        if cfa & 7 and not row.is_signal_frame:
            raise LookupError("a stack pointer that is not aligned")
        callers = registers.kept()
        callers[RSP] = cfa
        for number, (kind, operand) in row.registers.items():
            try:
                if kind is RegisterRuleKind.OFFSET and isinstance(operand, int) and number in _KEPT:
                    callers.save(number, cfa + operand & _MASK)
                elif kind is RegisterRuleKind.UNDEFINED:
                    callers.forget(number)
                elif kind is not RegisterRuleKind.SAME:
                    callers[number] = self._value(kind, operand, cfa, registers)
            except (LookupError, ExpressionError):
                if number in (RSP, RETURN_ADDRESS):
                    raise
                callers.forget(number)  # the walk may never need it
        if RSP not in callers or RETURN_ADDRESS not in callers:
            raise LookupError("no rule for the return address or the stack pointer")
        return callers

    def _cfa(self, row: Row, registers: Registers) -> int:
        if isinstance(row.cfa, bytes):
            return evaluate(row.cfa, registers, self._word)
        if row.cfa is None:
            raise CfiError("no rule for the CFA")
        return registers[row.cfa[0]] + row.cfa[1] & _MASK

    def _value(self, kind: RegisterRuleKind, operand: int | bytes, cfa: int, registers: Registers) -> int:
        """Returns the caller's value of a register by its rule."""
        if isinstance(operand, bytes):
            result = evaluate(operand, registers, self._word, cfa)
            return result if kind is RegisterRuleKind.VALUE_EXPRESSION else self._word(result)
        if kind is RegisterRuleKind.REGISTER:
            return registers[operand]
        result = cfa + operand & _MASK
        return result if kind is RegisterRuleKind.VALUE_OFFSET else self._word(result)

    def _word(self, address: int, size: int = 8) -> int:
        """Reads a number from the stack. After a signal frame the stack may be another one, which is not copied yet."""
        try:
            return self.read(address, size)
        except LookupError as error:
            if self.interrupted and not isinstance(error, Absent):
                raise NeedsMemory(address & -PAGE) from None
            raise

    def _note_signal(self, ucontext: int) -> None:
        at = ucontext + _UCONTEXT[RSP]
        self.interrupted.append((at, self._word(at), self._word(at + 8)))

    def _step_without_cfi(
        self, address: int, scope: RuleScope, registers: Registers
    ) -> tuple[Registers, HowFound] | Walked:
        """Like _step, for code without call frame information."""
        rsp = registers[RSP]
        try:
            rbp = registers[RBP]
        except LookupError:
            rbp = 0
        if self.space.code_at(address, len(_SIGNAL_RETURN)) == _SIGNAL_RETURN:
            self.rules[address, scope] = SIGNAL
            interrupted = {number: self._word(rsp + offset) for number, offset in _UCONTEXT.items()}
            self._note_signal(rsp)
            return Registers(self._word, interrupted, {}), HowFound.INTERRUPTED
        clears_rbp = rbp == 0 and _CLEARS_RBP in self.space.code_before(address, _OUTERMOST_BYTES)
        if clears_rbp or self.space.begins_goroutine(address):
            self.rules[address, scope] = END
            return Walked.WHOLE
        callers = self._by_frame_pointer(rsp, rbp)
        if callers is None and self.space.is_go(address):
            # All Go functions that call others keep frame pointers, so searching the stack would only find old calls.
            self.rules[address, scope] = TO_OTHER_STACK if self._has_called_c(rsp, rbp) else HARD
            return Walked.STUCK
        rule = BY_FRAME_POINTER
        if callers is None:
            callers, rule = self._by_search(address, registers)
            if self.searched is None:
                self.searched = len(self.ips), (address, scope)
            if rule.kind is RuleKind.BY_RBX:
                # The rule probably holds for the whole function. Where it does not, BPF finds no caller by it.
                self._learn_blocks(address, self.space.gap(address), rule)
        self.rules[address, scope] = rule
        return Walked.STUCK if callers is None else (callers, HowFound.BY_GUESS)

    def _has_called_c(self, rsp: int, rbp: int) -> bool:
        """Tells whether the last frame is Go code that called C on another stack, so that rbp points to Go's stack.

        False if C called Go: then rbp has any value that C code left in it.
        """
        was_found_by_rule = len(self.how_found) > 1 and self.how_found[-1] is HowFound.BY_RULE
        return was_found_by_rule and rbp > 0 and not rbp & 7 and not rsp <= rbp < rsp + _LARGEST_FRAME

    def _by_frame_pointer(self, rsp: int, rbp: int) -> Registers | None:
        """Returns the caller's registers if rbp is a frame pointer that leads to a likely caller, else None."""
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

    def _by_search(self, address: int, registers: Registers) -> tuple[Registers | None, Rule]:
        """Searches the stack for a caller.

        Returns:
            The caller's registers, None if there is no caller; and a rule, which may find a caller another time.
        """
        rsp, from_generated = registers[RSP], self.space.is_unread(address)
        start, end = rsp + 7 & ~7, rsp + SCANNED_BYTES
        with contextlib.suppress(LookupError):
            # OpenBLAS's functions reserve stack for data and keep the old rsp in rbx, so the search begins there: words
            # below are data or left by earlier calls. If it finds no caller there, rbx has another meaning.
            if start < registers[RBX] < end and not registers[RBX] & 7 and self._may_keep_rsp(address):
                kind = RuleKind.BY_RBX if len(self.ips) == 1 else RuleKind.HARD
                result = self._search(registers[RBX], registers[RBX], end, kind, registers, from_generated)
                if result[0] is not None:
                    return result
                end = registers[RBX]
        return self._search(start, rsp, end, RuleKind.BY_RSP, registers, from_generated)

    def _may_keep_rsp(self, address: int) -> bool:
        """Tells whether the code before an address, as far as it lacks call frame information, copies rsp into rbx."""
        before = self.space.code_before(address, min(self.space.gap(address)[0], _OWN_BYTES))
        return any(instruction in before for instruction in _COPIES_RSP)

    def _search(
        self, start: int, base: int, end: int, kind: RuleKind, registers: Registers, from_generated: bool
    ) -> tuple[Registers | None, Rule]:
        """Like _by_search, in a part of the stack: the first word that looks like a return address leads to the caller.

        In a stack of generated code, a word that points to generated code ends the search: it may be a return address.

        Args:
            start: of the part.
            base: the address that the rule's offsets count from.
            end: of the part.
            kind: of the rule.
            registers: of the frame.
            from_generated: whether the frame's code is generated.
        """
        for at, word in self._words(start, end):
            if not self.space.low <= word < self.space.high:
                continue
            self.checked += 1
            if self.space.is_after_call(word, unread=False):
                saved = self._saved_rbp(at)
                rule = checked(kind, at + 8 - base, -16 if saved else 0, bool(saved), is_guess=True)
                return registers.replaced({**saved, RSP: at + 8, RETURN_ADDRESS: word}), rule
            if self.checked == MOST_CHECKED or (from_generated and self.space.is_unread(word)):
                break
        return None, HARD

    def _words(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields addresses and words of the stack, up to a page that does not exist: nothing was ever pushed there."""
        for page in range(start & -PAGE, end, PAGE):
            first, last = max(start, page), min(end, page + PAGE)
            try:
                content = self._word(first, last - first).to_bytes(last - first, "little")
            except LookupError:
                return
            words = struct.unpack(f"<{(last - first) // 8}Q", content[: (last - first) & ~7])
            yield from zip(range(first, last, 8), words, strict=False)

    def _saved_rbp(self, at: int) -> dict[int, int]:
        """Returns the caller's rbp if a likely one is saved below the return address, as functions push it first."""
        try:
            word = self._word(at - 8)
        except LookupError:
            return {}
        return {RBP: word} if at < word < at + _LARGEST_FRAME and not word & 7 else {}
