"""Launches from many paths of Python in three threads, and tells each one's frames.

Arguments: LIBRARY ELF KERNEL OUTPUT ROUNDS START; it begins when there is a file START. launching.py says what is told.
"""

import asyncio
import contextlib
import functools
import sys
import threading

from launching import launch, prepare, wait_for

*told, rounds, start = sys.argv[1:]


def plain(_=None):
    launch()
    return 0


def deeper(n):
    return deeper(n - 1) if n else plain()


def generated():
    for _ in range(2):
        yield plain()


def decorated(function):
    @functools.wraps(function)
    def inside(*arguments):
        return function(*arguments)

    return inside


@decorated
def behind_a_decorator():
    plain()


class Made:
    def __init__(self):
        plain()

    @property
    def value(self):
        return plain()

    @classmethod
    def of_class(cls):
        plain()

    def __enter__(self):
        plain()

    def __exit__(self, *_):
        plain()

    def __lt__(self, other):
        plain()
        return False


async def waits(n):
    await asyncio.sleep(0)
    if n:
        await waits(n - 1)
    plain()


def step():
    plain()
    for depth in (1, 5, 20):
        deeper(depth)
    list(generated())
    [plain() for _ in range(2)]
    {plain(): plain() for _ in range(1)}
    sum(plain() for _ in range(2))
    behind_a_decorator()
    made = Made()
    _ = made.value
    made.of_class()
    with made:
        plain()
    sorted([made, made])
    sorted([3, 1, 2], key=plain)
    list(map(plain, range(2)))
    functools.reduce(lambda _, n: plain(n), range(3))
    (lambda: plain())()
    exec(compile("def made_by_exec():\n\n    plain()\nmade_by_exec()", "<made>", "exec"), {"plain": plain})
    eval("plain()")
    asyncio.run(waits(2))
    with contextlib.suppress(ZeroDivisionError):
        try:
            _ = 1 / 0
        finally:
            plain()


def run():
    for _ in range(int(rounds)):
        step()


prepare(*told)
wait_for(start)
threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
run()
for thread in threads:
    thread.join()
