# SPDX-License-Identifier: Apache-2.0
"""What SYCL's runtime says that it launched: Unified Runtime has a layer that writes a line per call to a file.

The kernels that oneMKL gives it are not created by it, and so have no names here: it has the empty name for them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

_CREATED = re.compile(
    r"<--- urKernelCreate\w*\(.*?"
    r"(?:\.pKernelName = 0x[0-9a-f]+ \((?P<name>.*?)\), .*)?"
    r"\.phKernel = 0x[0-9a-f]+ \((?P<kernel>0x[0-9a-f]+)\)\) -> UR_RESULT_SUCCESS"
)
_LAUNCHED = re.compile(r"<--- urEnqueueKernelLaunch\w*\(.*?\.hKernel = (?P<kernel>0x[0-9a-f]+).* -> UR_RESULT_SUCCESS")


def tracing(file: Path | str) -> dict[str, str]:
    """The environment with which the runtime writes `file`."""
    return {"UR_ENABLE_LAYERS": "UR_LAYER_TRACING", "UR_LOG_TRACING": f"level:info;output:file,{file};flush:info"}


def launched(file: Path, offset: int = 0) -> Counter[str]:
    """How often each kernel was launched, by name, in calls that are written behind `offset` bytes of the file."""
    names: dict[str, str] = {}
    launches: Counter[str] = Counter()
    position = 0
    with file.open() as lines:
        for line in lines:
            position += len(line)
            if created := _CREATED.search(line):
                names[created["kernel"]] = created["name"] or ""  # a handle's memory may have been another kernel's
            elif position > offset and (call := _LAUNCHED.search(line)):
                launches[names[call["kernel"]]] += 1
    return launches
