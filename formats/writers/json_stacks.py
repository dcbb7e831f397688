"""The profile as JSON for other programs, complete and untruncated."""

from __future__ import annotations

import json
from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import UNKNOWN_KERNEL, StackOptions
from iaprof.formats.stacks.frame_lists import launches_frames
from iaprof.formats.writers.writer import Writer


class JsonStacks(Writer):
    """One document: tables of stacks and kernels, and a row per instruction with its samples by reason."""

    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the document, rows one by one, as there may be many."""
        profile = export.profile
        stacks = launches_frames(profile.launches, options, ("cpu",)).texts(lambda frame: frame.text)
        launches = [
            {
                "process": launch.comm if launch else None,
                "pid": launch.pid if launch else None,
                "host": (launch.host or None) if launch else None,
                "stack": stack if launch else [],
            }
            for launch, stack in zip(profile.launches, stacks, strict=True)
        ]
        kernels = [
            {
                "name": kernel.symbol if kernel else UNKNOWN_KERNEL,
                "file": (kernel.file or None) if kernel else None,
                "address": kernel.address if kernel else None,
                "launches": profile.launch_counts.get(number, 0),
            }
            for number, kernel in enumerate(profile.kernels)
        ]
        codes = [
            {"mnemonic": code.mnemonic, "functions": code.functions, "lines": code.lines, "files": code.files}
            for code in profile.codes
        ]
        head = {
            "matched": profile.matched,
            **profile.stack_ends(),
            "intervals": list(profile.intervals),
            "launches": launches,
            "kernels": kernels,
            "codes": codes,
        }
        out.write(json.dumps(head)[:-1])
        out.write(', "rows": [')
        columns = (profile.interval, profile.launch, profile.kernel, profile.code, profile.offset)
        before = "\n"
        for interval, launch, kernel, code, offset, counts in zip(
            *(column.tolist() for column in columns), profile.counts.tolist(), strict=True
        ):
            row = {"interval": interval, "launch": launch, "kernel": kernel, "code": code, "offset": offset}
            row["samples"] = {reason: count for reason, count in zip(profile.reasons, counts, strict=True) if count}
            out.write(before + json.dumps(row))
            before = ",\n"
        out.write("]}\n")
