# SPDX-License-Identifier: Apache-2.0
"""Runs a program, and tells which function called which from which line: OUTPUT PROGRAM [ARGUMENT...].

A line of OUTPUT.PID for each: [[FILE, QUALIFIED NAME, FIRST LINE] of the callee, that of the caller, LINE]. Calls in
threads that C made are not seen, nor those at the interpreter's end.
"""

import json
import os
import runpy
import sys
import threading

seen = {}  # by identity: code objects of different files may be equal


def tell(frame, event, _argument):
    back = frame.f_back
    if event == "call" and back is not None:
        seen[id(frame.f_code), id(back.f_code), back.f_lineno] = frame.f_code, back.f_code, back.f_lineno


def described(code):
    return code.co_filename, code.co_qualname, code.co_firstlineno


output, program = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(program))
threading.setprofile(tell)
sys.setprofile(tell)
try:
    runpy.run_path(program, run_name="__main__")
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    with open(f"{output}.{os.getpid()}", "w") as file:
        for callee, caller, line in list(seen.values()):
            file.write(json.dumps([described(callee), described(caller), line]) + "\n")
