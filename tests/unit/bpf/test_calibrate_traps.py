# SPDX-License-Identifier: Apache-2.0
"""Breakpoints at the calls of a library: its calls are noted, and it still works."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
#include <stdint.h>
__attribute__((noipa)) long doubled(void *object, long *numbers) { return *numbers * 2 + (object != 0); }
__attribute__((noipa)) long tripled(void *object, long number) { return number * 3 + (object != 0); }
__attribute__((noipa)) long both(void *object, void *other)
{
    long numbers[2048];
    numbers[0] = 20, numbers[1] = 22;
    return doubled(object, numbers) + tripled(object, 7) + doubled(other, numbers);
}
"""

# Prints the result of `both`, and for each call with an object as first argument: the called function, the second
# argument if it is small, and the first two words it points to. At the end breakpoints have no handler any more.
PROGRAM = """
import ctypes, json, os, struct, sys
library, *sys.path[:] = sys.argv[1:]
from iaprof.record.calibrate.search import Memory
from iaprof.record.calibrate.traps import Traps, TrapsError
memory = Memory()
loaded = ctypes.CDLL(library)
address = {ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value: name for name in ("doubled", "tripled", "both")}
loaded.both.restype = ctypes.c_long
if "--breakpoint" in sys.path:
    code = next(place for place, name in address.items() if name == "both")
    end = code + 1
    page = code & ~4095
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(8192), 7) == 0
    while ctypes.c_uint8.from_address(end).value != 0xE8:
        end += 1
    ctypes.c_uint8.from_address(end).value = 0xCC
objects = [ctypes.c_void_p(0x1000), ctypes.c_void_p(0x2000)]
with open(library, "rb") as file:
    content = file.read()
try:
    traps = Traps(memory, content, next(iter(address)))
except TrapsError as error:
    print(json.dumps({"problem": str(error)}), flush=True)
    os._exit(0)
given = []
for object in objects:
    calls = traps.calls(object.value, lambda: given.append(loaded.both(*objects)))
    given.append([
        (address[call.function], call.second if call.second < 100 else 0, struct.unpack("<2Q", words))
        for call in calls
        for words in [call.window[:16] or bytes(16)]
    ])
print(json.dumps(given), flush=True)
os._exit(0)
"""


def run(folder: Path, *options: str, link: str = "-Wl,--eh-frame-hdr") -> object:
    (folder / "source.c").write_text(SOURCE)
    library = folder / "library.so"
    command = ("cc", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", link, "source.c", "-o", library)
    subprocess.run(command, cwd=folder, check=True)
    words: list[str | Path] = [sys.executable, "-I", "-c", PROGRAM, library, *filter(None, sys.path), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_calls_with_an_argument_are_seen(tmp_path: Path) -> None:
    result = 20 * 2 + 1 + 7 * 3 + 1 + 20 * 2 + 1

    assert run(tmp_path) == [
        result,
        [["doubled", 0, [20, 22]], ["tripled", 7, [0, 0]]],
        result,
        [["doubled", 0, [20, 22]]],
    ]


@pytest.mark.parametrize(
    ("options", "link", "problem"),
    [
        ((), "-Wl,--no-eh-frame-hdr", "it does not say where its functions begin"),
        (("--breakpoint",), "-Wl,--eh-frame-hdr", "somebody has breakpoints in it"),
    ],
)
def test_obstacles_are_reported(tmp_path: Path, options: tuple[str, ...], link: str, problem: str) -> None:
    assert run(tmp_path, *options, link=link) == {"problem": problem}
