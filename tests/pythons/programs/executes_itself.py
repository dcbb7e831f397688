"""Launches, then executes itself to do so from another function: STAGE LIBRARY ELF KERNEL OUTPUT START.

OUTPUT and the name of the function end in STAGE, 0 or 1: without a random layout all objects are where they were.
"""

import os
import sys

from launching import launch, prepare, wait_for

stage, library, elf, kernel, output, start = sys.argv[1:7]
names = {"launch": launch}
exec(compile(f"def stage_{stage}():\n    launch()\n", f"/stage_{stage}.py", "exec"), names)
prepare(library, elf, kernel, output + stage)
wait_for(start)
for _ in range(20):
    names[f"stage_{stage}"]()
if stage == "0":
    os.execv(sys.executable, [sys.executable, "-S", "-B", __file__, "1", library, elf, kernel, output, start])
