"""Interim."""
from __future__ import annotations
import os, stat
from collections.abc import Sequence
from pathlib import Path
from iaprof.symbols.binaries import Binaries, BinaryError
from iaprof.symbols.debuginfod import Debuginfod
from iaprof.symbols.modules import Module, ModuleKind
from iaprof.symbols.names import Named

class LocalFiles:
    def __init__(self, binaries: Binaries, symfs: Path | None, symbol_dirs: Sequence[Path], debuginfod: Debuginfod | None, everything: bool = False) -> None:
        self._b, self._e = binaries, everything
    def name(self, module, addresses, times):
        if module.kind is not ModuleKind.FILE: return None
        if module.build_id is None: return Named(problem="no build-id")
        try: fd = os.open(module.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as e: return Named(problem=str(e))
        try:
            if self._b.facts(fd).build_id != module.build_id: return Named(problem="other build")
            return self._b.name(fd, addresses, everything=self._e)
        except BinaryError as e: return Named(problem=str(e))
        finally: os.close(fd)
