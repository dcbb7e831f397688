"""Annotated kernels as lines of text: instructions with their stalls, between source lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from iaprof.basics.clean import clean
from iaprof.cli.terminal.entry_names import short_python
from iaprof.cli.terminal.table import HEADING, WARM, WEAK, shortened
from iaprof.gpu.vendors import abbreviation, meanings

if TYPE_CHECKING:
    from iaprof.gpu.instructions import Wait
    from iaprof.report.gpu.module import GpuFrame, InstructionInfo
    from iaprof.report.gpu.source_files import SourceFiles
    from iaprof.report.views.annotation import Listing, Row

_SHOWN = 0.01  # of a kernel's samples: minimum for a reason's column, and for a line about a wait for instructions
_MOST_LAUNCHERS = 5  # shown
_WIDE = 100  # columns of a terminal that fits unabridged instructions
_NARROW = 46  # columns for offset, samples and an instruction
_MAIN_REASONS = 3  # that a wide terminal shows in addition
_REASON = 6  # columns per reason at least
_HOT = 0.05  # of a kernel's samples: minimum share for colour
_SOURCE, _WAIT = "36", "33"  # styles, as in terminal/table.py
_DETAILS = re.compile(r"<[0-9;,]+>|\(W\) |\([0-9]+\|M[0-9]+\) ")  # regions such as r7<1;1,0>, and lanes: (W), (16|M0)
_COMPACTED = re.compile(r" *\{Compacted\}|(?<=\{)Compacted,")


def lines(listings: Sequence[Listing], sources: SourceFiles, width: int | None, colours: bool) -> Iterator[str]:
    """The annotated kernels as lines.

    Args:
        listings: the kernels.
        sources: their source files.
        width: of the terminal, columns; None for no limit.
        colours: whether to use styles.
    """
    shown: dict[str, None] = {}  # the reasons
    for number, listing in enumerate(listings):
        if number:
            yield ""
        printer = _Printer(listing, sources, width, colours)
        yield from printer.lines()
        shown.update(dict.fromkeys(printer.reasons))
    if shown:
        yield ""
    for reason, meaning in zip(shown, meanings(list(shown)), strict=True):
        name = "" if abbreviation(reason) == reason else f"{reason}: "
        yield _cut(f"{abbreviation(reason).upper():>7}  {name}{meaning}", width)


class _Printer:
    """Prints an annotated kernel."""

    def __init__(self, listing: Listing, sources: SourceFiles, width: int | None, colours: bool) -> None:
        self._listing = listing
        self._sources = sources
        self._width = width
        self._colours = colours
        self._by_offset = {row.instruction.offset: row.instruction for row in listing.rows}
        order = sorted(range(len(listing.reasons)), key=lambda at: -listing.counts[at])
        main = [at for at in order if listing.counts[at] >= max(_SHOWN * listing.samples, 1)]
        names = [abbreviation(listing.reasons[at]).upper() for at in main]
        widths = [max(_REASON, len(name) + 1) for name in names]
        room = sum(widths)
        if width is not None:
            room = min(max(width - _NARROW, 0), _MAIN_REASONS * _REASON) // _REASON + max(width - _WIDE, 0) // _REASON
            room *= _REASON
        fitting = [end <= room for end in accumulate(widths)]
        self._reasons = list(compress(main, fitting))
        self._heads, self._widths = list(compress(names, fitting)), list(compress(widths, fitting))

    @property
    def reasons(self) -> list[str]:
        """The reasons that have a column, in their order."""
        return [self._listing.reasons[at] for at in self._reasons]

    def lines(self) -> Iterator[str]:
        """A summary of the kernel, then its instructions."""
        listing = self._listing
        yield self._styled(self._fitting(listing.symbol), HEADING)
        if listing.file:
            yield self._fitting(listing.file)
        launches = _counted(listing.launches, "launch") if listing.launches else "no launch recorded"
        share = f"{_counted(listing.samples, 'sample', 's')}, {100 * listing.share:.1f} % of all"
        width = f"; SIMD{listing.simd}" if listing.simd else ""
        yield f"{share}; {_counted(listing.processes, 'process')}, {launches}{width}"
        yield from self._launchers()
        yield ""
        reasons = "".join(f"{head:>{width}}" for head, width in zip(self._heads, self._widths, strict=True))
        yield self._styled(f"{'SAMPLES':>9}{'%':>6}{reasons}  {'OFFSET':>7}  INSTRUCTION", HEADING)
        yield f"{self._numbers(listing.counts)}  {'':>7}  (all)"
        before: tuple[GpuFrame, ...] = ()
        for row in listing.rows:
            yield from self._source(before, row.instruction.frames)
            before = row.instruction.frames
            yield self._row(row)
            yield from self._waits(row)

    def _launchers(self) -> Iterator[str]:
        """The functions that launched the kernel; nothing if all are unknown."""
        launchers = self._listing.launchers
        if all(name.startswith("[") for name, _ in launchers):
            return
        if len(launchers) == 1:
            yield "launched by " + self._fitting(self._called(launchers[0][0]), 12)
            return
        yield "launched by"
        for name, samples in launchers[:_MOST_LAUNCHERS]:
            share = f"{100 * samples / max(self._listing.samples, 1):.1f} %"
            yield f"{share:>9}  " + self._fitting(self._called(name), 11)
        if (more := len(launchers) - _MOST_LAUNCHERS) > 0:
            yield f"{'':11}and {_counted(more, 'more', '')}"

    def _called(self, launcher: str) -> str:
        return launcher if self._width is None else short_python(launcher)

    def _source(self, before: tuple[GpuFrame, ...], frames: tuple[GpuFrame, ...]) -> Iterator[str]:
        """Where the following instructions are from, as far as it is not where those before them are."""
        functions = [frame.function for frame in frames[1:]]
        if functions != [frame.function for frame in before[1:]]:
            yield self._styled(self._cut(f"-- in {' > '.join((frames[0].function, *functions))}"), WEAK)
        last = frames[-1]
        if last.line and (not before or (last.file, last.line) != (before[-1].file, before[-1].line)):
            text = self._sources.line(last.file, last.line)
            yield self._styled(self._cut(f"{_place(last)}{f'  {text}' if text else ''}"), _SOURCE)

    def _numbers(self, counts: Sequence[int]) -> str:
        """The columns: samples, their share of the kernel's, and shares by reason."""
        samples = sum(counts)
        shares = [samples, *(counts[at] for at in self._reasons)]
        percents = [f"{100 * each / self._listing.samples:.1f}" for each in shares]
        shown = [text if text != "0.0" else "" for text in percents]
        by_reason = "".join(f"{text:>{width}}" for text, width in zip(shown[1:], self._widths, strict=True))
        return f"{_count(samples):>9}{shown[0]:>6}{by_reason}"

    def _row(self, row: Row) -> str:
        listing, instruction = self._listing, row.instruction
        hottest = row is listing.hottest
        numbers = self._numbers(row.counts) if row.samples else " " * (15 + sum(self._widths))
        text = f"{numbers} {'>' if hottest else ' '}{instruction.offset:#7x}  "
        text += self._instruction(instruction, len(text))
        if not row.samples:
            return self._styled(text, WEAK)
        return self._styled(text, f"1;{WARM}" if hottest else WARM if row.samples >= _HOT * listing.samples else "")

    def _waits(self, row: Row) -> Iterator[str]:
        """Who is waited for, where such stalls are many; of distances, which the instruction itself says, very many."""
        counts = dict(zip(self._listing.reasons, row.counts, strict=True))
        for wait in row.waits:
            part = _SHOWN if wait.offsets else _HOT
            if sum(counts[reason] for reason in wait.reasons) >= max(part * self._listing.samples, 1):
                shown = [self._named(wait, self._by_offset[each]) for each in wait.offsets if each in self._by_offset]
                yield self._styled(self._cut(f"{'':>11}^ {wait.describe(shown)}"), _WAIT)

    def _named(self, wait: Wait, instruction: InstructionInfo) -> str:
        place = f" at {_place(instruction.frames[-1])}" if instruction.frames[-1].line else ""
        return f"0x{instruction.offset:x} {wait.opcode(instruction.text)}{place}"

    def _instruction(self, instruction: InstructionInfo, used: int) -> str:
        """The instruction's text with single spaces, abridged to the remaining width."""
        code, _, comment = instruction.text.partition("//")
        text = clean(_COMPACTED.sub("", " ".join(code.split())) or instruction.mnemonic)
        with_comment = f"{text}  // {clean(comment.strip())}" if comment else text
        if self._width is None or used + len(with_comment) <= self._width >= _WIDE:
            return with_comment
        return shortened(text if self._width >= _WIDE else _DETAILS.sub("", text), max(self._width - used, 1))

    def _cut(self, text: str) -> str:
        return _cut(clean(text), self._width)

    def _fitting(self, text: str, before: int = 0) -> str:
        """Shortens a text to the width that remains after `before` columns."""
        return clean(text) if self._width is None else shortened(clean(text), max(self._width - before, 1))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._colours and style else text


def _cut(text: str, width: int | None) -> str:
    """Truncates a line at its end: the beginning of a source line matters most."""
    if width is None or cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…"


def _place(frame: GpuFrame) -> str:
    return f"{os.path.basename(frame.file) or '?'}:{frame.line}"


def _counted(number: int, what: str, plural: str = "es") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _count(number: int) -> str:
    """A number with at most ten characters."""
    return f"{number:,}" if number < 10_000_000 else f"{number / 1e6:,.0f}M"
