"""iaprof text, as Intel's iaprof 2026.2 writes it: tab-separated lines that intern every string."""

from __future__ import annotations

from typing import IO

from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Gauges, Kernel, Launch, Profile, Row, Shape, clean

UNKNOWN_FILE = "[unknown file]"


class IaprofText:
    """Intel's own text format."""

    name = "iaprof"
    extensions: tuple[str, ...] = (".iaprof.txt", ".iaprof")
    description = "Intel's iaprof text, with intervals, for tools that read it"
    hides_cpython = False
    per_interval = True

    def write(self, profile: Profile, shape: Shape, out: IO[str]) -> None:
        """Writes interval after interval; each kernel of each launching place with its stalls below it."""
        strings = _Strings(out)
        current: int | None = None
        head: tuple[Launch | None, Kernel | None] | None = None
        for row in profile.rows:
            while current is None or current < row.interval:
                if current is not None:
                    _end_interval(profile.gauges.get(current), out)
                current = 0 if current is None else current + 1
                out.write(f"interval\t{current}\t{profile.intervals[current]:.6f}\n")
                head = None
            if (row.launch, row.kernel) != head:
                head = (row.launch, row.kernel)
                out.write(_kernel_line(row, strings))
            instruction = strings.id(row.instruction.mnemonic)
            counts = "\t".join(map(str, row.counts))
            out.write(f"eustall\t0x{row.instruction.offset:x}\t{instruction}\t{counts}\n")
        if current is not None:
            _end_interval(profile.gauges.get(current), out)


def _kernel_line(row: Row, strings: _Strings) -> str:
    launch, kernel = row.launch, row.kernel
    comm = strings.id(launch.comm if launch and launch.comm else UNKNOWN_PROCESS)
    frames = (*launch.stack, *(f"{frame}_[k]" for frame in launch.kernel_stack)) if launch else ()
    stack = strings.id(";".join(clean(frame, ";") for frame in frames) or UNKNOWN_PROCESS)
    file = strings.id(kernel.file if kernel and kernel.file else UNKNOWN_FILE)
    symbol = strings.id(kernel.symbol if kernel else UNKNOWN_KERNEL)
    address = kernel.address if kernel else 0  # offsets in an unknown kernel are addresses
    return f"kernel\t0x{address:x}\t{comm}\t{launch.pid if launch else 0}\t{stack}\t{file}\t{symbol}\n"


def _end_interval(gauges: Gauges | None, out: IO[str]) -> None:
    gauges = gauges or Gauges()
    out.write(f"metric\tfrequency-MHz\t{gauges.frequency_mhz:.0f}\nmetric\tbusy-percent\t{gauges.busy_percent:.0f}\n")


class _Strings:
    """Ids of strings; a string's line is written when it is first needed."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._ids: dict[str, int] = {}

    def id(self, text: str) -> int:
        text = clean(text)
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids) + 1
            self._out.write(f"string\t{known}\t{text}\n")
        return known
