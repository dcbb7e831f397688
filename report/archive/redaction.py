"""Removes what identifies people, machines and programs from a capture: names become short hashes.

GPUs, durations, counts, addresses in processes, and names of the Linux kernel and of common libraries (C library,
Python, Level Zero) stay. Hashes need a key (`report/archive/pseudonyms.py`), so that nobody can verify a guess. In the
header, what formats/header/members.py describes stays or is replaced as it says there.

A name of time lines is cut at the words and numbers that runtimes write, for which the stages look. What is between
these is the user's, and becomes a hash of letters: the stages take digits out of names. So `conv_12 Cmpt Exec` and
`conv_3 Cmpt Exec` keep what they share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import combined, map_texts
from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.schema import DROPPED, ROW_KINDS, TIME
from iaprof.formats.guesses import SUFFIX, is_guess, unmarked
from iaprof.formats.header import members
from iaprof.formats.header.members import MEMBERS, Member
from iaprof.formats.header.traces import KEY as CLOCK, trace_clock, trace_clocks
from iaprof.formats.imports.iaprof_import import truncated_text
from iaprof.formats.ranges import batches
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.report.archive.pseudonyms import Clocks, Pseudonyms
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.names import Module, ModuleKind, Names, Symbolized
from iaprof.symbols.python.frames import PYTHON_FUNCTION
from iaprof.symbols.unwind.stack_ends import BEGINNINGS

_MOST_PIECES = 16  # of a name; one with more becomes a single hash
_WORDS = re.compile(
    # windows of an operation, its number, and its bytes
    r" Cmpt (?:Exec|Prep)\b| Dma[IO]\b|_\d{1,9}(?= |$)| ?\[\d{1,18}B\]|"
    # collectives
    r"\[sync=|(?:_\d{1,9})?_s\d{1,9}_r(?:0x[0-9a-fA-F]{1,16}|\d{1,9})_\d{1,9}(?=\])|"
    r"SenRdma(?:Send|Recv|Receive)(?:_\d{1,18})?|"
    r" - Set BcList| - Xseg to rank \d{1,9}|(?<=\d) Data(?= \[)|All(?:Reduce|Gather)|_all_(?:reduce|gather)|"
    r"(?:_\d{1,9})?_Add(?:_\d{1,9})?(?= )|HCOLL(?: Signal)?|Host DMA|DLM Wait|Wdone(?= DmaI)|"
    r"Wait for Data Avail Notice|"
    r"Wait for Notice(?: \(gather notifications\))?|Wait for Delivery Notice|Wait for ACK|Send ACK Instruction|"
    r"Send Instruction|R5 (?:Wait|Send) (?:DATA|ACK)|"
    # the host
    r"[Bb]arrier:|[Mm]emcpy \((?:HtoD|DtoH)\)|Flex RoundTrip|AIU Roundtrip|ScheduleCompute|PrepareDmas|"
    r"Compute of (?=SenFusedDeviceNode)|Compute of |SenFusedDeviceNode|(?:aiu)?PrepareAndSyncRdma|"
    r"(?:aiu)?ScheduleWait|aiu(?:LaunchSuperNode|SuperNodeExecution|DataConvert|LaunchControlBlocks)|"
    r"Execute graph|PostKeys|FetchKeys|Callback|HostPrep|AllocateFrame of |Update CBs|"
    r"built-in method Predict of PyCapsule object|Torch-Compiled Region|"
    # the format, and counters
    r"^(?:process_(?:name|labels|sort_index)|thread_(?:name|sort_index)|ac2g|Power|ConcurrentPreps|PT Active|"
    r"BW Dma[IO]|BW allreduce|BW all-pcie|TransferBW|Coll_Bandwidth|gloo:all_reduce)$"
)
_SEPARATORS = re.compile(r"[ _\-:,\[\]()]*")
_TYPES = frozenset({"SingleCast", "MultiCast", "MultiCast XSEG", "Set BCList", "WDone Barrier", "WDoneBarrier"})
_PEERS = re.compile(r"[\d, \[\]]{0,4096}", re.ASCII)
_CATEGORIES = frozenset(
    {
        "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "concurrent_kernel", "cpu_op", "user_annotation",
        "python_function", "cpu_instant_event", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "Trace",
        "cuda_runtime", "cuda_driver", "cuda_sync", "cuda_profiler_range", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "collective_comm", "Power", "Power3", "Power4",
        "Pending Prep Events",
    }
)  # fmt: skip
_DEVICE_CATEGORY = re.compile("gpu|kernel")  # by which the stages tell a device's slices
_SERIES = frozenset({"Watts", "Percent", "Bytes", "GB/s", "GBps", "Unit GBps", "Concurrency"})
_NUMBERS = {
    "deviceProperties": frozenset({"id", "totalGlobalMem", "computeMajor", "computeMinor", "numSms", "warpSize"}),
    "distributedInfo": frozenset({"rank", "world_size"}),
}
"""Members of a file whose numbers stay."""

# Common files: reports need their names to say where stacks end and which frames are Python's. Folder and name count,
# as anybody can call a file of their own `libze_secret.so`.
_SYSTEM_FOLDERS = r"(/usr)?/lib(64)?(/x86_64-linux-gnu)?"
_PUBLIC = re.compile(
    rf"{_SYSTEM_FOLDERS}/((lib(c|m|dl|pthread|stdc\+\+|gcc_s|sycl|python3\.\d\d?)|ld-linux-x86-64"
    r"|libze_(loader|tracing_layer|validation_layer|intel_(gpu|gpu_legacy1|npu|vpu)))\.so[0-9.]{0,16})"
    rf"|{_SYSTEM_FOLDERS}/intel-opencl/libigdrcl(_legacy1)?\.so"
    r"|(/usr(/local)?)?/bin/python3(\.\d\d?)?|/usr/local/lib/libpython3\.\d\d?\.so[0-9.]{0,16}"
    r"|/opt/intel/oneapi/compiler/[0-9.]{1,16}/lib/libsycl\.so[0-9.]{0,16}"
)
_PUBLIC_MODULES = frozenset(
    f"[{name}]" for name in (
        "xe", "i915", "drm", "drm_buddy", "drm_exec", "drm_gpuvm", "drm_kms_helper", "drm_suballoc_helper",
        "drm_ttm_helper", "gpu_sched", "ttm", "intel_vsec", "mei", "mei_gsc", "mei_me",
    )
)  # fmt: skip
"""Modules of the Linux kernel that everybody with such a GPU has; others may be a company's own."""
_BPF_PROGRAM = re.compile(r"(bpf_prog|bpf_struct_ops)_.*")  # their names are the user's
# Labels that stand for unknown names, and bare addresses. Other text in brackets may be a name.
_LABEL = re.compile(
    r"\[(unknown (process|kernel)|ambiguous: [0-9,]+ processes|ambiguous kernel|any launch|"
    r"launched before recording|launch not recorded|other process|not recorded|no stack|stack lost|truncated|"
    r"called functions|unnamed function|anon|vdso|Python cut: (too many functions|what follows is not a function))\]|"
    r"(py::)?\[unknown\]|0x[0-9a-f]{1,16}"
)
_KERNEL_FRAME = "_[k]"  # the suffix of the Linux kernel's frames
_UNNAMED_KERNEL_FRAME = "[kernel]_[k]"  # replaces the Linux kernel's bare addresses
_NO_NAME = re.compile(
    r"|//anon|\[(vdso|vsyscall|vvar|heap|stack|uprobes|kernel|anon)\]|/proc/kallsyms"
    r"|/dev/(zero|dri/(renderD|card)\d{1,4})( \(deleted\))?"
)

_ALWAYS = ("command", "arguments", "libraries")
"""Lists that every redacted header has, also that of an import."""
_UNKNOWN = Member("", members.Redaction.DROPPED)

_MEMBERS = {kind.name: {each.name: each.identifies for each in kind.fields if each.identifies} for kind in ROW_KINDS}
"""By kind of row: the members with texts to replace, and what these texts are."""
_DROPPED = {kind.name: [each.name for each in kind.fields if each.flags & DROPPED] for kind in ROW_KINDS}
_TIMES = {kind.name: [each.name for each in kind.fields if each.flags & TIME] for kind in ROW_KINDS}
_FRAMES_AT_ONCE = 1 << 20
_HIGHEST = 1 << 63  # the Linux kernel's addresses are at or above


def redacted_name(names: Pseudonyms, name: str) -> str:
    """Redacts the name of an event."""
    pieces, at, hashes = [], 0, 0
    for word in [*_WORDS.finditer(name), None]:
        between = name[at : word.start() if word else len(name)]
        if _SEPARATORS.fullmatch(between):
            pieces.append(between)
        else:
            pieces.append(_between(names, between))
            hashes += 1
        if word:
            pieces.append(word[0])
            at = word.end()
    return "".join(pieces) if hashes <= 2 and len(pieces) <= 2 * _MOST_PIECES else names.letters("slice", name)


def _between(names: Pseudonyms, text: str) -> str:
    """Returns the hash of what is between two words; spaces around it stay."""
    stripped = text.strip(" ")
    before = " " if text.startswith(" ") else ""
    after = " " if text.endswith(" ") else ""
    return before + names.letters("slice", stripped) + after


def redacted_category(names: Pseudonyms, category: str) -> str:
    """Redacts a category. One that tells a device's slices still does."""
    if category in _CATEGORIES:
        return category
    words = _DEVICE_CATEGORY.findall(category)
    return " ".join([names.letters("category", category), *words[:1]])


def redacted_series(names: Pseudonyms, series: str) -> str:
    """Redacts the name of one of a counter's values."""
    return series if series in _SERIES else names.letters("series", series)


def redacted_type(names: Pseudonyms, type_: str) -> str:
    """Redacts the type of a collective's event."""
    return type_ if type_ in _TYPES else names.letters("type", type_)


def redacted_peers(names: Pseudonyms, peers: str) -> str:
    """Redacts peers, unless they are numbers of ranks."""
    return peers if _PEERS.fullmatch(peers) else names.letters("peers", peers)


def redacted_phase(names: Pseudonyms, phase: str) -> str:
    """Redacts a phase, unless it is a letter, as all are that the format has."""
    return phase if len(phase) <= 1 else names.letters("phase", phase)


def redacted_members(members: Any) -> dict[str, Any]:
    """Returns of a file's members the numbers that tell its devices and ranks."""
    if not isinstance(members, dict):
        return {}
    kept: dict[str, Any] = {}
    devices, info = members.get("deviceProperties"), members.get("distributedInfo")
    if isinstance(devices, list):
        kept["deviceProperties"] = [_numbers(each, "deviceProperties") for each in devices if isinstance(each, dict)]
    if isinstance(info, dict):
        kept["distributedInfo"] = _numbers(info, "distributedInfo")
    return kept


def _numbers(found: Mapping[Any, Any], member: str) -> dict[str, int | float]:
    return {
        name: found[name] for name in sorted(_NUMBERS[member] & found.keys()) if isinstance(found[name], int | float)
    }


def is_public_file(path: str) -> bool:
    """Tells whether everybody has this file, so that its name and its functions tell nothing."""
    return _PUBLIC.fullmatch(path) is not None


def redacted_path(names: Pseudonyms, path: str) -> str:
    """Redacts a path: one hash, or for files that everybody has a hash of the folder, and the name."""
    if _NO_NAME.fullmatch(path) or path == UNKNOWN_FILE:
        return path
    if is_public_file(path):
        folder, name = os.path.split(path)
        return f"/{names.name('folder', folder)}/{name}"
    return "/" + names.name("file", path)


def redacted_function(names: Pseudonyms, name: str) -> str:
    """Redacts a function's name. Functions in which threads begin, and the prefix of Python functions, stay."""
    if name in BEGINNINGS or not name:
        return name
    if name.startswith(PYTHON_FUNCTION):
        return PYTHON_FUNCTION + names.name("function", name)
    return names.name("function", name)


def redacted_kernel_function(names: Pseudonyms, name: str) -> str:
    """Redacts the name of a function of the Linux kernel's: that of a BPF program is the user's."""
    return names.name("function", name) if _BPF_PROGRAM.fullmatch(name) else name


def redacted_kernel_module(names: Pseudonyms, module: str) -> str:
    """Redacts the name of a module of the Linux kernel's, with its brackets; "" for the kernel itself."""
    return module if not module or module in _PUBLIC_MODULES else f"[{names.name('module', module)}]"


def is_public_module(module: str) -> bool:
    """Tells whether everybody has this module of the Linux kernel's, or "", the kernel itself."""
    return not module or module in _PUBLIC_MODULES


def redacted_stack(names: Pseudonyms, stack: str) -> str:
    """Redacts the frames of a `sample` row. The Linux kernel's frames, which are the innermost, keep their names."""
    frames = stack.split(";")
    users = len(frames)
    while users and frames[users - 1].endswith(_KERNEL_FRAME):
        users -= 1
    kernel = (
        _UNNAMED_KERNEL_FRAME
        if "0x" in frame
        else redacted_kernel_function(names, frame.removesuffix(_KERNEL_FRAME)) + _KERNEL_FRAME
        for frame in frames[users:]
    )
    own = (_redacted_frame(names, frame) for frame in frames[:users])
    redacted = ";".join([*own, *kernel]).encode()
    if len(redacted) > MAX_TEXT_BYTES:  # hashes can be longer than the names
        return truncated_text(redacted)
    return redacted.decode()


def _redacted_frame(names: Pseudonyms, frame: str) -> str:
    mark = SUFFIX if is_guess(frame) else ""
    return unless_label(unmarked(frame), lambda name: redacted_function(names, name)) + mark


def unless_label(text: str, change: Callable[[str], str]) -> str:
    """Returns a label, or an address, as it is, and anything else changed."""
    return text if _LABEL.fullmatch(text) else change(text)


def redacted_header(header: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """Redacts the header of a recording; `names` are the hashes in place of names."""
    clocks = names.clocks(header)
    redacted: dict[str, Any] = {name: [] for name in _ALWAYS}
    for name, value in header.items():
        member = MEMBERS.get(name, _UNKNOWN)
        match member.redaction:
            case members.Redaction.KEPT:
                redacted[name] = _redacted(value, member, names, clocks)
            case members.Redaction.CLOCKS:
                redacted[name] = clocks.of_header(_redacted(value, member, names, clocks))
            case members.Redaction.TRACES if isinstance(value, list):
                redacted[name] = [_redacted_trace(each, names, clocks) for each in value if isinstance(each, dict)]
    if isinstance(host := redacted.get("host"), dict):
        host.setdefault("boot_id", "")  # captures of formats 1 and 2 have none
    return redacted | {"redacted": True}


def _redacted(value: Any, member: Member, names: Pseudonyms, clocks: Clocks, name: str = "") -> Any:
    """Redacts JSON in a member; `name` is that of the value within it."""
    match value:
        case None:
            return None
        case dict():
            return {key: _redacted(each, member, names, clocks, key) for key, each in value.items()}
        case list():
            return [_redacted(each, member, names, clocks, name) for each in value]
        case _ if name in member.identifies:
            what = member.identifies[name]
            return redacted_path(names, str(value)) if what == "path" else names.name(what, str(value))
        case str():
            return value if name in member.texts else None
    return clocks.monotonic(value) if name in member.times else value


def _redacted_trace(trace: dict[str, Any], names: Pseudonyms, clocks: Clocks) -> dict[str, Any]:
    """Keeps the counts of an imported file, and of its members what tells devices and ranks."""
    clock = trace_clock(trace)
    if clock is not None:  # distances from the trace's own clock, and its times, would tell boot and date
        clock = replace(clock, offset_ns=0, steady_ns=0)
    facts = {name: trace.get(name) for name in ("dialect", "rank", "ranks", "counts")}
    return {
        **({} if clock is None else {CLOCK: clock.as_dict()}),
        **_redacted(facts, MEMBERS["traces"], names, clocks),
        "name": names.name("file", str(trace.get("name"))),
        "members": redacted_members(trace.get("members")),
    }


class Redaction:
    """Redacts the rows of one capture."""

    def __init__(
        self,
        names: Pseudonyms,
        header: dict[str, Any],
        spaces: AddressSpaces,
        kernel_addresses: NDArray[np.uint64],
        keep_kernels: bool,
    ) -> None:
        """Prepares redaction.

        Args:
            names: the hashes in place of names.
            header: the capture's own.
            spaces: the capture's address spaces.
            kernel_addresses: uint64[n], the Linux kernel's addresses to symbolize, sorted and distinct.
            keep_kernels: keep the debug ELFs of GPU kernels, with everything that they reveal.
        """
        self._names = names
        self._clocks = names.clocks(header)
        # A trace that is joined has the recording's clock, and all others, also those that do not exist, their own.
        self._of_traces = np.array(
            [self._clocks.trace_ns if clock is None else self._clocks.monotonic_ns for clock in trace_clocks(header)]
            + [self._clocks.trace_ns],
            np.int64,
        )
        self._spaces = spaces
        self._kernel_addresses = kernel_addresses
        self._keep_kernels = keep_kernels

    def rows(self, kind: str, table: pa.Table) -> pa.Table:
        """Redacts rows of a kind."""
        for name, what in _MEMBERS.get(kind, {}).items():
            change = _CHANGES.get(what)
            table = _mapped(table, name, partial(change or partial(_hashed, what), self._names))
        for name in _DROPPED.get(kind, ()):
            table = _set(table, name, pa.nulls(len(table), table.schema.field(name).type))
        for name in _TIMES.get(kind, ()):
            table = _set(table, name, self._moved(table, name))
        if kind == "mapping":
            table = _mapped(table, "build_id", self._names.content)
        elif kind == "loss":
            table = _mapped(table, "detail", lambda _: "redacted")
        elif kind == "kernel" and not self._keep_kernels:
            table = _mapped(table, "digest", self._names.content)  # else someone who has the file could identify it
            table = _set(table, "elf", pa.nulls(len(table), table.schema.field("elf").type))
        elif kind == "stack":
            ips = combined(table["ips"])
            depths = np.diff(ips.offsets.to_numpy())
            pieces = [self._ips(table[some], ips[some]) for some in batches(depths, _FRAMES_AT_ONCE)]
            table = _set(table, "ips", pa.chunked_array(pieces, ips.type))
        return table

    def _moved(self, table: pa.Table, name: str) -> pa.Array:
        """Moves the times of a column; 0 stays, as it is none, and would tell the distance."""
        column = combined(table[name])
        times = column.fill_null(0).to_numpy(zero_copy_only=False)
        if times.dtype == np.uint64:
            moved = times + np.uint64(self._clocks.monotonic_ns)
        else:
            files = np.minimum(combined(table["file"]).to_numpy(zero_copy_only=False), len(self._of_traces) - 1)
            moved = times + self._of_traces[files]
        return pa.array(np.where(times == 0, times, moved), column.type)

    def _ips(self, table: pa.Table, ips: pa.ListArray) -> pa.ListArray:
        """Replaces the Linux kernel's addresses, and values in no mapping: these are data of the process, not code."""
        starts = ips.offsets.to_numpy().astype(np.int64)
        depths = np.diff(starts)
        values = ips.flatten().to_numpy().copy()
        innermost = np.zeros(len(values), bool)
        innermost[(starts[:-1] - starts[0])[depths > 0]] = True
        pids, times = (np.repeat(table[name].to_numpy(), depths) for name in ("pid", "time_ns"))
        kernels = pids == 0
        modules, _ = self._spaces.locate(pids, values - (~innermost).astype(np.uint64), times)
        nowhere = np.array([module.path == NOWHERE for module in self._spaces.modules], bool)
        values[nowhere[modules] & ~kernels] = 1
        returns = kernels & ~innermost
        values[returns] = self._ordinals(values[returns] - np.uint64(1)) + np.uint64(1)
        values[kernels & innermost] = self._ordinals(values[kernels & innermost])
        offsets = pa.array((starts - starts[0]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array(values), type=ips.type)

    def _ordinals(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Replaces kernel addresses by ascending numbers, 16 apart, as return addresses are looked up minus 1."""
        return np.searchsorted(self._kernel_addresses, addresses).astype(np.uint64) * np.uint64(16) + np.uint64(
            _HIGHEST
        )

    def module(self, module: Module, symbolized: Symbolized) -> tuple[Module, Symbolized]:
        """Redacts a module and its names, for `module` and `symbol` rows."""
        names = symbolized.names
        if module.kind is ModuleKind.KERNEL:
            names = names.outermost().at(self._kernel_addresses)
            names = self._kernel_names(replace(names, addresses=self._ordinals(names.addresses)))
        else:
            files = set(names.files.tolist()) - set(names.functions.tolist())
            is_public = is_public_file(module.path)
            strings = [
                redacted_path(self._names, text)
                if number in files
                else text
                if is_public
                else redacted_function(self._names, text)
                for number, text in enumerate(names.strings)
            ]
            names = replace(names, strings=strings)
        build_id = self._names.content(module.build_id) if module.build_id is not None else None
        redacted = Module(module.kind, redacted_path(self._names, module.path), build_id, 0, module.pid)
        problem = "redacted" if symbolized.problem else ""
        source = "redacted" if symbolized.source else ""
        return redacted, replace(symbolized, names=names, source=source, problem=problem)

    def _kernel_names(self, names: Names) -> Names:
        """Redacts the Linux kernel's names: those of modules that not everybody has, and of BPF programs."""
        files, file_of = np.unique(names.files, return_inverse=True)
        pairs, pair_of = np.unique(names.functions.astype(np.int64) * max(len(files), 1) + file_of, return_inverse=True)
        modules = [names.strings[number] for number in files.tolist()]
        strings = [redacted_kernel_module(self._names, module) for module in modules]
        for pair in pairs.tolist():
            function, file = divmod(pair, max(len(files), 1))
            change = redacted_kernel_function if is_public_module(modules[file]) else redacted_function
            strings.append(change(self._names, names.strings[function]))
        functions = (pair_of + len(files)).astype(np.int32)
        return replace(names, functions=functions, files=file_of.astype(np.int32), strings=strings)


def _hashed(what: str, names: Pseudonyms, text: str) -> str:
    return names.name(what, text)


def _unless_label(what: str, names: Pseudonyms, text: str) -> str:
    return unless_label(text, partial(names.name, what))


_CHANGES: dict[str, Callable[[Pseudonyms, str], str]] = {
    "path": redacted_path,
    "stack": redacted_stack,
    "slice": redacted_name,
    "group": redacted_name,
    "category": redacted_category,
    "series": redacted_series,
    "type": redacted_type,
    "peers": redacted_peers,
    "phase": redacted_phase,
    "sampled process": partial(_unless_label, "process"),
    "sampled kernel": partial(_unless_label, "kernel"),
}
"""By what the text is: the function that redacts it, for texts that are not just one name."""


def _mapped(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    """Replaces each distinct value of a dictionary column."""
    return _set(table, name, map_texts(combined(table[name]), change))


def _set(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, pa.field(name, column.type), column)
