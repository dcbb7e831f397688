"""CPython's version and the offsets of the members of its structures that a walk of its frames reads.

For Python 3.11 and 3.12 this module has tables. From 3.13 on, _PyRuntime begins with a structure of offsets for
debuggers (_Py_DebugOffsets: Include/internal/pycore_runtime.h of 3.13, pycore_debug_offsets.h of later versions). It
has all but two fields of Layout: co_version, and where the characters of non-ASCII strings are.

They are read from the file of an interpreter: the program, or libpython. It may be hostile: only numbers are taken from
it, and these are checked. The caller has to check in the memory of a running interpreter that they are right.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from iaprof.basics.elf import ElfFile

LARGEST_OFFSET = 1 << 15
LARGEST_FRAME = 128
"""The most bytes of a frame that have to be read."""

COOKIE = b"xdebugpy"
PUBLISHED_BYTES = 760
"""The first bytes of _PyRuntime, with all members of _Py_DebugOffsets that are read."""
_HEAD = struct.Struct("<8sQQ")
_OFFSET = struct.Struct("<Q")

_RUNTIME, _VERSION = b"_PyRuntime", b"Py_Version"
_TEXT_TYPE, _BYTES_TYPE = b"PyUnicode_Type", b"PyBytes_Type"
_VERSION_BYTES = 8
_CANDIDATE = 0xC  # the release level of release candidates; those of alphas and betas are lower


class LayoutError(ValueError):
    """Offsets are missing, contradictory or absurd; the text says what is wrong, as part of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Offsets in bytes, each from the start of the structure that its comment names.

    A member that a version does not have is None.
    """

    interpreters_head: int  # _PyRuntimeState.interpreters.head
    interpreter_next: int  # PyInterpreterState.next
    threads_head: int  # PyInterpreterState.threads.head
    thread_next: int  # PyThreadState.next
    thread_id: int  # PyThreadState.thread_id, which is pthread_self()
    thread_frame: int | None = None  # PyThreadState.current_frame; 3.13 and later
    thread_cframe: int | None = None  # PyThreadState.cframe; 3.11 and 3.12
    cframe_frame: int | None = None  # _PyCFrame.current_frame; 3.11 and 3.12
    cframe_previous: int | None = None  # _PyCFrame.previous; 3.11 and 3.12
    frame_code: int  # _PyInterpreterFrame.f_code, since 3.13 f_executable
    frame_previous: int  # _PyInterpreterFrame.previous
    frame_instruction: int  # _PyInterpreterFrame.prev_instr, since 3.13 instr_ptr; in a caller, the call
    frame_owner: int  # _PyInterpreterFrame.owner, 1 byte
    frame_is_entry: int | None = None  # _PyInterpreterFrame.is_entry, 1 byte; 3.11
    code_filename: int  # PyCodeObject.co_filename
    code_name: int  # PyCodeObject.co_name
    code_qualname: int  # PyCodeObject.co_qualname
    code_linetable: int  # PyCodeObject.co_linetable
    code_first_line: int  # PyCodeObject.co_firstlineno, 4 bytes
    code_version: int | None = None  # PyCodeObject.co_version, 4 bytes; 3.12 and later
    code_bytecode: int  # PyCodeObject.co_code_adaptive, where the instructions begin
    string_length: int  # PyASCIIObject.length, in characters
    string_state: int  # PyASCIIObject.state, 4 bytes
    string_ascii_data: int  # sizeof(PyASCIIObject): where the characters of an ASCII string begin
    string_other_data: int  # sizeof(PyCompactUnicodeObject): where the characters of other strings begin
    bytes_length: int  # PyBytesObject.ob_base.ob_size
    bytes_data: int  # PyBytesObject.ob_sval

    @property
    def frame_bytes(self) -> int:
        """The number of bytes at the start of a frame that have all its members; a multiple of 8."""
        ends = [offset + width for offset, width in _present(self, _STRUCTURES["_PyInterpreterFrame"])]
        return max(ends) + 7 & ~7


# By structure: the fields of Layout that are offsets in it, with the members' sizes in bytes.
_STRUCTURES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "_PyRuntimeState": {"interpreters_head": 8},
        "PyInterpreterState": {"interpreter_next": 8, "threads_head": 8},
        "PyThreadState": {"thread_next": 8, "thread_id": 8, "thread_frame": 8, "thread_cframe": 8},
        "_PyCFrame": {"cframe_frame": 8, "cframe_previous": 8},
        "_PyInterpreterFrame": {
            "frame_code": 8,
            "frame_previous": 8,
            "frame_instruction": 8,
            "frame_owner": 1,
            "frame_is_entry": 1,
        },
        "PyCodeObject": {
            "code_filename": 8,
            "code_name": 8,
            "code_qualname": 8,
            "code_linetable": 8,
            "code_first_line": 4,
            "code_version": 4,
            "code_bytecode": 2,
        },
        "PyUnicodeObject": {"string_length": 8, "string_state": 4, "string_ascii_data": 1, "string_other_data": 1},
        "PyBytesObject": {"bytes_length": 8, "bytes_data": 1},
    }
)

_IN_TABLE = {
    11: Layout(
        interpreters_head=40,
        interpreter_next=0,
        threads_head=16,
        thread_next=8,
        thread_id=152,
        thread_cframe=56,
        cframe_frame=8,
        cframe_previous=16,
        frame_code=32,
        frame_previous=48,
        frame_instruction=56,
        frame_owner=69,
        frame_is_entry=68,
        code_filename=112,
        code_name=120,
        code_qualname=128,
        code_linetable=136,
        code_first_line=72,
        code_bytecode=184,
        string_length=16,
        string_state=32,
        string_ascii_data=48,
        string_other_data=72,
        bytes_length=16,
        bytes_data=32,
    ),
    12: Layout(
        interpreters_head=40,
        interpreter_next=0,
        threads_head=72,
        thread_next=8,
        thread_id=136,
        thread_cframe=56,
        cframe_frame=0,
        cframe_previous=8,
        frame_code=0,
        frame_previous=8,
        frame_instruction=56,
        frame_owner=70,
        code_filename=112,
        code_name=120,
        code_qualname=128,
        code_linetable=136,
        code_first_line=68,
        code_version=92,
        code_bytecode=192,
        string_length=16,
        string_state=32,
        string_ascii_data=40,
        string_other_data=56,
        bytes_length=16,
        bytes_data=32,
    ),
}

_NOT_PUBLISHED = {"code_version": 92, "string_other_data": 56}  # the same in 3.13 to 3.15


class _Group(NamedTuple):
    """A part of _Py_DebugOffsets: the size of a structure, followed by the offsets of its members."""

    structure: str
    size: int  # where the structure's size is in _Py_DebugOffsets
    fields: Mapping[str, int]  # where the offsets of Layout's fields are, in bytes after the size


def _groups(
    *, thread: int, frame: int, code: int, bytes_: int, unicode: int, thread_id: int = 40
) -> tuple[_Group, ...]:
    """Returns the groups of a version, given the offsets at which they begin; the rest is common to all versions."""
    return (
        _Group("_PyRuntimeState", 24, {"interpreters_head": 16}),
        _Group("PyInterpreterState", 48, {"interpreter_next": 16, "threads_head": 24}),
        _Group("PyThreadState", thread, {"thread_next": 16, "thread_frame": 32, "thread_id": thread_id}),
        _Group(
            "_PyInterpreterFrame",
            frame,
            {"frame_previous": 8, "frame_code": 16, "frame_instruction": 24, "frame_owner": 40},
        ),
        _Group(
            "PyCodeObject",
            code,
            {
                "code_filename": 8,
                "code_name": 16,
                "code_qualname": 24,
                "code_linetable": 32,
                "code_first_line": 40,
                "code_bytecode": 72,
            },
        ),
        _Group("PyBytesObject", bytes_, {"bytes_length": 8, "bytes_data": 16}),
        _Group("PyUnicodeObject", unicode, {"string_state": 8, "string_length": 16, "string_ascii_data": 24}),
    )


_PUBLISHED = {
    13: _groups(thread=152, frame=224, code=272, bytes_=512, unicode=536),
    14: _groups(thread=176, frame=248, code=312, bytes_=592, unicode=616),
    15: _groups(thread=176, frame=312, code=376, bytes_=688, unicode=712, thread_id=64),
}

FIRST_MINOR, LAST_MINOR = min(_IN_TABLE), max(_PUBLISHED)
"""The first and the last minor version of Python 3 whose layout is known."""


def layout_of(minor: int, hexversion: int, read: Callable[[int], bytes]) -> Layout:
    """Returns the layout of a version between FIRST_MINOR and LAST_MINOR.

    Args:
        minor: version of Python 3.
        hexversion: the content of Py_Version.
        read: reads the first bytes of _PyRuntime in the file, given their number.

    Raises:
        LayoutError: the published offsets are missing, of a free-threaded build, contradictory or absurd.
    """
    if minor in _IN_TABLE:
        return _IN_TABLE[minor]
    published = read(PUBLISHED_BYTES)
    if len(published) < PUBLISHED_BYTES:
        raise LayoutError("the offsets that it publishes lie outside of the file")
    cookie, version, free_threaded = _HEAD.unpack_from(published)
    if cookie != COOKIE:
        raise LayoutError("it does not publish the offsets of its structures")
    if version != hexversion:
        raise LayoutError(f"it publishes the offsets of another version ({version:#x}) than its own ({hexversion:#x})")
    if free_threaded:
        raise LayoutError("it is a free-threaded build, whose frames are kept in another way")
    return _read(published, _PUBLISHED[minor])


def _read(published: bytes, groups: tuple[_Group, ...]) -> Layout:
    """Reads a layout from the published bytes; raises LayoutError."""
    offsets = dict(_NOT_PUBLISHED)
    for group in groups:
        (size,) = _OFFSET.unpack_from(published, group.size)
        for name, after_size in group.fields.items():
            (offset,) = _OFFSET.unpack_from(published, group.size + after_size)
            if offset >= LARGEST_OFFSET or offset + _end_width(group.structure, name) > size:
                raise LayoutError(f"the offset that it publishes for {name} is absurd ({offset}, in {size} bytes)")
            offsets[name] = offset
    layout = Layout(**offsets)
    _check(layout)
    return layout


def _end_width(structure: str, name: str) -> int:
    """Returns how many bytes of its structure a field needs from its offset on: none if the offset is the size."""
    return 0 if name == "string_ascii_data" else _STRUCTURES[structure][name]


def _check(layout: Layout) -> None:
    """Raises LayoutError if members overlap or are not aligned, or if a frame is too large."""
    for structure, widths in _STRUCTURES.items():
        present = sorted(_present(layout, widths))
        if any(offset + width > following for (offset, width), (following, _) in pairwise(present)):
            raise LayoutError(f"the offsets that it publishes for {structure} overlap")
        if any(offset % width for offset, width in present):
            raise LayoutError(f"the offsets that it publishes for {structure} are not aligned")
    if layout.frame_bytes > LARGEST_FRAME:
        raise LayoutError(f"the frames that it publishes are too large ({layout.frame_bytes} bytes)")


def _present(layout: Layout, widths: Mapping[str, int]) -> list[tuple[int, int]]:
    """Returns (offset, width) of the fields that the version has."""
    offsets = ((getattr(layout, name), width) for name, width in widths.items())
    return [(offset, width) for offset, width in offsets if offset is not None]


class InterpreterError(Exception):
    """The interpreter's frames cannot be walked; the text says why, as the second part of a sentence."""


class Version(NamedTuple):
    """A version of CPython."""

    major: int
    minor: int
    micro: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.micro}"


class Interpreter(NamedTuple):
    """A CPython interpreter whose frames can be walked."""

    version: Version
    runtime: int  # the address of _PyRuntime in the image
    text_type: int  # the address of PyUnicode_Type, which each `str` object points to
    bytes_type: int  # the address of PyBytes_Type
    layout: Layout


def read_interpreter(image: ElfFile) -> Interpreter | None:
    """Returns the interpreter in a file; None if the file has none.

    Raises:
        InterpreterError: the file has an interpreter whose frames cannot be walked.
    """
    runtime = image.exported(_RUNTIME)
    if runtime is None:
        return None
    version = image.exported(_VERSION)
    if version is None:
        raise InterpreterError(f"it is older than Python 3.{FIRST_MINOR}, or does not export its version")
    content = image.at(version, _VERSION_BYTES)
    if len(content) < _VERSION_BYTES:
        raise InterpreterError("its version lies outside of the file")
    hexversion = int.from_bytes(content, "little")
    checked = _checked(hexversion)
    text_type, bytes_type = image.exported(_TEXT_TYPE), image.exported(_BYTES_TYPE)
    if text_type is None or bytes_type is None:
        raise InterpreterError("it does not export the types of its objects")
    return Interpreter(checked, runtime, text_type, bytes_type, _layout(image, runtime, hexversion))


def _checked(hexversion: int) -> Version:
    """Decodes the content of Py_Version, a PY_VERSION_HEX (Include/patchlevel.h); raises InterpreterError."""
    version = Version(hexversion >> 24, hexversion >> 16 & 255, hexversion >> 8 & 255)
    if version.major != 3 or version.minor < FIRST_MINOR:
        raise InterpreterError(
            f"it exports {hexversion:#x} as its version; frames of Python 3.{FIRST_MINOR} to 3.{LAST_MINOR} are read"
        )
    if version.minor > LAST_MINOR:
        raise InterpreterError(f"it is Python {version}, which is newer than what is known here (3.{LAST_MINOR})")
    if hexversion >> 4 & 15 < _CANDIDATE:
        raise InterpreterError(f"it is a preview of Python {version}, whose frames may be kept in another way")
    return version


def _layout(image: ElfFile, runtime: int, hexversion: int) -> Layout:
    try:
        return layout_of(hexversion >> 16 & 255, hexversion, lambda count: image.at(runtime, count))
    except LayoutError as error:
        raise InterpreterError(str(error)) from None
