"""Compiler logs: how many cycles each kernel ideally takes, and its category.

A log can be any file, so reading one never raises: `problems` says what could not be read. The sizes of files and
lines and the numbers of tables and kernels are limited.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 256 << 20  # of a log
MOST_LINE_BYTES = 1 << 16
MOST_JSON_BYTES = 16 << 20
MOST_TABLES, MOST_KERNELS, MOST_FOLDERS = 1000, 1_000_000, 100_000
MOST_CYCLES = 1 << 53  # above it, float64 is not exact

TOTAL, OTHER, UNNAMED = "Total", "other", "NotAvailable"
UNKNOWN_PHASE = "UNKN"
PHASES = {"PREFILL": "TTFT", "DECODING": "ITL"}  # time to the first token, and between tokens

_KERNEL = re.compile(r"([_\-a-zA-Z\d]+) +(\d{1,20})\s*$", re.ASCII)
_TOTAL = re.compile(r"Total\s+(\d{1,20})\s*$", re.ASCII)
_IDEAL_CYCLES = "ideal_cycles.json"
_IGNORED = re.compile("Precompute|-LxPreload")


@dataclass
class IdealTable:
    """The kernels of a compiled graph."""

    phase: str = UNKNOWN_PHASE
    kernels: list[str] = field(default_factory=list)  # in the order of its lines; a name can come twice
    cycles: dict[str, int] = field(default_factory=dict)  # of kernels, at the core's frequency; 0 is left out
    categories: dict[str, str] = field(default_factory=dict)  # of kernels
    total: int = 0  # cycles, of the line Total

    @property
    def ideal_cycles(self) -> int:
        """The cycles of all kernels, or those of the line Total if there are no kernels."""
        return sum(self.cycles.get(kernel, 0) for kernel in self.kernels) if self.kernels else self.total

    def add(self, name: str, cycles: int) -> None:
        """Adds a line; what another line said of the same kernel stays."""
        if name == TOTAL:
            self.total = cycles
            return
        kernel, category = _split(name)
        if not kernel:
            return
        self.kernels.append(kernel)
        if cycles:
            self.cycles.setdefault(kernel, cycles)
        self.categories.setdefault(kernel, category)


@dataclass
class CompilerLog:
    """The content of a log."""

    tables: list[IdealTable] = field(default_factory=list)
    is_autopilot: bool = False  # the log has no cycles of single kernels, only totals
    problems: list[str] = field(default_factory=list)  # sentences


def read(path: str) -> CompilerLog:
    """Reads a log, or ideal cycles that Inductor's Spyre backend wrote: a folder, or a kernel's ideal_cycles.json."""
    log = CompilerLog()
    try:
        if os.path.isdir(path):
            _read_folder(path, log)
        elif path.endswith(".json") and os.path.isfile(path):
            _read_kernel(path, log)
        elif os.path.isfile(path):
            _read_log(path, log)
        else:
            log.problems.append(f"{path} is neither a file nor a folder.")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        log.problems.append(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")
    if not log.tables and not log.problems:
        log.problems.append(f"{path} has no table of ideal cycles.")
    return log


def _split(name: str) -> tuple[str, str]:
    """Splits the name in a line into kernel and category."""
    kernel, found, category = name.partition("-opCat")
    if found:
        return kernel, category.rpartition("-opCat")[2]
    return (name.removesuffix("-NA"), UNNAMED) if name.endswith("-NA") else (name, TOTAL)


def _read_log(path: str, log: CompilerLog) -> None:
    table: IdealTable | None = None
    phase = UNKNOWN_PHASE
    kernels = refused = 0
    for line in _lines(path, log):
        if "DSM-AutoPilot BEGIN" in line:
            log.is_autopilot = True
        elif line[0].isspace() and line.strip() in PHASES:
            phase = PHASES[line.strip()]
        elif " Ideal/Total Cycles " in line:
            table = IdealTable(phase)
        elif table is None:
            continue
        elif "====== Perf Summary End ======" in line:
            if len(log.tables) == MOST_TABLES:
                log.problems.append(f"{path} has more than {MOST_TABLES} tables; the others are not read.")
                return
            log.tables.append(table)
            table = None
        elif (found := _KERNEL.match(line) or _TOTAL.match(line)) and not _IGNORED.search(line):
            name, cycles = (found[1], int(found[2])) if found.re is _KERNEL else (TOTAL, int(found[1]))
            kernels += 1
            if cycles > MOST_CYCLES or kernels > MOST_KERNELS:
                refused += 1
                continue
            table.add(name, cycles)
    if table is not None:
        log.problems.append(f"{path} ends within a table, which is left out.")
    if refused:
        log.problems.append(f"{path} has {refused} lines with too many cycles, or too many kernels; they are left out.")


def _lines(path: str, log: CompilerLog) -> Iterator[str]:
    """Returns the lines of a file, none empty, until there are too many bytes. Long ones have no table's form."""
    left, is_rest = MOST_BYTES, False
    with open(path, "rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            left -= len(line)
            if left < 0:
                log.problems.append(f"{path} is larger than {MOST_BYTES >> 20} MiB; the rest is not read.")
                return
            was_rest, is_rest = is_rest, not line.endswith(b"\n")
            if not was_rest:
                yield line.decode("utf-8", "replace")


def _read_folder(path: str, log: CompilerLog) -> None:
    base = os.path.join(path, "inductor-spyre")
    if not os.path.isdir(base):
        log.problems.append(f"{path} has no folder inductor-spyre.")
        return
    folders = sorted(os.listdir(base))
    if len(folders) > MOST_FOLDERS:
        log.problems.append(f"{base} has more than {MOST_FOLDERS} folders; the others are not read.")
    table = IdealTable()
    for kernel in folders[:MOST_FOLDERS]:
        file = os.path.join(base, kernel, "perf", _IDEAL_CYCLES)
        if not os.path.isfile(file):
            continue
        _add_kernel(table, kernel, file, log)
    if table.kernels:
        log.tables.append(table)


def _read_kernel(path: str, log: CompilerLog) -> None:
    """Reads KERNEL/perf/ideal_cycles.json; a file elsewhere is called as its kernel."""
    folder = os.path.dirname(os.path.abspath(path))
    is_placed = os.path.basename(path) == _IDEAL_CYCLES and os.path.basename(folder) == "perf"
    kernel = os.path.basename(os.path.dirname(folder) if is_placed else path.removesuffix(".json"))
    table = IdealTable()
    _add_kernel(table, kernel, path, log)
    if table.kernels:
        log.tables.append(table)


def _add_kernel(table: IdealTable, kernel: str, path: str, log: CompilerLog) -> None:
    """Adds a kernel whose operations are in a file."""
    operations = _operations(path)
    if operations is None:
        log.problems.append(f"{path} is not a list of ideal cycles.")
        return
    cycles = min(sum(cycles for cycles, _ in operations), MOST_CYCLES)
    table.kernels.append(kernel)
    if cycles:
        table.cycles[kernel] = cycles
    table.categories[kernel] = max(operations, key=lambda each: each[0])[1] if operations else UNNAMED


def _operations(path: str) -> list[tuple[int, str]] | None:
    """Returns the cycles and categories of a kernel's operations; None if a file has another form."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_JSON_BYTES + 1)
        entries: Any = json.loads(text) if len(text) <= MOST_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entries, list):
        return None
    found = []
    for entry in entries:
        cycles = entry.get("ideal_cycles") if isinstance(entry, dict) else None
        if isinstance(cycles, bool) or not isinstance(cycles, int | float) or not 0 <= cycles <= MOST_CYCLES:
            return None
        category = entry.get("op_category")
        found.append((int(cycles), category if isinstance(category, str) else UNNAMED))
    return found
