"""The last line of a recording, like perf's: what was recorded, what is missing, and what it cost."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from iaprof.basics.clean import clean
from iaprof.basics.quantities import in_bytes
from iaprof.formats.header.launch_warnings import (
    NO_LAUNCHES,
    UNPROBED,
    no_launches_sentence as no_launches,
    unprobed_sentence as unprobed,
)
from iaprof.formats.header.stack_counts import NOUNS, python_sentences, recorded

MOST_LOSSES = 20  # listed


def say(text: str) -> None:
    """Prints a line on stderr; see `write`."""
    write(f"{text}\n")


def write(text: str) -> None:
    """Writes to stderr; ignores errors, as the command's work still counts after its terminal was closed."""
    if sys.stderr is None:  # closed at start
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # Keeps Python from writing the buffered rest again at exit, which would change the exit code.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def end_line(verb: str, output: Path, header: dict[str, Any], size: int) -> str:
    """The last line.

    Args:
        verb: `record` or `recover`.
        output: the capture.
        header: the capture's header.
        size: of the file, bytes.
    """
    totals = header.get("totals", {})
    parts = [
        f"wrote {in_bytes(size)} to {output}",
        f"{_count(totals, 'stalls', 'stall record')}",
        f"{_count(totals, 'launches', 'launch', 'launches')}",
        *([_count(totals, "executions", "execution") + " of command lists"] if totals.get("executions") else []),
        f"{_count(totals, 'stacks', 'stack')}",
        f"{_count(totals, 'modules', 'module')}",
        *_stack_ends(header),
        *python_sentences(header),
        f"lost: {losses(header)}",
    ]
    match header.get("cost"):
        case {"cpu_s": int() | float() as seconds, "peak_bytes": int() as peak}:
            parts.append(f"own cost: {seconds:.2f} s CPU recording, {in_bytes(peak)} peak memory")
    return clean(f"[ iaprof {verb}: {'; '.join(parts)} ]")


def say_end(verb: str, output: Path, header: dict[str, Any], size: int) -> None:
    """Prints `end_line`, and warnings about missing launches."""
    for line in (end_line(verb, output, header, size), *launch_warnings(header)):
        say(line)


def launch_warnings(header: dict[str, Any]) -> list[str]:
    """Warnings about missing launches, a line each."""
    stalls = header.get("totals", {}).get("stalls")
    texts = (unprobed(header.get(UNPROBED)), no_launches(header.get(NO_LAUNCHES), stalls))
    return [clean(f"iaprof: {text}") for text in texts if text]


def _stack_ends(header: dict[str, Any]) -> list[str]:
    """Where the stacks of launches end and, in short, those of CPU samples; empty if there are none."""
    ends = {kind: each for kind, each in recorded(header).items() if each.stacks}
    texts = [ends[kind].text(NOUNS[kind]) for kind in ("launches",) if kind in ends]
    texts += [ends[kind].short(NOUNS[kind]) for kind in ("cpu_samples",) if kind in ends]
    return [f"stacks: {'; '.join(texts)}"] if texts else []


def losses(header: dict[str, Any]) -> str:
    """The losses in a header (untrusted), or `nothing`."""
    texts = []
    found = header.get("losses")
    for loss in found if isinstance(found, list) else []:
        match loss:
            case {"source": str(source), "what": str(what), "count": int(count)}:
                texts.append(f"{count:,} {source} {what}")
            case {"source": str(source), "what": str(what), "events": int(events)}:
                times = f"{events:,} time{'s' if events != 1 else ''}"
                texts.append(f"{source} {what} ({times}, how much is unknown)")
            case _:
                texts.append("something that the header does not describe")
    if len(texts) > MOST_LOSSES:
        texts[MOST_LOSSES:] = [f"and {len(texts) - MOST_LOSSES:,} more"]
    return ", ".join(texts) or "nothing"


def _count(totals: dict[str, int], key: str, one: str, many: str = "") -> str:
    number = totals.get(key, 0)
    return f"{number:,} {one if number == 1 else many or one + 's'}"
