"""An export made by hand with every kind of content, for other programs' formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from iaprof.formats.export import About, CpuSamples, Export
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin
from unit.profiles import Row, counts, profile

INTERVALS = (100.0, 100.02, 100.04, 100.06)
HOSTILE = (
    "a\nb", "a;b", "\"quotes\" 'and' `ticks`", "<script>alert(1)</script>]]></style>", "\x1b[31mred", "\u202egnp.exe",
    "a\0b", " 12345", "#x", "", "-", "\\", "%s%n", "é\u2028\u0085", "x 9.5: y: z", "f (a) (b) (", "(", "\ud800",
    "operator+", "[lib so+0x1f]", "swap 1: 2: 3: 4:", "7: a: b:",
)  # fmt: skip

_ORIGINS = (
    Origin(CodeKind.C, "/usr/bin/app", "src/main.c", 12),
    Origin(CodeKind.CPP, "/usr/lib/libnn so.1", "nn/run.cpp", 40),
)
APP = Launch("app", 42, ("main", "nn::run(int)"), ("do_syscall_64",), origins=_ORIGINS)
AGAIN = Launch("app", 42, ("main",), origins=(Origin(CodeKind.C, "/usr/bin/app", "src/main.c", 15),))
OTHER = Launch("Web Content", 7, ("[libfoo.so+0x1f0]",), host="north")
MATMUL = Kernel(0x8000FFBE0000, "matmul", "src/matmul.cl")
SEND = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "src/vec.h"))
ROWS = (
    Row(0, APP, MATMUL, SEND, 0x10, counts(sbid=70, active=10), "card0"),
    Row(0, AGAIN, MATMUL, Code("mov", ("matmul",), (5,)), 0x20, counts(tdr=20), "card0"),
    Row(1, OTHER, MATMUL, SEND, 0x10, counts(send=5), "card1"),
    Row(3, None, None, Code("[no binary]", (), ()), 2**63 + 1, counts(control=3), "card1"),
    Row(3, APP, MATMUL, SEND, 0x30, counts(sbid=2), "card0"),
)
SAMPLES = 110
ABOUT = About(
    "north", "app --fast", "Battlemage", 1_700_000_000.5, 0.08, [("Recording", [("host", "north")])], ["loss"]
)


def export(rows: Sequence[Row] = ROWS, cpu: bool = True) -> Export:
    """An export of these rows, in intervals of 20 ms."""
    launches = [Launch("app", 42, ("main", "wait"), origins=_ORIGINS), Launch("swapper", 0, (), ("cpu_idle",))]
    samples = CpuSamples(launches, np.array([0, 1, 0]), np.array([0, 2, 3]), np.array([3, 2, 1]))
    return Export(profile(rows, INTERVALS), ABOUT, 0.02, cpu=samples if cpu else None)


def hostile() -> Export:
    """Hostile names, each with one sample more than the previous."""
    rows = []
    for number, name in enumerate(HOSTILE):
        launch = Launch(name, number, (name,), (name,), name, (Origin(CodeKind.C, name, name, 1),))
        kernel = Kernel(0x1000 * number, name, name)
        code = Code(name, (name, name), (1, 2), (name, name))
        rows.append(Row(number % 4, launch, kernel, code, number, counts(sbid=number + 1), name))
    return export(rows)


def per_interval(rows: Sequence[Row]) -> Counter[int]:
    """The number of samples of each interval."""
    found: Counter[int] = Counter()
    for row in rows:
        found[row.interval] += sum(row.counts)
    return found
