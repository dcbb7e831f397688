"""`iaprof check`: finds out what recording needs and lacks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.cli.terminal.stdout import utf8_stdout

if TYPE_CHECKING:
    from iaprof.gpu.vendor import Vendor
    from iaprof.record.checks.result import Check

EXAMPLES = """\b
Examples:
  sudo iaprof check                       can this machine record?
  sudo iaprof check -o /data/cap.parquet  and is there room for the capture?
  sudo iaprof check --json | jq '.checks[] | select(.level != "ok")'
"""
_COLOURS = {"ok": "32", "warning": "33", "problem": "1;31"}
_MARGIN = " " * 11
_NAME_WIDTH = 15
_NARROWEST, _WIDEST = 60, 100


def check(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The capture that you want to write: check its folder."),
    ] = Path("iaprof.parquet"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine can record.

    Each line is ok, a warning (something will be missing from the capture) or a problem (recording cannot work),
    with the command that fixes it, if there is one. Changes nothing. The exit code is 1 if there is a problem.
    """
    with utf8_stdout():
        works = _answer(_checks(output.absolute().parent), as_json)
    if not works:
        raise typer.Exit(IaprofError.exit_code)


def _answer(checks: Iterator[Check], as_json: bool) -> bool:
    """Prints the checks; returns whether recording can work."""
    from iaprof.record.checks.result import Level

    found = []
    printer = _Printer()
    for each in checks:
        found.append(each)
        if not as_json:
            printer.show(each)
    levels = Counter(each.level for each in found)
    works = not levels[Level.PROBLEM]
    if as_json:
        print(json.dumps({"works": works, "checks": [_as_dict(each) for each in found]}, indent=2))
    else:
        printer.show_sum(levels[Level.PROBLEM], levels[Level.WARNING])
    return works


def _checks(folder: Path) -> Iterator[Check]:
    # Imported here, so that `iaprof report` loads nothing of the recorder.
    from iaprof.record.checks import bpf, gpus, kernel, libraries, limits, nvidia, pythons, stacks
    from iaprof.record.checks.result import Level

    present = gpus.vendors()
    intel = present != {"nvidia"}  # where there is no GPU, that of Intel is missing
    drivers = gpus.drivers() if intel else []
    yield from kernel.checks(any(driver.name == "xe" for driver in drivers))
    yield from bpf.checks()
    yield from limits.checks(folder, [driver.paranoid for driver in drivers])
    works = False
    for check in gpus.checks():
        works = works or check.level is Level.OK
        yield check
    yield from nvidia.checks(alone=not works)
    if intel:
        yield from libraries.checks()
    yield from stacks.checks()
    yield from pythons.checks()
    for vendor in _needed_decoders(present):
        yield _decoder(vendor)


def _needed_decoders(present: Set[str]) -> list[Vendor]:
    """Returns the vendors whose decoder is checked: those with GPUs here, or with a decoder; without any, the first."""
    from iaprof.gpu.vendors import VENDORS

    return [each for each in VENDORS if each.name in present or each.installed_decoder()] or [*VENDORS[:1]]


def _decoder(vendor: Vendor) -> Check:
    """Checks that a vendor's decoder works in its sandbox, with an instruction of each instruction set."""
    from iaprof.record.checks.result import Check, Level, install_command
    from iaprof.report.gpu.decoder import DecodeError, Decoder, DecoderUnavailable, gpu_sandbox
    from iaprof.sandbox.parent import SandboxError

    known, refusal = [], ""
    names = vendor.sampled()
    with gpu_sandbox() as sandbox:
        for instruction_set in names:
            try:
                Decoder(instruction_set, sandbox).disasm(bytes(16))
            except DecodeError:
                pass  # zeros are no valid instruction there
            except (DecoderUnavailable, SandboxError) as error:
                refusal = str(error)
                continue
            known.append(instruction_set)
    group, mend = "Report", install_command(*vendor.decoder_packages)
    if not known:
        return Check(group, "decoder", Level.WARNING, f"reports made here name no instructions: {refusal}", mend)
    text = f"{vendor.decoder} decodes {', '.join(names[each] for each in known)}"
    if missing := [names[each] for each in names if each not in known]:
        return Check(group, "decoder", Level.WARNING, f"{text}; it is too old for {', '.join(missing)}", mend)
    return Check(group, "decoder", Level.OK, text)


def _as_dict(check: Check) -> dict[str, str]:
    return {
        "group": check.group,
        "name": clean(check.name),
        "level": check.level.value,
        "text": clean(check.text),
        "fix": clean(check.mend),
        "file": clean(check.file),
    }


class _Printer:
    """Prints each check as soon as its result is known, as some take a moment."""

    def __init__(self) -> None:
        self._group = ""
        terminal = sys.stdout.isatty()
        self._coloured = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        columns = shutil.get_terminal_size().columns if terminal else 80
        self._width = min(max(columns, _NARROWEST), _WIDEST)

    def show(self, check: Check) -> None:
        """Prints a check, and before the first of a group the group's heading."""
        if check.group != self._group:
            print(f"{'' if not self._group else chr(10)}{self._in_colour(check.group, '1')}")
            self._group = check.group
        level = check.level.value
        margin = _MARGIN + " " * (_NAME_WIDTH + 1)
        lines = _wrapped(clean(check.text), self._width - len(margin))
        name = clean(check.name)[:_NAME_WIDTH]
        print(f"  {self._in_colour(level, _COLOURS[level])}{' ' * (9 - len(level))}{name:{_NAME_WIDTH}} {lines[0]}")
        for line in lines[1:]:
            print(margin + line)
        for line, colour in ((clean(check.file), "2"), (f"$ {clean(check.mend)}" if check.mend else "", "36")):
            if line:  # not wrapped, so that it can be copied
                short = len(margin) + len(line) <= self._width
                print((margin if short else _MARGIN) + self._in_colour(line, colour))
        sys.stdout.flush()

    def show_sum(self, problems: int, warnings: int) -> None:
        """Prints the conclusion."""
        counts = [_count(problems, "problem"), _count(warnings, "warning")]
        counted = " and ".join(count for count in counts if count) or "no problems or warnings"
        text = f"Recording cannot work: {counted}." if problems else f"Recording can work: {counted}."
        print("\n" + self._in_colour(text, _COLOURS["problem" if problems else "ok"]))

    def _in_colour(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured else text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}" if number else ""
