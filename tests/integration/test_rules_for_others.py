"""Rules that are learnt from one stack and tried on others: guesses, and rules for blocks of code."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from iaprof.formats.wire.launches import Counter
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, Probed, probed
from stacks.debugger import build, offset_of
from thorough import thorough

pytestmark = pytest.mark.bpf
FUNCTIONS, AT_ONCE = 3000, 100
FLOOD, MOST_BYTES = 400, 48  # calls; of a function


@dataclass
class Asked:
    """asked.c, which calls when it is asked to."""

    process: subprocess.Popen[str]
    seen: Probed
    places: tuple[int, ...] = ()  # that the program told of

    def call(self, *words: int) -> list[Call]:
        """The calls that were seen, with finished stacks."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        self.places = tuple(int(each, 16) for each in self.process.stdout.readline().split())
        return [call for call in self.seen.calls() if call.pid == self.process.pid]

    @property
    def missed(self) -> int:
        """How many walks lacked a rule so far."""
        return self.seen.counted(Counter.STACKS_MISSED) + self.seen.counted(Counter.STACKS_PRESUMED)


@contextlib.contextmanager
def asked(program: Path) -> Iterator[Asked]:
    with probed(program) as seen:
        process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with process:
            yield Asked(process, seen)


def test_a_guess_is_believed_only_where_it_leads_to_a_known_caller(tmp_path: Path) -> None:
    program = build(tmp_path, "asked.c", "-O2")
    with asked(program) as process:
        # given a stack that was finished by a guess, twice
        (first,) = process.call(16, 1)
        process.call(16, 2)
        below, caller, main = process.places
        missed = process.missed
        # when the same function calls again with the same frame
        (again,) = process.call(16, 3)
        # then BPF walks that
        assert (again.ips, again.walked, process.missed) == (first.ips, Walked.WHOLE, missed)
        assert again.ips[1:3] == (below, caller)
        # and others, where it finds nothing, code that nobody returns to, or no address, are finished by user space
        for size, word in ((4096, 0), (2048, main), (1024, 1 << 60), (512, -1), (16, 0)):
            (other,) = process.call(size, word)
            assert (other.ips, other.walked) == (first.ips, Walked.WHOLE), (size, word)
        assert process.missed >= missed + 4


def test_a_flood_of_stacks_that_no_rule_leads_on_from_gives_no_wrong_ones(tmp_path: Path) -> None:
    # given frames of another size each time, so that a guess holds for one stack only
    program = build(tmp_path, "asked.c", "-O2")
    with asked(program) as process:
        process.call(16, 0)
        calls = process.call(16, 1 << 40, FLOOD)
        odd, even = process.places
    # then not all are copied, and those are cut; none has another one's caller
    ends = Counts(call.walked for call in calls)
    assert len(calls) == FLOOD
    assert ends[Walked.WHOLE] > 10
    assert ends[Walked.MISSED] > FLOOD / 4
    for call in calls:
        if call.walked is Walked.WHOLE:
            assert 0 < call.ips[2] - (odd if call.number % 2 else even) < MOST_BYTES, call


@thorough
def test_more_rules_than_there_is_room_for_at_first(tmp_path: Path) -> None:
    # given a program that calls from many functions, some of them whenever it is asked to
    numbers = range(FUNCTIONS)
    lines = [
        "#include <stdio.h>",
        "void probe_me(long);",
        *(f'__attribute__((noinline)) void f{n}(void) {{ probe_me({n}); __asm__(""); }}' for n in numbers),
        f"void (*all[])(void) = {{{', '.join(f'f{n}' for n in numbers)}}};",
        "int main(void) {",
        f"    for (int next = 0; getchar() != EOF; next = (next + {AT_ONCE}) % {FUNCTIONS}) {{",
        f"        for (int i = next; i < next + {AT_ONCE}; i++) all[i]();",
        "        putchar('x'); fflush(stdout);",
        "    }",
        "}",
    ]
    (tmp_path / "many.c").write_text("\n".join(lines))
    program = build(tmp_path, str(tmp_path / "many.c"), "-O1")
    with (
        probed(program) as seen,
        subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        go, called = process.stdin, process.stdout

        def call_all() -> dict[int, Call]:
            calls: dict[int, Call] = {}
            for _ in range(FUNCTIONS // AT_ONCE):
                go.write(b"x")
                called.read(1)
                calls |= {call.number: call for call in seen.calls() if call.pid == process.pid}
            return calls

        # when all were met twice, as some rules were lost while there was little room, and met again
        first = call_all()
        assert seen.counted(Counter.STACKS_MISSED) > FUNCTIONS / 2
        call_all()
        missed = seen.counted(Counter.STACKS_MISSED) + seen.counted(Counter.STACKS_PRESUMED)
        again = call_all()
        go.close()
        # then BPF has rules for nearly all of them, and no stack changed
        missed_again = seen.counted(Counter.STACKS_MISSED) + seen.counted(Counter.STACKS_PRESUMED) - missed
        assert missed_again < FUNCTIONS / 20
    assert len({call.ips for call in again.values()}) == FUNCTIONS
    assert {call.walked for call in again.values()} == {Walked.WHOLE}
    assert all(call.ips == again[number].ips for number, call in first.items() if not call.presumed)


def test_a_rule_holds_for_all_instructions_of_a_block(tmp_path: Path) -> None:
    program = build(tmp_path, "asked.c", "-O2")
    with asked(program) as process:
        # given the stack at one instruction of a function
        process.seen.probe(program, "plain", 70)
        process.call(16, 1)
        first = process.call(16, 2)[-1]
        missed = process.missed
        # when others are met, in the same block and in another one
        for at in (71, 127, 128, 200):
            process.seen.probe(program, "plain", at)
        calls = process.call(16, 3)[1:]
        # then BPF knows rules for them
        assert process.missed == missed
        start = first.ips[0] - 70
        assert [call.ips[0] - start for call in calls] == [70, 71, 127, 128, 200]
        assert {(call.ips[1:], call.walked) for call in calls} == {(first.ips[1:], Walked.WHOLE)}


def test_a_program_is_not_taken_for_an_earlier_one_of_the_same_process(tmp_path: Path) -> None:
    # given two programs at the same addresses, with other frames, which execute each other on one CPU, where the kernel
    # often gives every second program the same mm
    frames, programs = (1024, 2048), []
    for frame in frames:
        (folder := tmp_path / f"{frame}").mkdir()
        programs.append(
            build(folder, "executing.c", "-O1", "-static", "-no-pie", "-fomit-frame-pointer", f"-DFRAME={frame}")
        )
    assert len({offset_of(each, "inner") for each in programs}) == 1
    # when
    with probed(*programs) as seen:
        command = ["taskset", "-c", "0", *map(str, programs), "80"]
        process = subprocess.Popen(command)
        assert process.wait() == 0
        calls = [call for call in seen.calls() if call.pid == process.pid]
    # then
    assert Counts(call.number for call in calls) == {1024: 84, 2048: 80}
    # most of which are finished before their program has gone; main calls from four places
    whole = [call for call in calls if call.walked is Walked.WHOLE]
    assert len(whole) > len(calls) / 2
    assert len({(call.ips[:2], call.ips[3:]) for call in whole}) == 1
