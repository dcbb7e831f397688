# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Intel's runtime has the probes, kernels and addresses that it should; its launches are exact.

The runtime is used in two ways: by the program that tests profile, and directly (RUNTIME, a small ctypes program),
where a test raises the probes' semaphores itself, as the kernel does for whoever attaches. The GPU is a `Listener`.
"""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

import elf_sections
from iaprof.symbols.names.demangle import demangled
from limits import Within
from standin.hardware import MSG_KERNEL, MSG_LAUNCH, MSG_SYNC, Hardware
from standin.runtime import SOURCES, ZEBINS, Programs, Summary, build, command, debug_elf, read_summaries
from thorough import thorough
from waiting import until

DEVICES = ("bmg", "lnl", "ptl", "pvc")
DELTA = -0x420000

RUNTIME = """
import ctypes, json, os, sys, time
from pathlib import Path

class ModuleDesc(ctypes.Structure):
    _fields_ = [("format", ctypes.c_int), ("size", ctypes.c_size_t), ("bytes", ctypes.c_char_p)]

class KernelDesc(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p)]

ze = ctypes.CDLL(sys.argv[1])
base = next(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if sys.argv[1] in line)

def raise_semaphore(address):
    "What the kernel does in every process that maps the file, when somebody attaches to the probe."
    ctypes.c_uint16.from_address(base + address).value += 1

def create(content):
    module = ctypes.c_void_p()
    desc = ModuleDesc(1, len(content), content)
    return ze.zeModuleCreate(None, None, ctypes.byref(desc), ctypes.byref(module), None) & 0xffffffff, module

def load(path):
    code, module = create(Path(path).read_bytes())
    assert code == 0, hex(code)
    return module

def dumps():
    return sorted(os.listdir(os.environ["STANDIN_DUMP_DIR"]))

def tell(**values):
    print(json.dumps(values))

"""

# Walks the stack as BPF does, through frame pointers, where the runtime's probe would fire.
WALKER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include "ze_api.h"

static __thread const char *told;

void zexStandinSetLaunch(const char *stack, uint64_t delay, uint64_t duration)
{
    (void)delay, (void)duration;
    told = stack;
}

ze_result_t zeCommandListAppendLaunchKernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel,
                                            const ze_group_count_t *groups, ze_event_handle_t signal, uint32_t waits,
                                            ze_event_handle_t *wait)
{
    uintptr_t *frame = __builtin_frame_address(0), base = getauxval(AT_PHDR) & ~0xfffull;
    (void)list, (void)kernel, (void)groups, (void)signal, (void)waits, (void)wait;
    FILE *out = fopen(getenv("WALKED"), "a");
    fputs(told, out);
    while (frame[1] > base && frame[1] - base < 1 << 20) {
        fprintf(out, "\t%zx", (size_t)(frame[1] - base - 1));
        uintptr_t *outer = (uintptr_t *)frame[0];
        if (outer <= frame || outer > frame + (1 << 14) || (uintptr_t)outer % 8)
            break;
        frame = outer;
    }
    fputc('\n', out);
    fclose(out);
    return ZE_RESULT_SUCCESS;
}
"""


@dataclass(frozen=True)
class Placed:
    pid: int
    address: int
    size: int
    name: str
    offsets: tuple[int, ...]


@dataclass
class Listener:
    """A GPU that only listens."""

    folder: Path
    kernels: list[Placed] = field(default_factory=list)
    launches: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # (pid, kernel at that time, stack)
    times: set[tuple[int, int]] = field(default_factory=set)  # (delay, duration) in ns
    tids: set[int] = field(default_factory=set)
    peers: set[tuple[int, int]] = field(default_factory=set)  # (who connected, who it said it is)
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # of the kernel at an address now
    errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(self.folder / "gpu.sock"))
        self.socket.listen(64)
        self.open: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        for thread in list(self.threads):
            thread.join(10)
        self.socket.close()
        assert not self.errors

    def accept(self) -> None:
        while True:
            try:
                client = self.socket.accept()[0]
            except OSError:
                return
            self.open.append(client)
            self.threads.append(threading.Thread(target=self.serve, args=[client], daemon=True))
            self.threads[-1].start()

    def serve(self, client: socket.socket) -> None:
        peer = struct.unpack("=III", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        try:
            with client:
                while message := client.recv(1 << 20):
                    self.take(client, peer, message)
        except ConnectionResetError:
            pass
        except (struct.error, ValueError, KeyError, AssertionError) as error:
            self.errors.append(error)

    def take(self, client: socket.socket, peer: int, message: bytes) -> None:
        kind = struct.unpack_from("=I", message)[0]
        if kind == MSG_KERNEL:
            _, pid, address, size, name, count = struct.unpack_from("=IIQQ128sI", message)
            offsets = struct.unpack_from(f"={count}I", message, 156)
            assert len(message) == 156 + 4 * count
            self.names[pid, address] = name.rstrip(b"\0").decode()
            self.kernels.append(Placed(pid, address, size, name.rstrip(b"\0").decode(), offsets))
        elif kind == MSG_LAUNCH:
            _, pid, tid, _, address, delay, duration = struct.unpack_from("=IIIIQQQ", message)
            stack = message[40:]
            assert stack.index(b"\0") == len(stack) - 1
            self.launches[pid, self.names[pid, address], stack[:-1].decode()] += 1
            self.times.add((delay, duration))
            self.tids.add(tid)
            self.peers.add((peer, pid))
        else:
            assert (kind, len(message)) == (MSG_SYNC, 4)
            client.send(message)

    @property
    def stacks(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (_, _, stack), count in self.launches.items():
            counts[stack] += count
        return counts

    @property
    def places(self) -> dict[str, set[str]]:
        """The stacks of each kernel."""
        places: dict[str, set[str]] = {}
        for _, kernel, stack in self.launches:
            places.setdefault(kernel, set()).add(stack)
        return places


@pytest.fixture(scope="session")
def programs() -> Programs:
    return build()


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    return folder


def debug_elfs(device: str) -> list[Path]:
    return [debug_elf(device, "attention"), debug_elf(device, "matmul")]


def workload_command(programs: Programs, elfs: list[Path], **options: str | float) -> list[str]:
    """`one_place=True` is --one-place, `depth=3` is --depth 3."""
    words: list[str | float] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, value]
    return command(elfs, *words, programs=programs)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
    return kept | more


def workload(programs: Programs, elfs: list[Path], folder: Path | None, **options: str | float) -> list[Summary]:
    words = workload_command(programs, elfs, **options)
    more = {} if folder is None else {"STANDIN_DIR": str(folder)}
    done = subprocess.run(words, env=environment(**more), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return read_summaries(done.stdout)


def runtime(programs: Programs, code: str, *args: object, **env: str) -> list[dict[str, Any]]:
    """What the program told; nobody but itself raises a semaphore: recorders know the library by its name."""
    script = RUNTIME + textwrap.dedent(code)
    with tempfile.TemporaryDirectory() as folder:
        library = shutil.copy(programs.library, Path(folder) / "runtime.so")
        words = [sys.executable, "-c", script, str(library), *map(str, args)]
        done = subprocess.run(words, env=environment(**env), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def semaphores(library: Path) -> dict[str, int]:
    return {name: semaphore for name, (_, semaphore, _) in probes(library).items()}


def probes(library: Path) -> dict[str, tuple[int, int, str]]:
    """Location, semaphore and arguments by name."""
    found = {}
    with library.open("rb") as file:
        elf = ELFFile(file)
        for note in elf_sections.section(elf, ".note.stapsdt", NoteSection).iter_notes():
            raw = note["n_desc"] if isinstance(note["n_desc"], bytes) else note["n_desc"].encode("latin-1")
            location, _, semaphore = struct.unpack_from("<QQQ", raw)
            provider, name, arguments = raw[24:].split(b"\0")[:3]
            assert (note["n_name"], provider) == ("stapsdt", b"level_zero")
            assert name.decode() not in found
            found[name.decode()] = (location, semaphore, arguments.decode())
    return found


def symbols(path: Path) -> list[tuple[int, int, str]]:
    """Address, size and demangled name of a program's functions."""
    with path.open("rb") as file:
        return [
            (symbol["st_value"], symbol["st_size"], demangled(symbol.name))
            for symbol in elf_sections.symbols(ELFFile(file), ".symtab").iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_size"]
        ]


def kernels_of(elf: Path) -> dict[str, tuple[int, int, int]]:
    """Address, section's size and symbol's size by name, as pyelftools sees them."""
    with elf.open("rb") as file:
        parsed = ELFFile(file)
        return {
            symbol.name: (
                symbol["st_value"],
                parsed.get_section(symbol["st_shndx"])["sh_size"],
                symbol["st_size"],
            )
            for symbol in elf_sections.symbols(parsed, ".symtab").iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC"
        }


def lines(text: str, delta: int = 0) -> list[tuple[str, int, int]]:
    """File, line and address of each row of `readelf --debug-dump=decodedline`."""
    rows = re.findall(r"^(\S+) +(\d+) +0x([0-9a-f]+)", text, re.MULTILINE)
    return [(file, int(line), int(address, 16) + delta) for file, line, address in rows]


class TestLibrary:
    def test_has_both_probes_with_semaphores(self, programs: Programs) -> None:
        found = probes(programs.library)
        assert {name: len(arguments.split()) for name, (_, _, arguments) in found.items()} == {
            "launch_kernel": 4,
            "compile_kernel": 1,
        }
        with programs.library.open("rb") as file:
            elf = ELFFile(file)
            for location, semaphore, arguments in found.values():
                code = next(s for s in elf.iter_segments("PT_LOAD") if s["p_flags"] & 1)
                assert code["p_vaddr"] <= location < code["p_vaddr"] + code["p_filesz"]
                data = next(s for s in elf.iter_segments("PT_LOAD") if s["p_flags"] & 2)
                assert data["p_vaddr"] <= semaphore < data["p_vaddr"] + data["p_filesz"]
                assert all(argument.startswith("8@") for argument in arguments.split())

    def test_is_called_as_intels_and_exports_nothing_but_its_interface(self, programs: Programs) -> None:
        with programs.library.open("rb") as file:
            elf = ELFFile(file)
            dynamic: Any = elf_sections.section(elf, ".dynamic", DynamicSection)
            names = [tag.soname for tag in dynamic.iter_tags("DT_SONAME")]
            exported = [
                symbol.name for symbol in elf_sections.symbols(elf).iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"
            ]
        assert names == ["libze_intel_gpu.so.1"]
        assert "zeCommandListAppendLaunchKernel" in exported
        assert all(name.startswith(("ze", "zex")) for name in exported)

    @thorough
    def test_is_built_once(self, tmp_path: Path) -> None:
        first = build(tmp_path / "new")
        times = [path.stat().st_mtime_ns for path in (first.library, first.workload)]
        second = build(tmp_path / "new")
        assert [path.stat().st_mtime_ns for path in (second.library, second.workload)] == times

    def test_init_takes_the_time_in_which_a_recorder_attaches(self, programs: Programs) -> None:
        code = """
            start = time.monotonic()
            ze.zeInit(0)
            first = time.monotonic() - start
            seconds = []
            for _ in range(20):
                start = time.monotonic()
                ze.zeInit(0)
                seconds.append(time.monotonic() - start)
            tell(first=first, later=min(seconds))
        """
        (times,) = runtime(programs, code)
        assert times["first"] >= 0.1
        assert times["later"] < 0.05


class TestKernels:
    @pytest.mark.parametrize("device", DEVICES)
    def test_are_announced_with_every_instruction(self, programs: Programs, tmp_path: Path, device: str) -> None:
        elfs = debug_elfs(device)
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, elfs, gpu.folder, launches=1)

        names = set()
        for elf in elfs:
            for name, (address, section_size, code_size) in kernels_of(elf).items():
                names.add(name)
                (placed,) = [kernel for kernel in gpu.kernels if kernel.name == name]
                assert (placed.address, placed.size) == (address, section_size)
                module = elf.name.removesuffix(".debug.elf")
                listing = (ZEBINS / device / f"{module}.{name}.asm").read_text()
                starts = [int(offset, 16) for offset in re.findall(r"^/\* \[([0-9A-F]+)\]", listing, re.MULTILINE)]
                # the listing goes on into the section's padding
                assert placed.offsets == tuple(start for start in starts if start < code_size)
        assert {kernel.name for kernel in gpu.kernels} == names
        assert len(names) == 4

    def test_without_symbols_are_walked_up_to_the_padding(self, programs: Programs, tmp_path: Path) -> None:
        content = bytearray(debug_elfs("bmg")[0].read_bytes())
        header = struct.unpack_from("<Q", content, 40)[0]
        for index in range(struct.unpack_from("<H", content, 60)[0]):
            if struct.unpack_from("<I", content, header + index * 64 + 4)[0] == 2:  # SHT_SYMTAB
                struct.pack_into("<I", content, header + index * 64 + 4, 0x80000000)
        stripped = tmp_path / "stripped.elf"
        stripped.write_bytes(content)
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, [stripped], gpu.folder, launches=1)
            workload(programs, [debug_elfs("bmg")[0]], gpu.folder, launches=1)
        (without, with_symbols) = gpu.kernels
        assert without.offsets == with_symbols.offsets

    def test_two_modules_of_one_file_do_not_overlap(self, programs: Programs, tmp_path: Path) -> None:
        elf = debug_elfs("lnl")[1]
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, [elf, elf, elf], gpu.folder, launches=9)
        assert len({kernel.address for kernel in gpu.kernels}) == 9
        assert len({kernel.address >> 32 for kernel in gpu.kernels}) == 1
        ranges = sorted((kernel.address, kernel.address + kernel.size) for kernel in gpu.kernels)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))

    def test_a_place_that_was_given_back_is_used_again(self, programs: Programs, tmp_path: Path) -> None:
        code = """
            ze.zeInit(0)
            for path in sys.argv[2:]:
                module = load(path)
                kernel = ctypes.c_void_p()
                names = (ctypes.c_char_p * 8)()
                ze.zeModuleGetKernelNames(module, ctypes.byref(ctypes.c_uint32(8)), names)
                desc = KernelDesc(names[0])
                assert ze.zeKernelCreate(module, ctypes.byref(desc), ctypes.byref(kernel)) == 0
                assert ze.zeModuleDestroy(module) & 0xffffffff == 0x78000006  # its kernel lives
                assert ze.zeKernelDestroy(kernel) == 0
                assert ze.zeModuleDestroy(module) == 0
        """
        elf = debug_elfs("pvc")[0]
        with Listener(tmp_path / "gpu") as gpu:
            runtime(programs, code, elf, elf, STANDIN_DIR=str(gpu.folder))
        assert [kernel.address for kernel in gpu.kernels] == [0x8000FFBF2000] * 2

    def test_hostile_files_are_refused(self, programs: Programs) -> None:
        code = """
            import random
            good = Path(sys.argv[2]).read_bytes()
            random.seed(7)
            ze.zeInit(0)
            codes = {hex(create(b"")[0]), hex(create(b"\\x7fELF")[0]), hex(create(good[:200])[0])}
            codes.add(hex(create(good.replace(b"\\xcd\\0", b"\\x3e\\0", 1))[0]))
            codes.update(hex(create(good[:size])[0]) for size in range(0, len(good) - 1, 997))
            tell(refused=sorted(codes))
            for _ in range(3000):
                broken = bytearray(good)
                for _ in range(random.randint(1, 6)):
                    broken[random.randrange(random.choice((0x200, len(good))))] = random.randrange(256)
                for _ in range(random.randint(0, 3)):  # section headers
                    at = int.from_bytes(good[40:48], "little") + random.randrange(19 * 64)
                    broken[at] = random.choice((0, 1, 0x7f, 0x80, 0xff))
                code, module = create(bytes(broken))
                if code == 0:
                    ze.zeModuleDestroy(module)
            tell(survived=True)
        """
        first, second = runtime(programs, code, debug_elfs("bmg")[0], STANDIN_ADDRESS_DELTA="-0x10000")
        assert first["refused"] == ["0x7800000f"]
        assert second["survived"]


class TestAddresses:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("delta", [0, DELTA, 0x3000])
    def test_a_moved_debug_elf_is_right_throughout(
        self, programs: Programs, dumps: Path, device: str, delta: int
    ) -> None:
        code = """
            raise_semaphore(int(sys.argv[2]))
            ze.zeInit(0)
            load(sys.argv[3])
            tell(dumps=dumps())
        """
        for elf in debug_elfs(device):
            shutil.rmtree(dumps)
            dumps.mkdir()
            runtime(programs, code, semaphores(programs.library)["compile_kernel"], elf,
                    STANDIN_DUMP_DIR=str(dumps), STANDIN_ADDRESS_DELTA=hex(delta), STANDIN_KEEP="1")  # fmt: skip
            dump = dumps / "dumped_zebin_module.elf"

            assert dump.stat().st_mode & 0o777 == 0o644
            if delta == 0:
                assert dump.read_bytes() == elf.read_bytes()
            assert kernels_of(dump) == {
                name: (address + delta, size, code_size) for name, (address, size, code_size) in kernels_of(elf).items()
            }
            shown = subprocess.run(["readelf", "-W", "--debug-dump=decodedline", str(dump)],
                                   capture_output=True, text=True, check=True).stdout  # fmt: skip
            told = elf.with_name(elf.name.replace(".debug.elf", ".lines.txt")).read_text()
            assert lines(shown) == lines(told, delta)
            assert len(lines(shown)) > 50
            self.check_program_headers_and_ranges(elf, dump, delta)

    def check_program_headers_and_ranges(self, elf: Path, dump: Path, delta: int) -> None:
        with elf.open("rb") as before, dump.open("rb") as after:
            old, new = ELFFile(before), ELFFile(after)
            for a, b in zip(old.iter_segments(), new.iter_segments(), strict=True):
                assert b["p_vaddr"] == a["p_vaddr"] + delta
            for was, now in zip(old.iter_sections(), new.iter_sections(), strict=True):
                assert now["sh_addr"] == was["sh_addr"] + (delta if was.name.startswith(".text.") else 0)
            pairs = zip(self.dwarf_addresses(old), self.dwarf_addresses(new), strict=True)
            moved = [(a, b) for a, b in pairs if a >> 40]  # high_pc may be a length
            assert moved
            assert all(b == a + delta for a, b in moved)

    @staticmethod
    def dwarf_addresses(elf: ELFFile) -> list[int]:
        dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
        return [
            die.attributes[name].value
            for unit in dwarf.iter_CUs()
            for die in unit.iter_DIEs()
            for name in ("DW_AT_low_pc", "DW_AT_high_pc", "DW_AT_entry_pc")
            if name in die.attributes
        ]

    @pytest.mark.parametrize("delta", ["1", "0x800", "-4095", "some", "0x10000000000000000"])
    def test_a_delta_that_is_none_is_refused(self, programs: Programs, delta: str) -> None:
        (told,) = runtime(programs, "tell(code=ze.zeInit(0) & 0xffffffff)", STANDIN_ADDRESS_DELTA=delta)
        assert told["code"] == 0x78000004

    def test_a_module_never_leaves_its_heap(self, programs: Programs) -> None:
        code = "ze.zeInit(0); tell(code=create(Path(sys.argv[2]).read_bytes())[0])"
        for delta in ("0x1000000", "-0x100000000"):
            (told,) = runtime(programs, code, debug_elfs("bmg")[0], STANDIN_ADDRESS_DELTA=delta)
            assert told["code"] == 0x70000003


class TestDumps:
    def test_no_file_unless_somebody_listens(self, programs: Programs, dumps: Path) -> None:
        # as in the patches, where the debug ELF is made and written within `if (..._ENABLED())`
        code = """
            ze.zeInit(0)
            load(sys.argv[2])
            before = dumps()
            raise_semaphore(int(sys.argv[3]))
            load(sys.argv[2])
            tell(before=before, after=dumps())
        """
        for name, after in (("launch_kernel", []), ("compile_kernel", ["dumped_zebin_module.elf"])):
            (told,) = runtime(programs, code, debug_elfs("bmg")[0], semaphores(programs.library)[name],
                              STANDIN_DUMP_DIR=str(dumps))  # fmt: skip
            assert told == {"before": [], "after": after}

    def test_each_module_gets_a_file_and_what_is_there_stays(self, programs: Programs, dumps: Path) -> None:
        bystander = dumps / "elsewhere"
        (dumps / "dumped_zebin_module_0.elf").symlink_to(bystander)
        code = """
            raise_semaphore(int(sys.argv[2]))
            ze.zeInit(0)
            for path in sys.argv[3:]:
                load(path)
            tell(dumps=dumps())
        """
        one, two = debug_elfs("ptl")
        (told,) = runtime(programs, code, semaphores(programs.library)["compile_kernel"], one, two, one,
                          STANDIN_DUMP_DIR=str(dumps), STANDIN_KEEP="")  # fmt: skip
        expected = ["", "_1", "_2"]
        assert told["dumps"] == sorted([f"dumped_zebin_module{n}.elf" for n in ("_0", *expected)])
        assert not bystander.exists()
        first, second, third = ((dumps / f"dumped_zebin_module{n}.elf").read_bytes() for n in expected)
        assert (first, second) == (one.read_bytes(), two.read_bytes())
        assert third != first  # the place was taken

    def test_are_removed_at_exit_after_a_second_by_who_wrote_them(self, programs: Programs, dumps: Path) -> None:
        code = """
            raise_semaphore(int(sys.argv[2]))
            ze.zeInit(0)
            load(sys.argv[3])
            start = time.time()
            if os.fork() == 0:
                ctypes.CDLL(None).exit(0)  # runs the library's destructor, too
            os.wait()
            tell(start=start, child=time.time() - start, dumps=dumps())
        """
        (told,) = runtime(programs, code, semaphores(programs.library)["compile_kernel"], debug_elfs("bmg")[0],
                          STANDIN_DUMP_DIR=str(dumps))  # fmt: skip
        assert time.time() - float(str(told["start"])) >= 0.95
        assert float(str(told["child"])) < 0.95  # the child has not waited
        assert told["dumps"] == ["dumped_zebin_module.elf"]
        assert list(dumps.iterdir()) == []

    def test_a_folder_that_is_not_there_costs_the_dump_only(self, programs: Programs) -> None:
        code = "raise_semaphore(int(sys.argv[2])); ze.zeInit(0); load(sys.argv[3]); tell(ok=True)"
        (told,) = runtime(programs, code, semaphores(programs.library)["compile_kernel"], debug_elfs("bmg")[0],
                          STANDIN_DUMP_DIR="/nowhere/at/all")  # fmt: skip
        assert told["ok"]


class TestLaunches:
    def test_arrive_exactly(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            (told,) = workload(programs, debug_elfs("bmg"), gpu.folder, launches=1003, rate=0,
                               duration_us=150, delay_us=7)  # fmt: skip
        assert (told.launches, told.gpu, told.modules) == (1003, "done", 2)
        counts: Counter[str] = Counter()
        for (_, kernel, _), count in gpu.launches.items():
            counts[kernel] += count
        assert counts == told.kernels
        assert sum(counts.values()) == 1003
        assert gpu.times == {(7000, 150000)}

    def test_one_kernel_comes_from_one_place_and_others_from_several(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, debug_elfs("bmg"), gpu.folder, launches=400, rate=0, threads=3)
        assert sorted(len(stacks) for stacks in gpu.places.values()) == [1, 8, 8, 8]
        assert len(gpu.tids) == 3

    @pytest.mark.parametrize("threads", [1, 3, 7])
    def test_each_from_one_place_on_demand(self, programs: Programs, tmp_path: Path, threads: int) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            (told,) = workload(programs, debug_elfs("bmg"), gpu.folder, launches=401, rate=0, threads=threads,
                               one_place=True, churn_ms=1)  # fmt: skip
        assert [len(stacks) for stacks in gpu.places.values()] == [1] * 4
        assert told.launches == sum(gpu.launches.values()) == 401 * min(threads, 4)

    def test_of_processes_at_addresses_of_their_own(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            told = workload(programs, debug_elfs("ptl"), gpu.folder, launches=100, rate=0, processes=3, threads=2)
        assert len({summary.pid for summary in told}) == 3
        by_pid: Counter[int] = Counter()
        for (pid, _, _), count in gpu.launches.items():
            by_pid[pid] += count
        assert by_pid == {summary.pid: 200 for summary in told}
        assert len({kernel.address for kernel in gpu.kernels}) == 12
        assert gpu.peers == {(pid, pid) for pid in by_pid}

    def test_of_processes_at_the_same_addresses_on_demand(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, debug_elfs("ptl"), gpu.folder, launches=10, processes=2, same_addresses=True)
        assert len(gpu.kernels) == 8
        assert len({kernel.address for kernel in gpu.kernels}) == 4

    def test_of_a_forked_child_come_over_its_own_connection(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            told = workload(programs, debug_elfs("bmg"), gpu.folder, launches=50, fork=True)
        pids = {summary.pid for summary in told}
        assert len(pids) == 2
        assert gpu.peers == {(pid, pid) for pid in pids}
        assert {kernel.pid for kernel in gpu.kernels} == pids
        assert sum(gpu.launches.values()) == 100

    def test_of_kernels_compiled_again_where_they_were(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            (told,) = workload(programs, debug_elfs("bmg"), gpu.folder, launches=300, rate=2000, threads=4,
                               recompile_ms=40)  # fmt: skip
        assert told.modules >= 6
        assert len(gpu.kernels) == 2 * told.modules  # one has one kernel, one has three
        assert {(kernel.name, kernel.address) for kernel in gpu.kernels} == {
            (name, address) for elf in debug_elfs("bmg") for name, (address, _, _) in kernels_of(elf).items()
        }
        assert sum(gpu.launches.values()) == 4 * 300

    def test_of_modules_that_come_and_go(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            (told,) = workload(programs, debug_elfs("bmg"), gpu.folder, launches=300, rate=2000, threads=2,
                               churn_ms=40)  # fmt: skip
        assert told.modules >= 5
        names_at: dict[int, set[str]] = {}
        for kernel in gpu.kernels:
            names_at.setdefault(kernel.address, set()).add(kernel.name)
        assert any(len(names) > 1 for names in names_at.values())  # one address, different kernels
        assert len({kernel.address for kernel in gpu.kernels if kernel.name == "attention_scores"}) > 1
        assert sum(gpu.launches.values()) == 2 * 300

    def test_keep_their_rate_and_their_time(self, programs: Programs, within: Within) -> None:
        (told,) = workload(programs, debug_elfs("bmg"), None, seconds=0.6, rate=5000, threads=2)
        assert told.seconds > 0.55
        within.took(told.seconds, 1.5)
        # (who is late launches what is due, but nothing after the end)
        assert 0.5 * 3000 < told.launches < 5000 * told.seconds + 100
        assert told.gpu == "none"

    def test_go_on_when_the_gpu_is_gone(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            words = workload_command(programs, debug_elfs("bmg"), seconds=1, rate=1000, threads=2)
            process = subprocess.Popen(words, env=environment(STANDIN_DIR=str(gpu.folder)),
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
            until(lambda: gpu.launches)
            for client in list(gpu.open):
                client.shutdown(socket.SHUT_RDWR)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        (told,) = read_summaries(out)
        assert told.gpu == "lost"
        assert told.launches > sum(gpu.launches.values())

    def test_cannot_start_where_no_gpu_answers(self, programs: Programs, tmp_path: Path) -> None:
        words = workload_command(programs, debug_elfs("bmg"), launches=1)
        done = subprocess.run(words, env=environment(STANDIN_DIR=str(tmp_path)), capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "workload: zeInit: 0x78000001\n")

    @pytest.mark.parametrize("signals", [signal.SIGINT, signal.SIGTERM])
    def test_end_early_but_cleanly(self, programs: Programs, tmp_path: Path, signals: signal.Signals) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            words = workload_command(programs, debug_elfs("bmg"), seconds=60, threads=2)
            process = subprocess.Popen(words, env=environment(STANDIN_DIR=str(gpu.folder)), stdout=subprocess.PIPE,
                                       text=True)  # fmt: skip
            until(lambda: gpu.launches)
            process.send_signal(signals)
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert read_summaries(out)[0].launches == sum(gpu.launches.values())

    def test_are_what_the_gpu_writes_into_its_ledger(self, programs: Programs, tmp_path: Path) -> None:
        with Hardware(tmp_path / "gpu") as hardware:
            told = workload(programs, debug_elfs("bmg"), hardware.folder, launches=500, rate=0, threads=4,
                            processes=2, recompile_ms=7, churn_ms=5, duration_us=20, depth=60)  # fmt: skip
        counts: Counter[tuple[int, str]] = Counter()
        for row in hardware.ledger().launches:
            counts[row.pid, row.kernel] += row.count
        assert counts == {(s.pid, name): count for s in told for name, count in s.kernels.items()}
        assert sum(counts.values()) == 2 * 4 * 500

    def test_cost_little(
        self, programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str], within: Within
    ) -> None:
        cost = {}
        for name, only, depth in (("shallow", "warm_up", 0), ("60 deep", "deep", 60)):
            (told,) = workload(programs, debug_elfs("bmg"), None, seconds=0.3, rate=0, depth=depth, only=only)
            cost[name] = told.ns_per_launch
        with Hardware(tmp_path / "gpu") as hardware:
            (told,) = workload(programs, debug_elfs("bmg"), hardware.folder, seconds=0.3, rate=0, duration_us=1,
                               only="warm_up")  # fmt: skip
            cost["with a GPU"] = told.ns_per_launch
        with capsys.disabled():  # without a recorder; what one adds is tests/bench's to say
            print(f"\n  ns per launch: {cost}")
        assert cost["shallow"] is not None
        within.took(cost["shallow"] / 1e9, 5e-6)


class TestStacks:
    def test_are_what_frame_pointers_lead_to(self, programs: Programs, tmp_path: Path) -> None:
        walker, walked = tmp_path / "walker.so", tmp_path / "walked"
        (tmp_path / "walker.c").write_text(WALKER)
        words = ["cc", "-O1", "-fno-omit-frame-pointer", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror",
                   f"-I{SOURCES}", "-o", str(walker), str(tmp_path / "walker.c")]  # fmt: skip
        subprocess.run(words, check=True)
        words = workload_command(programs, debug_elfs("bmg"), launches=64, rate=0, threads=2, depth=60)
        subprocess.run(words, env=environment(LD_PRELOAD=str(walker), WALKED=str(walked)), check=True,
                       stdout=subprocess.PIPE)  # fmt: skip

        functions = symbols(programs.workload)
        stacks = set()
        for line in walked.read_text().splitlines():
            told, *addresses = line.split("\t")
            names = [
                next((name for start, size, name in functions if start <= address < start + size), hex(address))
                for address in (int(text, 16) for text in addresses)
            ]
            assert ";".join(reversed(names)) == told
            stacks.add(told)
        assert len(stacks) == 10  # five paths of the main thread, five of the other
        assert max(stack.count("dig") for stack in stacks) == 60

    def test_have_names_as_both_demanglers_print_them(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, debug_elfs("bmg"), gpu.folder, launches=200, rate=0, threads=2, depth=80)
        shown = subprocess.run(["nm", "-C", str(programs.workload)], capture_output=True, text=True, check=True).stdout
        binutils = {line.split(" ", 2)[2] for line in shown.splitlines() if not line.startswith(" ")}
        ours = {name for _, _, name in symbols(programs.workload)}
        names = {name for stack in gpu.stacks for name in stack.split(";")}
        assert len(names) > 12
        assert names <= ours
        assert names <= binutils
        assert any("<" in name for name in names)
        assert any("(anonymous namespace)" in name for name in names)
        assert any("lambda" in name for name in names)

    def test_that_are_deeper_than_the_ledger_holds_are_cut(self, programs: Programs, tmp_path: Path) -> None:
        with Listener(tmp_path / "gpu") as gpu:
            workload(programs, debug_elfs("bmg"), gpu.folder, launches=20, depth=500, only="deep")
        (stack,) = gpu.stacks
        assert len(stack) == 511
        assert stack.startswith("main;app::work(app::Worker&);")

    def test_that_do_not_fit_are_cut(self, programs: Programs, tmp_path: Path) -> None:
        code = """
            ze.zeInit(0)
            module, kernel, desc = load(sys.argv[2]), ctypes.c_void_p(), KernelDesc(b"attention_scores")
            ze.zeKernelCreate(module, ctypes.byref(desc), ctypes.byref(kernel))
            for stack in (b"", b"a" * 511, b"b" * 5000):
                ze.zexStandinSetLaunch(stack, ctypes.c_uint64(0), ctypes.c_uint64(0))
                ze.zeCommandListAppendLaunchKernel(None, kernel, None, None, 0, None)
            ze.zeCommandQueueSynchronize(None, ctypes.c_uint64(10**9))
        """
        with Listener(tmp_path / "gpu") as gpu:
            runtime(programs, code, debug_elfs("bmg")[0], STANDIN_DIR=str(gpu.folder))
        assert set(gpu.stacks) == {"", "a" * 511, "b" * 511}


class TestOptions:
    @pytest.mark.parametrize(
        "arguments",
        [[], ["--elf"], ["--nonsense", "1"], ["--elf", "x", "--threads", "0"], ["--elf", "x", "--depth", "10001"],
         ["--elf", "x", "--seconds", "soon"], ["--elf", "x", "--only", "deep"], ["--elf", "x", "--launches", "-1"]],
    )  # fmt: skip
    def test_that_make_no_sense_are_refused(self, programs: Programs, arguments: list[str]) -> None:
        done = subprocess.run([str(programs.workload), *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("workload: ")

    def test_a_file_that_is_not_there_or_no_module(self, programs: Programs) -> None:
        for path, reason in (("/nowhere", "No such file"), ("/etc/passwd", "0x7800000f")):
            done = subprocess.run([str(programs.workload), "--elf", path], capture_output=True, text=True,
                                  env=environment())  # fmt: skip
            assert done.returncode == 1
            assert path in done.stderr
            assert reason in done.stderr
