"""Finds what an instruction waits for, from the software-scoreboard annotations in IGA's text.

On Intel's GPUs, the compiler tracks data dependencies. An instruction of variable latency (send, dpas) sets a token,
the sbid: `$5`. An instruction that reads its result waits for `$5.dst`; one that overwrites its sources, for `$5.src`;
a `sync` can wait for several tokens. Dependencies on instructions of fixed latency are by distance: `I@2` is the last
but one instruction in the integer pipe. The hardware counts a stall at the waiting instruction; this module finds the
one that it waits for.

Sources: IGA's syntax, and Mesa's model of it (enum tgl_sbid_mode in src/intel/compiler/brw_eu_defines.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from iaprof.gpu.instructions import Dependencies, Instruction, Wait

_OPTIONS = re.compile(r"\{([^{}]*)\}$")
_TOKEN = re.compile(r"\$(\d{1,2})(?:\.(dst|src))?")
_DISTANCE = re.compile(r"([AFILMS]?)@(\d)")
_PREDICATE = re.compile(r"\([^)]*\bf\d[^)]*\)")
_PIPES = {"": "the pipe of its operands", "A": "every pipe", "F": "the float pipe", "I": "the integer pipe",
          "L": "the long pipe", "M": "the math pipe", "S": "the scalar pipe"}  # fmt: skip
_JUMPS = ("jmpi", "goto")  # without a predicate, they never continue at the next instruction
_ENDS = ("ret", "illegal")
_SYNC_OF_TOKENS = {"sync.allrd": "src", "sync.allwr": "dst"}
_MAX_DISTANCE = 4_096  # instructions to search for one token
_MAX_STEPS = 1 << 20  # for all tokens of a kernel: a second or two of work


@dataclass(frozen=True, slots=True)
class Annotation:
    """An instruction's opcode and options, as far as the scoreboard is concerned."""

    opcode: str  # with its function: `sync.bar`
    predicated: bool = False
    ends: bool = False  # ends the thread or the subroutine
    sets: int | None = None  # the token that it sets
    tokens: tuple[str, ...] = ()  # the tokens that it waits for: `$5.dst`; `$*.dst` is all of them
    distances: tuple[str, ...] = ()  # the distances that it waits for: `I@2`
    other: tuple[str, ...] = ()  # other options


@dataclass(frozen=True, slots=True)
class TokenWait(Wait):
    """A wait for a token, a distance (`I@2`) or a barrier."""

    def describe(self, instructions: Sequence[str]) -> str:
        """See Wait."""
        names = " or ".join(instructions)
        if self.what == "barrier":
            return "waits for its work-group" + (f", signals at {names}" if names else "")
        if distance := _DISTANCE.fullmatch(self.what):
            return f"waits for the instruction {distance[2]} back in {_PIPES[distance[1]]} ({self.what})"
        if "*" in self.what:
            return f"waits for all instructions with a token ({self.what})"
        if "." not in self.what:
            return f"waits until {self.what} is free, which {names} holds"
        return f"waits for {names or 'an instruction that was not found'} ({self.what})"

    def opcode(self, text: str) -> str:
        """See Wait."""
        return parse_annotation(text).opcode


def parse_annotation(text: str) -> Annotation:
    """Parses an instruction as IGA prints it."""
    code = text.partition("//")[0].strip()
    found = _OPTIONS.search(code)
    options = [option.strip() for option in found[1].split(",")] if found else []
    body = code[: found.start()] if found else code
    predicate = body.partition(")")[0] + ")" if body.startswith("(") else ""
    words = body.removeprefix(predicate).split()
    opcode = words[0] if words else ""
    sets, tokens, distances, other = None, [], [], []
    for option in options:
        if token := _TOKEN.fullmatch(option):
            if token[2]:
                tokens.append(option)
            else:
                sets = int(token[1])
        elif _DISTANCE.fullmatch(option):
            distances.append(option)
        else:
            other.append(option)
    if kind := _SYNC_OF_TOKENS.get(opcode):  # its tokens are in parentheses; without any, it waits for all
        tokens += [f"${token[1]}.{kind}" for token in _TOKEN.finditer(body)] or [f"$*.{kind}"]
    return Annotation(
        opcode,
        _PREDICATE.match(predicate) is not None,
        "EOT" in other or opcode in _ENDS,
        sets,
        tuple(tokens),
        tuple(distances),
        tuple(other),
    )


class Scoreboard(Dependencies):
    """The dependencies between the instructions of a kernel."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        """Takes the kernel's instructions, sorted by offset."""
        self._instructions = instructions
        self._index = {each.offset: index for index, each in enumerate(instructions)}
        self._steps_left = _MAX_STEPS

    def waits(self, offset: int) -> Sequence[Wait]:
        """See Dependencies."""
        index = self._index.get(offset)
        if index is None:
            return ()
        own = self._annotations[index]
        found = [TokenWait(token, ("sbid", "sync"), self._setters(index, token)) for token in own.tokens]
        if own.sets is not None and (before := self._owners(index, own.sets)):
            found.append(TokenWait(f"${own.sets}", ("sbid",), before))
        if own.opcode == "sync.bar":
            found.append(TokenWait("barrier", ("sync",), self._signals(index)))
        found += [TokenWait(distance, ("dist_acc",)) for distance in own.distances]
        return tuple(found)

    @cached_property
    def _annotations(self) -> list[Annotation]:
        return [parse_annotation(each.text) for each in self._instructions]

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        """By instruction: the instructions that can run immediately before it."""
        before: list[list[int]] = [[] for _ in self._instructions]
        for index, (each, own) in enumerate(zip(self._instructions, self._annotations, strict=True)):
            leaves = own.ends or (own.opcode in _JUMPS and not own.predicated)
            if index + 1 < len(before) and not leaves:
                before[index + 1].append(index)
            for target in each.targets:
                if target in self._index:
                    before[self._index[target]].append(index)
        return before

    def _setters(self, index: int, token: str) -> tuple[int, ...]:
        if "*" in token:
            return ()
        number = int(token[1:].partition(".")[0])
        return self._last_on_each_path(index, lambda each: each.sets == number)

    def _owners(self, index: int, token: int) -> tuple[int, ...]:
        """Returns the instructions that may still own a token when another sets it: setting waits for the owner."""
        done = f"${token}.dst"
        return self._last_on_each_path(index, lambda each: each.sets == token, lambda each: done in each.tokens)

    def _signals(self, index: int) -> tuple[int, ...]:
        return self._last_on_each_path(index, lambda each: each.opcode == "send.gtwy" and not each.ends)

    def _last_on_each_path(
        self,
        index: int,
        matches: Callable[[Annotation], bool],
        stops: Callable[[Annotation], bool] = lambda _: False,
    ) -> tuple[int, ...]:
        """Returns the last matching instruction on each path to this one, unless one that `stops` comes after it."""
        found = []
        seen = {*self._predecessors[index]}
        left = list(seen)
        while left and len(seen) < _MAX_DISTANCE and self._steps_left > 0:
            self._steps_left -= 1
            each = left.pop()
            if matches(self._annotations[each]):
                found.append(self._instructions[each].offset)
                continue
            if stops(self._annotations[each]):
                continue
            more = [before for before in self._predecessors[each] if before not in seen]
            seen.update(more)
            left += more
        return tuple(sorted(found))
