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

seen = set()


def tell(frame, event, _argument):
    if event == "call" and frame.f_back is not None:
        seen.add((frame.f_code, frame.f_back.f_code, frame.f_back.f_lineno))


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
        for callee, caller, line in list(seen):
            file.write(json.dumps([described(callee), described(caller), line]) + "\n")
