"""Launches in subinterpreters, below functions of other interpreters: with the words of launches.py.

A line of OUTPUT tells the frames of all interpreters on the thread's stack, the innermost first.
"""

import ctypes
import importlib
import json
import os
import sys
import threading

TIMES = 7
NAME = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"


def of_interpreter(frame):
    found = []
    while frame is not None:
        found.append([frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno])
        frame = frame.f_back
    return found


def tell(frame):
    with open(output, "a") as file:
        file.write(f"{threading.get_native_id()}\t{json.dumps(of_interpreter(frame) + outer)}\n")


def launch():
    tell(sys._getframe()), calls.launch()


def create():
    interpreters = importlib.import_module(NAME)
    return interpreters.create("legacy") if NAME == "_interpreters" else interpreters.create(isolated=False)


def run(interpreter, levels):
    """Runs this file in another interpreter, which starts `levels` more."""
    run_string = importlib.import_module(NAME).run_string
    run_string(interpreter, script(levels, of_interpreter(sys._getframe()) + outer))


def script(levels, frames):
    names = {"levels": levels, "words": words, "outer": frames}
    return f"given = {names!r}\nexec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'))"


class Inside:
    def method(self, levels):
        self.recurse(3)
        if levels:
            run(create(), levels - 1)
            self.recurse(1)

    def recurse(self, times):
        if times:
            launch()
            self.recurse(times - 1)


def plain(interpreter):
    for _ in range(6):
        run(interpreter, 1)
    launch()


def main():
    assert not calls.prepare(words[2].encode(), words[3].encode())
    while not os.path.exists(words[5]):
        threading.Event().wait(0.01)
    first = threading.Thread(target=launch)  # while there is one interpreter
    first.start()
    first.join()
    mine = create()
    # This thread's first launches: the interpreter's state is what the recorder knows of this thread.
    run(mine, 0)
    thread = threading.Thread(target=plain, args=(mine,))
    sys.setswitchinterval(1e-5)
    size = os.path.getsize(output)
    thread.start()
    while os.path.getsize(output) == size:
        pass
    # Since then, functions of that state run in another thread (until Python 3.12).
    while thread.is_alive():
        launch()
    for _ in range(TIMES):
        plain(mine)


is_main = "given" not in globals()
words, outer = (sys.argv, []) if is_main else (given["words"], given["outer"])  # noqa: F821
__file__ = words[0]
calls, output = ctypes.CDLL(words[1]), words[4]
if is_main:
    main()
else:
    Inside().method(given["levels"])  # noqa: F821
