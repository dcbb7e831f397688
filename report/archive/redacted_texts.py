"""Redacts texts of rows: what names a user's programs becomes a hash, what everybody has stays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.guesses import SUFFIX, is_guess, unmarked
from iaprof.formats.imports.iaprof_lines import truncated_text
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.symbols.python.frames import PYTHON_FUNCTION
from iaprof.symbols.unwind.stack_ends import BEGINNINGS

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
