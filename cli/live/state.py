"""Reads the spool of a recording that goes on, and makes of it what the view shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.cli.interactive.contents import Contents
from iaprof.cli.live.kernels import LiveKernel, LiveKernels
from iaprof.cli.live.sums import Launched, LaunchSums, StallSums
from iaprof.cli.terminal.listing_lines import lines
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.formats.wire.launches import LAUNCH
from iaprof.gpu.vendors import REASONS
from iaprof.record.spool import Frame, FrameKind, SpoolReader
from iaprof.report.gpu.module import NO_BINARY, GpuKernel, GpuModuleLoader
from iaprof.report.gpu.source_files import NO_SOURCES
from iaprof.report.join.candidates import NOT_RECORDED
from iaprof.report.join.streams import Stream, reasons_of, streams
from iaprof.report.views.annotation import listings

KINDS = (FrameKind.HEADER, FrameKind.APPEND, FrameKind.STALLS, FrameKind.LAUNCHES, FrameKind.KERNEL)
NOT_READ = "[not read yet]"
OTHERS = "[others: there were too many]"
_DECODED = 3  # kernels whose instructions are read in one refresh
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError, IndexError)


class LiveState:
    """What was recorded so far, as sums."""

    def __init__(self, spool: Path, loader: GpuModuleLoader) -> None:
        """Args: the spool, and what reads debug ELFs, in its own process."""
        self._spool = SpoolReader(spool)
        self._header: dict[str, Any] = {}
        self._streams: list[Stream] = []
        self._stalls = StallSums(REASONS)
        self._launches = LaunchSums()
        self._kernels = LiveKernels(loader)
        self._at: list[LiveKernel | None] = []  # the kernels of the last profile
        self._refreshed = time.monotonic()
        self.damaged = 0  # frames that could not be read

    @property
    def position(self) -> int:
        """What of the spool was read."""
        return self._spool.followed

    def clear(self) -> None:
        """Begins to count anew."""
        self._stalls.clear()

    def read(self) -> float:
        """Reads what was appended to the spool; returns the seconds since the last call."""
        self._launches.refresh()
        for frame in self._spool.follow(KINDS):
            try:
                self._add(frame)
            except (*_DAMAGE, CaptureError):
                self.damaged += 1
        self._stalls.merge()
        self._kernels.read()
        self._kernels.add_launches(self._launches.all.values())
        before, self._refreshed = self._refreshed, time.monotonic()
        return self._refreshed - before

    def _add(self, frame: Frame) -> None:
        if frame.kind is FrameKind.STALLS:
            if len(frame.payload) % (8 * frame.shape) or frame.shape != self._streams[frame.source].layout.words:
                raise ValueError("not whole records")
            words = np.frombuffer(frame.payload, np.uint64).reshape(frame.shape, -1)
            self._stalls.add(self._streams[frame.source], list(words))
        elif frame.kind is FrameKind.LAUNCHES:
            self._launches.add(np.frombuffer(frame.payload, LAUNCH))
        elif frame.kind is FrameKind.KERNEL:
            if json.loads(frame.payload[: frame.shape])["content"]:
                self._kernels.add_elf(frame.payload[frame.shape :])
        else:
            members = json.loads(frame.payload)
            if frame.kind is FrameKind.HEADER:
                self._header = {"streams": list(members["streams"])}
            else:
                self._header["streams"] += members.get("streams", [])
            self._streams = streams(self._header)
            if reasons_of(self._streams) != self._stalls.reasons:
                self._stalls = StallSums(reasons_of(self._streams))

    def contents(self, title: str, costs: str, seconds: float) -> Contents:
        """What the view shows; `seconds` since the last refresh."""
        profile = self._profile()
        launched = list(self._launches.all.values())
        found, where = self._kernels.at(np.array([each.address for each in launched], np.uint64))
        rates: dict[str, float] = {}
        for each, number in zip(launched, where.tolist(), strict=True):
            name = found[number].symbol if number >= 0 else each.name
            rates[name] = rates.get(name, 0.0) + each.recent / max(seconds, 1e-3)
        return Contents(title, profile, "kernel", listing=self._listing, launches=rates, costs=costs)

    def _profile(self) -> Profile:
        """The stalls so far, by instruction and reason; of a process where only one launches the kernel."""
        mask = self._streams[0].layout.address_mask if self._streams else 0
        address, counts = self._stalls.address, self._stalls.counts
        found, where = self._kernels.at(address, mask)
        self._decode(found, where, counts)
        owners = _owners(list(self._launches.all.values()))
        launches: dict[Launch | None, int] = {}
        codes: dict[Code, int] = {}
        launch, code = np.zeros(len(address), np.int64), np.zeros(len(address), np.int64)
        offset = address.copy()
        for number, kernel in [*enumerate(found), (-1, None)]:
            rows = np.flatnonzero(where == number)
            if kernel is None:
                code[rows] = codes.setdefault(Code(NO_BINARY, (), ()), len(codes))
                launch[rows] = launches.setdefault(None, len(launches))
                continue
            offset[rows] = (address[rows] - np.uint64(kernel.address & mask)) & np.uint64(mask)
            code[rows] = _codes(kernel, offset[rows], codes)
            owner = owners.get(kernel.address, Launch(NOT_RECORDED, 0, ()))
            launch[rows] = launches.setdefault(owner, len(launches))
        kernels: list[Kernel | None] = [Kernel(k.address, k.symbol, k.code.file if k.code else "") for k in found]
        where = np.where(where < 0, len(kernels), where)
        kernels.append(None)
        self._at = [*found, None]
        if self._stalls.others.any():
            others = codes.setdefault(Code(NO_BINARY, (OTHERS,), ()), len(codes))
            nobody = launches.setdefault(None, len(launches))
            where, launch, code = (
                np.append(each, new) for each, new in ((where, len(found)), (launch, nobody), (code, others))
            )
            offset = np.append(offset, np.uint64(0))
            counts = np.vstack([counts, self._stalls.others])
        none = np.zeros(len(where), np.int64)
        return Profile(
            list(launches), kernels, list(codes), none, launch, where, code, offset, counts.astype(np.uint64), none,
            self._stalls.reasons, (0.0,),
        )  # fmt: skip

    def _decode(self, found: list[LiveKernel], where: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Reads the instructions of the kernels that stall most, some in each refresh."""
        instruction_set = self._streams[0].instruction_set if self._streams else None
        inside = where >= 0
        samples = np.bincount(where[inside], counts.sum(axis=1)[inside], len(found))
        left = _DECODED
        for number in np.argsort(-samples).tolist():
            left -= self._kernels.decode(found[number], instruction_set)
            if left <= 0:
                return

    def _listing(self, profile: Profile, kernel: str, width: int) -> list[str]:
        """See contents.Listing."""
        return list(lines(listings(profile, [kernel], self._binary), NO_SOURCES, width, True))

    def _binary(self, kernel: int) -> GpuKernel | None:
        """The code of a kernel of the last profile, by index; None if it is unknown."""
        found = self._at[kernel] if kernel < len(self._at) else None
        return found.code if found else None


def _owners(launched: list[Launched]) -> dict[int, Launch]:
    """The process that launches each kernel, by address; where there are several, a label as in reports."""
    by_address: dict[int, dict[int, Launched]] = {}
    for each in launched:
        by_address.setdefault(each.address, {})[each.pid] = each
    found = {}
    for address, processes in by_address.items():
        if len(processes) == 1:
            only = next(iter(processes.values()))
            found[address] = Launch(only.comm, only.pid, ())
        else:
            found[address] = Launch(f"[ambiguous: {len(processes)} processes]", 0, ())
    return found


def _codes(kernel: LiveKernel, offsets: NDArray[np.uint64], codes: dict[Code, int]) -> NDArray[np.int64]:
    """The codes of a kernel's instructions at these offsets: int64[n]. Adds new ones to `codes`."""
    if kernel.code is None:
        mnemonic = NO_BINARY if kernel.outline is None else NOT_READ
        return np.full(len(offsets), codes.setdefault(Code(mnemonic, (kernel.symbol,), (0,)), len(codes)))
    found, which = kernel.code.codes_at(offsets)
    numbers = []
    for mnemonic, frames in found:
        functions = (kernel.symbol, *(frame.function for frame in frames[1:]))
        lines, files = (tuple(getattr(frame, what) for frame in frames) for what in ("line", "file"))
        numbers.append(codes.setdefault(Code(mnemonic, functions, lines, files), len(codes)))
    return np.array(numbers, np.int64)[which]
