"""Runs in a sandboxed child: finishes stacks, for symbols/unwind/finishing.py.

The child keeps images and the mappings of processes from one request to the next. An image stays mapped after its file
is closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

from iaprof.sandbox.reader import Operation
from iaprof.symbols.python.interpreter import InterpreterError, read_interpreter
from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.code import Image, Mapping, NeedsImage, Space
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.walk import PAGE, Absent, HowFound, NeedsMemory, Walk

MAPPING = struct.Struct("<QQQq")  # start, end, offset, number of the image
MOST_SPACES = 512


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    server = _Server()
    return {"image": server.image, "space": server.space, "finish": server.finish, "interpreter": server.interpreter}


class _Server:
    def __init__(self) -> None:
        self._images: dict[int, Image | None] = {}
        self._spaces: dict[int, Space] = {}  # by number, the oldest first

    def image(self, parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
        """Takes an image as an open file or as bytes; without either, the image cannot be read.

        Raises:
            OSError: this process may open no more files, or has no memory to map them: another one may.
        """
        number = int(parameters["image"])
        if parameters["is_open"] and not files:  # the Linux kernel leaves out descriptors for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._images[number] = None
        try:
            if files:
                content = mmap.mmap(files[0], 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                self._images[number] = Image(CallFrames(content))
            elif data:
                self._images[number] = Image(CallFrames(bytes(data)))
        except (CfiError, ValueError) as error:
            return {"problem": str(error)}
        return {"problem": ""}

    def space(self, parameters: dict[str, Any], data: bytearray, _files: list[int]) -> object:
        """Takes the mappings of a process."""
        while len(self._spaces) >= MOST_SPACES:
            del self._spaces[next(iter(self._spaces))]
        mappings = [Mapping(*members) for members in MAPPING.iter_unpack(data)]
        self._spaces[int(parameters["space"])] = Space(mappings, self._images)
        return None

    def interpreter(self, parameters: dict[str, Any], _data: bytearray, _files: list[int]) -> object:
        """Returns the CPython interpreter in an image; None if there is none."""
        number = int(parameters["image"])
        if number not in self._images:
            return {"image": number}
        image = self._images[number]
        if image is None:
            return None
        try:
            interpreter = read_interpreter(image.frames)
            start = image.frames.address_of(int(parameters["offset"]))
        except InterpreterError as error:
            return {"problem": str(error)}
        if interpreter is None or start is None:
            return None
        in_image = (interpreter.runtime, interpreter.text_type, interpreter.bytes_type)
        addresses = [address - start for address in in_image]
        return {"addresses": addresses, "version": str(interpreter.version), "layout": vars(interpreter.layout)}

    def finish(self, parameters: dict[str, Any], data: bytearray, _files: list[int]) -> object:
        """Walks a stack, or returns what the walk needs first."""
        space = self._spaces.get(int(parameters["space"]))
        if space is None:
            return {"space": parameters["space"]}
        registers = {int(number): int(value) for number, value in parameters["registers"]}
        read = _reader(parameters["pages"], set(parameters["absent"]), bytes(data))
        walk = Walk(space, read, int(parameters["limit"]))
        try:
            ending = walk.run(registers, HowFound(parameters["found"]))
        except NeedsImage as needed:
            return {"image": needed.image}
        except NeedsMemory as needed:
            return {"memory": needed.address}
        return {
            "ips": walk.ips,
            "found": walk.how_found,
            "cfas": walk.cfas,
            "ending": ending,
            "rules": [[address, scope, rule.pack()] for (address, scope), rule in walk.rules.items()],
            "interrupted": walk.interrupted,
            "met_unknown": walk.met_unknown,
        }


def _reader(addresses: list[int], absent: set[int], data: bytes) -> Callable[[int, int], int]:
    """Returns a function that reads numbers in copied pages.

    Args:
        addresses: where the pages begin.
        absent: addresses of pages that cannot be copied.
        data: the pages.
    """
    pages = {address: number * PAGE for number, address in enumerate(addresses)}

    def read(address: int, size: int) -> int:
        base = address & -PAGE
        at = pages.get(base)
        inside = address - base
        if at is None:
            raise Absent(f"{address:#x}") if base in absent else LookupError(f"{address:#x}")
        if inside + size > PAGE:
            low = PAGE - inside
            return read(address, low) | read(base + PAGE, size - low) << 8 * low
        return int.from_bytes(data[at + inside : at + inside + size], "little")

    return read
