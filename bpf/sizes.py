"""The sizes of maps and ring buffers, and the constants with which the programs are loaded."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from iaprof.bpf import cache
from iaprof.bpf.btf import VMLINUX, Btf, BtfError
from iaprof.formats.header.waits import SHORT_NS
from iaprof.formats.wire.launches import COPY_PAGES, SAMPLE_COPY_PAGES

MAX_PROBES = 4096  # probe locations in all libraries together
MAX_LAYOUTS = 256  # drivers without probes
MAX_ENTRIES = 4096  # probed functions of all drivers without probes
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Sizes:
    """Sizes of maps; numbers of pages are powers of two."""

    launch_pages: int = 1024  # 4 MiB: 27,000 launches
    stack_pages: int = 1024  # 4 MiB: 1,900 distinct stacks of 256 frames
    python_pages: int = 2048  # 8 MiB: 1,350 distinct stacks with frames of Python
    code_pages: int = 2048  # 8 MiB: 2,200 code objects
    pythons_remembered: int = 1 << 12
    copied_pages: int = 8192  # 32 MiB: 480 copies of stacks, or 240 of CPU samples'
    rule_bits: int = 16  # 4 MiB: 131,072 rules in the largest table; few of these pages are used at first
    processes_remembered: int = 1 << 14
    missed_paths_remembered: int = 1 << 14
    compiled_pages: int = 128
    sample_pages: int = 256  # 1 MiB: 20,000 CPU samples
    wait_pages: int = 256  # 1 MiB: 10,000 waits
    waiting_threads: int = 1 << 14
    wait_sites: int = 1 << 14
    chunk_pages: int = 1024  # 4 MiB: more than a kernel's name and the code that one launch can send
    module_pages: int = 2048  # 8 MiB: twice as much of a module as one launch can send
    message_pages: int = 1  # of our library in programs of NVIDIA's GPUs; MESSAGE_PAGES where there are any
    piece_pages: int = 1  # of cubins; PIECE_PAGES where there are any messages
    path_pages: int = 4  # of launches' paths; PATH_PAGES where there are any messages
    senders_remembered: int = 1 << 12  # of cubins
    list_pages: int = 512  # 2 MiB: 15,000 calls that execute, close, reset or destroy command lists
    stacks_remembered: int = 1 << 16
    stack_id_bits: int = 62
    others_remembered: int = 1 << 16
    kernels_remembered: int = 1 << 14
    calls_remembered: int = 1 << 14  # one per thread


DEFAULT_SIZES = Sizes()
MESSAGE_PAGES = 4096
"""16 MiB: 1,000 messages, some 190,000 rows of samples."""
PIECE_PAGES = 2048
"""8 MiB: four times as much as a process sends at once. What finds no room is sent again."""
PATH_PAGES = 512
"""2 MiB: 140 paths of launches."""


def program_constants(depth: int, sizes: Sizes = DEFAULT_SIZES, offsets: KernelOffsets | None = None) -> dict[str, int]:
    """Returns the values of the programs' constants by name, for stacks of at most `depth` frames.

    Without `offsets`, walks follow frame pointers.
    """
    return {
        "STACK_DEPTH": depth,
        "STACK_ID_BITS": sizes.stack_id_bits,
        "FRAME_POINTERS_ONLY": int(offsets is None),
        **(offsets or KernelOffsets()).constants(),
        **_kernel_code(),
        "COPY_PAGES": COPY_PAGES,
        "SAMPLE_COPY_PAGES": SAMPLE_COPY_PAGES,
        "SAMPLE_WAKE_BYTES": _wake_bytes(sizes.sample_pages),
        "WAIT_SHORT_NS": SHORT_NS,
        "WAIT_WAKE_BYTES": _wake_bytes(sizes.wait_pages),
        "LAUNCH_WAKE_BYTES": _wake_bytes(sizes.launch_pages),
        "STACK_WAKE_BYTES": _wake_bytes(sizes.stack_pages),
        "PYTHON_WAKE_BYTES": _wake_bytes(sizes.python_pages),
        "CODE_WAKE_BYTES": _wake_bytes(sizes.code_pages),
        "CHUNK_WAKE_BYTES": _wake_bytes(sizes.chunk_pages),
        "MODULE_WAKE_BYTES": _wake_bytes(sizes.module_pages),
        "MESSAGE_WAKE_BYTES": _wake_bytes(sizes.message_pages),
        "PIECE_WAKE_BYTES": _wake_bytes(sizes.piece_pages),
        "LIST_WAKE_BYTES": _wake_bytes(sizes.list_pages),
    }


@dataclass(frozen=True)
class KernelOffsets:
    """What the programs need to know of the kernel's BTF.

    These are offsets in bytes of the members of structures that walks of user stacks read. Those of copies of probed
    instructions, type numbers of the functions that iterate over numbers, and the offset in bits of the bit-field that
    says that a thread executes another program are 0 in a kernel that lacks one of them.
    """

    task_group_leader: int = 0
    task_start_boottime: int = 0
    task_mm: int = 0
    task_sas_ss_sp: int = 0
    task_sas_ss_size: int = 0
    task_fsbase: int = 0
    task_self_exec_id: int = 0
    mm_exec_vm: int = 0
    mm_start_stack: int = 0
    task_utask: int = 0
    utask_vaddr: int = 0
    utask_xol_vaddr: int = 0
    iterator_new: int = 0
    iterator_next: int = 0
    iterator_destroy: int = 0
    task_in_execve: int = 0

    def constants(self) -> dict[str, int]:
        """Returns them by the names of the programs' constants; ITERATES is a mask."""
        found = {name.upper(): value for name, value in asdict(self).items()}
        return found | {"ITERATES": (1 << 64) - 1 if self.iterator_next else 0}


_UTASK = ("vaddr", "xol_vaddr")
_ITERATOR = ("bpf_iter_num_new", "bpf_iter_num_next", "bpf_iter_num_destroy")
_MM = ("exec_vm", "start_stack")
_TASK = (
    *(("group_leader",), ("start_boottime",), ("mm",), ("sas_ss_sp",), ("sas_ss_size",), ("thread", "fsbase")),
    ("self_exec_id",),
)
_IN_EXECVE = "in_execve"
_NOTES = Path("/sys/kernel/notes")  # the kernel's ELF notes, of which one has its build-id


def kernel_offsets() -> KernelOffsets | None:
    """Returns the offsets in the running kernel; None if its BTF lacks some.

    As it takes 30 ms to find them, they are kept for root.
    """
    try:
        names = (_TASK, _MM, _UTASK, _ITERATOR, _IN_EXECVE, *KernelOffsets.__dataclass_fields__)
        name = cache.name_of("offsets", repr(names), _NOTES.read_bytes().hex(), str(VMLINUX.stat().st_size))
    except OSError:
        return _found_offsets()
    with contextlib.suppress(ValueError, TypeError):
        if kept := cache.read(name):
            return KernelOffsets(**json.loads(kept))
    if found := _found_offsets():
        cache.write(name, json.dumps(asdict(found)))
    return found


def _found_offsets() -> KernelOffsets | None:
    try:
        btf = Btf(VMLINUX)
        found = [btf.offset("task_struct", *names) for names in _TASK]
        found += [btf.offset("mm_struct", name) for name in _MM]
        probed = [btf.offset("task_struct", "utask"), *(btf.offset("uprobe_task", name) for name in _UTASK)]
        functions = [btf.function(name) or 0 for name in _ITERATOR]
        in_execve = btf.bit("task_struct", _IN_EXECVE) or 0
    except BtfError:
        return None
    offsets = [offset for offset in found if offset is not None]
    if len(offsets) < len(found):
        return None
    zeros = [0] * len(probed)
    known = KernelOffsets(*offsets, *(probed if None not in probed else zeros), *(functions if all(functions) else ()))
    return replace(known, task_in_execve=in_execve)


def map_entries(sizes: Sizes = DEFAULT_SIZES) -> dict[str, int]:
    """Returns the sizes of maps in elements (ring buffers: bytes), by name; other maps have a fixed size."""
    return {
        "probes": MAX_PROBES,
        "layouts": MAX_LAYOUTS,
        "entries": MAX_ENTRIES,
        "others": sizes.others_remembered,
        "stacks_sent": sizes.stacks_remembered,
        "kernels_seen": sizes.kernels_remembered,
        "shader_names": sizes.kernels_remembered,
        "draws": sizes.kernels_remembered >> 2,
        "makings": sizes.waiting_threads,
        "occupants": sizes.kernels_remembered,
        "modules_seen": sizes.kernels_remembered,
        "calls": sizes.calls_remembered,
        "launches": sizes.launch_pages * PAGE_BYTES,
        "stacks": sizes.stack_pages * PAGE_BYTES,
        "python_stacks": sizes.python_pages * PAGE_BYTES,
        "codes": sizes.code_pages * PAGE_BYTES,
        "pythons": sizes.pythons_remembered,
        "python_threads": sizes.processes_remembered,
        "codes_checked": sizes.stacks_remembered,
        "senders": sizes.senders_remembered,
        "codes_sent": sizes.stacks_remembered,
        "compilations": sizes.compiled_pages * PAGE_BYTES,
        "samples": sizes.sample_pages * PAGE_BYTES,
        "wait_entries": MAX_ENTRIES,
        "waits": sizes.waiting_threads,
        "wait_sites": sizes.wait_sites,
        "waited": sizes.wait_pages * PAGE_BYTES,
        "copies": sizes.copied_pages * PAGE_BYTES,
        "rules": 1 << sizes.rule_bits,
        "spaces": sizes.processes_remembered,
        "process_unloads": sizes.processes_remembered,
        "copying": sizes.processes_remembered,
        "copies_done": sizes.processes_remembered,
        "missed_paths": sizes.missed_paths_remembered,
        "chunks": sizes.chunk_pages * PAGE_BYTES,
        "modules": sizes.module_pages * PAGE_BYTES,
        "list_events": sizes.list_pages * PAGE_BYTES,
        "messages": sizes.message_pages * PAGE_BYTES,
        "pieces": sizes.piece_pages * PAGE_BYTES,
        "paths": sizes.path_pages * PAGE_BYTES,
    }


_KERNEL_CODE = {
    "ASM_EXC_INT3": (b"asm_exc_int3",),
    # arch/x86/kernel/uprobes.c; the compiler may have put one into another
    "UPROBE_EMULATION": (b"emulate_push_stack", b"push_emulate_op", b"branch_emulate_op"),
}
_MOST_KERNEL_CODE = 1 << 14  # bytes of one of these; functions in more are not together


def _kernel_code() -> dict[str, int]:
    """Returns where functions of the kernel are, and `_BYTES`, by constants; 0 if /proc/kallsyms does not tell."""
    missing = {function for functions in _KERNEL_CODE.values() for function in functions}
    found: dict[bytes, tuple[int, int]] = {}  # start and end
    last = b""
    with contextlib.suppress(OSError), open("/proc/kallsyms", "rb") as symbols:  # in the order of addresses
        for line in symbols:
            name = line.split(maxsplit=3)[2]
            if not last and name not in missing:
                continue
            address = int(line.split(maxsplit=1)[0], 16)
            if last and address > found[last][0]:
                found[last], last = (found[last][0], address), b""
            if name in missing:
                missing.remove(name)
                found[name], last = (address, address), name
            if not missing and not last:
                break
    code: dict[str, int] = {}
    for constant, functions in _KERNEL_CODE.items():
        ranges = [found[function] for function in functions if function in found]
        start, end = min((each[0] for each in ranges), default=0), max((each[1] for each in ranges), default=0)
        is_known = start and end - start <= _MOST_KERNEL_CODE
        code |= {constant: start if is_known else 0, f"{constant}_BYTES": end - start if is_known else 0}
    return code


def _wake_bytes(pages: int) -> int:
    """Returns after how many unread bytes the programs wake the reader: a quarter of the buffer."""
    return pages * PAGE_BYTES // 4
