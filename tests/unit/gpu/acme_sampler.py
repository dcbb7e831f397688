"""The source of samples of Acme's GPUs, of which none exists: it makes up a read in each turn of the loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from iaprof.gpu.acme import code_object  # type: ignore[import-not-found]  # in the copy of iaprof

from iaprof.formats.wire.launches import LAUNCH
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.sources.source import Sampler
from iaprof.record.spool import FrameKind

PERIOD_NS = 1_000_000
MODULE = 7
CODE = bytes((1, 0, 9, 0)), bytes((2, 1, 0, 0)), bytes((3, 0, 0, 0))


class AcmeSampler(Sampler):
    """One GPU, whose samples are the same in each read: (function, offset, reason, count)."""

    SAMPLES = ((0, 0, 0, 1000), (0, 4, 1, 300_000), (1, 0, 2, 7), (1, 4, 1, 5))

    def __init__(self, options: Options) -> None:
        self.reads = 0

    def header(self) -> dict[str, Any]:
        return {"streams": [{"layout": "acme-sums", "ip_version": [9, 0, 0], "card": "acme0", "name": "Acme 9000"}]}

    def start(self, journal: Journal, loop: Loop) -> None:
        self._journal = journal
        elf = code_object(MODULE, {"scale": b"".join(CODE), "_Z3sumPi": b"".join((*CODE, b"\xff\0\0\0"))})
        about = {"pid": 5, "path": "acme.code", "digest": "", "size": len(elf), "content": True}
        described = json.dumps(about).encode()
        journal.write(FrameKind.KERNEL, described, elf, time=1, shape=len(described))
        launches = np.zeros(2, LAUNCH)
        launches["address"], launches["size"] = [MODULE << 32, (MODULE << 32) + (1 << 16)], [12, 16]
        launches["pid"], launches["tid"], launches["comm"], launches["time"] = 5, 5, b"app", 10
        journal.write(FrameKind.LAUNCHES, launches.tobytes(), time=10)
        loop.every(PERIOD_NS, self._sample)

    def _sample(self) -> None:
        function, offset, reason, count = np.array(self.SAMPLES, np.uint64).T
        words = np.stack([np.full(len(count), MODULE, np.uint64), function, offset, reason, count])
        now = 1000 + 100 * self.reads
        self._journal.totals.records += len(count)
        self._journal.write(FrameKind.STALLS, words.tobytes(), time=now, begin=now - 50, source=0, shape=len(words))
        self.reads += 1
