"""Launches from one kind of Python that is seldom met: CASE LIBRARY ELF KERNEL OUTPUT START [MORE...].

It begins when there is a file START, and tells each launch's frames as launching.py does.
"""

import os
import random
import sys
import time

from launching import call_between_launches, call_in_a_thread, launch, prepare, wait_for

case, *told, start = sys.argv[1:7]
TIMES = 20


def plain():
    for _ in range(TIMES):
        launch()


def deep():
    sys.setrecursionlimit(2000)

    def recurse(n):
        return recurse(n - 1) if n else launch()

    recurse(400)


def long_table():
    """A function with many lines launches from its last one."""
    body = "\n".join(f"    x{n} = [a for a in ({n}, 2)]; y{n} = (x{n}[0] + 1) * 2" for n in range(900))
    names = {"launch": launch}
    exec(compile(f"def many_lines():\n{body}\n    launch()\n", "<made>", "exec"), names)
    assert len(names["many_lines"].__code__.co_linetable) > 20_000
    for _ in range(TIMES):
        names["many_lines"]()


def long_names():
    name = "n" * 1000
    exec(compile(f"def {name}():\n    launch()\n{name}()", "/" + "d" * 2000, "exec"), {"launch": launch})


def thread_of_c():
    """It has another thread state each time that it calls Python."""
    left = [TIMES]

    def called():
        launch()
        left[0] -= 1
        return left[0]

    call_in_a_thread(called)


def between_launches_of_c(keeps_state=False):
    """A thread launches without Python, calls Python, which mostly launches, too, and so on: by the same paths."""
    chance, left = random.Random(0), [300]

    def called():
        for _ in range(chance.randrange(3)):
            launch()
        left[0] -= 1
        return left[0]

    call_between_launches(called, 3, keeps_state)


def between_launches_of_a_thread_with_a_state():
    between_launches_of_c(keeps_state=True)


def stale():
    """Functions that are made and dropped one after the other, mostly at one address."""
    for n in range(TIMES):
        names = {"launch": launch}
        exec(compile(f"def made_{n}():\n    launch()\n", f"<{n}>", "exec"), names)
        time.sleep(0.02)  # longer than what was seen is believed
        names[f"made_{n}"]()


def in_turns():
    """Launches that differ in nothing but the lines that run: in sequences that repeat, and in others."""

    def one():
        launch()
        launch()

    def other():
        launch()

        launch()

    def both(is_first):
        if is_first:
            one()
        else:
            other()

    chance = random.Random(0)
    for n in range(100):
        both(n % 2)
    for n in range(100):
        both(n % 3 == 0)
        one()
    for _ in range(200):
        both(chance.randrange(2))


def executes_another():
    launch()
    os.execv(sys.argv[7], sys.argv[7:])


prepare(*told)
wait_for(start)
globals()[case]()
