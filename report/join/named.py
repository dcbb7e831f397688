"""Makes a profile of joined stalls: looks up the names of each distinct site and instruction once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Code, Kernel, Launch, Profile
from iaprof.gpu.instructions import UNDECODABLE
from iaprof.report.gpu.module import NO_BINARY, NO_DECODER, NO_INSTRUCTION, GpuKernel
from iaprof.report.join.candidates import AMBIGUOUS
from iaprof.report.join.kernels import KernelNames, SampledKernels
from iaprof.report.join.placements import Placed, Placement, Site
from iaprof.report.join.shares import Joined
from iaprof.report.join.streams import Stream, reasons_of
from iaprof.symbols.cpu_frames import CpuFrames

NO_INSTRUCTIONS = (NO_BINARY, NO_DECODER, NO_INSTRUCTION, UNDECODABLE)
"""Mnemonics that stand for an unknown instruction."""
ANY_INSTRUCTION = "[any instruction]"
"""The mnemonic that stands for all instructions of a kernel together."""


def to_profile(
    joined: Joined,
    placed: Placed,
    kernels: SampledKernels,
    cpu: CpuFrames,
    known: Sequence[Stream],
    merged: bool = False,
) -> tuple[Profile, list[GpuKernel | None], NDArray[np.bool_]]:
    """Makes a profile of joined stalls.

    Args:
        joined: counts by site and address.
        placed: what the sites refer to.
        kernels: the sites' kernels, already read.
        cpu: the frames of the sites' stacks.
        known: the streams, by index.
        merged: put each kernel's instructions into one row.

    Returns:
        The profile, without intervals; the code of each of its kernels, None if unknown; and whether each of its rows
        has a decoded instruction: bool[n].
    """
    names = KernelNames(kernels)
    sites, launch = np.unique(joined.site, return_inverse=True)
    launches = [_launch(placed.sites[site], cpu, placed.operators) for site in sites.tolist()]
    # The profile has a kernel for each placement, and one for all sites without a placement.
    placement_of_site = np.array([-1 if s.placement is None else s.placement for s in placed.sites], np.int64)
    placements, kernel = np.unique(placement_of_site[joined.site], return_inverse=True)
    where = [placed.placements[index] if index >= 0 else None for index in placements.tolist()]
    codes: dict[Code, int] = {}
    code = np.zeros(len(joined.ip), np.int64)
    offset = joined.ip.copy()
    groups, group_of = np.unique(kernel * len(known) + joined.stream, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    ends = np.searchsorted(group_of[order], np.arange(len(groups) + 1))
    for index, group in enumerate(groups.tolist()):
        rows = order[ends[index] : ends[index + 1]]
        number, stream = divmod(group, len(known))
        placement = where[number]
        if placement is None:
            code[rows] = _unknown(placed, joined.site[rows], codes)
            continue
        if merged:
            code[rows] = codes.setdefault(Code(ANY_INSTRUCTION, (names.name(placement),), (0,)), len(codes))
            offset[rows] = 0
            continue
        offset[rows] = (joined.ip[rows] - np.uint64(placement.address)) & np.uint64(known[stream].layout.address_mask)
        code[rows] = _codes(placement, names, kernels, stream, offset[rows], codes)
    devices = list(dict.fromkeys(stream.device for stream in known))
    device_of = np.array([devices.index(stream.device) for stream in known], np.int64)
    instructions = np.array([each.mnemonic not in NO_INSTRUCTIONS for each in codes], bool)
    profile = Profile(
        launches,
        [None if each is None else _kernel(each, names, kernels) for each in where],
        list(codes),
        joined.interval,
        launch,
        kernel,
        code,
        offset,
        joined.counts,
        device_of[joined.stream] if known else joined.stream,
        reasons_of(known),
        [],
        devices or ("",),
        launch_counts=_launch_counts(placed, placements),
    )
    binaries = [kernels.loaded(each.kernel) if each is not None and each.kernel is not None else None for each in where]
    return profile, binaries, instructions[code] if len(code) else np.empty(0, bool)


def _launch_counts(placed: Placed, placements: NDArray[np.int64]) -> dict[int, int]:
    placement_of_site = np.array([-1 if site.placement is None else site.placement for site in placed.sites], np.int64)
    counts = np.zeros(len(placed.placements), np.int64)
    np.add.at(counts, placement_of_site[placed.site], placed.count)
    return {number: int(counts[index]) for number, index in enumerate(placements.tolist()) if index >= 0}


def _launch(site: Site, cpu: CpuFrames, operators: Sequence[tuple[str, ...]]) -> Launch | None:
    if site.placement is None and not site.comm:
        return None
    if site.note == AMBIGUOUS:
        return Launch(site.comm, 0, ())
    frames = cpu.frames(site.stack) if site.stack else ()
    inside = operators[site.operator]
    if not frames:
        return Launch(site.comm, site.pid, (site.note or "[stack lost]",), operators=inside)
    return Launch(site.comm, site.pid, frames, origins=cpu.origins(site.stack), operators=inside)


def _kernel(placement: Placement, names: KernelNames, kernels: SampledKernels) -> Kernel:
    file = kernels.loaded(placement.kernel).file if placement.kernel else ""
    return Kernel(placement.address, names.name(placement), file)


def _unknown(placed: Placed, sites: NDArray[np.int64], codes: dict[Code, int]) -> NDArray[np.int64]:
    """Returns the codes of sites without a placement, whose kernel is unknown or one of several: int64[n]."""
    kinds, kind_of = np.unique(sites, return_inverse=True)
    notes = [placed.sites[site].kernel_note for site in kinds.tolist()]
    numbers = [codes.setdefault(Code(NO_BINARY, (note,) if note else (), ()), len(codes)) for note in notes]
    return np.array(numbers, np.int64)[kind_of]


def _codes(
    placement: Placement,
    names: KernelNames,
    kernels: SampledKernels,
    stream: int,
    offsets: NDArray[np.uint64],
    codes: dict[Code, int],
) -> NDArray[np.int64]:
    """Returns the codes of a kernel's instructions at these offsets: int64[n]. Adds new ones to `codes`."""
    name = names.name(placement)
    if placement.kernel is None:
        return np.full(len(offsets), codes.setdefault(Code(NO_BINARY, (name,), (0,)), len(codes)))
    found, which = kernels.loaded_for(stream, placement.kernel).codes_at(offsets)
    numbers = []
    for mnemonic, frames in found:
        # The outermost function is the kernel itself: it keeps the name that it has everywhere else.
        functions = (name, *(frame.function for frame in frames[1:]))
        lines, files = (tuple(getattr(frame, what) for frame in frames) for what in ("line", "file"))
        numbers.append(codes.setdefault(Code(mnemonic, functions, lines, files), len(codes)))
    return np.array(numbers, np.int64)[which]
