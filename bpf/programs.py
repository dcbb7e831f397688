"""The BPF programs of this version: their C files, their parameters, and the compiled programs that ship.

Parameters in _DEFINES are fixed when the programs are compiled, because the layout of records or the size of BPF's
stack depends on them. Parameters in _CONSTANTS are filled in when the programs are loaded.
"""

from __future__ import annotations

from pathlib import Path

from iaprof.bpf.bytecode import Bytecode, BytecodeError, from_text
from iaprof.bpf.compile.compiler import Source
from iaprof.bpf.declarations import declarations
from iaprof.bpf.driver_layout import MAX_CLASSES
from iaprof.bpf.structs import MAX_STEPS, Phase
from iaprof.formats.wire.launches import CHUNK_BYTES, MAX_DEPTH

MOST_CODE_CHUNKS = 192  # of a kernel's code, sent at one launch: 3 MiB
MOST_MODULE_CHUNKS = 256  # of a kernel's module, sent at one launch: 4 MiB
SHIPPED = Path(__file__).parent / "programs.json"
_FILES = (
    *("bounds.c", "unwind.c", "misses.c", "counters.c", "python.c", "launches.c", "waits.c", "samples.c", "handles.c"),
    *("lists.c", "copies.c"),
)
_FUNCTIONS = (
    "on_launch",
    "on_launched",
    "on_handle_launch",
    "on_handle_launched",
    "on_describe",
    "on_walk",
    "on_miss",
    "on_copy",
    "on_state",
    "on_python",
    "on_codes",
    "on_compile",
    "on_kernel_gone",
    "on_module_gone",
    "on_execute",
    "on_executed",
    "on_list_event",
    "on_probed_execute",
    "on_probed_executed",
    "on_probed_list_event",
    "on_transfer",
    "on_transferred",
    "on_may_copy",
    "on_own_launch",
    "on_own_launches",
    "on_dispatched",
    "on_link_map_change",
    "on_wait",
    "on_wait_begun",
    "on_waited",
    "on_sample",
    "on_sample_walk",
    "on_sample_miss",
    "on_sample_copy",
    "on_sample_state",
    "on_sample_python",
    "on_sample_codes",
    "on_sampled",
)
SESSION_PROGRAMS = ("on_wait", "on_wait_begun", "on_waited")
"""Programs for uprobe sessions (Linux 6.13)."""
SESSION_COPIES = {f"on_wait_{name}": f"on_{name}" for name in ("walk", "miss", "copy", "state", "python", "codes")}
"""Programs that are loaded a second time for uprobe sessions, with `wait_phases` in place of `phases`: the new name,
and the name of the original. A program can tail-call only programs for the same type of attachment."""
WAIT_PROGRAMS = (*SESSION_PROGRAMS, *SESSION_COPIES)
"""Programs that only recording of waits needs."""
SAMPLE_PROGRAMS = tuple(name for name in _FUNCTIONS if name.startswith("on_sample"))
"""Programs for perf events; all others are for uprobes."""
_WALKING = (Phase.WALK, Phase.MISS, Phase.COPY, Phase.STATE, Phase.PYTHON, Phase.CODES)
PHASES = {
    "phases": {
        **{phase: f"on_{phase.name.lower()}" for phase in _WALKING},
        Phase.LAUNCHED: "on_launched",
        Phase.HANDLE_LAUNCHED: "on_handle_launched",
        Phase.DESCRIBE: "on_describe",
        Phase.EXECUTED: "on_executed",
        Phase.PROBED_EXECUTED: "on_probed_executed",
        Phase.TRANSFERRED: "on_transferred",
        Phase.DISPATCHED: "on_dispatched",
    },
    "sample_phases": {
        **{phase: f"on_sample_{phase.name.lower()}" for phase in _WALKING},
        Phase.SAMPLED: "on_sampled",
    },
    "wait_phases": {
        **dict(zip(_WALKING, SESSION_COPIES, strict=True)),
        Phase.WAIT_BEGUN: "on_wait_begun",
        Phase.WAITED: "on_waited",
    },
}
"""The program-array maps for tail calls: the program at each phase's index."""
_DEFINES = {
    "MAX_DEPTH": MAX_DEPTH,
    "MAX_STEPS": MAX_STEPS,
    "CLASSES": MAX_CLASSES,
    "CHUNK_BYTES": CHUNK_BYTES,
    "MOST_CODE_CHUNKS": MOST_CODE_CHUNKS,
    "MOST_MODULE_CHUNKS": MOST_MODULE_CHUNKS,
}
_CONSTANTS = (
    "FRAME_POINTERS_ONLY",
    "TASK_GROUP_LEADER",
    "TASK_START_BOOTTIME",
    "TASK_MM",
    "TASK_SAS_SS_SP",
    "TASK_SAS_SS_SIZE",
    "TASK_FSBASE",
    "MM_EXEC_VM",
    "TASK_UTASK",
    "UTASK_VADDR",
    "UTASK_XOL_VADDR",
    "ASM_EXC_INT3",
    "ASM_EXC_INT3_BYTES",
    "UPROBE_EMULATION",
    "UPROBE_EMULATION_BYTES",
    "COPY_PAGES",
    "SAMPLE_COPY_PAGES",
    "STACK_DEPTH",
    "STACK_ID_BITS",
    "LAUNCH_WAKE_EVERY",
    "WAIT_SHORT_NS",
    "WAIT_WAKE_EVERY",
    "SAMPLE_WAKE_EVERY",
    "STACK_WAKE_EVERY",
    "CODE_WAKE_EVERY",
    "CHUNK_WAKE_EVERY",
    "MODULE_WAKE_EVERY",
    "LIST_WAKE_EVERY",
    "ITERATES",
)
_CALLS = ("ITERATOR_NEW", "ITERATOR_NEXT", "ITERATOR_DESTROY")
WITHOUT_ITERATORS = dict.fromkeys(("ITERATES", *_CALLS), 0)
"""Constants for kernels without the iterator of numbers, or without BPF's JIT, which its functions need."""


def source() -> Source:
    """Returns the source of the programs, as it is compiled."""
    # One text, because bcc does not rewrite included files.
    first, *others = ((Path(__file__).parent / "c" / name).read_text() for name in _FILES)
    return Source("\n".join([first, declarations(), *others]), _DEFINES, _CONSTANTS, _FUNCTIONS, _CALLS)


def shipped() -> Bytecode:
    """Reads the programs that ship, compiled with Debian 12's bcc.

    Raises:
        BytecodeError: the installation is damaged.
    """
    try:
        return from_text(SHIPPED.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BytecodeError(f"the compiled BPF programs cannot be read ({error}): install iaprof again") from error
