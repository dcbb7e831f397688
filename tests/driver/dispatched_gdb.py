# SPDX-License-Identifier: Apache-2.0
"""Sourced by gdb: what Intel's OpenCL runtime says of each kernel of its own, when it is about to launch it.

It stops where the runtime puts kernels into commands, in the function that all kernels pass by, and asks the runtime's
public call for the kernel's name, GPU address and code. A line of JSON for each goes to the file OUTPUT. From the
environment: OPTIONS of the program; PLACES, offsets of that function in the file LIBRARY; and DISPATCH, where it finds
the kernels' handles.
"""

import json
import os
import struct

import gdb

LIBRARY, PLACES = os.environ["LIBRARY"], json.loads(os.environ["PLACES"])
DISPATCH = json.loads(os.environ["DISPATCH"])
NAME, ADDRESS, CODE = 0x1190, 0x10010, 0x407D  # CL_KERNEL_FUNCTION_NAME and NEO's own, as in opencl.c
ROOM = 1 << 20  # of `host`, which the program has


def number(address, size=8):
    return int.from_bytes(gdb.selected_inferior().read_memory(address, size).tobytes(), "little")


def told(handle, what):
    """What clGetKernelInfo says."""
    host, size = (int(gdb.parse_and_eval(name)) for name in ("(long)&host", "(long)&told_bytes"))
    arguments = f"(void *){handle}, {what}, (unsigned long){ROOM}, (void *){host}, (void *){size}"
    assert (
        int(gdb.parse_and_eval(f"((int (*)(void *, int, unsigned long, void *, void *))clGetKernelInfo)({arguments})"))
        == 0
    )
    return gdb.selected_inferior().read_memory(host, number(size)).tobytes()


def way():
    """The program's function from which it launches."""
    frame = gdb.newest_frame()
    while frame.older().name() != "copy_all":
        frame = frame.older()
    return frame.name()


def handles():
    argument = int(gdb.parse_and_eval("$rsi"))
    first, many = number(argument + DISPATCH["first"]), number(argument + DISPATCH["many"], 1)
    a, b = DISPATCH["kernel"]
    for which in range(many):
        yield number(number(first + which * DISPATCH["size"] + a) + b) + DISPATCH["offset"]


def main():
    gdb.execute("set confirm off")
    gdb.execute("set pagination off")
    gdb.execute("break copy_all")
    gdb.execute(f"run {os.environ['OPTIONS']} > printed")
    gdb.execute("delete")
    start = min(
        int(line.split("-")[0], 16)
        for line in open(f"/proc/{gdb.selected_inferior().pid}/maps")
        if line.rstrip().endswith(LIBRARY)
    )
    for place in PLACES:
        gdb.Breakpoint(f"*{start + place}", internal=True)
    with open(os.environ["OUTPUT"], "w") as output:
        while True:
            gdb.execute("continue")
            if not gdb.selected_inferior().pid:
                return
            for handle in handles():
                (address,) = struct.unpack("<Q", told(handle, ADDRESS))
                name = told(handle, NAME).rstrip(b"\0").decode()
                kernel = {"way": way(), "name": name, "address": address, "code": told(handle, CODE).hex()}
                output.write(json.dumps(kernel) + "\n")


main()
