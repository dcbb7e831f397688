"""How much room maps and ring buffers have, and the numbers with which the programs are loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from iaprof.bpf.btf import Btf, BtfError
from iaprof.bpf.perf_event import online_cpus
from iaprof.formats.header.waits import SHORT_NS, WAIT
from iaprof.formats.wire.launches import (
    CHUNK,
    CODE,
    CPU_SAMPLE,
    LAUNCH as LAUNCH_RECORD,
    LIST_EVENT as LIST_RECORD,
    stack_dtype,
)

MAX_PROBES = 4096  # locations in all libraries together
MAX_LAYOUTS = 256  # drivers without probes
MAX_ENTRIES = 4096  # of all of them
COPY_PAGES = 16  # of a stack, that are copied at most
_PAGE = 4096


@dataclass(frozen=True)
class Sizes:
    """How much room the programs have; powers of two where pages are meant."""

    launch_pages: int = 1024  # 4 MiB: 27,000 launches
    stack_pages: int = 1024  # 4 MiB: 1,900 distinct stacks of 256 frames
    python_pages: int = 2048  # 8 MiB: 1,350 distinct stacks with frames of Python
    code_pages: int = 2048  # 8 MiB: 2,200 code objects
    pythons_remembered: int = 1 << 12
    copied_pages: int = 4096  # 16 MiB: 240 copies of stacks
    rule_bits: int = 15  # 2 MiB: 131,072 rules, once that many are known
    processes_remembered: int = 1 << 14
    ways_remembered: int = 1 << 14
    compiled_pages: int = 128
    sample_pages: int = 256  # 1 MiB: 20,000 CPU samples
    wait_pages: int = 256  # 1 MiB: 10,000 waits
    waiting_threads: int = 1 << 14
    wait_sites: int = 1 << 14
    piece_pages: int = 1024  # 4 MiB: more than one launch can send of name and code
    module_pages: int = 2048  # 8 MiB: twice what one launch can send of a module
    list_pages: int = 512  # 2 MiB: 15,000 calls that execute, close, reset or destroy command lists
    stacks_remembered: int = 1 << 16
    stack_id_bits: int = 62
    others_remembered: int = 1 << 16
    kernels_remembered: int = 1 << 14
    calls_remembered: int = 1 << 14  # of threads


DEFAULT_SIZES = Sizes()


def named_constants(depth: int, sizes: Sizes = DEFAULT_SIZES, offsets: KernelOffsets | None = None) -> dict[str, int]:
    """What the programs are loaded with, for stacks of at most `depth` frames, by name.

    Without `offsets` walks follow frame pointers.
    """
    cpus = len(online_cpus())
    return {
        "STACK_DEPTH": depth,
        "STACK_ID_BITS": sizes.stack_id_bits,
        "FRAME_POINTERS_ONLY": int(offsets is None),
        **(offsets or KernelOffsets(0, 0, 0, 0, 0, 0, 0)).named(),
        "COPY_PAGES": COPY_PAGES,
        "SAMPLE_WAKE_EVERY": _wake_every(sizes.sample_pages, CPU_SAMPLE.itemsize, cpus),
        "WAIT_SHORT_NS": SHORT_NS,
        "WAIT_WAKE_EVERY": _wake_every(sizes.wait_pages, WAIT.itemsize, cpus),
        "LAUNCH_WAKE_EVERY": _wake_every(sizes.launch_pages, LAUNCH_RECORD.itemsize, cpus),
        "STACK_WAKE_EVERY": _wake_every(sizes.stack_pages, stack_dtype(depth).itemsize, cpus),
        "CODE_WAKE_EVERY": _wake_every(sizes.code_pages, CODE.itemsize, cpus),
        "PIECE_WAKE_EVERY": _wake_every(sizes.piece_pages, CHUNK.itemsize, cpus),
        "MODULE_WAKE_EVERY": _wake_every(sizes.module_pages, CHUNK.itemsize, cpus),
        "LIST_WAKE_EVERY": _wake_every(sizes.list_pages, LIST_RECORD.itemsize, cpus),
    }


@dataclass(frozen=True)
class KernelOffsets:
    """Where the kernel has what tells the states of a process's mappings apart, in bytes."""

    task_group_leader: int
    task_start_boottime: int
    task_mm: int
    task_sas_ss_sp: int
    task_sas_ss_size: int
    task_fsbase: int
    mm_exec_vm: int

    def named(self) -> dict[str, int]:
        """As the programs are loaded with them, by name."""
        return {name.upper(): offset for name, offset in asdict(self).items()}


_TASK = (("group_leader",), ("start_boottime",), ("mm",), ("sas_ss_sp",), ("sas_ss_size",), ("thread", "fsbase"))


def kernel_offsets() -> KernelOffsets | None:
    """Those of the running kernel; None if its BTF does not tell."""
    try:
        btf = Btf()
        found = [btf.offset("task_struct", *names) for names in _TASK]
        found.append(btf.offset("mm_struct", "exec_vm"))
    except BtfError:
        return None
    offsets = [offset for offset in found if offset is not None]
    return KernelOffsets(*offsets) if len(offsets) == len(found) else None


def map_entries(sizes: Sizes = DEFAULT_SIZES) -> dict[str, int]:
    """For how many elements maps have room (ring buffers: bytes), by name; other maps have one element."""
    return {
        "probes": MAX_PROBES,
        "layouts": MAX_LAYOUTS,
        "entries": MAX_ENTRIES,
        "others": sizes.others_remembered,
        "stacks_sent": sizes.stacks_remembered,
        "kernels_seen": sizes.kernels_remembered,
        "occupants": sizes.kernels_remembered,
        "modules_seen": sizes.kernels_remembered,
        "calls": sizes.calls_remembered,
        "launches": sizes.launch_pages * _PAGE,
        "stacks": sizes.stack_pages * _PAGE,
        "python_stacks": sizes.python_pages * _PAGE,
        "codes": sizes.code_pages * _PAGE,
        "pythons": sizes.pythons_remembered,
        "python_threads": sizes.processes_remembered,
        "codes_checked": sizes.stacks_remembered,
        "codes_sent": sizes.stacks_remembered,
        "compilations": sizes.compiled_pages * _PAGE,
        "samples": sizes.sample_pages * _PAGE,
        "wait_entries": MAX_ENTRIES,
        "waits": sizes.waiting_threads,
        "wait_sites": sizes.wait_sites,
        "waited": sizes.wait_pages * _PAGE,
        "copies": sizes.copied_pages * _PAGE,
        "rules": 1 << sizes.rule_bits,
        "spaces": sizes.processes_remembered,
        "loads": sizes.processes_remembered,
        "ways": sizes.ways_remembered,
        "pieces": sizes.piece_pages * _PAGE,
        "modules": sizes.module_pages * _PAGE,
        "list_events": sizes.list_pages * _PAGE,
    }


def _wake_every(pages: int, record: int, cpus: int) -> int:
    """Wakes the reader when a quarter of the buffer may be full, should all CPUs write alike."""
    return max(1, pages * _PAGE // (record + 8) // (4 * cpus))
