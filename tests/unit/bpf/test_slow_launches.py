"""Probes on instructions that the kernel single-steps: what is reported of a driver without better ones."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

import elf_sections
from iaprof.bpf import driver_layout
from iaprof.bpf.driver_layout import Action, Entry, Field, Layout
from iaprof.bpf.probes.libraries import Libraries, Outcome
from iaprof.bpf.probes.usdt import Probe
from iaprof.formats.header.launch_warnings import slow_launches, slow_launches_sentence
from iaprof.record.calibrate.code import LENGTH, probe_offset
from iaprof.record.checks import libraries as checks
from iaprof.record.checks.result import Level

FIELD = Field((0,))
# Beginnings of functions. `probe_offset` does not know the first three instructions, or they change the arguments.
STARTS = {
    "loads": "endbr64; mov 8(%rsi), %rsi; push %rbx; pop %rbx",
    "compares": "cmpq $0, (%rsi); je 1f; 1:",
    "swaps": "endbr64; xchg %rdi, %rsi; nop",
    "pushes": "endbr64; push %rbx; pop %rbx",
    "jumps": "endbr64; sub $8, %rsp; test %rsi, %rsi; je 1f; 1: add $8, %rsp",
    "long_nop": ".byte 0x0f, 0x1f, 0x44, 0, 0",  # newer kernels emulate it
}


def driver(folder: Path, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Layout]:
    """A driver whose launch functions begin so, with a layout that has the best places for its probes."""
    source, path = folder / "d.c", folder / "libze_intel_gpu.so.1"
    others = {"gone": Action.KERNEL_GONE, "execute": Action.EXECUTE}
    functions = {name: STARTS[name] for name in names} | dict.fromkeys(others, "endbr64; xor %eax, %eax")
    source.write_text(
        "".join(
            f'__asm__(".globl {name}\\n.type {name}, @function\\n{name}: {code}\\n ret\\n.size {name}, . - {name}");\n'
            for name, code in functions.items()
        )
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,--build-id=sha1", "-o", path, source], check=True)
    with path.open("rb") as file:
        elf = ELFFile(file)
        build_id = next(elf_sections.section(elf, ".note.gnu.build-id", NoteSection).iter_notes())["n_desc"]
        entries = []
        for name in functions:
            address = elf_sections.symbol(elf, name)["st_value"]
            file.seek(next(elf.address_offsets(address)))
            at = address + probe_offset(file.read(LENGTH), {0, 1})
            action = others.get(name, Action.LAUNCH)
            entries.append(Entry(name, action, at, 1, 0 if action is Action.EXECUTE else None))
    layout = Layout(
        build_id=build_id, driver="level_zero", version="1", entries=tuple(entries), address=(FIELD,), size=FIELD,
        code=FIELD, name=FIELD, allocation=(FIELD, FIELD), kernel_class=FIELD, classes=(1,),
    )  # fmt: skip
    (folder / f"{build_id}.json").write_text(layout.to_json())
    monkeypatch.setattr(driver_layout, "CACHE", folder)
    return path, layout


def taken(path: Path) -> Outcome:
    def attach(_: int, __: Sequence[Probe]) -> str:
        raise AssertionError

    (outcome,) = Libraries(attach, lambda *_: None).take(path)
    return outcome


def test_a_driver_without_an_emulated_instruction_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, layout = driver(tmp_path, ("pushes", "loads", "jumps", "compares", "swaps", "long_nop"), monkeypatch)

    outcome = taken(path)

    assert (outcome.problem, outcome.probes) == ("", len(layout.entries))
    assert outcome.single_stepped == ("loads", "compares", "swaps")
    # and `iaprof check` reports it, too
    check = checks._library(outcome, set(), "1")
    assert check.level is Level.WARNING
    assert check.text.endswith(
        "; a launch by loads, compares, swaps costs 2 to 10 µs more: "
        "the kernel single-steps the instruction at the probe"
    )


def test_a_driver_where_probes_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = driver(tmp_path, ("pushes", "jumps"), monkeypatch)

    outcome = taken(path)

    assert outcome.single_stepped == ()  # of a function that is seldom called nothing is said
    assert checks._library(outcome, set(), "1").level is Level.OK


def test_what_is_said() -> None:
    costs = "costs 2 to 10 µs more: the kernel single-steps the instruction at the probe"
    said = f"/a/libze_intel_gpu.so.1: a launch by f {costs}"
    library = {"path": "/a/libze_intel_gpu.so.1", "probes": 3}
    assert slow_launches_sentence(library) == ""
    assert slow_launches_sentence(library | {"single_stepped": ["f"]}) == said
    assert slow_launches([f"f{number}" for number in range(9)]).startswith("a launch by f0, f1, f2, and 6 more costs ")


@pytest.mark.parametrize(
    "library",
    [None, 7, "", {}, {"path": "/a"}, {"path": 1, "single_stepped": ["f"]}, {"path": "/a", "single_stepped": "f"},
     {"path": "/a", "single_stepped": [1]}, {"path": "/a", "single_stepped": []}],
)  # fmt: skip
def test_headers_from_anyone(library: object) -> None:
    assert slow_launches_sentence(library) == ""
