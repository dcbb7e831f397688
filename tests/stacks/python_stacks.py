# SPDX-License-Identifier: Apache-2.0
"""Stacks of many shapes in Python: python_stacks.py LIBRARY ROUNDS; each calls probe_me with a number of its own."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator

import numpy as np

library = ctypes.CDLL(sys.argv[1])
with_lock = ctypes.PyDLL(sys.argv[1])  # which keeps the interpreter's lock
c_library = ctypes.CDLL(None)  # no library is loaded later: then stacks are finished when the recording ends
serial = itertools.count(1)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))


def stop(of: ctypes.CDLL = library) -> int:
    of.call_probe_me(ctypes.c_long(next(serial)))
    return 1


def deep(left: int) -> int:
    return deep(left - 1) + 1 if left else stop()


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value
        stop(with_lock)

    def __lt__(self, other: Thing) -> bool:
        stop()
        return self.value < other.value

    def __getattr__(self, name: str) -> str:
        stop()
        return name

    def __del__(self) -> None:
        stop()

    @property
    def partial(self) -> int:
        return functools.partial(deep, 3)()


class Number:
    def __radd__(self, other: object) -> int:
        return stop()


def generated(count: int) -> Iterator[int]:
    for number in range(count):
        stop()
        yield number
    yield from [deep(1)] if count < 2 else generated(count - 1)


async def awaited(left: int) -> None:
    if left:
        await awaited(left - 1)
    stop()


def run(coroutine: Coroutine[None, None, None]) -> None:
    try:
        coroutine.send(None)
    except StopIteration:
        stop()


def of_numpy() -> None:
    np.vectorize(lambda _: deep(1))(np.arange(3))
    np.apply_along_axis(lambda _: deep(2), 0, np.ones((2, 2)))
    np.frompyfunc(lambda _: deep(2), 1, 1)(np.arange(2))
    np.array([1, 2]).astype(object) + Number()


def called_by_c() -> None:
    library.call_back(CALLBACK(lambda _: deep(1)), 3)
    numbers = (ctypes.c_int * 4)(4, 2, 9, 1)
    compare: Callable[..., int] = lambda one, other: deep(1) and one[0] - other[0]  # noqa: E731
    c_library.qsort(numbers, 4, 4, COMPARE(compare))


def work() -> None:
    deep(20)
    things = sorted(Thing(number) for number in (5, 3, 9))
    print(things[0].missing, things[1].partial)
    del things
    list(generated(3))
    run(awaited(3))
    sorted([3, 1, 2], key=deep)
    exec("def inner():\n  stop()\ninner()", globals())
    called_by_c()
    try:
        raise ValueError
    except ValueError:
        stop()
    of_numpy()


for _ in range(int(sys.argv[2])):
    work()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
