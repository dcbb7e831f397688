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


# On processors with AMX Linux has more state than gdb 13 knows of, and takes no less.
WRITES_NO_VECTORS = int(gdb.VERSION.split(".")[0]) < 14 and " amx_tile" in open("/proc/cpuinfo").read()
REGISTERS = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "rsp", "rip")
CALL = bytes.fromhex("480fae03 ffd0 480fae0b c3")  # fxsave64 (%rbx); call *%rax; fxrstor64 (%rbx); ret


def call(function, arguments):
    """Calls a function of the program, which stands at a breakpoint, from code that it writes over `_start`.

    gdb's own calls write vector registers, too, which fails where WRITES_NO_VECTORS. These registers must not change,
    as compilers know which ones a local function leaves as they are.
    """
    before = {name: int(gdb.parse_and_eval(f"(long)${name}")) for name in REGISTERS}
    code, saved = int(gdb.parse_and_eval("(long)&_start")), (before["rsp"] - 1024) // 64 * 64
    stack = saved - 64
    gdb.selected_inferior().write_memory(code, CALL)
    gdb.selected_inferior().write_memory(stack, struct.pack("<q", before["rip"]))
    set_registers(arguments | {"rax": function, "rbx": saved, "rsp": stack, "rip": code})
    gdb.execute("continue", to_string=True)  # to the same breakpoint, where it returns to
    result, here = (int(gdb.parse_and_eval(f"(long)${name}")) for name in ("rax", "rsp"))
    if here != stack + 8:
        raise gdb.GdbError("the call did not return")
    set_registers(before)
    return result & 0xFFFFFFFF


def set_registers(values):
    for name, value in values.items():
        gdb.execute(f"set ${name} = {value}")


def told(handle, what):
    """What clGetKernelInfo says."""
    function, host, size = (
        int(gdb.parse_and_eval(f"(long)&{name}")) for name in ("clGetKernelInfo", "host", "told_bytes")
    )
    if WRITES_NO_VECTORS:
        result = call(function, {"rdi": handle, "rsi": what, "rdx": ROOM, "rcx": host, "r8": size})
    else:
        arguments = f"(void *){handle}, {what}, (unsigned long){ROOM}, (void *){host}, (void *){size}"
        result = int(
            gdb.parse_and_eval(f"((int (*)(void *, int, unsigned long, void *, void *)){function})({arguments})")
        )
    assert result == 0
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
