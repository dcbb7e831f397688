"""Runs in a sandboxed child: walks stacks and finds interpreters, for symbols/unwind/finishing.py.

The child keeps images and the mappings of processes from one request to the next. An image stays mapped after its file
is closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from typing import Any

from iaprof.basics.heap import take_in_advance
from iaprof.sandbox.reader import Operation
from iaprof.symbols.python.interpreter import InterpreterError, read_interpreter
from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.library import WalkLibrary

_KEPT_BYTES = 4 << 20  # of memory, for requests
MAPPING = struct.Struct("<QQQq")  # start, end, offset, number of the image


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    take_in_advance(_KEPT_BYTES)
    server = _Server()
    return {"image": server.image, "space": server.space, "finish": server.finish, "interpreter": server.interpreter}


class _Server:
    def __init__(self) -> None:
        self._library = WalkLibrary()
        self._images: dict[int, mmap.mmap | None] = {}

    def image(self, parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
        """Takes an image as an open file; without one, the image cannot be read.

        Raises:
            OSError: this process may open no more files, or has no memory to map them: another one may.
        """
        number = int(parameters["image"])
        if parameters["is_open"] and not files:  # the Linux kernel leaves out descriptors for which there is no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._library.add_image(number, files[0] if files else None)
        try:
            self._images[number] = mmap.mmap(files[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) if files else None
        except ValueError:  # it is empty
            self._images[number] = None
        return None

    def space(self, parameters: dict[str, Any], data: bytearray, _files: list[int]) -> object:
        """Takes the mappings of a process."""
        self._library.set_space(int(parameters["space"]), data, len(data) // MAPPING.size)
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
            frames = CallFrames(image)
            interpreter = read_interpreter(frames)
            start = frames.address_of(int(parameters["offset"]))
        except InterpreterError as error:
            return {"problem": str(error)}
        except CfiError:
            return None
        if interpreter is None or start is None:
            return None
        in_image = (interpreter.runtime, interpreter.text_type, interpreter.bytes_type)
        addresses = [address - start for address in in_image]
        return {"addresses": addresses, "version": str(interpreter.version), "layout": vars(interpreter.layout)}

    def finish(self, _parameters: dict[str, Any], data: bytearray, _files: list[int]) -> object:
        """Walks stacks, or tells what a walk needs first."""
        return self._library.run(data)
