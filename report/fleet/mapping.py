"""Makes the profile of a capture: the step that a fleet's workers do for each capture."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.dictionaries import rows_equal
from iaprof.formats.capture.merged import UNKNOWN_WALL, start_wall_ns
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Code, Launch, Origin, Profile
from iaprof.gpu.instructions import InstructionSet
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.facts import Report
from iaprof.report.fleet.samples import HashedKernel, Prefixes, Rows, fork_of
from iaprof.report.fleet.segment import Segment
from iaprof.report.fleet.sources import Source
from iaprof.report.fleet.totals import LaunchedKernel, Lost, Summary
from iaprof.report.gpu.module import GpuModule, GpuModuleLoader
from iaprof.report.inventory import inventory
from iaprof.report.join.selection import begun_ns, length_ns
from iaprof.report.parts import build_parts
from iaprof.report.profile import ReportOptions
from iaprof.report.views.difference import without_address
from iaprof.symbols.symbolizers.binaries import Binaries

# What kubelet names the cgroup of a pod, one part of a path:
#   kubepods/pod<uid>, kubepods/burstable/pod<uid>                      cgroupfs driver
#   kubepods-pod<uid>.slice, kubepods-besteffort-pod<uid>.slice         systemd driver, which writes - in a uid as _
#   kubelet-kubepods-burstable-pod<uid>.slice                           with a root cgroup for kubelet, as in kind
# A pod that kubelet reads from a file has a hash in place of a UUID, without dashes.
_UID = r"([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_OF_SYSTEMD = re.compile(rf"(?:[a-z0-9_]{{1,64}}-)?kubepods(?:-burstable|-besteffort)?-pod{_UID}\.slice")
_OF_CGROUPFS = re.compile(rf"(?:^|/)kubepods(?:/burstable|/besteffort)?/pod{_UID}(?=/|\Z)")
_LONGEST_CGROUP = 4096  # characters of a path, PATH_MAX of limits.h

_MOST_BYTES = 64 << 20  # of the modules that are remembered; what is made of them takes about as much


def pod(cgroup: str) -> str | None:
    """Returns the uid of the pod of a cgroup, with dashes; of a pod in a pod, the inner one's. None outside of pods."""
    if len(cgroup) > _LONGEST_CGROUP or "kubepods" not in cgroup:
        return None
    found = [(match.start(1), match[1]) for match in _OF_CGROUPFS.finditer(cgroup)]
    at = 0
    for name in cgroup.split("/"):
        if match := _OF_SYSTEMD.fullmatch(name):
            found.append((at, match[1]))
        at += len(name) + 1
    return max(found)[1].replace("_", "-") if found else None


class RememberedModules(GpuModuleLoader):
    """A loader that remembers what it has read."""

    def __init__(self) -> None:
        """Remembers nothing yet."""
        super().__init__()
        self._read: OrderedDict[tuple[object, ...], tuple[frozenset[int] | None, GpuModule, int]] = OrderedDict()
        self._bytes = 0

    def load(
        self,
        elf: bytes,
        instruction_set: InstructionSet | None,
        only: Collection[int] | None = None,
        texts: bool = True,
    ) -> GpuModule:
        """See GpuModuleLoader."""
        key = hashlib.sha256(elf).digest(), instruction_set, texts, only is not None and not only
        wanted = None if only is None else frozenset(only)
        if key in self._read:
            there, module, _ = self._read[key]
            if there is None or (wanted is not None and wanted <= there):
                self._read.move_to_end(key)
                return module
            wanted = None if wanted is None else wanted | there
            self._forget(key)
        module = super().load(elf, instruction_set, wanted, texts)
        if not module.problems:
            self._read[key] = wanted, module, len(elf)
            self._bytes += len(elf)
            while self._bytes > _MOST_BYTES:
                self._forget(next(iter(self._read)))
        return module

    def _forget(self, key: tuple[object, ...]) -> None:
        self._bytes -= self._read.pop(key)[2]


_T = TypeVar("_T", bound=Hashable)
_Ints = NDArray[np.int64]
_SEVERAL = "[several]"


@dataclass(frozen=True)
class MapOptions:
    """What a profile depends on besides its capture."""

    report: ReportOptions = ReportOptions()  # noqa: RUF009 (it is frozen)
    symbols: SymbolOptions = SymbolOptions()  # noqa: RUF009 (it is frozen)


class Mapper:
    """Makes profiles; one sandboxed child reads the GPU modules of all captures."""

    def __init__(self, options: MapOptions) -> None:
        """Starts nothing yet."""
        self._options = options
        self._launches: dict[Launch | None, int] = {}
        self._kernels: dict[HashedKernel | None, int] = {}
        self._codes: dict[Code, int] = {}
        self._devices: dict[str, int] = {}
        self._reasons: dict[str, int] = {}

    def segment(self, sources: Sequence[tuple[Source, str]]) -> Segment:
        """Makes the profiles of captures.

        Args:
            sources: each capture, and the key of its profile.

        Returns:
            The profiles. A capture that cannot be reported has a Summary with its problem, and no rows.
        """
        summaries: list[Summary] = []
        found: list[Rows] = []
        with RememberedModules() as modules, Binaries() as binaries:
            for source, key in sources:
                modules.begin_capture()
                try:
                    of_capture = list(self._parts(source, key, modules, binaries, len(summaries)))
                except (IaprofError, MemoryError) as error:
                    why = str(error) or f"{source.shown} needs more memory than a worker may take"
                    of_capture = [(Summary(source.shown, key, problem=clean(why)), None)]
                summaries += [summary for summary, _ in of_capture]
                found += [rows for _, rows in of_capture if rows is not None]
        width = len(self._reasons)
        padded = [each.with_counts(range(each.counts.shape[1]), width) for each in found]
        rows = Rows.concatenated(padded) if padded else Rows.none(width)
        return Segment(
            rows, list(self._launches), list(self._kernels), list(self._codes), list(self._devices),
            list(self._reasons), captures=summaries,
        )  # fmt: skip

    def _parts(
        self, source: Source, key: str, loader: GpuModuleLoader, binaries: Binaries, first: int
    ) -> Iterator[tuple[Summary, Rows | None]]:
        with source.opened() as opened:
            capture = CaptureReader(opened)
            for number, part in enumerate(capture.parts, first):
                label = clean(part.label) if capture.is_merged else ""
                options = self._options.report
                if options.interval_s and options.selection.time_range is None:
                    options = replace(options, start_ns=_aligned_start(part, int(options.interval_s * 1e9)))
                report = build_parts(part, loader, options, self._options.symbols, binaries=binaries)
                summary = replace(self._summary(part, report), file=source.shown, key=key, part=label)
                yield summary, self._rows(part, report, number, options)

    def _summary(self, part: CaptureReader, report: Report) -> Summary:
        """Returns the summary, but for the capture's name and key."""
        (described,) = inventory(part).parts
        facts = report.facts
        gpus = dict.fromkeys(stream.name or stream.generation for stream in described.streams)
        return Summary(
            "",
            "",
            host=clean(described.host),
            labels={clean(name): clean(value) for name, value in described.labels.items()},
            begun_ns=_wall_ns(part),
            seconds=length_ns(part.header) / 1e9,
            command=clean(shlex.join(described.command)),
            gpus=clean(", ".join(filter(None, gpus))),
            records=facts.records,
            samples=facts.stalls,
            active=facts.active,
            unknown_kernel=facts.unknown_kernel,
            no_launch=facts.no_launch,
            matched=astuple(facts.matched),
            whole=facts.whole.to_json() | {"processes": []},
            python=facts.python.to_json(),
            energy_nj=() if facts.energy is None else astuple(facts.energy),
            losses=tuple(Lost(clean(each.source), clean(each.what), each.count) for each in described.losses),
            problems=tuple(
                (clean(sentence), clean(modules[0]), len(modules)) for sentence, modules in facts.problems.items()
            ),
            warnings=tuple(map(clean, described.warnings)),
            launched=tuple(_launched(report)),
        )

    def _rows(self, part: CaptureReader, report: Report, number: int, options: ReportOptions) -> Rows:
        """Returns the profile's rows with the numbers of the whole segment."""
        profile = report.profile
        launches = _common(profile.launches, _containers(part))
        numbers = {
            "launch": _numbers(launches, self._launches),
            "kernel": _numbers(_hashed(report), self._kernels),
            "code": _numbers([_plain_code(code) for code in profile.codes], self._codes),
            "device": _numbers([_plain(device) for device in profile.devices], self._devices),
        }
        places = _numbers(list(profile.reasons), self._reasons)
        wall, begun = _wall_ns(part), begun_ns(part.header)
        first = wall if options.start_ns is None else options.start_ns - begun + wall
        # In whole ns, as the report divides the time: seconds as floats would put some into the interval before.
        starts = first + profile.interval.astype(np.int64) * int(options.interval_s * 1e9)
        if options.interval_s and part.groups("sample"):  # imported: intervals of the other tool, of any length
            told = np.array([round(start * 1e9) - begun + wall for start in profile.intervals] or [wall], np.int64)
            starts = told[np.minimum(profile.interval, len(told) - 1)].astype(np.int64)
        own = Rows(
            np.full(len(profile), number, np.int64),
            profile.launch,
            profile.kernel,
            profile.code,
            profile.device,
            profile.offset.astype(np.int64),
            starts,
            _forks(profile, launches),
            profile.counts.astype(np.int64),
            np.zeros(len(profile), np.int64) if profile.energy is None else profile.energy,
            np.zeros(len(profile), np.int64) if profile.divided is None else profile.divided.astype(np.int64),
        )
        return own.renumbered(numbers).with_counts(places.tolist(), len(self._reasons)).summed()


def _numbers(values: Sequence[_T], known: dict[_T, int]) -> NDArray[np.int64]:
    """Returns the number of each value, and gives new values the next ones: int64[n]."""
    return np.array([known.setdefault(value, len(known)) for value in values], np.int64)


def _common(launches: Sequence[Launch | None], containers: Mapping[int, tuple[str, str]]) -> list[Launch | None]:
    """Returns launches as all captures have them, without what differs between two runs, and as a segment holds them.

    Args:
        launches: those of a capture.
        containers: the names of container and pod, by pid.
    """
    plain = cache(_plain)  # stacks share few frames
    plain_frame = cache(lambda frame: _plain(without_address(frame)))
    plain_origin = cache(lambda origin: Origin(origin.kind, _plain(origin.module)))

    def common(launch: Launch) -> Launch:
        kernel_stack, operators = (tuple(map(plain, each)) for each in (launch.kernel_stack, launch.operators))
        stack, origins = tuple(map(plain_frame, launch.stack)), tuple(map(plain_origin, launch.origins))
        place = containers.get(launch.pid, ("", ""))
        return Launch(plain(launch.comm), 0, stack, kernel_stack, "", origins, operators, *place)

    return [launch and common(launch) for launch in launches]


def _forks(profile: Profile, launches: Sequence[Launch | None]) -> NDArray[np.int64]:
    """Returns the fork of each row (samples.py), also of rows of the same launch and kernel that are not divided.

    Args:
        profile: of a capture.
        launches: its launches, as all captures have them.
    """
    forks = np.zeros(len(profile), np.int64)
    if profile.divided is None or not profile.divided.any():
        return forks
    pairs, pair = np.unique(profile.kernel * len(launches) + profile.launch, return_inverse=True)
    is_divided = np.bincount(pair, profile.divided, len(pairs)) > 0
    kernel, launch = np.divmod(pairs, len(launches))
    prefixes = Prefixes()
    numbers = {at: prefixes.of(launched) for at in set(launch[is_divided].tolist()) if (launched := launches[at])}
    stacks: dict[int, list[_Ints]] = {}
    for of_kernel, at in zip(kernel[is_divided].tolist(), launch[is_divided].tolist(), strict=True):
        stacks.setdefault(of_kernel, []).append(numbers.get(at, np.zeros(0, np.int64)))
    fork_of_kernel = {of_kernel: fork_of(those) for of_kernel, those in stacks.items()}
    of_pair = np.array([fork_of_kernel.get(each, 0) for each in kernel.tolist()], np.int64)
    return np.where(is_divided, of_pair, 0)[pair]


def _plain(text: str) -> str:
    """Returns a text as Parquet can hold it, without line breaks and tabs, which separate a segment's frames."""
    if text.isprintable():
        return text
    escaped = text.replace("\n", "\\x0a").replace("\t", "\\x09")
    return escaped.encode("utf-8", "backslashreplace").decode()  # lone surrogates


def _plain_code(code: Code) -> Code:
    functions, files = (tuple(map(_plain, each)) for each in (code.functions, code.files))
    return Code(_plain(code.mnemonic), functions, code.lines, files)


def _hashed(report: Report) -> list[HashedKernel | None]:
    found: list[HashedKernel | None] = []
    for number, kernel in enumerate(report.profile.kernels):
        binary = report.binary(number)
        hash_ = binary.fingerprint if binary is not None else ""
        found.append(None if kernel is None else HashedKernel(_plain(kernel.symbol), _plain(kernel.file), hash_))
    return found


def _launched(report: Report) -> Iterator[LaunchedKernel]:
    sums: dict[HashedKernel, int] = {}
    for kernel, count in zip(_hashed(report), _counts(report.profile), strict=True):
        if kernel is not None and count:
            sums[kernel] = sums.get(kernel, 0) + count
    for kernel, count in sums.items():
        yield LaunchedKernel(kernel.symbol, kernel.file, kernel.hash, count)


def _counts(profile: Profile) -> list[int]:
    return [profile.launch_counts.get(number, 0) for number in range(len(profile.kernels))]


def _containers(part: CaptureReader) -> Mapping[int, tuple[str, str]]:
    """Returns the container's name or id, and the pod's uid, by pid; "" for what is unknown.

    If a pid was used again in another container, its launches are of several containers.
    """
    found: dict[int, tuple[str, str]] = {}
    for rows in part.tables("process", ("pid", "event", "container", "cgroup", "uid")):
        rows = rows.filter(pa.array(rows_equal(rows["event"], "described")))
        columns = (rows[name].to_pylist() for name in ("pid", "container", "cgroup", "uid"))
        for pid, container, cgroup, uid in zip(*columns, strict=True):
            if container or cgroup or uid is not None:
                place = _plain(container or ""), pod(cgroup or "") or ""
                found[pid] = place if found.get(pid, place) == place else (_SEVERAL, _SEVERAL)
    return found


def _wall_ns(part: CaptureReader) -> int:
    """Returns when a recording began, ns since 1970; 0 if that is unknown."""
    wall = start_wall_ns(part.header)
    return wall if 0 <= wall < min(UNKNOWN_WALL, 1 << 62) else 0


def _aligned_start(part: CaptureReader, interval_ns: int) -> int:
    """Returns when the first interval begins, CLOCK_MONOTONIC ns, so that intervals begin at round wall-clock times."""
    return begun_ns(part.header) - _wall_ns(part) % interval_ns
