"""Runs in a sandboxed child: walks stacks and finds interpreters, for symbols/unwind/finishing.py.

walk.c and frames.c, compiled to a library, walk the stacks. The child keeps images and the mappings of processes from
one request to the next. An image stays mapped after its file is closed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from iaprof.basics.heap import take_in_advance
from iaprof.sandbox.reader import Operation
from iaprof.symbols.python.layout import InterpreterError, read_interpreter
from iaprof.symbols.unwind.cfi import CallFrames, CfiError

LIBRARY = Path(__file__).with_name("libiaprof_unwind.so")
_MOST_ANSWER_BYTES = 1 << 18
_NO_FILE = -1

_KEPT_BYTES = 4 << 20  # of memory, for requests
MAPPING = struct.Struct("<QQQq")  # start, end, offset, number of the image


class WalkLibrary:
    """The library's functions. Its images and spaces are the process's, as there is one library in a process."""

    def __init__(self) -> None:
        """Loads the library.

        Raises:
            OSError: it is not there, because iaprof was installed without a C compiler.
        """
        library = ctypes.CDLL(str(LIBRARY))
        number, address = ctypes.c_uint64, ctypes.c_void_p
        self._add_image, self._set_space, self._run = library.walk_add_image, library.walk_set_space, library.walk_run
        self._read_ahead = library.walk_read_ahead
        self._read_ahead.argtypes = [number]
        self._add_image.argtypes = [number, ctypes.c_int]
        self._set_space.argtypes = [number, address, number]
        self._run.argtypes = [address, number, ctypes.POINTER(number), address, number]
        self._run.restype = number
        self._answer = ctypes.create_string_buffer(_MOST_ANSWER_BYTES)

    def add_image(self, number: int, file: int | None) -> None:
        """Takes an image as an open file, which it maps; None for one that cannot be read.

        Raises:
            OSError: there is no memory to map it.
        """
        if self._add_image(number, _NO_FILE if file is None else file) < 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def read_ahead(self, number: int) -> bool:
        """Reads a piece of an image's call frame information ahead; returns whether to call it again."""
        return bool(self._read_ahead(number))

    def set_space(self, number: int, mappings: bytearray, count: int) -> None:
        """Takes the mappings of a process: `count` times struct mapping of walk.c.

        Raises:
            MemoryError: there are too many.
        """
        if self._set_space(number, (ctypes.c_char * len(mappings)).from_buffer(mappings), count):
            raise MemoryError

    def run(self, requests: bytearray) -> bytes:
        """Walks stacks.

        Args:
            requests: one after the other, as walk_run() takes them.

        Returns:
            An answer for each, one after the other.

        Raises:
            ValueError: a request is damaged, or there is no memory.
        """
        answers = []
        at, data = 0, (ctypes.c_char * len(requests)).from_buffer(requests)
        first, taken = ctypes.addressof(data), ctypes.c_uint64()
        while at < len(requests):
            size = self._run(first + at, len(requests) - at, ctypes.byref(taken), self._answer, _MOST_ANSWER_BYTES)
            if not size:
                raise ValueError("a stack cannot be walked: the request is damaged, or there is no memory")
            answers.append(ctypes.string_at(self._answer, size))
            at += taken.value
        return b"".join(answers)


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    take_in_advance(_KEPT_BYTES)
    server = _Server()
    return {
        "image": server.image,
        "ahead": server.ahead,
        "space": server.space,
        "finish": server.finish,
        "interpreter": server.interpreter,
    }


class _Server:
    def __init__(self) -> None:
        self._library = WalkLibrary()
        self._images: dict[int, mmap.mmap | None] = {}

    def image(self, parameters: dict[str, Any], _data: bytearray, files: list[int]) -> object:
        """Takes an image as an open file; without one, the image cannot be read. Returns what `ahead` does.

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
        return self._library.read_ahead(number)

    def ahead(self, parameters: dict[str, Any], _data: bytearray, _files: list[int]) -> object:
        """Reads a piece of an image's call frame information ahead; returns whether to call it again."""
        return self._library.read_ahead(int(parameters["image"]))

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
