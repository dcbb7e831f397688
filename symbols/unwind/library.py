"""The compiled walk of stacks (walk.c, frames.c), which the sandboxed child of reader.py calls."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

LIBRARY = Path(__file__).with_name("libiaprof_unwind.so")
_MOST_ANSWER_BYTES = 1 << 18
_NO_FILE = -1


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
