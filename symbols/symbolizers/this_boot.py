"""Names that only the recorded machine has, and only until it reboots."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.symbols.files.symbol_lists import KernelSymbols
from iaprof.symbols.names.boot import is_same_boot, open_vdso
from iaprof.symbols.names.names import Module, ModuleKind, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries
from iaprof.symbols.symbolizers.generated import GeneratedCode


class ThisBoot:
    """A Symbolizer for the Linux kernel, the vDSO and perf maps, if the recorded machine has not rebooted since."""

    def __init__(
        self, header: dict[str, Any], binaries: Binaries, generated: GeneratedCode, everything: bool = False
    ) -> None:
        """Opens nothing yet.

        Args:
            header: of the capture.
            binaries: reads the vDSO.
            generated: reads perf maps.
            everything: name every function of the vDSO, not only the given addresses.
        """
        self._is_here = is_same_boot(header)
        clock = header.get("clock_end")
        end = clock.get("realtime_ns") if isinstance(clock, dict) else None
        self._end_ns = end if isinstance(end, int) else 0
        self._binaries, self._generated, self._everything = binaries, generated, everything

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized | None:
        """See Symbolizer."""
        if not self._is_here:
            return None
        try:
            match module.kind:
                case ModuleKind.KERNEL:
                    with open("/proc/kallsyms", "rb") as file:
                        return KernelSymbols(file, "/proc/kallsyms").name(module, addresses, times)
                case ModuleKind.VDSO:
                    if (fd := open_vdso()) is None:
                        return None
                    with contextlib.closing(os.fdopen(fd, "rb")):
                        return self._binaries.name(fd, addresses, everything=self._everything)
                case ModuleKind.GENERATED:
                    return self._name_generated(module.pid, addresses, times)
        except (IaprofError, OSError) as error:
            return Symbolized(problem=str(error))
        return None

    def _name_generated(self, pid: int, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized | None:
        path = f"/tmp/perf-{pid}.map"  # noqa: S108 (perf maps are there)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with contextlib.closing(os.fdopen(fd, "rb")):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
                return Symbolized(problem=f"{path} is not yours")
            if status.st_mtime_ns > self._end_ns:
                # Another process may have the pid by now.
                return Symbolized(problem=f"{path} was changed since the recording")
            return self._generated.name(fd, (), addresses, times)
