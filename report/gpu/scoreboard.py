"""What an instruction waits for: the scoreboard annotations that IGA prints behind it.

Intel's GPUs leave data dependencies to the compiler. An instruction of unknown length (send, dpas) is given a token,
an sbid: `$5`. Who needs its result waits with `$5.dst`, who overwrites what it still reads with `$5.src`; `sync` does
so for several. Instructions of known length are waited for by distance: `I@2` is the last but one in the integer pipe.
The hardware charges a stall to the instruction that waits; here is found which one it waits for.

Sources: IGA's syntax, and Mesa's model of it (enum tgl_sbid_mode in src/intel/compiler/brw_eu_defines.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from iaprof.report.gpu.module import InstructionInfo

_OPTIONS = re.compile(r"\{([^{}]*)\}$")
_TOKEN = re.compile(r"\$(\d{1,2})(?:\.(dst|src))?")
_DISTANCE = re.compile(r"([AFILMS]?)@(\d)")
_PREDICATE = re.compile(r"\([^)]*\bf\d[^)]*\)")
_PIPES = {"": "the pipe of its operands", "A": "every pipe", "F": "the float pipe", "I": "the integer pipe",
          "L": "the long pipe", "M": "the math pipe", "S": "the scalar pipe"}  # fmt: skip
_JUMPS = ("jmpi", "goto")  # what stands behind them is not next, unless they have a predicate
_ENDS = ("ret", "illegal")
_SYNC_OF_TOKENS = {"sync.allrd": "src", "sync.allwr": "dst"}
_MAX_DISTANCE = 4_096  # instructions that are looked at for one token
_MAX_STEPS = 1 << 20  # for all tokens of a kernel: a second or two


@dataclass(frozen=True, slots=True)
class Annotation:
    """What an instruction says of the scoreboard."""

    opcode: str  # with its function: `sync.bar`
    predicated: bool = False
    ends: bool = False  # the thread
    sets: int | None = None  # the token that it is given itself
    tokens: tuple[str, ...] = ()  # that it waits for: `$5.dst`; `$*.dst` is all of them
    distances: tuple[str, ...] = ()  # `I@2`
    other: tuple[str, ...] = ()  # options that have nothing to do with it


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that an instruction waits for."""

    what: str  # `$5.dst`, `I@2` or `barrier`
    reasons: tuple[str, ...]  # the counters that such a stall is in
    offsets: tuple[int, ...] = ()  # of who was given the token, on each path, or who signalled


def parse_annotation(text: str) -> Annotation:
    """Reads an instruction as IGA prints it."""
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
    if kind := _SYNC_OF_TOKENS.get(opcode):  # its tokens stand in parentheses; without any it is for all of them
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


def describe(wait: Wait, instructions: Sequence[str]) -> str:
    """A wait in words; `shown` are the instructions that it waits for."""
    names = " or ".join(instructions)
    if wait.what == "barrier":
        return "waits for its work-group" + (f", signals at {names}" if names else "")
    if distance := _DISTANCE.fullmatch(wait.what):
        return f"waits for the instruction {distance[2]} back in {_PIPES[distance[1]]} ({wait.what})"
    if "*" in wait.what:
        return f"waits for all that has a token ({wait.what})"
    if "." not in wait.what:
        return f"waits until {wait.what} is free, which {names} has"
    return f"waits for {names or 'an instruction that was not found'} ({wait.what})"


class Scoreboard:
    """Answers for the instructions of one kernel."""

    def __init__(self, instructions: Sequence[InstructionInfo]) -> None:
        """`instructions` are sorted by offset."""
        self._instructions = instructions
        self._index = {each.offset: index for index, each in enumerate(instructions)}
        self._steps_left = _MAX_STEPS

    def waits(self, offset: int) -> tuple[Wait, ...]:
        """All that the instruction at an offset may wait for; () where it waits for nothing, or is none."""
        index = self._index.get(offset)
        if index is None:
            return ()
        own = self._annotations[index]
        found = [Wait(token, ("sbid", "sync"), self._setters(index, token)) for token in own.tokens]
        if own.sets is not None and (before := self._owners(index, own.sets)):
            found.append(Wait(f"${own.sets}", ("sbid",), before))
        if own.opcode == "sync.bar":
            found.append(Wait("barrier", ("sync",), self._signals(index)))
        found += [Wait(distance, ("dist_acc",)) for distance in own.distances]
        return tuple(found)

    @cached_property
    def _annotations(self) -> list[Annotation]:
        return [parse_annotation(each.text) for each in self._instructions]

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        """From which instructions each can be reached in one step."""
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
        """Who may still have a token that is given anew, which has to wait: a token has one owner at a time."""
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
        """The last wanted instructions before one, on each path that leads to it and has no barred one after it."""
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
