"""USDT probes: arguments of every x86-64 form, and libraries with wrong locations of probes."""

import io
import struct
import subprocess
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

import elf_sections
import iaprof.record.kernels
from iaprof.bpf.probes import usdt
from iaprof.bpf.probes.library_file import ProbeError
from iaprof.bpf.probes.usdt import Arg, parse_arg, read_probes
from iaprof.bpf.structs import NO_REGISTER, ArgKind

RAX, RDX, RCX, RBX, RSI, RDI, RBP, RSP, R8, R15, RIP = 0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16


@pytest.mark.parametrize(
    ("spec", "arg"),
    [
        ("8@%rdi", Arg(ArgKind.REGISTER, 64, False, base=RDI)),
        ("-8@%rsi", Arg(ArgKind.REGISTER, 64, True, base=RSI)),
        ("4@%eax", Arg(ArgKind.REGISTER, 32, False, base=RAX)),
        ("-4@%r15d", Arg(ArgKind.REGISTER, 32, True, base=R15)),
        ("2@%cx", Arg(ArgKind.REGISTER, 16, False, base=RCX)),
        ("-2@%r8w", Arg(ArgKind.REGISTER, 16, True, base=R8)),
        ("1@%sil", Arg(ArgKind.REGISTER, 8, False, base=RSI)),
        ("1@%r8b", Arg(ArgKind.REGISTER, 8, False, base=R8)),
        ("-1@%bh", Arg(ArgKind.REGISTER, 8, True, base=RBX, shift=8)),
        ("8@%eax", Arg(ArgKind.REGISTER, 32, False, base=RAX)),
        ("%rdx", Arg(ArgKind.REGISTER, 64, False, base=RDX)),
        ("-4@$5", Arg(ArgKind.CONSTANT, 32, True, 5)),
        ("-4@$-5", Arg(ArgKind.CONSTANT, 32, True, -5)),
        ("8@$0xffff8000ffbe0000", Arg(ArgKind.CONSTANT, 64, False, 0xFFFF8000FFBE0000 - (1 << 64))),
        ("8@-16(%rbp)", Arg(ArgKind.MEMORY, 64, False, -16, RBP)),
        ("-4@(%rsp)", Arg(ArgKind.MEMORY, 32, True, 0, RSP)),
        ("8@8(%rsp)", Arg(ArgKind.MEMORY, 64, False, 8, RSP)),
        ("4@-20(%rbp,%rax,4)", Arg(ArgKind.MEMORY, 32, False, -20, RBP, RAX, 2)),
        ("8@(%rax,%rbx)", Arg(ArgKind.MEMORY, 64, False, 0, RAX, RBX, 0)),
        ("8@0x10(,%rcx,8)", Arg(ArgKind.MEMORY, 64, False, 16, NO_REGISTER, RCX, 3)),
        ("8@16+8(%rdi)", Arg(ArgKind.MEMORY, 64, False, 24, RDI)),
        ("8@64(%rip)", Arg(ArgKind.MEMORY, 64, False, 64, RIP)),
        ("8@table(%rip)", Arg(ArgKind.MEMORY, 64, False, 0x4000 - 0x1000, RIP)),
        ("8@table+8(%rip)", Arg(ArgKind.MEMORY, 64, False, 0x4008 - 0x1000, RIP)),
        ("8@8+table(%rip)", Arg(ArgKind.MEMORY, 64, False, 0x4008 - 0x1000, RIP)),
    ],
)
def test_argument_specifications_are_parsed(spec: str, arg: Arg) -> None:
    assert parse_arg(spec, 0x1000, {"table": 0x4000}.get) == arg


@pytest.mark.parametrize(
    "spec",
    ["", "8@", "8@%xmm0", "3@%rdi", "8@%st", "8@$", "8@$x", "16@%rdi", "8@(%eax)", "8@4(%rbp", "8@(%rax,%rbx,3)",
     "8@other(%rip)", "8@table(%rax)", "8@%rdi;system", "8@1 2", "8@$99999999999999999999999", "8@%", "8@8@%rdi",
     "8@99999999999999999999(%rax)", "8@4f(%rax)", "8@$5)", "8@%fs:0x10"],
)  # fmt: skip
def test_other_argument_specifications_are_refused(spec: str) -> None:
    with pytest.raises(ProbeError):
        parse_arg(spec, 0x1000, {"table": 0x4000}.get)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small library with a probe, made with dtrace."""
    folder = tmp_path_factory.mktemp("usdt")
    # Without pyparsing, as on a fresh machine, dtrace accepts only one probe per line.
    (folder / "p.d").write_text("provider level_zero {\n    probe launch_kernel(long, long, long, char *);\n};\n")
    (folder / "l.c").write_text(
        '#include "p.h"\nvoid f(long a, long b) { if (LEVEL_ZERO_LAUNCH_KERNEL_ENABLED())'
        ' LEVEL_ZERO_LAUNCH_KERNEL(a, b, 7, (char *)"k"); }'
    )
    for command in (
        "dtrace -h -s p.d -o p.h",
        "cc -O2 -fPIC -c l.c -o l.o",
        "dtrace -G -s p.d -o p.o",
        "cc -shared l.o p.o -o l.so",
    ):
        subprocess.run(command.split(), cwd=folder, check=True)
    return (folder / "l.so").read_bytes()


def note_offset(library: bytes) -> int:
    """The file offset of the note's three addresses."""
    section = elf_sections.section(ELFFile(io.BytesIO(library)), ".note.stapsdt", NoteSection)
    return int(section["sh_offset"]) + 12 + 8


def test_a_probe_of_a_real_library(library: bytes) -> None:
    # when
    probes = read_probes(io.BytesIO(library), "level_zero", ("launch_kernel",))
    # then its location is the compiler's nop, its semaphore is two zero bytes, and it has four arguments
    assert [probe.name for probe in probes] == ["launch_kernel"]
    assert library[probes[0].offset] == 0x90
    assert library[probes[0].semaphore_offset : probes[0].semaphore_offset + 2] == b"\0\0"
    assert len(probes[0].args) == 4
    assert probes[0].args[2] == Arg(ArgKind.CONSTANT, 32, True, 7)


LONG_NOP, MARK = b"\x0f\x1f\x44\0\0", b"\x0f\x1f\x80iapr"


@pytest.mark.parametrize(
    ("linux", "behind", "further"),
    [((6, 17), LONG_NOP + MARK, 0), ((6, 18), LONG_NOP + MARK, 1), ((6, 18), LONG_NOP + bytes(7), 0)],
)
def test_the_long_nop_behind_a_probe_of_ours_is_probed_where_linux_calls_it(
    library: bytes, monkeypatch: pytest.MonkeyPatch, linux: tuple[int, int], behind: bytes, further: int
) -> None:
    # given a library whose probe has both, ours or another, and an argument that is found from the probe's address
    monkeypatch.setattr(usdt, "linux_version", lambda: linux)
    (plain,) = read_probes(io.BytesIO(library), "level_zero", ("launch_kernel",))
    both = bytearray(library)
    both[plain.offset + 1 : plain.offset + 1 + len(behind)] = behind
    # when
    (probe,) = read_probes(io.BytesIO(both), "level_zero", ("launch_kernel",))
    # then
    assert probe.offset == plain.offset + further
    names = [each for each in zip(plain.args, probe.args, strict=True) if each[0].base == 16]  # %rip
    assert all(before.value == after.value + further for before, after in names)


@pytest.mark.parametrize(
    ("library", "provider", "names"),
    [("cuda", "cuda", {"launch_kernel", "message"}), ("inject", "level_zero", {"launch_kernel", "execute_lists"})],
)
def test_our_own_libraries_have_the_long_nop(
    monkeypatch: pytest.MonkeyPatch, library: str, provider: str, names: set[str]
) -> None:
    monkeypatch.setattr(usdt, "linux_version", lambda: (6, 18))
    content = (Path(iaprof.record.kernels.__file__).parent / f"libiaprof_{library}.so").read_bytes()
    probes = read_probes(io.BytesIO(content), provider, tuple(names))
    assert {probe.name for probe in probes} == names
    assert {content[probe.offset :][: len(LONG_NOP)] for probe in probes} == {LONG_NOP}


@pytest.mark.parametrize(
    ("field", "address"),
    [(0, 0x0), *((field, address) for field in (0, 2) for address in (0x2, 0x3E00, 0xFFFFFFFFFFFFF000, 0x10000000))],
)
def test_an_address_outside_the_right_segment_is_refused(library: bytes, field: int, address: int) -> None:
    # given a library whose note points to its headers, its data, or nowhere
    changed = bytearray(library)
    struct.pack_into("<Q", changed, note_offset(library) + 8 * field, address)
    # when, then
    with pytest.raises(ProbeError):
        read_probes(io.BytesIO(bytes(changed)), "level_zero", ("launch_kernel",))


def test_a_location_in_data_and_a_semaphore_in_code_are_refused(library: bytes) -> None:
    location, base, semaphore = struct.unpack_from("<QQQ", library, note_offset(library))
    for wrong in ((semaphore, base, semaphore), (location, base, location)):
        changed = bytearray(library)
        struct.pack_into("<QQQ", changed, note_offset(library), *wrong)
        with pytest.raises(ProbeError):
            read_probes(io.BytesIO(bytes(changed)), "level_zero", ("launch_kernel",))


def test_broken_libraries_raise_probe_error(library: bytes) -> None:
    # given truncations, and flipped bytes in the headers
    cases = [library[:length] for length in range(0, len(library), 509)]
    for position in [*range(4, 64), *range(len(library) - 1000, len(library), 7)]:
        changed = bytearray(library)
        changed[position] ^= 0xFF
        cases.append(bytes(changed))
    # when, then ProbeError is the only error
    refused = 0
    for case in cases:
        try:
            read_probes(io.BytesIO(case), "level_zero", ("launch_kernel",))
        except ProbeError:
            refused += 1
    assert len(library) // 509 // 2 < refused < len(cases)


def test_a_library_without_probes_has_none() -> None:
    libc = next(Path("/lib/x86_64-linux-gnu").glob("libm.so.6"))
    with libc.open("rb") as file:
        assert read_probes(file, "level_zero", ("launch_kernel",)) == []
