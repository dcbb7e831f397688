"""Scoreboard dependencies: code made by hand, and every annotation in real GPU code."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from iaprof.gpu.intel import scoreboard
from iaprof.gpu.intel.scoreboard import Annotation, Scoreboard, TokenWait as Wait, parse_annotation
from iaprof.report.gpu.module import InstructionInfo
from unit.zebins import KERNELS, MODULES, disassembly

SEND = "send.ugm (32|M0)         r22      r18  null:0  0x0            0x08200580           "


def board(*texts: str) -> Scoreboard:
    """Consecutive instructions of 16 bytes, with IGA's labels: `L32` is the instruction at offset 32."""
    return of([(16 * index, text) for index, text in enumerate(texts)])


def of(code: Sequence[tuple[int, str]]) -> Scoreboard:
    return Scoreboard(
        [
            InstructionInfo(
                offset,
                16,
                parse_annotation(text).opcode.partition(".")[0],
                text,
                tuple(int(label) for label in re.findall(r"\bL(\d+)\b", text)),
                (),
            )
            for offset, text in code
        ]
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{SEND}{{I@3,$2}} // wr:4+0, rd:2; load.ugm.d32.a64", Annotation("send.ugm", sets=2, distances=("I@3",))),
        ("mad (32|M0)  r14.0<1>:f  r31.0<1;0>:f {Compacted,@1,$12.dst}",
         Annotation("mad", tokens=("$12.dst",), distances=("@1",), other=("Compacted",))),
        ("(W)     mov (1|M0) null<1>:ud  0x30433:ud   {$5.src}", Annotation("mov", tokens=("$5.src",))),
        ("sync.allrd                           ($3,$18)                ",
         Annotation("sync.allrd", tokens=("$3.src", "$18.src"))),
        ("sync.allwr                           null  {I@1}",
         Annotation("sync.allwr", tokens=("$*.dst",), distances=("I@1",))),
        ("(W&~f2.0) jmpi                                L760", Annotation("jmpi", predicated=True)),
        ("(W)     jmpi                                 L432", Annotation("jmpi")),
        ("(W)     send.gtwy (1|M0) null r127 null:0 0x0 0x02000010 {EOT,I@1,$5} // end of {thread}",
         Annotation("send.gtwy", ends=True, sets=5, distances=("I@1",), other=("EOT",))),
        ("illegal", Annotation("illegal", ends=True)),
        ("", Annotation("")),
        ("(W", Annotation("(W")),
        ("mov {$5.dst} r1 {", Annotation("mov")),
    ],
)  # fmt: skip
def test_parsing_annotations(text: str, found: Annotation) -> None:
    assert parse_annotation(text) == found


def test_the_last_setter_counts_in_straight_code() -> None:
    found = board(f"{SEND}{{$2}}", f"{SEND}{{$3}}", f"{SEND}{{$2}}", "mov r1 r2 {$2.dst}", "add r1 r2 {$2.src,I@1}")
    assert found.waits(0x30) == (Wait("$2.dst", ("sbid", "sync"), (0x20,)),)
    assert found.waits(0x40) == (Wait("$2.src", ("sbid", "sync"), (0x20,)), Wait("I@1", ("dist_acc",)))
    assert found.waits(0x20) == (Wait("$2", ("sbid",), (0x00,)),)
    assert found.waits(0x8) == ()


def test_a_token_is_free_after_a_wait() -> None:
    found = board(f"{SEND}{{$2}}", "mov r1 r2 {$2.dst}", f"{SEND}{{$2}}")
    assert found.waits(0x20) == ()


def test_dependencies_around_a_loop() -> None:
    found = board(
        "mov r1 r2 {$0.dst}", "mov r3 r4 {$1.src}", f"{SEND}{{$0}}", f"{SEND}{{$1}}", "(W&f1.0) jmpi L0", "ret"
    )
    assert [wait.offsets for offset in (0x00, 0x10) for wait in found.waits(offset)] == [(0x20,), (0x30,)]


def test_dependencies_on_each_path() -> None:
    found = board("(f0.0) goto L48 L48", f"{SEND}{{$4}}", "(W) jmpi L64", f"{SEND}{{$4}}", "sync.nop null {$4.dst}")
    assert found.waits(0x40) == (Wait("$4.dst", ("sbid", "sync"), (0x10, 0x30)),)


def test_the_search_stops_at_unconditional_jumps_and_ends() -> None:
    for last in ("(W) jmpi L64", "goto L64 L64", "ret r1", "send.gtwy null r1 {EOT,$3}"):
        found = board(f"{SEND}{{$4}}", last, "mov r1 r2 {$4.dst}", "nop", "nop")
        assert found.waits(0x20) == (Wait("$4.dst", ("sbid", "sync")),), last


def test_a_barrier_waits_for_its_signal() -> None:
    found = board("send.gtwy null r5 null:0 0x0 0x02000004 {I@2,$7}", "nop", "(W) sync.bar 0x0")
    assert found.waits(0x20) == (Wait("barrier", ("sync",), (0x00,)),)


def test_waits_in_words() -> None:
    named = ["0x20 send.ugm", "0x40 send.slm"]
    assert Wait("$2.dst", (), (1, 2)).describe(named) == "waits for 0x20 send.ugm or 0x40 send.slm ($2.dst)"
    assert Wait("$2.dst", ()).describe([]) == "waits for an instruction that was not found ($2.dst)"
    assert Wait("$2", (), (1,)).describe(named[:1]) == "waits until $2 is free, which 0x20 send.ugm holds"
    assert Wait("$*.src", ()).describe([]) == "waits for all instructions with a token ($*.src)"
    assert Wait("I@3", ()).describe([]) == "waits for the instruction 3 back in the integer pipe (I@3)"
    assert Wait("barrier", (), (1,)).describe(["0x0 send.gtwy"]) == "waits for its work-group, signals at 0x0 send.gtwy"


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_every_annotation_of_real_code_is_parsed_and_every_setter_found(device: str, module: str) -> None:
    for kernel in KERNELS[module]:
        code = disassembly(device, module, kernel)
        found = of(code)
        tokens = 0
        for offset, text in code:
            told = parse_annotation(text)
            assert set(told.other) <= {"Compacted", "EOT"}, text
            assert len(re.findall(r"\$\d+", text)) == len(told.tokens) + (told.sets is not None), text
            assert len(re.findall(r"@\d", text)) == len(told.distances), text
            waits = {wait.what: wait for wait in found.waits(offset)}
            assert set(waits) >= {*told.tokens, *told.distances}
            for token in told.tokens:
                assert waits[token].offsets, text
                owners = [parse_annotation(dict(code)[owner]) for owner in waits[token].offsets]
                assert {f"${owner.sets}" for owner in owners} == {token.partition(".")[0]}
                assert {owner.opcode.partition(".")[0] for owner in owners} == {"send"}
            if told.opcode == "sync.bar":
                assert waits["barrier"].offsets, text
            tokens += len(told.tokens)
        assert tokens >= 5


def test_untrusted_code_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction waits for a token that none sets: the search is limited."""
    monkeypatch.setattr(scoreboard, "_MAX_STEPS", 10_000)
    found = board(f"{SEND}{{$2}}", *["mov r1 r2 {$1.dst}"] * 4_000, "mov r1 r2 {$2.dst}", "mov r1 r2 {$3.dst}")
    assert found.waits(16 * 4_001) == (Wait("$2.dst", ("sbid", "sync"), (0x00,)),)
    steps = [found._steps_left]
    for offset in range(0, 16 * 4_000, 16):
        found.waits(offset)
        steps.append(found._steps_left)
    assert steps[0] == 10_000 - 4_001
    assert steps[-1] == 0
