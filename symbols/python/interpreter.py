"""Reads from the file of a CPython interpreter its version, and where it keeps its frames.

The file is the program, or libpython. It may be hostile: only numbers are taken from it, and these are checked. The
caller has to check in the memory of a running interpreter that they are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from iaprof.basics.elf import ElfFile
from iaprof.symbols.python.layout import FIRST_MINOR, LAST_MINOR, Layout, LayoutError, layout_of

_RUNTIME, _VERSION = b"_PyRuntime", b"Py_Version"
_TEXT_TYPE, _BYTES_TYPE = b"PyUnicode_Type", b"PyBytes_Type"
_VERSION_BYTES = 8
_CANDIDATE = 0xC  # the release level of release candidates; those of alphas and betas are lower


class InterpreterError(Exception):
    """The interpreter's frames cannot be walked; the text says why, as the second part of a sentence."""


class Version(NamedTuple):
    """A version of CPython."""

    major: int
    minor: int
    micro: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.micro}"


@dataclass(frozen=True)
class Interpreter:
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
